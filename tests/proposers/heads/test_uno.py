"""UNO in training: an adapter learns to read noise, the text goes through the target untouched, and PEFT's layout comes out."""

import inspect
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from random_adapters import merged
from safetensors.torch import load_file
from taught_target import TaughtTarget
from tiny_models import save_tokenizer
from torch import Tensor
from training_heads import Training, document, documents, texts
from transformers import DynamicCache, LlamaForCausalLM

from foretoken import LLM, SamplingParams
from foretoken.engine.adapter_folder import read_adapter
from foretoken.proposers.training.frozen import FrozenTarget
from foretoken.proposers.training.heads.uno import Uno, UnoSettings

CACHE = next(name for name in ("cache", "past_key_values") if name in inspect.signature(LlamaForCausalLM.forward).parameters)
SETTINGS = UnoSettings(num_tokens=4, rank=16, alpha=32)


@pytest.fixture(scope="module")
def trained(target: TaughtTarget, tmp_path_factory: pytest.TempPathFactory) -> tuple[Uno, Training]:
    head = Uno(target.frozen, SETTINGS)
    return head, Training(head, tmp_path_factory.mktemp("training"), lr=3e-2, steps=60)


def recomputed(target: TaughtTarget, adapter: Path, text: Sequence[int], noise: Sequence[int]) -> Tensor:
    """[noise, V]: the text through the target, the noise behind it through one with the adapter in its weights, over the text's entries."""
    plain = LlamaForCausalLM.from_pretrained(target.folder)
    weights = dict(plain.state_dict())
    pairs = dict(read_adapter(adapter, {name: tuple(weight.shape) for name, weight in weights.items()}, 64).pairs)
    other = LlamaForCausalLM.from_pretrained(target.folder)
    other.load_state_dict(merged(weights, pairs))
    with torch.no_grad():
        cache = DynamicCache(config=plain.config)
        for model, tokens in ((plain, text), (other, noise)):
            logits = model.model(torch.tensor([list(tokens)]), **{CACHE: cache}, use_cache=True).last_hidden_state @ plain.lm_head.weight.T
    return logits[0]


def test_it_learns_and_its_export_is_an_adapter_that_says_the_same(
    target: TaughtTarget, trained: tuple[Uno, Training], tmp_path: Path
) -> None:
    head, training = trained
    print(training.before, training.after)
    assert training.after["loss"] < 0.6 * training.before["loss"] and training.after["accuracy_1"] > 0.2
    head.export(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["r"] == 16 and set(config["target_modules"]) == {f"{kind}_proj" for kind in ("q", "k", "v", "o", "gate", "up", "down")}
    with torch.no_grad():
        for adapter in head.adapters:
            adapter.down.copy_(adapter.down.bfloat16())
            adapter.up.copy_(adapter.up.bfloat16())
    text = texts(1, 14, seed=4)[0]
    batch = document(text)
    blocks = head.blocks(batch)
    noise, scores = head.noise(blocks), (head(batch, blocks) @ target.frozen.head.T).detach()
    assert noise.min() > 0
    for block, (place, length) in enumerate(zip(blocks.places.tolist(), blocks.lengths.tolist(), strict=True)):
        mine = blocks.numbers == block
        expected = recomputed(target, tmp_path, text[:place], noise[mine].tolist())
        assert len(expected) == length
        torch.testing.assert_close(scores[mine], expected, rtol=1e-3, atol=1e-3)


def test_an_untrained_adapter_adds_nothing_and_the_target_stays_as_it_is(target: TaughtTarget, tmp_path: Path) -> None:
    before = load_file(target.folder / "model.safetensors")
    head = Uno(FrozenTarget.load(target.folder), SETTINGS)
    head.export(tmp_path)
    assert not any(tensor.any() for name, tensor in load_file(tmp_path / "adapter_model.safetensors").items() if "lora_B" in name)
    batch = document(texts(1, 9, seed=2)[0])
    head.loss(batch).total.backward()
    assert all(parameter.grad is not None for parameter in head.parameters())
    assert not any(parameter.requires_grad for parameter in head.target.model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in head.target.model.state_dict().items() if name in before)


def test_documents_do_not_see_each_other(target: TaughtTarget, trained: tuple[Uno, Training]) -> None:
    head, _ = trained
    one, other = texts(2, 11, seed=6)
    pair, changed = documents(one, other), documents(one, other[::-1])
    mine = head.blocks(pair).numbers[head.blocks(pair).places[head.blocks(pair).numbers] < 11]
    first, second = head(pair, head.blocks(pair)), head(changed, head.blocks(changed))
    torch.testing.assert_close(first[: len(mine)], second[: len(mine)])
    assert not torch.allclose(first[len(mine) :], second[len(mine) :])


def test_served_with_it_the_target_guesses_what_the_noise_hides(
    target: TaughtTarget, trained: tuple[Uno, Training], tmp_path: Path
) -> None:
    trained[0].export(tmp_path)
    save_tokenizer(target.folder)
    greedy = SamplingParams(temperature=0, max_tokens=40, detokenize=False)
    config = {"method": "uno", "uno_lora_path": str(tmp_path), "num_speculative_tokens": 4, "adaptive": False}
    with LLM(target.folder, config, dtype="float32", kv_cache_gb=0.01, max_model_len=128, max_num_seqs=8) as llm:
        llm.generate(texts(8, 20, seed=9), greedy, use_tqdm=False)
        stats = llm.stats()
    first, second, *_ = stats.accepted_per_position
    assert first == stats.num_drafts and second > first / 4
