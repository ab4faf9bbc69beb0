"""Rounds with a draft model in one native call, against the proposer asked before every pass: the same guesses, tokens and caches."""

import random
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from native_only import native_only
from paged_batches import Row, batch_of
from small_networks import random_weights, small_program

from foretoken.kernels import noise, sampling
from foretoken.kernels.execution import Execution
from foretoken.kernels.layout import KVTensors
from foretoken.kernels.native import NativeExecutor
from foretoken.kernels.native_library import availability
from foretoken.kernels.noise import Purpose
from foretoken.kernels.rounds import FROM_DRAFT, FROM_TEXT, Drafter, RoundsLimits, RoundsOutput, RoundsRow, answers, nums_read
from foretoken.proposers.base import DraftContext, DraftRow, Draw, Feedback
from foretoken.proposers.drafting import OwnCache
from foretoken.proposers.guessing import ChainGuesser, Drawing, Network
from foretoken.proposers.learned import LearnedProposer

pytestmark = native_only

VOCAB, MOST_K, MOST_LENGTH, NUM_BLOCKS = 64, 6, 160, 64
TILE_ROWS, MOST_NEXT_BEST, ALTERNATES_PER_GUESS = 16, 4, 2
Alternate = tuple[int, int]
"""A token, and the place of the guess that it may stand instead of."""
Told = tuple[int, int, int]
"""Of a draft: tokens of the row before it, guesses, accepted ones."""


@dataclass
class Text:
    """One row: its prompt, how it is continued, and where it lies in the caches."""

    prompt: list[int]
    blocks: list[int]
    k: int = 4
    temperature: float = 0.0
    most_new: int = 40
    stops: list[int] = field(default_factory=list)
    num_places: int = 0  # 0: all that its blocks have

    @property
    def name(self) -> str:
        return str(self.blocks[0])

    @property
    def places(self) -> int:
        return self.num_places or 16 * len(self.blocks)

    @property
    def sampling(self) -> np.ndarray:
        place = sampling.neutral(1)
        place["temperature"] = self.temperature
        place["key"] = noise.stream(len(self.prompt), 0, Purpose.TARGET)
        return place


@dataclass
class Pair:
    """A target, and a draft that is nearly the same."""

    target: NativeExecutor
    draft: NativeExecutor
    settings: dict[str, Any] = field(default_factory=dict)  # samples, threshold, readable, max_length
    most_at_once: int = 1  # tokens that a pass of the target has for little more than the price of one

    def proposer(self) -> LearnedProposer:
        drawing = Drawing(VOCAB, self.settings.get("samples", False))
        network = Network(self.draft, self.draft.allocate(NUM_BLOCKS, 16))
        cache = OwnCache(self.settings.get("max_length", MOST_LENGTH), MOST_K, self.settings.get("readable", VOCAB))
        return LearnedProposer("draft", self.draft.kv_layers, cache, ChainGuesser(network, drawing, self.settings.get("threshold", 0.0)))


def pair(dtype: torch.dtype = torch.float32, unlike: float = 0.06, draft_dtype: torch.dtype | None = None, **settings: Any) -> Pair:
    """unlike: how far the draft's weights are from the target's. draft_dtype: None = the target's."""
    program = small_program(vocab_size=VOCAB, max_position_embeddings=MOST_LENGTH)
    weights, other = random_weights(program), random_weights(program, seed=1)
    near = {name: tensor if "norm" in name else tensor + unlike * other[name] for name, tensor in weights.items()}
    target, draft = NativeExecutor(program, weights, Execution(dtype)), NativeExecutor(program, near, Execution(draft_dtype or dtype))
    return Pair(target, draft, settings, TILE_ROWS if dtype == torch.bfloat16 and availability().isa == "amx" else 1)


class _Run:
    """Texts as they grow in caches of their own."""

    def __init__(self, pair: Pair, texts: list[Text]) -> None:
        self.texts, self.target, self.draft, self.proposer = texts, pair.target, pair.draft, pair.proposer()
        self.most_at_once = pair.most_at_once
        self.num_instead = 0  # alternates that were right
        self.kv = pair.target.allocate(NUM_BLOCKS, 16)
        self.said = [[*text.prompt] for text in texts]
        self.told: list[list[Told]] = [[] for _ in texts]
        for text in texts:
            if len(text.prompt) > 1:
                self.target.run(batch_of([Row(text.prompt[:-1], 0, text.blocks)]), self.kv)

    def goes_on(self, row: int) -> bool:
        text, said = self.texts[row], self.said[row]
        num_new = len(said) - len(text.prompt)
        return num_new < text.most_new and not (num_new and said[-1] in text.stops)

    @property
    def alive(self) -> list[int]:
        return [row for row in range(len(self.texts)) if self.goes_on(row)]

    @property
    def drafter(self) -> Drafter:
        assert self.proposer.drafter is not None
        return self.proposer.drafter

    @property
    def draft_kv(self) -> KVTensors:
        return self.drafter.kv


