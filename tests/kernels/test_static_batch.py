import dataclasses
import random
from collections.abc import Callable

import pytest
import torch
from decoding import ragged
from recurrent_batches import BLOCKS, MOST_GUESSES, SLOTS_OF_A_ROW, Row, random_rows, recurrent_batch
from small_networks import small_network

from foretoken.kernels.layout import RaggedBatch, StateRoom
from foretoken.kernels.static_batch import STATES, TOKEN_COUNTS, BlockTables, Ladder, Rung, StaticBatch
from foretoken.kernels.torch_executor import TorchExecutor, full_logits
from foretoken.kernels.triton import attention

BLOCK_SIZE, NUM_BLOCKS = 4, 40
CPU = torch.device("cpu")
FAMILIES = ("llama", "gemma2", "qwen3")


def prompts(executor: TorchExecutor) -> RaggedBatch:
    """Three rows from the start."""
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(executor.vocab_size, (n,), generator=generator).tolist() for n in (5, 1, 9)]
    return ragged([(text, 0, [row, row + 10, row + 20]) for row, text in enumerate(texts)])


def later(executor: TorchExecutor) -> RaggedBatch:
    """One token of a row, a chain of three of the next, and a tree of four behind one token of the last."""
    generator = torch.Generator().manual_seed(4)
    lengths, starts = (1, 3, 5), (5, 1, 9)
    rows = [
        (torch.randint(executor.vocab_size, (n,), generator=generator).tolist(), start, [row, row + 10, row + 20, row + 30])
        for row, (n, start) in enumerate(zip(lengths, starts, strict=True))
    ]
    batch = ragged(rows)
    mask, positions = batch.tree_mask.clone(), batch.positions.clone()
    mask[5:] = torch.tensor([0b0001, 0b0010, 0b0101, 0b1101])
    positions[5:] = torch.tensor([10, 10, 11, 12])
    return dataclasses.replace(
        batch, tree_mask=mask, positions=positions, num_causal=torch.tensor([1, 3, 1], dtype=torch.int32),
        logits_indices=torch.tensor([0, 1, 3, 4, 8]), full_logits=torch.tensor([1, 4]),
    )


