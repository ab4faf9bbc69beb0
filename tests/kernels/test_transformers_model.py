import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from paged_batches import Row, batch_of

from foretoken.kernels.config_limits import max_positions
from foretoken.kernels.layout import FINAL, RaggedBatch
from foretoken.kernels.rope import UnsupportedModel
from foretoken.kernels.transformers_model import TransformersExecutor, refuse_unsupported

BLOCK_SIZE = 4
NUM_BLOCKS = 80
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # larger than usual, so that a wrong mask shows
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**GROUPED),
    "mistral": transformers.MistralConfig(**GROUPED, sliding_window=6),
    "qwen2": transformers.Qwen2Config(**GROUPED),
    "qwen3": transformers.Qwen3Config(**GROUPED, head_dim=16),
    "gpt_neox": transformers.GPTNeoXConfig(**SIZES),
    "gemma2": transformers.Gemma2Config(
        **GROUPED, head_dim=8, sliding_window=6, final_logit_softcapping=5.0, attn_logit_softcapping=4.0
    ),
    "opt": transformers.OPTConfig(
        vocab_size=96, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128,
        word_embed_proj_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ),
}


def random_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    # The config goes into the model, which writes its attention function there.
    return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), dtype=dtype, attn_implementation="eager").eval()


class Oracle:
    """The model as transformers runs it, and an executor over a second copy with the same weights."""

    def __init__(self, name: str) -> None:
        self.model = random_model(name)
        self.executor = TransformersExecutor(random_model(name))
        self.kv = self.executor.allocate(NUM_BLOCKS, BLOCK_SIZE)

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([token_ids]), use_cache=False).logits[0]

    @torch.no_grad()
    def hidden(self, token_ids: list[int]) -> tuple[torch.Tensor, ...]:
        return self.model(torch.tensor([token_ids]), use_cache=False, output_hidden_states=True).hidden_states

    def run(self, *rows: tuple[int, int, list[int], list[int]], hidden: tuple[int, ...] = ()):
        batch = ragged(*rows)
        return self.executor.run(batch, self.kv, hidden)


@pytest.fixture(scope="module")
def oracles() -> dict[str, Oracle]:
    return {name: Oracle(name) for name in CONFIGS}


def table(row: int) -> range:
    """Twenty blocks of a row, out of order and interleaved with the other rows'."""
    return range(4 * 19 + row, -1, -4)