class Steps(_Run):
    """One pass after the other, with the proposer before each."""

    def step(self) -> int:
        """Returns the tokens of the passes."""
        alive = self.alive
        rows = [self._seen(row) for row in alive]
        draft = self.proposer.propose(DraftContext(rows, 10_000, 16))
        accepted: list[list[int]] = []
        emitted: list[list[int]] = []
        asked = [row.ceiling for row in rows if row.ceiling]
        spare = max(0, self.most_at_once - len(alive) - sum(asked)) // max(1, len(asked))
        num_tokens = 0
        for i, row in enumerate(alive):
            guess = draft.token_ids[draft.start_loc[i] : draft.start_loc[i + 1]]
            before = len(self.said[row])
            alternates = self._alternates(row, guess, spare)
            said, path = self._verified(row, guess, alternates)
            for token in said:
                if self.goes_on(row):
                    self.said[row].append(token)
            if guess:
                self.told[row].append((before, len(guess), len(path)))
            self.num_instead += len(guess) in path
            accepted.append(path)
            emitted.append(self.said[row][before:])
            num_tokens += 1 + len(guess) + len(alternates)
        nothing = [0] * len(alive)
        names = [row.request_id for row in rows]
        self.proposer.observe(Feedback(names, nothing, nothing, accepted, emitted, [False] * len(alive)))
        return num_tokens

    def finish(self) -> None:
        while self.alive:
            self.step()

    def num_read(self, row: int) -> int:
        return self.proposer._cache.num_known(self.texts[row].name) or 0

    def _seen(self, row: int) -> DraftRow:
        text, said = self.texts[row], self.said[row]
        length = len(said)
        ceiling = max(0, min(text.k, text.most_new - length + len(text.prompt) - 1, text.places - length))
        draw = Draw(text.temperature, len(text.prompt), 0)
        return DraftRow(text.name, said, len(text.prompt), length, ceiling, 0, array("i", text.blocks), (0,), draw)

    def _alternates(self, row: int, guess: list[int], spare: int) -> list[Alternate]:
        """What is verified beside a chain: next to its tokens the draft's best other ones, the likeliest first."""
        text, width = self.texts[row], min(spare, MOST_NEXT_BEST)
        if not guess or not width:
            return []
        read = Row([*self.said[row], *guess[:-1]], 0, text.blocks)
        logits = self.draft.run(batch_of([read]), self.draft.allocate(NUM_BLOCKS, 16)).logits
        assert logits is not None
        ranked = logits[-len(guess) :].argsort(dim=-1, descending=True, stable=True).tolist()
        best = [[token for token in tokens if token != guessed][:width] for tokens, guessed in zip(ranked, guess, strict=True)]
        found = sorted((place + rank, -place, token) for place, tokens in enumerate(best) for rank, token in enumerate(tokens))
        room = text.places - len(self.said[row]) - len(guess)
        return [(token, -place) for _, place, token in found[: max(0, min(spare, ALTERNATES_PER_GUESS * len(guess), room))]]

    def _verified(self, row: int, guess: list[int], alternates: list[Alternate]) -> tuple[list[int], list[int]]:
        """The target's tokens, and the nodes that they agree with: those of the guess, or the one behind it for any alternate."""
        known = self.said[row][-1]
        tokens: list[int] = []
        for i, token in enumerate(self._chosen(row, [known, *guess])):
            tokens.append(token)
            if i < len(guess) and token != guess[i] and (token, i) in alternates:
                return [*tokens, self._chosen(row, [known, *tokens])[-1]], [*range(i), len(guess)]
            if i == len(guess) or token != guess[i]:
                break
        return tokens, [*range(len(tokens) - 1)]

    def _chosen(self, row: int, chain: list[int]) -> list[int]:
        """The target's token behind each of the row's last one and a guess."""
        text, length = self.texts[row], len(self.said[row])
        logits = self.target.run(batch_of([Row(chain, length - 1, text.blocks)]), self.kv).logits
        assert logits is not None
        tokens: list[int] = []
        for i in range(len(chain)):
            place = text.sampling
            place["key"] = noise.keys(place["key"], [length + i]).numpy()
            place["logits"] = sampling.rows_of(logits, np.array([i]))
            tokens.append(int(sampling.sample(place, logits.shape[1])[0]))
        return tokens


