"""The network by itself: single passes of an executor over batches made by hand, with nothing of the engine around them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from ...kernels import limits, native_library
from ...kernels.layout import KVTensors, RaggedBatch, RowStates, StateRoom
from ..config import ModelConfig
from ..model import load_executor, read_config
from ..network_plan import NetworkPlan
from .interleaved import Series, seconds_of, take_turns
from .measurement import MACHINE, NETWORK, Announce, Effort, Measurement, Subject

BLOCK = 16
READ_PASSES = 5


class FilledNetwork:
    """A loaded executor and a cache whose places all hold something, as rows of any context need."""

    def __init__(self, subject: Subject, effort: Effort) -> None:
        """Raises ConfigError, with ModelLoadError, if the model cannot be run in this precision here."""
        config = ModelConfig(str(subject.model.folder), **subject.options)  # pyright: ignore[reportArgumentType]
        self.executor, self.plan, _ = load_executor(subject.model.folder, read_config(subject.model.folder), config)
        set_threads(self.plan, subject.threads)
        self.num_bytes = self.executor.weight_bytes
        one_row = max(*effort.contexts, *effort.decode_contexts, effort.verified_context + max(effort.verified), effort.prompt_tokens)
        num_blocks = max(one_row, max(effort.rows) * (effort.rows_context + BLOCK)) // BLOCK + 1
        most_rows = max(effort.rows)
        room = StateRoom(2 * most_rows, max(effort.verified)) if self.executor.state_layers else None
        self._cache: KVTensors = self.executor.allocate(num_blocks, BLOCK, room)
        self._generator = torch.Generator().manual_seed(0)
        self._num_states = 0 if room is None else room.num_slots
        self._fill(num_blocks)

    def batch(self, rows: int, new: int, context: int, all_logits: bool = True) -> RaggedBatch:
        """As `ragged_batch`, with scores for all tokens or each row's last."""
        made = ragged_batch(self.executor.vocab_size, rows, new, context, self._generator)
        if self.executor.state_layers:
            made = replace(made, states=_states(rows, new, context))
        return made if all_logits else replace(made, logits_indices=made.query_start_loc[1:].long() - 1)

    def seconds(self, batch: RaggedBatch, slot_s: float) -> float:
        return seconds_of(lambda: self.executor.run(batch, self._cache), slot_s)

    def _fill(self, num_blocks: int) -> None:
        """One prompt, copied all over the cache: memory that was never written reads faster than any other."""
        tokens = min(512, num_blocks * BLOCK, self.executor.max_model_len)
        self.executor.run(self.batch(1, tokens, 0, all_logits=False), self._cache)
        target = torch.arange(tokens, num_blocks * BLOCK)
        self._cache.move(target % tokens, target)
        if self._num_states:
            self.executor.run(self.batch(self._num_states // 2, 1, 0), self._cache)


def _states(rows: int, new: int, context: int) -> RowStates:
    """Row r goes on from slot 2 r + 1 with one token and guesses behind it; one that begins leaves its state there."""
    slots = 2 * torch.arange(rows, dtype=torch.int32)
    none = torch.full_like(slots, -1)
    known = torch.full_like(slots, 1 if context else new)
    sources, targets = (slots + 1, slots) if context else (none, slots + 1)
    return RowStates(sources, targets, torch.zeros_like(slots, dtype=torch.int64), known, none, none)


def ragged_batch(vocab_size: int, rows: int, new: int, context: int, generator: torch.Generator | None = None) -> RaggedBatch:
    """Rows of `new` tokens each behind `context` places, blocks of their own, scores for all tokens."""
    blocks = -(-(context + new) // BLOCK)
    tables = torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks)
    positions = torch.arange(context, context + new).repeat(rows)
    row = torch.arange(rows).repeat_interleave(new)
    return RaggedBatch(
        token_ids=torch.randint(vocab_size, (rows * new,), generator=generator),
        positions=positions,
        slot_mapping=tables[row, positions // BLOCK].long() * BLOCK + positions % BLOCK,
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32) * new,
        seq_lens=torch.full((rows,), context + new, dtype=torch.int32),
        block_tables=tables,
        num_causal=torch.full((rows,), new, dtype=torch.int32),
        tree_mask=torch.zeros(rows * new, dtype=torch.int64),
        logits_indices=torch.arange(rows * new),
        full_logits=torch.zeros(0, dtype=torch.int64),
        block_size=BLOCK,
    )


def set_threads(plan: NetworkPlan, threads: int) -> None:
    """Torch's pool waits by spinning: it gets one thread where another pool computes."""
    torch.set_num_threads(1 if plan.kind == "native" else threads)
    if plan.kind == "native":
        native_library.set_threads(threads)


def thread_counts(most: int) -> tuple[int, ...]:
    """6 -> 1, 2, 4, 6"""
    return tuple(sorted({most, *(1 << i for i in range(most.bit_length()))}))


def arithmetic_peaks(threads: int, effort: Effort) -> list[Measurement]:
    """What the cores could compute if nothing had to be read."""
    found: list[Measurement] = []
    for kind, precision in zip(limits.KINDS, ("float32", "bf16", "int8"), strict=True):
        for count in thread_counts(threads):
            rates = [limits.operations_per_second(kind, count, effort.slot_s) or 0.0 for _ in range(effort.rounds)]
            if all(rates):
                value = Series(tuple(rates)).scaled(1e-12).spread
                found.append(Measurement("", precision, MACHINE, "arithmetic", count, "TOP/s", value))
    return found


def read_rates(subject: Subject, num_bytes: int, effort: Effort, announce: Announce) -> list[Measurement]:
    """How fast 1, 2, 4, ... threads read so many bytes."""
    counts = thread_counts(subject.threads)
    with limits.ReadBuffer(num_bytes) as buffer:
        found = take_turns({n: partial(buffer.read_rate, n, READ_PASSES) for n in counts}, effort.rounds)
    announce(f"reads {num_bytes / 1e6:.0f} MB at {found[subject.threads].spread.median / 1e9:.1f} GB/s")
    return [subject.measurement(MACHINE, "read", n, "GB/s", found[n].scaled(1e-9)) for n in counts]


def measure_network(subject: Subject, effort: Effort, announce: Announce) -> tuple[list[Measurement], int]:
    """All figures of passes, and the bytes of weights that one token reads. Raises as FilledNetwork does."""
    network = FilledNetwork(subject, effort)
    found = [subject.measurement(MACHINE, "weights", 0, "MB", Series((network.num_bytes / 1e6,)))]
    found += read_rates(subject, network.num_bytes, effort, announce)

    def turns(case: str, x: tuple[int, ...], batches: Callable[[int], RaggedBatch]) -> dict[int, Series]:
        announce(case)
        made = {n: batches(n) for n in x}
        return take_turns({n: partial(network.seconds, made[n], effort.slot_s) for n in x}, effort.rounds)

    found += decode(subject, network, effort, announce)

    seconds = turns("verification", effort.verified, lambda tokens: network.batch(1, tokens, effort.verified_context))
    found += [
        subject.measurement(NETWORK, "verification", t, "ms", s.scaled(1e3), seconds[1].scaled(1e3), "T=1") for t, s in seconds.items()
    ]

    seconds = turns("rows", effort.rows, lambda rows: network.batch(rows, 1, effort.rows_context))
    rates = {rows: s.rate(rows) for rows, s in seconds.items()}
    found += [subject.measurement(NETWORK, "rows", n, "tokens/s", rate, rates[1], "one row") for n, rate in rates.items()]

    seconds = turns("context", effort.contexts, lambda context: network.batch(1, 1, context))
    found += [subject.measurement(NETWORK, "context", n, "ms", s.scaled(1e3)) for n, s in seconds.items()]

    tokens = effort.prompt_tokens
    seconds = turns("prefill", (tokens,), lambda n: network.batch(1, n, 0, all_logits=False))
    found.append(subject.measurement(NETWORK, "prefill", tokens, "tokens/s", seconds[tokens].rate(tokens)))
    return found, network.num_bytes


def decode(subject: Subject, network: FilledNetwork, effort: Effort, announce: Announce) -> list[Measurement]:
    """Single tokens, each round beside a reading of as many bytes: the limit."""
    announce("decode")
    made = {context: network.batch(1, 1, context) for context in effort.decode_contexts}
    with limits.ReadBuffer(network.num_bytes) as buffer:
        cases: dict[int, Callable[[], float]] = {0: lambda: network.num_bytes / buffer.read_rate(subject.threads, READ_PASSES)}
        cases |= {context: partial(network.seconds, batch, effort.slot_s) for context, batch in made.items()}
        seconds = take_turns(cases, effort.rounds)
    limit = seconds.pop(0).rate()
    return [subject.measurement(NETWORK, "decode", n, "tokens/s", s.rate(), limit, "limit") for n, s in seconds.items()]
