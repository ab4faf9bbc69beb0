"""What runs a network and in which formats, with and without a native executor; what is refused, and in which words."""

import re
from typing import Any

import pytest
import torch
import transformers

from foretoken.engine import network_plan
from foretoken.engine.config import ModelConfig
from foretoken.engine.errors import ConfigError, ModelLoadError
from foretoken.engine.network_plan import NetworkPlan, plan_network, resolve_dtype
from foretoken.kernels import native
from foretoken.kernels.native_library import Availability
from foretoken.kernels.quantised_checkpoint import Quantisation

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA, NEOX = transformers.LlamaConfig(**SIZES), transformers.GPTNeoXConfig(**SIZES)
MISSING = "no compiler was found at install; install g++"


@pytest.fixture
def isa(monkeypatch: pytest.MonkeyPatch) -> Any:
    """isa("avx512"): the machine can; isa(None): it cannot."""

    def pretend(name: str | None) -> None:
        monkeypatch.setattr(native, "availability", lambda: Availability(name, "" if name else MISSING))
        monkeypatch.setattr(native, "supports", lambda program, execution: None if name else MISSING)
        monkeypatch.setattr(native, "threads", lambda: 2)

    return pretend


def plan(config: transformers.PretrainedConfig = LLAMA, preferred: Any = None, **settings: Any) -> NetworkPlan:
    return plan_network(ModelConfig("M", **settings), config, preferred)


@pytest.mark.parametrize(
    ("name", "settings", "line"),
    [
        ("avx512_bf16", {}, "native avx512_bf16, bfloat16, 2 threads"),
        ("amx", {"quantization": "int8"}, "native amx, int8 weights, bfloat16, 2 threads"),
        ("avx2", {}, "native avx2, bfloat16, 2 threads"),
        ("avx512", {"dtype": "float32"}, "native avx512, float32, 2 threads"),
        ("amx", {"executor": "native", "kv_cache_dtype": "int8"}, "native amx, bfloat16, int8 cache, 2 threads"),
        ("amx", {"executor": "torch"}, "torch float32 (not native: executor torch was chosen)"),
        ("amx", {"executor": "transformers", "dtype": "bfloat16"}, "transformers bfloat16 (not native: executor transformers was chosen)"),
        (None, {}, f"torch float32 (not native: {MISSING})"),
        (None, {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}, f"torch bfloat16 (not native: {MISSING})"),
    ],
)
def test_what_runs_and_why(isa: Any, name: str | None, settings: dict[str, Any], line: str) -> None:
    isa(name)
    found = plan(**settings)
    assert found.describe() == line
    assert found.execution.prefer_native == (found.kind == "native") and (found.program is None) == (found.kind == "transformers")


def test_models_without_a_program_run_in_transformers(isa: Any) -> None:
    isa("amx")
    assert plan(NEOX).describe() == "transformers float32 (not native: a 'gpt_neox' model is not available as a program)"
    for executor in ("native", "torch"):
        with pytest.raises(ModelLoadError, match="'gpt_neox' model is not available as a program; use executor auto or transformers"):
            plan(NEOX, executor=executor)


def test_a_preferred_quantization_holds_natively_and_where_nothing_else_is_said(isa: Any) -> None:
    isa("amx")
    assert plan(preferred="int8").execution.quantization == "int8"
    assert plan(preferred="int8", quantization="int4").execution.quantization == "int4"
    assert plan(NEOX, preferred="int8").execution.quantization is None
    isa(None)
    assert plan(preferred="int8").execution.quantization is None


def test_weights_of_a_quantised_checkpoint_become_about_as_narrow(isa: Any) -> None:
    isa("amx")

    def line(method: str, bits: int, **settings: Any) -> str:
        return plan_network(ModelConfig("M", **settings), LLAMA, None, Quantisation(method, bits)).describe()

    assert line("fp8", 8) == "native amx, int8 weights (stored as fp8), bfloat16, 2 threads"
    assert line("awq", 4) == line("awq", 4, quantization="awq_marlin") == "native amx, int4 weights (stored as awq), bfloat16, 2 threads"
    assert line("awq", 4, quantization="none") == "native amx, weights (stored as awq), bfloat16, 2 threads"
    assert line("gptq", 4, quantization="int8") == "native amx, int8 weights (stored as gptq), bfloat16, 2 threads"
    assert plan_network(ModelConfig("M"), LLAMA, "int8", Quantisation("awq", 4)).execution.quantization == "int4"
    with pytest.raises(ConfigError, match="quantization gptq: the weights of M are stored as awq; leave quantization away"):
        line("awq", 4, quantization="gptq")
    with pytest.raises(ConfigError, match="the weights of M are not quantised"):
        plan(quantization="awq")
    isa(None)
    assert line("fp8", 8) == f"torch weights (stored as fp8), float32 (not native: {MISSING})"


def test_weights_of_a_quantised_checkpoint_on_a_gpu(one_gpu: None, isa: Any) -> None:
    found = [
        plan_network(ModelConfig("M", batch_invariant=invariant), LLAMA, None, Quantisation("m", bits)).execution.quantization
        for bits, invariant in ((8, False), (8, True), (4, True))
    ]
    assert found == ["fp8", None, "int4"]