class Calls(_Run):
    """Rounds, call by call."""

    def __init__(self, pair: Pair, texts: list[Text]) -> None:
        super().__init__(pair, texts)
        self.read = [0] * len(texts)
        self.interrupt = array("i", [0])

    def run(self, most_rounds: int, most_tokens: int = 512, ends_with_row: bool = False, text_k: int = 0) -> RoundsOutput:
        """text_k: guesses of rows without a draft, from their own text."""
        alive, packed = self.alive, bytearray()
        kept: list[array[int]] = []
        for row in alive:
            text, said = self.texts[row], self.said[row]
            most_new = text.most_new - len(said) + len(text.prompt)
            arrays = [array("i", numbers) for numbers in ([*said, *[-1] * most_new], text.blocks, text.stops)]
            kept += arrays
            (memory, _), (table, num_blocks), (stops, num_stops) = (numbers.buffer_info() for numbers in arrays)
            packed += RoundsRow(
                memory, table, 0, stops, len(text.prompt), len(said), most_new, num_blocks, text.places, num_stops, 0, 0, 0,
                len(text.prompt), 0, 0 if text.k else text_k, 1, 3, 0, draft_k=text.k, num_read=self.read[row],
            ).packed(text.sampling.tobytes())
        output = self.target.run_rounds(
            packed, self.kv, RoundsLimits(most_rounds, most_tokens, 60.0, ends_with_row), self.interrupt, drafter=self.drafter
        )
        for draft in output.drafts:
            row = alive[draft.row]
            assert draft.source == (FROM_DRAFT if self.texts[row].k else FROM_TEXT)
            self.told[row].append((len(self.said[row]) + draft.first, draft.drafted, draft.accepted))
        for i, (row, (num_new, _, has_failed), num_read) in enumerate(zip(alive, answers(packed), nums_read(packed), strict=True)):
            assert not has_failed
            known = len(self.said[row])
            self.said[row] += kept[3 * i][known : known + num_new].tolist()
            self.read[row] = num_read
        return output


def texts(rng: random.Random, count: int, **settings: Any) -> list[Text]:
    """In blocks in no order."""
    blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    return [Text([rng.randrange(VOCAB) for _ in range(rng.randrange(1, 24))], blocks[6 * i : 6 * i + 6], **settings) for i in range(count)]


