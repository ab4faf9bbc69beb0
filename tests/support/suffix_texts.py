"""Texts that make suffix trees large in different ways."""

import random
from collections.abc import Sequence

KINDS = ["words", "one token", "fan"]


def texts_of(kind: str, count: int, stem: Sequence[int]) -> list[list[int]]:
    """fan: everything follows the stem, so that its children are as many as there are texts."""
    dice = random.Random(1)
    match kind:
        case "words":
            return [[int(dice.paretovariate(1)) % 500 for _ in range(20)] for _ in range(count)]
        case "one token":
            return [[7] * 20 for _ in range(count)]
        case _:
            return [[*stem, 10 + number] for number in range(count)]
