"""What a request adds to, scales in or forbids from the raw logits of one node, before any choice is made.

Owns what it derives from a request: indices and the token counts behind penalties. Knows nothing of batches: few requests
ask for any of this, so it works in place and row by row, or describes it to the native sampler. Order, as in vLLM:
allowed_token_ids or grammar (nothing but the end marker where a thinking budget is spent), bad_words, min_tokens, logit_bias,
repetition penalty (prompt and output), frequency and presence penalties (output).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .errors import InvalidRequest
from .grammar import GrammarState
from .request import Request
from .thinking_budget import ThinkingState
from .token_mask import Mask, bits_of


class Node(NamedTuple):
    """A place where a token is wanted: behind the request's known tokens and `path`, the draft tokens accepted so far."""

    request: Request
    path: Sequence[int]

    @property
    def position(self) -> int:
        """Absolute position of the wanted token."""
        return len(self.request.token_ids) + len(self.path)


@dataclass(slots=True)
class LogitEdits:
    """What one request does to its logits. Arrays that the native sampler reads belong to this object."""

    allowed: NDArray[np.int64] | None  # ids
    allowed_bits: NDArray[np.uint32]  # the same as a bit mask; empty if all are
    banned: NDArray[np.int32]  # always: bad words of one token
    phrases: list[list[int]]  # longer bad words: the last token is banned behind the others
    stops: list[int]  # banned until min_tokens
    bias_ids: NDArray[np.int32]
    bias: NDArray[np.float32]
    counts: _Counts | None  # for penalties
    grammar: GrammarState | None
    thinking: ThinkingState | None

    @classmethod
    def of(cls, request: Request, vocab_size: int) -> LogitEdits | None:
        """None if nothing is to change. Ids outside the vocabulary are dropped: they cannot be emitted anyway."""
        p = request.params
        known = range(vocab_size)
        allowed = None
        if p.allowed_token_ids is not None:
            allowed = np.array([t for t in p.allowed_token_ids if t in known], np.int64)
            if not len(allowed):
                raise InvalidRequest("allowed_token_ids has no token of the model's vocabulary", "allowed_token_ids")
        banned = [ids[0] for ids in request.bad_word_ids if len(ids) == 1 and ids[0] in known]
        phrases = [list(ids) for ids in request.bad_word_ids if len(ids) > 1 and ids[-1] in known]
        stops = [t for t in {*request.eos_token_ids, *p.stop_token_ids} if t in known] if p.min_tokens else []
        bias = {t: b for t, b in p.logit_bias.items() if t in known}
        counts = _Counts(request.prompt_token_ids) if request.params.is_penalised else None
        if allowed is None and not (banned or phrases or stops or bias or counts or request.grammar or request.thinking):
            return None
        return cls(
            allowed,
            np.empty(0, np.uint32) if allowed is None else bits_of(allowed, vocab_size),
            np.array(banned, np.int32),
            phrases,
            stops,
            np.array(list(bias), np.int32),
            np.array(list(bias.values()), np.float32),
            counts,
            request.grammar,
            request.thinking,
        )

    def apply(self, row: Tensor, node: Node) -> None:
        """Change row [V] into what the request wants at node."""
        if (mask := self._mask(node)) is not None:
            barred = ~mask.to_bool(len(row))
            row.masked_fill_(torch.from_numpy(barred).to(row.device), -math.inf)
        elif self.allowed is not None:
            ids = torch.from_numpy(self.allowed).to(row.device)
            kept = row[ids]
            row.fill_(-math.inf)
            row[ids] = kept
        if bans := self._bans(node):
            ids = torch.tensor(bans, device=row.device)
            kept = row[ids]
            row[ids] = -math.inf
            if row.amax() == -math.inf:  # nothing is left: rather the best allowed token than none
                row[ids] = kept
        if len(self.bias):
            row[torch.from_numpy(self.bias_ids).to(row.device)] += torch.from_numpy(self.bias).to(row.device)
        if self.counts is not None:
            self.counts.penalise(row, node)

    def describe(self, row: NDArray[np.void], request: Request) -> None:
        """Say to the native sampler, in the request's row [1] of sampling.ROW, what is the same at all nodes."""
        if self.allowed is not None:
            row["allowed"] = self.allowed_bits.ctypes.data
        row["banned"], row["num_banned"] = self.banned.ctypes.data, len(self.banned)
        row["bias_ids"], row["bias"], row["num_bias"] = self.bias_ids.ctypes.data, self.bias.ctypes.data, len(self.bias)
        if self.counts is not None:
            p = request.params
            row["repetition"], row["frequency"], row["presence"] = p.repetition_penalty, p.frequency_penalty, p.presence_penalty
            self.counts.describe(row, request)

    def looks_back(self, request: Request, num_draft_tokens: int) -> bool:
        """Whether nodes of a draft of this length need `describe_nodes`."""
        return (
            bool(self.phrases)
            or self.grammar is not None
            or self.thinking is not None
            or (bool(self.stops) and request.num_output_tokens < request.params.min_tokens)
            or (self.counts is not None and num_draft_tokens > 0)
        )

    def describe_nodes(self, rows: NDArray[np.void], nodes: Sequence[Node]) -> list[NDArray[np.int32]]:
        """The same for what depends on the path, in rows [n] of the request's nodes [n]. Returns arrays to keep until they are sampled."""
        arrays: list[NDArray[np.int32]] = []
        if self.grammar is not None or self.thinking is not None:  # whose masks stay until the request grows
            unmasked = 0 if self.allowed is None else self.allowed_bits.ctypes.data
            rows["allowed"] = [unmasked if (mask := self._mask(node)) is None else mask.address for node in nodes]
        if self.counts is not None:
            arrays.append(_point(rows, "path", "path_length", [node.path for node in nodes]))
        if self.phrases or self.stops:
            arrays.append(_point(rows, "banned", "num_banned", [self._bans(node) for node in nodes]))
        return arrays

    def _mask(self, node: Node) -> Mask | None:
        """What the form of the output leaves at a node; None if it has no say there."""
        if self.thinking is not None and (only := self.thinking.mask(node.path)) is not None:
            return only
        if self.grammar is None:
            return None
        mask = self.grammar.mask(node.path)
        assert mask is not None, "a node where the grammar breaks should have been cut off"
        return mask

    def _bans(self, node: Node) -> list[int]:
        bans = list(self.banned)
        if self.stops and node.request.num_output_tokens + len(node.path) < node.request.params.min_tokens:
            bans += self.stops
        if self.phrases:
            longest = max(map(len, self.phrases)) - 1
            start = max(node.request.num_prompt_tokens, len(node.request.token_ids) - longest)
            recent = [*node.request.token_ids[start:], *node.path]
            bans += [ids[-1] for ids in self.phrases if recent[1 - len(ids) :] == ids[:-1]]
        return bans


