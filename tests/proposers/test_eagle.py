"""What EAGLE drafters have of their own: scaled tables, a length of their own, and a drafter that is always right."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_guesses import assert_as_reference, check
from eagle_checkpoints import PUBLISHED, Drafter
from eagle_reference import Target
from pretended_engine import EXECUTIONS, Guess, accept, text
from safetensors.torch import load_file, save_file

from foretoken.kernels.execution import Execution
from foretoken.proposers.config import DynamicTree

MakeDrafter = Callable[..., Drafter]


@pytest.fixture
def make(tmp_path: Path) -> MakeDrafter:
    def write(name: str, target: Target | None = None) -> Drafter:
        return Drafter.write(PUBLISHED[name], tmp_path, target)

    return write


@pytest.mark.parametrize("name", ["eagle", "eagle, qwen2, prefixed"])
def test_a_shared_embedding_and_head_are_scaled_as_the_target_scales_them(make: MakeDrafter, name: str) -> None:
    """The file of the first has an embedding of its own, equal to the target's: that one is read as it is."""
    published = PUBLISHED[name]
    target = Target(published.spec, embed_scale=1.0 if published.more else 2.5, logits_scale=0.5, softcap=4.0)
    drafter = make(name, target)
    if published.more:
        drafter.target = replace(target, embed_scale=3.0)
    engine = drafter.begun()
    assert check(drafter, engine.step(accept(2))) == 1


def test_a_perfect_drafter_accepts_everything(make: MakeDrafter) -> None:
    """A target that always follows token t by t + 1: the fusing layer hands on the embedding, the head knows its successor."""
    drafter = make("eagle")
    spec, path = drafter.spec, drafter.folder / "model.safetensors"
    tensors = load_file(path)
    for name in ("fc.bias", "layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"):
        tensors[name].zero_()
    tensors["fc.weight"] = torch.cat([torch.eye(spec.hidden), torch.zeros(spec.hidden, spec.hidden)], 1)
    embedding = torch.nn.functional.normalize(tensors["embed_tokens.weight"])
    tensors |= {"embed_tokens.weight": embedding, "lm_head.weight": 20 * embedding.roll(1, 0)}
    save_file(tensors, path)

    def follow(request_id: str, guess: Guess) -> tuple[Sequence[int], int]:
        token, path = (guess.text[-1] + 1) % spec.vocab, list[int]()
        while (node := child(guess, path[-1] if path else -1, token)) is not None:
            token, path = (token + 1) % spec.vocab, [*path, node]
        return path, token

    def child(guess: Guess, parent: int, token: int) -> int | None:
        return next((i for i, (t, p) in enumerate(zip(guess.tokens, guess.parents, strict=True)) if (t, p) == (token, parent)), None)

    shapes: list[dict[str, Any]] = [{"num_speculative_tokens": 4}, {"tree": DynamicTree(2, 4, 6)}]
    for settings in shapes:
        engine = drafter.run(**settings)
        engine.add("a", [5, 3, 50])
        engine.step(follow)
        for _ in range(5):
            engine.step(follow, ceiling=6)
        assert engine.requests["a"].tokens[3:] == [(51 + i) % spec.vocab for i in range(1 + 5 * 5)]


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_rows_of_a_gumiho_want_few_guesses_or_many(make: MakeDrafter, execution: Execution) -> None:
    drafter = make("gumiho")
    engine = drafter.run(execution)
    counts = {"a": 1, "b": 4, "c": 0, "d": 2, "e": 3}
    for i, name in enumerate(counts):
        engine.add(name, text(i, 5 + i))
    engine.step(accept(0))
    for ceiling in (dict.fromkeys(counts, 1), counts, dict.fromkeys(counts, 2), counts):
        for name, guess in engine.step(accept(1), ceiling).items():
            assert_as_reference(drafter, guess, ceiling[name])


def test_beyond_its_own_length_nothing_is_guessed(make: MakeDrafter) -> None:
    drafter = make("eagle3")
    engine = drafter.run(num_speculative_tokens=4, max_model_len=20)
    engine.add("a", text(1, 15))
    engine.add("b", text(2, 30))
    engine.step(accept(0))
    for expected in (4, 3, 2, 1, 0, 0):  # of 16, 17, 18, ... tokens
        guesses = engine.step(accept(0))
        assert not guesses["b"].tokens
        assert_as_reference(drafter, guesses["a"], expected)
