// The box that one writes in. What is typed is kept until it is sent, through reloads and failures too.

import { byId, focusBox, isSending, notice } from "./dom.js";
import { keep, kept } from "./keeping.js";

export class Composer {
  /** page: {isRunning(), send(text), stop(), race(text) -> whether there was something to race with} */
  constructor(page) {
    this.page = page;
    this.box = byId("prompt");
    this.box.value = kept("draft") ?? "";
    this.fit();
    addEventListener("resize", () => this.fit());
    this.box.addEventListener("input", () => this.remember());
    this.box.addEventListener("keydown", (event) => this.onKey(event));
    addEventListener("keydown", (event) => this.onEscape(event)); // at the window, after everything that may want the key
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (page.isRunning()) page.stop();
      else this.send();
    });
    byId("race-open").addEventListener("click", () => {
      if (page.race(this.box.value.trim())) return;
      notice("Write a prompt to race with.");
      this.box.focus();
    });
  }

  onKey(event) {
    if (isSending(event)) {
      event.preventDefault();
      if (!this.page.isRunning()) this.send();
    }
  }

  /** Stops the answer, wherever the key has no other use. */
  onEscape(event) {
    const hasOtherUse = event.defaultPrevented || event.isComposing || event.target.closest("dialog");
    if (event.key === "Escape" && !hasOtherUse && this.page.isRunning()) this.page.stop();
  }

  send() {
    const text = this.box.value;
    if (text.trim()) {
      this.box.value = "";
      this.remember();
      this.page.send(text);
    }
    focusBox(this.box);
  }

  remember() {
    keep("draft", this.box.value);
    this.fit();
  }

  /** As high as what is in it, to a limit. */
  fit() {
    this.box.style.height = "auto";
    this.box.style.height = `${Math.min(this.box.scrollHeight + 2, innerHeight * 0.4)}px`;
  }

  /** isRunning: the button stops the answer instead. */
  show(isRunning) {
    byId("send").textContent = isRunning ? "Stop" : "Send";
    byId("send").classList.toggle("stop", isRunning);
  }
}
