"""How many guesses each row of a step should get: the most tokens a second, over all prefixes of the best candidates.

A pure function of expectations and costs. SmartSpec (arXiv 2406.14066) maximises the same ratio with one k for a batch.
"""

from collections.abc import Callable, Sequence

from ...kernels.record import record
from .acceptance import Worth
from .costs import CostTable, DraftCost

MARGIN = 1.03  # a gain smaller than this is as likely an error of the estimates


@record
class Candidate:
    """A row that may be guessed for."""

    proposer: int  # index in the cost table; -1 = its drafts are made already and cost nothing more
    ceiling: int  # >= 1
    worth: Worth


@record
class Choice:
    """Guesses for each candidate, in order, and the expected tokens a second with them and without any."""

    depths: list[int]
    rate: float
    plain_rate: float


def choose(
    candidates: Sequence[Candidate], num_rows: int, num_prompt_tokens: int, context: int, budget: int, costs: CostTable,
    in_rounds: tuple[Callable[[float], float], DraftCost] | None = None,
) -> Choice:
    """num_rows: rows that get a token anyway. num_prompt_tokens: others computed in the step; only what guesses add to them counts.

    in_rounds: what a step with guesses costs by its tokens, and its drafts, where that is a round; there all are of one proposer.

    Cost has steps, so the best prefix may lie behind a worse one: all are looked at. A guess is never taken without those before it, and
    where all or none are wanted, which have one chance and so stand together, not without those behind it.
    """
    target = costs.target.at(context)
    guessed, drafts = (target, costs.drafts) if in_rounds is None else (in_rounds[0], [in_rounds[1]] * len(costs.drafts))
    depths = [0] * len(candidates)
    base = num_rows + num_prompt_tokens
    plain_s = target(num_rows)
    # A prompt in the step is paid for whatever is guessed, and its tokens are no part of what guesses are measured by.
    discount = target(base) - plain_s if num_prompt_tokens else 0.0
    plain_rate = best_rate = num_rows / plain_s
    order: list[tuple[float, int, int]] = []
    for index, candidate in enumerate(candidates):
        order += [(-chance, index, d) for d, chance in enumerate(candidate.worth.chances[: candidate.ceiling])]
    if len(candidates) > 1:
        order.sort()
    last = [min(len(one.worth.chances), one.ceiling) - 1 if one.worth.is_whole else 0 for one in candidates]
    brought, tokens, best_length = float(num_rows), float(base), 0
    depth_of = [0] * len(drafts)
    rows_of = [0] * len(drafts)
    cost_of = [0.0] * len(drafts)
    beside = -discount  # seconds, the target's aside
    rows = [(candidate.proposer, candidate.worth.accepted, candidate.worth.made) for candidate in candidates]
    for length, (_, index, d) in enumerate(order[:budget], 1):
        p, accepted, made = rows[index]
        brought += accepted[d]
        tokens += made[d]
        if p >= 0 and (d == 0 or d >= depth_of[p]):
            rows_of[p] += d == 0
            if d >= depth_of[p]:
                depth_of[p] = d + 1
            beside -= cost_of[p]
            cost_of[p] = drafts[p].seconds(depth_of[p], rows_of[p])
            beside += cost_of[p]
        rate = brought / (guessed(tokens) + beside)
        if rate > best_rate and d >= last[index]:
            best_rate, best_length = rate, length
    if best_rate < MARGIN * plain_rate:
        return Choice(depths, plain_rate, plain_rate)
    for _, index, d in order[:best_length]:
        depths[index] = max(depths[index], d + 1)
    return Choice(depths, best_rate, plain_rate)
