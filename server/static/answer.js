// An answer in the making: its text, its tokens with where each came from, and what they add up to. Knows no screen.
//
// A pass of the target ends with one token of its own, after the guesses it kept. So a token's place in its draft is its place
// in the run of guessed tokens before the next token of the target, however the server cut the stream into chunks.

export class Answer {
  constructor() {
    this.reasoning = "";
    this.content = "";
    this.tokens = []; // {start, end, proposer, position, logprob}; start and end in `text`, proposer null = the target
    this.finishReason = null;
    this.metrics = null;
    this._unplaced = []; // [token, its text]: tokens whose text has not come
    this._cursor = 0;
    this._run = 0;
    this._decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  }

  /** Reasoning, then content. */
  get text() {
    return this.reasoning + this.content;
  }

  /** Takes in one chunk of a chat stream. */
  add(chunk) {
    this.metrics = chunk.metrics ?? this.metrics;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    this.reasoning += choice.delta?.reasoning ?? "";
    this.content += choice.delta?.content ?? "";
    const sources = choice.speculation ?? [];
    const said = choice.logprobs?.content ?? [];
    sources.forEach((source, i) => {
      const proposer = source.proposer ?? null;
      this._run = proposer === null ? 0 : this._run + 1;
      const token = { start: this._cursor, end: this._cursor, proposer, position: this._run, logprob: said[i]?.logprob ?? null };
      const bytes = said[i]?.bytes;
      this.tokens.push(token);
      this._unplaced.push([token, bytes ? this._decoder.decode(Uint8Array.from(bytes), { stream: true }) : (said[i]?.token ?? "")]);
    });
    this.finishReason = choice.finish_reason ?? this.finishReason;
    this._place(this.finishReason !== null);
  }

  /** Finds the tokens in the text, in order. Some have none there: end markers, what a stop string cut off. */
  _place(isLast) {
    const text = this.text;
    while (this._unplaced.length) {
      const [token, full] = this._unplaced[0];
      const rest = text.length - this._cursor;
      const isHere = (s) => s && text.startsWith(s, this._cursor);
      const mayCome = !isLast && rest < full.length && full.startsWith(text.slice(this._cursor));
      if (!isHere(full) && mayCome) return;
      // The text begins without white space, and reasoning ends without it: a token may be there in part.
      const spelled = [full, full.trimStart(), full.trimEnd(), full.trim()].find(isHere);
      this._unplaced.shift();
      token.start = this._cursor;
      token.end = this._cursor += spelled?.length ?? 0;
    }
  }

  /** How much of the text has its tokens. */
  get placed() {
    return this._cursor;
  }

  /** Passes of the target: each gave one token of its own; the last may have been cut short by the end of the answer. */
  get passes() {
    const own = this.tokens.filter((token) => token.proposer === null).length;
    return own + (this.tokens.at(-1)?.proposer ? 1 : 0);
  }

  /** Index of the token after the `passes`-th pass. */
  afterPass(passes) {
    let seen = 0;
    for (let i = 0; i < this.tokens.length; i++) {
      if (this.tokens[i].proposer === null && ++seen === passes) return i + 1;
    }
    return this.tokens.length;
  }

  /** The answer as it was after its first tokens. */
  prefix(numTokens) {
    const part = new Answer();
    part.tokens = this.tokens.slice(0, numTokens);
    const end = numTokens < this.tokens.length ? (part.tokens.at(-1)?.end ?? 0) : this.text.length;
    part.reasoning = this.reasoning.slice(0, end);
    part.content = this.content.slice(0, Math.max(0, end - this.reasoning.length));
    part._cursor = end;
    return part;
  }

  /** How many guesses of the token's draft were kept. */
  keptWith(index) {
    let last = index;
    while (this.tokens[last + 1]?.position === this.tokens[last].position + 1) last++;
    return this.tokens[last].position;
  }

  /** [share of the passes that kept a guess at position 1, at 2, ...]. Their sum and one are the tokens per pass. */
  get keptByPosition() {
    const counts = [];
    for (const { position } of this.tokens) if (position) counts[position - 1] = (counts[position - 1] ?? 0) + 1;
    return counts.map((count) => count / this.passes);
  }

  /** Map of proposer (null = the target) to its number of tokens. */
  get byProposer() {
    const counts = new Map([[null, 0]]);
    for (const { proposer } of this.tokens) counts.set(proposer, (counts.get(proposer) ?? 0) + 1);
    return counts;
  }

  /** What the history keeps: tokens as [end, proposer, 1000 * probability] with names by number. */
  toJSON() {
    const names = [...this.byProposer.keys()].filter((name) => name !== null);
    const tokens = this.tokens.map((t) => [t.end, names.indexOf(t.proposer), t.logprob === null ? -1 : Math.round(1000 * Math.exp(t.logprob))]);
    return { reasoning: this.reasoning, content: this.content, finishReason: this.finishReason, metrics: this.metrics, names, tokens };
  }

  /** From what toJSON gave, as far as it can be read: history is data that anybody may have written. */
  static from(stored) {
    const answer = new Answer();
    answer.reasoning = String(stored.reasoning ?? "");
    answer.content = String(stored.content ?? "");
    answer.finishReason = typeof stored.finishReason === "string" ? stored.finishReason : null;
    answer.metrics = stored.metrics && typeof stored.metrics === "object" ? stored.metrics : null;
    const names = Array.isArray(stored.names) ? stored.names.map(String) : [];
    for (const entry of Array.isArray(stored.tokens) ? stored.tokens : []) {
      const [end, name, probability] = Array.isArray(entry) ? entry.map(Number) : [];
      if (!(end >= answer._cursor && end <= answer.text.length)) break;
      const proposer = names[name] ?? null;
      answer._run = proposer === null ? 0 : answer._run + 1;
      const logprob = probability >= 0 ? Math.log(Math.max(probability, 0.5) / 1000) : null;
      answer.tokens.push({ start: answer._cursor, end, proposer, position: answer._run, logprob });
      answer._cursor = end;
    }
    return answer;
  }
}
