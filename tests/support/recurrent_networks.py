"""A small random Qwen3.5, and a story of two texts that takes its rows through everything that states are for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from recurrent_batches import BLOCK_SIZE, BLOCKS, Row, recurrent_batch
from small_networks import random_weights

from foretoken.kernels.decoder import decoder_program
from foretoken.kernels.fuse import fuse
from foretoken.kernels.layout import RaggedBatch, StateRoom
from foretoken.kernels.program import Program
from foretoken.kernels.torch_executor import Kernels, TorchExecutor

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "max_position_embeddings": 64,
}

ROOM = StateRoom(6, 5)
NUM_BLOCKS = 2 * BLOCKS


def recurrent_program(**settings: Any) -> Program:
    """Three of its four layers are recurrent."""
    return fuse(decoder_program(transformers.Qwen3_5TextConfig(**SIZES | settings)))


def recurrent_network(
    dtype: torch.dtype = torch.float32, device: str = "cpu", kernels: Kernels | None = None, **settings: Any
) -> TorchExecutor:
    program = recurrent_program(**settings)
    return TorchExecutor(program, random_weights(program), dtype, device=device, kernels=kernels)


@dataclass(frozen=True)
class Chapter:
    """One pass."""

    batch: RaggedBatch
    right: list[tuple[int, int, int]]  # (flat token, text, place) of tokens whose ancestors are the text's
    moves: tuple[list[int], list[int]] = ([], [])  # cache slots whose entries go elsewhere before it: source, target


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(SIZES["vocab_size"], (2, 16), generator=generator).tolist()


def story() -> list[Chapter]:
    """Prompts; a chain of guesses of which some are accepted and some not, a tree; then from a copy that was made amid accepted guesses."""
    a, b = texts()
    wrong = [(token + 1) % SIZES["vocab_size"] for token in (*a, *b)]
    return [
        Chapter(
            recurrent_batch([Row(a[:9], 0, 9, -1, 0), Row([*b[:7], wrong[0]], 0, 5, -1, 3)]),
            [(place, 0, place) for place in range(9)] + [(9 + place, 1, place) for place in range(7)],
        ),
        Chapter(
            recurrent_batch(
                [
                    Row([a[9], wrong[10], a[10], wrong[11], a[11], wrong[12]], 9, 1, 0, 1, 0, [-1, -1, 0, 1, 3]),
                    Row([b[7], wrong[1], wrong[2]], 7, 1, 3, 4, 0b011, None, (6, 5)),
                ]
            ),
            [(0, 0, 9), (2, 0, 10), (4, 0, 11), (6, 1, 7)],
        ),
        Chapter(
            recurrent_batch([Row(a[12:15], 12, 3, 1, 2, 0b01010), Row(b[8:10], 8, 2, 4, 3)]),
            [(0, 0, 12), (1, 0, 13), (2, 0, 14), (3, 1, 8), (4, 1, 9)],
            ([11, 13], [10, 11]),
        ),
        Chapter(
            recurrent_batch([Row(a[15:], 15, 1, 2, 0), Row(b[6:10], 6, 4, 5, 4)]),
            [(0, 0, 15)] + [(1 + place, 1, 6 + place) for place in range(4)],
        ),
    ]


def scores_of_texts(network: TorchExecutor) -> list[torch.Tensor]:
    """[places, V] of each text, in one pass without guesses."""
    found: list[torch.Tensor] = []
    for text in texts():
        logits = network.run(recurrent_batch([Row(text, 0, len(text))]), network.allocate(BLOCKS, BLOCK_SIZE, ROOM)).logits
        assert logits is not None
        found.append(logits.cpu())
    return found


def tell(
    run: Callable[[RaggedBatch], torch.Tensor], move: Callable[[torch.Tensor, torch.Tensor], None]
) -> list[tuple[torch.Tensor, Chapter]]:
    """[T, V] of each chapter, with the chapter."""
    found: list[tuple[torch.Tensor, Chapter]] = []
    for chapter in story():
        source, target = (torch.tensor(slots, dtype=torch.int64) for slots in chapter.moves)
        move(source, target)
        found.append((run(chapter.batch).cpu(), chapter))
    return found
