"""Which guesses stand: walks every row's draft as long as the target itself would have said the same.

Owns the rules of acceptance; knows nothing of how a token is chosen (sampler.py), of stop conditions or of requests growing
(the committer cuts what goes too far). See PlanRow for the numbering of nodes.

"match" samples the target's own token at each node, for exactly the prefix that leads to it and under noise keyed by its
position, and descends to the child that equals it. That is plain decoding repeated: the output does not depend on the draft,
whatever the parameters, in trees too.
"standard" and "block" are p/q rules (rejection.py): lossless in distribution, with independent noise.
What is lossy stands in lossy.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..kernels import matching, noise
from ..kernels.layout import ForwardOutput
from ..kernels.noise import Purpose
from ..proposers.config import Typical
from . import lossy, rejection
from .errors import InvalidRequest
from .logit_edits import Node
from .plan import NOT_FINITE, PlanRow, RowVerdict, StepPlan, Verdict
from .prompt_logprobs import Scores
from .request import TokenLogprobs
from .sampler import Sampler, full_logits_wanted, logprobs


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

    def follow(self, path: list[int], token: int) -> None:
        """This path is accepted, and `token` comes behind it."""
        self.accepted = path
        for node, child in zip([0, *(i + 1 for i in path)], [*path, None], strict=True):
            self.tokens[node] = token if child is None else self.row.draft_token_ids[child]

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

    def __init__(
        self,
        method: Literal["match", "standard", "block"] = "match",
        typical: Typical | None = None,
        synthetic_rates: Sequence[float] | None = None,
    ) -> None:
        """typical, synthetic_rates: lossy rules, which go before the method."""
        self.method = method
        self.sampler = Sampler()
        self._typical = typical
        self._rates = synthetic_rates

    @property
    def only_matches(self) -> bool:
        """Whether sample-and-match is all there is."""
        return self.can_be_matched and self._rates is None

    @property
    def can_be_matched(self) -> bool:
        """Whether a forward may bring what matching.py says as `matched`, if no row wants logprobs: by sample-and-match, and where greedy
        rows are accepted by decree. Under other rules it may where no row has a draft."""
        return self.method == "match" and self._typical is None

    def decreed(self, row: PlanRow) -> list[int] | None:
        """The path through the row's draft that is accepted whatever the target says; None: not by decree."""
        if self._rates is None:
            return None
        return lossy.decreed_path(row.parents, self._rates, noise.uniform(_coin_keys(row)).tolist())

    def forget(self, request_id: str) -> None:
        """Finished, aborted or preempted. Unknown ids are fine."""
        self.sampler.forget(request_id)

    def verify(self, plan: StepPlan, target: ForwardOutput) -> Verdict:
        """One verdict per row of the plan. target has all nodes of the plan's sampling rows, in order, and whole logits
        rows for the nodes of those that `full_logits_wanted`. A row that fails carries its error and harms no other."""
        verdicts = self._walked(plan, target) if target.matched is None else _matched(target.matched)
        if len(verdicts) < len(plan.rows):
            following = iter(verdicts)
            verdicts = [next(following) if row.samples else RowVerdict([], []) for row in plan.rows]
        return _with_scores(plan, verdicts, target) if plan.scored else Verdict(verdicts)

    def _walked(self, plan: StepPlan, target: ForwardOutput) -> list[RowVerdict]:
        """One verdict per row that samples."""
        walks = self._walks(plan, target)
        if self._rates is not None:
            self._decree([walk for walk in walks if walk.row.draft_token_ids and walk.error is None], target.logits)
        open_walks = [w for w in walks if w.first_logits >= 0 and w.error is None and w.accepted is None]
        if target.logits is not None:
            self._choose(open_walks, plan, target.logits)
        verdicts = [_verdict(walk) for walk in walks]
        return verdicts if target.logits is None else _with_logprobs(walks, verdicts, target.logits)

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
                walk = _Walk(row, [-1] * (end - first), tops[first:end], first_logits, first_draft)
                first_logits += end - first
                assert target.logits is not None, "the forward left out logits that full_logits_wanted"
                try:
                    self.sampler.prepare(row.request, target.logits.shape[1])
                except InvalidRequest as error:
                    walk.error = str(error)
            else:
                walk = _Walk(row, argmax[first:end], tops[first:end], -1, first_draft)
            walks.append(walk)
            first, first_draft = end, first_draft + len(row.draft_token_ids)
        assert first + plan.num_scored == len(argmax), "the forward's nodes are not the plan's"
        return walks

    def _choose(self, walks: list[_Walk], plan: StepPlan, logits: Tensor) -> None:
        """Fill in the tokens of rows with logits, as far as their paths go."""
        # Trees keep sample-and-match, whose output depends on no guess and so is lossless wherever guesses come from (for fixed,
        # one-hot guesses it is the p/q rule). Greedy rows have no probabilities to compare.
        drawn = [w for w in walks if w.row.draft_token_ids and not w.row.request.params.greedy]
        if self._typical is not None:
            self._accept_typical(drawn, logits, self._typical)
        elif self.method != "match":
            self._judge([w for w in drawn if w.row.is_chain], logits, plan.draft_probs)
        walks = [w for w in walks if w.accepted is None]
        # A node's token is the one its draft would find there, penalties for the path to it included: the walk only looks it up.
        chosen = self.sampler.choose(logits, [walk.row for walk in walks], [walk.first_logits for walk in walks])
        for walk, tokens in zip(walks, chosen, strict=True):
            walk.tokens = tokens

    def _judge(self, walks: list[_Walk], logits: Tensor, draft_probs: Tensor | None) -> None:
        """The p/q rules on chains. draft_probs None: every guess was certain (one-hot q)."""
        if not walks:
            return
        places = [(walk, i) for walk in walks for i in range(len(walk.tokens))]
        nodes = [walk.node(i) for walk, i in places]
        p = self.sampler.distribution(_rows_of(places, logits), nodes)  # after all parameters, for exactly the node's prefix
        coins = noise.uniform(torch.cat([_coin_keys(walk.row) for walk in walks])).to(p.device)
        rule = rejection.block if self.method == "block" else rejection.token_level

        weights: list[Tensor] = []
        ends: list[Node] = []
        purposes: list[Purpose] = []
        first = 0
        for walk in walks:
            guesses, count = torch.tensor(walk.row.draft_token_ids, device=p.device), len(walk.row.draft_token_ids)
            if draft_probs is None:
                q = torch.zeros(count, p.shape[1], dtype=p.dtype, device=p.device).scatter_(1, guesses[:, None], 1.0)
            else:
                q = draft_probs[walk.first_draft : walk.first_draft + count].to(p)
            length, left = rule(p[first : first + count + 1], q, guesses, coins[first : first + count])
            walk.accepted = list(range(length))
            weights.append(left)
            ends.append(nodes[first + length])
            purposes.append(Purpose.TARGET if length == count else Purpose.RECOVER)
            first += count + 1
        stacked = torch.stack(weights)
        keys = noise.keys(
            [noise.stream(n.request.seed, n.request.choice, purpose) for n, purpose in zip(ends, purposes, strict=True)],
            [n.position for n in ends],
        )
        extra = torch.where(stacked.isfinite().all(-1), noise.draw(stacked, keys).to(p.device), -1).tolist()
        for walk, token in zip(walks, extra, strict=True):
            assert walk.accepted is not None
            walk.follow(walk.accepted, token)

    def _accept_typical(self, walks: list[_Walk], logits: Tensor, rule: Typical) -> None:
        for walk in walks:
            places = [(walk, i) for i in range(len(walk.tokens))]
            p = self.sampler.distribution(_rows_of(places, logits), [walk.node(i) for _, i in places])
            self._end(walk, lossy.typical_path(p, walk.row.draft_token_ids, walk.row.parents, rule), logits)

    def _decree(self, walks: list[_Walk], logits: Tensor | None) -> None:
        for walk in walks:
            path = self.decreed(walk.row)
            assert path is not None
            self._end(walk, path, logits)

    def _end(self, walk: _Walk, path: list[int], logits: Tensor | None) -> None:
        """Accept this path; the token behind it is the target's own."""
        last = path[-1] + 1 if path else 0
        token = walk.tokens[last]  # greedy
        if walk.first_logits >= 0:
            assert logits is not None
            (token,) = self.sampler.sample(logits[walk.first_logits + last][None], [walk.node(last)])
        walk.follow(path, token)


