"""Variants of a test: which of them `make test` runs, and which `make test-all` alone."""

from collections.abc import Hashable, Iterable
from typing import Any

import pytest


def slow_but(fast: Iterable[Hashable], every: Iterable[Hashable]) -> list[Any]:
    """All of `every` for `parametrize`, in that order; those that are not `fast` are slow.

    slow_but(range(2), range(10)) -> the first two seeds, and eight more under `make test-all`.
    """
    chosen, found = set(fast), list(every)
    assert chosen <= set(found), f"no variants of this test: {chosen - set(found)}"
    return [one if one in chosen else pytest.param(one, marks=pytest.mark.slow) for one in found]
