"""The target's next-token rule for exactly a given prefix: from raw logits and a request's parameters to a token.

Owns the order of the parameters and what it remembers of a request (token counts, index tensors); knows nothing of drafts
as such: a drafted token counts as part of the prefix. Order, as in vLLM: allowed_token_ids, bad_words, min_tokens,
logit_bias, repetition (prompt and output), frequency and presence penalties (output); then argmax at temperature 0, else
temperature, top_k, top_p, min_p and the noise of kernels/noise.py. Logprobs are of the raw logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels import noise
from ..kernels.noise import Purpose
from .errors import InvalidRequest
from .request import Request, TokenLogprobs

_FIRST_CANDIDATES = 256
"""How many of the best tokens top_p looks at first: the whole vocabulary is sorted only for very flat rows."""


class Node(NamedTuple):
    """A place where a token is wanted: behind the request's known tokens and `path`, the draft tokens accepted so far."""

    request: Request
    path: Sequence[int]

    @property
    def position(self) -> int:
        """Absolute position of the wanted token."""
        return len(self.request.token_ids) + len(self.path)


def needs_history(request: Request) -> bool:
    """Whether a choice depends on the tokens before it in more than the logits: such rows are sampled along the walk."""
    params = request.params
    return _penalised(request) or request.num_output_tokens < params.min_tokens or any(len(ids) > 1 for ids in request.bad_word_ids)


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
        or _penalised(request)
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
    edit: _Edit | None  # None: the logits are taken as they are

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
            edit=_Edit.of(request, vocab_size),
        )


def _edited(logits: Tensor, nodes: Sequence[Node], rules: Sequence[_Rules]) -> Tensor:
    """The logits after everything that adds, scales or forbids; the same tensor if no row does."""
    edits = [(i, r.edit) for i, r in enumerate(rules) if r.edit is not None]
    if edits:
        logits = logits.clone()
        for i, edit in edits:
            edit.apply(logits[i], nodes[i])
    return logits


@dataclass(slots=True)
class _Edit:
    """Changes of one request to its logits, in place, row by row: few requests ask for any."""

    allowed: Tensor | None  # ids
    banned: list[int]  # always: bad words of one token
    phrases: list[list[int]]  # longer bad words: the last token is banned behind the others
    stops: list[int]  # banned until min_tokens
    bias_ids: Tensor | None
    bias: Tensor
    counts: _Counts | None  # for penalties

    @classmethod
    def of(cls, request: Request, vocab_size: int) -> _Edit | None:
        """None if nothing is to change. Ids outside the vocabulary are dropped: they cannot be emitted anyway."""
        p = request.params
        known = range(vocab_size)
        allowed = None
        if p.allowed_token_ids is not None:
            allowed = torch.tensor([t for t in p.allowed_token_ids if t in known], dtype=torch.int64)
            if not len(allowed):
                raise InvalidRequest("allowed_token_ids has no token of the model's vocabulary", "allowed_token_ids")
        banned = [ids[0] for ids in request.bad_word_ids if len(ids) == 1 and ids[0] in known]
        phrases = [list(ids) for ids in request.bad_word_ids if len(ids) > 1 and ids[-1] in known]
        stops = [t for t in {*request.eos_token_ids, *p.stop_token_ids} if t in known] if p.min_tokens else []
        bias = {t: b for t, b in p.logit_bias.items() if t in known}
        counts = _Counts(request.prompt_token_ids) if _penalised(request) else None
        if allowed is None and not (banned or phrases or stops or bias or counts):
            return None
        bias_ids = torch.tensor(list(bias), dtype=torch.int64) if bias else None
        return cls(allowed, banned, phrases, stops, bias_ids, torch.tensor(list(bias.values())), counts)

    def apply(self, row: Tensor, node: Node) -> None:
        """Change row [V] into what the request wants at node."""
        if self.allowed is not None:
            ids = self.allowed.to(row.device)
            kept = row[ids]
            row.fill_(-math.inf)
            row[ids] = kept
        if bans := self._bans(node):
            ids = torch.tensor(bans, device=row.device)
            kept = row[ids]
            row[ids] = -math.inf
            if row.amax() == -math.inf:  # nothing is left: rather the best allowed token than none
                row[ids] = kept
        if self.bias_ids is not None:
            row[self.bias_ids.to(row.device)] += self.bias.to(row.device)
        if self.counts is not None:
            self.counts.penalise(row, node)

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
        self.ids = np.unique(np.asarray(prompt, dtype=np.int64))
        self.output = np.zeros(len(self.ids), dtype=np.float32)  # [capacity], of ids [capacity]
        self.place = {token: i for i, token in enumerate(self.ids.tolist())}
        self.num_known = len(prompt)

    def penalise(self, row: Tensor, node: Node) -> None:
        """Apply the three penalties to row [V] as if node.path had been emitted; the path leaves no trace."""
        known = node.request.token_ids
        for token in known[self.num_known :]:
            self._push(token)
        self.num_known = len(known)
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
        ids = torch.from_numpy(self.ids[: len(self.place)]).to(row.device)
        output = torch.from_numpy(self.output[: len(self.place)]).to(row.device)
        scores = row[ids]
        if p.repetition_penalty != 1.0:
            scores = torch.where(scores > 0, scores / p.repetition_penalty, scores * p.repetition_penalty)
        row[ids] = scores - output * p.frequency_penalty - (output > 0) * p.presence_penalty

    def _push(self, token: int) -> None:
        place = self.place.setdefault(token, len(self.place))
        if place == len(self.ids):
            self.ids = np.resize(self.ids, 2 * place + 16)
            self.output = np.concatenate([self.output, np.zeros(place + 16, dtype=np.float32)])
        self.ids[place] = token
        self.output[place] += 1


def _penalised(request: Request) -> bool:
    p = request.params
    return p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0


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

    Rows of scores [n, V] have their maximum at 0.
    """
    device, vocab_size = scores.device, scores.shape[1]
    top_k = torch.tensor([r.top_k for r in rules], device=device)
    top_p = torch.tensor([r.top_p if r.top_p < 1.0 else math.inf for r in rules], dtype=torch.float64, device=device)
    limited = top_k < vocab_size
    mass = scores.exp().sum(-1, dtype=torch.float64)  # of all tokens, in units of the best one's
    width = max((r.top_k for r in rules if r.top_k < vocab_size), default=0)
    if any(r.top_k == vocab_size for r in rules):
        width = max(width, min(_FIRST_CANDIDATES, vocab_size))
    while True:
        best = scores.topk(width, -1).values
        masses = best.double().exp()
        upto = masses.cumsum(-1)
        # after top_k the whole is what top_k left
        whole = torch.where(limited, upto.gather(1, (top_k.clamp(max=width) - 1)[:, None])[:, 0], mass)
        before = torch.nn.functional.pad(upto[:, :-1], (1, 0))
        inside = (before < (top_p * whole)[:, None]) & (torch.arange(width, device=device) < top_k[:, None])
        count = inside.sum(-1)
        if width == vocab_size or not bool((inside[:, -1] & ~limited).any()):
            break
        width = min(8 * width, vocab_size)
    floor = best.gather(1, (count - 1).clamp(min=0)[:, None])
    keep = scores >= floor
    # more tokens equal to the last one than there is room for
    tied = (keep.sum(-1) > count) & (floor[:, 0] > -math.inf)
    if bool(tied.any()):
        equal = scores[tied] == floor[tied]
        room = count[tied] - (scores[tied] > floor[tied]).sum(-1)
        keep[tied] &= ~equal | (equal.cumsum(-1) <= room[:, None])
    return scores.masked_fill_(~keep, -math.inf)
