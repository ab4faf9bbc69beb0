"""The likeliest continuations of a block against all that there are, and as a DFlash guesses them."""

import itertools
import math
import random
from pathlib import Path

import pytest
import torch
from block_checkpoints import PUBLISHED, Drafter
from pretended_engine import EXECUTIONS, accept, text

from foretoken.kernels.execution import Execution
from foretoken.proposers.block_tree import likeliest
from foretoken.proposers.config import BlockTree
from foretoken.proposers.config_entry import SpeculativeConfigError


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [1, 5, 12, 100])
def test_no_other_nodes_are_likelier(seed: int, count: int) -> None:
    rng = random.Random(seed)
    places = [sorted((math.log(rng.random()) for _ in range(3)), reverse=True) for _ in range(1 + seed % 4)]
    every = [path for depth in range(len(places)) for path in itertools.product(range(3), repeat=depth + 1)]
    worth = {path: math.fsum(places[d][rank] for d, rank in enumerate(path)) for path in every}
    nodes = likeliest(places, count)
    paths: list[tuple[int, ...]] = []
    for node, (parent, depth, rank) in enumerate(nodes):
        assert parent < node and (nodes[parent][1] + 1 if parent >= 0 else 0) == depth
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    assert len(set(paths)) == len(paths) == min(count, len(every))
    best = sorted(worth.values(), reverse=True)[:count]
    assert [worth[path] for path in paths] == pytest.approx(best)


def test_a_block_without_places_has_no_tree() -> None:
    assert likeliest([], 4) == []


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", ["z-lab", "z-lab, sliding", "JetSpec", "speculators", "dflare"])
def test_a_dflash_guesses_what_its_places_say(name: str, execution: Execution, tmp_path: Path) -> None:
    drafter = Drafter.write(PUBLISHED[name], tmp_path)
    tree = BlockTree(top_k=3, num_nodes=9, depth=4)
    engine = drafter.run(execution, tree=tree)
    counts = {"a": 9, "b": 2, "c": 0, "d": 20}
    for i, request in enumerate(counts):
        engine.add(request, text(i, 6 + 3 * i))
    engine.step(accept(0))
    for then in range(3):
        for request, guess in engine.step(accept(1, then), counts).items():
            count = min(counts[request], 9)
            assert len(guess.tokens) == count
            if not count:
                continue
            places = min(count, 4)
            probs = drafter.reference.probs(guess.text, places, [0] * (places - 1))
            best, ids = probs.topk(3, -1)
            nodes = likeliest(best.log().tolist(), count)
            assert guess.parents == [parent for parent, _, _ in nodes]
            assert guess.tokens == [int(ids[depth, rank]) for _, depth, rank in nodes]
            assert torch.allclose(torch.tensor(guess.confidence), torch.stack([best[d, rank] for _, d, rank in nodes]), atol=1e-4)


def test_a_tree_is_no_deeper_than_a_block_and_needs_places_that_are_independent(tmp_path: Path) -> None:
    drafter = Drafter.write(PUBLISHED["z-lab"], tmp_path)
    engine = drafter.run(tree=BlockTree(1, 60, 60))
    engine.add("a", text(1, 9))
    engine.step(accept(0))
    chain = engine.step(accept(0), 60)["a"]
    assert len(chain.tokens) == drafter.run(num_speculative_tokens=None).proposer.max_tokens
    assert chain.parents == [*range(-1, len(chain.tokens) - 1)]
    with pytest.raises(SpeculativeConfigError, match="is a DSpark, which guesses a chain: leave the tree out"):
        Drafter.write(PUBLISHED["dspark"], tmp_path).load(tree=BlockTree(2, 4, 4))
