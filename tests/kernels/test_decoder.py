from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from decoding import Decoding

from foretoken.kernels.decoder import decoder_program, supports
from foretoken.kernels.layout import FINAL, Executor
from foretoken.kernels.rope import UnsupportedModel
from foretoken.kernels.weights import load_program_executor

VOCAB = 97
LENGTH = 26  # far beyond the windows and over several blocks
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,  # large enough to show
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
}


def llama(**settings: Any) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**{**SIZES, **settings})


def scaled(**rope: Any) -> transformers.LlamaConfig:
    return llama(rope_parameters={"rope_theta": 10000.0, **rope})


CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama": llama(),
    "llama-tied": llama(tie_word_embeddings=True),
    "llama-biases": llama(attention_bias=True, mlp_bias=True),
    "llama-head-dim": llama(head_dim=16, num_key_value_heads=1),
    "llama-gelu": llama(hidden_act="gelu_pytorch_tanh", num_key_value_heads=4),
    "linear": scaled(rope_type="linear", factor=2.0),
    "linear-old-form": llama(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0}),
    "llama3": scaled(rope_type="llama3", **LLAMA3),
    "yarn": scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    "longrope": scaled(**LONGROPE),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=6),
    "mistral-full": transformers.MistralConfig(**SIZES, sliding_window=None, head_dim=12),
    "qwen2": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-windows": transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16),
    "qwen3-biases": transformers.Qwen3Config(**SIZES, head_dim=8, attention_bias=True),
}


