"""When passes and chains are recorded, over what, and that replays are what the ops are. What only a GPU shows is in tests/gpu."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from decoding import assert_same_chains, ragged
from fake_graphs import FakeRecorder
from recurrent_rows import StateRow, scores_of_two, small_cache, state_batch, two_lives
from small_networks import small_network

from foretoken.kernels import graphs, noise
from foretoken.kernels.chain import run_chain_by_steps
from foretoken.kernels.graphs import FEW_OPS, PATIENCE, CaptureReport, CudaRecorder, GraphExecutor
from foretoken.kernels.layout import FINAL, Draws, ForwardOutput, KVTensors, RaggedBatch
from foretoken.kernels.ops import Linear
from foretoken.kernels.program import row_program
from foretoken.kernels.static_batch import Ladder, StaticBatch
from foretoken.kernels.torch_executor import Computed, TorchExecutor
from foretoken.kernels.torch_kv import TorchKV
from foretoken.proposers.guessing import single_tokens

BLOCK_SIZE, NUM_BLOCKS = 4, 160


def recording() -> tuple[GraphExecutor, FakeRecorder]:
    recorder = FakeRecorder()
    return GraphExecutor(small_network(max_position_embeddings=512), recorder=recorder), recorder


def cache_of(executor: GraphExecutor | TorchExecutor) -> KVTensors:
    return executor.allocate(NUM_BLOCKS, BLOCK_SIZE)


def rows(*lengths: int, seed: int = 0, first_block: int = 0, all_logits: bool = True) -> RaggedBatch:
    """Rows from the start, in blocks of their own."""
    generator = torch.Generator().manual_seed(seed)
    starts = [first_block + sum(-(-n // BLOCK_SIZE) + 2 for n in lengths[:row]) for row in range(len(lengths))]
    return ragged(
        [
            (torch.randint(97, (n,), generator=generator).tolist(), 0, [*range(start, start + -(-n // BLOCK_SIZE) + 2)])
            for n, start in zip(lengths, starts, strict=True)
        ],
        all_logits=all_logits,
    )


def check_same(found: ForwardOutput, expected: ForwardOutput) -> None:
    assert torch.equal(found.argmax, expected.argmax)
    torch.testing.assert_close((found.top, found.logits, found.hidden), (expected.top, expected.logits, expected.hidden))


def seen_by(executor: GraphExecutor, monkeypatch: pytest.MonkeyPatch) -> list[RaggedBatch]:
    """The batches that the network computes from now on."""
    batches: list[RaggedBatch] = []
    compute = executor.network.compute

    def kept(batch: RaggedBatch, *rest: Any) -> Computed:
        batches.append(batch)
        return compute(batch, *rest)

    monkeypatch.setattr(executor.network, "compute", kept)
    return batches


def test_a_shape_is_recorded_when_it_is_first_wanted() -> None:
    executor, recorder = recording()
    kv = cache_of(executor)
    for batch in (rows(3, 2), rows(3, 2, seed=1), rows(4, 1, seed=2)):
        executor.run(batch, kv)
    assert executor.captured.num_graphs == 1 and recorder.num_replays == 3
    executor.run(rows(9), kv)
    assert executor.captured.num_graphs == 2


def test_while_somebody_waits_only_what_comes_often_is_recorded() -> None:
    executor, recorder = recording()
    kv = cache_of(executor)
    executor.capture(kv, (), most_rows=2)
    ready = executor.captured.num_graphs
    assert ready > 0
    executor.be_patient()
    executor.run(rows(1, 1), kv)
    assert recorder.num_replays == 1, "what was recorded beforehand is used"
    chain = dataclasses.replace(rows(3, 1, all_logits=False), full_logits=torch.zeros(0, dtype=torch.int64))
    for _ in range(PATIENCE):
        executor.run(rows(3, 2), kv)
        executor.run_chain(chain, kv, torch.tensor([2, 3]))
    assert executor.captured.num_graphs == ready, "a rare shape made everybody wait"
    executor.run(rows(3, 2), kv)
    executor.run_chain(chain, kv, torch.tensor([2, 3]))
    assert executor.captured.num_graphs == ready + 2 and recorder.num_replays == 3


def test_what_is_not_recorded_goes_with_what_has_room_for_it() -> None:
    """Near a request's end it has room for fewer guesses than others, say: nobody waits for hundreds of launches, or for a recording."""
    executor, recorder = recording()
    plain = executor.network
    kv, other = cache_of(executor), cache_of(plain)
    executor.capture(kv, (0, 2), most_rows=1, tokens_per_row=5)
    ready = executor.captured.num_graphs
    executor.be_patient()
    for turn, batch in enumerate([rows(3), rows(4, seed=1), rows(2, seed=2)] * PATIENCE):
        found, expected = executor.run(batch, kv, (0, 2)), plain.run(batch, other, (0, 2))
        check_same(found, expected)
        assert recorder.num_replays == turn + 1
    assert executor.captured.num_graphs == ready
    for count, batch in enumerate([rows(3), rows(4, seed=1), rows(2, seed=2)], 1):  # they came often
        executor.run(batch, kv, (0, 2))
        assert executor.captured.num_graphs == ready + count


