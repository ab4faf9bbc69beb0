"""Which guesses count as accepted: the exact rule, the papers' p/q rules, or a lossy one that is asked for by name.

Knows the keys of that choice and how vLLM's synthetic rates are meant.
"""

from collections.abc import Mapping
from typing import Any

from .config import Typical
from .config_entry import ConfigEntry, SpeculativeConfigError, given

RULES = ("match", "standard", "block")


def read_acceptance(entry: ConfigEntry, method: str, depth: int | None) -> dict[str, Any]:
    """Those of rejection_sample_method, typical and synthetic_rates (fields of SpeculativeConfig) that the entry names.

    depth: how many guesses the entry's proposer makes in a row, None if the config does not say.
    """
    rule = entry.choice("rejection_sample_method", (*RULES, "synthetic"), lossy=("fly",))
    if method == "synthetic" and rule in RULES:
        raise SpeculativeConfigError(f"method 'synthetic' decides acceptance by given rates: leave 'rejection_sample_method' {rule!r} out")
    sampler = entry.choice("acceptance_method", ("rejection_sampler", "typical", "typical_acceptance_sampler"))
    typical: Typical | None = None
    if sampler in ("typical", "typical_acceptance_sampler"):
        threshold, alpha = entry.number("posterior_threshold", 0, 1), entry.number("posterior_alpha", 0, 1)
        typical = Typical(**given(threshold=threshold, alpha=alpha))
    return given(
        rejection_sample_method=rule if rule in RULES else None,
        typical=typical,
        synthetic_rates=_synthetic_rates(entry, "synthetic" in (rule, method), depth),
    )


def check_acceptance(settings: Mapping[str, Any]) -> None:
    """Raise if what several entries say together contradicts itself."""
    rule = settings.get("rejection_sample_method")
    if "typical" in settings and rule in ("standard", "block"):
        raise SpeculativeConfigError(f"'acceptance_method' 'typical' and 'rejection_sample_method' {rule!r} are two rules: give one")
    if "synthetic_rates" in settings and ("typical" in settings or rule is not None):
        other = "'acceptance_method' 'typical'" if "typical" in settings else f"'rejection_sample_method' {rule!r}"
        raise SpeculativeConfigError(f"synthetic acceptance and {other} are two rules: give one")


def _synthetic_rates(entry: ConfigEntry, is_synthetic: bool, depth: int | None) -> tuple[float, ...] | None:
    """Chance of each guess, given that those before it passed; the last holds for all behind it."""
    rates = entry.numbers("synthetic_acceptance_rates", 0, 1)
    length = entry.number("synthetic_acceptance_length", 1, 2**31 - 1)
    if not is_synthetic:
        if rates is not None or length is not None:
            key = "synthetic_acceptance_length" if rates is None else "synthetic_acceptance_rates"
            raise SpeculativeConfigError(f"{key!r} makes outputs nonsense, so it needs 'rejection_sample_method': 'synthetic' beside it")
        return None
    if (rates is None) == (length is None):
        raise SpeculativeConfigError("synthetic acceptance needs one of 'synthetic_acceptance_rates' and 'synthetic_acceptance_length'")
    if rates is not None:
        return _conditional(rates)
    assert length is not None
    if depth is None:
        raise SpeculativeConfigError("'synthetic_acceptance_length' needs 'num_speculative_tokens' beside it")
    if length > depth + 1:
        raise SpeculativeConfigError(
            f"'synthetic_acceptance_length' {length} is above {depth + 1}: {depth} guesses and the extra token; "
            "lower it or raise 'num_speculative_tokens'"
        )
    return (_rate_of_length(length, depth),)


def _conditional(rates: tuple[float, ...]) -> tuple[float, ...]:
    """vLLM's rates are unconditional, rate i the chance that guesses 0..i all pass: (0.8, 0.4) -> (0.8, 0.5)."""
    before = (1.0, *rates)
    if any(rate > previous for previous, rate in zip(before, rates, strict=False)):
        raise SpeculativeConfigError(
            f"'synthetic_acceptance_rates' {list(rates)} must not rise: each is the chance that this guess and all before it are accepted"
        )
    return tuple(rate / previous if previous else 0.0 for previous, rate in zip(before, rates, strict=False))


def _rate_of_length(length: float, depth: int) -> float:
    """The rate r, equal for all guesses, with 1 + r + r^2 + ... + r^depth = length."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(depth + 1)) < length else (low, middle)
    return round(high, 12)
