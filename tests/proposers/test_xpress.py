"""XPress's refiner beyond the numbers that test_dflash.py compares: what its passes lead to, and blocks of different lengths."""

from dataclasses import replace

import pytest
import torch

from foretoken.proposers.block_heads import Block
from foretoken.proposers.xpress import XPress

WIDTH, RANK, INNER, VOCAB, PLACES = 6, 4, 5, 11, 8


def refiner(passes: int = 6, seed: int = 0) -> XPress:
    torch.manual_seed(seed)
    w2 = torch.randn(VOCAB, RANK)
    square, states, inner = (RANK, RANK), (RANK, WIDTH), (INNER, RANK)
    shapes = [(VOCAB, RANK), square, states, states, (RANK, PLACES, PLACES), inner, inner, (RANK, INNER)]
    embedding, enter, local, whole, mix, gate, up, down = map(torch.randn, shapes)
    return XPress(embedding, enter, local, whole, mix.tril(), gate, up, down, lambda x: x @ w2.T, passes)


def block(counts: list[int], has_anchors: bool, seed: int = 1) -> Block:
    torch.manual_seed(seed)
    total, rows = sum(counts), len(counts)
    starts = [sum(counts[:i]) for i in range(rows)]
    tokens, before = torch.randint(VOCAB, (2, rows))
    anchors = torch.randn(rows, WIDTH) if has_anchors else None
    return Block(torch.randn(total, VOCAB), torch.randn(total, WIDTH), starts, counts, tokens, anchors=anchors, before=before)


def row_of(whole: Block, i: int) -> Block:
    span = slice(whole.starts[i], whole.starts[i] + whole.counts[i])
    anchors = None if whole.anchors is None else whole.anchors[i : i + 1]
    assert whole.before is not None
    one, before = whole.tokens[i : i + 1], whole.before[i : i + 1]
    return Block(whole.logits[span], whole.hidden[span], [0], [whole.counts[i]], one, anchors=anchors, before=before)


def scores(xpress: XPress, asked: Block) -> torch.Tensor:
    every = torch.arange(len(asked.hidden))
    return xpress.begin(asked).scores(every, every, 0, every)


@pytest.mark.parametrize("has_anchors", [False, True])
def test_blocks_of_different_lengths_are_what_each_is_alone(has_anchors: bool) -> None:
    asked = block([3, 7, 1, 5], has_anchors)
    found = scores(refiner(), asked)
    alone = torch.cat([scores(refiner(), row_of(asked, i)) for i in range(4)])
    assert torch.allclose(found, alone, atol=1e-4)


@pytest.mark.parametrize("has_anchors", [False, True])
def test_as_many_passes_as_guesses_say_what_is_said_one_after_the_other(has_anchors: bool) -> None:
    """And more of them change nothing."""
    asked = block([7], has_anchors)
    found = scores(refiner(passes=7), asked)
    chosen = found.argmax(-1)
    assert torch.equal(scores(refiner(passes=50), asked), found)
    # with the right tokens before each place one pass is enough
    head = refiner(passes=1)
    start = torch.full_like(asked.logits, -1e4).scatter(1, chosen[:, None], 1e4)
    again = scores(head, replace(asked, logits=start)) - start + asked.logits
    assert torch.allclose(again, found, atol=1e-2)
    assert not torch.equal(scores(head, asked).argmax(-1), chosen), "one pass is enough: the test shows little"


def test_a_pass_settles_one_guess_more() -> None:
    asked = block([6], True)
    final = scores(refiner(passes=6), asked)
    for passes in range(1, 6):
        assert torch.allclose(scores(refiner(passes=passes), asked)[:passes], final[:passes], atol=1e-5)


def test_the_token_before_the_last_known_one_is_read_where_that_has_no_guess() -> None:
    asked = block([4], True)
    assert asked.before is not None
    other = replace(asked, before=(asked.before + 1) % VOCAB)
    assert not torch.allclose(scores(refiner(), asked), scores(refiner(), other))
