// The race: one prompt with and without speculation. Each run is alone on the server, since two in one batch would share its
// steps; then both are shown side by side, pass by pass, as slowly as one likes.

import { Answer } from "./answer.js";
import { streamChat } from "./api.js";
import { byId, el, rate, seconds } from "./dom.js";
import { reachable } from "./inspector.js";
import { timeOf } from "./message.js";
import { Rendering } from "./rendering.js";

const ROUNDS = 5;
const ENOUGH_S = 2; // measured; a short answer is run again until then, for one run alone says little
const REPLAY_S = 7;

/** One side: a clock, figures and the text. */
class Lane {
  constructor(name, look) {
    const part = (what) => byId(`race-${name}-${what}`);
    this.clock = part("clock");
    this.facts = part("facts");
    this.text = part("text");
    this.section = part("lane");
    this.look = look;
    this.runs = [];
    this.clear();
  }

  clear() {
    this.text.replaceChildren();
    this.rendering = new Rendering(this.text, this.look);
    this.clock.textContent = "0.000 s";
    this.facts.textContent = "";
    this.section.classList.remove("won");
  }

  draw(answer, elapsed) {
    this.clock.textContent = `${elapsed.toFixed(3)} s`;
    const tokens = answer.tokens.length;
    if (tokens) this.facts.textContent = `${tokens} tokens · ${(tokens / answer.passes).toFixed(2)} per pass`;
    this.rendering.update(answer);
    this.text.scrollTop = this.text.scrollHeight;
  }

  /** The run of the median time. */
  get run() {
    return [...this.runs].sort((a, b) => a.time - b.time)[(this.runs.length - 1) >> 1];
  }

  /** elapsed: seconds since its start, of the run itself. */
  replay(elapsed) {
    const { answer, time } = this.run;
    const first = answer.metrics.time_to_first_token_ms / 1000;
    const spread = (time - first) / Math.max(answer.passes - 1, 1);
    const passes = elapsed < first ? 0 : Math.min(answer.passes, 1 + Math.floor((elapsed - first) / Math.max(spread, 1e-9) + 1e-6));
    this.draw(answer.prefix(elapsed >= time ? answer.tokens.length : answer.afterPass(passes) * (passes > 0)), Math.min(elapsed, time));
    return elapsed >= time;
  }

  done() {
    const { answer, time } = this.run;
    this.draw(answer, time);
    this.facts.textContent += ` · ${rate(answer.tokens.length / time)} tokens/s`;
    reachable(this.text);
  }
}

