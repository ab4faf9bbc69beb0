"""One method against no speculation on one engine: fixed k of every length and the engine's own choice, all in turn.

Nothing is shared between turns but weights: no prefix cache, and a corpus of its own for each. Knows no files and no figures' meaning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from ...proposers.config import SpeculativeConfig
from ..errors import ConfigError
from ..llm_options import engine_config
from ..request import Request, SamplingParams
from .interleaved import keep_turns
from .speculation_figures import OFF, Figures, Setting, compare
from .speculation_turn import Step, Turn, take

if TYPE_CHECKING:
    from ..boot import Engine
    from ..core import EngineCore

ALWAYS = 1 << 30  # running requests: fixed k is to be measured wherever it is asked for
TREE_KEYS = frozenset({"speculative_token_tree", "eagle_topk", "num_steps", "num_draft_tokens", "num_branches", "use_tree"})
OF_THEIR_OWN_LENGTH = frozenset({"medusa", "hydra", "mlp_speculator", "dflash", "dspark", "orthrus"})
"""Methods whose checkpoint says how many guesses they make."""

Message = Mapping[str, Any]
Conversation = Sequence[Message]


@dataclass(frozen=True)
class Method:
    """What is measured: entries of `--speculative-config`, one or several that work together, without the settings that are tried."""

    name: str
    entries: Sequence[Mapping[str, Any]]

    def config(self, k: int, **settings: Any) -> list[dict[str, Any]]:
        """The entries with at most k guesses, and settings that hold for all of them."""
        return [{**entry, **({} if _is_sized(entry) else {"num_speculative_tokens": k}), **settings} for entry in self.entries]

    @property
    def has_one_length(self) -> bool:
        """Whether there are no lengths to try: a tree is what it is, and several methods have one each."""
        return len(self.entries) > 1 or _is_tree(self.entries[0])


def _is_tree(entry: Mapping[str, Any]) -> bool:
    return entry.get("method") == "lookahead" or not TREE_KEYS.isdisjoint(entry)


def _is_sized(entry: Mapping[str, Any]) -> bool:
    return entry.get("method") in OF_THEIR_OWN_LENGTH or _is_tree(entry)


@dataclass(frozen=True)
class Effort:
    """What every turn asks for, and how many turns count."""

    max_tokens: int = 64
    rounds: int = 5
    temperature: float = 0.0
    ignore_eos: bool = False


class Bench:
    """One loaded engine as three: without speculation, with fixed k, and deciding for itself. Use as a context.

    The three have books of their own over the same weights and cache tensors, so only one of them works at a time.
    """

    def __init__(self, model: str, method: Method, ks: Sequence[int], max_rows: int, options: Mapping[str, Any]) -> None:
        """options: as of `LLM`. Raises ConfigError and ModelLoadError."""
        from ...proposers.proposer_set import ProposerSet  # these import torch: flags are read before
        from ..boot import assemble, boot
        from ..runner import Runner
        from ..sampler import full_logits_wanted

        config = engine_config(
            model, method.config(max(ks)),
            {"enable_prefix_caching": False, "allow_synthetic_acceptance": True, "max_num_seqs": max(128, max_rows), **options},
        )
        self.engine: Engine = boot(config)
        self.settings = _settings(method, ks, self.engine)
        engine, rules = self.engine, self.engine.speculative
        fixed = replace(rules, adaptive=False, disable_by_batch_size=ALWAYS, num_speculative_tokens_per_batch_size=())
        self._fixed = assemble(config, fixed, engine.model, engine.core.runner, engine.core.proposers)
        runner = Runner(engine.model.executor, engine.core.runner.kv, (), full_logits_wanted)
        self._plain = assemble(config, SpeculativeConfig(off=True), engine.model, runner, ProposerSet([]))
        self._turns = count()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.core.close()

    @property
    def fault(self) -> str | None:
        """Why a proposer was switched off meanwhile: then the figures are not its own."""
        return next((f"{p.name} {p.off_reason}" for p in self.engine.core.proposers.stats() if p.off_reason), None)

    def read(self, conversations: Sequence[Conversation], max_tokens: int) -> list[list[int]]:
        """Token ids of those that fit the context, by the model's chat template if it has one. Raises ConfigError if none fits."""
        room = min(self.engine.model.max_model_len, self._capacity) - max_tokens
        prompts = [ids for conversation in conversations if len(ids := self._encoded(conversation)) <= room]
        if not prompts:
            raise ConfigError(f"none of {len(conversations)} prompts leaves room for {max_tokens} tokens; lower --max-tokens")
        return prompts

    def turn(
        self, setting: Setting, prompts: Sequence[Sequence[int]], concurrency: int, effort: Effort,
        on_step: Callable[[Step], None] = lambda step: None,
    ) -> Turn:
        """All prompts once."""
        number = next(self._turns)
        return take(self._core(setting), self._requests(setting, prompts, effort, number), concurrency, on_step)

    def measure(
        self, settings: Sequence[Setting], prompts: Sequence[Sequence[int]], concurrency: int, effort: Effort,
        on_turn: Callable[[], None] = lambda: None,
    ) -> list[Figures]:
        """Figures of every setting; they and no speculation have their turns in each round."""
        asked = [prompts[i % len(prompts)] for i in range(max(len(prompts), concurrency))]
        cases = {setting: partial(self.turn, setting, asked, concurrency, effort) for setting in (OFF, *settings)}
        turns = keep_turns(cases, effort.rounds, on_turn)
        return [compare(setting, concurrency, turns[OFF], turns[setting]) for setting in settings]

    @property
    def _capacity(self) -> int:
        return self.engine.core.runner.kv.num_blocks * self.engine.config.cache.block_size

    def _core(self, setting: Setting) -> EngineCore:
        return self._plain if setting == OFF else self.engine.core if setting.adaptive else self._fixed

    def _requests(self, setting: Setting, prompts: Sequence[Sequence[int]], effort: Effort, number: int) -> list[Request]:
        wish: dict[str, Any] = {"method": "off"} if setting == OFF else {"corpus_id": f"turn-{number}"}
        if setting != OFF and not setting.adaptive:
            wish["num_speculative_tokens"] = setting.k
        made: list[Request] = []
        for i, prompt in enumerate(prompts):
            params = SamplingParams(
                temperature=effort.temperature, max_tokens=effort.max_tokens, ignore_eos=effort.ignore_eos, seed=i, speculation=wish
            )
            made += self.engine.intake.requests(f"{number}-{i}", prompt, params, time.monotonic())
        return made

    def _encoded(self, conversation: Conversation) -> list[int]:
        tokenizer, encode = self.engine.tokenizer, self.engine.tokenizer.encode
        if not tokenizer.chat_template:
            return list(encode("\n\n".join(str(message["content"]) for message in conversation)))
        text = tokenizer.apply_chat_template([dict(m) for m in conversation], tokenize=False, add_generation_prompt=True)
        return list(encode(str(text), add_special_tokens=False))  # the template writes them itself


def _settings(method: Method, ks: Sequence[int], engine: Engine) -> tuple[Setting, ...]:
    """What can be tried: every k that the proposer reaches, its own length if that is shorter than they are, and adaptive."""
    from ..policy.base import PREDICTION

    most = max((p.max_tokens for p in engine.core.controller.proposers if p.name != PREDICTION), default=0)
    lengths = {most} if method.has_one_length else {min(k, most) for k in ks}
    fixed = [] if len(method.entries) > 1 else [Setting(method.name, k) for k in sorted(lengths)]
    return (*fixed, Setting(method.name, most, adaptive=True))
