"""The target's next-token rule for exactly a given prefix: from raw logits and a request's parameters to a token.

A drafted token counts as part of the prefix, so that all nodes of a draft can be asked for at once. The order is vLLM's:
what logit_edits.py changes; then argmax at temperature 0, else what logit_filters.py leaves and the noise of
kernels/noise.py. Logprobs are of the raw logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels import noise, sampling
from ..kernels.noise import Purpose
from .logit_edits import LogitEdits, Node
from .logit_filters import Filters, best, narrowed
from .plan import PlanRow
from .request import Request, TokenLogprobs

_AT_ONCE = 1 << 18
"""Most scores (nodes x vocabulary) that torch looks at whether or not a path reaches them. Affects speed only."""


def full_logits_wanted(request: Request) -> bool:
    """Whether the request's nodes need whole logits rows; else the forward's argmax says it all."""
    params = request.params  # asked for twice a row and step
    return (
        params.needs_scores
        or request.grammar is not None
        or (request.thinking is not None and request.thinking.watches)
        or bool(request.bad_word_ids)
        or (params.min_tokens > 0 and request.num_output_tokens < params.min_tokens)
    )


class Sampler:
    """Chooses tokens. One call takes any mix of requests, and no row's result depends on the others.

    It keeps what it derives from a request until `forget`, and can derive it anew from the request alone. `sample` and
    `distribution` are the rule in torch. `choose` follows it natively where it can, with the same tokens up to rounding.
    """

    def __init__(self, native: bool | None = None) -> None:
        """native: whether to use the native library; None = if there is one."""
        self._native = sampling.available() if native is None else native
        self._rules: dict[str, _Rules] = {}

    def prepare(self, request: Request, vocab_size: int) -> None:
        """Derive what later calls use. Raises InvalidRequest if no allowed token is in the vocabulary, or no grammar can be followed."""
        self._rules_of(request, vocab_size)
        if request.grammar is not None:
            request.grammar.require()

    def packed(self, request: Request, vocab_size: int) -> bytes:
        """One sampling.ROW for all places of a request that nothing edits, with the stream for a key. The native side only."""
        if request.params.greedy:
            return _GREEDY
        rules = self._rules_of(request, vocab_size)
        assert rules.edit is None, "its logits are edited"
        return rules.packed

    def forget(self, request_id: str) -> None:
        """Finished, aborted or preempted. Unknown ids are fine."""
        self._rules.pop(request_id, None)

    def choose(self, logits: Tensor, rows: Sequence[PlanRow], first_logits: Sequence[int]) -> list[list[int]]:
        """Per row of a plan, the target's token at each of its nodes that its own choices lead to; nodes elsewhere may have -1.

        Node i of rows[r] reads logits[first_logits[r] + i]; logits [M, V] float32 are left untouched. -1: the logits have
        NaN or no finite best.
        """
        nodes = _Nodes.of(rows, first_logits)
        if self._native and sampling.takes(logits):
            tokens = self._choose_natively(logits, rows, nodes)
        elif logits.is_cuda:
            tokens = self._choose_on_gpu(logits, rows, nodes).tolist()
        else:
            tokens = self._choose_by_levels(logits, rows, nodes)
        return [tokens[start : start + 1 + len(row.draft_token_ids)] for row, start in zip(rows, nodes.starts, strict=True)]

    def choose_ahead(self, logits: Tensor, rows: Sequence[PlanRow], first_logits: Sequence[int]) -> Tensor:
        """[N] int64 on the logits' device, as `choose`, all nodes in a row: on a GPU before anybody has waited for the logits, which
        are [M, V] of any floating point type."""
        if logits.is_cuda:
            return self._choose_on_gpu(logits, rows, _Nodes.of(rows, first_logits))
        chosen = self.choose(logits.float(), rows, first_logits)
        return torch.tensor([token for tokens in chosen for token in tokens], dtype=torch.int64)

    def sample(self, logits: Tensor, nodes: Sequence[Node]) -> list[int]:
        """One token per row of logits [n, V] float32 (left untouched), for nodes [n]. -1: the row has NaN or no finite best."""
        rules = [self._rules_of(node.request, logits.shape[1]) for node in nodes]
        scores = _edited(logits, nodes, rules)
        peaks = scores.amax(-1)
        drawn = [i for i, r in enumerate(rules) if not r.greedy]
        tokens = scores.argmax(-1)
        if drawn:
            some = drawn if len(drawn) < len(rules) else slice(None)
            keys = noise.keys([rules[i].stream for i in drawn], [nodes[i].position for i in drawn])
            left = narrowed(scores[some], peaks[some], [rules[i].filters for i in drawn])
            tokens[some] = noise.draw(torch.softmax(left, -1), keys).to(tokens.device)
        return torch.where(peaks.isfinite(), tokens, -1).tolist()

    def distribution(self, logits: Tensor, nodes: Sequence[Node]) -> Tensor:
        """[n, V] float64: what `sample` draws from. Only nodes with a temperature above 0; NaN where a row has NaN."""
        rules = [self._rules_of(node.request, logits.shape[1]) for node in nodes]
        scores = _edited(logits, nodes, rules)
        return torch.softmax(narrowed(scores, scores.amax(-1), [r.filters for r in rules]).double(), -1)

    def _rules_of(self, request: Request, vocab_size: int) -> _Rules:
        rules = self._rules.get(request.request_id)
        if rules is None or rules.request is not request:
            rules = self._rules[request.request_id] = _Rules.of(request, vocab_size)
        return rules

    def _choose_by_levels(self, logits: Tensor, rows: Sequence[PlanRow], nodes: _Nodes) -> list[int]:
        """All nodes at once while they are few, else only those that the tokens chosen before lead to."""
        tokens = [-1] * len(nodes.parents)
        asked = [Node(row.request, path) for row in rows for path in _paths(row)]
        level = nodes.starts if len(tokens) * logits.shape[1] > _AT_ONCE else range(len(tokens))
        while level:
            places = [nodes.logits_rows[i] for i in level]
            several = logits if places == list(range(len(logits))) else logits[torch.tensor(places)]
            for i, token in zip(level, self.sample(several, [asked[i] for i in level]), strict=True):
                tokens[i] = token
            reached = set(level) if len(level) < len(tokens) else ()
            level = [i for i, parent in enumerate(nodes.parents) if parent in reached and tokens[parent] == nodes.guesses[i]]
        return tokens

    def _choose_on_gpu(self, logits: Tensor, rows: Sequence[PlanRow], nodes: _Nodes) -> Tensor:
        from ..kernels.triton.sample_rows import sample  # Triton is there only where torch is built for GPUs

        places, _kept = self._described(rows, nodes, logits.shape[1])
        return sample(logits, np.array(nodes.logits_rows), places)

    def _choose_natively(self, logits: Tensor, rows: Sequence[PlanRow], nodes: _Nodes) -> list[int]:
        places, _kept = self._described(rows, nodes, logits.shape[1])
        places["logits"] = sampling.rows_of(logits, np.array(nodes.logits_rows))
        return sampling.sample(places, logits.shape[1]).tolist()

    def _described(self, rows: Sequence[PlanRow], nodes: _Nodes, vocab_size: int) -> tuple[NDArray[np.void], list[object]]:
        """All nodes as sampling.ROW, their logits still to be filled in, and arrays to keep until they are sampled."""
        packed = bytearray()
        kept: list[object] = []
        looking_back: list[tuple[int, PlanRow, LogitEdits]] = []
        for start, row in zip(nodes.starts, rows, strict=True):
            rules = self._rules_of(row.request, vocab_size)
            kept.append(rules)  # it owns the arrays that its packed form points to
            num_draft_tokens = len(row.draft_token_ids)
            if rules.edit is not None:
                rules.refresh()
                if rules.edit.looks_back(row.request, num_draft_tokens):
                    looking_back.append((start, row, rules.edit))
            packed += rules.packed * (1 + num_draft_tokens)
        places = np.frombuffer(packed, sampling.ROW)
        places["key"] = noise.keys(places["key"], nodes.positions).numpy()
        if len(places) > len(rows):
            places["parent"] = nodes.parents
            places["guess"] = nodes.guesses
        for start, row, edit in looking_back:
            paths = _paths(row)
            kept += edit.describe_nodes(places[start : start + len(paths)], [Node(row.request, path) for path in paths])
        return places, kept


def logprobs(logits: Tensor, token_ids: Sequence[int], beside: Sequence[int | Sequence[int]]) -> list[TokenLogprobs]:
    """Raw logprob and rank of token_ids [n], and of other tokens, from logits [n, V] before any parameter.

    beside [n]: how many of the best tokens, or which ones. Rank 1 is the best: one more than the number of tokens with a higher
    logprob. Equals stand lowest id first.
    """
    scores = torch.log_softmax(logits, -1)
    chosen = scores.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = ((scores > chosen).sum(-1) + 1).tolist()
    most = max((count for count in beside if isinstance(count, int)), default=0)
    values, ids = (part.tolist() for part in best(scores, most))
    found: list[TokenLogprobs] = []
    for row, (value, rank, asked) in enumerate(zip(chosen[:, 0].tolist(), ranks, beside, strict=True)):
        if isinstance(asked, int):
            others = list(zip(ids[row][:asked], values[row][:asked], strict=True))
        else:
            others = list(zip(asked, scores[row, torch.tensor(asked, dtype=torch.int64)].tolist(), strict=True))
        found.append(TokenLogprobs(value, rank, tuple(others)))
    return found


def _greedy() -> bytes:
    row = sampling.neutral(1)
    row["temperature"] = 0.0
    return row.tobytes()


_GREEDY = _greedy()


@dataclass(slots=True)
class _Rules:
    """A request's parameters in the form that sampling uses. vocab_size-dependent; on the CPU until used."""

    request: Request
    stream: int
    greedy: bool
    filters: Filters
    edit: LogitEdits | None  # None: the logits are taken as they are
    row: NDArray[np.void]  # [1] of sampling.ROW: what all nodes share, with the stream for a key
    packed: bytes  # of row

    @classmethod
    def of(cls, request: Request, vocab_size: int) -> _Rules:
        p = request.params
        filters = Filters(
            temperature=max(p.temperature, 1e-30),  # below, float32 has no quotient
            top_k=min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size,
            top_p=p.top_p,
            log_min_p=math.log(p.min_p) if p.min_p > 0 else -math.inf,
        )
        stream = noise.stream(request.seed, request.choice, Purpose.TARGET)
        edit = LogitEdits.of(request, vocab_size)
        row = sampling.neutral(1)
        row["key"] = stream
        row["temperature"] = 0.0 if p.greedy else filters.temperature
        row["top_k"], row["top_p"], row["log_min_p"] = filters.top_k, filters.top_p, filters.log_min_p
        if edit is not None:
            edit.describe(row, request)
        return cls(request, stream, p.greedy, filters, edit, row, row.tobytes())

    def refresh(self) -> None:
        """Follow the request as it grows."""
        if self.edit is not None and self.edit.counts is not None:
            self.edit.counts.describe(self.row, self.request)
            self.packed = self.row.tobytes()


