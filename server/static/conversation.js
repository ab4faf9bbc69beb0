// The chat that is open: its messages on the screen, the answer that is being written, and what may be done about either.

import { Answer } from "./answer.js";
import { Failure, streamChat } from "./api.js";
import { history, snapshot } from "./chats.js";
import { announce, byId, focusBox, notice } from "./dom.js";
import { ModelMessage, userMessage } from "./message.js";

export class Conversation {
  /** page: {chats, settings, strip, look(), model(), race(messages), askForKey(then), onOtherModel(), onChange()} */
  constructor(page) {
    this.page = page;
    this.transcript = byId("transcript");
    this.chat = page.chats.create();
    this.running = null; // the AbortController of the answer that is being written
    this.elements = new WeakMap(); // of an answer's message: the ModelMessage that shows it
    this.show();
    addEventListener("pagehide", () => this.stop()); // what came so far is there again after a reload
  }

  /** Whether an answer is being written here, or a message of the user's changed. */
  get isBusy() {
    return this.running !== null || this.transcript.querySelector(".editor") !== null;
  }

  open(chat) {
    this.stop();
    this.chat = chat;
    this.show();
    this.page.onChange();
    const last = chat.messages.findLast(({ answer }) => answer?.tokens.length);
    if (last) this.page.strip.show(last.answer, null, last.answer.passes < last.answer.tokens.length);
    else this.page.strip.clear();
  }

  /** All messages anew. */
  show() {
    byId("welcome").hidden = this.chat.messages.length > 0;
    this.transcript.replaceChildren(...this.chat.messages.map((message, i) => this.element(message, i)));
    byId("scroller").scrollTop = this.chat.messages.length ? byId("scroller").scrollHeight : 0;
  }

  /** All messages anew in another form, but one that is being changed; who reads further up stays about there. */
  redraw() {
    const scroller = byId("scroller");
    const place = atEnd() ? 1 : scroller.scrollTop / scroller.scrollHeight;
    [...this.transcript.children].forEach((shown, i) => {
      if (!shown.querySelector(".editor")) shown.replaceWith(this.element(this.chat.messages[i], i));
    });
    scroller.scrollTop = place * scroller.scrollHeight;
  }

  element(message, i) {
    if (message.role === "user") return userMessage(message, this.page.look(), { edit: (text) => this.edit(i, text) });
    const before = () => history(this.chat.messages.slice(0, i));
    const actions = { regenerate: () => this.regenerate(i), race: () => this.page.race(before()) };
    const shown = new ModelMessage(message, this.page.look(), actions);
    this.elements.set(message, shown);
    shown.draw(this.running !== null && message === this.chat.messages.at(-1));
    return shown.element;
  }

  async send(text) {
    this.chat.messages.push({ role: "user", content: text });
    this.transcript.append(this.element(this.chat.messages.at(-1), this.chat.messages.length - 1));
    await this.answer();
  }

  async edit(i, text) {
    this.replaceFrom(i, "The messages after your edit were replaced.");
    await this.send(text);
  }

  async regenerate(i) {
    this.replaceFrom(i, "The answer was replaced.");
    await this.answer();
  }

  /** Drops the messages from the i-th on; for a while that can be undone. */
  replaceFrom(i, what) {
    this.stop();
    const { chat } = this;
    const before = snapshot(chat.messages);
    chat.messages.splice(i);
    this.show();
    const run = () => {
      this.stop();
      chat.messages = before;
      this.page.chats.save(chat);
      this.open(chat);
    };
    notice(what, { text: "Undo", run });
  }

  /** Ends the answer that is being written, if there is one. What came of it is saved here, for its chat may be deleted next. */
  stop() {
    if (this.running) {
      this.running.abort();
      this.running = null;
      this.page.chats.save(this.chat);
    }
    this.page.onChange();
  }

  /** Asks for an answer to what is there, and draws it as it comes. */
  async answer() {
    const { chat, page } = this;
    const { settings, strip } = page;
    const body = settings.request(history(chat.messages));
    const speculates = settings.speculates;
    const message = { role: "assistant", answer: new Answer(), model: page.model(), failure: null };
    const running = (this.running = new AbortController());
    chat.messages.push(message);
    page.chats.save(chat);
    byId("welcome").hidden = true;
    this.transcript.append(this.element(message, chat.messages.length - 1));
    keepFocus();
    page.onChange();
    const start = performance.now();
    const draw = () => {
      const shown = this.elements.get(message);
      if (!shown.element.isConnected) return; // replaced, or another chat is open
      const stays = atEnd();
      shown.draw(this.running === running);
      strip.show(message.answer, (performance.now() - start) / 1000, speculates);
      if (stays) byId("scroller").scrollTop = byId("scroller").scrollHeight;
    };
    const drawing = drawOften(draw);
    draw();
    byId("scroller").scrollTop = byId("scroller").scrollHeight;
    try {
      for await (const chunk of streamChat(body, running.signal)) {
        if (running.signal.aborted) break; // what was on the screen then is the answer
        if (chunk.model && chunk.model !== message.model) {
          message.model = chunk.model; // the server was started again
          page.onOtherModel();
        }
        message.answer.add(chunk);
        drawing.soon();
      }
    } catch (error) {
      if (!(error instanceof Failure)) console.error(error);
      message.failure = failureOf(error);
      if (error.needsKey) page.askForKey(() => this.regenerate(chat.messages.indexOf(message)));
    }
    drawing.end();
    const wasStopped = running.signal.aborted;
    if (this.running === running) this.running = null;
    draw();
    if (!wasStopped) page.chats.save(chat);
    page.onChange();
    announce(spoken(message, wasStopped));
  }
}

function failureOf(error) {
  const known = error instanceof Failure;
  return {
    message: known ? error.message : "The page failed to read the answer.",
    advice: known ? error.advice : `Reload it and try again. (${error})`,
  };
}

function spoken({ answer, failure }, wasStopped) {
  if (failure) return `${answer.content} ${failure.message} ${failure.advice}`;
  return `${wasStopped ? "Stopped" : "Answer"}: ${answer.content || "nothing"}`;
}

/** What was pressed may be gone, and who came by keyboard must be somewhere. */
function keepFocus() {
  const { activeElement } = document;
  const isLost = activeElement === document.body || activeElement.closest("[hidden]");
  if (isLost) focusBox(byId("prompt"));
}

function atEnd() {
  const scroller = byId("scroller");
  return scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 80;
}

/** Draws with the frames of the screen, and less often where drawing takes long: it must not hold up reading. */
function drawOften(draw) {
  let frame = 0;
  let pause = 0;
  const now = () => {
    const start = performance.now();
    draw();
    pause = setTimeout(() => (pause = 0), 4 * (performance.now() - start));
    frame = 0;
  };
  return {
    soon: () => {
      if (!frame && !pause) frame = requestAnimationFrame(now);
    },
    end: () => {
      cancelAnimationFrame(frame);
      clearTimeout(pause);
    },
  };
}

