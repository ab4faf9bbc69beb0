"""The target's next-token rule for exactly a given prefix: from raw logits and a request's parameters to a token.

Knows nothing of drafts as such: a drafted token counts as part of the prefix. The order is vLLM's: what
logit_edits.py changes; then argmax at temperature 0, else temperature, top_k, top_p, min_p and the noise of
kernels/noise.py. Logprobs are of the raw logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import noise
from ..kernels.noise import Purpose
from .logit_edits import LogitEdits, Node, penalised
from .request import Request, TokenLogprobs

_FIRST_CANDIDATES = 256
"""How many of the best tokens top_p looks at first: the whole vocabulary is sorted only for very flat rows."""


def needs_history(request: Request) -> bool:
    """Whether a choice depends on the tokens before it in more than the logits: such rows are sampled along the walk."""
    params = request.params
    return penalised(request) or request.num_output_tokens < params.min_tokens or any(len(ids) > 1 for ids in request.bad_word_ids)


def full_logits_wanted(request: Request) -> bool:
    """Whether the request's nodes need whole logits rows; else the forward's argmax says it all."""
    params = request.params
    return (
        params.temperature != 0.0
        or params.logprobs is not None
        or params.allowed_token_ids is not None
        or bool(params.logit_bias)
        or bool(request.bad_word_ids)
        or request.num_output_tokens < params.min_tokens
        or penalised(request)
    )


class Sampler:
    """Chooses tokens. One call takes any mix of requests, and no row's result depends on the others.

    It keeps what it derives from a request until `forget`, and can derive it anew from the request alone.
    """

    def __init__(self) -> None:
        self._rules: dict[str, _Rules] = {}

    def prepare(self, request: Request, vocab_size: int) -> None:
        """Derive what later calls use. Raises InvalidRequest if no allowed token is in the vocabulary."""
        self._rules_of(request, vocab_size)

    def forget(self, request_id: str) -> None:
        """Finished, aborted or preempted. Unknown ids are fine."""
        self._rules.pop(request_id, None)

    def sample(self, logits: Tensor, nodes: Sequence[Node]) -> list[int]:
        """One token per row of logits [n, V] float32 (left untouched), for nodes [n]. -1: the row has NaN or no finite best."""
        rules = [self._rules_of(node.request, logits.shape[1]) for node in nodes]
        scores = _edited(logits, nodes, rules)
        peaks = scores.amax(-1)
        drawn = [i for i, r in enumerate(rules) if not r.greedy]
        if not drawn:
            tokens = scores.argmax(-1)
        else:
            keys = noise.keys([rules[i].stream for i in drawn], [nodes[i].position for i in drawn])
            if len(drawn) == len(rules):
                tokens = noise.sample(_narrowed(scores, peaks, rules), keys)
            else:
                tokens = scores.argmax(-1)
                tokens[drawn] = noise.sample(_narrowed(scores[drawn], peaks[drawn], [rules[i] for i in drawn]), keys)
        return torch.where(peaks.isfinite(), tokens, -1).tolist()

    def distribution(self, logits: Tensor, nodes: Sequence[Node]) -> Tensor:
        """[n, V] float64: what `sample` draws from. Only nodes with a temperature above 0; NaN where a row has NaN."""
        rules = [self._rules_of(node.request, logits.shape[1]) for node in nodes]
        scores = _edited(logits, nodes, rules)
        return torch.softmax(_narrowed(scores, scores.amax(-1), rules).double(), -1)

    def _rules_of(self, request: Request, vocab_size: int) -> _Rules:
        rules = self._rules.get(request.request_id)
        if rules is None or rules.request is not request:
            rules = self._rules[request.request_id] = _Rules.of(request, vocab_size)
        return rules


def logprobs(logits: Tensor, token_ids: Sequence[int], num_best: Sequence[int]) -> list[TokenLogprobs]:
    """Raw logprob and rank of token_ids [n], and the num_best[i] best tokens, from logits [n, V] before any parameter.

    Rank 1 is the best: one more than the number of tokens with a higher logprob. Equals stand lowest id first.
    """
    scores = torch.log_softmax(logits, -1)
    chosen = scores.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = ((scores > chosen).sum(-1) + 1).tolist()
    values, ids = scores.topk(min(max(num_best), scores.shape[1]), -1)
    return [
        TokenLogprobs(value, rank, tuple(sorted(zip(row_ids, row_values, strict=True), key=lambda t: (-t[1], t[0]))[:count]))
        for value, rank, row_ids, row_values, count in zip(
            chosen[:, 0].tolist(), ranks, ids.tolist(), values.tolist(), num_best, strict=True
        )
    ]


@dataclass(slots=True)
class _Rules:
    """A request's parameters in the form that sampling uses. vocab_size-dependent; on the CPU until used."""

    request: Request
    stream: int
    greedy: bool
    temperature: float
    top_k: int  # vocab_size = all
    top_p: float
    log_min_p: float  # -inf = off
    edit: LogitEdits | None  # None: the logits are taken as they are

    @classmethod
    def of(cls, request: Request, vocab_size: int) -> _Rules:
        p = request.params
        return cls(
            request=request,
            stream=noise.stream(request.seed, request.choice, Purpose.TARGET),
            greedy=p.greedy,
            temperature=max(p.temperature, 1e-30),  # below, float32 has no quotient
            top_k=min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size,
            top_p=p.top_p,
            log_min_p=math.log(p.min_p) if p.min_p > 0 else -math.inf,
            edit=LogitEdits.of(request, vocab_size),
        )


