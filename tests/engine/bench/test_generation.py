from contextlib import nullcontext
from pathlib import Path

import pytest

from foretoken.engine import network_plan
from foretoken.engine.bench import generation
from foretoken.engine.bench.checkpoints import Model
from foretoken.engine.bench.generation import Generator, measure_generation, measure_speculation, measure_transformers
from foretoken.engine.bench.measurement import GENERATE, Effort, Subject
from foretoken.engine.bench.transformers_peer import TransformersPeer, until
from foretoken.engine.config import ModelConfig
from foretoken.engine.errors import ModelLoadError
from foretoken.engine.llm import LLM


def silent(line: str) -> None:
    pass


def test_asked_again_a_prompt_costs_no_step(subject: Subject) -> None:
    """Decoding is timed over whole calls: nothing but decode steps may be in them."""
    with LLM(subject.model.folder, {"method": "off"}, **subject.options) as llm:
        generator = Generator(llm)
        prompts = generator.prompts.around(100, 20, rows=3)
        assert [len(prompt) for prompt in prompts] == [81] * 3
        generator.generate(prompts, 20)
        before = llm.stats()
        generator.generate(prompts, 20)
        after = llm.stats()
    assert after.num_steps - before.num_steps == 20
    assert after.prompt_tokens - before.prompt_tokens - (after.cached_prompt_tokens - before.cached_prompt_tokens) == 3


def test_a_gpu_is_left_alone(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the processor reads and computes is what it is held to."""
    monkeypatch.setattr(network_plan, "gpu_refusal", lambda index: None)
    path, options = str(subject.model.folder), subject.options
    assert network_plan.resolve_device(ModelConfig(path, **options), True) == "cpu"  # pyright: ignore[reportArgumentType]
    assert network_plan.resolve_device(ModelConfig(path), True) == "cuda:0"


def test_every_case_is_measured(subject: Subject, effort: Effort) -> None:
    found = measure_generation(subject, 100_000, effort, silent)
    assert [(m.case, m.x) for m in found] == [("decode", 48), ("rows", 1), ("rows", 3), ("prefill", 40)]
    assert all(m.level == GENERATE and m.value.median > 0 for m in found)


def test_transformers_says_the_same_and_is_measured(subject: Subject, effort: Effort, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (subject.model.folder, "float32", 1)
    with LLM(subject.model.folder, {"method": "off"}, **subject.options) as llm:
        generator = Generator(llm)
        prompts = [*generator.prompts.fresh(2, 30), *generator.prompts.fresh(1, 12)]
        ours = generator.generate(prompts, 10)
    with TransformersPeer(*asked) as peer:
        answer = peer.generate(prompts, 10, ignore_eos=True)
        assert answer.token_ids == ours
        assert 0 < answer.first_s < answer.seconds
        monkeypatch.setattr(generation, "TransformersPeer", lambda *again: nullcontext(peer if again == asked else None))  # it is loaded
        found = measure_transformers(subject, effort, silent)
    assert [(m.level, m.ratio_to) for m in found] == [(GENERATE, "transformers"), ("transformers", "transformers")]


def test_a_peer_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="transformers ended while running"), TransformersPeer(tmp_path, "float32", 1):
        pass


def test_until() -> None:
    assert until([5, 6, 2, 3, 3], {2}) == [5, 6, 2]
    assert until([5, 6], {2}) == until([5, 6], set()) == [5, 6]


def test_a_draft_that_is_the_target_is_always_right(tiny_target: Path, effort: Effort) -> None:
    model = Model("tiny", "", tiny_target)
    found = {m.case: m for m in measure_speculation(model, model, 3, 1, effort, silent)}
    assert set(found) == {"draft off", "draft draft_model", "draft length", "draft identical"}
    assert found["draft identical"].value.median == 1.0
    assert found["draft length"].value.median > 2.5  # of at most 4; bfloat16 ties and an int8 draft cost some
    assert found["draft draft_model"].ratio_to == "off"
    spread = found["draft off"].value
    assert spread.low < spread.high  # of one round's prompts