@dataclass(slots=True)
class _Nodes:
    """The nodes of several rows of a plan, one after the other."""

    starts: list[int]  # [R] node 0 of each row
    logits_rows: list[int]  # [N]
    positions: list[int]  # [N] absolute, of the wanted token
    parents: list[int]  # [N] node before it, -1 = none
    guesses: list[int]  # [N] the draft token that leads to it, -1 = none

    @classmethod
    def of(cls, rows: Sequence[PlanRow], first_logits: Sequence[int]) -> _Nodes:
        nodes = cls([], [], [], [], [])
        for row, first in zip(rows, first_logits, strict=True):
            start, position = len(nodes.parents), len(row.request.token_ids)
            nodes.starts.append(start)
            nodes.parents.append(-1)
            nodes.guesses.append(-1)
            nodes.positions.append(position)
            nodes.logits_rows.extend(range(first, first + 1 + len(row.draft_token_ids)))
            if row.draft_token_ids:
                nodes.guesses.extend(row.draft_token_ids)
                for parent in row.parents:
                    nodes.parents.append(start + 1 + parent)
                    nodes.positions.append(nodes.positions[start + 1 + parent] + 1)
        return nodes


def _paths(row: PlanRow) -> list[list[int]]:
    """The draft tokens that lead to each node of the row."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(row.draft_token_ids, row.parents, strict=True):
        paths.append([*paths[parent + 1], token])
    return paths


def _edited(logits: Tensor, nodes: Sequence[Node], rules: Sequence[_Rules]) -> Tensor:
    """The logits after everything that adds, scales or forbids; the same tensor if no row does."""
    edits = [(i, r.edit) for i, r in enumerate(rules) if r.edit is not None]
    if edits:
        logits = logits.clone()
        for i, edit in edits:
            edit.apply(logits[i], nodes[i])
    return logits