def ragged(*rows: tuple[int, int, list[int], list[int]]) -> RaggedBatch:
    """Rows of (which sequence, context, tokens, parents); the last len(parents) tokens are a tree. Scores for all tokens."""
    placed: list[Row] = []
    for sequence, context, tokens, parents in rows:
        causal = len(tokens) - len(parents)
        placed.append(Row(tokens[:causal], context, table(sequence), list(zip(tokens[causal:], parents, strict=True))))
    return batch_of(placed, BLOCK_SIZE)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def close(actual: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert actual is not None
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_decodes_and_rows_equal_transformers(name: str, oracles: dict[str, Oracle]):
    oracle = oracles[name]
    a, b = prompt(30, 1), prompt(25, 2)
    expected_a, expected_b = oracle.logits(a), oracle.logits(b)
    close(oracle.run((0, 0, a[:11], [])).logits, expected_a[:11])
    mixed = oracle.run((0, 11, a[11:20], []), (1, 0, b[:18], [])).logits  # a later chunk beside a first one
    close(mixed, torch.cat([expected_a[11:20], expected_b[:18]]))
    for step in range(4):  # one token of each
        out = oracle.run((1, 18 + step, [b[18 + step]], []), (0, 20 + step, [a[20 + step]], []))
        close(out.logits, torch.stack([expected_b[18 + step], expected_a[20 + step]]))
    close(oracle.run((0, 24, a[24:30], [])).logits, expected_a[24:30])  # a chain


def path_to(node: int, tree: list[int], parents: list[int]) -> list[int]:
    return [*path_to(parents[node], tree, parents), tree[node]] if node >= 0 else []


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tree_path_equals_its_chain(name: str, oracles: dict[str, Oracle]):
    oracle = oracles[name]
    context = prompt(13, 3)
    oracle.run((2, 0, context[:-1], []))
    tree = prompt(6, 4)
    parents = [-1, -1, 0, 0, 3, 1]
    logits = oracle.run((2, 12, [context[-1], *tree], parents)).logits
    assert logits is not None
    close(logits[0], oracle.logits(context)[-1])
    for node in range(len(tree)):
        close(logits[1 + node], oracle.logits(context + path_to(node, tree, parents))[-1])


@pytest.mark.parametrize("deep", [False, True])
def test_a_tree_has_up_to_64_nodes(deep: bool, oracles: dict[str, Oracle]):
    oracle = oracles["llama"]
    context, tree = prompt(5, 7), prompt(64, 8)
    parents = [*range(-1, 20), *range(0, 42), 20 if deep else -1]  # node 63 is the sign of its own mask
    oracle.run((2, 0, context[:-1], []))
    logits = oracle.run((2, 4, [context[-1], *tree], parents)).logits
    assert logits is not None
    for node in (20, 50, 63):
        close(logits[1 + node], oracle.logits(context + path_to(node, tree, parents))[-1])


@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_are_those_of_transformers(name: str, oracles: dict[str, Oracle]):
    oracle = oracles[name]
    tokens = prompt(9, 5)
    expected = oracle.hidden(tokens)
    out = oracle.run((3, 0, tokens, []), hidden=(0, 1, FINAL))
    assert set(out.hidden) == {0, 1, FINAL}
    close(out.hidden[0], expected[0][0])
    close(out.hidden[1], expected[1][0])
    close(out.hidden[FINAL], expected[-1][0])
    assert not oracle.run((3, 0, tokens, [])).hidden
    with pytest.raises(UnsupportedModel, match="hidden states"):  # transformers has the last layer's behind the norm only
        oracle.run((3, 0, tokens, []), hidden=(len(oracle.executor.kv_layers),))


def test_scores_only_where_wanted(oracles: dict[str, Oracle]):
    oracle, tokens = oracles["llama"], prompt(9, 6)
    expected = oracle.logits(tokens)
    batch = ragged((3, 0, tokens, []))
    batch = dataclasses.replace(batch, logits_indices=torch.tensor([2, 5, 8]), full_logits=torch.tensor([1]))
    out = oracle.executor.run(batch, oracle.kv)
    assert torch.equal(out.argmax, expected[[2, 5, 8]].argmax(-1))
    close(out.top, expected[[2, 5, 8]].amax(-1))
    close(out.logits, expected[[5]])
    nothing = dataclasses.replace(batch, logits_indices=torch.arange(0), full_logits=torch.arange(0))
    out = oracle.executor.run(nothing, oracle.kv)
    assert out.argmax.shape == (0,) and out.logits is None


def test_nan_is_told_by_top(oracles: dict[str, Oracle]):
    oracle = oracles["llama"]
    oracle.run((3, 0, prompt(4, 7), []))
    oracle.kv.v[0][table(3)[0] * BLOCK_SIZE] = torch.nan
    out = oracle.run((3, 4, [5], []), (2, 0, [6, 7], []))
    assert torch.isnan(out.top[0]) and torch.isfinite(out.top[1:]).all()


def test_bfloat16():
    executor = TransformersExecutor(random_model("qwen2", torch.bfloat16))
    kv = executor.allocate(NUM_BLOCKS, BLOCK_SIZE)
    assert kv.k[0].dtype == torch.bfloat16
    tokens = prompt(12, 8)
    executor.run(ragged((0, 0, tokens[:8], [])), kv)
    out = executor.run(ragged((0, 8, tokens[8:], [])), kv)
    with torch.no_grad():
        expected = random_model("qwen2", torch.bfloat16)(torch.tensor([tokens]), use_cache=False).logits[0, 8:].float()
    assert out.logits is not None and out.logits.dtype == torch.float32
    assert float((out.logits - expected).norm() / expected.norm()) < 0.05


def test_layers_tell_heads_and_window(oracles: dict[str, Oracle]):
    layers = oracles["gemma2"].executor.kv_layers
    assert [(s.num_kv_heads, s.k_dim, s.v_dim, s.window) for s in layers] == [(2, 8, 8, 6), (2, 8, 8, None)]
    assert oracles["llama"].executor.vocab_size == 96
    assert oracles["llama"].executor.max_model_len == 128


def test_load_from_a_folder(tmp_path: Path):
    model = random_model("llama")
    model.save_pretrained(tmp_path)
    executor = TransformersExecutor.load(tmp_path, model.config, torch.float32)
    out = executor.run(ragged((0, 0, [5, 6, 7], [])), executor.allocate(NUM_BLOCKS, BLOCK_SIZE))
    with torch.no_grad():
        close(out.logits, model(torch.tensor([[5, 6, 7]])).logits[0])


def test_missing_weights_are_not_made_up(tmp_path: Path):
    random_model("llama").save_pretrained(tmp_path)
    deeper = transformers.LlamaConfig(**{**GROUPED, "num_hidden_layers": 3})
    with pytest.raises(UnsupportedModel, match=r"weights of the network are missing.*model\.layers\.2"):
        TransformersExecutor.load(tmp_path, deeper, torch.float32)


@pytest.mark.parametrize(
    ("config", "phrase"),
    [(transformers.LlamaConfig(**{**GROUPED, "hidden_act": "weird"}), "'weird'"), (transformers.BltConfig(), "'num_hidden_layers'")],
)
def test_settings_that_make_no_model_are_told(tmp_path: Path, config: transformers.PretrainedConfig, phrase: str):
    random_model("llama").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=rf"config\.json.*{phrase}.*correct its settings"):
        TransformersExecutor.load(tmp_path, config, torch.float32)


