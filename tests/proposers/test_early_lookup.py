"""Prompt lookup begun on a device: what it keeps of texts follows them wherever their blocks go, and what it begins is for who asked."""

import random

import pytest
import torch
from pretended_engine import GREEDY

from foretoken.proposers.base import ChainsAhead, DraftContext, DraftRow, RowUnderWay, UnderWay
from foretoken.proposers.config import NgramConfig
from foretoken.proposers.ngram import NgramProposer

BLOCK = 4
CONFIG = NgramConfig(3, 3, 1)


def asked(name: str, tokens: list[int], ceiling: int = 3) -> DraftRow:
    return DraftRow(name, tokens, len(tokens), len(tokens), ceiling, 0, (), (0,), GREEDY)


def guess(proposer: NgramProposer, name: str, tokens: list[int]) -> list[int]:
    return proposer.propose(DraftContext([asked(name, tokens)], 0, BLOCK)).token_ids


def under_way(texts: dict[str, list[int]], tables: dict[str, list[int]], said: list[list[int]]) -> UnderWay:
    """A step in which each row emits such tokens."""
    rows = [RowUnderWay(name, text, tables[name], GREEDY, [], i, i) for i, (name, text) in enumerate(texts.items())]
    depth = max(map(len, said))
    answer = [[len(tokens), *tokens, *[0] * (2 * depth - len(tokens))] for tokens in said]
    return UnderWay(rows, torch.tensor(answer, dtype=torch.int32), {}, BLOCK)


@pytest.mark.parametrize("seed", range(4))
def test_texts_grow_shrink_and_move(seed: int) -> None:
    """Rows come, go, and are told to use other blocks; what is begun is always what the host finds once it has seen the step."""
    chance, proposer, blocks = random.Random(seed), NgramProposer(CONFIG, places_ahead=400), [*range(100)]
    chance.shuffle(blocks)
    texts = {name: [1, 2, 1, 2, 1] for name in "abc"}
    tables = {name: [blocks.pop(), blocks.pop()] for name in texts}
    begun = 0
    for _ in range(40):
        for name, text in texts.items():
            needed = -(-(len(text) + 4) // BLOCK)
            tables[name] += [blocks.pop() for _ in range(needed - len(tables[name]))]
        event = chance.random()
        if event < 0.1:  # preempted: elsewhere from the beginning
            name = chance.choice("abc")
            proposer.forget(name)
            blocks += tables[name]
            tables[name] = [blocks.pop(0) for _ in tables[name]]
        elif event < 0.3:  # a block is exchanged for one that holds the same
            name = chance.choice("abc")
            tables[name][chance.randrange(len(tables[name]))] = blocks.pop(0)
        elif event < 0.35:
            name = chance.choice("abc")
            proposer.forget(name)
            texts[name] = [chance.randrange(3) for _ in range(chance.randint(2, 6))]
        drafts = proposer.propose(DraftContext([asked(name, text) for name, text in texts.items()], 0, BLOCK))
        said = [[chance.randrange(3) for _ in range(chance.randint(1, 3))] for _ in texts]
        ahead = proposer.begin(under_way(texts, tables, said))
        got_some = [name for name, start, end in zip(texts, drafts.start_loc, drafts.start_loc[1:], strict=False) if end > start]
        assert ({*ahead.rows} if ahead is not None else set()) == {*got_some}
        for text, tokens in zip(texts.values(), said, strict=True):
            text += tokens
        if len(blocks) < 20:
            return
        for name in got_some:
            assert ahead is not None
            row, count = ahead.rows[name]
            late = guess(NgramProposer(CONFIG), name, texts[name])
            assert ahead.token_ids[row].tolist() == late + [0] * (3 - len(late)) and count == 3
            begun += 1
    assert begun > 20


def test_only_where_steps_are_begun_and_texts_alone_are_looked_in() -> None:
    for proposer in (NgramProposer(CONFIG), NgramProposer(NgramConfig(3, 3, 1, num_branches=2), places_ahead=64)):
        assert not proposer.num_places_ahead
    assert NgramProposer(CONFIG, places_ahead=64).num_places_ahead == 7


def test_what_several_have_begun_stands_side_by_side() -> None:
    one = ChainsAhead({"a": (0, 2), "b": (1, 1)}, torch.tensor([[1, 2], [3, 4]]))
    other = ChainsAhead({"b": (0, 3), "c": (1, 3)}, torch.tensor([[5, 6, 7], [8, 9, 10]]))
    both = ChainsAhead.of([one, other])
    assert both.rows == {"a": (0, 2), "b": (1, 1), "c": (3, 3)} and ChainsAhead.of([one]) is one
    assert both.token_ids.tolist() == [[1, 2, 0], [3, 4, 0], [5, 6, 7], [8, 9, 10]]