def random_model(config: transformers.PretrainedConfig, seed: int = 0) -> Any:
    """Every weight random, norms and biases too, so that none can be forgotten unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.3 * noise if "norm" in name else noise * (0.5 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5)
    return model


@dataclasses.dataclass
class Pair:
    """The transformers model, and the program over its checkpoint."""

    model: Any
    folder: Path
    executor: Executor

    @torch.no_grad()
    def expect(self, token_ids: list[int]) -> Any:
        return self.model(torch.tensor([token_ids]), use_cache=False, output_hidden_states=True)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    made = {}
    for name, config in CONFIGS.items():
        model, folder = random_model(config), tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        saved = transformers.AutoConfig.from_pretrained(folder)
        made[name] = Pair(model, folder, load_program_executor(list(folder.glob("*.safetensors")), saved, torch.float32))
    return made


def tokens(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_near(actual: torch.Tensor | None, expected: torch.Tensor) -> None:
    """Within 1e-5 of the largest entry."""
    assert actual is not None and actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", CONFIGS)
def test_one_prefill_and_its_hidden_states(pairs: dict[str, Pair], name: str) -> None:
    pair, prompt = pairs[name], tokens(1)
    expected = pair.expect(prompt)
    *inputs, final = expected.hidden_states  # transformers puts the final norm's output in the place of the last layer's
    output = Decoding(pair.executor).feed([prompt], hidden=(*range(len(inputs)), FINAL))
    assert_near(output.logits, expected.logits[0])
    assert torch.equal(output.argmax, expected.logits[0].argmax(-1))
    torch.testing.assert_close(output.top, expected.logits[0].amax(-1), rtol=1e-4, atol=1e-4)
    for boundary, state in enumerate(inputs):
        assert_near(output.hidden[boundary], state[0])
    assert_near(output.hidden[FINAL], final[0])


@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_rows_and_single_tokens(pairs: dict[str, Pair], name: str) -> None:
    pair, rows = pairs[name], [tokens(2), tokens(3), tokens(4)]
    expected = [pair.expect(row).logits[0] for row in rows]
    decoding = Decoding(pair.executor, num_rows=3)
    found: list[list[torch.Tensor]] = [[], [], []]
    while any(decoding.lengths[r] < LENGTH for r in range(3)):
        # Row 0 comes token by token, row 1 in chunks of 7, row 2 at once and then not at all.
        new = [row[start : start + size] for row, start, size in zip(rows, decoding.lengths, (1, 7, LENGTH), strict=True)]
        logits = decoding.feed(new).logits
        assert logits is not None
        for r, part in enumerate(logits.split([len(part) for part in new])):
            found[r].append(part)
    for r in range(3):
        assert_near(torch.cat(found[r]), expected[r])


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_tree_tokens_are_rotated_by_position(pairs: dict[str, Pair], name: str) -> None:
    """Siblings and a grandchild behind a prompt: each scores as if its own path were the whole sequence."""
    executor, prompt = pairs[name].executor, tokens(5, 9)
    decoding = Decoding(executor)
    decoding.feed([prompt])
    paths = [[11], [12], [12, 13]]  # tree tokens 11, 12, 13: the last is a child of the second
    chain = decoding.batch([[11, 12, 13]])
    tree = dataclasses.replace(
        chain,
        positions=torch.tensor([9, 9, 10]),
        num_causal=torch.tensor([0], dtype=torch.int32),
        tree_mask=torch.tensor([0b001, 0b010, 0b110]),
    )
    logits = executor.run(tree, decoding.kv).logits
    assert logits is not None
    for i, path in enumerate(paths):
        assert_near(logits[i], pairs[name].expect(prompt + path).logits[0, -1])


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_a_chain_is_repeated_argmax(pairs: dict[str, Pair], name: str) -> None:
    executor, prompts = pairs[name].executor, [tokens(6, 9), tokens(7, 5)]
    stepping = Decoding(executor, num_rows=2)
    output, expected = stepping.feed(prompts), []
    chosen = output.argmax[[8, 13]]
    for _ in range(4):
        expected.append(chosen)
        chosen = stepping.feed([[int(token)] for token in chosen]).argmax
    decoding = Decoding(executor, num_rows=2)
    chain = executor.run_chain(decoding.batch(prompts, all_logits=False), decoding.kv, torch.tensor([4, 2]))
    assert chain.token_ids[0].tolist() == [int(step[0]) for step in expected]
    assert chain.token_ids[1, :2].tolist() == [int(step[1]) for step in expected[:2]]


def test_a_pass_may_want_no_logits(pairs: dict[str, Pair]) -> None:
    executor, prompt = pairs["qwen3"].executor, tokens(10)
    decoding = Decoding(executor)
    none = torch.empty(0, dtype=torch.int64)
    output = executor.run(dataclasses.replace(decoding.batch([prompt[:20]]), logits_indices=none, full_logits=none), decoding.kv)
    assert output.logits is None and len(output.argmax) == len(output.top) == 0
    decoding.lengths = [20]
    assert_near(decoding.feed([prompt[20:]]).logits, pairs["qwen3"].expect(prompt).logits[0, 20:])


def test_longrope_is_decided_by_the_models_length(pairs: dict[str, Pair]) -> None:
    pair, short = pairs["longrope"], tokens(8, 16)
    config = CONFIGS["longrope"]
    transformers_logits = pair.expect(short).logits[0]
    executor = load_program_executor(list(pair.folder.glob("*.safetensors")), config, torch.float32, max_model_len=16)
    assert executor.max_model_len == 16
    assert_near(Decoding(executor).feed([short]).logits, transformers_logits)
    long = Decoding(pair.executor).feed([short]).logits  # made for 64 positions: long frequencies from the first token on
    assert long is not None and (long - transformers_logits).abs().max() > 1e-3


def test_bfloat16_agrees_but_for_near_ties(pairs: dict[str, Pair]) -> None:
    pair, prompt = pairs["qwen2"], tokens(9)
    executor = load_program_executor(list(pair.folder.glob("*.safetensors")), CONFIGS["qwen2"], torch.bfloat16)
    output = Decoding(executor).feed([prompt])
    exact = pair.expect(prompt).logits[0]
    assert output.logits is not None and output.logits.dtype == torch.float32
    lost = exact.amax(-1) - exact.gather(1, output.argmax[:, None])[:, 0]
    assert lost.max() <= 0.03 * exact.abs().max()
    assert (output.argmax == exact.argmax(-1)).float().mean() > 0.8


def test_what_is_not_understood_is_not_supported() -> None:
    assert all(supports(config) for config in CONFIGS.values())
    odd: dict[str, transformers.PretrainedConfig] = {
        "dynamic scaling": scaled(rope_type="dynamic", factor=2.0),
        "partial rotary": scaled(rope_type="linear", factor=2.0, partial_rotary_factor=0.5),
        "activation": llama(hidden_act="tanh"),
        "draft architecture": llama(architectures=["LlamaForCausalLMEagle3"]),
        "quantised": llama(quantization_config={"quant_method": "gptq", "bits": 4}),
        "layers that differ": transformers.MistralConfig(**{**SIZES, "layer_types": ["full_attention"] * 3}),
        "linear attention": transformers.Qwen3Config(**SIZES, layer_types=["linear_attention"] * 3),
        "mixture of experts": transformers.MixtralConfig(**SIZES),
        "other family": transformers.GPT2Config(),
        "no text model": transformers.CLIPVisionConfig(),
    }
    assert [what for what, config in odd.items() if supports(config)] == []
    with pytest.raises(UnsupportedModel, match="dynamic"):
        decoder_program(odd["dynamic scaling"])