def test_what_has_no_recorded_one_near_its_size_runs_op_by_op() -> None:
    executor, recorder = recording()
    kv = cache_of(executor)
    executor.run(rows(40), kv)
    executor.be_patient()
    executor.run(rows(3), kv)
    executor.run(rows(2), kv, (0, 2))  # what it is asked for besides is in no graph
    assert executor.captured.num_graphs == 1 and recorder.num_replays == 1
    executor.run(rows(24), kv)
    assert executor.captured.num_graphs == 1 and recorder.num_replays == 2


def test_what_is_not_recorded_has_been_computed_once_before_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its kernels are there. Nothing of it is written, and it is no pass that comes often."""
    recorder = FakeRecorder()
    executor = GraphExecutor(small_network(), Ladder((1, 2, 4, 8)), recorder)
    kv, batches = cache_of(executor), seen_by(executor, monkeypatch)
    executor.capture(kv, (), most_rows=2, most_tokens=20)
    sizes = {(len(batch.token_ids), len(batch.seq_lens), len(batch.logits_indices)) for batch in batches}
    assert sizes >= {(rung.tokens, rung.rows, rung.scores) for rung in executor.ladder.samples(20, 2)} >= {(8, 1, 8), (20, 2, 2)}
    assert all(bool((batch.slot_mapping == -1).all()) for batch in batches)
    assert executor.captured.num_graphs == len(executor._passes) == 2


@pytest.mark.parametrize("is_patient", [False, True])
def test_replays_are_what_the_ops_are(is_patient: bool) -> None:
    executor, _ = recording()
    if is_patient:
        executor.be_patient()
    plain = executor.network
    kv, other = cache_of(executor), cache_of(plain)
    many = rows(140, 3, 1, all_logits=False)
    firsts = dataclasses.replace(rows(5, 6), first_places=torch.tensor([2, 0], dtype=torch.int32))
    batches = [rows(5, 1, 7), firsts, rows(2, 2, 2), many, dataclasses.replace(firsts, first_places=None), rows(1)]
    assert len(many.logits_indices) == 3
    for turn in range(PATIENCE + 2):
        for batch in batches:
            batch = dataclasses.replace(batch, token_ids=(batch.token_ids + turn) % 97)
            found, expected = executor.run(batch, kv, (0, 2)), plain.run(batch, other, (0, 2))
            check_same(found, expected)
    assert executor.captured.num_graphs == len(batches)


def test_a_batch_that_lies_on_the_device_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same graph as one of the host."""
    executor, _ = recording()
    kv, batch = cache_of(executor), rows(3, 2)
    expected = executor.run(batch, kv)
    taken: list[RaggedBatch] = []
    take = StaticBatch.take
    monkeypatch.setattr(StaticBatch, "take", lambda static, batch: (taken.append(batch), take(static, batch)))
    monkeypatch.setattr(graphs, "is_of_the_host", lambda batch: False)
    found = executor.start(batch, kv).finish()
    assert len(taken) == 1 and executor.captured.num_graphs == 1
    assert torch.equal(found.argmax, expected.argmax)
    torch.testing.assert_close(found.logits, expected.logits)


