"""A draft model that reads the text in tokens of its own, and whose guesses are tokenised anew for the target.

(Universal assisted generation; Timor et al. 2025.) Its tokens do not stand at the target's positions, so it keeps block tables of
its own over a cache of its own. Greedy: what it guesses is text, of which the target's tokenizer makes certain guesses.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..kernels.layout import Executor, KVTensors, ShortensChains
from .base import Draft, DraftContext, DraftRow, Feedback, Needs
from .drafting import Feed, batch_lists
from .guessing import Drawing, length_of_chain
from .vocabularies import space_marker

WINDOW = 16
"""Target tokens that are looked at again when text is added: tokenizers look a little ahead."""
BROKEN = "\ufffd"
"""What tokenizers write for bytes that are no whole character."""


@dataclass(slots=True)
class _Reading:
    """One request in the draft's own tokens."""

    fixed: list[int]  # draft ids of the text up to target token num_fixed, never looked at again
    blocks: list[int] = field(default_factory=list)
    num_fixed: int = 0
    cached: list[int] = field(default_factory=list)  # draft ids whose entries are in place


class RetokenizingProposer:
    """Implements `Proposer`. Owns the draft's cache and all of its blocks."""

    def __init__(
        self,
        name: str,
        executor: Executor,
        kv: KVTensors,
        target: PreTrainedTokenizerBase,
        draft: PreTrainedTokenizerBase,
        max_tokens: int,
        max_model_len: int,
        confidence_threshold: float = 0.0,
    ) -> None:
        """confidence_threshold: the first of the draft's tokens less likely than this is the last of its chain."""
        self.name = name
        self.max_tokens = max_tokens
        self.needs = Needs(kv_layers=executor.kv_layers, hears="nothing")
        self._executor, self._kv = executor, kv
        self._target, self._draft = _Tokens(target, draft), _Tokens(draft, target)
        self._start = draft.encode("")[:1] if draft.encode("")[:1] == [draft.bos_token_id] else []
        self._drawing = Drawing(len(draft))
        self._threshold = confidence_threshold
        self._max_model_len = min(max_model_len, executor.max_model_len)
        self._free = list(range(kv.num_blocks))
        self._readings: dict[str, _Reading] = {}
        if isinstance(executor, ShortensChains):
            executor.shorten_chains()

    def propose(self, context: DraftContext) -> Draft:
        feeds: list[Feed] = []
        budget = context.max_ingest_tokens
        for index, row in enumerate(context.rows):
            if row.ceiling and row.computed_after == len(row.token_ids) and budget > 0:
                feed = self._feed(index, row, budget)
                if feed is not None:
                    feeds.append(feed)
                    budget -= feed.stop - feed.start
        chains: list[list[int]] = [[] for _ in context.rows]
        if feeds:
            batch = batch_lists(feeds, self._kv.block_size).batch()
            guessing = [feed for feed in feeds if feed.count]
            if not guessing:
                self._executor.run(batch, self._kv)
            for feed in feeds:
                self._readings[feed.row.request_id].cached = list(feed.row.token_ids[: feed.stop])
            if guessing:
                counts = torch.tensor([feed.count for feed in guessing])
                output = self._executor.run_chain(
                    batch, self._kv, counts, self._drawing.of([feed.row for feed in guessing], self._executor)
                )
                for feed, guesses, likely in zip(guessing, output.token_ids.tolist(), output.confidence.tolist(), strict=True):
                    self._readings[feed.row.request_id].cached += guesses[: feed.count - 1]  # which were fed, all but the last
                    row, count = context.rows[feed.index], length_of_chain(likely[: feed.count], self._threshold)
                    most = min(row.ceiling, self.max_tokens)
                    chains[feed.index] = self._for_target(row.token_ids, feed.row.token_ids, guesses[:count])[:most]
        return Draft.chains(chains)

    def observe(self, feedback: Feedback) -> None:
        """Nothing to learn: the next text is compared with what was read."""

    def forget(self, request_id: str) -> None:
        reading = self._readings.pop(request_id, None)
        if reading is not None:
            self._free += reading.blocks

    def close(self) -> None:
        """Nothing outlives the process."""

    def check(self) -> None:
        held = [block for reading in self._readings.values() for block in reading.blocks]
        assert sorted([*held, *self._free]) == list(range(self._kv.num_blocks)), "a block of the draft's own cache is lost or held twice"

    def _feed(self, index: int, row: DraftRow, budget: int) -> Feed | None:
        """What the draft has to read of the row's text; None if it cannot, or there is no room for it."""
        reading = self._readings.setdefault(row.request_id, _Reading(list(self._start)))
        ids = self._in_draft_tokens(row.token_ids, reading)
        count = min(row.ceiling, self.max_tokens, self._max_model_len - len(ids))
        if not ids or count < 1 or max(ids) >= self._executor.vocab_size or not self._reserve(reading, len(ids) + count):
            return None
        known = next((i for i, (a, b) in enumerate(zip(ids, reading.cached, strict=False)) if a != b), min(len(ids), len(reading.cached)))
        start = min(known, len(ids) - 1)  # the last token is always read: the first guess comes from it
        stop = min(len(ids), start + budget)
        reading.cached = reading.cached[:start]
        own = DraftRow(
            row.request_id, ids, row.num_prompt_tokens, len(ids), count, 0, reading.blocks, (0,), row.draw
        )  # the row as the draft sees it: its tokens, its blocks
        return Feed(index, own, start, stop, count if stop == len(ids) else 0)

    def _reserve(self, reading: _Reading, num_places: int) -> bool:
        missing = -(-num_places // self._kv.block_size) - len(reading.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            reading.blocks.append(self._free.pop())
        return True

    def _in_draft_tokens(self, tokens: Sequence[int], reading: _Reading) -> list[int]:
        """The text as draft ids, empty in the middle of a character. Only its end is tokenised again and again."""
        if len(tokens) - reading.num_fixed > 4 * WINDOW:
            latest = len(tokens) - WINDOW
            # In front of a word, where both tokenizers split whatever follows; if there is none, anywhere.
            seam = next((i for i in range(latest, latest - WINDOW, -1) if self._target.begins_word(tokens[i])), latest)
            ids = self._encoded(tokens, reading.num_fixed, seam)
            if ids:
                reading.fixed += ids
                reading.num_fixed = seam
        tail = self._encoded(tokens, reading.num_fixed, len(tokens))
        return [*reading.fixed, *tail] if tail else []

    def _encoded(self, tokens: Sequence[int], start: int, stop: int) -> list[int]:
        text = self._target.text(tokens, start, stop)
        return [] if text.endswith(BROKEN) else self._draft.ids(text, is_beginning=start == 0)

    def _for_target(self, tokens: Sequence[int], draft_ids: Sequence[int], guesses: Sequence[int]) -> list[int]:
        """The target's ids of the guessed text, as far as it is whole characters that the target can say."""
        known = draft_ids[-WINDOW:]
        said = [*known, *itertools.takewhile(lambda guess: guess not in self._draft.foreign, guesses)]
        added = self._draft.text(said, len(known), len(said)).split(BROKEN)[0]
        if not added:
            return []
        window = tokens[-WINDOW:]
        before = self._target.text(window, 0, len(window))
        together = self._target.ids(before + added, is_beginning=True)
        for end in (len(window), *range(len(together), 0, -1)):  # where the known text ends; mostly after as many tokens as now
            if self._target.text(together, 0, end) == before:
                return together[end:]
        return self._target.ids(added, is_beginning=False)


class _Tokens:
    """One side's tokenizer: token ids to text and back, without special tokens that the other side has no name for."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._marker = space_marker(tokenizer)
        self._adds_space = bool(self._marker) and self._names("a")[0].startswith(self._marker)  # in front of every text
        names = _special_tokens(other).values()
        own = _special_tokens(tokenizer)
        self.foreign = {i for i, name in own.items() if name not in names or i == tokenizer.bos_token_id}  # each side begins its own way

    def text(self, token_ids: Sequence[int], start: int, stop: int) -> str:
        """Of token_ids[start:stop]. Some tokenizers drop a space at the beginning of a text: there is one more token then."""
        before = max(start - 1, 0)
        return self._decoded(token_ids[before:stop])[len(self._decoded(token_ids[before:start])) :]

    def ids(self, text: str, is_beginning: bool) -> list[int]:
        """is_beginning: of a text, or else it continues one."""
        if self._adds_space and not is_beginning:
            text = text.removeprefix(" ")
        return self._tokenizer.encode(text, add_special_tokens=False) if text else []

    def begins_word(self, token_id: int) -> bool:
        # A padded vocabulary has ids that the tokenizer has no name for.
        return bool(self._marker) and (self._tokenizer.convert_ids_to_tokens(token_id) or "").startswith(self._marker)

    def _decoded(self, token_ids: Sequence[int]) -> str:
        kept = [i for i in token_ids if i not in self.foreign]
        return self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _names(self, text: str) -> list[str]:
        return self._tokenizer.convert_ids_to_tokens(self._tokenizer.encode(text, add_special_tokens=False))


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    added: Any = tokenizer.added_tokens_decoder
    return {i: token.content for i, token in added.items() if token.special}