@pytest.mark.parametrize("rung", [Rung(9, 9, 9), Rung(12, 12, 12), Rung(32, 8, 32), Rung(32, 8, 5)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_computes_what_the_batch_does(family: str, rung: Rung) -> None:
    executor = small_network(family)
    kv, padded_kv = executor.allocate(NUM_BLOCKS, BLOCK_SIZE), executor.allocate(NUM_BLOCKS, BLOCK_SIZE)
    first, second = prompts(executor), later(executor)
    hidden = (0, 2)
    for batch in (kv, padded_kv):
        executor.run(first, batch)
    expected = executor.run(second, kv, hidden)

    static = StaticBatch(rung, BlockTables(40, 8, CPU), BLOCK_SIZE)
    for garbage in (first, second):  # what an earlier batch left behind may not show
        if rung.holds(garbage):
            static.fill(garbage)
    static.fill(second)
    assert len(static.batch.token_ids) == rung.tokens and len(static.batch.logits_indices) == rung.scores
    assert len(static.batch.seq_lens) == rung.rows
    computed = executor.compute(static.batch, padded_kv, hidden)
    wanted = len(second.logits_indices)
    torch.testing.assert_close(computed.argmax[:wanted], expected.argmax)
    torch.testing.assert_close(computed.top[:wanted], expected.top)
    torch.testing.assert_close(full_logits(computed, second.full_logits), expected.logits)
    for boundary in hidden:
        torch.testing.assert_close(computed.hidden[boundary][: len(second.token_ids)], expected.hidden[boundary])
    slots = torch.cat([first.slot_mapping, second.slot_mapping])
    for layer in range(len(executor.kv_layers)):
        torch.testing.assert_close(padded_kv.gather(layer, slots), kv.gather(layer, slots))


def test_an_empty_rung_writes_nowhere() -> None:
    executor = small_network()
    kv = executor.allocate(4, BLOCK_SIZE)
    for cache in (*kv.k, *kv.v):
        cache.fill_(7.0)
    executor.compute(StaticBatch(Rung(6, 6, 6), BlockTables(6, 4, CPU), BLOCK_SIZE).batch, kv)
    assert all(bool((cache == 7.0).all()) for cache in (*kv.k, *kv.v))


@pytest.mark.parametrize("between", ["nothing", "fewer", "other", "device", "wider"])
def test_tables_are_sent_only_where_the_device_has_others(between: str) -> None:
    """Whoever filled them last: this batch, another that shares them, or the device itself."""

    def batch(*blocks: list[int]) -> RaggedBatch:
        return ragged([([1], 0, row) for row in blocks])

    tables = BlockTables(8, 8, CPU)
    first, second = (StaticBatch(Rung(size, size, size), tables, BLOCK_SIZE) for size in (4, 8))
    first.fill(batch([3, 4], [5, 6]))
    match between:
        case "fewer":
            second.fill(batch([3, 4]))
        case "other":
            second.fill(batch([7, 8], [5, 6]))
        case "device":
            first.take(batch([7, 8], [9, 2]))
        case "wider":
            first.fill(batch([3, 4, 1], [5, 6, 2]))
        case _:
            tables.memory[0, 0] = 99  # seen as long as nothing is sent
    first.fill(batch([3, 4], [5, 6]))
    assert first.batch.block_tables[:2, :2].tolist() == [[99 if between == "nothing" else 3, 4], [5, 6]]


def test_the_ladder() -> None:
    ladder = Ladder((1, 2, 4, 8))
    assert [ladder.up(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, None]
    assert ladder.below(3).counts == (1, 2, 4) and ladder.below(100).counts == ladder.counts
    assert ladder.rung(prompts(small_network())) is None  # 15 tokens
    assert Ladder((16,)).rung(prompts(small_network())) == Rung(16, 4, 16)  # 15 tokens in 3 rows
    assert [ladder.rung_of(8, rows, 8) for rows in (1, 2, 3, 8)] == [Rung(8, 1, 8), Rung(8, 2, 8), Rung(8, 4, 8), Rung(8, 8, 8)]
    assert ladder.rung_of(2, 5, 2) == Rung(8, 8, 8) and ladder.rung_of(9, 1, 1) is ladder.rung_of(1, 1, 9) is None
    assert Ladder((16,)).chain_rung(prompts(small_network())) == Rung(16, 16, 16)
    assert Ladder((4, 16)).chain_rung(prompts(small_network())) == Rung(16, 4, 4)


def test_scores_come_in_few_numbers() -> None:
    def scores(tokens: int) -> list[int]:
        return sorted({rung.scores for wanted in range(tokens + 1) if (rung := Ladder().rung_of(tokens, 1, wanted)) is not None})

    assert [scores(tokens) for tokens in (1, 16, 96, 128, 384, 512)] == [[1], [16], [96], [64, 128], [64, 384], [64, 256, 512]]


@pytest.mark.parametrize("has_firsts", [False, True])
def test_every_tensor_lies_where_kernels_want_it(has_firsts: bool) -> None:
    """Or a kernel is built anew for each mix of sizes."""
    for tokens in TOKEN_COUNTS:
        static = StaticBatch(Rung(tokens, -(-tokens // 2), tokens, has_firsts), BlockTables(tokens, 5, CPU), BLOCK_SIZE)
        values = [getattr(static.batch, field.name) for field in dataclasses.fields(static.batch)]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        assert len(tensors) == 10 + has_firsts and all(tensor.data_ptr() % 16 == 0 for tensor in tensors), tokens


@pytest.mark.parametrize("first_places", [None, [2, 0, 1]])
def test_first_places_are_those_of_the_batch(first_places: list[int] | None) -> None:
    executor = small_network()
    static = StaticBatch(Rung(16, 16, 16, has_firsts=True), BlockTables(16, 8, CPU), BLOCK_SIZE)
    given = None if first_places is None else torch.tensor(first_places, dtype=torch.int32)
    static.fill(dataclasses.replace(later(executor), first_places=torch.tensor([9, 9, 9], dtype=torch.int32)))
    static.fill(dataclasses.replace(later(executor), first_places=given))
    assert static.batch.first_places is not None
    assert static.batch.first_places.tolist() == [*(first_places or [0, 0, 0]), *[0] * 13]


def test_rungs_without_first_places_take_no_batch_that_has_some() -> None:
    batch = dataclasses.replace(later(small_network()), first_places=torch.tensor([2, 0, 1], dtype=torch.int32))
    ladder = Ladder((16,))
    assert ladder.rung(batch) == Rung(16, 4, 16, has_firsts=True) and ladder.chain_rung(batch) == Rung(16, 16, 16, has_firsts=True)
    assert not Rung(16, 16, 16).holds(batch) and Rung(16, 16, 16, has_firsts=True).holds(batch)
    assert StaticBatch(Rung(16, 16, 16), BlockTables(16, 8, CPU), BLOCK_SIZE).batch.first_places is None


@pytest.mark.parametrize("has_firsts", [False, True])
def test_what_lies_on_the_device_is_taken_like_what_comes_from_the_host(has_firsts: bool) -> None:
    executor = small_network()
    filled, taken = (StaticBatch(Rung(16, 8, 8, has_firsts), BlockTables(40, 8, CPU), BLOCK_SIZE) for _ in range(2))
    for batch in (later(executor), prompts(executor)):  # the second one is what the first one leaves room behind
        if has_firsts:
            batch = dataclasses.replace(batch, first_places=torch.tensor([1, 0, 0], dtype=torch.int32))
        batch = dataclasses.replace(batch, logits_indices=batch.logits_indices[:3])
        filled.fill(batch)
        taken.take(batch)
        for field in dataclasses.fields(RaggedBatch):
            found, expected = getattr(taken.batch, field.name), getattr(filled.batch, field.name)
            assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected, field.name


class _Noted:
    """A kernel of which only the builds are wanted."""

    def __init__(self) -> None:
        self.builds: set[tuple[tuple[str, object], ...]] = set()

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **constants: self.builds.add(tuple(constants.items()))


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (16, 16), (28, 4)])
@pytest.mark.parametrize(("most_tokens", "most_rows"), [(2048, 128), (4096, 33), (600, 1)])
def test_the_samples_of_a_ladder_take_every_kernel_of_attention(
    heads: int, kv_heads: int, most_tokens: int, most_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one would be built while requests wait."""
    ladder, kernel = Ladder(), _Noted()
    monkeypatch.setattr(attention, "attend", kernel)
    monkeypatch.setattr(attention, "join", kernel)

    def attend(rung: Rung) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        batch = StaticBatch(rung, BlockTables(rung.rows, 512, torch.device("meta")), 16).batch
        cache = empty(16, kv_heads, 128)
        attention.ragged_paged_attention(empty(rung.tokens, heads, 128), cache, cache, batch, 0.1)

    for rung in ladder.samples(most_tokens, most_rows):
        attend(rung)
    known = set(kernel.builds)
    dice = random.Random(0)
    for _ in range(1500):
        rows = dice.randint(1, most_rows)
        tokens = min(most_tokens, dice.choice([rows, rows * dice.randint(1, 8), dice.randint(rows, 700), dice.randint(rows, 4096)]))
        attend(ladder.rung_of(tokens, rows, rows) or Rung(tokens, rows, rows))
    assert len(known) > 2 and kernel.builds == known


def recurrent_rows(seed: int) -> RaggedBatch:
    return recurrent_batch(random_rows(seed, 5))


@pytest.mark.parametrize("seed", range(4))
def test_a_padded_batch_goes_on_from_states_and_leaves_them_as_the_batch_does(seed: int) -> None:
    network, room, batch = small_network("qwen3_5"), StateRoom(5 * SLOTS_OF_A_ROW, MOST_GUESSES), recurrent_rows(seed)
    own, padded = (network.allocate(5 * BLOCKS, BLOCK_SIZE, room) for _ in range(2))
    static = StaticBatch(Rung(64, 16, 64), BlockTables(40, BLOCKS, CPU), BLOCK_SIZE, has_states=True)
    static.fill(recurrent_rows(seed + 100))
    static.fill(batch)
    generator = torch.Generator().manual_seed(seed)
    for caches in zip((*own.k, *own.v, *own.states, *own.guesses), (*padded.k, *padded.v, *padded.states, *padded.guesses), strict=True):
        caches[0].copy_(torch.randn(caches[0].shape, generator=generator))
        caches[1].copy_(caches[0])
    expected, found = network.run(batch, own), network.compute(static.batch, padded)
    torch.testing.assert_close(found.top[: len(batch.logits_indices)], expected.top)
    for caches in zip((*own.states, *own.guesses), (*padded.states, *padded.guesses), strict=True):
        torch.testing.assert_close(*caches)


def test_padding_has_no_states() -> None:
    filled, taken = (StaticBatch(Rung(64, 16, 64), BlockTables(40, BLOCKS, CPU), BLOCK_SIZE, has_states=True) for _ in range(2))
    batches = [recurrent_rows(0), dataclasses.replace(recurrent_rows(1), states=None), recurrent_rows(2)]
    for batch in (None, *batches):
        if batch is not None:
            filled.fill(batch)
            taken.take(batch)
        for static in (filled, taken):
            states = static.batch.states
            assert states is not None
            rows = 0 if batch is None or batch.states is None else len(batch.seq_lens)
            for name in ("sources", "targets", "copy_slots"):
                assert getattr(states, name)[rows:].tolist() == [-1] * (16 - rows), name
            assert not states.accepted[rows:].any()
            if batch is not None and batch.states is not None:
                for name in STATES:
                    assert torch.equal(getattr(states, name)[:rows], getattr(batch.states, name)), name
            views = [getattr(states, name) for name in STATES]
            assert all(view.data_ptr() % 16 == 0 for view in views)


def test_rows_whose_batch_has_no_states_know_all_of_their_tokens() -> None:
    network, batch = small_network("qwen3_5"), dataclasses.replace(recurrent_batch([Row([3, 4, 5], 0, 3), Row([6], 0, 1)]), states=None)
    static = StaticBatch(Rung(8, 4, 8), BlockTables(4, BLOCKS, CPU), BLOCK_SIZE, has_states=True)
    static.fill(recurrent_batch([Row([1, 2], 4, 1, 0, 1, 0b1)]))
    static.fill(batch)
    assert static.batch.states is not None and (static.batch.states.num_known > 64).all()
    own, padded = (network.allocate(2 * BLOCKS, BLOCK_SIZE, StateRoom(2, 2)) for _ in range(2))
    torch.testing.assert_close(network.compute(static.batch, padded).top[:4], network.run(batch, own).top)


def test_other_networks_send_no_states() -> None:
    static = StaticBatch(Rung(64, 16, 64), BlockTables(40, BLOCKS, CPU), BLOCK_SIZE)
    static.fill(recurrent_rows(0))
    assert static.batch.states is None