def check(calls: Calls, steps: Steps) -> None:
    """Both are where the other is: texts, drafts, and what holds in the caches."""
    assert calls.said == steps.said
    assert calls.told == steps.told
    for row, text in enumerate(calls.texts):
        if calls.goes_on(row) and text.k:
            assert calls.read[row] == steps.num_read(row)
        for mine, theirs, length in ((calls.kv, steps.kv, len(calls.said[row]) - 1), (calls.draft_kv, steps.draft_kv, calls.read[row])):
            places = torch.arange(min(length, len(calls.said[row]) - 1))
            slots = torch.tensor(text.blocks)[places // 16] * 16 + places % 16
            for layer in range(len(calls.target.kv_layers)):
                for ours, other in zip(mine.gather(layer, slots), theirs.gather(layer, slots), strict=True):
                    assert torch.equal(ours, other)


def both(pair: Pair, rows: list[Text], rng: random.Random, **options: Any) -> tuple[Calls, int]:
    """To the end in calls of a few rounds, each checked against as many steps. Returns the guesses that were right, too."""
    calls, steps = Calls(pair, rows), Steps(pair, rows)
    go_together(calls, steps, rng, **options)
    return calls, sum(accepted for told in calls.told for _, _, accepted in told)


def go_together(calls: Calls, steps: Steps, rng: random.Random, **options: Any) -> None:
    while calls.alive:
        output = calls.run(rng.randrange(1, 8), **options)
        assert len(output.tokens) == len(output.seconds) == len(output.draft_seconds) > 0
        assert output.tokens.tolist() == [steps.step() for _ in output.tokens]
        check(calls, steps)


@pytest.mark.parametrize("temperature, samples", [(0.0, False), (0.3, False), (0.7, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounds_are_steps_with_the_proposer(dtype: torch.dtype, temperature: float, samples: bool) -> None:
    rng = random.Random(3)
    rows = texts(rng, 5, temperature=temperature)
    calls, num_right = both(pair(dtype, samples=samples), rows, rng)
    num_drafted = sum(drafted for told in calls.told for _, drafted, _ in told)
    assert 20 < num_right < num_drafted - 20, "guesses were right and wrong"
    assert any(drafted == accepted == 4 for told in calls.told for _, drafted, accepted in told), "a whole draft was accepted"


@pytest.mark.parametrize("seed", range(8))
def test_any_rows_in_any_calls(seed: int) -> None:
    rng = random.Random(seed)
    rows = texts(rng, rng.randrange(1, 9))
    for text in rows:
        text.k, text.most_new, text.temperature = rng.randrange(MOST_K + 1), rng.randrange(1, 50), rng.choice([0.0, 0.5, 1.0])
        text.stops = rng.sample(range(VOCAB), rng.randrange(3))
    settings = {"unlike": rng.choice([0.02, 0.06, 1.0]), "samples": rng.random() < 0.5, "threshold": rng.choice([0.0, 0.4])}
    for dtype in (torch.float32, torch.bfloat16):
        both(pair(dtype, **settings), rows, rng)


def test_rows_of_a_tile_cost_little_where_products_are_of_tiles() -> None:
    program = small_program(vocab_size=VOCAB)
    wide = torch.bfloat16
    for execution, rows in (
        (Execution(torch.float32), 1), (Execution(wide), TILE_ROWS),
        (Execution(wide, quantization="int8"), TILE_ROWS), (Execution(wide, quantization="int4"), 1),
    ):
        executor = NativeExecutor(program, random_weights(program), execution)
        assert executor.most_at_once() == (rows if availability().isa == "amx" else 1)


@pytest.mark.parametrize("temperature, samples", [(0.0, False), (0.3, False), (0.7, True)])
@pytest.mark.parametrize("count, k, draft_dtype", [(1, 1, torch.bfloat16), (2, 3, torch.float32), (1, 6, torch.bfloat16)])
def test_where_a_tile_has_rows_left_other_tokens_are_verified_beside_a_chain(
    count: int, k: int, draft_dtype: torch.dtype, temperature: float, samples: bool
) -> None:
    rng = random.Random(15)
    network = pair(torch.bfloat16, draft_dtype=draft_dtype, samples=samples)
    rows = texts(rng, count, k=k, temperature=temperature, most_new=70)
    calls, steps = Calls(network, rows), Steps(network, rows)
    go_together(calls, steps, rng)
    assert steps.num_instead > 3 or network.most_at_once == 1


def test_a_draft_that_is_the_target_is_always_right() -> None:
    rng = random.Random(1)
    calls, num_right = both(pair(unlike=0.0), texts(rng, 3), rng)
    assert num_right == sum(drafted for told in calls.told for _, drafted, _ in told) > 60


def test_the_first_doubted_guess_is_the_last_one() -> None:
    rng = random.Random(4)
    calls, _ = both(pair(threshold=0.2), texts(rng, 4), rng)
    assert {drafted for told in calls.told for _, drafted, _ in told} == {1, 2, 3, 4}


def test_what_it_cannot_read_it_does_not_guess_behind() -> None:
    rng = random.Random(5)
    rows = texts(rng, 6)
    rows[0].prompt[-1] = 60
    calls, _ = both(pair(readable=60), rows, rng)
    assert not calls.told[0] and any(calls.told)
    assert all(max(said[:first]) < 60 for said, told in zip(calls.said, calls.told, strict=True) for first, _, _ in told)


def test_texts_that_outgrow_it_go_on_without() -> None:
    rng = random.Random(6)
    calls, _ = both(pair(max_length=30), texts(rng, 4), rng)
    assert max(first + drafted for told in calls.told for first, drafted, _ in told) == 30
    assert all(len(said) == len(text.prompt) + 40 for said, text in zip(calls.said, calls.texts, strict=True))


def test_a_stop_in_the_midst_of_a_draft_is_the_last_token() -> None:
    rng = random.Random(7)
    network = pair(unlike=0.0)
    (text,) = texts(rng, 1)
    plain, _ = both(network, [text], rng)
    text.stops = [plain.said[0][len(text.prompt) + 6]]
    calls, _ = both(network, [text], rng)
    end = plain.said[0].index(text.stops[0], len(text.prompt))
    assert calls.said[0] == plain.said[0][: end + 1]


def test_a_row_that_has_no_places_for_a_whole_draft_waits() -> None:
    """Else it would guess less than it does when the next step has given it more."""
    rng = random.Random(8)
    network, rows = pair(unlike=0.0), texts(rng, 2)
    calls, steps = Calls(network, rows), Steps(network, rows)
    rows[0].num_places = len(rows[0].prompt) + 12
    output = calls.run(100)
    assert len(calls.said[0]) == len(rows[0].prompt) + 10 and len(output.tokens) == 2
    rows[0].num_places = 0
    for _ in output.tokens:
        steps.step()
    check(calls, steps)
    calls.run(100)
    steps.finish()
    check(calls, steps)


@pytest.mark.parametrize("dtype, count", [(torch.float32, 5), (torch.bfloat16, 3)])
def test_a_pass_has_no_more_tokens_than_it_may(dtype: torch.dtype, count: int) -> None:
    rng = random.Random(9)
    network, rows = pair(dtype), texts(rng, count)
    rows[0].k, rows[0].prompt = 0, [1, 2, 3, 1, 2, 3, 1]  # it looks in its text
    calls, steps = Calls(network, rows), Steps(network, rows)
    output = calls.run(20, most_tokens=12, text_k=8)
    assert max(output.tokens) == 12
    steps.finish()
    assert all(theirs[: len(mine)] == mine for mine, theirs in zip(calls.said, steps.said, strict=True))
    calls.run(100)
    assert calls.said == steps.said


def test_another_thread_can_end_it_and_it_goes_on() -> None:
    rng = random.Random(10)
    network, rows = pair(), texts(rng, 3)
    calls, steps = Calls(network, rows), Steps(network, rows)
    for interrupted in (1, 0, 1, 1, 0):
        calls.interrupt[0] = interrupted
        output = calls.run(4)
        assert len(output.tokens) == (1 if interrupted else 4)
        for _ in output.tokens:
            steps.step()
        check(calls, steps)


def test_it_ends_with_a_row_if_somebody_waits() -> None:
    rng = random.Random(11)
    rows = texts(rng, 3)
    rows[1].most_new = 3
    calls = Calls(pair(), rows)
    calls.run(100, ends_with_row=True)
    assert len(calls.said[1]) == len(rows[1].prompt) + 3 and len(calls.alive) == 2


def test_others_look_in_their_texts_beside_it() -> None:
    rng = random.Random(12)
    network, rows = pair(), texts(rng, 4)
    for text in rows[::2]:
        text.k, text.prompt = 0, [1, 2, 3, 1, 2, 3, 1]
    steps = Steps(network, rows)
    calls = Calls(network, rows)
    calls.run(100, text_k=3)
    steps.finish()
    assert calls.said == steps.said and all(calls.told) and calls.told[1::2] == steps.told[1::2]


def test_what_comes_between_calls_is_read_in_the_next_one() -> None:
    """Tokens that a step without a drafter has brought."""
    rng = random.Random(13)
    network, rows = pair(), texts(rng, 3)
    calls, steps = Calls(network, rows), Steps(network, rows)
    calls.run(2)
    read = [*calls.read]
    for text in rows:
        text.k = 0
    calls.run(3)
    assert calls.read == read, "nobody read along"
    for text in rows:
        text.k = 4
    calls.run(100)
    steps.finish()
    assert calls.said == steps.said


def test_scores_of_a_draft_that_are_no_numbers_are_no_guesses() -> None:
    rng = random.Random(14)
    network, rows = pair(), texts(rng, 3)
    program = small_program(vocab_size=VOCAB, max_position_embeddings=MOST_LENGTH)
    broken = {name: tensor * float("nan") if "norm" in name else tensor for name, tensor in random_weights(program).items()}
    calls = Calls(Pair(network.target, NativeExecutor(program, broken, Execution(torch.float32))), rows)
    calls.run(100)
    plain, _ = both(network, rows, rng)
    assert calls.said == plain.said and not any(calls.told)
