"""Chains whose scores come from a head in int2, and from the head itself where they decide."""

from ctypes import c_void_p
from dataclasses import replace
from typing import Any

import pytest
import torch
from native_ops import OF_PRECISIONS, each_isa
from paged_batches import BLOCK_SIZE, Row, batch_of
from small_networks import random_weights, small_program
from torch import Tensor

from foretoken.kernels import native
from foretoken.kernels.execution import Execution
from foretoken.kernels.layout import ChainOutput, Draws, RaggedBatch
from foretoken.kernels.native import LONG_HEAD, NativeExecutor
from foretoken.kernels.program import Program

pytestmark = pytest.mark.usefixtures("two_threads")
VOCAB, PANEL, REFINED = 4099, 16, 64
STEPS = 3
Model = tuple[Program, dict[str, Tensor]]
each_execution = pytest.mark.parametrize("execution", OF_PRECISIONS.values(), ids=OF_PRECISIONS)


@pytest.fixture(scope="module", params=["tied", "own head and softcap"])
def model(request: pytest.FixtureRequest) -> Model:
    sizes: dict[str, Any] = {"hidden_size": 72, "intermediate_size": 112, "num_hidden_layers": 2, "vocab_size": VOCAB}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 512}
    family, head = ("qwen3", {}) if request.param == "tied" else ("gemma2", {"final_logit_softcapping": 5.0})
    program = small_program(family, **sizes, **head, tie_word_embeddings=request.param == "tied")
    return program, random_weights(program, seed=1)


def some_rows(count: int) -> RaggedBatch:
    """Prompts of different lengths, scores wanted behind each."""
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(VOCAB, (3 + 2 * r,), generator=generator).tolist() for r in range(count)]
    batch = batch_of([Row(text, 0, [4 * r, 4 * r + 1, 4 * r + 2]) for r, text in enumerate(texts)])
    return replace(batch, logits_indices=batch.query_start_loc[1:].long() - 1, full_logits=torch.arange(0))


def chains(executor: NativeExecutor, batch: RaggedBatch, temperature: float = 0.0) -> ChainOutput:
    rows = len(batch.seq_lens)
    draws = Draws(torch.full((rows,), temperature), torch.arange(rows), batch.seq_lens.long(), VOCAB, keep_logits=True)
    return executor.run_chain(batch, executor.allocate(96, BLOCK_SIZE), torch.full((rows,), STEPS), draws)


def shortened(model: Model, execution: Execution, isa: str | None = None) -> NativeExecutor:
    executor = NativeExecutor(*model, execution, isa)
    executor.shorten_chains(least_bytes=0)
    return executor


def panels_of(logits: Tensor) -> Tensor:
    """[V] -> [panels, 16], the last one filled up."""
    return torch.nn.functional.pad(logits, (0, -len(logits) % PANEL), value=-torch.inf).view(-1, PANEL)


@each_execution
def test_the_best_are_the_heads_own_and_the_rest_near(model: Model, execution: Execution) -> None:
    whole, short = chains(NativeExecutor(*model, execution), some_rows(5)), chains(shortened(model, execution), some_rows(5))
    assert whole.logits is not None and short.logits is not None
    assert torch.equal(whole.token_ids, short.token_ids)  # with these weights; in general nearly always
    torch.testing.assert_close(whole.confidence, short.confidence, rtol=0.2, atol=0.02)
    for own, near in zip(whole.logits.flatten(0, 1), short.logits.flatten(0, 1), strict=True):
        same = (panels_of(own) == panels_of(near)).all(-1)
        assert REFINED <= int(same.sum()) <= REFINED + 1  # one more by chance
        error = (own - near)[(~same).repeat_interleave(PANEL)[:VOCAB]]
        assert 0 < float(error.std()) < 0.45 * float(own.std())  # int2: a third of the weights' own spread
        assert float(panels_of(own).amax(-1)[~same].max()) < float(own.max())


def test_every_panel_is_refined_where_there_are_few(model: Model) -> None:
    program, weights = model
    small = replace(program, vocab_size=100, weights={n: (100, *s[1:]) if s[0] == VOCAB else s for n, s in program.weights.items()})
    cut = {name: weight[:100] if len(weight) == VOCAB else weight for name, weight in weights.items()}
    batch = some_rows(3)
    batch = replace(batch, token_ids=batch.token_ids % 100)
    execution = OF_PRECISIONS["int8"]

    def run(executor: NativeExecutor) -> ChainOutput:
        rows = len(batch.seq_lens)
        draws = Draws(torch.zeros(rows), torch.arange(rows), batch.seq_lens.long(), 100, keep_logits=True)
        return executor.run_chain(batch, executor.allocate(96, BLOCK_SIZE), torch.full((rows,), STEPS), draws)

    whole, short = run(NativeExecutor(small, cut, execution)), run(shortened((small, cut), execution))
    assert whole.logits is not None and short.logits is not None
    assert torch.equal(whole.logits, short.logits) and torch.equal(whole.confidence, short.confidence)


