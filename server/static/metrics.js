// The second tab: what the server does now, drawn from /metrics, which is read once a second while the tab is open.

import { get } from "./api.js";
import { BarChart, LineChart } from "./charts.js";
import { byId, el, rate, seconds } from "./dom.js";
import { Reading } from "./prometheus.js";

const EVERY_MS = 1000;
const SPAN_S = 120;
const RECENT_S = 15;
const LONGEST_GAP_S = 5; // a longer one is not bridged: nobody looked

const REASONS = {
  slower: "it would be slower: the guesses would cost more than they bring",
  "batch size": "so many requests run that guesses would not pay",
  "no proposer configured": "the server was started without a proposer",
};

export class MetricsView {
  /** onReading(reading) hears each reading; onRestart() that the server is another than it was. */
  constructor(onReading, onRestart) {
    this.onReading = onReading;
    this.onRestart = onRestart;
    this.readings = [];
    this.timer = 0;
    this.polling = null; // the AbortController of what is read while the tab is open
    const grid = byId("charts");
    const line = (title, note, most = null) => new LineChart(grid, { title, note, span: SPAN_S, most });
    this.rates = line("Tokens per second", "Generated, and taken in as prompts (dashed).");
    this.perPass = line("Tokens per target pass", "1 is what a pass gives without guesses.");
    this.acceptance = line("Guesses kept", "Accepted over verified draft tokens.", 1);
    this.positions = new BarChart(grid, "Kept by position", "Share of the drafts that kept a guess at this position.");
    this.requests = line("Requests", "Running, and waiting (dashed).");
    this.cache = line("KV cache in use", "Share of the blocks that hold running requests.", 1);
    this.latency = line("Time to first token", "Mean of the requests of that second.");
    this.gaps = line("Time per token", "Mean gap between an answer's tokens.");
  }

  start() {
    this.stop();
    this.polling = new AbortController();
    this.poll(this.polling.signal);
  }

  stop() {
    this.polling?.abort();
    clearTimeout(this.timer);
  }

  async poll(signal) {
    const started = performance.now();
    if (!document.hidden) {
      try {
        const reading = new Reading(await get("metrics", signal), performance.now() / 1000);
        if (this.readings.length && !reading.continues(this.readings.at(-1))) {
          this.readings = [];
          this.onRestart();
        }
        this.readings = [...this.readings.filter(({ time }) => reading.time - time < SPAN_S + LONGEST_GAP_S), reading];
        byId("metrics-failure").hidden = true;
        this.onReading(reading);
        this.draw();
      } catch (error) {
        if (signal.aborted) return;
        byId("metrics-failure").hidden = false;
        byId("metrics-failure").textContent = `${error.message} ${error.advice ?? ""} The charts go on as soon as it answers.`;
      }
    }
    if (!signal.aborted) this.timer = setTimeout(() => this.poll(signal), Math.max(0, EVERY_MS - (performance.now() - started)));
  }

  /** [{time, value}] of what `of` makes of two readings that follow each other; null where it cannot say. */
  series(of) {
    return this.readings.slice(1).map((now, i) => {
      const before = this.readings[i];
      const elapsed = now.time - before.time;
      return { time: now.time, value: elapsed > LONGEST_GAP_S ? null : of(now, before, elapsed) };
    });
  }

  draw() {
    const latest = this.readings.at(-1);
    this.drawState(latest);
    this.drawProposers(latest);
    const { time } = latest;
    const gain = (name) => (now, before) => now.value(name) - before.value(name);
    const perSecond = (name) => this.series((now, before, elapsed) => gain(name)(now, before) / elapsed);
    const [generated, accepted, drafted] = ["vllm:generation_tokens_total", "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"].map(gain);

    const [out, taken] = [perSecond("vllm:generation_tokens_total"), perSecond("vllm:prompt_tokens_total")];
    this.rates.draw([out, taken], time, rate);
    this.rates.figure([[rate(last(out) ?? 0), "generated"], [rate(last(taken) ?? 0), "prompt", "second"]]);

    // Each pass gives a row one token of the target's own: what was generated less what was guessed right is the passes.
    const perPass = this.series((now, before) => share(generated(now, before), generated(now, before) - accepted(now, before)));
    this.perPass.draw([perPass], time, (top) => String(top));
    this.perPass.figure([known(perPass, (value) => value.toFixed(2))]);

    const kept = this.series((now, before) => share(accepted(now, before), drafted(now, before)));
    this.acceptance.draw([kept], time, percent);
    this.acceptance.figure([known(kept, percent)]);

    this.drawPositions(latest);
    const gauge = (name) => this.series((now) => now.value(name));
    const [running, waiting] = [gauge("vllm:num_requests_running"), gauge("vllm:num_requests_waiting")];
    this.requests.draw([running, waiting], time, (top) => String(top));
    this.requests.figure([[String(last(running) ?? 0), "running"], [String(last(waiting) ?? 0), "waiting", "second"]]);
    const cache = gauge("vllm:kv_cache_usage_perc");
    this.cache.draw([cache], time, percent);
    this.cache.figure([[percent(last(cache) ?? 0), ""]]);
    for (const [chart, name] of [[this.latency, "time_to_first_token"], [this.gaps, "inter_token_latency"]]) {
      const [sum, count] = ["sum", "count"].map((part) => gain(`vllm:${name}_seconds_${part}`));
      const means = this.series((now, before) => share(sum(now, before), count(now, before)));
      chart.draw([means], time, seconds);
      chart.figure([known(means, seconds)]);
    }
  }

