import dataclasses
import math
from typing import Any

import pytest
import torch
import transformers
from decoding import Decoding
from pairs import Pair, assert_near, random_tokens
from tiny_models import FAMILIES, WITH_EXPERTS, tiny_config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from foretoken.kernels.decoder import decoder_program, supports
from foretoken.kernels.execution import Execution
from foretoken.kernels.rope import UnsupportedModel

VOCAB = 97
LENGTH = 26
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    configs = {family: tiny_config(family) for family in FAMILIES} | {"longrope": tiny_config("llama", rope_parameters=LONGROPE)}
    return {name: Pair.save(config, tmp_path_factory.mktemp(name)) for name, config in configs.items()}


def tokens(seed: int, length: int = LENGTH) -> list[int]:
    return random_tokens(seed, length, VOCAB)


@pytest.mark.parametrize("name", FAMILIES)
def test_tree_tokens_are_rotated_by_position(pairs: dict[str, Pair], name: str) -> None:
    """Siblings and a grandchild behind a prompt: each scores as if its own path were the whole sequence."""
    executor, prompt = pairs[name].executor, tokens(5, 9)
    decoding = Decoding(executor)
    decoding.feed([prompt])
    paths = [[11], [12], [12, 13]]  # tree tokens 11, 12, 13: the last is a child of the second
    chain = decoding.batch([[11, 12, 13]])
    tree = dataclasses.replace(
        chain, positions=torch.tensor([9, 9, 10]), num_causal=torch.tensor([0], dtype=torch.int32),
        tree_mask=torch.tensor([0b001, 0b010, 0b110]),
    )
    logits = executor.run(tree, decoding.kv).logits
    assert logits is not None
    for i, path in enumerate(paths):
        assert_near(logits[i], pairs[name].expect(prompt + path).logits[0, -1])


@pytest.mark.parametrize("name", FAMILIES)
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
    transformers_logits = pair.expect(short).logits[0]
    executor = Pair.load(pair.folder, max_model_len=16)
    assert executor.max_model_len == 16
    assert_near(Decoding(executor).feed([short]).logits, transformers_logits)
    long = Decoding(pair.executor).feed([short]).logits  # made for 64 positions: long frequencies from the first token on
    assert long is not None and (long - transformers_logits).abs().max() > 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_agrees_but_for_near_ties(pairs: dict[str, Pair], name: str) -> None:
    pair, prompt = pairs[name], tokens(9)
    executor = Pair.load(pair.folder, Execution(torch.bfloat16, prefer_native=False))
    output = Decoding(executor).feed([prompt])
    exact = pair.expect(prompt).logits[0]
    assert output.logits is not None and output.logits.dtype == torch.float32
    lost = exact.amax(-1) - exact.gather(1, output.argmax[:, None])[:, 0]
    if name not in WITH_EXPERTS:  # where rounding chooses another expert, more changes
        assert lost.max() <= 0.03 * exact.abs().max()
    assert (output.argmax == exact.argmax(-1)).float().mean() > 0.8


def test_what_is_not_understood_is_not_supported() -> None:
    dynamic = tiny_config("llama", rope_scaling={"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32})
    partial = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
    multimodal: Any = transformers.Gemma3Config(text_config=tiny_config("gemma3").to_dict())
    odd: dict[str, transformers.PretrainedConfig] = {
        "dynamic scaling": dynamic,
        "rotary base": tiny_config("llama", rope_parameters={"rope_theta": "a", "rope_type": "default"}),
        "partial rotary": tiny_config("llama", rope_parameters=partial),
        "activation": tiny_config("llama", hidden_act="tanh"),
        "draft architecture": tiny_config("llama", architectures=["LlamaForCausalLMEagle3"]),
        "experts in uneven groups": tiny_config("glm4_moe", n_group=3),
        "too few experts": tiny_config("mixtral", num_local_experts=1),
        "multimodal": multimodal,
        "other family": transformers.GPT2Config(),
        "no text model": transformers.CLIPVisionConfig(),
    }
    assert [what for what, config in odd.items() if supports(config)] == []
    with pytest.raises(UnsupportedModel, match="dynamic"):
        decoder_program(dynamic)
    assert supports(tiny_config("llama", architectures=["LLaMAForCausalLM"]))


@pytest.mark.parametrize(
    ("model_type", "billions", "cache"),
    [("glm4_moe_lite", 29.94, 64 + 512), ("youtu", 1.96, 64 + 512), ("minicpm3", 4.07, 32 + 256)],
)
def test_latent_attention_of_models_as_they_are_published(model_type: str, billions: float, cache: int) -> None:
    """The defaults of their configs, which leave out what tiny ones say: GLM-4.7-Flash, Youtu-LLM-2B, MiniCPM3-4B."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not know it")
    program = decoder_program(CONFIG_MAPPING[model_type]())
    assert round(sum(math.prod(shape) for shape in program.weights.values()) / 1e9, 2) == billions
    assert {layer.stored for layer in program.kv_layers} == {cache}
    assert program.buffers
