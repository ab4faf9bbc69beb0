"""A drafter with a cache of its own: what its guesser is asked, and what becomes of the answer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.kernels.layout import FINAL, KVLayerSpec
from foretoken.proposers.base import Draft, DraftContext, DraftRow, Draw, Feedback
from foretoken.proposers.drafting import Feed, OwnCache, Pairing
from foretoken.proposers.features import Features
from foretoken.proposers.guessing import Guesses
from foretoken.proposers.learned import LearnedProposer

LAYERS = (KVLayerSpec(2, 4, 4),)
VOCAB = 50


class Scripted:
    """Answers with what it was told, and remembers what it was asked."""

    scratch_slots = 3

    def __init__(self, *answers: Guesses) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[list[tuple[int, int, int, int]], Tensor | None]] = []

    def guess(self, feeds: Sequence[Feed], states: Tensor | None, block_size: int) -> Guesses:
        self.asked.append(([(f.index, f.start, f.stop, f.count) for f in feeds], states))
        return self.answers.pop(0)


def row(name: str, length: int, ceiling: int = 4, computed: int | None = None) -> DraftRow:
    return DraftRow(
        name, range(10, 10 + length), 1, length if computed is None else computed, ceiling, 0, range(9), (0,), Draw(0.0, 0, 0)
    )


def proposer_of(guesser: Scripted) -> LearnedProposer:
    return LearnedProposer("d", LAYERS, OwnCache(100, 4, VOCAB), guesser)


def propose(proposer: LearnedProposer, *rows: DraftRow) -> Draft:
    return proposer.propose(DraftContext(rows, 1000, 4))


def test_guesses_land_with_their_rows() -> None:
    probs = torch.eye(VOCAB)[[1, 2, 3]]
    guesser = Scripted(Guesses([[], [1, 2], [3]], confidence=[[], [0.9, 0.8], [0.7]], probs=probs, in_place=[[], [1], []]))
    proposer = proposer_of(guesser)
    assert proposer.needs.kv_layers == LAYERS and proposer.needs.scratch_slots == 3 and proposer.needs.hidden == ()
    assert proposer.max_tokens == 4
    rows = [row("chunk", 9, 0, computed=5), row("long", 200), row("a", 6), row("b", 3, ceiling=1)]  # "long" is beyond what it can read
    draft = proposer.propose(DraftContext(rows, 1000, 4))
    assert guesser.asked[0] == ([(0, 0, 5, 0), (2, 0, 6, 4), (3, 0, 3, 1)], None)
    assert draft.token_ids == [1, 2, 3] and draft.start_loc == [0, 0, 0, 2, 3] and draft.parents == [-1, 0, -1]
    assert draft.confidence == [0.9, 0.8, 0.7] and draft.probs is probs and draft.source == [0, 0, 0]
    assert draft.filled == {(0, "chunk"): 5, (0, "long"): 0, (0, "a"): 6, (0, "b"): 3}
    proposer.check()


def test_accepted_guesses_whose_entries_hold_are_not_read_again() -> None:
    guesser = Scripted(Guesses([[1, 2, 3]], in_place=[[1, 2]]), Guesses([[4]]), Guesses([[5]]))
    proposer = proposer_of(guesser)
    propose(proposer, row("r", 6))
    proposer.observe(Feedback(["r"], [8], [3], [[0, 1]], [[1, 2, 9]], [False]))
    propose(proposer, row("r", 9))
    proposer.forget("r")
    propose(proposer, row("r", 9))
    assert [asked for asked, _ in guesser.asked] == [[(0, 0, 6, 4)], [(0, 8, 9, 4)], [(0, 0, 9, 4)]]


def test_it_says_how_much_it_has_read_of_texts_that_it_keeps_up_with() -> None:
    guesser = Scripted(Guesses([[1, 2, 3, 4]], in_place=[[1, 2, 3]]), Guesses([[5]]))
    proposer = proposer_of(guesser)
    assert proposer.num_read("r", 6) is None and proposer.drafter is None, "nobody's chains can be made elsewhere"
    propose(proposer, row("r", 6))
    assert [proposer.num_read("r", length) for length in (6, 11, 12)] == [6, 6, None], "a step brings five tokens at most"
    proposer.went_on("r", 20)
    assert proposer.num_read("r", 22) == 20
    propose(proposer, row("r", 22))
    assert guesser.asked[1][0] == [(0, 20, 22, 4)]
    proposer.forget("r")
    assert proposer.num_read("r", 22) is None


def test_trees_keep_their_parents() -> None:
    guesser = Scripted(Guesses([[1, 2, 3], [4, 5]], parents=[[-1, -1, 0], [-1, 0]], confidence=[[0.5] * 3, [0.5] * 2]))
    proposer = proposer_of(guesser)
    draft = propose(proposer, row("a", 6), row("b", 2))
    assert draft.parents == [-1, -1, 0, -1, 0] and draft.start_loc == [0, 3, 5]


def test_nobody_to_read_is_nobody_asked() -> None:
    guesser = Scripted()
    proposer = proposer_of(guesser)
    draft = proposer.propose(DraftContext([row("r", 6)], 0, 4))
    assert not guesser.asked and draft.start_loc == [0, 0] and draft.filled == {(0, "r"): 0}
    assert proposer.propose(DraftContext([], 100, 4)).start_loc == [0]


def test_states_follow_the_text_by_the_pairing() -> None:
    """Token p with the state of p - 1: the last known token has one, and an entry, as soon as it is known."""
    features = Features((3, FINAL), 2, 9, 4)
    cache = OwnCache(100, 4, VOCAB, Pairing(shift=1, first=1), features)
    guesser = Scripted(Guesses([[1]]), Guesses([[2]]))
    proposer = LearnedProposer("d", LAYERS, cache, guesser)
    assert proposer.needs.hidden == tuple(sorted((3, FINAL)))
    assert propose(proposer, row("r", 5)).filled == {(0, "r"): 0}  # no states yet
    column = torch.arange(9.0)[:, None]
    proposer.observe(Feedback(["r"], [5], [0], [[]], [[15]], [False], {3: column[:5], FINAL: -column[:5]}, [0, 5], [5]))
    propose(proposer, row("r", 6))
    asked, states = guesser.asked[0]
    assert asked == [(0, 1, 6, 4)]
    assert states is not None and states.tolist() == [[float(p), -float(p)] for p in range(5)]
    proposer.observe(Feedback(["r"], [7], [2], [[1]], [[1, 9]], [False], {3: column[5:8], FINAL: column[5:8]}, [0, 3], [1]))
    propose(proposer, row("r", 8))
    asked, states = guesser.asked[1]
    assert asked == [(0, 6, 8, 4)] and states is not None and states[:, 0].tolist() == [5.0, 7.0]  # of node 1, not node 0
    proposer.check()
