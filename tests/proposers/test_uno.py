"""UNO: guesses of the target through an adapter, held to a model with the adapter merged into its weights; and what it leaves alone."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from as_on_a_gpu import bind_as_on_a_gpu
from random_adapters import merged_model, pairs_for, save_adapter
from random_drafters import write
from saying import check_engine, said
from tiny_models import random_model, save_tokenizer, tiny_config
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from foretoken import LLM, LoRARequest, SamplingParams
from foretoken.engine.errors import ConfigError, ModelLoadError
from foretoken.engine.model_folder import find_adapter
from foretoken.kernels.batch_lists import BatchLists
from foretoken.kernels.layout import Executor, KVTensors
from foretoken.proposers.base import DraftContext, DraftRow, Draw
from foretoken.proposers.drafting import Feed
from foretoken.proposers.target_guessing import TargetProposer
from foretoken.proposers.uno import Noise

K, BLOCK, VOCAB = 4, 16, 300
PROMPTS = [[5, 6, 7, 8, 9, 10], [20, 21], [33] * 40, [7, 8, 7, 8, 7, 8, 7], [33] * 35 + [2]]
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_gb": 0.02, "max_model_len": 256, "max_num_seqs": 8}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9},
    "edited": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2},
}
EXECUTORS = ["native", "torch", "transformers"]


@pytest.fixture(scope="module")
def pairs(tiny_target: Path) -> dict[str, tuple[Tensor, Tensor]]:
    return pairs_for(tiny_target, 7, rank=6)


@pytest.fixture(scope="module")
def adapter(pairs: dict[str, tuple[Tensor, Tensor]], tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_adapter(tmp_path_factory.mktemp("uno"), pairs))


def uno(adapter: str, **more: Any) -> dict[str, Any]:
    return {"method": "uno", "uno_lora_path": adapter, "num_speculative_tokens": K, "adaptive": False, **more}


def say(llm: LLM, adapters: list[LoRARequest | None] | None = None, **params: Any) -> list[list[int]]:
    each = [SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "seed": i, **params}) for i in range(len(PROMPTS))]
    return said(llm, PROMPTS, each, lora_request=adapters)


def check_first_guesses(llm: LLM) -> None:
    """They are the target's own tokens, and nothing has failed."""
    stats = llm.stats()
    assert stats.num_drafts and stats.accepted_per_position[0] == stats.num_drafts
    check_engine(llm)


