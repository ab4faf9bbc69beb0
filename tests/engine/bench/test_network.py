import torch

from foretoken.engine.bench.measurement import MACHINE, NETWORK, Effort, Subject
from foretoken.engine.bench.network import FilledNetwork, arithmetic_peaks, measure_network, thread_counts


def silent(line: str) -> None:
    pass


def test_batches_are_what_they_say(subject: Subject, effort: Effort) -> None:
    network = FilledNetwork(subject, effort)
    batch = network.batch(rows=3, new=2, context=40)
    assert batch.positions.tolist() == [40, 41] * 3 and batch.seq_lens.tolist() == [42] * 3
    assert batch.block_tables.unique().numel() == batch.block_tables.numel(), "rows share no block"
    for token in range(6):
        place = int(batch.positions[token])
        assert batch.slot_mapping[token] == batch.block_tables[token // 2, place // 16] * 16 + place % 16
    assert batch.logits_indices.tolist() == list(range(6))
    assert network.batch(rows=3, new=2, context=40, all_logits=False).logits_indices.tolist() == [1, 3, 5]


def test_the_cache_holds_something_everywhere(subject: Subject, effort: Effort) -> None:
    """A pass over places that no pass has written would be NaN, or quicker than the truth."""
    network = FilledNetwork(subject, effort)
    output = network.executor.run(network.batch(rows=3, new=1, context=64), network._cache)
    assert output.top.isfinite().all()
    k, _ = network._cache.gather(0, torch.arange(3 * 64))
    assert (k.float().abs().amax(dim=(1, 2)) > 0).all()


def test_the_bytes_of_a_token_are_those_of_the_products(subject: Subject, effort: Effort) -> None:
    network = FilledNetwork(subject, effort)
    hidden, wide, vocab = 64, 128, network.executor.vocab_size
    layer = hidden * (hidden + 2 * 32) + hidden * hidden + 3 * hidden * wide
    exact = 4 * (2 * layer + vocab * hidden)
    assert exact <= network.num_bytes <= exact * 1.1  # outputs may be padded; no second copy, no embedding row
    assert FilledNetwork(Subject(subject.model, "bf16", 1), effort).num_bytes < 0.6 * network.num_bytes


def test_every_case_is_measured(subject: Subject, effort: Effort) -> None:
    found, num_bytes = measure_network(subject, effort, silent)
    cases = {(m.level, m.case, m.x) for m in found}
    assert cases == {
        (MACHINE, "weights", 0), (MACHINE, "read", 1), (NETWORK, "decode", 48), *((NETWORK, "verification", t) for t in (1, 2, 5)),
        *((NETWORK, "rows", n) for n in (1, 3)), *((NETWORK, "context", n) for n in (32, 64, 128)), (NETWORK, "prefill", 40),
    }
    assert all(m.value.low <= m.value.median <= m.value.high and m.value.median > 0 for m in found)
    assert next(m.value.median for m in found if m.case == "weights") == num_bytes / 1e6
    (decode,) = (m for m in found if m.case == "decode")
    assert decode.ratio_to == "limit" and decode.ratio and 0 < decode.ratio.median < 1
    ones = [m.ratio.median for m in found if m.ratio and (m.case, m.x) in (("verification", 1), ("rows", 1))]
    assert ones == [1.0, 1.0]


def test_thread_counts() -> None:
    assert [thread_counts(n) for n in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


def test_arithmetic_peaks_are_per_kind_and_thread(effort: Effort) -> None:
    found = arithmetic_peaks(1, effort)
    assert {m.case for m in found} <= {"arithmetic"} and len({(m.precision, m.x) for m in found}) == len(found)