@pytest.mark.parametrize(
    ("config", "phrase"),
    [
        (transformers.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2), "a 'mamba' model cannot be served"),
        (transformers.BartConfig(), "names it bart, which does not continue text"),
        (transformers.ViTConfig(), "no causal language model of type 'vit'"),
    ],
)
def test_recurrent_state_and_other_kinds_are_refused_by_config(config: transformers.PretrainedConfig, phrase: str):
    with pytest.raises(UnsupportedModel, match=phrase):
        refuse_unsupported(config)


def test_a_family_that_keeps_its_attention_is_told_from_wrong_settings(tmp_path: Path):
    layers: Any = [[["global"], 1]]
    config = transformers.GPTNeoConfig(
        vocab_size=96, hidden_size=32, num_layers=1, num_heads=4, attention_types=layers, bos_token_id=1, eos_token_id=2
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="a 'gpt_neo' model cannot be served: .*cannot be replaced"):
        TransformersExecutor.load(tmp_path, config, torch.float32)


def test_models_that_do_not_reach_our_attention_are_refused():
    falcon = transformers.FalconConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, bos_token_id=1, eos_token_id=2
    )
    with pytest.raises(UnsupportedModel, match="'falcon'.*0 of its 2 layers"):
        TransformersExecutor(transformers.AutoModelForCausalLM.from_config(falcon))


def test_a_window_that_only_the_mask_knows_is_refused():
    config = transformers.PhimoeConfig(**GROUPED, num_local_experts=2, sliding_window=SIZES["max_position_embeddings"] - 1)
    with pytest.raises(UnsupportedModel, match="'phimoe'.*does not pass its sliding window on"):
        TransformersExecutor(transformers.AutoModelForCausalLM.from_config(config))
    config.sliding_window = SIZES["max_position_embeddings"]  # hides nothing
    assert TransformersExecutor(transformers.AutoModelForCausalLM.from_config(config)).max_model_len == config.sliding_window


def test_a_bidirectional_model_is_refused():
    bert = transformers.BertConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, is_decoder=False
    )
    with pytest.raises(UnsupportedModel, match="'bert'.*its logits differ"):
        TransformersExecutor(transformers.AutoModelForCausalLM.from_config(bert))


def with_rope(**rope: Any) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**GROUPED, rope_parameters={"rope_theta": 1e4, **rope})


def test_positions_follow_rope_scaling():
    assert max_positions(with_rope(rope_type="default")) == 128
    assert max_positions(with_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)) == 512
    llama3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert max_positions(with_rope(**llama3, original_max_position_embeddings=8)) == 128  # as Llama 3.2


def test_rope_that_changes_with_the_batch_is_served_up_to_there():
    config = with_rope(rope_type="dynamic", factor=4.0, original_max_position_embeddings=64)
    assert TransformersExecutor(transformers.AutoModelForCausalLM.from_config(config)).max_model_len == 64
