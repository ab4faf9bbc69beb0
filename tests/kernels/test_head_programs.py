"""Drafters' programs: inputs from the caller, states fed back, no attention, no logits, other vocabularies, shared weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from native_only import native_only
from paged_batches import Row, batch_of
from torch import Tensor

from foretoken.kernels.execution import Execution
from foretoken.kernels.layout import Draws, Executor, KVLayerSpec, RaggedBatch
from foretoken.kernels.native import NativeExecutor
from foretoken.kernels.ops import Activation, ArgMax, Attention, Concat, Embed, GatherRows, Linear, RMSNorm
from foretoken.kernels.program import Program, RopeTable
from foretoken.kernels.torch_executor import TorchExecutor

VOCAB, DRAFT_VOCAB, WIDTH, BLOCK = 48, 32, 32, 16
LAYER = KVLayerSpec(2, 16, 16)
KINDS = ["torch", pytest.param("native", marks=native_only)]


def head(mapped: bool = False) -> Program:
    """One layer over embedding | feature, as EAGLE has it; the recurrent state is what the layer gives."""
    weights = {
        "embed": (VOCAB, WIDTH),
        "fc": (WIDTH, 2 * WIDTH),
        "qkv": (4 * 16 + 2 * 2 * 16, WIDTH),
        "o": (WIDTH, 4 * 16),
        "norm": (WIDTH,),
        "head": (DRAFT_VOCAB if mapped else VOCAB, WIDTH),
    }
    ops = (
        Embed((), ("e",), "embed"),
        Concat(("e", "feature"), ("ef",)),
        Linear(("ef",), ("a",), ("fc",)),
        Linear(("a",), ("qkv",), ("qkv",)),
        Attention(("qkv",), ("attended",), 0, 4, 16**-0.5, "rope"),
        Linear(("attended", "a"), ("state",), ("o",)),
        RMSNorm(("state",), ("normed",), "norm", 1e-6),
        GatherRows(("normed",), ("last",)),
        Linear(("last",), ("logits",), ("head",)),
        best := ArgMax(("logits",), ("best", "top")),
    )
    return Program(
        ops,
        weights | ({"map": (DRAFT_VOCAB,)} if mapped else {}),
        (LAYER,),
        {"rope": RopeTable(tuple(100.0 ** (-i / 8) for i in range(8)))},
        DRAFT_VOCAB if mapped else VOCAB,
        256,
        ("state",),
        "",
        "logits",
        best,
        {"feature": WIDTH},
        ("feature", 0),
        "map" if mapped else "",
        frozenset({"embed"} if mapped else {"embed", "head"}),
    )


def tensors(program: Program, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    made = {name: torch.randn(shape) / shape[-1] ** 0.5 for name, shape in program.weights.items() if name != "map"}
    if "map" in program.weights:
        made["map"] = torch.arange(DRAFT_VOCAB) + torch.arange(DRAFT_VOCAB) // 2  # 0 1 3 4 6 7 ...
    return made


def network(kind: str, program: Program, weights: dict[str, Tensor], bank: Executor | None = None) -> Executor:
    shared = None if bank is None else bank.bank
    if kind == "torch":
        return TorchExecutor(program, weights, torch.float32, shared)
    return NativeExecutor(program, weights, Execution(torch.float32), bank=shared)


def rows(lengths: list[int], first: int = 1) -> RaggedBatch:
    """Fresh rows of causal tokens at positions first, first + 1, ...: what stands before has no entries."""
    torch.manual_seed(7)
    ends = torch.tensor(lengths).cumsum(0)
    texts = torch.randint(VOCAB, (sum(lengths),)).tensor_split(ends[:-1])
    return replace(
        batch_of([Row(text.tolist(), first, range(4 * r, 4 * r + 4)) for r, text in enumerate(texts)], BLOCK),
        logits_indices=ends - 1,
        full_logits=torch.arange(0),
        first_places=torch.full((len(lengths),), first, dtype=torch.int32),
    )


def plain(program: Program, weights: dict[str, Tensor], tokens: list[int], features: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """(logits [V], state [WIDTH]) behind the last token, from the formulas."""
    a = torch.cat([weights["embed"][tokens], features], -1) @ weights["fc"].T
    qkv = (a @ weights["qkv"].T).view(len(tokens), 8, 16)
    angles = torch.arange(first, first + len(tokens))[:, None] * torch.tensor(program.ropes["rope"].inv_freq)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    x1, x2 = qkv[:, :6].chunk(2, -1)
    turned = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)
    q, k, v = turned[-1, :4], turned[:, 4:6], qkv[:, 6:]
    out = [torch.softmax(q[h] @ k[:, h // 2].T / 4, -1) @ v[:, h // 2] for h in range(4)]
    state = a[-1] + torch.cat(out) @ weights["o"].T
    normed = state / (state.square().mean() + 1e-6).sqrt() * weights["norm"]
    return normed @ weights["head"].T, state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("first", [0, 1, 21])
def test_a_chain_feeds_states_back(kind: str, mapped: bool, first: int) -> None:
    program = head(mapped)
    weights = tensors(program)
    executor = network(kind, program, weights)
    batch, counts = rows([3, 7, 1], first), torch.tensor([4, 1, 3])
    if first == 0:
        batch = replace(batch, first_places=None)
    features = torch.randn(len(batch.token_ids), WIDTH)
    kv = executor.allocate(12, BLOCK)
    for layer_slot in range(12 * BLOCK):  # what nobody may see
        kv.write(0, torch.tensor([layer_slot]), torch.full((1, 2, 16), 9.0), torch.full((1, 2, 16), 9.0))
    output = executor.run_chain(batch, kv, counts, inputs={"feature": features})
    starts = batch.query_start_loc.tolist()
    for chain, count in enumerate(counts.tolist()):
        tokens = batch.token_ids[starts[chain] : starts[chain + 1]].tolist()
        states = features[starts[chain] : starts[chain + 1]]
        for step in range(count):
            logits, state = plain(program, weights, tokens, states, first)
            column = int(logits.argmax())
            token = int(weights["map"][column]) if mapped else column
            assert output.token_ids[chain, step] == token
            assert float(output.confidence[chain, step]) == pytest.approx(float(logits.softmax(-1)[column]), abs=1e-4)
            tokens, states = [*tokens, token], torch.cat([states, state[None]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_of_another_vocabulary_draws_under_the_noise_of_token_ids(kind: str) -> None:
    program = head(mapped=True)
    weights = tensors(program)
    batch, counts = rows([3, 5]), torch.tensor([3, 3])
    features = torch.randn(8, WIDTH)
    limit = 40  # some of the map's ids may not be chosen
    draws = Draws(torch.tensor([0.0, 1.3]), torch.tensor([5, 6]), torch.tensor([10, 20]), limit, keep_logits=True)
    executor = network(kind, program, weights)
    output = executor.run_chain(batch, executor.allocate(8, BLOCK), counts, draws, {"feature": features})
    assert output.logits is not None and output.logits.shape == (2, 3, DRAFT_VOCAB)

    # The same scores in a network that has all token ids: what the map leaves out is never drawn.
    from foretoken.kernels.noise import keys, sample

    for chain in range(2):
        for step in range(3):
            spread = torch.full((1, limit), -torch.inf)
            kept = weights["map"] < limit
            spread[0, weights["map"][kept]] = output.logits[chain, step][kept]
            expected = spread.argmax(-1) if chain == 0 else sample(spread / 1.3, keys([6], [20 + step]))
            assert output.token_ids[chain, step] == expected[0]
            probability = spread.softmax(-1)[0, expected[0]]
            assert float(output.confidence[chain, step]) == pytest.approx(float(probability), abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_without_attention_or_embedding(kind: str) -> None:
    ops = (
        Linear(("feature", "feature"), ("x",), ("w",), ("b",)),
        Activation(("x",), ("y",), "silu", False),
        GatherRows(("y",), ("last",)),
        Linear(("last",), ("logits",), ("head",)),
        best := ArgMax(("logits",), ("best", "top")),
    )
    weights = {"w": (WIDTH, WIDTH), "b": (WIDTH,), "head": (VOCAB, WIDTH)}
    program = Program(ops, weights, (), {}, VOCAB, 8, ("y",), "", "logits", best, {"feature": WIDTH})
    made = tensors(program)
    executor = network(kind, program, made)
    count = 5
    ones, zeros = torch.ones(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int64)
    every = torch.arange(count)
    starts = torch.arange(count + 1, dtype=torch.int32)
    batch = RaggedBatch(zeros, zeros, zeros - 1, starts, ones, ones[:, None] * 0, ones, zeros, every, every, BLOCK)
    features = torch.randn(count, WIDTH)
    output = executor.run(batch, executor.allocate(2, BLOCK), (0,), {"feature": features})
    y = torch.nn.functional.silu(features + features @ made["w"].T + made["b"])
    torch.testing.assert_close(output.hidden[0], y, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(output.logits, y @ made["head"].T, atol=1e-4, rtol=1e-4)
    assert output.argmax.tolist() == (y @ made["head"].T).argmax(-1).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_entries_of_one_program_are_read_by_another(kind: str) -> None:
    """The first writes keys and values and gives no logits; the second attends to them, its own block seen both ways."""
    rope = {"rope": RopeTable(tuple(100.0 ** (-i / 8) for i in range(8)))}
    write = Program(
        (Linear(("feature",), ("kv",), ("kv",)), Attention(("kv",), (), 0, 0, 1.0, "rope", k_norm="k_norm")),
        {"kv": (64, WIDTH), "k_norm": (16,)},
        (LAYER,), rope, 0, 256, (), "", "", None, {"feature": WIDTH},
    )  # fmt: skip
    ops = (
        Embed((), ("e",), "embed"),
        Linear(("e",), ("qkv",), ("q", "kv")),
        Attention(("qkv",), ("x",), 0, 4, 0.25, "rope", q_norm="q_norm", k_norm="k_norm"),
        GatherRows(("x",), ("last",)),
        Linear(("last",), ("logits",), ("head",)),
        best := ArgMax(("logits",), ("best", "top")),
    )
    shapes = {"embed": (VOCAB, WIDTH), "q": (64, WIDTH), "kv": (64, WIDTH), "q_norm": (16,), "k_norm": (16,), "head": (VOCAB, 64)}
    read = Program(ops, shapes, (LAYER,), rope, VOCAB, 256, (), "", "logits", best)
    weights = tensors(read)
    writer, reader = network(kind, write, weights), network(kind, read, weights)
    kv = reader.allocate(4, BLOCK)
    known, block = 20, 5
    features = torch.randn(known, WIDTH)
    batch = replace(rows([known], 0), first_places=None, logits_indices=torch.zeros(0, dtype=torch.int64))
    assert writer.run(batch, kv, inputs={"feature": features}).logits is None

    tokens = torch.tensor([3, 9, 9, 9, 9])
    every = torch.arange(block)
    positions = known + every
    tree = RaggedBatch(
        tokens, positions, positions, torch.tensor([0, block], dtype=torch.int32), torch.tensor([known + block], dtype=torch.int32),
        batch.block_tables, torch.tensor([0], dtype=torch.int32), torch.full((block,), 0b11111), every, every, BLOCK,
    )  # fmt: skip
    output = reader.run(tree, kv)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    e = weights["embed"][tokens]
    own = e @ weights["kv"].T
    both = torch.cat([features @ weights["kv"].T, own])
    k, v = norm(both[:, :32].view(-1, 2, 16), weights["k_norm"]), both[:, 32:].view(-1, 2, 16)
    q = norm((e @ weights["q"].T).view(-1, 4, 16), weights["q_norm"])
    angles = torch.arange(known + block)[:, None] * torch.tensor(rope["rope"].inv_freq)

    def turn(x: Tensor, at: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        cos, sin = at.cos()[:, None], at.sin()[:, None]
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)

    q, k = turn(q, angles[known:]), turn(k, angles)
    out = torch.stack([torch.softmax(q[:, h] @ k[:, h // 2].T / 4, -1) @ v[:, h // 2] for h in range(4)], 1).flatten(1)
    torch.testing.assert_close(output.logits, out @ weights["head"].T, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_weights_are_kept_once(kind: str) -> None:
    """The second network needs no tensors for what the first has, and answers as if it had them."""
    program = head()
    weights = tensors(program)
    alone = network(kind, program, weights)
    target = network(kind, replace(program, shared=frozenset()), weights)
    other = network(kind, program, {name: w for name, w in weights.items() if name not in program.shared}, bank=target)
    batch, counts, features = rows([3, 4]), torch.tensor([2, 2]), torch.randn(7, WIDTH)
    chains = [e.run_chain(batch, e.allocate(8, BLOCK), counts, inputs={"feature": features}).token_ids for e in (alone, other)]
    assert torch.equal(*chains)
    assert other.bank is target.bank
    with pytest.raises(KeyError):
        network(kind, program, {name: w for name, w in weights.items() if name != "embed"})


@native_only
def test_a_narrow_drafter_reads_the_shared_head_as_it_is() -> None:
    """int8 products of its own beside the target's head in bfloat16: no second copy of the head."""
    program = head()
    weights = tensors(program)
    target = NativeExecutor(replace(program, shared=frozenset()), weights, Execution(torch.bfloat16))
    own = {name: w for name, w in weights.items() if name not in program.shared}  # a second copy would need the tensor
    drafter = NativeExecutor(program, own, Execution(torch.bfloat16, "int8"), bank=target.bank)
    batch, features = replace(rows([3, 4]), full_logits=torch.arange(2)), torch.randn(7, WIDTH)
    exact, narrow = (e.run(batch, e.allocate(8, BLOCK), (), {"feature": features}).logits for e in (target, drafter))
    assert exact is not None and narrow is not None
    assert not torch.equal(exact, narrow)
    assert float((exact - narrow).norm() / exact.norm()) < 0.05
