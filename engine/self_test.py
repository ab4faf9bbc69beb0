"""What each learned proposer guesses right on a few prompts, found out before anybody is served.

A checkpoint that is read wrongly, or belongs to another target, never crashes and never changes an output: it only guesses
badly. So its acceptance is shown at start. Runs the real step over the real networks, with books of its own.
"""

import time
from dataclasses import dataclass

from ..proposers.base import Proposer
from ..proposers.config import SpeculativeConfig
from ..proposers.proposer_set import ProposerSet
from .boot import Engine, assemble
from .request import Request, SamplingParams

PROMPTS = (
    "Write a short story about a fox who learns to share.",
    "Explain in simple words why the sky is blue.",
    "def fibonacci(n):",
    "Name three things that one should pack for a walk in the mountains, as a list.",
)
TOKENS = 48  # of each answer
LIMIT_S = 3.0  # for one proposer; a large target answers fewer tokens
POOR = 0.05
"""First guesses accepted, below which a checkpoint hardly belongs to the target: chance alone gives less than one in a hundred."""


@dataclass(frozen=True)
class SelfTest:
    """What one proposer reached."""

    name: str
    accepted: tuple[float, ...]  # share of the drafts whose guess 1, 2, ... (tree: level) was accepted
    num_drafts: int
    seconds: float
    fault: str | None  # why it was dropped or made no guess

    def describe(self) -> str:
        if self.fault is not None:
            return f"self-test   {self.name}: {self.fault}"
        shares = " ".join(f"{share:.0%}" for share in self.accepted) or "none"
        line = (
            f"self-test   {self.name}: accepted by position {shares}; {1 + sum(self.accepted):.2f} tokens a pass"
            f" ({self.num_drafts} drafts, {self.seconds:.1f} s)"
        )
        if not self.accepted or self.accepted[0] < POOR:
            line += ". That is next to nothing: does this checkpoint belong to this target, in this layout?"
        return line


def self_test(engine: Engine) -> list[SelfTest]:
    """One after the other, greedily. Leaves no trace in the engine but warm caches. Call before anything else runs."""
    proposers = {p.name: p for p in engine.core.proposers.proposers}
    return [_run(engine, proposers[name]) for name in engine.learned]


def _run(engine: Engine, proposer: Proposer) -> SelfTest:
    model = engine.model
    alone = ProposerSet([proposer], vocab_size=model.vocab_size)
    rules = SpeculativeConfig(adaptive=False, disable_by_batch_size=len(PROMPTS))  # lossless, whatever is configured
    core = assemble(engine.config, rules, model, engine.core.runner, alone)
    requests = [
        Request(f"self-test-{i}", tokens, SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False), 0.0, TOKENS, seed=0)
        for i, tokens in enumerate(_prompts(engine))
    ]
    for request in requests:
        core.add_request(request)
    started = time.perf_counter()
    while core.has_work and time.perf_counter() - started < LIMIT_S:
        core.step(0.0)
    seconds = time.perf_counter() - started
    for request in requests:
        core.abort(request.request_id)

    drafts = sum(request.stats.num_steps for request in requests)
    longest = max(len(request.stats.histogram) for request in requests)
    accepted = [sum(sum(request.stats.histogram[depth:]) for request in requests) for depth in range(1, longest)]
    health = alone.stats()[0]
    fault = health.off_reason or ("made no guess" if not drafts else None)
    return SelfTest(proposer.name, tuple(n / drafts for n in accepted) if drafts else (), drafts, seconds, fault)


def _prompts(engine: Engine) -> list[list[int]]:
    """As chat where the model has a template: that is what drafters are trained on. Cut to what the context holds."""
    tokenizer = engine.model.tokenizer
    room = max(1, min(engine.model.max_model_len, engine.core.runner.kv.num_blocks * engine.config.cache.block_size) - TOKENS - 1)
    encoded: list[list[int]] = []
    for prompt in PROMPTS:
        text = prompt
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}]
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=not tokenizer.chat_template)
        encoded.append(token_ids[-room:])
    return encoded