  drawPositions(latest) {
    const name = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
    const drafts = (reading) => reading.value("vllm:spec_decode_num_drafts_total") ?? 0;
    const first = this.readings[0];
    const recent = drafts(latest) > drafts(first); // else: since the server's start
    const base = recent ? first.by(name, "position") : new Map();
    const total = drafts(latest) - (recent ? drafts(first) : 0);
    const counts = [...latest.by(name, "position")].map(([position, count]) => count - (base.get(position) ?? 0));
    const shares = counts.map((count) => (total ? count / total : 0));
    this.positions.draw(shares);
    this.positions.figure([[total ? percent(shares[0] ?? 0) : "–", recent ? "of the first, in 2 min" : "of the first, since the start"]]);
  }

  drawState(reading) {
    const on = reading.value("foretoken:speculation_on") === 1;
    const reason = [...reading.by("foretoken:speculation_off_reason", "reason")].find(([, value]) => value === 1)?.[0];
    const idle = reading.value("vllm:num_requests_running") === 0;
    const speedup = reading.value("foretoken:estimated_speedup");
    const most = reading.value("foretoken:num_speculative_tokens");
    byId("state").dataset.on = String(on);
    byId("state-word").textContent = on ? "Speculating" : "Not speculating";
    const why = on ? `up to ${most} ${most === 1 ? "token" : "tokens"} a draft` : (REASONS[reason] ?? reason ?? "");
    const estimate = on && speedup !== null ? `; the server estimates ${speedup.toFixed(2)} times the speed without` : "";
    byId("state-reason").textContent = `${idle ? "Idle now; in its latest step: " : ""}${why}${estimate}.`;
    byId("state-share").textContent = this.shareOfSteps(reading);
    const rule = reading.samples.get("foretoken:acceptance_info")?.[0]?.labels;
    byId("state-rule").textContent = rule ? `Acceptance rule ${rule.rule}: ${rule.lossy === "true" ? "lossy, answers may change" : "answers are exactly the target's"}.` : "";
  }

  /** The latest step alone says little where the server decides step by step. */
  shareOfSteps(reading) {
    const earlier = this.readings.find(({ time }) => reading.time - time < RECENT_S);
    const gain = (name) => (reading.value(name) ?? 0) - (earlier.value(name) ?? 0);
    const steps = gain("foretoken:steps_total");
    if (!steps) return "";
    const could = share(steps - gain("foretoken:spec_decode_disabled_total"), steps);
    return `Of the last ${steps.toLocaleString("en")} steps, ${percent(could)} could speculate.`;
  }

  drawProposers(reading) {
    const of = (what) => reading.by(`foretoken:proposer_${what}`, "proposer");
    const [on, drafts, drafted, accepted, time] = ["on", "drafts_total", "draft_tokens_total", "accepted_tokens_total", "draft_seconds_total"].map(of);
    const rows = [...on].map(([name, works]) => {
      const cells = [drafts, drafted, accepted].map((counts) => (counts.get(name) ?? 0).toLocaleString("en"));
      const kept = share(accepted.get(name) ?? 0, drafted.get(name) ?? 0);
      const values = [...cells, kept === null ? "–" : percent(kept), seconds(time.get(name) ?? 0), works ? "on" : "switched off after failures"];
      const head = el("th", "", name);
      head.scope = "row";
      return el("tr", "", head, ...values.map((value) => el("td", "", value)));
    });
    byId("proposers").replaceChildren(...rows);
  }
}

const last = (points) => points.at(-1)?.value ?? null;
/** The latest value there is, as a figure. */
function known(points, show) {
  const latest = points.findLast(({ value }) => value !== null);
  if (!latest) return ["–", "nothing yet"];
  return [show(latest.value), latest === points.at(-1) ? "" : "the last time"];
}

const percent = (value) => `${(100 * value).toFixed(value && value < 0.1 ? 1 : 0)} %`;

/** null where there is nothing to share. */
function share(part, whole) {
  return whole > 0 ? part / whole : null;
}
