// Small charts as SVG: lines over the last minutes, and bars. Each says its latest values in words, too.

import { el, svg } from "./dom.js";

const WIDTH = 240;
const HEIGHT = 72;

/** A card with a title, the latest values in large figures, and a drawing. */
class Card {
  constructor(parent, title, note) {
    this.figures = el("p", "figures");
    this.drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title });
    const frame = el("div", "frame", this.drawing);
    this.footer = el("div", "scale");
    this.title = title;
    parent.append(el("section", "card", el("h3", "", title), this.figures, frame, this.footer, el("p", "note", note)));
  }

  /** texts: [[figure, unit, class]] */
  figure(texts) {
    this.figures.replaceChildren(...texts.map(([value, unit, look]) => el("span", look ?? "", el("b", "", value), ` ${unit}`)));
    this.drawing.setAttribute("aria-label", `${this.title}: ${texts.map(([value, unit]) => `${value} ${unit}`).join(", ")}`);
  }
}

/** Lines of several series; gaps where there is no value. */
export class LineChart extends Card {
  /** span: seconds from the left edge to the right one. most: the top of the scale where it is known. */
  constructor(parent, { title, note, span, most = null }) {
    super(parent, title, note);
    this.span = span;
    this.most = most;
    this.footer.append(el("span", "", `${Math.round(span / 60)} min ago`), el("span", "", "now"));
    this.top = el("span", "top");
    this.drawing.parentElement.append(this.top);
  }

  /** lines: [[{time, value or null}]], the first with its area filled. show(value) -> text of the scale's top. */
  draw(lines, now, show) {
    const values = lines.flat().map(({ value }) => value ?? 0);
    const top = this.most ?? niceTop(Math.max(...values, 0));
    const x = (time) => WIDTH - ((now - time) / this.span) * WIDTH;
    const y = (value) => HEIGHT - 2 - (value / top) * (HEIGHT - 6);
    const paths = lines.flatMap((points, i) => {
      const strokes = runs(points).map((run) => run.map(({ time, value }, k) => `${k ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`).join(""));
      const line = svg("path", { class: `line line-${i}`, d: strokes.join("") });
      if (i) return [line];
      const areas = runs(points).map((run, k) => `${strokes[k]}L${x(run.at(-1).time).toFixed(1)} ${HEIGHT}L${x(run[0].time).toFixed(1)} ${HEIGHT}Z`);
      return [svg("path", { class: "area", d: areas.join("") }), line];
    });
    this.drawing.replaceChildren(svg("path", { class: "grid", d: `M0 ${y(top)}H${WIDTH}M0 ${y(top / 2)}H${WIDTH}` }), ...paths);
    this.top.textContent = show(top);
  }
}

/** Bars of shares from 0 to 1, numbered from 1. */
export class BarChart extends Card {
  draw(shares) {
    const step = WIDTH / Math.max(shares.length, 5);
    const bars = shares.map((share, i) => {
      const height = Math.max(1, share * (HEIGHT - 4));
      return svg("rect", { class: "bar", x: i * step + step * 0.12, y: HEIGHT - height, width: step * 0.76, height, rx: 2 });
    });
    this.drawing.replaceChildren(svg("path", { class: "grid", d: `M0 2H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}` }), ...bars);
    this.footer.classList.add("positions-scale");
    this.footer.replaceChildren(...Array.from({ length: Math.max(shares.length, 5) }, (_, i) => el("span", "", String(i + 1))));
  }
}

/** The points between gaps. */
function runs(points) {
  const found = [];
  let run = [];
  for (const point of points) {
    if (point.value === null) {
      if (run.length) found.push(run);
      run = [];
    } else run.push(point);
  }
  if (run.length) found.push(run);
  return found;
}

/** The next of 1, 2, 5, 10, ...; 1 for nothing at all. */
function niceTop(value) {
  const power = value > 0 ? 10 ** Math.floor(Math.log10(value)) : 1;
  return [1, 2, 5, 10].map((factor) => factor * power).find((top) => top >= value) ?? 10 * power;
}