class _Counts:
    """The distinct tokens of prompt and output, with how often each is in the output. Follows the request as it grows."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ids = np.unique(np.asarray(prompt, dtype=np.int32))
        self.output = np.zeros(len(self.ids), dtype=np.float32)  # [capacity], of ids [capacity]
        self.place = {token: i for i, token in enumerate(self.ids.tolist())}
        self.num_known = len(prompt)

    def describe(self, row: NDArray[np.void], request: Request) -> None:
        """Point a row of sampling.ROW at the counts as they are now."""
        self._follow(request)
        row["seen"], row["counts"], row["num_seen"] = self.ids.ctypes.data, self.output.ctypes.data, len(self.place)

    def penalise(self, row: Tensor, node: Node) -> None:
        """Apply the three penalties to row [V] as if node.path had been emitted; the path leaves no trace."""
        self._follow(node.request)
        settled = len(self.place)
        for token in node.path:
            self._push(token)
        self._change(row, node.request)
        for token in node.path:
            self.output[self.place[token]] -= 1
        for token in self.ids[settled : len(self.place)].tolist():
            del self.place[token]

    def _change(self, row: Tensor, request: Request) -> None:
        p = request.params
        ids = torch.from_numpy(self.ids[: len(self.place)]).long().to(row.device)
        output = torch.from_numpy(self.output[: len(self.place)]).to(row.device)
        scores = row[ids]
        if p.repetition_penalty != 1.0:
            scores = torch.where(scores > 0, scores / p.repetition_penalty, scores * p.repetition_penalty)
        row[ids] = scores - output * p.frequency_penalty - (output > 0).float() * p.presence_penalty

    def _follow(self, request: Request) -> None:
        for token in request.token_ids[self.num_known :]:
            self._push(token)
        self.num_known = len(request.token_ids)

    def _push(self, token: int) -> None:
        place = self.place.setdefault(token, len(self.place))
        if place == len(self.ids):
            self.ids = np.resize(self.ids, 2 * place + 16)
            self.output = np.concatenate([self.output, np.zeros(place + 16, dtype=np.float32)])
        self.ids[place] = token
        self.output[place] += 1


def _point(rows: NDArray[np.void], address: str, length: str, lists: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Let each of rows [n] point at its list of ids in one new array, which is returned."""
    flat = np.array([token for ids in lists for token in ids], np.int32)
    lengths = np.array([len(ids) for ids in lists])
    rows[address] = flat.ctypes.data + flat.itemsize * (np.cumsum(lengths) - lengths)
    rows[length] = lengths
    return flat