def _edited(logits: Tensor, nodes: Sequence[Node], rules: Sequence[_Rules]) -> Tensor:
    """The logits after everything that adds, scales or forbids; the same tensor if no row does."""
    edits = [(i, r.edit) for i, r in enumerate(rules) if r.edit is not None]
    if edits:
        logits = logits.clone()
        for i, edit in edits:
            edit.apply(logits[i], nodes[i])
    return logits


def _narrowed(scores: Tensor, peaks: Tensor, rules: Sequence[_Rules]) -> Tensor:
    """scores [n, V] with row maxima peaks [n] after temperature, top_k, top_p and min_p: -inf = left out, the best is 0."""
    device, vocab_size = scores.device, scores.shape[1]
    # subtracting the peak first keeps tiny temperatures finite
    scores = scores - peaks[:, None]
    if any(r.temperature != 1.0 for r in rules):
        scores /= torch.tensor([r.temperature for r in rules], dtype=torch.float32, device=device)[:, None]
    rows = [i for i, r in enumerate(rules) if r.top_k < vocab_size or r.top_p < 1.0]
    if len(rows) == len(rules):
        scores = _keep_best(scores, rules)
    elif rows:
        scores[rows] = _keep_best(scores[rows], [rules[i] for i in rows])
    if any(r.log_min_p > -math.inf for r in rules):
        floor = torch.tensor([r.log_min_p for r in rules], dtype=torch.float32, device=device)
        scores.masked_fill_(scores < floor[:, None], -math.inf)
    return scores


def _keep_best(scores: Tensor, rules: Sequence[_Rules]) -> Tensor:
    """top_k, then top_p on what it left: the fewest best tokens whose mass reaches top_p. Among equals the lowest ids stay.

    Rows of scores [n, V] have their maximum at 0. Left out = -inf.
    """
    device, vocab_size = scores.device, scores.shape[1]
    top_k = torch.tensor([r.top_k for r in rules], device=device)
    top_p = torch.tensor([r.top_p if r.top_p < 1.0 else math.inf for r in rules], dtype=torch.float64, device=device)
    limited = top_k < vocab_size
    width = max((r.top_k for r in rules if r.top_k < vocab_size), default=0)
    mass = torch.ones((), dtype=torch.float64, device=device)
    if any(r.top_k == vocab_size for r in rules):
        width = max(width, min(_FIRST_CANDIDATES, vocab_size))
        mass = 1.0 / torch.softmax(scores, -1).amax(-1).double()  # of all tokens, in units of the best one's
    while True:
        # one more than needed, to see whether it equals the last one kept
        best, ids = scores.topk(min(width + 1, vocab_size), -1)
        upto = best[:, :width].double().exp().cumsum(-1)
        # after top_k the whole is what top_k left
        whole = torch.where(limited, upto.gather(1, (top_k.clamp(max=width) - 1)[:, None])[:, 0], mass)
        before = torch.nn.functional.pad(upto[:, :-1], (1, 0))
        inside = (before < (top_p * whole)[:, None]) & (torch.arange(width, device=device) < top_k[:, None])
        if width == vocab_size or not bool((inside[:, -1] & ~limited).any()):
            break
        width = min(8 * width, vocab_size)
    count = inside.sum(-1)
    inside = torch.nn.functional.pad(inside, (0, best.shape[1] - width))
    kept = torch.full_like(scores, -math.inf).scatter_(1, ids, best.masked_fill(~inside, -math.inf))
    for row in (i for i, equal in enumerate(_last_is_tied(best, count)) if equal):
        kept[row] = _lowest_ids(scores[row], best[row, count[row] - 1], int(count[row]))
    return kept


def _last_is_tied(best: Tensor, count: Tensor) -> list[bool]:
    """Per row: whether number `count` of the descending values best [n, w] equals the next one, both finite."""
    last = best.gather(1, (count - 1).clamp(min=0)[:, None])
    following = best.gather(1, count.clamp(max=best.shape[1] - 1)[:, None])
    return ((last == following) & last.isfinite() & (count < best.shape[1])[:, None])[:, 0].tolist()


def _lowest_ids(scores: Tensor, floor: Tensor, count: int) -> Tensor:
    """scores [V] with `count` of them left: all above the floor, then the lowest ids of those equal to it."""
    equal = scores == floor
    above = scores > floor
    return torch.where(above | (equal & (equal.cumsum(-1) <= count - above.sum())), scores, -math.inf)
