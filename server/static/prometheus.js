// Prometheus' text format, read: samples by name, and the few sums that the charts need.

/** Map of name to [{labels, value}]. */
export function samples(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    if (!line || line.startsWith("#")) continue;
    const space = line.lastIndexOf(" ");
    const brace = line.indexOf("{");
    const name = line.slice(0, brace < 0 ? space : brace);
    const labels = brace < 0 ? {} : labelsOf(line.slice(brace + 1, line.lastIndexOf("}")));
    if (!found.has(name)) found.set(name, []);
    found.get(name).push({ labels, value: Number(line.slice(space + 1)) });
  }
  return found;
}

function labelsOf(text) {
  const labels = {};
  let at = 0;
  while (at < text.length) {
    const equals = text.indexOf('="', at);
    if (equals < 0) break;
    let value = "";
    let i = equals + 2;
    for (; i < text.length && text[i] !== '"'; i++) {
      if (text[i] === "\\") value += text[++i] === "n" ? "\n" : text[i];
      else value += text[i];
    }
    labels[text.slice(at, equals)] = value;
    at = i + 2; // the quote and the comma
  }
  return labels;
}

/** One reading of the server's counters and gauges. */
export class Reading {
  constructor(text, time) {
    this.time = time; // seconds
    this.samples = samples(text);
  }

  /** Sum over all labels; null if the server does not tell. */
  value(name) {
    const found = this.samples.get(name);
    return found ? found.reduce((sum, { value }) => sum + value, 0) : null;
  }

  /** Map of a label's values to their samples' values. */
  by(name, label) {
    return new Map((this.samples.get(name) ?? []).map(({ labels, value }) => [labels[label], value]));
  }

  /** Whether it is of the same run of the server as an earlier one: counters never fall, but begin anew with it. */
  continues(before) {
    return ["foretoken:steps_total", "vllm:prompt_tokens_total"].every((name) => this.value(name) >= before.value(name));
  }

  /** The proposers that the server was started with. A request's own prediction is no choice. */
  get proposers() {
    return [...this.by("foretoken:proposer_on", "proposer").keys()].filter((name) => name !== "prediction");
  }
}