def test_what_a_recording_does_once_more_is_the_present_batch() -> None:
    """Places of the batch before may hold another request's tokens by then."""
    executor, _ = recording()
    executor.be_patient()
    kv = cache_of(executor)
    assert isinstance(kv, TorchKV)
    before = rows(3, 2)
    for _ in range(PATIENCE):
        executor.run(before, kv)
    for cache in (*kv.k, *kv.v):
        cache.fill_(7.0)
    executor.run(rows(3, 2, seed=1, first_block=20), kv)
    assert executor.captured.num_graphs == 1
    assert all(bool((cache[before.slot_mapping] == 7.0).all()) for cache in (*kv.k, *kv.v))


def test_a_chunk_of_a_prompt_is_not_scored_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, _ = recording()
    kv = cache_of(executor)
    batches = seen_by(executor, monkeypatch)
    executor.run(rows(300, 1, all_logits=False), kv)
    assert len(batches[-1].token_ids) == 320 and len(batches[-1].logits_indices) == 64
    executor.run(rows(300, 1), kv)  # all of them are wanted
    assert len(batches[-1].token_ids) == len(batches[-1].logits_indices) == 320


def test_attention_looks_for_first_places_only_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, _ = recording()
    kv = cache_of(executor)
    batches = seen_by(executor, monkeypatch)
    executor.run(rows(5, 3), kv)
    assert batches and all(batch.first_places is None for batch in batches)
    batches.clear()
    executor.run(dataclasses.replace(rows(5, 3), first_places=torch.tensor([1, 0], dtype=torch.int32)), kv)
    assert batches[-1].first_places is not None and batches[-1].first_places[:2].tolist() == [1, 0]


DRAWING = {
    "best": None,
    "drawn": Draws(torch.tensor([0.7, 0.0]), torch.tensor([noise.stream(5, 0), noise.stream(6, 0)]), torch.tensor([10, 20]), 60),
}


@pytest.mark.parametrize("drawing", DRAWING.values(), ids=DRAWING)
def test_recorded_chains_are_chains_by_steps(drawing: Draws | None) -> None:
    executor, recorder = recording()
    executor.be_patient()
    kv, other = cache_of(executor), cache_of(executor)
    for turn in range(PATIENCE + 3):
        batch = dataclasses.replace(rows(3, 2, seed=turn, all_logits=False), full_logits=torch.zeros(0, dtype=torch.int64))
        counts = torch.tensor([[4, 2], [1, 4], [4, 4]][turn % 3])
        expected = run_chain_by_steps(executor.network, batch, other, counts, drawing)
        found = executor.run_chain(batch, kv, counts, drawing)
        assert_same_chains(found, expected, counts)
    assert executor.captured.num_graphs == 1 and recorder.num_replays == 3


def test_block_tables_are_kept_once_for_all_shapes() -> None:
    """They are as long as the longest text: beside them all else that a shape needs is small."""
    executor, _ = recording()
    kv = cache_of(executor)
    executor.capture(kv, (), most_rows=4, tokens_per_row=3)
    tables = {prepared.static.batch.block_tables.data_ptr() for prepared in executor._passes.values()}
    assert len(executor._passes) > 6 and len(tables) == 1


@pytest.mark.parametrize(("num_ops", "is_recorded"), [(1, False), (FEW_OPS, False), (FEW_OPS + 1, True)])
def test_a_few_ops_over_inputs_are_never_recorded(num_ops: int, is_recorded: bool) -> None:
    names = ["x", *(f"x{i}" for i in range(num_ops - 1)), "product"]
    ops = [Linear((x,), (y,), ("square",)) for x, y in pairwise(names)]
    program = row_program(ops, {"square": (8, 8)}, {"x": 8}, final="product")
    square = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    executor = GraphExecutor(TorchExecutor(program, {"square": square}, torch.float32), recorder=FakeRecorder())
    x, expected = torch.randn(3, 8), torch.eye(8)
    for _ in range(num_ops):
        expected = expected @ square.T
    batch = single_tokens([0] * 3, has_logits=False).batch()
    found = executor.run(batch, executor.allocate(1, 16), (FINAL,), {"x": x}).hidden[FINAL]
    torch.testing.assert_close(found, x @ expected, rtol=1e-4, atol=1e-3)
    assert executor.captured.num_graphs == is_recorded


