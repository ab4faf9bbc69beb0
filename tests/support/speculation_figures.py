"""Figures of speculation out of thin air, for tests of what is made of them."""

from dataclasses import replace

from foretoken.engine.bench.interleaved import Spread
from foretoken.engine.bench.speculation_figures import Figures, RequestFigures, Setting

USUAL = Figures(
    setting=Setting("draft_model", 3), concurrency=1, baseline=Spread(100.0, 99.0, 101.0), speculative=Spread(200.0, 198.0, 202.0),
    speedup=Spread(2.0, 1.98, 2.02), acceptance_rate=0.8, acceptance_per_position=(0.9, 0.8, 0.7), mu=2.4, guesses=3.0,
    draft_cost_ratio=0.3, verify_cost_ratio=1.2, bookkeeping_ratio=0.06, plain_bookkeeping_ratio=0.05, decode_share=0.9, same_answers=1.0,
    rounds=5, requests=(RequestFigures(64, 0.64, 0.32, 0.8, 3.2, 0.9),),
)


def figures(
    setting: Setting, speedup: float, concurrency: int = 1, noise: float = 0.0, mu: float = 2.4, rate: float | None = 0.8,
    draft: float = 0.3, verify: float = 1.2, decode_share: float = 0.9,
) -> Figures:
    """noise: from the median to either quarter."""
    return replace(
        USUAL, setting=setting, concurrency=concurrency,
        speculative=Spread(100 * speedup, 100 * (speedup - noise), 100 * (speedup + noise)),
        speedup=Spread(speedup, speedup - noise, speedup + noise), acceptance_rate=rate, mu=mu, draft_cost_ratio=draft,
        verify_cost_ratio=verify, decode_share=decode_share,
    )
