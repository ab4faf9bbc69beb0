"""Adapters end to end with LLM: each prompt is answered as by a model into which its adapter was merged, whoever guesses."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from random_adapters import Pairs, merged_model, pairs_for, save_adapter
from saying import said

from foretoken import LLM, LoRARequest, SamplingParams
from foretoken.engine import model
from foretoken.engine.adapters import Adapters
from foretoken.engine.async_engine import AsyncEngine
from foretoken.engine.boot import boot
from foretoken.engine.errors import ConfigError, InvalidRequest, ModelLoadError
from foretoken.engine.llm_options import engine_config
from foretoken.kernels.adapters import AdapterBank, AdapterRoom

PROMPTS = ["The quick brown fox", "def add(a, b):", "one two one two one two one", "x", "The quick brown fox"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)
OPTIONS: dict[str, Any] = {"kv_cache_gb": 0.005, "max_num_seqs": 8, "dtype": "float32", "max_model_len": 256}
WITH_LORA: dict[str, Any] = {**OPTIONS, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def texts(llm: LLM, params: SamplingParams, adapters: list[LoRARequest | None] | LoRARequest | None = None) -> list[list[int]]:
    return said(llm, PROMPTS, params, lora_request=adapters)


@pytest.fixture(scope="module")
def pairs(tiny_target: Path) -> dict[str, Pairs]:
    return {"one": pairs_for(tiny_target, 1), "two": pairs_for(tiny_target, 2, rank=8, weights="self_attn")}


@pytest.fixture(scope="module")
def folders(pairs: dict[str, Pairs], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_adapter(tmp_path_factory.mktemp(name), its) for name, its in pairs.items()}


@pytest.fixture(scope="module")
def requests(folders: dict[str, Path]) -> dict[str, LoRARequest]:
    return {name: LoRARequest(name, number, str(folder)) for number, (name, folder) in enumerate(folders.items(), 1)}


@pytest.fixture(scope="module")
def expected(tiny_target: Path, pairs: dict[str, Pairs], tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, list[list[int]]]:
    """What merged models say, greedy and then sampled; None: the target itself."""
    said: dict[str | None, list[list[int]]] = {}
    for name in (None, *pairs):
        folder = tiny_target if name is None else merged_model(tiny_target, pairs[name], tmp_path_factory.mktemp("merged") / name)
        with LLM(folder, {"method": "off"}, **OPTIONS) as llm:
            said[name] = texts(llm, GREEDY) + texts(llm, SAMPLED)
    assert said[None] != said["one"] != said["two"]
    return said


def drafters(target: Path, draft: Path) -> dict[str, Any]:
    return {
        "off": {"method": "off"},
        "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "draft model": {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3, "adaptive": False},
        "the target itself": {"method": "draft_model", "model": str(target), "num_speculative_tokens": 3, "adaptive": False},
    }


@pytest.fixture(scope="module", params=["native", "torch", "transformers"])
def executor(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=["off", "ngram", "draft model", "the target itself"])
def llm(request: pytest.FixtureRequest, executor: str, tiny_target: Path, tiny_draft: Path) -> Iterator[LLM]:
    with LLM(tiny_target, drafters(tiny_target, tiny_draft)[request.param], executor=executor, **WITH_LORA) as llm:
        yield llm


def test_each_prompt_of_a_batch_gets_its_own_adapter(
    llm: LLM, requests: dict[str, LoRARequest], expected: dict[str | None, list[list[int]]]
) -> None:
    names = ["one", None, "two", "one", "two"]
    asked = [None if name is None else requests[name] for name in names]
    for params, part in ((GREEDY, 0), (SAMPLED, len(PROMPTS))):
        found = texts(llm, params, asked)
        assert found == [expected[name][part + i] for i, name in enumerate(names)]
    # The prefix cache holds these prompts now, of other adapters: nobody may find them.
    for name in ("two", None, "one"):
        found = texts(llm, GREEDY, None if name is None else requests[name])
        assert found == expected[name][: len(PROMPTS)]


def test_an_adapter_that_is_not_in_this_call_makes_room(tiny_target: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    third = LoRARequest("three", 3, str(save_adapter(tmp_path / "three", pairs_for(tiny_target, 3))))
    first, second = (LoRARequest(name, 0, folder) for name, folder in folders.items())
    with LLM(tiny_target, {"method": "off"}, **WITH_LORA) as llm:
        before = texts(llm, GREEDY, first)
        texts(llm, GREEDY, second)
        texts(llm, GREEDY, third)
        assert llm._engine is not None and llm._engine.adapters is not None
        assert [adapter.name for adapter in llm._engine.adapters.loaded] == ["two", "three"]
        assert texts(llm, GREEDY, first) == before
        with pytest.raises(InvalidRequest, match="3 adapters at once, but there is room for 2: raise max_loras"):
            texts(llm, GREEDY, [first, second, third, None, None])
        other = LoRARequest("one", 1, third.lora_path)  # the name of another one now
        assert texts(llm, GREEDY, other) == texts(llm, GREEDY, third)
        with pytest.raises(InvalidRequest, match="two adapters of the name 'one'"):
            texts(llm, GREEDY, [first, other, None, None, None])


def test_without_enable_lora_it_is_said(tiny_target: Path, folders: dict[str, Path]) -> None:
    with LLM(tiny_target, {"method": "off"}, **OPTIONS) as llm, pytest.raises(InvalidRequest, match="enable_lora=True"):
        texts(llm, GREEDY, LoRARequest("one", 1, str(folders["one"])))


@pytest.mark.parametrize(("scaling", "factor"), [
    ({"alpha": 8}, 2.0),
    ({"alpha": 8, "use_rslora": True}, 4.0),
    ({"alpha": 8, "alpha_pattern": {"q_proj": 2}}, 0.5),
    ({"alpha": 8, "alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 2, "k_proj": 1}}, 0.5),
    ({"alpha": 8, "alpha_pattern": {"model.language_model.layers.0.self_attn.q_proj": 2}}, 0.5),
])
def test_factors_are_scaled(scaling: dict[str, Any], factor: float, tiny_target: Path, tmp_path: Path) -> None:
    weight = "model.layers.0.self_attn.q_proj.weight"
    its = {weight: pairs_for(tiny_target, 1)[weight]}
    of_whole = {name.replace("model.", "model.language_model."): pair for name, pair in its.items()}
    read = Adapters(bank_of(tiny_target)).read(str(save_adapter(tmp_path, of_whole, **scaling)))
    torch.testing.assert_close(read.pairs[weight][1], its[weight][1] * factor)
    assert torch.equal(read.pairs[weight][0], its[weight][0])


def bank_of(target: Path) -> AdapterBank:
    shapes = {name: tuple(up.shape[:1] + down.shape[1:]) for name, (down, up) in pairs_for(target, 0).items()}
    return AdapterBank([(name,) for name in shapes], shapes, AdapterRoom(2, 8), torch.float32)


@pytest.mark.parametrize(("config", "told"), [
    ({"peft_type": "IA3"}, "is an adapter of type IA3; those of type LORA are served"),
    ({"use_dora": True}, "DoRA.*merge it into its base model"),
    ({"modules_to_save": ["lm_head"]}, "whole modules of its own"),
    ({"bias": "all"}, "biases"),
    ({"lora_alpha": "much"}, "finite numbers"),
    ({"alpha_pattern": {"(": 3}}, "a pattern that is none"),
    ({"init_lora_weights": "pissa_niter_4"}, "add to changed weights .*pissa_niter_4"),
])
def test_what_is_not_served_is_said(config: dict[str, Any], told: str, tiny_target: Path, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path, pairs_for(tiny_target, 1), **config)
    with pytest.raises(ModelLoadError, match=told):
        Adapters(bank_of(tiny_target)).read(str(folder))


def test_damaged_and_foreign_adapters_are_refused(tiny_target: Path, tiny_draft: Path, tmp_path: Path) -> None:
    adapters, good = Adapters(bank_of(tiny_target)), pairs_for(tiny_target, 1)
    weight, (down, up) = next(iter(good.items()))
    bad: dict[str, tuple[Pairs, str]] = {
        "foreign": (pairs_for(tiny_draft, 1), "was made for another model"),
        "head": ({"lm_head.weight": (down, up)}, "head or the embedding are not served"),
        "unknown": ({"model.layers.9.self_attn.q_proj.weight": (down, up)}, "no linear layer of this model"),
        "nan": ({weight: (down * torch.nan, up)}, "NaN or infinite"),
        "rank": (pairs_for(tiny_target, 1, rank=9), r"has rank 9, but there is room for 8: raise max_lora_rank"),
    }
    for name, (its, told) in bad.items():
        with pytest.raises(ModelLoadError, match=told):
            adapters.read(str(save_adapter(tmp_path / name, its)))
    file = save_adapter(tmp_path / "cut", good) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelLoadError, match="damaged or incomplete"):
        adapters.read(str(tmp_path / "cut"))
    file.rename(file.with_suffix(".bin"))
    with pytest.raises(ModelLoadError, match="as adapter_model.bin only"):
        adapters.read(str(tmp_path / "cut"))
    with pytest.raises(ModelLoadError, match=r"is no adapter: it has no adapter_config.json"):
        adapters.read(str(tiny_target))


def test_a_slot_is_not_given_away_while_a_request_runs_with_it(tiny_target: Path, folders: dict[str, Path]) -> None:
    adapters = Adapters(bank_of(tiny_target))
    first = adapters.add("one", "", adapters.read(str(folders["one"])))
    adapters.remove("one")
    assert adapters.get("one") is None and adapters.place("two", "", 8, [first.slot]).slot == 2
    with pytest.raises(InvalidRequest, match="all 2 places for adapters are taken, by two and 1 that requests still run with"):
        adapters.place("three", "", 8, [first.slot])
    again = adapters.place("three", "", 8)
    assert again.slot == first.slot and again.number != first.number


def test_who_comes_while_an_adapter_is_replaced_gets_the_new_one(
    tiny_target: Path, folders: dict[str, Path], expected: dict[str | None, list[list[int]]]
) -> None:
    """In the same slot, the engine being busy: not the old one's prefix with the new one's weights."""
    held_up = threading.Event()

    async def scenario() -> None:
        engine = AsyncEngine(boot(engine_config(tiny_target, {"method": "off"}, {**WITH_LORA, "max_loras": 1})))
        await engine.start()

        async def say(name: str) -> list[int]:
            prompt = engine.engine.intake.encode(PROMPTS[2])  # more than a block
            return [token async for delta in engine.generate(prompt, GREEDY, request_id=name, adapter="it") for token in delta.token_ids]

        await engine.load_adapter("it", str(folders["one"]))
        assert await say("before") == expected["one"][2]
        busy = asyncio.ensure_future(engine.call(lambda core: held_up.wait()))
        loading = asyncio.ensure_future(engine.load_adapter("it", str(folders["two"]), replace=True))
        while len(engine._calls) < 2:
            await asyncio.sleep(0.01)
        saying = asyncio.ensure_future(say("meanwhile"))
        await asyncio.sleep(0.01)
        held_up.set()
        assert await saying == expected["two"][2]
        await asyncio.gather(busy, loading)
        await engine.stop()

    asyncio.run(scenario())


def test_a_guest_keeps_an_adapter_that_is_replaced(tiny_target: Path, folders: dict[str, Path]) -> None:
    async def scenario() -> None:
        engine = AsyncEngine(boot(engine_config(tiny_target, {"method": "off"}, WITH_LORA)))
        await engine.start()
        first = await engine.load_adapter("it", str(folders["one"]))
        with engine.guest("it") as held:
            second = await engine.load_adapter("it", str(folders["two"]), replace=True)
        assert held is first and second.slot != first.slot
        await engine.stop()

    asyncio.run(scenario())


def test_settings_that_cannot_work_are_refused(tiny_target: Path) -> None:
    cases = (({"max_loras": 0}, "max_loras must be a positive"), ({"max_lora_rank": 2000}, "max_lora_rank 2000 is not between"))
    for options, told in cases:
        with pytest.raises(ConfigError, match=told):
            LLM(tiny_target, {"method": "off"}, **{**WITH_LORA, **options})


def test_room_that_does_not_fit_is_refused_before_it_is_taken(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "free_bytes", lambda device: 2**24)
    with pytest.raises(ModelLoadError, match=r"does not fit: it needs .* GB for its weights \(.*, with room for adapters\)"):
        LLM(tiny_target, {"method": "off"}, **{**WITH_LORA, "max_loras": 64, "max_lora_rank": 1024})