class _Stream:
    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device

    def wait_stream(self, other: _Stream) -> None: ...


def test_one_stream_of_the_own_gpu_is_for_all_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that torch would take belongs to the first GPU, and cuBLAS keeps memory for every other."""
    device = torch.device("cuda", 1)
    warmed: list[_Stream] = []
    captured: list[_Stream] = []

    @contextmanager
    def on(stream: _Stream) -> Iterator[None]:
        warmed.append(stream)
        yield

    @contextmanager
    def graph(made: object, pool: object = None, stream: _Stream | None = None) -> Iterator[None]:
        assert stream is not None and pool == "pool"
        captured.append(stream)
        yield

    class Graph:
        def replay(self) -> None: ...

    streams: list[_Stream] = []

    def stream(device: torch.device) -> _Stream:
        streams.append(_Stream(device))
        return streams[-1]

    fakes: dict[str, Callable[..., Any] | type] = {
        "Stream": stream, "stream": on, "graph": graph, "CUDAGraph": Graph, "graph_pool_handle": lambda: "pool",
        "current_stream": lambda device: _Stream(device), "synchronize": lambda device: None, "memory_reserved": lambda device: 0,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    recorder = CudaRecorder(device)
    done: list[int] = []
    for number in range(3):
        _, result = recorder.record(lambda number=number: done.append(number) or number)
        assert result == number
    assert done == [0, 0, 1, 1, 2, 2] and recorder.captured.num_graphs == 3
    assert len(streams) == 1 and streams[0].device == device
    assert warmed == captured == streams * 3


def test_reports_add_up() -> None:
    report = CaptureReport(2, 1.0, 10_000_000) + CaptureReport(1, 0.5, 5_000_000)
    assert report.describe() == "3 graphs captured in 1.5 s, 15 MB"


def test_recorded_passes_go_on_from_states() -> None:
    """Twice each: to record a pass is to run it, and the second time it is a replay."""
    network = small_network("qwen3_5")
    executor = GraphExecutor(network, recorder=FakeRecorder())
    kv = small_cache(executor)

    def run(batch: RaggedBatch) -> torch.Tensor:
        first, second = (executor.run(batch, kv).logits for _ in range(2))
        assert first is not None and second is not None and torch.equal(first, second)
        return second

    for found, expected in two_lives(run, kv, scores_of_two(network)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert executor.captured.num_graphs > 1


def test_chains_of_recurrent_networks_go_on_from_states() -> None:
    network = small_network("qwen3_5")
    found: list[list[int]] = []
    for executor in (GraphExecutor(network, recorder=FakeRecorder()), network):
        batch = state_batch([StateRow([5, 6, 7], 0, [0], -1, 0)])
        assert batch.states is not None
        slots = dataclasses.replace(batch.states, chain_slots=torch.tensor([[1, 2]], dtype=torch.int32))
        batch = dataclasses.replace(batch, states=slots, logits_indices=torch.tensor([2]), full_logits=torch.empty(0, dtype=torch.int64))
        kv = small_cache(executor)
        for _ in range(2):  # recorded, replayed
            found += executor.run_chain(batch, kv, torch.tensor([4])).token_ids.tolist()
    assert len({*map(tuple, found)}) == 1
    said = [5, 6, 7]
    for _ in range(4):
        logits = network.run(state_batch([StateRow(said, 0, [0], -1, -1)]), small_cache(network)).logits
        assert logits is not None
        said.append(int(logits[-1].argmax()))
    assert found[0] == said[3:]
