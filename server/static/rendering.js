// A text on the screen: markdown or as it is, every token a span of its own that knows which one it is.
// Streams are drawn again and again: blocks that did not change keep their elements.

import { button, copy, el } from "./dom.js";
import { blocks } from "./markdown.js";

const INLINE = { strong: "strong", em: "em", del: "del" };

/** answers by the element that shows them, for whoever is asked about a token */
export const answersShown = new WeakMap();

export class Rendering {
  /** markdown: whether markup is applied. styleOf(proposer) -> class of its tokens. */
  constructor(container, { markdown, styleOf }) {
    this.container = container;
    this.markdown = markdown;
    this.styleOf = styleOf;
    this.shown = []; // {key, element} of the blocks, in order
  }

  /** from: where in the answer's text this part begins; to: where it ends. */
  update(answer, from = 0, to = answer.text.length) {
    this.answer = answer;
    this.source = answer.text.slice(0, to);
    this.from = from;
    answersShown.set(this.container, answer);
    const parts = this.markdown
      ? blocks(this.source.slice(from)).map((block) => ({ ...block, shift: from }))
      : [{ type: "plain", start: 0, end: to - from, shift: from }];
    parts.forEach((part, i) => {
      const key = `${part.type} ${part.start} ${part.end} ${Math.min(part.end + from, answer.placed)}`;
      if (this.shown[i]?.key === key && i < parts.length - 1) return;
      const element = this.block(part);
      if (part.type !== "code") element.dir = "auto"; // by its first letter; what is in it follows
      if (this.shown[i]) this.shown[i].element.replaceWith(element);
      else this.container.append(element);
      this.shown[i] = { key, element };
    });
    for (const { element } of this.shown.splice(parts.length)) element.remove();
  }

  block(part) {
    switch (part.type) {
      case "plain": {
        const whole = el("div", "plain-text");
        this.leaf(whole, [{ start: 0, end: part.end }]);
        return whole;
      }
      case "heading":
        return this.inlines(el(`h${Math.min(part.level + 2, 6)}`), part.children); // below the page's own
      case "code":
        return this.code(part);
      case "rule":
        return el("hr");
      case "quote":
        return el("blockquote", "", ...part.children.map((child) => this.block(child)));
      case "list":
        return this.list(part);
      case "table":
        return this.table(part);
      default:
        return this.inlines(el("p"), part.children);
    }
  }

  list({ ordered, first, loose, items }) {
    const list = el(ordered ? "ol" : "ul");
    if (ordered && first !== 1) list.start = first;
    for (const item of items) {
      const entry = el("li");
      for (const block of item) {
        if (block.type === "paragraph" && !loose) this.inlines(entry, block.children);
        else entry.append(this.block(block));
      }
      list.append(entry);
    }
    return list;
  }

  table({ head, rows }) {
    const row = (name, cells) => el("tr", "", ...cells.map((cell) => this.inlines(el(name), cell)));
    const table = el("table", "", el("thead", "", row("th", head)), el("tbody", "", ...rows.map((cells) => row("td", cells))));
    return el("div", "wide", table);
  }

  code({ language, ranges }) {
    const code = el("code");
    this.leaf(code, ranges);
    const pre = el("pre", "", code);
    pre.dir = "ltr";
    pre.tabIndex = 0; // may be wider than the page: arrow keys scroll it
    pre.setAttribute("role", "group");
    pre.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
    const copying = button("Copy", "plain", () => copy(code.textContent, copying), "Copy code");
    return el("div", "code", el("div", "code-head", el("span", "", language || "text"), copying), pre);
  }

  inlines(parent, nodes) {
    for (const node of nodes) {
      if (node.type === "text") this.leaf(parent, node.ranges);
      else if (node.type === "br") parent.append(el("br"));
      else if (node.type === "code") {
        const code = el("code");
        this.leaf(code, node.ranges);
        parent.append(code);
      } else if (node.type === "link") {
        const link = this.inlines(el("a"), node.children);
        link.href = node.href;
        link.target = "_blank";
        link.rel = "noopener noreferrer nofollow";
        parent.append(link);
      } else parent.append(this.inlines(el(INLINE[node.type]), node.children));
    }
    return parent;
  }

  /** Text of these ranges, cut where tokens meet. */
  leaf(parent, ranges) {
    const { tokens } = this.answer;
    for (const range of ranges) {
      const end = range.end + this.from;
      let at = range.start + this.from;
      for (let i = firstAfter(tokens, at); at < end; i++) {
        const token = tokens[i];
        if (!token) {
          parent.append(this.source.slice(at, end)); // of unknown origin, or not told yet
          break;
        }
        const stop = Math.min(end, token.end);
        if (stop <= at) continue;
        const span = el("span", `token ${this.styleOf(token.proposer)}`, this.source.slice(at, stop));
        span.dataset.index = i;
        parent.append(span);
        at = stop;
      }
    }
  }
}

/** Index of the first token that ends after this place. */
function firstAfter(tokens, offset) {
  let [low, high] = [0, tokens.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (tokens[middle].end > offset) high = middle;
    else low = middle + 1;
  }
  return low;
}
