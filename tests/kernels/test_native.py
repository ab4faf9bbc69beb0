"""The native executor against the torch executor, op by op and network by network."""

import random
import time
from dataclasses import replace

import pytest
import torch
from native_only import native_only
from paged_batches import BLOCK_SIZE, Row, batch_of
from small_networks import random_weights, small_program

from foretoken.kernels import native, noise
from foretoken.kernels.chain import run_chain_by_steps
from foretoken.kernels.execution import Execution
from foretoken.kernels.layout import FINAL, Draws, KVLayerSpec
from foretoken.kernels.native import NativeExecutor
from foretoken.kernels.native_lowering import NotLowered, lower
from foretoken.kernels.ops import (
    CLAMPED,
    Activation,
    Add,
    ArgMax,
    Attention,
    Concat,
    Embed,
    Experts,
    GatherRows,
    Linear,
    LocalConv,
    Op,
    RMSNorm,
    Scale,
    Softcap,
    TopK,
)
from foretoken.kernels.program import Program, RopeTable
from foretoken.kernels.torch_executor import TorchExecutor

pytestmark = [native_only, pytest.mark.usefixtures("two_threads")]

FLOAT32 = Execution(torch.float32)
BFLOAT16 = Execution(torch.bfloat16)
SPEC = KVLayerSpec(num_kv_heads=2, k_dim=20, v_dim=12)
BEST = ArgMax(("logits",), ("argmax", "top"))
SHAPES = {
    "embed": (50, 40), "norm": (40,), "bias": (40,), "square": (40, 40), "square_bias": (40,), "head": (50, 40),
    "qkv": (6 * 20 + 2 * 20 + 2 * 12, 40), "kv": (2 * 20 + 2 * 12, 40), "q_norm": (20,), "k_norm": (20,),
    "gate": (48, 40), "up": (48, 40), "odd": (50, 40), "router": (3, 40), "down": (40, 48),
    "conv": (2, 3, 40), "one": (1, 40), "inner_bias": (3, 96), "outer_bias": (3, 40), "sinks": (6,), "down.1": (40, 48),
    "down.2": (40, 48), "correction": (6,), "scales": (3,),
}
WEIGHTS = {name: torch.randn(shape, generator=torch.Generator().manual_seed(i)) / 4 for i, (name, shape) in enumerate(SHAPES.items())}
ROPE = RopeTable((1.0, 0.5, 0.1), 1.5)
Model = tuple[Program, dict[str, torch.Tensor]]


def a_program(*middle: Op, x: str = "y", head: tuple[Op, ...] = (), **inputs: int) -> Program:
    """embed -> "x", the given ops, and buffer x as boundary 0; the logits are those of "x", or whatever head makes of "hidden"."""
    ops = (Embed((), ("x",), "embed"), *middle, GatherRows(("x",), ("rows",)))
    head = head or (Linear(("rows",), ("logits",), ("head",)),)
    return Program((*ops, *head, BEST), SHAPES, (SPEC,), {"rope": ROPE}, 50, 128, (x,), "x", "logits", BEST, inputs)


