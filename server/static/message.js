// One message of the transcript as an element: what was said, what it cost, and what one can do with it.

import { Answer } from "./answer.js";
import { button, copy, el, isSending, rate, seconds } from "./dom.js";
import { reachable } from "./inspector.js";
import { Rendering } from "./rendering.js";

/** A message of the user. actions: {edit(text)}. look: that of Rendering. */
export function userMessage(message, look, actions) {
  const said = el("div", "said tokens body");
  new Rendering(said, look).update(Answer.from({ content: message.content }));
  const row = el("div", "actions");
  const speaker = el("h2", "speaker", "You");
  const bubble = el("div", "bubble", said, row);
  const article = labelled(el("article", "message user", speaker, bubble), "Your message");
  const copying = button("Copy", "plain", () => copy(message.content, copying), "Copy your message");
  const editing = button("Edit", "plain", () => article.replaceChildren(editor()), "Edit your message and ask again");
  row.append(copying, editing);

  function editor() {
    const box = el("textarea", "edit-box");
    box.dir = "auto";
    box.value = message.content;
    box.rows = Math.min(12, message.content.split("\n").length + 1);
    box.setAttribute("aria-label", "Your message, to change");
    const form = el("form", "editor", el("h2", "speaker", "You"), box);
    const back = () => {
      article.replaceChildren(speaker, bubble);
      editing.focus();
    };
    const save = el("button", "primary", "Ask again");
    form.append(el("div", "actions", save, button("Cancel", "plain", back), el("small", "", "What followed is replaced; you can undo that.")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (box.value.trim()) actions.edit(box.value);
    });
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.preventDefault();
        back();
      }
      if (isSending(event)) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    queueMicrotask(() => box.focus());
    return form;
  }

  return article;
}

/** An answer of the model, drawn as often as it grows. actions: {regenerate(), race()}. look: that of Rendering. */
export class ModelMessage {
  constructor(message, look, actions) {
    this.message = message;
    this.reasoning = el("div", "tokens");
    this.thoughts = el("details", "reasoning", el("summary", "", "Reasoning"), this.reasoning);
    this.body = el("div", "tokens body");
    this.waiting = el("p", "waiting", el("span", "visually-hidden", "Waiting for the first token"), el("i"), el("i"), el("i"));
    this.failure = el("div", "failure");
    this.facts = el("p", "facts");
    this.actions = el("div", "actions");
    this.speaker = el("h2", "speaker");
    const parts = [this.speaker, this.thoughts, this.body, this.waiting, this.failure, el("div", "told", this.facts, this.actions)];
    this.element = labelled(el("article", "message model", ...parts), "Answer");
    const copying = button("Copy", "plain", () => copy(message.answer.content, copying), "Copy the answer");
    this.again = button("Regenerate", "plain", actions.regenerate, "Regenerate the answer");
    this.actions.append(
      copying,
      this.again,
      button("Race", "plain", actions.race, "Race this prompt with and without speculation"),
    );
    this.renderings = [new Rendering(this.reasoning, look), new Rendering(this.body, look)];
  }

  /** running: whether more is to come. */
  draw(running) {
    const { answer, failure } = this.message;
    const split = answer.reasoning.length;
    this.speaker.textContent = this.message.model || "Model";
    this.thoughts.hidden = !split;
    if (running && split) this.thoughts.open = !answer.content;
    if (split) this.renderings[0].update(answer, 0, split);
    this.renderings[1].update(answer, split);
    this.waiting.hidden = !running || answer.text.length > 0;
    this.failure.hidden = !failure;
    if (failure) this.failure.replaceChildren(el("strong", "", failure.message), " ", failure.advice);
    this.again.textContent = failure ? "Try again" : "Regenerate";
    this.facts.hidden = running || !answer.tokens.length;
    this.facts.textContent = facts(answer);
    this.actions.hidden = running;
    this.element.setAttribute("aria-busy", String(running));
    if (!running) for (const holder of [this.reasoning, this.body]) reachable(holder);
  }
}

/** What the answer took, in one line. */
function facts(answer) {
  const parts = [`${answer.tokens.length} tokens`];
  const { metrics } = answer;
  if (metrics?.generation_time_ms !== undefined) {
    parts[0] += ` in ${seconds(timeOf(metrics))}`;
    parts.push(`${rate(metrics.tokens_per_second)} tokens/s`);
  }
  parts.push(`${(answer.tokens.length / Math.max(answer.passes, 1)).toFixed(2)} per target pass`);
  const guesses = metrics?.speculative_decoding;
  if (guesses?.num_draft_tokens) parts.push(`${guesses.num_accepted_draft_tokens} of ${guesses.num_draft_tokens} guesses kept`);
  if (answer.finishReason === "length") parts.push("ended by the length limit");
  return parts.join(" · ");
}

/** Seconds from a request's arrival to its last token, as the server measured them. */
export function timeOf(metrics) {
  return (metrics.time_to_first_token_ms + metrics.generation_time_ms) / 1000;
}

function labelled(element, label) {
  element.setAttribute("aria-label", label);
  return element;
}
