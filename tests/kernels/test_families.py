"""Every lowered family, and its settings one by one, is held to transformers' own model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoding import Decoding
from native_only import native_only
from paged_batches import BLOCK_SIZE
from pairs import Pair, assert_near, random_tokens
from recurrent_rows import StateRow, state_batch
from tiny_models import FAMILIES, MORE, RECURRENT, WINDOW, WITH_EXPERTS, tiny_config
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from variants import slow_but

from foretoken.kernels import families, native
from foretoken.kernels.decoder import decoder_program, supports
from foretoken.kernels.execution import Execution
from foretoken.kernels.layout import FINAL, Executor, StateRoom
from foretoken.kernels.ops import Attention, Embed, Scale, Softcap
from foretoken.kernels.weights import network_program

VOCAB = 97
LENGTH = 4 * WINDOW + 2  # far beyond the windows and over several blocks
BIASES = {"attention_bias": True, "mlp_bias": True}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
}
PARTIAL_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.0, 2.0, 3.0],
}

CONFIGS: dict[str, PreTrainedConfig] = {
    **{family: tiny_config(family) for family in (*FAMILIES, *RECURRENT, *MORE)},
    "llama-tied": tiny_config("llama", **TIED),
    "llama-biases": tiny_config("llama", **BIASES),
    "llama-head-dim": tiny_config("llama", head_dim=16, num_key_value_heads=1),
    "llama-linear": tiny_config("llama", rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}),
    "llama-linear-old-form": tiny_config("llama", rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0}),
    "llama-llama3": tiny_config("llama", rope_parameters={"rope_theta": 1e4, "rope_type": "llama3", **LLAMA3}),
    "llama-yarn": tiny_config("llama", rope_parameters=YARN),
    "llama-dynamic": tiny_config("llama", rope_scaling={"type": "dynamic", "factor": 2.0}),
    "llama-longrope": tiny_config("llama", rope_parameters=LONGROPE),
    "llama-gelu": tiny_config("llama", hidden_act="gelu_pytorch_tanh", num_key_value_heads=4),
    "mistral-full": tiny_config("mistral", sliding_window=None, head_dim=12),
    "qwen2-full": tiny_config("qwen2", use_sliding_window=False, **TIED),
    "qwen3-biases": tiny_config("qwen3", head_dim=8, attention_bias=True),
    "qwen3-windows": tiny_config("qwen3", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    "qwen3_moe-every-other": tiny_config("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[], norm_topk_prob=False, **TIED),
    "qwen3_moe-windows": tiny_config("qwen3_moe", use_sliding_window=True, sliding_window=WINDOW),
    "qwen3_moe-all": tiny_config("qwen3_moe", num_experts_per_tok=6),
    "mixtral-all": tiny_config("mixtral", num_experts_per_tok=5, sliding_window=None, head_dim=12),
    "qwen3_next-every-other": tiny_config("qwen3_next", decoder_sparse_step=2, mlp_only_layers=[], norm_topk_prob=False, **TIED),
    "qwen3_next-all": tiny_config("qwen3_next", num_experts_per_tok=6, linear_num_key_heads=4, linear_conv_kernel_dim=2),
    "qwen3_5-ungrouped": tiny_config("qwen3_5", linear_num_key_heads=4, num_key_value_heads=4, linear_conv_kernel_dim=3, **TIED),
    "qwen3_5-no-attention": tiny_config("qwen3_5", layer_types=["linear_attention"] * 3),
    "qwen3_5-mrope": tiny_config(
        "qwen3_5",
        rope_parameters={
            "rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.25, "mrope_interleaved": True,
            "mrope_section": [1, 1, 0],
        },
    ),
    "qwen3_5_moe-all": tiny_config("qwen3_5_moe", num_experts_per_tok=6),
    "smollm3-windows": tiny_config("smollm3", use_sliding_window=True, sliding_window=WINDOW, **BIASES),
    "smollm3-named-layers": tiny_config("smollm3", no_rope_layers=[0, 1, 1], **UNTIED),
    "granite-biases": tiny_config("granite", **BIASES, **TIED),
    "granite-plain": tiny_config(
        "granite", embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0, num_key_value_heads=4, hidden_size=40
    ),
    "phi3-full": tiny_config("phi3", sliding_window=None, rope_parameters=None, num_key_value_heads=1, **TIED),
    "phi3-longrope": tiny_config("phi3", original_max_position_embeddings=16, rope_parameters=PARTIAL_LONGROPE),
    "phi3-head-dim": tiny_config("phi3", hidden_size=48, rope_parameters={"rope_theta": 100.0, "partial_rotary_factor": 0.75}),
    "olmo2-biases": tiny_config("olmo2", attention_bias=True, **TIED),
    "olmo2-ungrouped": tiny_config("olmo2", num_key_value_heads=4, hidden_size=24),
    "exaone4-full": tiny_config("exaone4", sliding_window=None, layer_types=["full_attention"] * 3),
    "cohere-unread": tiny_config("cohere", rms_norm_eps=0.5),  # which nobody reads
    "qwen3_5_moe-unread": tiny_config("qwen3_5_moe", norm_topk_prob=False),
    "stablelm-parallel": tiny_config("stablelm", use_parallel_residual=True, num_key_value_heads=4, **TIED),
    "phi-whole-heads": tiny_config("phi", num_key_value_heads=4, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 1.0}),
    "olmoe-all": tiny_config("olmoe", num_experts_per_tok=8, norm_topk_prob=True),
    "glm4_moe-all": tiny_config("glm4_moe", num_experts_per_tok=8, topk_group=4, use_qk_norm=False, attention_bias=False),
    "lfm2_moe-all": tiny_config("lfm2_moe", num_experts_per_tok=6, use_expert_bias=False, norm_topk_prob=False, routed_scaling_factor=0.5),
    "nemotron_h-experts": tiny_config("nemotron_h", layers_block_type=["linear_attention", "moe", "full_attention"]),
    "nemotron_h-wide-experts": tiny_config("nemotron_h", layers_block_type=["moe", "linear_attention"], moe_latent_size=None),
    "granite_hybrid-groups": tiny_config("granite_hybrid", mamba_n_groups=2),
    "gpt_oss-all": tiny_config("gpt_oss", num_experts_per_tok=5, attention_bias=False),
    "gemma2-biases": tiny_config("gemma2", attention_bias=True, head_dim=20, **UNTIED),
    "gemma2-uncapped": tiny_config("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma2-named-layers": tiny_config("gemma2", layer_types=["full_attention", "full_attention", "sliding_attention"]),
    "gemma3-capped": tiny_config("gemma3", final_logit_softcapping=5.0, attention_bias=True, **UNTIED),
    "gemma3-scaled": tiny_config("gemma3", rope_scaling={"rope_type": "linear", "factor": 8.0}, head_dim=12, sliding_window_pattern=2),
}


if "full_attention" in tiny_config("olmo3").rope_parameters:  # as of newer versions of transformers
    CONFIGS["olmo3-scaled"] = tiny_config("olmo3", rope_scaling={"rope_type": "linear", "factor": 8.0}, attention_bias=True)

if "gemma4" in FAMILIES:
    CONFIGS["gemma4_moe-all"] = tiny_config("gemma4_moe", top_k_experts=6, **UNTIED)
    CONFIGS["gemma4-keys-as-values"] = tiny_config(
        "gemma4", hidden_size_per_layer_input=0, num_kv_shared_layers=0, attention_k_eq_v=True, num_global_key_value_heads=1, **UNTIED
    )
if "muse_glimmer" in MORE:
    CONFIGS["muse_glimmer-biases"] = tiny_config("muse_glimmer", attention_bias=True, num_key_value_heads=1)


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def find(name: str) -> Pair:
        if name not in made:
            made[name] = Pair.save(CONFIGS[name], tmp_path_factory.mktemp(name))
        return made[name]

    return find


def tokens(seed: int) -> list[int]:
    return random_tokens(seed, LENGTH, VOCAB)


def test_every_family_is_held_to_transformers() -> None:
    assert {tiny_config(family).model_type for family in (*FAMILIES, *RECURRENT, *MORE)} == families.FAMILIES.keys() & {*CONFIG_MAPPING}
    assert [name for name, config in CONFIGS.items() if not supports(config)] == []


@pytest.mark.parametrize("name", slow_but(CONFIGS.keys() - {*MORE}, CONFIGS))
def test_one_prefill_and_its_hidden_states(pair_of: Callable[[str], Pair], name: str) -> None:
    pair, prompt = pair_of(name), tokens(1)
    expected = pair.expect(prompt)
    *inputs, final = expected.hidden_states  # transformers puts the final norm's output in the place of the last layer's
    output = Decoding(pair.executor).feed([prompt], hidden=(*range(len(inputs)), FINAL))
    assert_near(output.logits, expected.logits[0])
    assert torch.equal(output.argmax, expected.logits[0].argmax(-1))
    torch.testing.assert_close(output.top, expected.logits[0].amax(-1), rtol=1e-4, atol=1e-4)
    for boundary, state in enumerate(inputs):
        assert_near(output.hidden[boundary], state[0])
    assert_near(output.hidden[FINAL], final[0])


@pytest.mark.parametrize("name", slow_but(CONFIGS.keys() - {*MORE}, CONFIGS))
def test_chunks_rows_and_single_tokens(pair_of: Callable[[str], Pair], name: str) -> None:
    pair, rows = pair_of(name), [tokens(2), tokens(3), tokens(4)]
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


@pytest.mark.parametrize(
    "family, without",
    [
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": False}),
        ("smollm3", {"no_rope_layers": [1, 1, 1]}),
        ("granite", {"residual_multiplier": 1.0}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("olmoe", {"num_experts_per_tok": 3}),
        ("olmo3", {"sliding_window": 64}),
        ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
        ("ministral3", {"rope_parameters": {**YARN, "factor": 8.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.0}}),
        ("cohere2", {"layer_types": ["sliding_attention"] * 3}),
        ("arcee", {"hidden_act": "relu"}),
        ("nemotron", {"norm_eps": 1e-6}),
        ("phi3", {"rope_parameters": {"rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 1.0}}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma3", {"rope_local_base_freq": 10000.0}),
        ("glm4_moe", {"topk_group": 4}),
        ("lfm2_moe", {"use_expert_bias": False}),
    ],
)
@torch.no_grad()
def test_the_tiny_models_show_what_their_family_is_known_for(pair_of: Callable[[str], Pair], family: str, without: dict[str, Any]) -> None:
    """Else the tests above would not notice a program that lacks it."""
    model, prompt = pair_of(family).model, torch.tensor([tokens(5)])
    changed = type(model)(tiny_config(family, **without)).eval()
    changed.load_state_dict(model.state_dict(), strict="use_expert_bias" not in without)
    logits = model(prompt).logits
    assert (changed(prompt).logits - logits).abs().max() > 1e-3 * logits.abs().max()


def test_constants_that_are_one_cost_nothing() -> None:
    ops = decoder_program(CONFIGS["granite-plain"]).ops
    assert not any(isinstance(op, Scale | Softcap) for op in ops)
    assert sum(isinstance(op, Scale) for op in decoder_program(CONFIGS["granite"]).ops) == 2 * 3 + 1


def test_layers_that_do_not_rotate_have_no_table() -> None:
    attentions = [op for op in decoder_program(CONFIGS["smollm3"]).ops if isinstance(op, Attention)]
    assert [op.rope for op in attentions] == ["rope", "", "rope"]


@pytest.mark.skipif("gemma4" not in FAMILIES, reason="transformers has no Gemma 4")
def test_layers_with_sizes_of_their_own_are_found_among_more_than_ten() -> None:
    config = tiny_config("gemma4_moe", num_hidden_layers=12, layer_types=["sliding_attention", "full_attention"] * 6)
    assert [(kv.num_kv_heads, kv.k_dim) for kv in decoder_program(config).kv_layers] == [(2, 8), (1, 16)] * 6


def test_gemma_rounds_the_scale_of_its_embedding_to_the_format_it_runs_in() -> None:
    config = tiny_config("gemma2", hidden_size=3072)
    scales = {dtype: decoder_program(config, dtype=dtype).ops[0] for dtype in (torch.float32, torch.bfloat16)}
    exact, coarse = (op.scale for op in scales.values() if isinstance(op, Embed))
    assert exact == pytest.approx(3072**0.5, rel=1e-7) and coarse == 55.5


@pytest.mark.parametrize(
    "family, settings",
    [
        ("llama", {"layer_types": ["full_attention"] * 3}),
        ("llama", {"sliding_window": WINDOW}),
        ("llama", {"num_key_value_heads": 3}),
        ("mistral", {"layer_types": ["full_attention"] * 3}),
        ("mistral", {"sliding_window": 0}),
        ("qwen2", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}),
        ("smollm3", {"layer_types": ["sliding_attention"] * 3, "sliding_window": WINDOW}),
        ("smollm3", {"layer_types": ["full_attention"] * 3, "no_rope_layers": [1, 0]}),
        ("smollm3", {"rope_parameters": {"rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.5}}),
        ("granite", {"logits_scaling": 0.0}),
        ("granite", {"sliding_window": WINDOW}),
        ("phi3", {"layer_types": ["full_attention"] * 3}),
        ("olmo2", {"clip_qkv": 8.0}),
        ("olmoe", {"clip_qkv": 8.0}),
        ("cohere", {"use_qk_norm": True}),
        ("cohere2", {"layer_types": ["linear_attention"] * 3}),
        ("stablelm", {"qk_layernorm": True}),
        ("phi", {"qk_layernorm": True}),
        ("gemma", {"use_bidirectional_attention": True}),
        ("ministral", {"sliding_window": None}),
        ("ministral3", {"rope_parameters": YARN}),
        ("hunyuan", {"rope_parameters": YARN}),
        ("arcee", {"hidden_act": "tanh"}),
        ("qwen3_next", {"num_experts_per_tok": 7}),
        ("qwen3_5", {"attention_bias": True}),
        ("qwen3_5", {"linear_num_value_heads": 3}),
        ("qwen3_5", {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]}),
        ("mixtral", {"num_experts_per_tok": 6}),
        ("ernie4_5_moe", {"moe_norm_min": 1.0}),
        ("gemma2", {"use_bidirectional_attention": True}),
        ("gemma2", {"hidden_activation": "tanh"}),
        ("gemma2", {"sliding_window": None}),
        ("gemma3", {"attn_logit_softcapping": 5.0}),
        *[("muse_glimmer", {"layer_rope_theta": said}) for said in ([50.0, 0, 100.0], [100.0, 0]) if "muse_glimmer" in MORE],
        ("gemma3", {"use_bidirectional_attention": True}),
    ],
    ids=str,
)
def test_settings_that_no_program_has_are_not_supported(family: str, settings: dict[str, Any]) -> None:
    assert not supports(tiny_config(family, **settings))


def skip_unless_native(name: str) -> None:
    if (refusal := native.supports(network_program(CONFIGS[name]), Execution(torch.float32))) is not None:
        pytest.skip(refusal)


def native_logits(executor: Executor, prompt: list[int], chunks: list[int]) -> torch.Tensor:
    """Logits of all positions of a prompt that comes in chunks of these lengths, the last being the rest."""
    kv = executor.allocate(4, BLOCK_SIZE, StateRoom(2, 0))
    logits: list[torch.Tensor] = []
    start = 0
    for i, length in enumerate([*chunks, len(prompt) - sum(chunks)]):
        row = StateRow(prompt[start : start + length], start, [2, 0, 3], (i + 1) % 2 if i else -1, i % 2)
        output = executor.run(state_batch([row]), kv)
        assert output.logits is not None
        logits.append(output.logits)
        start += length
    return torch.cat(logits)


@native_only
@pytest.mark.parametrize("name", CONFIGS)
def test_the_native_executor_in_float32(pair_of: Callable[[str], Pair], name: str) -> None:
    skip_unless_native(name)
    pair, prompt = pair_of(name), tokens(4)
    executor = Pair.load(pair.folder, Execution(torch.float32))
    assert isinstance(executor, native.NativeExecutor)
    expected = pair.expect(prompt).logits[0]
    for chunks in ([], [1, 7], [LENGTH - 1]):
        actual = native_logits(executor, prompt, chunks)
        assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


@native_only
@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT])
def test_the_native_executor_in_bfloat16_says_what_transformers_says(pair_of: Callable[[str], Pair], family: str) -> None:
    """The same argmax as transformers' own bfloat16 model, but where its own rounding could have chosen; ours is no coarser."""
    skip_unless_native(family)
    pair = pair_of(f"{family}-all" if family in WITH_EXPERTS else family)  # rounding that chooses another expert changes whole rows
    executor = Pair.load(pair.folder, Execution(torch.bfloat16))
    rounded = AutoModelForCausalLM.from_pretrained(pair.folder, dtype=torch.bfloat16).eval()
    clear_ones = 0
    for seed in range(6):
        prompt = tokens(seed)
        exact = pair.expect(prompt).logits[0]
        with torch.no_grad():
            expected = rounded(torch.tensor([prompt]), use_cache=False).logits[0].float()
        actual = native_logits(executor, prompt, [3])
        best = exact.topk(2).values
        rounding, ours = (expected - exact).abs(), (actual - exact).abs()
        clear = best[:, 0] - best[:, 1] > 2 * torch.maximum(rounding, ours).amax(-1)
        assert torch.equal(actual.argmax(-1)[clear], expected.argmax(-1)[clear])
        assert ours.mean() <= 1.2 * rounding.mean() and ours.max() <= 2 * rounding.max()
        clear_ones += int(clear.sum())
    assert clear_ones > 30
