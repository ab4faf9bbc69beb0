"""Rows whose chains go on behind a step: any lengths, drafts, tables and ends."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.kernels.continuation import Continuation, Ways

BLOCK_SIZE, VOCAB, MAX_LEN = 4, 50, 100


@dataclass(frozen=True)
class Step:
    """What a step has said of its rows, and those that go on."""

    rows: list[Continuation]
    emitted: list[list[int]]
    answer: Tensor

    @classmethod
    def random(cls, seed: int, most_rows: int = 6) -> Step:
        """Some go on, in any order."""
        rng = random.Random(seed)
        num_answers = rng.randint(1, most_rows)
        asked = rng.sample(range(num_answers), rng.randint(1, num_answers))
        rows = [_row(rng, answer, 12 * i) for i, answer in enumerate(asked)]
        drafted = {row.answer: row.num_drafted for row in rows}
        emitted = [[rng.randrange(VOCAB) for _ in range(1 + rng.randint(0, drafted.get(i, 3)))] for i in range(num_answers)]
        depth = max(map(len, emitted)) + rng.randint(0, 2)
        answer = torch.tensor([[len(said), *said, *[77] * (2 * depth - len(said))] for said in emitted], dtype=torch.int32)
        return cls(rows, emitted, answer)


def ways(rows: list[Continuation], device: str = "cpu", max_model_len: int = MAX_LEN) -> Ways:
    return Ways.of(rows, torch.device(device), BLOCK_SIZE, VOCAB, max_model_len)


def _row(rng: random.Random, answer: int, first_block: int) -> Continuation:
    length, num_drafted = rng.randint(1, 30), rng.randint(0, 5)
    num_blocks = -(-(length + num_drafted + 1) // BLOCK_SIZE) + rng.randint(0, 2)
    table = rng.sample(range(first_block, first_block + 12), num_blocks) if num_blocks <= 12 else list(range(num_blocks))
    held = rng.choice([0, max(num_drafted - 1, 0), num_drafted])
    return Continuation(answer, length, num_drafted, held, rng.randint(0, 9), array("i", table), rng.choice([0, 0, 1]), rng.randint(1, 6))
