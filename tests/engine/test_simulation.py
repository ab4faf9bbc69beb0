"""The engine's bookkeeping under thousands of random worlds, and proof that the simulator would notice broken bookkeeping."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import simulation
from hash_model import HashModel
from simulation import VOCAB, WildProposer, World, build_core, draft_model, fresh, run_alone, simulate
from variants import slow_but

from foretoken.engine import kv_cache
from foretoken.engine.config import SchedulerConfig
from foretoken.engine.kv_cache import BlockPool, KVCache
from foretoken.engine.request import Request, SamplingParams
from foretoken.kernels.layout import ForwardOutput, KVTensors, RaggedBatch
from foretoken.kernels.state_slots import RowState, StateSlots
from foretoken.proposers.config import SpeculativeConfig

NUM_SEEDS = 2000


@pytest.mark.parametrize("chunk", slow_but(range(2), range(10)))
def test_every_output_equals_the_request_run_alone(chunk: int) -> None:
    size = NUM_SEEDS // 10
    for seed in range(chunk * size, (chunk + 1) * size):
        try:
            simulate(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


class CommitsRejectedGuesses(KVCache):
    """Takes every reserved place for part of the sequence, the rejected ones too."""

    def commit(self, request_id: str, token_ids: Sequence[int], num_tokens: int, accepted: int = 0) -> None:
        super().commit(request_id, token_ids, len(self.tables[request_id].blocks) * self.block_size, accepted)


class _ForgetsToCount(BlockPool):
    def share(self, block: int) -> None:
        if self.ref_counts[block] == 0:
            super().share(block)


class SharesWithoutCounting(KVCache):
    """A second user of a cached block is not counted, so the first to leave frees it."""

    def __init__(self, num_blocks: int, *args: object) -> None:
        super().__init__(num_blocks, *args)  # type: ignore[arg-type]
        self.pool = _ForgetsToCount(num_blocks)


class LosesTheLastBlock(KVCache):
    """Closing a table leaves one block behind."""

    def free(self, request_id: str) -> None:
        blocks = self.tables[request_id].blocks
        if len(blocks) > 2:
            blocks.pop()
        super().free(request_id)


class RollsBackTooFar(KVCache):
    """Rounds down: the block with the last committed tokens goes back too."""

    def roll_back(self, request_id: str, keep: int = 0) -> None:
        table = self.tables[request_id]
        while len(table.blocks) > max(table.num_committed, keep) // self.block_size:
            self.pool.release(table.blocks.pop())


class _KeepsStalePrefixes(BlockPool):
    def take(self) -> int:
        block, _ = self.free_blocks.popitem(last=False)
        self.ref_counts[block] = 1
        return block


class ReusesWithoutEvicting(KVCache):
    """A block taken for new text is still found under its old prefix."""

    def __init__(self, num_blocks: int, *args: object) -> None:
        super().__init__(num_blocks, *args)  # type: ignore[arg-type]
        self.pool = _KeepsStalePrefixes(num_blocks)


class IgnoresTheSalt(KVCache):
    """Not a fault of bookkeeping but of isolation: see the test below."""

    def admit(self, request_id: str, token_ids: Sequence[int], salt: str = "", adapter: int = 0) -> int:
        return super().admit(request_id, token_ids, "", adapter)


class HitsTheWholePrompt(KVCache):
    """A hit that leaves nothing to compute: no logits for the first token."""

    def admit(self, request_id: str, token_ids: Sequence[int], salt: str = "", adapter: int = 0) -> int:
        return super().admit(request_id, [*token_ids, 0], salt, adapter)


def check_noticed(what: str, num_seeds: int, kv_class: type[KVCache] = KVCache) -> None:
    for seed in range(num_seeds):
        try:
            simulate(seed, kv_class)
        except Exception:
            return
    raise AssertionError(f"{num_seeds} seeds did not notice {what}")


@pytest.mark.parametrize(
    "broken",
    [CommitsRejectedGuesses, SharesWithoutCounting, LosesTheLastBlock, RollsBackTooFar, ReusesWithoutEvicting, HitsTheWholePrompt],
)
def test_a_broken_allocator_is_caught(broken: type[KVCache]) -> None:
    check_noticed(broken.__name__, 200, broken)


class LosesAcceptedGuesses(StateSlots):
    """A row goes on from where it was before its guesses stood."""

    def passed(self, name: str, accepted: int, digests: Sequence[bytes]) -> None:
        super().passed(name, 0, digests)


class ReplacesWhatIsRead(StateSlots):
    """A snapshot that a row is about to begin with is overwritten."""

    def _is_read(self, slot: int) -> bool:
        return False


class WritesWhatItReads(StateSlots):
    """A pass leaves its state where it found it: one that is run again counts its tokens twice."""

    def row(self, name: str, num_computed: int, num_known: int, is_last: bool, keeps: bool) -> RowState:
        row = super().row(name, num_computed, num_known, is_last, keeps)
        return replace(row, target=row.source) if row.source in self._seats[name].slots else row


class BelievesInBlocks(StateSlots):
    """Keys and values of a prefix are there, so its state will be, too."""

    def open(self, name: str, digests: Sequence[bytes], most: int | None = None) -> int:
        super().open(name, digests, most)
        return len(digests)


@pytest.mark.parametrize("broken", [LosesAcceptedGuesses, ReplacesWhatIsRead, WritesWhatItReads, BelievesInBlocks])
def test_states_that_go_wrong_are_noticed(broken: type[StateSlots], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "StateSlots", broken)
    check_noticed(broken.__name__, 1000)


def test_prefixes_chained_without_their_parent_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = kv_cache._digest
    monkeypatch.setattr(kv_cache, "_digest", lambda parent, tokens: real(b"", tokens))
    monkeypatch.setattr(BlockPool, "find", lambda self, digest, parent, tokens: self.by_digest.get(digest))
    check_noticed("that a block's hash ignores what came before it", 200)


def test_salts_never_share_blocks() -> None:
    def hits(kv_class: type[KVCache]) -> int:
        kv = kv_class(32, 4)
        for request_id, salt in (("a", "red"), ("b", "blue")):
            kv.admit(request_id, range(9), salt)
            assert kv.reserve(request_id, 9)
            kv.commit(request_id, range(9), 9)
        return kv.num_hit_tokens

    assert hits(KVCache) == 0
    assert hits(IgnoresTheSalt) == 8


def test_one_request_that_breaks_the_network_fails_alone() -> None:
    world = World(3)
    world.prefix_caching, world.block_size, world.config = True, 4, SchedulerConfig(64, 8, 16)
    core = build_core(world, [], SpeculativeConfig(off=True), 400, fails_on=77)
    good = [fresh(r) for r in world.requests[:4]]
    bad = fresh(world.requests[0])
    bad.request_id, bad.prompt_token_ids, bad.token_ids = "bad", (3, 77, 4), [3, 77, 4]
    for request in [good[0], bad, *good[1:]]:
        core.add_request(request)
    outputs: dict[str, list[int]] = {r.request_id: [] for r in good}
    failed = None
    while core.has_work:
        for delta in core.step(0.0):
            if delta.request_id == "bad":
                failed = delta
            else:
                outputs[delta.request_id].extend(delta.token_ids)
        core.check()
    assert failed is not None and failed.finish_reason == "error" and failed.error_code == "engine_error"
    assert failed.error is not None and "0x" not in failed.error
    for request in good:
        assert outputs[request.request_id] == run_alone(world, request)


def test_a_draft_that_breaks_the_network_costs_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(3)
    world.block_size, world.config = 4, SchedulerConfig(64, 8, 16)
    (request, *_) = world.requests
    core = build_core(world, [WildProposer(world.dice, 4, trees=False, misbehaves=False)], SpeculativeConfig(), 400)
    forward = core.runner.executor.run
    num_broken = 0

    def bears_no_guesses(batch: RaggedBatch, kv: KVTensors, hidden: tuple[int, ...] = ()) -> ForwardOutput:
        nonlocal num_broken
        if len(batch.logits_indices) > 1:
            num_broken += 1
            raise RuntimeError("too much")
        return forward(batch, kv, hidden)

    monkeypatch.setattr(core.runner.executor, "run", bears_no_guesses)
    core.add_request(fresh(request))
    output: list[int] = []
    while core.has_work:
        for delta in core.step(0.0):
            assert delta.finish_reason != "error"
            output.extend(delta.token_ids)
        core.check()
    assert num_broken and output == run_alone(world, request)


def test_a_request_without_speculation_costs_the_drafter_nothing() -> None:
    world = World(3)
    world.block_size, world.config = 4, SchedulerConfig(64, 8, 16)
    network = HashModel(VOCAB)
    drafter = draft_model("draft_model", network, 400, 4, 3)
    core = build_core(world, [drafter], SpeculativeConfig(), 400)
    for method in ("off", "auto"):
        params = SamplingParams(temperature=0, detokenize=False, ignore_eos=True, speculation={"method": method})
        core.add_request(Request(method, tuple(range(1, 11)), params, 0.0, max_tokens=8, seed=0))
        while core.has_work:
            core.step(0.0)
        assert (network.num_passes > 0) == (method == "auto")
