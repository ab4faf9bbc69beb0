// What there is to know of one token, beside it: under the pointer, or, by keyboard, while the token has the focus.
// A message is one stop of the Tab key; arrow keys go from token to token.

import { byId, el } from "./dom.js";
import { answersShown } from "./rendering.js";

export class Inspector {
  constructor() {
    this.tip = byId("token-tip");
    this.asked = null;
    document.addEventListener("pointerover", (event) => this.show(tokenAt(event.target)));
    document.addEventListener("focusin", (event) => this.show(tokenAt(event.target)));
    document.addEventListener("focusout", () => this.show(null));
    document.addEventListener("scroll", () => this.place(), { capture: true, passive: true });
    document.addEventListener("keydown", (event) => this.move(event));
  }

  show(token) {
    token ??= tokenAt(document.activeElement);
    if (token === this.asked) return;
    this.asked?.removeAttribute("aria-describedby");
    this.asked = token;
    const holder = token?.closest(".tokens");
    const answer = holder && answersShown.get(holder);
    this.tip.hidden = !answer;
    if (!answer) return;
    this.tip.replaceChildren(...told(answer, Number(token.dataset.index)));
    token.setAttribute("aria-describedby", this.tip.id);
    // Where an open dialog covers the page, the tip must be in it to be seen.
    (token.closest("dialog") ?? document.body).append(this.tip);
    this.place();
  }

  place() {
    const box = this.tip.hidden ? null : this.asked?.getClientRects()[0];
    if (!box) return;
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    const left = Math.max(8, Math.min(box.left + box.width / 2 - width / 2, innerWidth - width - 8));
    const top = box.top - height - 8 > 8 ? box.top - height - 8 : box.bottom + 8;
    this.tip.style.left = `${left}px`;
    this.tip.style.top = `${top}px`;
  }

  move(event) {
    const token = tokenAt(event.target);
    const holder = token?.closest(".tokens");
    if (!holder) return;
    if (event.key === "Escape" && !this.tip.hidden) {
      this.asked?.removeAttribute("aria-describedby");
      this.tip.hidden = true;
      event.preventDefault();
      return;
    }
    const all = [...holder.querySelectorAll(".token")];
    const at = all.indexOf(token);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined || !all[to]) return;
    event.preventDefault();
    token.tabIndex = -1;
    all[to].tabIndex = 0;
    all[to].focus();
  }
}

/** Makes the first token of this element its one stop of the Tab key. */
export function reachable(holder) {
  const first = holder.querySelector(".token");
  if (first && !holder.querySelector(".token[tabindex='0']")) first.tabIndex = 0;
}

function tokenAt(target) {
  return target instanceof Element && document.documentElement.classList.contains("coloured") ? target.closest(".tokens .token") : null;
}

function told(answer, index) {
  const { start, end, proposer, position, logprob } = answer.tokens[index];
  const kept = position ? answer.keptWith(index) : 0;
  const who = proposer === null ? "said by the target itself" : `guessed by ${proposer}`;
  const where = proposer === null ? whyTarget(answer, index) : `guess ${position} of ${kept} kept in its draft`;
  const lines = [el("strong", "", quoted(answer.text.slice(start, end))), el("span", "", who), el("span", "", where)];
  if (logprob !== null) lines.push(el("span", "", `probability ${percent(Math.exp(logprob))}`));
  return lines;
}

function whyTarget(answer, index) {
  const before = answer.tokens[index - 1];
  return before?.position ? `after ${before.position} kept ${before.position === 1 ? "guess" : "guesses"}` : "no guess kept here";
}

function quoted(text) {
  return `“${text.replaceAll("\n", "↵").replaceAll(" ", "␣").replaceAll("\t", "⇥")}”`;
}

function percent(share) {
  if (share > 0.9995) return "over 99.9 %";
  return share < 0.001 ? "under 0.1 %" : `${(100 * share).toFixed(1)} %`;
}
