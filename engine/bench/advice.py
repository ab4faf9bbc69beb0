"""From figures to the one sentence that a user wants: what to set, and why. Rules only; every number in it was measured.

The thresholds are those that published guides give: an acceptance rate of 70 % to aim for, 60 % and 40 % as limits, and decoding at
least half of a request's time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .choice import SIMPLE, by_setting, choose, pays_up_to, scores
from .speculation import ALWAYS, Method
from .speculation_figures import OFF, Figures

GOOD, FAIR, POOR = 0.7, 0.6, 0.4  # acceptance rates
DECODE_BOUND = 0.5  # share of a request's time


def advice(found: Sequence[Figures]) -> str:
    """One sentence. found: all settings that were tried, at every number of requests."""
    chosen = choose(scores(found))
    if chosen == OFF:
        return _why_not(found)
    mine = by_setting(found)[chosen]
    first = next((figures for figures in mine if figures.acceptance_rate is not None), mine[0])
    sentence = f"{_rate(first)}: {_keep(first, found)}"
    if limit := _limit(mine):
        sentence += f"; it pays {'one request' if limit == 1 else f'up to {limit} requests'} at a time, and is off with more"
    return sentence + "."


def recommended(found: Sequence[Figures], methods: Mapping[str, Method]) -> list[dict[str, Any]]:
    """Entries of `--speculative-config` for the chosen setting."""
    chosen = choose(scores(found))
    if chosen == OFF:
        return [{"method": "off"}]
    method, mine = methods[chosen.method], by_setting(found)[chosen]
    if chosen.adaptive:
        return method.config(chosen.k)
    limit = ALWAYS if _limit(mine) is None else pays_up_to(mine)
    # Without a limit of its own, fixed k has vLLM's.
    entries = method.config(chosen.k, adaptive=False, disable_by_batch_size=limit)
    return entries if method.has_one_length else [{**entry, "num_speculative_tokens": chosen.k} for entry in entries]


def _limit(mine: Sequence[Figures]) -> int | None:
    """Requests above which a fixed k is switched off; None = nowhere among the measured numbers."""
    limit = pays_up_to(mine)
    return None if mine[0].setting.adaptive or limit == mine[-1].concurrency else limit


def _keep(first: Figures, found: Sequence[Figures]) -> str:
    """What to do where speculation pays. first: the chosen setting with the fewest requests."""
    chosen, speed = first.setting, f"{first.speedup.median:.2f}x"
    rate = first.acceptance_rate or 0.0
    others = [f for f in found if f.concurrency == first.concurrency and not f.setting.adaptive and f.setting.method == chosen.method]
    longest = max((f.setting.k for f in others), default=chosen.k)
    if rate >= GOOD:
        if not chosen.adaptive and chosen.k == longest:
            return f"use {chosen.label} ({speed}), and try a higher k than the {longest} measured here"
        return f"use {chosen.label} ({speed})"
    if rate >= FAIR:
        return f"use {chosen.label} ({speed}); 70 % is what one aims for, a higher k would only waste guesses"
    if chosen.adaptive:
        return f"use {chosen.label} ({speed}), which guesses only where it pays; a fixed k should be low"
    if rate >= POOR:
        return f"use {chosen.label} ({speed}) and no higher k; a draft trained on text like this would gain more"
    return f"lower k or use n-gram: {chosen.label} is the fastest here ({speed}), but most of what it guesses is thrown away"


def _why_not(found: Sequence[Figures]) -> str:
    """Speculation pays nowhere: the first reason that explains it, told of the nearest miss."""
    # What guesses nothing loses nothing, and teaches nothing.
    best = max(found, key=lambda f: (f.acceptance_rate is not None, f.speedup.median))
    loss = f"switch speculation off: the best, {best.setting.label}, reaches {best.speedup.median:.2f}x"
    if best.decode_share < DECODE_BOUND:
        return (
            f"{best.decode_share:.0%} of a request is decoding: {loss}; reading prompts takes the time, "
            "which prefix caching and shorter prompts can save and speculation cannot."
        )
    if best.acceptance_rate is None:
        return f"Nothing was guessed: {loss}; these texts do not repeat themselves, so that only a trained drafter could help."
    if best.draft_cost_ratio >= best.mu > 0 and best.draft_cost_ratio > 0.1:
        return (
            f"{_rate(best)}: {loss}; drafting costs {best.draft_cost_ratio:.2f} of a target pass and brings {best.mu:.2f} tokens: "
            "use a smaller draft or n-gram."
        )
    if best.acceptance_rate >= FAIR and best.verify_cost_ratio > 1 + best.mu / 2:
        return (
            f"{_rate(best)}: {loss}; with {best.concurrency} at a time verifying costs {best.verify_cost_ratio:.2f} of a pass without "
            "guesses, since the machine is busy already: speculation helps with fewer requests at a time."
        )
    if best.acceptance_rate < POOR:
        hint = "" if best.setting.method in SIMPLE else ", try n-gram, or train the draft on text like this"
        return f"{_rate(best)}: {loss}; too few guesses are right: lower k{hint}."
    return f"{_rate(best)}: {loss}; {1 + best.mu:.2f} tokens a pass do not make up for drafting, verifying and bookkeeping."


def _rate(figures: Figures) -> str:
    return "nothing guessed" if figures.acceptance_rate is None else f"{figures.acceptance_rate * 100:.0f} %"

