"""A smaller causal language model guesses ahead of the target (Leviathan et al. 2023; Chen et al. 2023).

Owns the order of a draft step and how its tokens are chosen. The network, its cache and its loading are given.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import cast

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..kernels.layout import ChainOutput, Draws, Executor, KVTensors
from ..kernels.noise import Purpose, stream
from .base import Draft, DraftContext, Feedback, Needs
from .config import DraftModelConfig, SpeculativeConfigError
from .drafting import Feed, OwnCache, ragged_batch


class DraftModelProposer:
    """Chains of a model with the target's vocabulary, all rows in one call.

    draft_sample_method "greedy" guesses the argmax; "probabilistic" samples at the row's temperature under the target's own
    noise, so that draft and target agree as often as their distributions allow. For the p/q rules (`return_probs`) the
    noise is independent of the target's, and `Draft.probs` are the distributions that were sampled from.
    """

    def __init__(
        self,
        executor: Executor,
        kv: KVTensors,
        config: DraftModelConfig,
        vocab_size: int,
        name: str = "draft_model",
        return_probs: bool = False,
    ) -> None:
        """kv: from executor.allocate, with the target's number of blocks. vocab_size: the target's; other ids are never guessed."""
        self.name = name
        self.needs = Needs(kv_layers=executor.kv_layers)
        self.max_tokens = config.num_speculative_tokens
        self._executor = executor
        self._kv = kv
        self._vocab_size = vocab_size
        self._samples = config.draft_sample_method == "probabilistic"
        self._return_probs = return_probs and self._samples
        max_model_len = min(executor.max_model_len, config.max_model_len or executor.max_model_len)
        self._cache = OwnCache(max_model_len, self.max_tokens, executor.vocab_size)

    def propose(self, context: DraftContext) -> Draft:
        feeds = self._cache.plan(context)
        guesses: list[list[int]] = [[] for _ in context.rows]
        confidence: list[float] = []
        probs: Tensor | None = None
        if feeds:
            batch = ragged_batch(feeds, context.block_size)
            chains = [feed for feed in feeds if feed.count]
            if chains:
                counts = torch.tensor([feed.count for feed in chains])
                output = self._executor.run_chain(batch, self._kv, counts, self._draws(chains))
                token_ids, estimates = output.token_ids.tolist(), output.confidence.tolist()
                for i, feed in enumerate(chains):
                    guesses[feed.index] = token_ids[i][: feed.count]
                    confidence.extend(min(estimate, 1.0) for estimate in estimates[i][: feed.count])
                if self._return_probs:
                    probs = self._probs(chains, output)
            else:
                self._executor.run(batch, self._kv)
            self._cache.fed(feeds, [guesses[feed.index] for feed in feeds])
        draft = Draft.chains(guesses)
        return dataclasses.replace(draft, confidence=confidence, probs=probs, filled=self._cache.filled(context))

    def observe(self, feedback: Feedback) -> None:
        self._cache.observe(feedback)

    def forget(self, request_id: str) -> None:
        self._cache.forget(request_id)

    def check(self) -> None:
        self._cache.check()

    def _draws(self, chains: Sequence[Feed]) -> Draws | None:
        """None where the executor's own argmax will do: nothing to sample, nothing to leave out."""
        draws = [feed.row.draw for feed in chains]
        temperatures = [draw.temperature if self._samples else 0.0 for draw in draws]
        if not any(temperatures) and self._executor.vocab_size <= self._vocab_size:
            return None
        purpose = Purpose.DRAFT if self._return_probs else Purpose.TARGET
        return Draws(
            temperatures=torch.tensor(temperatures),
            streams=torch.tensor([stream(draw.seed, draw.choice, purpose) for draw in draws]),
            positions=torch.tensor([feed.stop for feed in chains]),
            vocab_size=min(self._vocab_size, self._executor.vocab_size),
            keep_logits=self._return_probs,
        )

    def _probs(self, chains: Sequence[Feed], output: ChainOutput) -> Tensor:
        """[T, vocab_size] float32, what each guess was drawn from: one-hot for greedy rows."""
        parts: list[Tensor] = []
        for i, feed in enumerate(chains):
            part = torch.zeros(feed.count, self._vocab_size)
            temperature = feed.row.draw.temperature
            if temperature > 0:
                assert output.logits is not None
                logits = output.logits[i, : feed.count, : self._vocab_size]
                part[:, : logits.shape[1]] = torch.softmax(logits.float() / temperature, -1)
            else:
                part.scatter_(1, output.token_ids[i, : feed.count, None].cpu(), 1.0)
            parts.append(part)
        return torch.cat(parts)


def check_vocabularies(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Raise SpeculativeConfigError if the two would read one text as different ids, naming the first difference.

    Tokenizers are compared, not configs: embedding tables are padded (Qwen2.5 has 151,936 and 152,064 rows for the same ids).
    """
    hint = "a draft model needs the target's own vocabulary; take one of the same family"
    theirs, ours = ({token_id: token for token, token_id in t.get_vocab().items()} for t in (target, draft))
    for token_id in sorted(theirs.keys() | ours.keys()):
        if theirs.get(token_id) != ours.get(token_id):
            said, guessed = _named(theirs.get(token_id)), _named(ours.get(token_id))
            raise SpeculativeConfigError(f"token id {token_id} is {said} in the target and {guessed} in the draft: {hint}")
    if isinstance(target, PreTrainedTokenizerFast) and isinstance(draft, PreTrainedTokenizerFast):
        added_theirs, added_ours = target.get_added_vocab(), draft.get_added_vocab()
        if differing := sorted(added_theirs.keys() ^ added_ours.keys()):
            side = "target" if differing[0] in added_theirs else "draft"
            raise SpeculativeConfigError(f"token {differing[0]!r} is an added token in the {side} only: {hint}")
        rules_theirs, rules_ours = _merges(target), _merges(draft)
        if rules_theirs != rules_ours:
            rank = next(i for i, (a, b) in enumerate(zip([*rules_theirs, None], [*rules_ours, None], strict=False)) if a != b)
            said, guessed = (" + ".join(rules[rank]) if rank < len(rules) else "missing" for rules in (rules_theirs, rules_ours))
            raise SpeculativeConfigError(f"merge {rank} is {said!r} in the target and {guessed!r} in the draft: {hint}")


def _named(token: str | None) -> str:
    return "missing" if token is None else repr(token)


def _merges(tokenizer: PreTrainedTokenizerFast) -> list[list[str]]:
    """Pairs in order of rank; none for models that do not merge."""
    model = json.loads(cast(Tokenizer, tokenizer.backend_tokenizer).to_str())["model"]
    return [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges", [])]
