"""What guesses are expected to bring, proposer by proposer; and how what became of them changes that.

Owns the estimates of acceptance.py and the trust in drafters' own probabilities. Knows no cost and takes no decision.
"""

from collections.abc import Sequence

from ...kernels.record import record
from ...proposers.base import FORCED, Draft
from ..plan import PlanRow, RowVerdict, Settled
from .acceptance import Calibration, ProposerAcceptance
from .base import RequestLimits

UNPROVEN = 16  # drafts before a proposer's average is worth the whole batch


@record
class Asked:
    """What a step asked of a row."""

    proposer: int
    ceiling: int
    made: int | None = None  # guesses that came, if some of them were cut; None = as many as were verified
    confidence: Sequence[float] | None = None


class Expectations:
    """Of one engine."""

    def __init__(self, rules: RequestLimits) -> None:
        self.acceptance = [
            ProposerAcceptance(p.max_tokens, p.is_whole, shape) for p, shape in zip(rules.proposers, rules.shapes, strict=True)
        ]
        self.revision = 0  # goes up with whatever changes an estimate
        self._calibration = [Calibration() for _ in rules.proposers]

    def is_unproven(self, proposer: int) -> bool:
        """Whether what is expected of its guesses is hardly more than a first opinion."""
        return self.acceptance[proposer].num_seen < UNPROVEN

    def chances(self, request_id: str, draft: Draft, start: int, end: int) -> list[float] | None:
        """Of each guess of a made draft, to be kept; None = unknown, as of a tree whose drafter says nothing."""
        source = draft.source[start]
        if source == FORCED:
            return None  # certain
        parents = draft.parents[start:end]
        if draft.confidence is not None:
            chances: list[float] = []
            chance = self._calibration[source].chance
            for node, parent in enumerate(parents):
                chances.append(chance(draft.confidence[start + node]) * (chances[parent] if parent >= 0 else 1.0))
            return chances
        worth = self.acceptance[source].worth(request_id)
        if self.acceptance[source].shape.branches or len(worth.accepted) < end - start:
            return None
        return [a / m if m > 0 else 0.0 for a, m in zip(worth.accepted[: end - start], worth.made, strict=False)]

    def learn(self, asked: Asked, row: PlanRow, said: RowVerdict, step: int) -> int:
        """The target has said this of the row's draft. Returns whose it was."""
        draft, request_id = row.draft_token_ids, row.request.request_id
        source = row.source[0] if draft else asked.proposer
        if source == FORCED:
            return FORCED  # nobody's merit
        self.revision += 1
        # What a drafter's own doubts cut off counts as never made: with their like left out, the rest would look better than all are.
        made = len(draft) if asked.made is None or asked.confidence is not None else asked.made
        if source != asked.proposer:  # that one had nothing, another one behind it did
            self.acceptance[asked.proposer].observe(request_id, asked.ceiling, 0, 0, (), True, step)
        wanted = asked.ceiling if source == asked.proposer else made
        self.acceptance[source].observe(request_id, wanted, made, len(draft), said.accepted, row.is_chain, step)
        if asked.confidence is not None:
            path = set(said.accepted)
            for node, parent in enumerate(row.parents):
                if parent < 0 or parent in path:
                    self._calibration[source].observe(asked.confidence[node], node in path)
        return source

    def learn_settled(self, request_id: str, draft: Settled, step: int) -> None:
        """The same of a chain that was verified as it was made."""
        self.revision += 1
        made, accepted = draft.drafted, range(draft.accepted)
        self.acceptance[draft.proposer].observe(request_id, made, made, made, accepted, True, step)

    def forget(self, request_id: str) -> None:
        for acceptance in self.acceptance:
            acceptance.forget(request_id)
