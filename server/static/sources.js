// Who may have said a token, and how each looks. Colours are of a palette that colour-blind people can tell apart; lines differ too.

import { el } from "./dom.js";

// Proposers that many servers have look the same on all of them; the others take what is left, in the order they become known,
// a third one the n-gram cache's.
const FIXED = { ngram: 1, suffix: 2, prediction: 4, ngram_cache: 5 };
const FREE = [0, 3, 5];

export class Sources {
  constructor() {
    this.names = []; // proposers, in the order they became known
  }

  know(names) {
    for (const name of names) if (!this.names.includes(name)) this.names.push(name);
  }

  /** Class of a proposer's tokens; null = the target. */
  styleOf = (proposer) => {
    if (proposer === null) return "of-target";
    this.know([proposer]);
    const others = this.names.filter((name) => FIXED[name] === undefined);
    return `of-${FIXED[proposer] ?? FREE[others.indexOf(proposer) % FREE.length]}`;
  };

  /** [[name or null, tokens]] in the order of the legend: the target, then who guessed. */
  sorted(byProposer) {
    const rank = (name) => (name === null ? -1 : this.names.indexOf(name));
    for (const name of byProposer.keys()) this.styleOf(name);
    return [...byProposer].sort(([a], [b]) => rank(a) - rank(b));
  }

  /** A piece of legend: its look, its name, its share where known. */
  chip(proposer, share = null) {
    const chip = el("li", "chip", el("span", `swatch token ${this.styleOf(proposer)}`), el("span", "", proposer ?? "target"));
    if (share !== null) chip.append(el("span", "share", `${Math.round(100 * share)} %`));
    return chip;
  }
}