def both(program: Program, num_tokens: int, **inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Boundary 0 and logits, native and torch, for some rows."""
    rng = random.Random(num_tokens)
    lengths = [num_tokens - num_tokens // 3, num_tokens // 3]
    rows = [
        Row([rng.randrange(50) for _ in range(length)], 0, list(range(8 * i, 8 * i + 8))) for i, length in enumerate(lengths) if length
    ]
    results = []
    for executor in (NativeExecutor(program, WEIGHTS, FLOAT32), TorchExecutor(program, WEIGHTS, torch.float32)):
        output = executor.run(batch_of(rows), executor.allocate(16, BLOCK_SIZE), (0,), inputs)
        assert output.logits is not None
        assert torch.equal(output.argmax, output.logits.argmax(-1))
        results += [output.hidden[0], output.logits]
    return results[0], results[2], results[1], results[3]


EXPERTS = ("gate", "up", "gate"), ("up", "gate", "gate"), ("down", "down", "down")
MORE_EXPERTS = 2 * EXPERTS[0], 2 * EXPERTS[1], 2 * EXPERTS[2]
OPS: dict[str, tuple[Op, ...]] = {
    "embed": (Embed((), ("y",), "embed", scale=2.5),),
    "norm": (RMSNorm(("x",), ("y",), "norm", 0.1, "bias", add_one=True),),
    "norm in groups": (RMSNorm(("x",), ("y",), "norm", 0.1, "bias", groups=4),),
    "norm without weight": (RMSNorm(("x",), ("y",), "", 0.1),),
    "layer norm": (RMSNorm(("x",), ("y",), "norm", 0.1, "bias", centred=True),),
    "product of a layer norm": (RMSNorm(("x",), ("n",), "", 0.1, centred=True), Linear(("n",), ("y",), ("square",))),
    "linear": (Linear(("x",), ("y",), ("square", "odd"), ("square_bias", "")),),
    "residual": (RMSNorm(("x",), ("n",), "norm", 0.1), Linear(("n", "x"), ("y",), ("square",))),
    "norm for two": (RMSNorm(("x",), ("n",), "norm", 0.1), Linear(("n",), ("a",), ("square",)), Linear(("n", "a"), ("y",), ("square",))),
    "gated": (Linear(("x",), ("g",), ("gate", "up")), Activation(("g",), ("y",), "silu", gated=True)),
    "gated, two buffers": (
        Linear(("x",), ("g",), ("gate",)),
        Linear(("x",), ("u",), ("up",)),
        Activation(("g", "u"), ("y",), "gelu_tanh", gated=True),
    ),
    "one gate for all columns": (Linear(("x",), ("g",), ("one",)), Activation(("g", "x"), ("y",), "sigmoid", gated=True)),
    "gated by what is computed row by row": (
        Scale(("x",), ("g",), 2.0),
        Activation(("g", "x"), ("a",), "sigmoid", gated=True),
        Linear(("a",), ("y",), ("square",)),
    ),
    "gated, odd width": (Linear(("x",), ("g",), ("odd",)), Activation(("g",), ("y",), "gelu", gated=True)),
    "activation": (Linear(("x",), ("g",), ("odd",)), Activation(("g",), ("y",), "relu2", gated=False)),
    "scale and cap": (Linear(("x",), ("g",), ("odd",)), Scale(("g",), ("s",), 3.0), Softcap(("s",), ("y",), 2.0)),
    "cap, then scale": (Linear(("x",), ("g",), ("odd",)), Softcap(("g",), ("s",), 2.0), Scale(("s",), ("y",), 3.0)),
    "row-local run": (
        Scale(("x",), ("a",), 2.0), Add(("a", "x"), ("b",)), Concat(("b", "a"), ("c",)), Softcap(("c",), ("d",), 1.5),
        Activation(("d",), ("y",), "silu", gated=True),
    ),
    "runs side by side": (Linear(("x",), ("g",), ("gate",)), Concat(("g", "x", "g"), ("y",), groups=8)),
    "experts": (Linear(("x",), ("r",), ("router",)), Experts(("x", "r"), ("y",), *EXPERTS, "silu", 2, renormalise=False)),
    "experts, renormalised": (Linear(("x",), ("r",), ("router",)), Experts(("x", "r"), ("y",), *EXPERTS, "gelu", 2, renormalise=True)),
    "experts with biases, clamped": (
        Linear(("x",), ("r",), ("router",)),
        Scale(("x",), ("z",), 9.0),
        Experts(("z", "r"), ("y",), *EXPERTS[:2], ("down", "down.1", "down.2"), CLAMPED, 2, True, ("inner_bias", "outer_bias")),
    ),
    "clamped": (Linear(("x",), ("g",), ("gate", "up")), Scale(("g",), ("s",), 9.0), Activation(("s",), ("y",), CLAMPED, gated=True)),
    "experts, all alike": (
        Linear(("x",), ("r",), ("router",)),
        Scale(("r",), ("z",), 0.0),
        Experts(("x", "z"), ("y",), *EXPERTS, "silu", 1, renormalise=False),
    ),
    "experts by sigmoids, some equal": (
        Linear(("x",), ("r",), ("router", "router")),
        Experts(("x", "r"), ("y",), *MORE_EXPERTS, "silu", 3, renormalise=False, score="sigmoid", scale=2.5),
    ),
    "experts in groups": (
        Linear(("x",), ("r",), ("router", "router")),
        Experts(("x", "r"), ("y",), *MORE_EXPERTS, "silu", 3, True, score="sigmoid", correction="correction", num_groups=3, top_groups=2),
    ),
    "experts by corrected chances": (
        Linear(("x",), ("r",), ("router", "router")),
        Experts(("x", "r"), ("y",), *MORE_EXPERTS, "silu", 3, True, correction="correction", scale=0.5),
    ),
    "experts of which each has a scale": (
        Linear(("x",), ("r",), ("router",)),
        Experts(("x", "r"), ("y",), *EXPERTS, "gelu_tanh", 2, True, scale=0.5, scales="scales"),
    ),
    "local convs": (
        Linear(("x",), ("k",), ("gate",)), LocalConv(("x", "k"), ("a",), "conv", 0), LocalConv(("a", "k"), ("b",), "conv", 1),
        Linear(("b",), ("c",), ("square",)), LocalConv(("c", "k"), ("d",), "conv", 1), Add(("d", "x"), ("y",)),
    ),
    "top-k": (Linear(("x",), ("g",), ("odd",)), TopK(("g",), ("columns", "y"), k=5)),
    "attention": (
        Linear(("x",), ("qkv",), ("qkv",)),
        Attention(("qkv",), ("y",), 0, 6, 0.3, "rope", 5.0, "q_norm", "k_norm", 0.01, norm_add_one=True),
    ),
    "attention with sinks": (Linear(("x",), ("qkv",), ("qkv",)), Attention(("qkv",), ("y",), 0, 6, 0.3, "rope", sinks="sinks")),
}


@pytest.mark.parametrize("num_tokens", [1, 7, 40, 100])
@pytest.mark.parametrize("name", OPS)
def test_ops_are_those_of_the_torch_executor(name: str, num_tokens: int) -> None:
    actual, expected, logits, expected_logits = both(a_program(*OPS[name]), num_tokens)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_local_conv_gives_the_same_bits_beside_any_rows(threads: int) -> None:
    executor = NativeExecutor(a_program(*OPS["local convs"]), WEIGHTS, BFLOAT16)
    rows = [Row([random.Random(i).randrange(50) for _ in range(length)], 0, [i]) for i, length in enumerate((1, 9, 2, 16, 5, 7))]
    native.set_threads(1)
    alone = [executor.run(batch_of([row]), executor.allocate(8, BLOCK_SIZE), (0,)).hidden[0] for row in rows]
    native.set_threads(threads)
    together = executor.run(batch_of(rows), executor.allocate(8, BLOCK_SIZE), (0,)).hidden[0]
    assert torch.equal(together, torch.cat(alone))


def test_attention_over_separate_buffers_with_norms_between() -> None:
    ops = (
        Linear(("x",), ("q",), ("square",)), Linear(("x",), ("k",), ("square",)), RMSNorm(("k",), ("kn",), "norm", 0.1),
        Linear(("x",), ("v",), ("odd",)), Linear(("v",), ("vv",), ("wide_v",)), Attention(("q", "kn", "vv"), ("y",), 0, 2, 0.3),
    )
    program = a_program(*ops)
    program = replace(program, weights={**SHAPES, "wide_v": (24, 50)})
    weights = {**WEIGHTS, "wide_v": torch.randn(24, 50, generator=torch.Generator().manual_seed(9)) / 4}
    batch = batch_of([Row(list(range(20)), 0, [1, 2])])
    outputs = []
    for executor in (NativeExecutor(program, weights, FLOAT32), TorchExecutor(program, weights, torch.float32)):
        outputs.append(executor.run(batch, executor.allocate(4, BLOCK_SIZE), (0,)).hidden[0])
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", ["scaled", "capped"])
def test_heads_with_something_behind_them(head: str) -> None:
    behind: Op = Scale(("raw",), ("logits",), 0.25) if head == "scaled" else Softcap(("raw",), ("logits",), 1.5)
    program = a_program(x="x", head=(Linear(("rows",), ("raw",), ("head",)), behind))
    _, _, logits, expected = both(program, 9)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_lowered_says_so() -> None:
    twice = (Linear(("rows",), ("logits",), ("head",)), TopK(("logits",), ("columns", "values"), k=2))
    with pytest.raises(NotLowered, match="more than the final argmax"):
        lower(a_program(x="x", head=twice))
    assert "more than the final argmax" in str(native.supports(a_program(x="x", head=twice), FLOAT32))
    router = Linear(("x",), ("r",), ("router",))
    experts = [Experts((x, "r"), (y,), *EXPERTS, "silu", top, renormalise=True) for x, y, top in (("x", "a", 1), ("a", "y", 2))]
    assert "different numbers of experts" in str(native.supports(a_program(router, *experts), FLOAT32))
    narrow = Experts(("x", "r"), ("y",), ("odd",) * 3, ("odd",) * 3, ("wide",) * 3, "silu", 1, renormalise=True)
    assert "no multiple of 16" in str(native.supports(replace(a_program(router, narrow), weights=SHAPES | {"wide": (40, 50)}), FLOAT32))
    wide = a_program(Linear(("x",), ("y",), ("endless",)))
    assert "at most 131,072 inputs, not 131,073" in str(native.supports(replace(wide, weights=SHAPES | {"endless": (16, 131073)}), FLOAT32))
    assert native.supports(a_program(x="x"), FLOAT32) is None


def a_model(family: str = "llama", tied: bool = True) -> Model:
    program = small_program(
        family, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_key_value_heads=2, vocab_size=300,
        max_position_embeddings=512, tie_word_embeddings=tied,
    )
    weights = random_weights(program)
    return program, {name: weight / 1.5 if weight.dim() > 1 else weight for name, weight in weights.items()}


@pytest.fixture(scope="module", params=["llama", "mixtral", "gpt_oss"])
def model(request: pytest.FixtureRequest) -> Model:
    return a_model(request.param)


def test_hidden_states_of_all_tokens(model: Model) -> None:
    batch = batch_of([Row(list(range(30)), 0, [0, 1]), Row([5], 0, [2])])
    batch = replace(batch, logits_indices=torch.tensor([29, 30]), full_logits=torch.tensor([1]))
    wanted = (0, 1, 2, 3, FINAL)
    outputs = []
    for executor in (NativeExecutor(*model, FLOAT32), TorchExecutor(*model, torch.float32)):
        outputs.append(executor.run(batch, executor.allocate(4, BLOCK_SIZE), wanted))
    native_output, expected = outputs
    for boundary in wanted:
        torch.testing.assert_close(native_output.hidden[boundary], expected.hidden[boundary], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(native_output.logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(native_output.argmax, expected.argmax)


@pytest.mark.parametrize("execution", [FLOAT32, BFLOAT16, Execution(torch.bfloat16, quantization="int8")], ids=["f32", "bf16", "int8"])
def test_a_chain_in_one_call_is_a_chain_by_steps(model: Model, execution: Execution) -> None:
    executor = NativeExecutor(*model, execution)
    batch = batch_of([Row(list(range(20)), 0, [0, 1, 2]), Row([5, 6], 0, [3, 4]), Row([7], 0, [5]), Row([8, 9, 10], 0, [6, 7])])
    batch = replace(batch, logits_indices=torch.tensor([19, 21, 25]))  # the third row only ingests
    counts = torch.tensor([5, 1, 4])
    kv, other = executor.allocate(8, BLOCK_SIZE), executor.allocate(8, BLOCK_SIZE)
    chain = executor.run_chain(batch, kv, counts)
    expected = run_chain_by_steps(executor, batch, other, counts)
    for n, count in enumerate(counts.tolist()):
        assert torch.equal(chain.token_ids[n, :count], expected.token_ids[n, :count])
        torch.testing.assert_close(chain.confidence[n, :count], expected.confidence[n, :count], rtol=1e-4, atol=1e-6)
    written = torch.cat((torch.arange(24), torch.arange(48, 50), torch.arange(80, 81), torch.arange(96, 102)))
    for layer in range(3):
        for ours, theirs in zip(kv.gather(layer, written), other.gather(layer, written), strict=True):
            assert torch.equal(ours, theirs)


def test_chains_drawn_by_chance_are_those_drawn_by_steps(model: Model) -> None:
    executor = NativeExecutor(*model, BFLOAT16)
    batch = batch_of([Row([1, 2, 3], 0, [0, 1]), Row([5, 6], 0, [3, 4]), Row([7], 0, [5]), Row([9, 9], 0, [6])])
    batch = replace(batch, logits_indices=torch.tensor([2, 4, 5, 7]))
    streams = torch.tensor([noise.stream(seed, 0) for seed in range(4)])
    counts = torch.tensor([6, 2, 5, 1])
    draws = Draws(torch.tensor([1.0, 0.0, 0.5, 2.0]), streams, torch.tensor([3, 2, 1, 2]), vocab_size=290, keep_logits=True)
    chain = executor.run_chain(batch, executor.allocate(8, BLOCK_SIZE), counts, draws)
    expected = run_chain_by_steps(executor, batch, executor.allocate(8, BLOCK_SIZE), counts, draws)
    assert chain.logits is not None and expected.logits is not None
    for n, count in enumerate(counts.tolist()):
        assert torch.equal(chain.token_ids[n, :count], expected.token_ids[n, :count])
        assert torch.equal(chain.logits[n, :count], expected.logits[n, :count])
        torch.testing.assert_close(chain.confidence[n, :count], expected.confidence[n, :count], rtol=1e-4, atol=1e-6)
    greedy = executor.run_chain(batch, executor.allocate(8, BLOCK_SIZE), counts)
    assert greedy.logits is None and not torch.equal(greedy.token_ids[0], chain.token_ids[0])


def test_bfloat16_is_near_float32() -> None:
    model = a_model()  # without experts: where rounding chooses another one, more changes
    batch = batch_of([Row(list(range(100)), 0, list(range(7)))])
    exact, rounded = (NativeExecutor(*model, execution) for execution in (FLOAT32, BFLOAT16))
    expected = exact.run(batch, exact.allocate(8, BLOCK_SIZE)).logits
    actual = rounded.run(batch, rounded.allocate(8, BLOCK_SIZE)).logits
    assert expected is not None and actual is not None
    assert (actual - expected).abs().max() < 0.03 * expected.abs().max()
    top = expected.topk(2).values
    clear = top[:, 0] - top[:, 1] > 0.1 * expected.std()
    assert torch.equal(actual.argmax(-1)[clear], expected.argmax(-1)[clear])


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_rows_that_are_not_finite_say_so_and_harm_nobody(family: str) -> None:
    program, weights = a_model(family, tied=False)
    weights["model.embed_tokens.weight"][7] = torch.nan
    executor = NativeExecutor(program, weights, BFLOAT16)
    healthy = batch_of([Row([1, 2, 3], 0, [0])])
    expected = executor.run(healthy, executor.allocate(4, BLOCK_SIZE))
    assert expected.top.isfinite().all()
    kv = executor.allocate(4, BLOCK_SIZE)
    output = executor.run(batch_of([Row([7] * 16, 0, [0]), Row([1, 2, 3], 0, [1])]), kv)
    assert not output.top[:16].isfinite().any()
    assert torch.equal(output.top[16:], expected.top)
    again = executor.run(healthy, kv)  # in the block that still holds the poison
    assert torch.equal(again.top, expected.top)


def test_empty_passes_are_legal(model: Model) -> None:
    executor = NativeExecutor(*model, BFLOAT16)
    kv = executor.allocate(4, BLOCK_SIZE)
    batch = replace(batch_of([Row([1, 2], 0, [0]), Row([], 0, [1])]), logits_indices=torch.tensor([], dtype=torch.int64))
    batch = replace(batch, full_logits=torch.tensor([], dtype=torch.int64))
    output = executor.run(batch, kv)
    assert output.argmax.shape == (0,) and output.logits is None
    assert executor.run_chain(batch, kv, torch.tensor([], dtype=torch.int64)).token_ids.shape == (0, 0)


def test_the_cache_has_blocks_of_16(model: Model) -> None:
    with pytest.raises(ValueError, match="use block_size 16"):
        NativeExecutor(*model, BFLOAT16).allocate(4, 8)


def test_idle_threads_sleep(model: Model) -> None:
    executor = NativeExecutor(*model, BFLOAT16)
    kv = executor.allocate(4, BLOCK_SIZE)
    executor.run(batch_of([Row([1], 0, [0])]), kv)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05  # of the half second: one that spins takes all of it