@each_execution
def test_any_arrangement_gives_the_same_bits(model: Model, execution: Execution) -> None:
    executor = shortened(model, execution)
    together = chains(executor, some_rows(20), temperature=0.7)
    assert together.logits is not None
    for threads in (1, 2, 3):
        native.set_threads(threads)
        few = chains(executor, some_rows(3), temperature=0.7)
        assert few.logits is not None and torch.equal(few.logits, together.logits[:3])
        assert torch.equal(few.token_ids, together.token_ids[:3]) and torch.equal(few.confidence, together.confidence[:3])


@pytest.mark.parametrize("isa", [isa for isa in native.ISAS if native.availability().isa is not None])
def test_every_instruction_set_guesses_alike(model: Model, isa: str) -> None:
    try:
        executor = shortened(model, OF_PRECISIONS["int8"], isa)
    except native.NotLowered:
        pytest.skip(f"no {isa} here")
    expected = chains(NativeExecutor(*model, OF_PRECISIONS["int8"]), some_rows(4))
    assert torch.equal(chains(executor, some_rows(4)).token_ids, expected.token_ids)


@each_execution
def test_passes_that_are_no_chain_have_the_head_itself(model: Model, execution: Execution) -> None:
    whole, short = NativeExecutor(*model, execution), shortened(model, execution)
    batch = some_rows(3)
    chains(short, batch)
    batch = replace(batch, full_logits=torch.arange(3))
    own, other = (executor.run(batch, executor.allocate(96, BLOCK_SIZE)) for executor in (whole, short))
    assert own.logits is not None and other.logits is not None
    assert torch.equal(own.logits, other.logits) and torch.equal(own.argmax, other.argmax)


def test_short_heads_stay(model: Model) -> None:
    small = NativeExecutor(*model, OF_PRECISIONS["int8"])
    before = chains(small, some_rows(2)).logits
    assert VOCAB * 72 < LONG_HEAD
    small.shorten_chains()
    after = chains(small, some_rows(2)).logits
    assert before is not None and after is not None and torch.equal(before, after)


@pytest.mark.parametrize("has_map", [False, True], ids=["tokens", "mapped columns"])
def test_draws_are_nearly_always_those_of_the_head(model: Model, has_map: bool) -> None:
    """And with the tokens among which the last round of a draw chooses refined, more often than without."""
    program, weights = model
    if has_map:
        program = replace(program, token_map="d2t", weights={**program.weights, "d2t": (VOCAB,)})
        weights = {**weights, "d2t": torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))}
    execution, batch = OF_PRECISIONS["bfloat16"], some_rows(20)
    executors = NativeExecutor(program, weights, execution), shortened((program, weights), execution)
    drawn = [chains(executor, batch, temperature=1.0) for executor in executors]
    whole, short = (chain.token_ids[:, 0] for chain in drawn)  # later ones follow other tokens
    assert (whole == short).float().mean() >= 0.9
    own, near = (chain.logits[:, 0] for chain in drawn if chain.logits is not None)
    columns = torch.argsort(weights["d2t"]) if has_map else torch.arange(VOCAB)
    for row, token in enumerate(short.tolist()):
        first = token // 128 * 128
        raced = columns[first : first + 128]
        assert torch.equal(own[row, raced], near[row, raced])


def best_panels(isa: int, x: Tensor, most: int) -> list[int]:
    found = torch.full((most + 1,), -7, dtype=torch.int32)
    assert native.load() is not None
    taken = native.load().ft_op_best_panels(isa, c_void_p(x.data_ptr()), len(x), most, c_void_p(found.data_ptr()))  # type: ignore[union-attr]
    assert (found[taken:] == -7).all()
    return sorted(found[:taken].tolist())


@each_isa
def test_best_panels(isa: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (1, 15, 16, 17, 100, 5000):
        for most in (1, 2, 7, 32, 64):
            x = torch.randn(count, generator=generator).round(decimals=1)  # with equals
            greatest = panels_of(x).amax(-1)
            order = sorted(range(len(greatest)), key=lambda panel: (-float(greatest[panel]), panel))
            assert best_panels(isa, x, most) == sorted(order[:most])
    x = torch.arange(96).float()
    x[80] = torch.nan
    assert best_panels(isa, x, 2) == [4, 5]
    assert best_panels(isa, torch.full((40,), torch.nan), 2) == [0, 1]
