// Markdown as a tree of blocks over ranges of its source, so that each character of what is shown keeps its token.
// Small on purpose: headings, paragraphs, fences, lists, quotes, rules and tables. Markup in the text stays text.

import { inline } from "./markdown_inline.js";

const MAX_DEPTH = 10;
const LIST = /^(?:[-*+]|\d{1,9}[.)])(?= |$)/;

/**
 * Blocks in order: {type, start, end} with `children` (inline nodes of paragraph and heading, blocks of quote), `level`,
 * `language` and `ranges` (code), `items` [[block]], `first` and `ordered` (list), `head` and `rows` [[[inline node]]] (table).
 */
export function blocks(source) {
  const lines = [];
  for (let start = 0; start <= source.length; ) {
    const end = source.indexOf("\n", start);
    const stop = end < 0 ? source.length : end;
    lines.push({ start, end: stop });
    start = stop + 1;
  }
  return new Blocks(source, lines, 0).all();
}

class Blocks {
  constructor(source, lines, depth) {
    this.source = source;
    this.lines = lines;
    this.depth = depth;
    this.at = 0;
  }

  all() {
    const found = [];
    while (this.at < this.lines.length) {
      if (!this.text(this.at).trim()) {
        this.at++;
        continue;
      }
      const first = this.at;
      const block = this.next();
      found.push({ start: this.lines[first].start, end: this.lines[this.at - 1].end, ...block });
    }
    return found;
  }

  text(i) {
    return i < this.lines.length ? this.source.slice(this.lines[i].start, this.lines[i].end) : "";
  }

  indent(i) {
    const text = this.text(i);
    return text.length - text.trimStart().length;
  }

  /** The line without its first characters. */
  cut(i, size) {
    const { start, end } = this.lines[i];
    return { start: Math.min(start + size, end), end };
  }

  next() {
    const line = this.text(this.at).trim();
    const deeper = this.depth < MAX_DEPTH;
    if (this.fence(this.at)) return this.code();
    if (/^#{1,6}(?: |$)/.test(line)) return this.heading(line);
    if (isRule(line)) {
      this.at++;
      return { type: "rule" };
    }
    if (deeper && line.startsWith(">")) return this.quote();
    if (deeper && LIST.test(line)) return this.list();
    if (this.isTable(this.at)) return this.table();
    return this.paragraph();
  }

  /** The run of backticks or tildes that opens a fence at this line, or "". */
  fence(i) {
    const line = this.text(i).trimStart();
    const mark = line[0];
    if (mark !== "`" && mark !== "~") return "";
    let size = 0;
    while (line[size] === mark) size++;
    return size >= 3 && !(mark === "`" && line.includes("`", size)) ? mark.repeat(size) : "";
  }

  code() {
    const mark = this.fence(this.at);
    const indent = this.indent(this.at);
    const language = this.text(this.at).trim().slice(mark.length).trim().split(" ")[0];
    const ranges = [];
    this.at++;
    while (this.at < this.lines.length) {
      const line = this.text(this.at).trim();
      if (line.startsWith(mark) && !line.slice(mark.length).replaceAll(mark[0], "")) {
        this.at++;
        break;
      }
      const { start, end } = this.cut(this.at, Math.min(indent, this.indent(this.at)));
      ranges.push({ start, end: Math.min(end + 1, this.source.length) }); // with its line break
      this.at++;
    }
    return { type: "code", language, ranges };
  }

  heading(line) {
    const level = line.indexOf(" ") < 0 ? line.length : line.indexOf(" ");
    const range = this.cut(this.at++, this.indent(this.at - 1) + level + 1);
    return { type: "heading", level, children: inline(this.source, [range]) };
  }

  quote() {
    const inner = [];
    while (this.text(this.at).trimStart().startsWith(">")) {
      const indent = this.indent(this.at);
      inner.push(this.cut(this.at, indent + (this.text(this.at)[indent + 1] === " " ? 2 : 1)));
      this.at++;
    }
    return { type: "quote", children: new Blocks(this.source, inner, this.depth + 1).all() };
  }

  list() {
    const base = this.indent(this.at);
    const marker = LIST.exec(this.text(this.at).trim())[0];
    const ordered = marker.length > 1;
    const items = [];
    let loose = false;
    while (this.at < this.lines.length) {
      const found = LIST.exec(this.text(this.at).trim());
      if (!found || found[0].length > 1 !== ordered || this.indent(this.at) > base + 3 || isRule(this.text(this.at).trim())) break;
      const { lines, blank } = this.item(this.indent(this.at) + found[0].length + 1);
      loose ||= blank;
      items.push(new Blocks(this.source, lines, this.depth + 1).all());
    }
    return { type: "list", ordered, first: ordered ? parseInt(marker, 10) : 1, loose, items };
  }

  /** The lines of one item without their indentation, and whether a blank line is between them or before the next item. */
  item(width) {
    const lines = [this.cut(this.at++, width)];
    let blank = false;
    let pending = [];
    while (this.at < this.lines.length) {
      const line = this.text(this.at);
      if (!line.trim()) {
        pending.push(this.cut(this.at++, width));
        continue;
      }
      const inside = this.indent(this.at) >= Math.min(width, 2) && this.indent(this.at) >= width - 1;
      const lazy = !pending.length && !LIST.test(line.trim()) && !this.fence(this.at);
      if (!inside && !lazy) break;
      blank ||= pending.length > 0;
      lines.push(...pending, this.cut(this.at, Math.min(width, this.indent(this.at))));
      pending = [];
      this.at++;
    }
    return { lines, blank: blank || (pending.length > 0 && LIST.test(this.text(this.at).trim())) };
  }

  isTable(i) {
    return this.text(i).includes("|") && isTableRule(this.text(i + 1));
  }

  table() {
    const row = (i) => cells(this.source, this.lines[i]).map((cell) => inline(this.source, [cell]));
    const head = row(this.at);
    const rows = [];
    this.at += 2;
    while (this.text(this.at).includes("|")) rows.push(row(this.at++));
    return { type: "table", head, rows };
  }

  paragraph() {
    const lines = [];
    do {
      lines.push(this.cut(this.at, this.indent(this.at)));
      this.at++;
    } while (this.text(this.at).trim() && !this.interrupts(this.at));
    return { type: "paragraph", children: inline(this.source, lines) };
  }

  interrupts(i) {
    const line = this.text(i).trim();
    return Boolean(this.fence(i)) || /^#{1,6} /.test(line) || line.startsWith(">") || LIST.test(line) || isRule(line) || this.isTable(i);
  }
}

function isRule(line) {
  const marks = line.replaceAll(" ", "");
  return marks.length >= 3 && "-*_".includes(marks[0]) && !marks.replaceAll(marks[0], "");
}

function isTableRule(line) {
  return line.includes("-") && line.includes("|") && !/[^|:\- ]/.test(line);
}

function cells(source, { start, end }) {
  const found = [];
  let from = start;
  for (let i = start; i <= end; i++) {
    if (i < end && (source[i] !== "|" || source[i - 1] === "\\")) continue;
    const text = source.slice(from, i);
    const left = from + text.length - text.trimStart().length;
    const outer = (from === start || i === end) && !text.trim(); // before the first and after the last bar
    if (!outer) found.push({ start: left, end: Math.max(left, from + text.trimEnd().length) });
    from = i + 1;
  }
  return found;
}
