"""What a GPU's memory is divided into, and the refusal when it does not come out. What is measured on a GPU is in tests/gpu."""

import pytest
from fake_graphs import FakeRecorder
from small_networks import small_network

from foretoken.engine.config import SchedulerConfig
from foretoken.engine.errors import ConfigError
from foretoken.engine.gpu_memory import CONTEXT_BYTES, GRAPH_BYTES, RESERVE_BYTES, GpuMemory, graph_bytes, padding, run_largest_step
from foretoken.kernels.graphs import GraphExecutor
from foretoken.kernels.layout import ForwardOutput, StateRoom

GB = 10**9

LARGEST = SchedulerConfig(max_num_batched_tokens=48, max_num_seqs=8, max_draft_tokens_per_step=12)


def plan(**changes: int | float) -> GpuMemory:
    sizes = {"total": 141 * GB, "utilization": 0.9, "free": 124 * GB, "weights": 16 * GB, "step": 2 * GB, "graphs": GB // 2}
    return GpuMemory("NVIDIA H200", **{**sizes, **changes})  # pyright: ignore[reportArgumentType]


def test_the_cache_gets_what_the_rest_leaves() -> None:
    memory = plan()
    assert memory.for_cache == int(141 * GB * 0.9) - CONTEXT_BYTES - 16 * GB - 2 * GB - GB // 2
    assert memory.require(GB, 8192) == memory.for_cache
    assert memory.describe() == (
        "126.9 GB (0.90 of 141.0 GB) less 0.5 GB context, 16.0 GB weights, 2.0 GB for a step, 0.5 GB for graphs"
    )


def test_what_others_have_counts_only_where_the_share_would_not_be_there() -> None:
    """Two servers of 0.45 each go on one GPU."""
    second = plan(utilization=0.45, free=141 * GB - 64 * GB - 17 * GB)
    assert second.for_cache == int(141 * GB * 0.45) - CONTEXT_BYTES - 16 * GB - 2 * GB - GB // 2
    late = plan(free=30 * GB)
    assert late.for_cache == 30 * GB - RESERVE_BYTES - 2 * GB - GB // 2
    assert late.describe().endswith("; other processes leave 30.0 GB of it")


def test_what_does_not_fit_is_refused_with_both_numbers() -> None:
    said = r"8\.0 GB are left for the KV cache, but one sequence of 131,072 tokens needs 17\.2 GB: .*16\.0 GB weights.*lower max_model_len"
    with pytest.raises(ConfigError, match=said):
        plan(total=30 * GB, free=13 * GB).require(17_200_000_000, 131072)


def test_the_largest_step_has_all_tokens_and_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is written, and it asks for as many whole rows of logits as a step may want."""
    executor = GraphExecutor(small_network(max_position_embeddings=64))
    seen: list[ForwardOutput] = []
    run = executor.network.run

    def kept(*args: object, **kwargs: object) -> ForwardOutput:
        seen.append(run(*args, **kwargs))  # pyright: ignore[reportArgumentType]
        return seen[-1]

    monkeypatch.setattr(executor.network, "run", kept)
    run_largest_step([executor], LARGEST, 16)
    (output,) = seen
    assert output.logits is not None and output.logits.shape == (20, executor.vocab_size)
    assert len(output.hidden) == 3 and all(len(state) == 48 for state in output.hidden.values())


def test_the_largest_step_leaves_nothing_behind() -> None:
    """A graph of it would keep the small cache, and its share of the graphs' memory, for ever."""
    executor = GraphExecutor(small_network(max_position_embeddings=64), recorder=FakeRecorder())
    run_largest_step([executor], LARGEST, 16)
    assert executor.captured.num_graphs == 0 and not executor._passes


def test_the_largest_step_of_a_recurrent_network_has_states(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = GraphExecutor(small_network("qwen3_5"))
    allocate, rooms = executor.network.allocate, []
    monkeypatch.setattr(executor.network, "allocate", lambda *given: rooms.append(given[2]) or allocate(*given))
    run_largest_step([executor], LARGEST, 16)
    assert isinstance(rooms[0], StateRoom)


def test_graphs_are_counted_by_the_scores_that_they_keep() -> None:
    """Vocabularies of 262,144 entries take twice what those of half as many do; a network without a head keeps none."""
    executor = GraphExecutor(small_network())
    row = 2 * executor.vocab_size * 4
    assert graph_bytes([executor], SchedulerConfig(max_num_seqs=8, max_draft_tokens_per_step=12)) == GRAPH_BYTES + 20 * row
    assert graph_bytes([executor, executor], SchedulerConfig()) == GRAPH_BYTES + 2 * 512 * row


def test_padding_is_written_nowhere() -> None:
    executor = small_network()
    kv = executor.allocate(2, 16)
    for cache in (*kv.k, *kv.v):
        cache.fill_(7.0)
    executor.run(padding(24, 4, 16), kv)
    assert all(bool((cache == 7.0).all()) for cache in (*kv.k, *kv.v))