@pytest.mark.parametrize("option", [{"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}])
def test_narrow_formats_are_never_dropped_silently(isa: Any, option: dict[str, Any]) -> None:
    isa(None)
    ((name, value),) = option.items()
    with pytest.raises(ConfigError, match=f"^{name} {value} needs the native executor, which cannot be used: {re.escape(MISSING)}; or"):
        plan(**option)
    isa("amx")
    with pytest.raises(ConfigError, match=f"{name} {value} needs the native executor.*executor torch was chosen"):
        plan(**option, executor="torch")


def test_native_where_it_is_impossible(isa: Any) -> None:
    isa(None)
    with pytest.raises(ConfigError, match="executor native cannot be used: no compiler was found at install; install g"):
        plan(executor="native")


def test_the_cache_has_the_networks_format(isa: Any) -> None:
    isa("amx")
    assert plan(kv_cache_dtype="bfloat16").execution.kv_cache is None
    with pytest.raises(ConfigError, match="kv_cache_dtype float32 differs from dtype bfloat16.*or dtype float32"):
        plan(kv_cache_dtype="float32")


def test_dtypes() -> None:
    assert resolve_dtype("auto") is None and resolve_dtype("float32") == resolve_dtype("float") == torch.float32
    with pytest.raises(ConfigError, match="use bfloat16"):
        resolve_dtype("half")
    with pytest.raises(ConfigError, match="'int4' is not one of auto, float32, bfloat16"):
        resolve_dtype("int4")


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if PyTorch found a GPU. Only what is planned is looked at: nothing is put on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(network_plan.importlib.util, "find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, "Triton and CUDA graphs, bfloat16, NVIDIA H200"),
        ({"device": "cuda", "dtype": "float32"}, "Triton and CUDA graphs, float32, NVIDIA H200"),
        ({"executor": "torch", "batch_invariant": True}, "Triton and CUDA graphs, bfloat16, batch invariant, NVIDIA H200"),
        ({"quantization": "fp8"}, "Triton and CUDA graphs, fp8 weights, bfloat16, NVIDIA H200"),
        ({"quantization": "int4"}, "Triton and CUDA graphs, int4 weights, bfloat16, NVIDIA H200"),
        ({"kv_cache_dtype": "fp8"}, "Triton and CUDA graphs, bfloat16, fp8 cache, NVIDIA H200"),
        (
            {"kv_cache_dtype": "fp8_e4m3", "quantization": "int4", "batch_invariant": True},
            "Triton and CUDA graphs, int4 weights, bfloat16, fp8 cache, batch invariant, NVIDIA H200",
        ),
        (
            {"device": "cuda", "quantization": "int4", "batch_invariant": True},
            "Triton and CUDA graphs, int4 weights, bfloat16, batch invariant, NVIDIA H200",
        ),
        ({"device": "cpu", "quantization": "int4"}, "native amx, int4 weights, bfloat16, 2 threads"),
        ({"executor": "native", "quantization": "int4"}, "native amx, int4 weights, bfloat16, 2 threads"),
        ({"device": "cpu"}, "native amx, bfloat16, 2 threads"),
        ({"quantization": "int8"}, "native amx, int8 weights, bfloat16, 2 threads"),  # only a CPU has it
        ({"executor": "native"}, "native amx, bfloat16, 2 threads"),
    ],
)
def test_a_gpu_is_used_where_it_can_be(isa: Any, one_gpu: None, settings: dict[str, Any], line: str) -> None:
    isa("amx")
    assert plan(**settings).describe() == line


def test_models_without_a_program_stay_on_the_cpu(isa: Any, one_gpu: None) -> None:
    isa("amx")
    assert plan(NEOX).kind == "transformers" and not plan(NEOX).execution.on_gpu


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"device": "cuda:1"}, "device cuda:1 cannot be used: GPUs here are cuda:0 to cuda:0"),
        ({"device": "cuda", "executor": "native"}, "executor native was chosen, which runs on CPUs only"),
        ({"device": "cuda", "quantization": "int8"}, "quantization int8 needs the native executor, .* the network runs on a GPU"),
        ({"device": "cuda", "kv_cache_dtype": "int8"}, "kv_cache_dtype int8 needs the native executor"),
        ({"kv_cache_dtype": "float32"}, "the network's own format or fp8; use kv_cache_dtype auto or fp8, or dtype float32"),
        ({"quantization": "fp8", "batch_invariant": True}, "cannot be combined"),
    ],
)
def test_what_a_gpu_has_not_is_refused(isa: Any, one_gpu: None, settings: dict[str, Any], said: str) -> None:
    isa("amx")
    with pytest.raises(ConfigError, match=said):
        plan(**settings)


def test_fp8_needs_a_gpu_that_multiplies_it(isa: Any, one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    isa("amx")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match="NVIDIA H200 does not multiply 8-bit floats; leave quantization away"):
        plan(quantization="fp8")
    with pytest.raises(ConfigError, match="^kv_cache_dtype fp8_e4m3 cannot be used: .*; leave kv_cache_dtype away"):
        plan(kv_cache_dtype="fp8_e4m3")


def test_gpus_that_the_kernels_are_not_for_are_left_alone(isa: Any, one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turing's programs have 64 KiB and no bfloat16: kernels would not start."""
    isa("amx")
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert plan().kind == "native"
        with pytest.raises(ConfigError, match=r"device cuda cannot be used: .* is older than Ampere .*; use device cpu"):
            plan(device="cuda")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert plan().kind == "native"
    with pytest.raises(ConfigError, match="the kernels are for NVIDIA's; use device cpu"):
        plan(device="cuda")


def test_without_a_gpu_one_is_refused(isa: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    isa("amx")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert plan().kind == "native"
    with pytest.raises(ConfigError, match=r"device cuda cannot be used: PyTorch finds no GPU, only 1 CPU .*; use device cpu"):
        plan(device="cuda")
    with pytest.raises(ConfigError, match="quantization fp8 needs a GPU"):
        plan(quantization="fp8")
    for executor in ("auto", "torch"):
        with pytest.raises(ConfigError, match="^kv_cache_dtype fp8 needs a GPU, and .* the CPU, whose narrow cache is int8: use int8, or"):
            plan(kv_cache_dtype="fp8", executor=executor)
