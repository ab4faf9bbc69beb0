// The list of kept chats at the side: open, export, delete.

import { exported, PREFIX, titleOf } from "./chats.js";
import { button, byId, el, notice } from "./dom.js";

export class ChatList {
  /** onOpen(): a chat was chosen. */
  constructor(chats, conversation, onOpen) {
    this.chats = chats;
    this.conversation = conversation;
    this.onOpen = onOpen;
    byId("new-chat").addEventListener("click", () => this.open(chats.create()));
    addEventListener("storage", ({ key }) => key?.startsWith(PREFIX) && this.follow(key.slice(PREFIX.length)));
  }

  /** Another tab wrote or deleted a chat. If it is the one that is open here, this tab goes on with what the other wrote, unless it is
   * busy: then there are two chats from here on, and nothing is lost. One that is deleted there stays on this screen. */
  follow(id) {
    const { chats, conversation } = this;
    const { chat } = conversation;
    chats.load();
    const theirs = chats.all.find((other) => other.id === chat.id);
    if (theirs && id === chat.id) {
      if (conversation.isBusy) chats.branch(chat);
      else conversation.open(theirs);
    } else if (theirs) chats.all = chats.all.map((other) => (other === theirs ? chat : other));
    this.show();
  }

  show() {
    const list = byId("chat-list");
    const place = [...list.children].findIndex((entry) => entry.contains(document.activeElement));
    const focused = list.children[place]?.dataset.chat;
    list.replaceChildren(
      ...this.chats.all.map((chat) => {
        const title = titleOf(chat);
        const opening = button(title, "chat-title", () => this.open(chat));
        opening.dir = "auto";
        if (chat === this.conversation.chat) opening.setAttribute("aria-current", "true");
        const saving = button("Export", "plain", () => download(chat), `Export ${title}`);
        const deleting = button("Delete", "plain", () => this.remove(chat), `Delete ${title}`);
        const entry = el("li", "", opening, el("span", "actions", saving, deleting));
        entry.dataset.chat = chat.id;
        return entry;
      }),
    );
    if (place < 0) return;
    // Who is in the list by keyboard stays at the same chat; if it was deleted, at the one that took its place.
    const entry = [...list.children].find(({ dataset }) => dataset.chat === focused) ?? list.children[Math.min(place, list.children.length - 1)];
    (entry?.querySelector("button") ?? byId("new-chat")).focus();
  }

  open(chat) {
    if (chat !== this.conversation.chat) this.conversation.open(chat);
    this.onOpen();
  }

  remove(chat) {
    if (chat === this.conversation.chat) this.conversation.open(this.chats.create());
    this.chats.remove(chat);
    this.show();
    const run = () => {
      this.chats.save(chat);
      this.open(chat);
    };
    notice("Chat deleted.", { text: "Undo", run });
  }
}

function download(chat) {
  const link = el("a");
  link.href = URL.createObjectURL(new Blob([exported(chat)], { type: "application/json" }));
  link.download = `${titleOf(chat).replaceAll(/[^\p{L}\p{N}]+/gu, "-")}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
