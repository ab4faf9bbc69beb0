"""A draft layer of transformers as an executor: its contract. Its numbers are those of tests/proposers/test_mtp.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from mtp_checkpoints import CONFIGS, HIDDEN, MAX_MODEL_LEN
from torch import Tensor

from foretoken.kernels.layout import FINAL, KVLayerSpec, RaggedBatch
from foretoken.kernels.rope import UnsupportedModel
from foretoken.kernels.transformers_layer import STATE, DraftLayer, TransformersLayerExecutor
from foretoken.kernels.transformers_model import fresh_prompts
from foretoken.kernels.weight_bank import WeightBank

KV_LAYERS = {"deepseek": KVLayerSpec(4, 16, 12)}
VOCAB = 300


def executor(name: str, dtype: torch.dtype = torch.float32) -> TransformersLayerExecutor:
    torch.manual_seed(0)
    layer = DraftLayer(CONFIGS[name]())
    tensors = {name: 0.2 * torch.randn(shape) for name, shape in layer.shapes().items()}
    shared = {name: torch.randn(VOCAB, HIDDEN).to(dtype) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    return TransformersLayerExecutor(layer, tensors, dtype, WeightBank(shared), MAX_MODEL_LEN)


def tree(batch: RaggedBatch) -> RaggedBatch:
    """Three causal tokens, then two children of the third, the first of which has a child: 0 1 2 (3 (5) | 4)."""
    return dataclasses.replace(
        batch,
        num_causal=torch.tensor([3], dtype=torch.int32),
        positions=torch.tensor([0, 1, 2, 3, 3, 4]),
        tree_mask=torch.tensor([0, 0, 0, 0b001, 0b010, 0b101]),
    )


def inputs(count: int) -> dict[str, Tensor]:
    return {STATE: torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("name", KV_LAYERS)
def test_what_it_says_of_itself(name: str) -> None:
    found = executor(name)
    assert found.kv_layers == (KV_LAYERS[name],)
    assert (found.vocab_size, found.max_model_len, found.recurrent) == (VOCAB, MAX_MODEL_LEN, (STATE, FINAL))
    assert found.kv_block_bytes(16) == 16 * 4 * KV_LAYERS[name].num_kv_heads * (KV_LAYERS[name].k_dim + KV_LAYERS[name].v_dim)


@pytest.mark.parametrize("name", KV_LAYERS)
def test_tree_tokens_see_their_ancestors_only(name: str) -> None:
    network, tokens = executor(name), [4, 5, 6, 7, 8, 9]
    batch, states = tree(fresh_prompts([tokens], torch.device("cpu"))), inputs(6)
    output = network.run(batch, network.allocate(2, batch.block_size), (0, 1, FINAL), states)
    alone = fresh_prompts([[4, 5, 6, 7, 9]], torch.device("cpu"))
    path = {STATE: states[STATE][torch.tensor([0, 1, 2, 3, 5])]}
    expected = network.run(alone, network.allocate(2, batch.block_size), (1,), path)
    assert output.logits is not None and expected.logits is not None
    assert torch.allclose(output.logits[torch.tensor([0, 1, 2, 3, 5])], expected.logits, atol=1e-4)
    assert torch.allclose(output.hidden[1][-1], expected.hidden[1][-1], atol=1e-5)
    assert torch.equal(output.argmax, output.logits.argmax(-1))
    assert torch.allclose(output.hidden[FINAL] @ network.bank.tensors["lm_head.weight"].T, output.logits, atol=1e-4)


def test_passes_without_scores_only_fill_the_cache() -> None:
    network, nothing = executor("deepseek"), torch.zeros(0, dtype=torch.int64)
    batch = dataclasses.replace(fresh_prompts([[4, 5, 6]], torch.device("cpu")), logits_indices=nothing, full_logits=nothing)
    kv = network.allocate(1, batch.block_size)
    kv.k[0].zero_()
    output = network.run(batch, kv, inputs=inputs(3))
    assert output.logits is None and len(output.argmax) == 0
    assert kv.k[0][:3].abs().sum(-1).min() > 0


@pytest.mark.parametrize("name", KV_LAYERS)
def test_bfloat16_is_near_float32(name: str) -> None:
    """What the layer reads: behind it, experts are chosen by scores that rounding may swap."""
    batch, found = fresh_prompts([[4, 5, 6]], torch.device("cpu")), dict[torch.dtype, Tensor]()
    for dtype in (torch.float32, torch.bfloat16):
        network = executor(name, dtype)
        output = network.run(batch, network.allocate(1, batch.block_size), (0,), inputs(3))
        assert output.logits is not None and output.logits.dtype == torch.float32 and output.hidden[0].dtype == dtype
        found[dtype] = output.hidden[0].float()
    assert torch.allclose(found[torch.float32], found[torch.bfloat16], atol=0.05)


def test_the_targets_config_is_left_alone() -> None:
    hf_config = CONFIGS["deepseek"]()
    before = hf_config.to_dict()
    DraftLayer(hf_config)
    assert hf_config.to_dict() == before and hf_config._attn_implementation != "foretoken_paged"


def test_other_families_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="draft layers of model type 'llama'"):
        DraftLayer(transformers.LlamaConfig())