@pytest.mark.parametrize("blocks", [None, 9], ids=["room", "preemption"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_outputs_are_those_without_it(executor: str, blocks: int | None, tiny_target: Path, adapter: str) -> None:
    options = {**OPTIONS, "executor": executor}
    with LLM(tiny_target, {"method": "off"}, **options) as llm:
        expected = [say(llm, **params) for params in SETTINGS.values()]
    if blocks:
        options["num_gpu_blocks_override"] = blocks
    with LLM(tiny_target, uno(adapter), **options) as llm:
        assert [say(llm, **SETTINGS["greedy"]), say(llm, **SETTINGS["seeded"])] == expected[:2]
        check_first_guesses(llm)
        assert say(llm, **SETTINGS["edited"]) == expected[2]
        assert say(llm, **SETTINGS["greedy"]) == expected[0], "with blocks of the prefix cache"
        assert bool(llm.stats().num_preemptions) == bool(blocks)


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_first_guesses_are_drawn_from_what_they_are_held_to(rule: str, tiny_target: Path, adapter: str) -> None:
    with LLM(tiny_target, uno(adapter, rejection_sample_method=rule), executor="torch", **OPTIONS) as llm:
        say(llm, temperature=0.9)
        check_first_guesses(llm)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_requests_have_adapters_of_their_own(executor: str, tiny_target: Path, adapter: str, tmp_path: Path) -> None:
    folders = {name: str(save_adapter(tmp_path / name, pairs_for(tiny_target, i))) for i, name in enumerate(("one", "two"))}
    one, two = (LoRARequest(name, 1, folder) for name, folder in folders.items())
    asked = [one, None, two, one, None]
    options = {**OPTIONS, "executor": executor, "enable_lora": True, "max_loras": 2}
    with LLM(tiny_target, {"method": "off"}, **options) as llm:
        expected = say(llm, asked, temperature=0)
    with LLM(tiny_target, uno(adapter), **options) as llm:
        assert say(llm, asked, temperature=0) == expected
        check_first_guesses(llm)
        engine = llm._running()
        assert engine.adapters is not None and engine.adapters.describe().startswith("2 of 2: one (rank 4), two (rank 4); rank up to 16")
        assert sorted(adapter.slot for adapter in engine.adapters.loaded) == [1, 2] and engine.adapters.bank.num_slots == 3


def row(name: str, token_ids: list[int], table: Sequence[int], ceiling: int, num_computed: int = 0) -> DraftRow:
    length, draw = len(token_ids), Draw(0.0, ord(name), 0)
    return DraftRow(name, token_ids, 1, length, ceiling, 0, array("i", table), (), draw, num_computed=num_computed)


def read(executor: Executor, kv: KVTensors, token_ids: list[int], table: list[int]) -> None:
    count = len(token_ids)
    lists = BatchLists(BLOCK, token_ids, [*range(count)], [], [0] * count, [], [], [0, count], [count], [count], [], [table])
    lists.add_slots(table, 0, count)
    executor.run(lists.batch(), kv)


@pytest.fixture(params=EXECUTORS)
def opened(request: pytest.FixtureRequest, tiny_target: Path, adapter: str) -> Any:
    with LLM(tiny_target, uno(adapter), executor=request.param, num_gpu_blocks_override=12, **OPTIONS) as llm:
        core = llm._running().core
        (proposer,) = (p for p in core.proposers.proposers if isinstance(p, TargetProposer))
        yield proposer, core.runner.executor, core.runner.kv


def test_guesses_are_those_of_merged_weights_and_nothing_else_is_written(
    opened: tuple[TargetProposer, Executor, KVTensors], pairs: dict[str, tuple[Tensor, Tensor]], tiny_target: Path, tmp_path: Path
) -> None:
    proposer, executor, kv = opened
    base: Any = LlamaForCausalLM.from_pretrained(tiny_target).eval()
    merged: Any = LlamaForCausalLM.from_pretrained(merged_model(tiny_target, pairs, tmp_path / "merged")).eval()
    texts = {"a": ([5, 6, 7], [3], 4), "b": ([*range(30, 46)], [7, 5], 9), "c": ([*range(60, 91)], [2, 9, 11], 2), "d": ([9, 9], [1], 1)}
    rows = [row(name, text, table, ceiling, len(text) - 1) for name, (text, table, ceiling) in texts.items()]
    every = torch.arange(12 * BLOCK)
    generator = torch.Generator().manual_seed(0)
    for layer, spec in enumerate(executor.kv_layers):
        k, v = (torch.randn(len(every), spec.num_kv_heads, dim, generator=generator) for dim in (spec.k_dim, spec.v_dim))
        kv.write(layer, every, k, v)
    for text, table, _ in texts.values():
        read(executor, kv, text[:-1], table)
    before = [kv.gather(layer, every) for layer in range(len(executor.kv_layers))]
    behind, full = row("e", [5, 6, 7], [4], 3, 1), row("f", [5, 6, 7], [4], 0, 2)
    draft = proposer.propose(DraftContext([*rows, behind, full], 0, BLOCK))
    assert draft.start_loc[len(rows) :] == [len(draft.token_ids)] * 3
    after = [kv.gather(layer, every) for layer in range(len(executor.kv_layers))]

    own: set[int] = set()
    for index, (name, (text, table, ceiling)) in enumerate(texts.items()):
        count = min(K, ceiling)
        own |= {table[place // BLOCK] * BLOCK + place % BLOCK for place in range(len(text) - 1, len(text) - 1 + count)}
        (noise,) = Noise(0, 1, VOCAB).token_ids([Feed(0, rows[index], len(text) - 1, len(text), count)])
        with torch.inference_mode():
            cache = DynamicCache()
            logits = [base(torch.tensor([text]), None, None, cache).logits[0, -1:]]
            if noise:
                logits.append(merged(torch.tensor([noise]), None, None, cache).logits[0])
        chances, tokens = torch.softmax(torch.cat(logits), -1).max(-1)
        start, end = draft.start_loc[index : index + 2]
        assert draft.token_ids[start:end] == tokens.tolist(), name
        assert draft.confidence is not None
        torch.testing.assert_close(torch.tensor(draft.confidence[start:end]), chances, atol=1e-4, rtol=1e-3)
    for (k, v), (new_k, new_v) in zip(before, after, strict=True):
        changed = ((k != new_k).flatten(1).any(1) | (v != new_v).flatten(1).any(1)).nonzero()[:, 0].tolist()
        assert set(changed) == own

    alone = [proposer.propose(DraftContext([one], 0, BLOCK)).token_ids for one in rows]
    assert [token for tokens in alone for token in tokens] == draft.token_ids, "others in the batch change nothing"


def test_noise_depends_on_seed_request_and_position_alone() -> None:
    def drawn(noise: Noise, name: str = "a", length: int = 3, count: int = 400) -> list[int]:
        (tokens,) = noise.token_ids([Feed(0, row(name, [1] * length, [0], count), length - 1, length, count)])
        return tokens

    tokens = drawn(Noise(0, 5, 9))
    assert len(tokens) == 399 and {*tokens} == {5, 6, 7, 8} and max(map(tokens.count, {*tokens})) < 130
    assert drawn(Noise(0, 5, 9), length=4)[:-1] == tokens[1:] and drawn(Noise(0, 5, 9)) == tokens
    assert all(other != tokens for other in (drawn(Noise(1, 5, 9)), drawn(Noise(0, 5, 9), "b")))


def test_a_step_that_had_begun_is_dropped(tiny_target: Path, adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else entries would be kept over which noise was written: a draft model's guesses are begun early, UNO's first one is the same."""
    options = {**OPTIONS, "executor": "torch"}
    with LLM(tiny_target, {"method": "off"}, **options) as llm:
        expected = say(llm, temperature=0, max_tokens=100)
    bind_as_on_a_gpu(monkeypatch)
    draft_model = {"method": "draft_model", "model": str(tiny_target), "num_speculative_tokens": K, "adaptive": False}
    with LLM(tiny_target, [draft_model, uno(adapter)], **options) as llm:
        core = llm._running().core
        policy: Any = core.controller.policy
        runner, share, drop, turn, dropped = core.runner, policy.share, core.runner.drop_begun, 0, 0

        def in_turn(wishes: Any, budget: int) -> Any:
            nonlocal turn
            turn += 1
            return [(2 if turn % 4 == 0 else p, k) for p, k in share(wishes, budget)]

        def counted() -> None:
            nonlocal dropped
            dropped += runner.has_begun
            drop()

        monkeypatch.setattr(policy, "share", in_turn)
        monkeypatch.setattr(policy, "cut", lambda grants, draft: [1] * len(grants) if turn % 4 == 0 else None)
        monkeypatch.setattr(runner, "drop_begun", counted)
        assert say(llm, temperature=0, max_tokens=100) == expected
        assert dropped > 2


BAD: list[tuple[dict[str, Any], str]] = [
    ({"uno_lora_path": None}, "needs a 'uno_lora_path'"),
    ({"uno_mask_token_id": 1}, "'uno_mask_token_id' must be an integer from 2"),
    ({"uno_mask_token_id": VOCAB + 1}, "'uno_mask_token_id' 301 is not between 2 and 300"),
    ({"uno_mask_token_id": 20, "uno_noise_low": 20}, "'uno_noise_low' 20 must be below 20"),
    ({"uno_noise_low": VOCAB}, "'uno_noise_low' 300 must be below 300"),
    ({"uno_noise_seed": -1}, "'uno_noise_seed' must be an integer"),
    ({"uno_lora_path": "/nowhere/at/all"}, "there is no folder /nowhere/at/all"),
]


@pytest.mark.parametrize(("more", "told"), BAD)
def test_what_cannot_work_is_told(more: dict[str, Any], told: str, tiny_target: Path, adapter: str) -> None:
    with pytest.raises(ConfigError, match=told):
        LLM(tiny_target, uno(adapter, **more), executor="torch", **OPTIONS)


def test_targets_with_recurrent_layers_are_refused(adapter: str, tmp_path: Path) -> None:
    random_model(tiny_config("qwen3_5", vocab_size=VOCAB)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="'uno' runs the target once more over places.*a target with recurrent layers cannot"):
        LLM(tmp_path, uno(adapter), executor="torch", **{**OPTIONS, "max_model_len": 64})


def test_adapters_of_other_models_are_refused(tiny_target: Path, tiny_draft: Path, tmp_path: Path) -> None:
    foreign = str(save_adapter(tmp_path / "foreign", pairs_for(tiny_draft, 1)))
    for folder, told in ((foreign, "was made for another model"), (str(tiny_draft), "is no adapter: it has no adapter_config.json")):
        with pytest.raises(ModelLoadError, match=told):
            LLM(tiny_target, uno(folder), executor="torch", **OPTIONS)
    with pytest.raises(ConfigError, match='holds an adapter: say "method": "uno" instead of "eagle"'):
        LLM(tiny_target, {"method": "eagle", "model": foreign}, executor="torch", **OPTIONS)


def test_an_adapter_may_lie_in_a_subfolder_of_a_repository(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write("uno", tiny_target, tmp_path / "uno")
    asked: dict[str, Any] = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda hub_id, **arguments: asked.update(arguments) or str(folder))
    assert find_adapter("some-org/uno", revision="main") == folder / "adapter" and asked.pop("revision") == "main"
    offered = ["adapter/adapter_config.json", "adapter/adapter_model.safetensors", "adapter_config.json", "config.json", "onnx/model.json"]
    assert [*huggingface_hub.utils.filter_repo_objects(offered, **asked)] == offered[:3]
