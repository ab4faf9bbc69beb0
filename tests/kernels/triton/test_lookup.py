"""What followed a text's last tokens before, found by the kernels, against the reference, and both against the proposer."""

import random
from array import array
from typing import Literal

import pytest
import torch
from pretended_engine import GREEDY
from triton_interpreter import DEVICE

from foretoken.kernels import lookup as reference
from foretoken.kernels.lookup import Lookup, Lookups
from foretoken.kernels.triton import lookup
from foretoken.proposers.base import DraftContext, DraftRow
from foretoken.proposers.config import NgramConfig
from foretoken.proposers.ngram import NgramProposer

BLOCK = 4


@pytest.mark.parametrize("match", ["earliest", "latest"])
@pytest.mark.parametrize("seed", range(12))
def test_it_is_what_the_proposer_finds(seed: int, match: Literal["earliest", "latest"]) -> None:
    chance = random.Random(seed)
    least = chance.randint(1, 3)
    config = NgramConfig(chance.randint(1, 6), least + chance.randint(0, 2), least, match)
    depth, most = chance.randint(1, 5), 3000 if seed == 0 else 60
    blocks = [*range(2000)]
    chance.shuffle(blocks)
    texts, answers, rows, wanted = torch.zeros(8000, dtype=torch.int32), [], [], []
    proposer = NgramProposer(config)
    for name in range(chance.randint(1, 5)):
        text, emitted = ([chance.randint(0, 3) for _ in range(chance.randint(1, many))] for many in (most, depth))
        table = array("i", [blocks.pop() for _ in range(-(-len(text) // BLOCK))])
        for place, token in enumerate(text):
            texts[table[place // BLOCK] * BLOCK + place % BLOCK] = token
        rows.append(Lookup(name, len(text), table))
        answers.append([len(emitted), *emitted, *[7] * (depth - len(emitted)), *[0] * depth])
        known = text + emitted
        asked = DraftRow(str(name), known, len(text), len(known), config.num_speculative_tokens, 0, (), (0,), GREEDY)
        draft = proposer.propose(DraftContext([asked], 0, BLOCK))
        wanted.append(draft.token_ids + [0] * (config.num_speculative_tokens - len(draft.token_ids)))
    answer, sizes = torch.tensor(answers, dtype=torch.int32), (config.prompt_lookup_min, config.prompt_lookup_max)
    for device, find in (("cpu", reference.looked_up), (DEVICE, lookup.looked_up)):
        lookups = Lookups.of(rows, torch.device(device), BLOCK, sizes, match == "latest", config.num_speculative_tokens)
        assert find(lookups, texts.to(device), answer.to(device)).tolist() == wanted
