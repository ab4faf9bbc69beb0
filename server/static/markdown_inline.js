// The inline half of markdown: emphasis, code, links. Linear in the text; leaves are ranges of it, so that each character
// keeps its token. Nodes: {type: "text" | "code", ranges}, {type: "strong" | "em" | "del" | "link", children, href}, {type: "br"}.

const MAX_DEPTH = 24;
const WORD = /[\p{L}\p{N}]/u;
const ESCAPABLE = "\\`*_{}[]()#+-.!|~<>\"'$&,/:;=?@^%";

/** Where links may lead; anything else, javascript: above all, is shown as text. */
export function safeLink(href) {
  let url;
  try {
    url = new URL(href);
  } catch {
    return null;
  }
  return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
}

/** lines: [{start, end}] of one paragraph in `source`, in order; what is between them (quote marks, indentation) is left out. */
export function inline(source, lines) {
  return new Inline(source, lines).nodes();
}

class Inline {
  constructor(source, lines) {
    this.source = source;
    this.lines = lines;
    this.starts = []; // of each line in the joined text
    let text = "";
    for (const line of lines) {
      this.starts.push(text.length);
      text += `${source.slice(line.start, line.end)}\n`;
    }
    this.text = text.trimEnd();
    this.at = 0;
    this.plain = 0; // where the text begins that is in no node yet
    this.out = [];
    this.open = []; // {mark, index}: marks in `out` that something may close
    this.brackets = []; // {node, index in `out`, number of open marks before it}
    this.unclosed = new Set(); // lengths of backtick runs that nothing closes
  }

  nodes() {
    while (this.at < this.text.length) this.step();
    this.flush();
    return this.out;
  }

  step() {
    const { text, at } = this;
    const c = text[at];
    if (c === "\\" && ESCAPABLE.includes(text[at + 1] ?? " ")) {
      this.flush();
      this.plain = at + 1;
      this.at = at + 2;
    } else if (c === "\n") this.lineBreak();
    else if (c === "`") this.code();
    else if (c === "*" || c === "_" || (c === "~" && text[at + 1] === "~")) this.mark(c);
    else if (c === "[" || (c === "!" && text[at + 1] === "[")) this.bracket(c === "!" ? 2 : 1);
    else if (c === "]") this.link();
    else if (c === "h" && (text.startsWith("https://", at) || text.startsWith("http://", at))) this.address();
    else this.at++;
  }

  /** Pieces of the source for a range of the joined text. */
  ranges(start, end) {
    const found = [];
    for (let i = this.lineAt(start); i < this.lines.length && this.starts[i] < end; i++) {
      const shift = this.lines[i].start - this.starts[i];
      const stop = Math.min(end, this.starts[i + 1] ?? this.text.length + 1);
      found.push({ start: Math.max(start, this.starts[i]) + shift, end: stop + shift });
    }
    return found;
  }

  lineAt(offset) {
    let [low, high] = [0, this.starts.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= offset) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** The plain text up to `end` becomes a node. */
  flush(end = this.at) {
    if (end > this.plain) this.out.push({ type: "text", ranges: this.ranges(this.plain, end) });
    this.plain = this.at;
  }

  /** Adds a node for the text from here to `end`. */
  add(node, end) {
    this.flush();
    this.out.push(node);
    this.at = this.plain = end;
  }

  lineBreak() {
    const { text, at } = this;
    const hard = text.endsWith("  ", at) || text[at - 1] === "\\";
    if (!hard) {
      this.at++;
      return;
    }
    if (text[at - 1] === "\\") this.flush(at - 1);
    this.add({ type: "br" }, at + 1);
  }

  code() {
    const { text, at } = this;
    let length = 1;
    while (text[at + length] === "`") length++;
    const mark = "`".repeat(length);
    let end = this.unclosed.has(length) ? -1 : text.indexOf(mark, at + length);
    while (end >= 0 && (text[end + length] === "`" || text[end - 1] === "`")) {
      let next = end;
      while (text[next] === "`") next++;
      end = text.indexOf(mark, next);
    }
    if (end < 0) {
      this.unclosed.add(length);
      this.at += length;
      return;
    }
    this.add({ type: "code", ranges: this.ranges(at + length, end) }, end + length);
  }

  mark(c) {
    const { text, at } = this;
    let length = 1;
    while (text[at + length] === c) length++;
    const [before, after] = [text[at - 1] ?? " ", text[at + length] ?? " "];
    const inWord = WORD.test(before) && WORD.test(after);
    const mayOpen = !/\s/.test(after) && !(inWord && (c === "_" || length === 1));
    const mayClose = !/\s/.test(before) && !(inWord && (c === "_" || length === 1));
    let left = length;
    while (left > 0 && mayClose) {
      const index = this.open.findLastIndex(({ mark }) => mark[0] === c && mark.length <= left);
      if (index < 0) break;
      const { mark: opened, index: place } = this.open[index];
      this.flush(this.at);
      this.open.length = index;
      const children = this.out.splice(place + 1);
      this.out[place] = { type: c === "~" ? "del" : opened.length === 2 ? "strong" : "em", children };
      left -= opened.length;
      this.at += opened.length;
      this.plain = this.at;
    }
    while (left > 0) {
      const size = c !== "~" && left % 2 ? 1 : Math.min(2, left); // of three the single one is outside
      if (mayOpen && (c !== "~" || size === 2) && this.open.length < MAX_DEPTH) {
        this.flush();
        this.out.push({ type: "text", ranges: this.ranges(this.at, this.at + size) });
        this.open.push({ mark: c.repeat(size), index: this.out.length - 1 });
        this.plain = this.at + size;
      }
      this.at += size;
      left -= size;
    }
  }

  bracket(size) {
    const { at } = this;
    if (this.brackets.length < MAX_DEPTH) {
      this.flush();
      const node = { type: "text", ranges: this.ranges(at, at + size) };
      this.brackets.push({ node, index: this.out.length, marks: this.open.length });
      this.out.push(node);
      this.plain = at + size;
    }
    this.at += size;
  }

  link() {
    const { text, at } = this;
    const bracket = this.brackets.pop();
    const end = bracket && text[at + 1] === "(" ? this.closing(at + 2) : -1;
    const href = end < 0 ? null : safeLink(text.slice(at + 2, end).split(" ")[0]);
    // Emphasis that closed since may have swallowed the bracket.
    if (!href || this.out[bracket.index] !== bracket.node || bracket.marks > this.open.length) {
      this.at++;
      return;
    }
    this.flush();
    const children = this.out.splice(bracket.index + 1);
    this.open.length = bracket.marks;
    this.out[bracket.index] = { type: "link", href, children };
    this.at = this.plain = end + 1;
  }

  /** Where the link's ")" is, parentheses inside counted; -1 if it is not on this line. */
  closing(from) {
    let depth = 0;
    for (let i = from; i < Math.min(this.text.length, from + 2000); i++) {
      const c = this.text[i];
      if (c === "\n") return -1;
      if (c === "(") depth++;
      else if (c === ")" && depth-- === 0) return i;
    }
    return -1;
  }

  address() {
    const { text, at } = this;
    let end = at;
    while (end < text.length && !/[\s<>"`\]]/.test(text[end])) end++;
    while (/[.,;:!?)'*_~]/.test(text[end - 1])) end--;
    const href = WORD.test(text[at - 1] ?? " ") ? null : safeLink(text.slice(at, end));
    if (!href) {
      this.at += 4;
      return;
    }
    this.add({ type: "link", href, children: [{ type: "text", ranges: this.ranges(at, end) }] }, end);
  }
}