def _coin_keys(row: PlanRow) -> Tensor:
    """[1 + len(draft)] int64, by step and depth (see `noise.step_stream`). The last one is spare."""
    request, count = row.request, 1 + len(row.draft_token_ids)
    stream = noise.step_stream(request.seed, request.choice, len(request.token_ids), Purpose.ACCEPT)
    return noise.keys([stream] * count, range(count))


def _rows_of(places: Sequence[tuple[_Walk, int]], logits: Tensor) -> Tensor:
    """The logits rows of these nodes; without a copy if they are all there is."""
    rows = [walk.first_logits + i for walk, i in places]
    return logits if rows == list(range(len(logits))) else logits[rows]


def _verdict(walk: _Walk) -> RowVerdict:
    if walk.error is not None:
        return RowVerdict([], [], error=walk.error, error_code="invalid_parameters")
    tokens, tops = walk.tokens, walk.tops
    accepted = walk.path() if walk.accepted is None else walk.accepted
    emitted = [tokens[0], *[tokens[i + 1] for i in accepted]]
    # A sum is quickly made; if it is finite, so are its parts.
    is_finite = math.isfinite(sum(tops)) or (math.isfinite(tops[0]) and all(math.isfinite(tops[i + 1]) for i in accepted))
    if min(emitted) < 0 or not is_finite:
        return RowVerdict([], [], error=NOT_FINITE)
    return RowVerdict(accepted, emitted)


