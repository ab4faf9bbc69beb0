"""Captured passes and chains beside the same ops run one by one: every rung, padding, what replays leave behind."""

import dataclasses
from array import array

import pytest
import torch
from decoding import ragged
from small_networks import small_network

from foretoken.kernels import noise
from foretoken.kernels.chain import run_chain_by_steps
from foretoken.kernels.continuation import Continuation, Ways, continued
from foretoken.kernels.device_chain import ChainDraws
from foretoken.kernels.following import Follower, Followers, following
from foretoken.kernels.graphs import PATIENCE, CudaRecorder, GraphExecutor
from foretoken.kernels.launch_trial import try_early_launches
from foretoken.kernels.layout import Draws, RaggedBatch
from foretoken.kernels.matching import Guesses
from foretoken.kernels.static_batch import Ladder
from foretoken.kernels.triton import early_launch
from foretoken.kernels.triton_steps import TritonKernels

BLOCK_SIZE = 4


def pair(device: str, dtype: torch.dtype = torch.float32) -> tuple[GraphExecutor, GraphExecutor]:
    """The same network captured, and one whose ladder has no size that would be reached."""
    network = small_network("qwen3", dtype, device, hidden_size=64, intermediate_size=96)
    return GraphExecutor(network), GraphExecutor(network, Ladder(()))


def rows(*lengths: int, start: int = 0, seed: int = 0) -> RaggedBatch:
    generator = torch.Generator().manual_seed(seed)
    return ragged(
        [(torch.randint(97, (n,), generator=generator).tolist(), start, [row * 4 + i for i in range(4)]) for row, n in enumerate(lengths)]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replays_are_what_the_ops_are(gpu: str, dtype: torch.dtype) -> None:
    captured, eager = pair(gpu, dtype)
    kv, other = captured.allocate(32, BLOCK_SIZE), eager.allocate(32, BLOCK_SIZE)
    batches = [rows(5, 1, 7), rows(2, 2, 2, 2, 2), rows(1), rows(1, 1, 1), rows(3, start=5, seed=9), rows(5, 1, 7, seed=4)]
    for seed, batch in enumerate(batches):
        found, expected = captured.run(batch, kv, (0, 2)), eager.run(batch, other, (0, 2))
        assert torch.equal(found.argmax, expected.argmax), f"batch {seed}"
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4 if dtype == torch.float32 else 0.05, atol=1e-2)
        torch.testing.assert_close(found.hidden[2], expected.hidden[2], rtol=0.02, atol=0.02)
    assert captured.captured.num_graphs > 2 and captured.captured.seconds > 0 and eager.captured.num_graphs == 0


