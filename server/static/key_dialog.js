// The dialog that asks for the server's API key. It is kept for this tab only, and checked before anybody goes on.

import { canBeKey, Failure, get, setKey } from "./api.js";
import { byId } from "./dom.js";

export class KeyDialog {
  /** onKey() is called once the key is right, before those that waited for it. */
  constructor(onKey) {
    this.onKey = onKey;
    this.waiting = [];
    byId("key-cancel").addEventListener("click", () => byId("key").close());
    byId("key").addEventListener("close", () => (this.waiting = []));
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.check();
    });
  }

  /** Asks, and goes on with `then` once the key is right. */
  ask(then) {
    this.waiting.push(then);
    if (byId("key").open) return;
    byId("key-wrong").hidden = true; // what was said of an earlier try
    byId("key").showModal();
  }

  async check() {
    const wrong = byId("key-wrong");
    const key = byId("key-input").value.trim();
    try {
      if (!canBeKey(key)) throw new Failure("", "", { needsKey: true });
      setKey(key);
      await get("v1/models");
    } catch (error) {
      wrong.textContent = error.needsKey ? "That was not the key. Check for missing characters." : `${error.message} ${error.advice}`;
      wrong.hidden = false;
      return;
    }
    wrong.hidden = true;
    byId("key-input").value = "";
    const { waiting } = this;
    byId("key").close();
    await this.onKey();
    for (const then of waiting) then();
  }
}
