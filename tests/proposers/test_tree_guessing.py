"""Trees against plain references: every node's probability is that of its path alone, and EAGLE-2 keeps the nodes that the paper keeps."""

import random
from collections.abc import Sequence
from pathlib import Path

import pretended_target
import pytest
import torch
from eagle_checkpoints import PUBLISHED, Drafter
from eagle_reference import Reference, eagle2_tree
from elsewhere import compare, with_far_states
from pretended_engine import EXECUTIONS, Choose, Guess, text

from foretoken.kernels.execution import Execution
from foretoken.proposers.config import DynamicTree, StaticTree

# EAGLE-1's, level by level.
EAGLE_TREE = StaticTree(
    (
        *((0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
        *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
        *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
    )
)


@pytest.fixture
def drafter(request: pytest.FixtureRequest, tmp_path: Path) -> Drafter:
    return Drafter.write(PUBLISHED[request.param], tmp_path)


def down_the_tree(seed: int) -> Choose:
    """Accepts a random path, often one beside the first branch."""
    rng = random.Random(seed)

    def choose(request_id: str, guess: Guess) -> tuple[Sequence[int], int]:
        node = rng.randint(-1, len(guess.tokens) - 1)
        return guess.path(node), rng.randrange(59)

    return choose


def assert_confidence(guess: Guess, reference: Reference) -> None:
    """Each node's own probability behind its path."""
    for node, confidence in enumerate(guess.confidence):
        *before, token = [guess.tokens[n] for n in guess.path(node)]
        assert confidence == pytest.approx(float(reference.probs(guess.text, before)[token]), abs=1e-4)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("drafter", ["eagle", "eagle3", "eagle3, speculators", "eagle3, latent attention"], indirect=True)
def test_a_dynamic_tree_is_eagle_2s(drafter: Drafter, execution: Execution) -> None:
    engine = drafter.run(execution, tree=DynamicTree(top_k=3, depth=4, num_nodes=11))
    engine.add("a", text(1, 9))
    engine.add("b", text(2, 3))
    choose, shapes = down_the_tree(0), set[tuple[int, ...]]()
    for step in range(5):
        for guess in engine.step(choose, ceiling=11).values():
            if step:
                expected = eagle2_tree(lambda path, g=guess: drafter.reference.probs(g.text, path).log(), 3, 4, 11)
                assert (sorted(tree_paths(guess)), len(guess.tokens)) == (sorted(tree_paths_of(*expected)), 11)
                assert_confidence(guess, drafter.reference)
                shapes.add(tuple(guess.parents))
    assert len(shapes) > 1


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("drafter", ["eagle", "eagle3, NVIDIA"], indirect=True)
def test_a_static_tree_has_the_ranks_it_names(drafter: Drafter, execution: Execution) -> None:
    engine = drafter.run(execution, tree=EAGLE_TREE)
    engine.add("a", text(1, 9))
    engine.add("b", text(2, 3))
    engine.step(down_the_tree(0), ceiling=25)
    for _ in range(3):
        for guess in engine.step(down_the_tree(1), ceiling=25).values():
            assert len(guess.tokens) == 25
            for node, path in enumerate(EAGLE_TREE.paths):
                before: list[int] = []
                for rank in path:
                    best = drafter.reference.probs(guess.text, before).topk(4).indices.tolist()
                    before.append(best[rank])
                assert [guess.tokens[n] for n in guess.path(node)] == before
            assert_confidence(guess, drafter.reference)


@pytest.mark.parametrize("drafter", ["eagle3"], indirect=True)
@pytest.mark.parametrize("tree", [EAGLE_TREE, DynamicTree(4, 5, 25)], ids=["static", "dynamic"])
def test_a_low_ceiling_keeps_the_best_of_the_tree(drafter: Drafter, tree: StaticTree | DynamicTree) -> None:
    def first_guess(ceiling: int) -> Guess:
        engine = drafter.run(tree=tree)
        engine.add("a", text(1, 9))
        engine.step(down_the_tree(0))
        return engine.step(down_the_tree(0), ceiling=ceiling)["a"]

    whole = first_guess(25)
    for ceiling in (1, 2, 3, 7, 13):
        cut = first_guess(ceiling)
        assert len(cut.tokens) == ceiling
        if isinstance(tree, StaticTree):
            assert (cut.tokens, cut.parents) == (whole.tokens[:ceiling], whole.parents[:ceiling])
        else:
            scores = sorted((path_score(whole, node) for node in range(25)), reverse=True)[:ceiling]
            assert sorted((path_score(cut, node) for node in range(ceiling)), reverse=True) == pytest.approx(scores)
    assert not first_guess(0).tokens


@pytest.mark.parametrize("drafter", ["eagle3, qwen3"], indirect=True)
def test_rows_of_one_batch_do_not_mix(drafter: Drafter) -> None:
    """Trees of different size, a row that guesses nothing, and one that is still being read."""

    def guesses(names: str) -> dict[str, Guess]:
        engine = drafter.run(tree=DynamicTree(3, 3, 8), max_model_len=30)
        for name, length in zip("abcd", (9, 27, 40, 5), strict=True):  # b has room for two more, c for none
            if name in names:
                engine.add(name, text(length, length))
        engine.step(lambda *_: ((), 1), ceiling=0)
        return engine.step(lambda *_: ((), 1), ceiling=8)

    together = guesses("abcd")
    assert [len(together[name].tokens) for name in "abcd"] == [8, 2, 0, 8]
    for name in "abd":
        alone = guesses(name)[name]
        assert (alone.tokens, alone.parents) == (together[name].tokens, together[name].parents)
        assert alone.confidence == pytest.approx(together[name].confidence, abs=1e-5)


@pytest.mark.parametrize("drafter", ["eagle3"], indirect=True)
def test_a_tree_of_64_nodes_in_the_making(drafter: Drafter) -> None:
    """The last of them stands in the sign bit of the mask."""
    engine = drafter.run(tree=DynamicTree(top_k=16, depth=4, num_nodes=64))
    assert engine.proposer.needs.scratch_slots == 48
    wide = drafter.run(tree=DynamicTree(top_k=32, depth=3, num_nodes=64))
    assert wide.proposer.needs.scratch_slots == 64
    for e, top_k, depth in ((engine, 16, 4), (wide, 32, 3)):
        e.add("a", text(1, 9))
        e.step(down_the_tree(0), ceiling=64)
        guess = e.step(down_the_tree(0), ceiling=64)["a"]
        expected = eagle2_tree(lambda path, g=guess: drafter.reference.probs(g.text, path).log(), top_k, depth, 64)
        assert sorted(tree_paths(guess)) == sorted(tree_paths_of(*expected))
        assert_confidence(guess, drafter.reference)


def tree_paths(guess: Guess) -> list[tuple[int, ...]]:
    return tree_paths_of(guess.tokens, guess.parents)


def tree_paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Each node as the tokens on its way from the root; raises if a parent does not stand before its child."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    return paths


def path_score(guess: Guess, node: int) -> float:
    return float(torch.tensor([guess.confidence[n] for n in guess.path(node)]).prod())


@pytest.mark.parametrize("drafter", ["eagle3", "eagle"], indirect=True)
@pytest.mark.parametrize("tree", [EAGLE_TREE, DynamicTree(3, 3, 8)], ids=["static", "dynamic"])
def test_only_nodes_come_from_a_device(drafter: Drafter, tree: StaticTree | DynamicTree) -> None:
    def play(is_far: bool) -> list[dict[str, Guess]]:
        engine = drafter.run(tree=tree)
        if is_far:
            with_far_states(engine.proposer)
        engine.add("a", text(1, 9))
        engine.add("b", text(2, 3))
        choose = down_the_tree(0)
        return [engine.step(choose, ceiling=25) for _ in range(6)]

    assert max(compare(play, pretended_target).to_host) < drafter.spec.vocab, "scores or states came to the host"
