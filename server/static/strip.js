// The live strip: what speculation does for the answer that is being written, or for the last one.

import { byId, el, rate } from "./dom.js";

const NUM_POSITIONS = 8;

export class Strip {
  constructor(sources) {
    this.sources = sources;
    this.withSpeculation = null; // tokens/s, as last measured
    this.without = null;
    this.bars = [];
    for (let position = 1; position <= NUM_POSITIONS; position++) {
      const bar = el("i");
      this.bars.push(bar);
      byId("positions").append(el("span", "position", bar, el("small", "", String(position))));
    }
    this.clear();
  }

  clear() {
    byId("strip").classList.add("empty");
    this.legend(new Map([[null, 0], ...this.sources.names.map((name) => [name, 0])]));
    this.rates();
  }

  /** seconds: since the request was sent, null for an answer of the past. speculates: whether it could be guessed for. */
  show(answer, seconds, speculates) {
    const numTokens = answer.tokens.length;
    if (!numTokens) return;
    byId("strip").classList.remove("empty");
    byId("per-pass").textContent = (numTokens / answer.passes).toFixed(2);
    const kept = answer.keptByPosition;
    this.bars.forEach((bar, i) => bar.style.setProperty("--share", kept[i] ?? 0));
    const spoken = kept.slice(0, NUM_POSITIONS).map((share, i) => `position ${i + 1}: ${Math.round(100 * (share ?? 0))} %`);
    byId("positions").setAttribute("aria-label", `Passes that kept a guess, by its position. ${spoken.join(", ") || "none"}`);
    const measured = answer.metrics?.tokens_per_second ?? (seconds && numTokens / seconds);
    if (measured) this.measured(measured, speculates);
    this.legend(answer.byProposer);
  }

  measured(tokensPerSecond, speculates) {
    if (speculates) this.withSpeculation = tokensPerSecond;
    else this.without = tokensPerSecond;
    this.rates();
  }

  rates() {
    const most = Math.max(this.withSpeculation ?? 0, this.without ?? 0) || 1;
    for (const [id, value] of [["rate-with", this.withSpeculation], ["rate-without", this.without]]) {
      byId(id).textContent = value === null ? "–" : rate(value);
      byId(`${id}-bar`).style.setProperty("--share", (value ?? 0) / most);
    }
  }

  legend(byProposer) {
    const total = [...byProposer.values()].reduce((sum, count) => sum + count, 0);
    const chips = this.sources.sorted(byProposer).map(([name, count]) => this.sources.chip(name, total ? count / total : null));
    byId("legend").replaceChildren(...chips);
  }
}
