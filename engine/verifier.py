"""Which guesses stand: walks every row's draft as long as the target itself would have said the same.

Owns the rules of acceptance; knows nothing of how a token is chosen (sampler.py), of stop conditions or of requests growing
(the committer cuts what goes too far). See PlanRow for the numbering of nodes.

"match" samples the target's own token at each node, for exactly the prefix that leads to it and under noise keyed by its
position, and descends to the child that equals it. That is plain decoding repeated: the output does not depend on the draft,
whatever the parameters, in trees too.
"standard" is the p/q rule of Leviathan et al. 2023 and Chen et al. 2023: lossless in distribution, with independent noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..kernels import noise
from ..kernels.layout import ForwardOutput
from ..kernels.noise import Purpose
from .errors import InvalidRequest
from .logit_edits import Node
from .plan import PlanRow, RowVerdict, StepPlan, Verdict
from .request import TokenLogprobs
from .sampler import Sampler, full_logits_wanted, logprobs

_NOT_FINITE = "the model's scores for this request were not finite"


@dataclass(slots=True)
class _Walk:
    """One sampling row on its way to a verdict. Node i of the row is node first + i of the forward."""

    row: PlanRow
    tokens: list[int]  # [1 + len(draft)] the target's token at each node; -1 = not finite, or not sampled yet
    tops: list[float]  # [1 + len(draft)]
    first_logits: int  # logits row of node 0; -1 = the argmax is enough
    first_draft: int  # row of draft_probs of the first draft token
    error: str | None = None
    accepted: list[int] | None = None  # the accepted path; None = follow `tokens`

    def node(self, index: int) -> Node:
        """Node `index` with the draft tokens that lead to it."""
        path: list[int] = []
        at = index - 1
        while at >= 0:
            path.append(self.row.draft_token_ids[at])
            at = self.row.parents[at]
        return Node(self.row.request, path[::-1])

    def path(self) -> list[int]:
        """The accepted path. Children stand behind their parents, so one pass over the draft follows it to its end."""
        accepted: list[int] = []
        at, token = -1, self.tokens[0]
        for i, (parent, drafted) in enumerate(zip(self.row.parents, self.row.draft_token_ids, strict=True)):
            if parent == at and drafted == token:
                accepted.append(i)
                at, token = i, self.tokens[i + 1]
        return accepted


class Verifier:
    """The acceptance rule of a server. It keeps no state of its own; its sampler does, until `forget`."""

    def __init__(self, method: Literal["match", "standard"] = "match") -> None:
        self.method = method
        self.sampler = Sampler()

    def forget(self, request_id: str) -> None:
        """Finished, aborted or preempted. Unknown ids are fine."""
        self.sampler.forget(request_id)

    def verify(self, plan: StepPlan, target: ForwardOutput) -> Verdict:
        """One verdict per row of the plan. target has all nodes of the plan's sampling rows, in order, and whole logits
        rows for the nodes of those that `full_logits_wanted`. A row that fails carries its error and harms no other."""
        walks = self._walks(plan, target)
        if target.logits is not None:
            self._choose([walk for walk in walks if walk.first_logits >= 0 and walk.error is None], plan, target.logits)
        verdicts = [_verdict(walk) for walk in walks]
        if target.logits is not None:
            verdicts = _with_logprobs(walks, verdicts, target.logits)
        if len(verdicts) == len(plan.rows):
            return Verdict(verdicts)
        following = iter(verdicts)
        return Verdict([next(following) if row.samples else RowVerdict([], []) for row in plan.rows])

    def _walks(self, plan: StepPlan, target: ForwardOutput) -> list[_Walk]:
        """The rows that sample, with the argmax of each node; rows that need more are marked by their first_logits."""
        argmax, tops = target.argmax.tolist(), target.top.tolist()
        walks: list[_Walk] = []
        first = first_logits = first_draft = 0
        for row in plan.rows:
            if not row.samples:
                continue
            end = first + 1 + len(row.draft_token_ids)
            if full_logits_wanted(row.request):
                assert target.logits is not None, "the forward left out logits that full_logits_wanted"
                walk = _Walk(row, [-1] * (end - first), tops[first:end], first_logits, first_draft)
                first_logits += end - first
                try:
                    self.sampler.prepare(row.request, target.logits.shape[1])
                except InvalidRequest as error:
                    walk.error = str(error)
            else:
                walk = _Walk(row, argmax[first:end], tops[first:end], -1, first_draft)
            walks.append(walk)
            first, first_draft = end, first_draft + len(row.draft_token_ids)
        assert first == len(argmax), "the forward's nodes are not the plan's"
        return walks

    def _choose(self, walks: list[_Walk], plan: StepPlan, logits: Tensor) -> None:
        """Fill in the tokens of rows with logits, as far as their paths go."""
        if self.method == "standard":
            # Trees keep sample-and-match, whose output depends on no guess and so is lossless wherever guesses come from
            # (for fixed, one-hot guesses it is the p/q rule). Greedy rows have no probabilities to compare.
            judged = [w for w in walks if w.row.draft_token_ids and w.row.is_chain and not w.row.request.params.greedy]
            self._judge(judged, logits, plan.draft_probs)
            walks = [w for w in walks if w.accepted is None]
        # A node's token is the one its draft would find there, penalties for the path to it included: the walk only looks it up.
        chosen = self.sampler.choose(logits, [walk.row for walk in walks], [walk.first_logits for walk in walks])
        for walk, tokens in zip(walks, chosen, strict=True):
            walk.tokens = tokens

    def _judge(self, walks: list[_Walk], logits: Tensor, draft_probs: Tensor | None) -> None:
        """The token-level p/q rule on chains. draft_probs None: every guess was certain (one-hot q).

        p is after all parameters for exactly the node's prefix. Accept x if u * q(x) < p(x): strictly, so that u = 0 does
        not pass a token with p = 0. After the first rejection one token ~ norm(max(p - q, 0)); after none, one ~ p.
        """
        if not walks:
            return
        places = [(walk, i) for walk in walks for i in range(len(walk.tokens))]
        nodes = [walk.node(i) for walk, i in places]
        p = self.sampler.distribution(_rows_of(places, logits), nodes)
        tested = [n for n, (walk, i) in enumerate(places) if i < len(walk.row.draft_token_ids)]
        guesses = torch.tensor([t for walk in walks for t in walk.row.draft_token_ids], device=p.device)
        q = None
        if draft_probs is not None:
            q = draft_probs[[walk.first_draft + i for walk, i in places if i < len(walk.row.draft_token_ids)]].to(p)
        p_of_guess = p[tested].gather(1, guesses[:, None])[:, 0]
        q_of_guess = 1.0 if q is None else q.gather(1, guesses[:, None])[:, 0]
        coins = noise.uniform(_keys([nodes[n] for n in tested], Purpose.ACCEPT)).to(p.device)
        passed = iter((coins * q_of_guess < p_of_guess).tolist())

        ends: list[int] = []  # per walk, the place where the extra token is drawn
        rejected: list[tuple[int, int]] = []  # (number of the walk, row of q)
        first = 0
        for number, walk in enumerate(walks):
            verdicts = [next(passed) for _ in walk.row.draft_token_ids]
            length = verdicts.index(False) if False in verdicts else len(verdicts)
            walk.accepted = list(range(length))
            ends.append(first + length)
            if length < len(verdicts):
                rejected.append((number, first - number + length))
            first += len(walk.tokens)

        weights = p[ends]
        keys = _keys([nodes[n] for n in ends], Purpose.TARGET)
        if rejected:
            numbers, q_rows = map(list, zip(*rejected, strict=True))
            weights[numbers] = _residual(weights[numbers], guesses[q_rows], None if q is None else q[q_rows])
            keys[numbers] = _keys([nodes[ends[number]] for number in numbers], Purpose.RECOVER)
        extra = torch.where(weights.isfinite().all(-1), noise.draw(weights, keys).to(p.device), -1).tolist()
        for walk, token in zip(walks, extra, strict=True):
            assert walk.accepted is not None
            length = len(walk.accepted)
            walk.tokens[: length + 1] = [*walk.row.draft_token_ids[:length], token]


def _residual(p: Tensor, guesses: Tensor, q: Tensor | None) -> Tensor:
    """max(p - q, 0) [n, V], not normalised; p where rounding leaves nothing of it."""
    residual = p.scatter(1, guesses[:, None], 0.0) if q is None else (p - q).clamp(min=0.0)
    return torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)


def _keys(nodes: Sequence[Node], purpose: Purpose) -> Tensor:
    return noise.keys([noise.stream(n.request.seed, n.request.choice, purpose) for n in nodes], [n.position for n in nodes])


def _rows_of(places: Sequence[tuple[_Walk, int]], logits: Tensor) -> Tensor:
    """The logits rows of these nodes; without a copy if they are all there is."""
    rows = [walk.first_logits + i for walk, i in places]
    return logits if rows == list(range(len(logits))) else logits[rows]


def _verdict(walk: _Walk) -> RowVerdict:
    if walk.error is not None:
        return RowVerdict([], [], error=walk.error)
    tokens, tops = walk.tokens, walk.tops
    accepted = walk.path() if walk.accepted is None else walk.accepted
    nodes = [0, *(i + 1 for i in accepted)]
    emitted = [tokens[i] for i in nodes]
    if min(emitted) < 0 or not all(math.isfinite(tops[i]) for i in nodes):
        return RowVerdict([], [], error=_NOT_FINITE)
    return RowVerdict(accepted, emitted)


def _with_logprobs(walks: Sequence[_Walk], verdicts: Sequence[RowVerdict], logits: Tensor) -> list[RowVerdict]:
    """The same verdicts, with the logprobs of each emitted token where a request asked for them."""
    places: list[tuple[_Walk, int]] = []
    token_ids: list[int] = []
    num_best: list[int] = []
    for walk, verdict in zip(walks, verdicts, strict=True):
        wanted = walk.row.request.params.logprobs
        if wanted is not None and verdict.error is None:
            places += [(walk, 0), *((walk, i + 1) for i in verdict.accepted)]
            token_ids += verdict.token_ids
            num_best += [wanted] * len(verdict.token_ids)
    if not places:
        return list(verdicts)
    found = iter(logprobs(_rows_of(places, logits), token_ids, num_best))

    def of(walk: _Walk, verdict: RowVerdict) -> list[TokenLogprobs] | None:
        if walk.row.request.params.logprobs is None or verdict.error is not None:
            return None
        return [next(found) for _ in verdict.token_ids]

    return [RowVerdict(v.accepted, v.token_ids, of(w, v), v.error) for w, v in zip(walks, verdicts, strict=True)]
