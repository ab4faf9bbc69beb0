// The list of kept chats at the side: open, export, delete.

import { exported, titleOf } from "./chats.js";
import { button, byId, el, notice } from "./dom.js";

export class ChatList {
  /** onOpen(): a chat was chosen. */
  constructor(chats, conversation, onOpen) {
    this.chats = chats;
    this.conversation = conversation;
    this.onOpen = onOpen;
    byId("new-chat").addEventListener("click", () => this.open(chats.create()));
    addEventListener("storage", (event) => {
      if (!event.key?.startsWith("foretoken.chat.")) return;
      const { chat } = conversation; // what another tab did to it does not touch what is on this screen
      chats.load();
      chats.all = chats.all.map((other) => (other.id === chat.id ? chat : other));
      this.show();
    });
  }

  show() {
    byId("chat-list").replaceChildren(
      ...this.chats.all.map((chat) => {
        const title = titleOf(chat);
        const opening = button(title, "chat-title", () => this.open(chat));
        if (chat === this.conversation.chat) opening.setAttribute("aria-current", "true");
        const saving = button("Export", "plain", () => download(chat), `Export ${title}`);
        const deleting = button("Delete", "plain", () => this.remove(chat), `Delete ${title}`);
        return el("li", "", opening, el("span", "actions", saving, deleting));
      }),
    );
  }

  open(chat) {
    this.conversation.open(chat);
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