@pytest.mark.parametrize("is_invariant", [False, True], ids=["usual", "invariant"])
def test_kernels_that_come_early_give_the_same_bits(gpu: str, is_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In passes and chains, by graphs and op by op, many times: an order that is wrong now and then would show."""
    if torch.cuda.get_device_capability(gpu) < (9, 0):
        pytest.skip("this GPU has no programmatic dependent launch")
    kernels = TritonKernels(is_invariant)
    network = small_network("qwen3", torch.bfloat16, gpu, hidden_size=256, intermediate_size=512, num_hidden_layers=6, kernels=kernels)
    trial = try_early_launches(network, CudaRecorder(torch.device(gpu)).record)
    assert trial and not trial.problem
    chain = dataclasses.replace(rows(3, 2), logits_indices=torch.tensor([2, 4]), full_logits=torch.zeros(0, dtype=torch.int64))
    expected: list[torch.Tensor] = []
    monkeypatch.setattr(early_launch, "launching_early", set())
    for is_early in (False, True):
        if is_early:
            early_launch.launching_early.add(network.device)
        captured, eager = GraphExecutor(network), GraphExecutor(network, Ladder(()))
        found: list[torch.Tensor] = []
        for executor in (captured, eager):
            kv = executor.allocate(32, BLOCK_SIZE)
            for turn in range(100):
                for batch in (rows(5, 1, 7), rows(1), rows(1, 1, 1, 1, 1, 1, 1)):
                    logits = executor.run(batch, kv).logits
                    assert logits is not None
                    found.append(logits.clone())
                chains = executor.run_chain(chain, kv, torch.tensor([4, 3]))
                found.append(torch.cat([chains.token_ids[0], chains.token_ids[1, :3]]))
                if turn and not all(map(torch.equal, found[-4:], found[-8:-4])):
                    pytest.fail(f"turn {turn} is not what the one before was, early: {is_early}")
            expected += found[:4] if not is_early else []
            if is_early:
                assert all(map(torch.equal, found[:4], expected[:4] if executor is captured else expected[4:]))


def test_what_a_pass_gave_survives_the_next_replay(gpu: str) -> None:
    captured, _ = pair(gpu)
    kv = captured.allocate(32, BLOCK_SIZE)
    batch = rows(2, 1)
    first = captured.run(batch, kv, (1,))
    kept = first.argmax.clone(), first.hidden[1].clone(), first.logits.clone()  # pyright: ignore[reportOptionalMemberAccess]
    captured.run(rows(2, 1, seed=5), kv, (1,))
    torch.cuda.synchronize()
    assert torch.equal(first.argmax, kept[0]) and torch.equal(first.hidden[1], kept[1]) and torch.equal(first.logits, kept[2])  # pyright: ignore


def test_a_pass_reads_tokens_that_the_host_has_not_seen(gpu: str) -> None:
    captured, eager = pair(gpu)
    kv, other = captured.allocate(32, BLOCK_SIZE), eager.allocate(32, BLOCK_SIZE)
    first = dataclasses.replace(rows(3, 2), logits_indices=torch.tensor([2, 4]), full_logits=torch.zeros(0, dtype=torch.int64))
    known = eager.run(first, other).argmax.tolist()
    expected = eager.run(ragged([([known[0], 7, 8], 3, [0, 1, 2, 3]), ([known[1]], 2, [4, 5, 6, 7])]), other)
    guesses = torch.tensor([[9, 9], [7, 8]], device=captured.device)
    walked = Guesses.of([((), (), False)] * 2)
    for _ in range(2):  # the second time both are replays
        started = captured.start(first, kv)
        answer = started.match(walked, None)
        ways = [Follower(0, 3, 1, 2, array("i", (0, 1, 2, 3)), False), Follower(1, 2, 0, 0, array("i", (4, 5, 6, 7)), False)]
        found = captured.start(following(Followers.of(ways, captured.device, BLOCK_SIZE, captured.vocab_size), answer, guesses), kv)
        assert answer.tolist() == [[1, token, 0] for token in known]
        assert torch.equal(found.finish().argmax, expected.argmax)
        part = found.at([0, 1, 3], [1])
        assert torch.equal(part.finish().argmax, expected.argmax[[0, 1, 3]])
        torch.testing.assert_close(part.finish().logits.cpu(), expected.logits[[1]].cpu(), rtol=0.02, atol=0.02)  # pyright: ignore


DRAWING = {
    "best": None,
    "drawn": Draws(torch.tensor([0.7, 0.0]), torch.tensor([noise.stream(5, 0), noise.stream(6, 0)]), torch.tensor([10, 20]), 60),
}


@pytest.mark.parametrize("drawing", DRAWING.values(), ids=DRAWING)
def test_captured_chains_are_chains_by_steps(gpu: str, drawing: Draws | None) -> None:
    captured, _ = pair(gpu)
    reference = small_network("qwen3", hidden_size=64, intermediate_size=96)
    for seed, counts in enumerate(([4, 2], [4, 4], [3, 4])):
        kv, other = captured.allocate(32, BLOCK_SIZE), reference.allocate(32, BLOCK_SIZE)
        nothing = torch.zeros(0, dtype=torch.int64)
        batch = dataclasses.replace(rows(3, 2, seed=seed), logits_indices=torch.tensor([2, 4]), full_logits=nothing)
        expected = run_chain_by_steps(reference, batch, other, torch.tensor(counts), drawing)
        found = captured.run_chain(batch, kv, torch.tensor(counts), drawing)
        for chain, count in enumerate(counts):
            assert found.token_ids[chain, :count].tolist() == expected.token_ids[chain, :count].tolist()
            torch.testing.assert_close(found.confidence[chain, :count], expected.confidence[chain, :count], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("draws", [False, True], ids=DRAWING)
def test_chains_go_on_behind_a_step_that_nobody_has_seen_the_end_of(device: str, draws: bool) -> None:
    """Of what is read, and where from, the host knows nothing; behind it stands padding, for nothing was accepted of the second draft."""
    reference = GraphExecutor(small_network())
    network = GraphExecutor(small_network(device=device, kernels=TritonKernels()))
    ways = [Continuation(0, 5, 3, 2, 0, array("i", (1, 2, 3, 4)), 0, 3), Continuation(1, 9, 3, 0, 3, array("i", (5, 6, 7, 8)), 0, 2)]
    answer = torch.tensor([[4, 1, 2, 3, 4, 0, 1, 2, 3], [1, 6, 0, 0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    prompts = ragged([(list(range(8)), 0, [1, 2, 3, 4]), (list(range(20, 29)), 0, [5, 6, 7, 8])], all_logits=False)
    prompts = dataclasses.replace(prompts, full_logits=torch.zeros(0, dtype=torch.int64))
    found: list[list[list[int]]] = []
    for executor in (reference, network):
        kv = executor.allocate(32, BLOCK_SIZE)
        executor.run(prompts, kv)
        at = executor.device
        drawn = ChainDraws(torch.tensor([0.9, 0.0], device=at), torch.arange(6, device=at).view(2, 3)) if draws else None
        for _ in range(2):  # the second time it is a replay
            there = continued(Ways.of(ways, at, BLOCK_SIZE, 90, 100), answer.to(at))
            chains = executor.start_chain(there.batch, kv, there.counts, 3, drawn, 90 if draws else None)
            tokens = chains.token_ids.tolist()
            found.append([tokens[0][:3], tokens[1][:2]])
            assert there.num_accepted.tolist() == [3, 0] and there.counts.tolist() == [3, 2]
    assert found[1:] == found[:1] * 3


def test_capturing_beforehand_says_what_it_took(gpu: str) -> None:
    captured, _ = pair(gpu)
    kv = captured.allocate(32, BLOCK_SIZE)
    lines: list[str] = []
    captured.capture(kv, (), most_rows=4, tokens_per_row=3, progress=lines.append)
    before = captured.captured.num_graphs
    assert before >= 6 and lines == [captured.captured.describe()]
    captured.run(rows(1, 1, 1), kv)
    assert captured.captured.num_graphs == before, "a pass that was to be ready was captured anew"


def test_passes_of_a_patient_executor_are_those_of_the_ops_before_and_after_it_records(gpu: str) -> None:
    captured, eager = pair(gpu)
    captured.be_patient()
    kv, other = captured.allocate(32, BLOCK_SIZE), eager.allocate(32, BLOCK_SIZE)
    firsts = torch.tensor([2, 0], dtype=torch.int32)
    for turn in range(PATIENCE + 2):
        batches = [rows(5, 1, 7, seed=turn), dataclasses.replace(rows(5, 6, seed=turn), first_places=firsts)]
        for batch in batches:
            found, expected = captured.run(batch, kv, (2,)), eager.run(batch, other, (2,))
            assert torch.equal(found.argmax, expected.argmax), f"turn {turn}"
            torch.testing.assert_close(found.hidden[2], expected.hidden[2], rtol=0.02, atol=0.02)
        assert captured.captured.num_graphs == (2 if turn >= PATIENCE else 0)