export class Race {
  /** page: {settings, strip, sources, look(), askForKey(then)} */
  constructor(page) {
    this.page = page;
    this.dialog = byId("race");
    this.verdict = byId("race-verdict");
    this.running = null;
    this.frame = 0;
    byId("race-again").addEventListener("click", () => this.start(this.history));
    byId("race-replay").addEventListener("click", () => this.replay());
    byId("race-stop").addEventListener("click", () => this.running?.abort());
    byId("race-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => {
      this.running?.abort();
      cancelAnimationFrame(this.frame);
    });
  }

  /** history: messages as the server takes them, the last one the user's. */
  async start(history) {
    this.history = history;
    this.running?.abort();
    cancelAnimationFrame(this.frame);
    const running = (this.running = new AbortController());
    this.lanes = ["with", "without"].map((name) => new Lane(name, this.page.look()));
    [this.guessing, this.plain] = this.lanes;
    byId("race-legend").replaceChildren();
    byId("race-prompt").textContent = history.at(-1).content;
    this.state("running");
    if (!this.dialog.open) this.dialog.showModal();
    try {
      await this.rounds(this.page.settings.request(history), running);
      if (!running.signal.aborted) this.finish();
      else if (this.running === running) this.say("Stopped.");
    } catch (error) {
      if (this.running === running) {
        this.say(`${error.message} ${error.advice ?? ""}`);
        if (error.needsKey) this.page.askForKey(() => this.start(history));
      }
    }
    if (this.running === running) {
      this.state(this.lanes.every(({ run }) => run) ? "done" : "stopped");
      this.running = null;
      if (this.lanes.every(({ run }) => run) && this.pace > 1 && !matchMedia("(prefers-reduced-motion: reduce)").matches) this.replay();
    }
  }

  async rounds(request, running) {
    const seed = request.seed ?? Math.floor(Math.random() * 2 ** 31); // one for both: then only speculation differs
    const method = request.speculation.method === "off" ? "auto" : request.speculation.method;
    const sides = [
      [this.guessing, { ...request.speculation, method }],
      [this.plain, { method: "off" }],
    ];
    for (let round = 0, measured = 0; round < ROUNDS && measured < ENOUGH_S; round++) {
      this.say(round ? `Measuring again: round ${round + 1} of up to ${ROUNDS}.` : "Running, one after the other.");
      for (const [lane, speculation] of round % 2 ? sides.toReversed() : sides) {
        // A salt of its own: no run finds the prompt in the cache of another.
        const salt = `race-${Math.random().toString(36).slice(2)}`;
        const run = await this.one(lane, { ...request, seed, speculation, cache_salt: salt }, running, round === 0);
        if (running.signal.aborted) return;
        lane.runs.push(run);
        measured += run.time;
      }
    }
  }

  async one(lane, request, running, isShown) {
    const answer = new Answer();
    const start = performance.now();
    let isOver = false;
    const draw = () => {
      if (isOver) return;
      lane.draw(answer, (performance.now() - start) / 1000);
      requestAnimationFrame(draw);
    };
    if (isShown) draw();
    try {
      for await (const chunk of streamChat(request, running.signal)) answer.add(chunk);
    } finally {
      isOver = true;
    }
    const time = answer.metrics ? timeOf(answer.metrics) : (performance.now() - start) / 1000;
    if (isShown) lane.draw(answer, time);
    return { answer, time };
  }

  finish() {
    for (const lane of this.lanes) lane.done();
    const [fast, slow] = [this.guessing.run, this.plain.run];
    const ratio = slow.time / fast.time;
    (ratio >= 1 ? this.guessing : this.plain).section.classList.add("won");
    this.page.strip.measured(fast.answer.tokens.length / fast.time, true);
    this.page.strip.measured(slow.answer.tokens.length / slow.time, false);
    byId("race-legend").replaceChildren(...this.page.sources.sorted(fast.answer.byProposer).map(([name]) => this.page.sources.chip(name)));
    const texts = [...this.guessing.runs, ...this.plain.runs].map(({ answer }) => answer.text);
    const rounds = this.plain.runs.length;
    const times = `${seconds(fast.time)} against ${seconds(slow.time)}${rounds > 1 ? `, the median of ${rounds} rounds` : ""}`;
    const speed = ratio >= 1 ? `${ratio.toFixed(2)} times as fast with speculation` : `slower with speculation this time, ${ratio.toFixed(2)} times the speed`;
    this.say(el("strong", "", sameness(texts)), ` It was ${speed}: ${times}.`);
  }

  /** How many times slower than it was a replay runs. */
  get pace() {
    return Math.max(1, Math.round(REPLAY_S / this.plain.run.time));
  }

  /** Both sides at once, from what was measured. */
  replay() {
    const { pace } = this;
    const start = performance.now();
    this.state("replaying");
    byId("race-pace").textContent = pace > 1 ? `Replay, ${pace} times slower: each step is one pass of the target.` : "Replay: each step is one pass of the target.";
    for (const lane of this.lanes) lane.rendering = (lane.text.replaceChildren(), new Rendering(lane.text, lane.look));
    cancelAnimationFrame(this.frame);
    const draw = () => {
      const elapsed = (performance.now() - start) / 1000 / pace;
      const ended = this.lanes.map((lane) => lane.replay(elapsed));
      if (!ended.includes(false)) {
        for (const lane of this.lanes) lane.done();
        this.state("done");
      } else this.frame = requestAnimationFrame(draw);
    };
    draw();
  }

  /** A live region of the dialog's own: outside of an open one nothing is heard. */
  say(...parts) {
    this.verdict.replaceChildren(...parts);
  }

  /** running, replaying, done or stopped */
  state(name) {
    this.dialog.dataset.state = name;
    byId("race-again").disabled = name === "running";
    byId("race-replay").disabled = name !== "done" && name !== "replaying";
    byId("race-stop").hidden = name !== "running";
    if (name !== "replaying") byId("race-pace").textContent = "";
  }
}

function sameness([first, ...others]) {
  const other = others.find((text) => text !== first);
  if (other === undefined) return `The texts are the same, all ${first.length} characters.`;
  let at = 0;
  while (first[at] === other[at]) at++;
  return `The texts differ from character ${at + 1} on; they are equal unless the server runs a lossy rule or rounds differently by batch.`;
}
