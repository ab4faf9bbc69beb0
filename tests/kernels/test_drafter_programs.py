"""Small drafters as programs on every executor, against plain formulas: passes and chains, blocks of 64, networks without a cache."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from native_only import native_only
from paged_batches import BLOCK_SIZE, Row, batch_of
from plain_networks import attended, turned
from torch import Tensor

from foretoken.kernels import noise
from foretoken.kernels.chain import run_chain_by_steps
from foretoken.kernels.execution import Execution
from foretoken.kernels.fuse import fuse
from foretoken.kernels.layout import ChainOutput, Draws, Executor, KVLayerSpec, RaggedBatch
from foretoken.kernels.native import NativeExecutor
from foretoken.kernels.ops import Activation, Add, ArgMax, Attention, Concat, Embed, GatherRows, Linear, Op, RMSNorm
from foretoken.kernels.program import Program, RopeTable
from foretoken.kernels.torch_executor import TorchExecutor

pytestmark = pytest.mark.usefixtures("two_threads")
H, VOCAB, DRAFT_VOCAB, HEADS, KV_HEADS, DIM = 32, 97, 41, 4, 2, 8
EPS = 1e-3
INV_FREQ = (1.0, 0.3, 0.1, 0.03)
SPEC = KVLayerSpec(KV_HEADS, DIM, DIM)
BEST = ArgMax(("logits",), ("argmax", "top"))
SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (VOCAB, H), "e_norm": (H,), "f_norm": (H,),
    "q": (HEADS * DIM, 2 * H), "k": (KV_HEADS * DIM, 2 * H), "v": (KV_HEADS * DIM, 2 * H), "o": (H, HEADS * DIM), "m_norm": (H,),
    "gate": (48, H), "up": (48, H), "down": (H, 48), "out_norm": (H,), "head": (DRAFT_VOCAB, H),
    "d2t": (DRAFT_VOCAB,), "square": (H, H), "square_bias": (H,), "whole_head": (VOCAB, H), "kv": (2 * KV_HEADS * DIM, H),
    "block_qkv": ((HEADS + 2 * KV_HEADS) * DIM, H),
}


def weights_of(program: Program, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in program.weights.items()}
    for name, weight in weights.items():
        if len(program.weights[name]) == 1:
            weight.add_(1.0)
    if "d2t" in weights:
        weights["d2t"] = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    return weights


def a_program(*ops: Op, kv_layers: tuple[KVLayerSpec, ...] = (), **fields: object) -> Program:
    named = {name for op in ops for name in _weights(op)} | ({"d2t"} if fields.get("token_map") else set())
    defaults: dict[str, object] = {"boundaries": (), "final": "", "logits": "logits", "best": BEST, "vocab_size": VOCAB}
    defaults |= {"weights": {name: SHAPES[name] for name in SHAPES if name in named}, "ropes": {"rope": RopeTable(INV_FREQ)}}
    ops = (*ops, BEST) if fields.get("logits", "logits") else ops
    return fuse(Program(ops=ops, kv_layers=kv_layers, max_model_len=512, **(defaults | fields)))  # type: ignore[arg-type]


def _weights(op: Op) -> tuple[str, ...]:
    match op:
        case Linear():
            return (*op.weights, *filter(None, op.biases))
        case Embed():
            return (op.weight,)
        case RMSNorm():
            return tuple(filter(None, (op.weight, op.bias)))
        case _:
            return ()


EAGLE = a_program(
    Embed((), ("e",), "embed"),
    RMSNorm(("e",), ("en",), "e_norm", EPS),
    RMSNorm(("feature",), ("fn",), "f_norm", EPS),
    Concat(("en", "fn"), ("both",)),
    Linear(("both",), ("q",), ("q",)),
    Linear(("both",), ("k",), ("k",)),
    Linear(("both",), ("v",), ("v",)),
    Attention(("q", "k", "v"), ("attended",), 0, HEADS, DIM**-0.5, "rope"),
    Linear(("attended",), ("o",), ("o",)),
    Add(("o", "feature"), ("h",)),
    RMSNorm(("h",), ("hn",), "m_norm", EPS),
    Linear(("hn",), ("gate",), ("gate",)),
    Linear(("hn",), ("up",), ("up",)),
    Activation(("gate", "up"), ("act",), "silu", gated=True),
    Linear(("act",), ("down",), ("down",)),
    Add(("down", "h"), ("out",)),
    GatherRows(("out",), ("rows",)),
    RMSNorm(("rows",), ("final",), "out_norm", EPS),
    Linear(("final",), ("logits",), ("head",)),
    kv_layers=(SPEC,), boundaries=("feature", "out"), vocab_size=DRAFT_VOCAB, inputs={"feature": H}, recurrent=("feature", 1),
    token_map="d2t",
)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def eagle_by_hand(w: dict[str, Tensor], tokens: Tensor, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(out [n, H], logits [n, V]) of a whole sequence, every token seeing itself and those before it."""

    def heads(name: str, count: int) -> Tensor:
        return (both @ w[name].T).view(-1, count, DIM)

    both = torch.cat((norm(w["embed"][tokens], w["e_norm"]), norm(features, w["f_norm"])), -1)
    angles, unseen = positions[:, None] * torch.tensor(INV_FREQ), torch.ones(len(tokens), len(tokens)).triu(1).bool()
    q, k, v = turned(heads("q", HEADS), angles), turned(heads("k", KV_HEADS), angles), heads("v", KV_HEADS)
    h = attended(q, k, v, DIM**-0.5, unseen) @ w["o"].T + features
    hn = norm(h, w["m_norm"])
    out = (torch.nn.functional.silu(hn @ w["gate"].T) * (hn @ w["up"].T)) @ w["down"].T + h
    return out, norm(out, w["out_norm"]) @ w["head"].T


