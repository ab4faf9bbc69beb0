"""What follows short runs of tokens, as a plain dict: made up or counted, looked up as the rule says it, and as the table under test."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from foretoken.kernels.ngram_table import NgramTable
from foretoken.proposers.ngram_cache_checkpoint import Followed, write_table

Runs = Mapping[tuple[int, ...], tuple[int, float]]
"""What follows each run, and its chance: a number that half a float holds."""


def made_up(dice: random.Random, count: int, max_n: int, vocab_size: int) -> Runs:
    """Up to `count` runs of each length; the ids at both ends of the vocabulary are among them."""

    def token() -> int:
        return dice.choice([0, vocab_size - 1]) if dice.random() < 0.1 else dice.randrange(vocab_size)

    return {
        tuple(token() for _ in range(n)): (token(), _half(dice.uniform(0.01, 1.0)))
        for n in range(1, max_n + 1)
        for _ in range(dice.randint(1, count))
    }


def every_token(dice: random.Random, vocab_size: int) -> Runs:
    """Something follows each token, so that there is always a guess; nearly all of them are wrong."""
    return {(token,): (dice.randrange(vocab_size), _half(dice.uniform(0.3, 1.0))) for token in range(vocab_size)}


def counted(texts: Iterable[Sequence[int]], max_n: int) -> Runs:
    """The token that followed each run most often, and in which share of its places."""
    followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for text in texts:
        for end in range(1, len(text)):
            for n in range(1, min(max_n, end) + 1):
                followers[tuple(text[end - n : end])][text[end]] += 1
    return {run: (best, _half(count / seen.total())) for run, seen in followers.items() for best, count in seen.most_common(1)}


def next_of(runs: Runs, max_n: int, text: Sequence[int]) -> tuple[int, float] | None:
    """Behind the longest known run that the text ends with."""
    known = [tuple(text[-n:]) for n in range(1, min(max_n, len(text)) + 1)]
    return next((runs[run] for run in reversed(known) if run in runs), None)


def chain_of(runs: Runs, max_n: int, text: Sequence[int], most: int, least_chance: float) -> list[tuple[int, float]]:
    """One token behind the other, while all of them together are likely enough."""
    said: list[tuple[int, float]] = []
    together = np.float32(1.0)
    while len(said) < most and (step := next_of(runs, max_n, [*text, *(token for token, _ in said)])):
        together *= np.float32(step[1])
        if together < np.float32(least_chance):
            break
        said.append(step)
    return said


def followed(runs: Runs, max_n: int) -> list[Followed]:
    """By length."""
    of_each = [[run for run in runs if len(run) == n] for n in range(1, max_n + 1)]
    return [
        Followed(
            np.array(found, np.int64).reshape(-1, n),
            np.array([runs[run][0] for run in found], np.int64),
            np.array([runs[run][1] for run in found], np.float32),
        )
        for n, found in enumerate(of_each, 1)
    ]


def table_of(runs: Runs, max_n: int) -> NgramTable:
    parts = followed(runs, max_n)
    following, chances = np.concatenate([one.next for one in parts]), np.concatenate([one.chance for one in parts])
    return NgramTable([one.runs for one in parts], following, chances)


def write(folder: Path, runs: Runs, max_n: int, vocab_size: int) -> Path:
    """As a folder that `ngram_cache` takes for its model."""
    write_table(folder, followed(runs, max_n), vocab_size)
    return folder


def _half(chance: float) -> float:
    return float(np.float16(chance))