def _matched(answer: Tensor) -> list[RowVerdict]:
    """One verdict per row that samples, where the device has walked them."""
    failed = RowVerdict([], [], error=NOT_FINITE)
    return [
        RowVerdict([node - 1 for node in nodes[1:]], tokens) if tokens else failed for tokens, nodes in matching.emitted(answer)
    ]


def _with_scores(plan: StepPlan, verdicts: list[RowVerdict], target: ForwardOutput) -> Verdict:
    """With what the forward says of prompts. A prompt whose scores are not finite fails its row."""
    assert target.logits is not None, "the forward left out the logits that score prompts"
    scores: list[Scores] = []
    logits = target.logits[len(target.logits) - plan.num_scored :]
    for part, its_logits in zip(plan.scored, logits.split([len(part.token_ids) for part in plan.scored]), strict=True):
        scores.append(Scores.of(its_logits, part.token_ids, part.request.params.prompt_logprobs or 0))
        if not scores[-1].finite:
            verdicts[part.row] = RowVerdict([], [], error=NOT_FINITE)
    return Verdict(verdicts, scores)


def _with_logprobs(walks: Sequence[_Walk], verdicts: Sequence[RowVerdict], logits: Tensor) -> list[RowVerdict]:
    """The same verdicts, with the logprobs of each emitted token where a request asked for them."""
    places: list[tuple[_Walk, int]] = []
    token_ids: list[int] = []
    wanted: list[int | Sequence[int]] = []
    for walk, verdict in zip(walks, verdicts, strict=True):
        params = walk.row.request.params
        if params.logprobs is not None and verdict.error is None:
            places += [(walk, 0), *((walk, i + 1) for i in verdict.accepted)]
            token_ids += verdict.token_ids
            wanted += [params.logprob_token_ids or params.logprobs] * len(verdict.token_ids)
    if not places:
        return list(verdicts)
    found = iter(logprobs(_rows_of(places, logits), token_ids, wanted))

    def of(walk: _Walk, verdict: RowVerdict) -> list[TokenLogprobs] | None:
        if walk.row.request.params.logprobs is None or verdict.error is not None:
            return None
        return [next(found) for _ in verdict.token_ids]

    return [replace(v, logprobs=of(w, v)) for w, v in zip(walks, verdicts, strict=True)]