Make = Callable[[Program, dict[str, Tensor]], Executor]


def on_torch(program: Program, weights: dict[str, Tensor]) -> Executor:
    return TorchExecutor(program, weights, torch.float32)


def natively(program: Program, weights: dict[str, Tensor]) -> Executor:
    return NativeExecutor(program, weights, Execution(torch.float32))


EXECUTORS = [pytest.param(on_torch, id="torch"), pytest.param(natively, id="native", marks=native_only)]
on_both = pytest.mark.parametrize("make", EXECUTORS)
LENGTHS = (9, 2, 21)  # entries of each row: positions 1 .. n


def shifted(rows: list[Row], only_last: bool = True) -> RaggedBatch:
    """The batch of rows whose place 0 has no entry."""
    batch = replace(batch_of(rows), first_places=torch.ones(len(rows), dtype=torch.int32))
    return replace(batch, logits_indices=batch.query_start_loc[1:].long() - 1, full_logits=torch.arange(0)) if only_last else batch


def texts(seed: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return (
        [torch.randint(VOCAB, (n,), generator=generator) for n in LENGTHS],
        [torch.randn(n, H, generator=generator) for n in LENGTHS],
    )


def poison(executor: Executor, kv: object, blocks: list[int]) -> None:
    """Place 0 of each row holds NaN: whoever looks there shows it."""
    for layer, spec in enumerate(executor.kv_layers):
        slots = torch.tensor(blocks) * BLOCK_SIZE
        nan = torch.full((len(blocks), spec.num_kv_heads, spec.k_dim), torch.nan)
        kv.write(layer, slots, nan, nan)  # type: ignore[attr-defined]


@on_both
def test_features_come_in_and_leading_places_stay_unseen(make: Make) -> None:
    weights = weights_of(EAGLE)
    executor = make(EAGLE, weights)
    tokens, features = texts()
    kv = executor.allocate(16, BLOCK_SIZE)
    poison(executor, kv, [0, 4, 8])
    # two passes: the first four tokens of each, then the rest
    outs: list[list[Tensor]] = [[], [], []]
    logits: list[list[Tensor]] = [[], [], []]
    for start, stop in ((0, 4), (4, 99)):
        batch = shifted([Row(t[start:stop].tolist(), 1 + min(start, len(t)), [4 * r, 4 * r + 1]) for r, t in enumerate(tokens)], False)
        given = torch.cat([f[start:stop] for f in features])
        output = executor.run(batch, kv, (0, 1), {"feature": given})
        torch.testing.assert_close(output.hidden[0], given)
        assert output.logits is not None
        best = weights["d2t"][output.logits.argmax(-1)]
        assert torch.equal(output.argmax, best)
        for r, (first, end) in enumerate(zip(batch.query_start_loc.tolist(), batch.query_start_loc[1:].tolist(), strict=False)):
            outs[r].append(output.hidden[1][first:end])
            logits[r].append(output.logits[first:end])
    for r, (text, feature) in enumerate(zip(tokens, features, strict=True)):
        out, scores = eagle_by_hand(weights, text, feature, torch.arange(1, len(text) + 1))
        torch.testing.assert_close(torch.cat(outs[r]), out, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(torch.cat(logits[r]), scores, rtol=1e-3, atol=1e-4)


def run_eagle(executor: Executor, draws: Draws | None, by_steps: bool = False) -> ChainOutput:
    tokens, features = texts()
    kv = executor.allocate(16, BLOCK_SIZE)
    poison(executor, kv, [0, 4, 8])
    batch = shifted([Row(t.tolist(), 1, [4 * r, 4 * r + 1, 4 * r + 2]) for r, t in enumerate(tokens)])
    given = {"feature": torch.cat(features)}
    if by_steps:
        with torch.inference_mode():
            return run_chain_by_steps(executor, batch, kv, torch.tensor(COUNTS), draws, given)
    return executor.run_chain(batch, kv, torch.tensor(COUNTS), draws, given)


COUNTS = (5, 1, 12)


@on_both
def test_a_chain_feeds_states_back(make: Make) -> None:
    weights = weights_of(EAGLE)
    chain = run_eagle(make(EAGLE, weights), None)
    for row, (text, feature, count) in enumerate(zip(*texts(), COUNTS, strict=True)):
        for step in range(count):
            out, logits = eagle_by_hand(weights, text, feature, torch.arange(1, len(text) + 1))
            best = logits[-1].argmax()
            assert chain.token_ids[row, step] == weights["d2t"][best]
            assert float(chain.confidence[row, step]) == pytest.approx(float(logits[-1].softmax(-1)[best]), abs=1e-4)
            text, feature = torch.cat([text, weights["d2t"][best, None]]), torch.cat([feature, out[-1:]])


@on_both
def test_a_chain_of_another_vocabulary_draws_under_the_noise_of_token_ids(make: Make) -> None:
    """As over the same scores of all token ids: what the map leaves out is never drawn."""
    weights, limit = weights_of(EAGLE), VOCAB - 30  # some of the map's ids may not be chosen
    draws = Draws(torch.tensor([0.0, 0.7, 1.3]), torch.tensor([5, 6, 7]), torch.tensor([10, 20, 30]), limit, keep_logits=True)
    chain = run_eagle(make(EAGLE, weights), draws)
    assert chain.logits is not None and chain.logits.shape == (3, max(COUNTS), DRAFT_VOCAB)
    kept = weights["d2t"] < limit
    for row, count in enumerate(COUNTS):
        temperature = float(draws.temperatures[row])
        for step in range(count):
            spread = torch.full((1, limit), -torch.inf)
            spread[0, weights["d2t"][kept]] = chain.logits[row, step][kept]
            key = noise.keys([5 + row], [10 + 10 * row + step])
            expected = noise.sample(spread / temperature, key) if temperature else spread.argmax(-1)
            assert chain.token_ids[row, step] == expected[0]
            assert float(chain.confidence[row, step]) == pytest.approx(float(spread.softmax(-1)[0, expected[0]]), abs=1e-4)


@native_only
@pytest.mark.parametrize("execution", [Execution(torch.float32), Execution(torch.bfloat16, quantization="int8")], ids=["f32", "int8"])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_native_chain_is_one_by_steps(execution: Execution, sampled: bool) -> None:
    executor = NativeExecutor(EAGLE, weights_of(EAGLE), execution)
    streams = torch.tensor([noise.stream(seed, 0) for seed in range(3)])
    draws = Draws(torch.tensor([1.0, 0.5, 0.0]), streams, torch.tensor([10, 3, 22]), vocab_size=VOCAB - 9, keep_logits=True)
    chain, steps = (run_eagle(executor, draws if sampled else None, by_steps) for by_steps in (False, True))
    for n, count in enumerate(COUNTS):
        assert torch.equal(chain.token_ids[n, :count], steps.token_ids[n, :count])
        torch.testing.assert_close(chain.confidence[n, :count], steps.confidence[n, :count], rtol=1e-4, atol=1e-6)
        if sampled:
            assert chain.logits is not None and steps.logits is not None
            assert torch.equal(chain.logits[n, :count], steps.logits[n, :count])


@on_both
def test_equal_columns_give_the_first(make: Make) -> None:
    weights = weights_of(EAGLE)
    weights["head"][1::2] = weights["head"][0::2][:-1]  # each column twice
    weights["d2t"] = weights["d2t"].flip(0)  # ids fall as columns rise
    executor = make(EAGLE, weights)
    first = set(weights["d2t"][0::2].tolist())
    tokens, features = texts()
    batch = shifted([Row(t.tolist(), 1, [4 * r, 4 * r + 1, 4 * r + 2]) for r, t in enumerate(tokens)], False)
    output = executor.run(batch, executor.allocate(16, BLOCK_SIZE), (), {"feature": torch.cat(features)})
    assert set(output.argmax.tolist()) <= first
    greedy = Draws(torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), vocab_size=VOCAB - 30)
    for draws in (None, greedy):
        chain = run_eagle(executor, draws)
        chosen = {token for row, count in zip(chain.token_ids.tolist(), COUNTS, strict=True) for token in row[:count]}
        assert chosen <= first and (draws is None or max(chosen) < VOCAB - 30)


# ---- parts of networks

CONTEXT = a_program(
    Linear(("feature",), ("kv",), ("kv",)), Attention(("kv",), (), 0, 0, 1.0, "rope"),
    kv_layers=(SPEC,), logits="", best=None, inputs={"feature": H},
)
BLOCK = a_program(
    Embed((), ("e",), "embed"), RMSNorm(("e",), ("n",), "", EPS, "square_bias"), Linear(("n",), ("qkv",), ("block_qkv",)),
    Attention(("qkv",), ("a",), 0, HEADS, DIM**-0.5, "rope"), Linear(("a", "e"), ("h",), ("square",)),
    GatherRows(("h",), ("rows",)), Linear(("rows",), ("logits",), ("whole_head",)),
    kv_layers=(SPEC,), boundaries=("h",),
)


def bidirectional(rows: list[Row]) -> RaggedBatch:
    """Every tree token sees all of its row's."""
    batch = batch_of(rows)
    masks: list[int] = []
    for row in rows:
        size = len(row.tree)
        masks += [0] * len(row.causal) + [-1 if size == 64 else (1 << size) - 1] * size
    return replace(batch, tree_mask=torch.tensor(masks))


def block_by_hand(w: dict[str, Tensor], context: Tensor, tokens: Tensor, first: int = 0) -> Tensor:
    """Boundary 0 of a block behind a context, everybody seeing everybody from place `first` on."""
    e = w["embed"][tokens]
    n = norm(e, torch.ones(H)) + w["square_bias"]
    width = KV_HEADS * DIM
    q, k, v = (n @ w["block_qkv"].T).split([HEADS * DIM, width, width], -1)
    before_k, before_v = (context @ w["kv"].T).chunk(2, -1)
    k, v = torch.cat((before_k, k)).view(-1, KV_HEADS, DIM), torch.cat((before_v, v)).view(-1, KV_HEADS, DIM)
    angles = torch.arange(len(k))[:, None] * torch.tensor(INV_FREQ)
    q, k = turned(q.view(-1, HEADS, DIM), angles[len(context) :]), turned(k, angles)
    return attended(q, k[first:], v[first:], DIM**-0.5) @ w["square"].T + e


@on_both
@pytest.mark.parametrize("first", [0, 3])
def test_a_bidirectional_block_of_64(make: Make, first: int) -> None:
    weights = weights_of(CONTEXT) | weights_of(BLOCK, 1)
    writer, reader = make(CONTEXT, weights), make(BLOCK, weights)
    kv = reader.allocate(16, BLOCK_SIZE)
    features = torch.randn(13, H, generator=torch.Generator().manual_seed(6))
    batch = batch_of([Row([0] * 13, 0, [6])])
    nothing = torch.arange(0)
    writer.run(replace(batch, logits_indices=nothing, full_logits=nothing), kv, inputs={"feature": features})
    tokens = [i % VOCAB for i in range(50, 114)]
    block = bidirectional([Row([], 13, [6, 9, 2, 11, 4], [(t, i - 1) for i, t in enumerate(tokens)])])
    assert (block.tree_mask == -1).all()
    block = replace(block, first_places=torch.tensor([first], dtype=torch.int32))
    output = reader.run(block, kv, (0,))
    torch.testing.assert_close(output.hidden[0], block_by_hand(weights, features, torch.tensor(tokens), first), rtol=1e-3, atol=1e-4)


def rows_without_places(count: int) -> RaggedBatch:
    """Tokens of networks without a cache."""
    batch = batch_of([Row([i], 0, [0]) for i in range(count)])
    return replace(batch, slot_mapping=torch.full((count,), -1), block_tables=torch.zeros(count, 1, dtype=torch.int32))


HEADS_ONLY = {
    # Medusa's residual block; a head of its own reads the same normalised buffer
    "residual block": a_program(
        Linear(("feature",), ("s",), ("square",), ("square_bias",)), Activation(("s",), ("a",), "silu", gated=False),
        Add(("a", "feature"), ("h",)), GatherRows(("h",), ("rows",)), Linear(("rows",), ("logits",), ("whole_head",)),
        boundaries=("h",), inputs={"feature": H},
    ),
    "two products of one norm": a_program(
        GatherRows(("feature",), ("rows",)), RMSNorm(("rows",), ("n",), "out_norm", EPS), Linear(("n",), ("s",), ("square",)),
        Linear(("s", "n"), ("t",), ("square",)), Linear(("t",), ("logits",), ("whole_head",)), inputs={"feature": H},
    ),
    "no weights in the norm": a_program(
        RMSNorm(("feature",), ("h",), "", EPS), GatherRows(("h",), ("rows",)), Linear(("rows",), ("logits",), ("whole_head",)),
        boundaries=("h",), inputs={"feature": H},
    ),
    "feature on top of the embedding": a_program(
        Embed((), ("e",), "embed"), Linear(("feature",), ("p",), ("square",)), Add(("p", "e"), ("x",)), Add(("x", "feature"), ("h",)),
        GatherRows(("h",), ("rows",)), Linear(("rows",), ("logits",), ("whole_head",)), boundaries=("h",), inputs={"feature": H},
    ),
}


def by_hand(name: str, w: dict[str, Tensor], tokens: Tensor, x: Tensor) -> Tensor:
    match name:
        case "residual block":
            h = torch.nn.functional.silu(x @ w["square"].T + w["square_bias"]) + x
        case "two products of one norm":
            n = norm(x, w["out_norm"])
            h = (n @ w["square"].T) @ w["square"].T + n
        case "no weights in the norm":
            h = norm(x, torch.ones(H))
        case _:
            h = x @ w["square"].T + w["embed"][tokens] + x
    return h @ w["whole_head"].T


@on_both
@pytest.mark.parametrize("name", HEADS_ONLY)
@pytest.mark.parametrize("count", [1, 5, 40])
def test_networks_without_a_cache(make: Make, name: str, count: int) -> None:
    program = HEADS_ONLY[name]
    weights = weights_of(program)
    executor = make(program, weights)
    assert executor.kv_layers == () and executor.kv_block_bytes(BLOCK_SIZE) == 0
    kv = executor.allocate(4, BLOCK_SIZE)
    features = torch.randn(count, H, generator=torch.Generator().manual_seed(count))
    before = features.clone()
    batch = rows_without_places(count)
    wanted = (0,) if program.boundaries else ()
    output = executor.run(batch, kv, wanted, {"feature": features})
    expected = by_hand(name, weights, batch.token_ids, features)
    torch.testing.assert_close(output.logits, expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(output.argmax, output.logits.argmax(-1)) if output.logits is not None else False
    assert torch.equal(features, before), "the caller's memory is only read"
    some = replace(batch, logits_indices=torch.arange(count - 1, count), full_logits=torch.arange(1))
    output = executor.run(some, kv, (), {"feature": features})
    torch.testing.assert_close(output.logits, expected[-1:], rtol=1e-3, atol=1e-4)


# An MLP speculator's step: a state goes around, no attention.
STATEFUL = a_program(
    Embed((), ("e",), "embed"), Linear(("state",), ("s",), ("square",)), Add(("s", "e"), ("x",)), RMSNorm(("x",), ("n",), "out_norm", EPS),
    Activation(("n",), ("h",), "gelu", gated=False), GatherRows(("h",), ("rows",)), Linear(("rows",), ("logits",), ("whole_head",)),
    boundaries=("h",), inputs={"state": H}, recurrent=("state", 0),
)


@on_both
def test_recurrent_chains_without_a_cache(make: Make) -> None:
    weights = weights_of(STATEFUL)
    executor = make(STATEFUL, weights)
    states = torch.randn(5, H, generator=torch.Generator().manual_seed(8))
    counts = torch.tensor([4, 2, 1, 3, 4])
    chain = executor.run_chain(rows_without_places(5), executor.allocate(1, BLOCK_SIZE), counts, None, {"state": states})
    for n, count in enumerate(counts.tolist()):
        state, token = states[n], torch.tensor(n)
        for step in range(count):
            x = state @ weights["square"].T + weights["embed"][token]
            state = torch.nn.functional.gelu(norm(x, weights["out_norm"]))
            token = (state @ weights["whole_head"].T).argmax()
            assert int(chain.token_ids[n, step]) == int(token)
