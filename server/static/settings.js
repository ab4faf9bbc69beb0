// What is asked of the server besides the messages: the system prompt, sampling, speculation. Kept in the browser.

import { byId, el } from "./dom.js";
import { keep, kept } from "./keeping.js";

const NUMBERS = [
  ["temperature", "Temperature", "0: always the likeliest", 0, 2, 0.1],
  ["top_p", "Top p", "share kept, 0 to 1", 0, 1, 0.05],
  ["top_k", "Top k", "candidates kept", 0, 1000, 1],
  ["min_p", "Min p", "against the likeliest", 0, 1, 0.01],
  ["max_tokens", "Longest answer", "tokens", 1, 1000000, 1],
  ["seed", "Seed", "repeats an answer", 0, 2 ** 31, 1],
  ["repetition_penalty", "Repetition penalty", "1 is none", 0, 2, 0.05],
  ["presence_penalty", "Presence penalty", "0 is none", -2, 2, 0.1],
  ["frequency_penalty", "Frequency penalty", "0 is none", -2, 2, 0.1],
];

export class Settings {
  constructor() {
    this.values = stored();
    this.fields = new Map();
    this.build();
    byId("settings-reset").addEventListener("click", () => {
      const { system, model } = this.values; // written by hand, and who is spoken to, unlike the rest
      this.values = { system, model };
      for (const [name, field] of this.fields) field.value = this.values[name] ?? "";
      keep("settings", JSON.stringify(this.values));
    });
  }

  build() {
    const numbers = byId("settings-sampling");
    for (const [name, label, hint, min, max, step] of NUMBERS) {
      const input = el("input");
      Object.assign(input, { type: "number", min, max, step, placeholder: "default" });
      numbers.append(this.field(name, label, hint, input));
    }
    const stop = el("textarea");
    stop.rows = 2;
    numbers.append(this.field("stop", "Stop at", "one text a line", stop, "tall"));
    const system = el("textarea");
    system.rows = 4;
    system.dir = "auto";
    system.placeholder = "What the model should be and do";
    this.chosen = el("select");
    byId("settings-system").append(
      this.field("model", "Model", "the server's own, or with an adapter", this.chosen, "tall"),
      this.field("system", "System prompt", "", system, "tall"),
    );
    this.showModels([]);
    this.method = el("select");
    const { method = "" } = this.values; // what the server has is not known yet: the choice stands until it is
    this.showProposers(["", "off"].includes(method) ? [] : [method]);
    const ceiling = el("input");
    Object.assign(ceiling, { type: "number", min: 1, max: 64, step: 1, placeholder: "as pays" });
    byId("settings-speculation").append(
      this.field("method", "Who guesses", "", this.method, "tall"),
      this.field("num_speculative_tokens", "Most guesses at once", "", ceiling),
    );
  }

  field(name, label, hint, control, className = "") {
    control.id = `setting-${name}`;
    control.value = this.values[name] ?? "";
    control.addEventListener("input", () => {
      this.values[name] = control.value;
      keep("settings", JSON.stringify(this.values));
    });
    this.fields.set(name, control);
    const text = el("label", "", label);
    text.htmlFor = control.id;
    const note = el("small", "", hint);
    if (hint) {
      note.id = `${control.id}-hint`;
      control.setAttribute("aria-describedby", note.id);
    }
    return el("div", `field ${className}`, el("div", "", text, note), control);
  }

  /** The models that the server has, its own first; a choice where there are several. */
  showModels(names) {
    this.chosen.replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.length && !names.includes(this.values.model)) this.values.model = ""; // one of another server
    this.chosen.value = this.values.model || names[0] || "";
    this.chosen.closest(".field").hidden = names.length < 2;
  }

  /** The name that is asked for; "" where that is left to the server. */
  get model() {
    return this.values.model ?? "";
  }

  /** The proposers that the server has, for the choice. */
  showProposers(names) {
    const choices = [["", "whoever pays most"], ...names.map((name) => [name, `${name} first`]), ["off", "nobody: no speculation"]];
    this.method.replaceChildren(...choices.map(([value, text]) => new Option(text, value)));
    this.method.value = this.values.method ?? "";
    if (this.method.selectedIndex < 0) this.method.value = this.values.method = ""; // a proposer of another server
  }

  get speculates() {
    return this.values.method !== "off";
  }

  /** The body of a chat completion. history: [{role, content}]. Empty fields are left to the server. */
  request(history) {
    const { system = "", stop = "", method = "", num_speculative_tokens: ceiling = "" } = this.values;
    const body = {
      messages: [...(system.trim() ? [{ role: "system", content: system }] : []), ...history],
      logprobs: true,
      stream_options: { include_usage: true, include_speculation: true },
      speculation: { method: method || "auto" },
    };
    if (ceiling !== "" && method !== "off") body.speculation.num_speculative_tokens = Number(ceiling);
    for (const [name] of NUMBERS) {
      if ((this.values[name] ?? "") !== "") body[name] = Number(this.values[name]);
    }
    if (this.model) body.model = this.model;
    const stops = stop.split("\n").filter(Boolean);
    if (stops.length) body.stop = stops;
    return body;
  }
}

function stored() {
  try {
    const values = JSON.parse(kept("settings")) ?? {};
    return Object.fromEntries(Object.entries(values).filter(([, value]) => typeof value === "string"));
  } catch {
    return {};
  }
}
