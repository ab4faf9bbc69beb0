"""Rounds in one native call, against one pass a token and against the proposers whose guesses they are to look up."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

import numpy as np
import pytest
import torch
from native_only import native_only
from ngram_tables import Runs, counted, every_token, made_up, table_of
from paged_batches import Row, batch_of
from small_networks import random_weights, small_program

from foretoken.kernels import noise, sampling
from foretoken.kernels.execution import Execution
from foretoken.kernels.layout import KVTensors
from foretoken.kernels.native import NativeExecutor
from foretoken.kernels.ngram_table import MOST_N, NgramTable
from foretoken.kernels.noise import Purpose
from foretoken.kernels.rounds import FROM_PREDICTION, FROM_TABLE, FROM_TEXT, RoundsLimits, RoundsOutput, RoundsRow, answers, cursors
from foretoken.proposers.base import DraftContext, DraftRow, Draw
from foretoken.proposers.config import NgramConfig, PredictionConfig
from foretoken.proposers.config_entry import MAX_NUM_SPECULATIVE_TOKENS
from foretoken.proposers.ngram import NgramProposer
from foretoken.proposers.ngram_cache import LEAST_CHANCE
from foretoken.proposers.prediction import PredictionProposer

pytestmark = native_only

TOP_P = 0.9
VOCAB = 64


@dataclass
class Text:
    """One row: its prompt, how it is continued, and where it lies in the cache."""

    prompt: list[int]
    blocks: list[int]
    temperature: float = 0.0
    prediction: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    match: Literal["earliest", "latest"] = "earliest"
    most_new: int = 40
    k: int = 5  # from the prediction and from the text
    table_k: int = 0
    text_gain: float = 0.0
    trust: float = 1.0
    num_places: int = 0  # 0: all that its blocks have

    @property
    def sampling(self) -> np.ndarray:
        place = sampling.neutral(1)
        place["temperature"], place["top_p"] = self.temperature, TOP_P if self.temperature else 1.0
        place["key"] = noise.stream(len(self.prompt), 0, Purpose.TARGET)
        return place

    def plain(self, executor: NativeExecutor, kv: KVTensors) -> list[int]:
        """Prompt and continuation, one token a pass."""
        text = [*self.prompt]
        _fill(executor, kv, self)
        while len(text) < len(self.prompt) + self.most_new and (len(text) == len(self.prompt) or text[-1] not in self.stops):
            logits = _logits(executor, kv, text[-1:], len(text) - 1, self.blocks)
            place = self.sampling
            place["key"] = noise.keys(place["key"], [len(text)]).numpy()
            place["logits"] = sampling.rows_of(logits, np.array([0]))
            text.append(int(sampling.sample(place, logits.shape[1])[0]))
        return text

    def guess(self, text: list[int], cursor: PredictionProposer, call: Call) -> tuple[int, list[int], float]:
        """Who is to guess what comes next, what the proposers would say there, and how much of it will stand by the table."""
        table = call.table
        row = DraftRow("r", text, len(self.prompt), len(text), self.k, 0, [], (), Draw(0.0, 0, 0), prediction=self.prediction)
        if self.k and (predicted := cursor.propose(DraftContext([row], 0, 16)).token_ids):
            return FROM_PREDICTION, predicted, 0.0
        looked_up: list[int] = []
        if self.k:
            ngram = NgramProposer(NgramConfig(num_speculative_tokens=self.k, prompt_lookup_max=4, prompt_lookup_min=2, match=self.match))
            looked_up = ngram.propose(DraftContext([row], 0, 16)).token_ids
        if table is None or not self.table_k:
            return FROM_TEXT, looked_up, 0.0
        trust = np.float32(self.trust)
        token_ids, chances = table.chain(text, min(self.table_k, self.room(text)), LEAST_CHANCE)
        expected = np.cumsum(np.cumprod(np.array(chances, np.float32)), dtype=np.float32)
        gains = [0.0, *(float(trust * e - np.float32(price)) for e, price in zip(expected, call.prices[1:], strict=False))]
        k = gains.index(max(gains))
        if not k or (looked_up and max(gains) <= np.float32(self.text_gain)):
            return FROM_TEXT, looked_up, 0.0
        return FROM_TABLE, token_ids[:k], float(expected[k - 1])

    def room(self, text: list[int]) -> int:
        """Guesses that its places and its end leave."""
        places = self.num_places or 16 * len(self.blocks)
        return max(0, min(MAX_NUM_SPECULATIVE_TOKENS, len(self.prompt) + self.most_new - len(text) - 1, places - len(text)))


def _fill(executor: NativeExecutor, kv: KVTensors, text: Text) -> None:
    """The cache, with all but the prompt's last token."""
    if len(text.prompt) > 1:
        executor.run(batch_of([Row(text.prompt[:-1], 0, text.blocks)]), kv)


def _logits(executor: NativeExecutor, kv: KVTensors, tokens: list[int], start: int, blocks: list[int]) -> torch.Tensor:
    logits = executor.run(batch_of([Row(tokens, start, blocks)]), kv).logits
    assert logits is not None
    return logits


class Call:
    """The texts in one call after another."""

    def __init__(self, executor: NativeExecutor, kv: KVTensors, texts: list[Text], table: NgramTable | None = None) -> None:
        self.executor, self.kv, self.texts, self.table = executor, kv, texts, table
        self.prices = [0.0] * (1 + MAX_NUM_SPECULATIVE_TOKENS + 6)
        self.said = [array("i", [*text.prompt, *[-1] * text.most_new]) for text in texts]
        self.lengths = [len(text.prompt) for text in texts]
        self.cursors = [(0, 0, len(text.prompt)) for text in texts]
        self.failed = [False] * len(texts)
        self.interrupt = array("i", [0])
        for text in texts:
            _fill(executor, kv, text)

    def run(self, most_rounds: int, most_tokens: int = 512, most_seconds: float = 60.0) -> RoundsOutput:
        kept: list[array[int]] = []
        packed = bytearray()
        for text, said, length, cursor in zip(self.texts, self.said, self.lengths, self.cursors, strict=True):
            arrays = [array("i", numbers) for numbers in (text.blocks, text.prediction, text.stops)]
            kept += arrays
            (table, num_blocks), (prediction, num_predicted), (stops, num_stops) = (numbers.buffer_info() for numbers in arrays)
            packed += RoundsRow(
                said.buffer_info()[0], table, prediction, stops, len(text.prompt), length, text.most_new - length + len(text.prompt),
                num_blocks, text.num_places or 16 * num_blocks, num_stops, num_predicted, *cursor, text.k, text.k, 2, 4,
                text.match == "latest", text.table_k, text.text_gain, text.trust,
            ).packed(text.sampling.tobytes())
        limits = RoundsLimits(most_rounds, most_tokens, most_seconds, False, self.prices)
        output = self.executor.run_rounds(packed, self.kv, limits, self.interrupt, self.table)
        self.cursors = cursors(packed)
        self.failed = [bool(has_failed) for _, _, has_failed in answers(packed)]
        self.lengths = [length + num_new for length, (num_new, _, _) in zip(self.lengths, answers(packed), strict=True)]
        return output

    def text(self, row: int) -> list[int]:
        return self.said[row][: self.lengths[row]].tolist()


def network(dtype: torch.dtype = torch.float32) -> tuple[NativeExecutor, KVTensors]:
    program = small_program(vocab_size=VOCAB, max_position_embeddings=160)
    executor = NativeExecutor(program, random_weights(program), Execution(dtype))
    return executor, executor.allocate(64, 16)


def texts(rng: random.Random, count: int, **settings: object) -> list[Text]:
    """Prompts that repeat themselves, in blocks in no order."""
    blocks = rng.sample(range(64), 64)
    found: list[Text] = []
    for i in range(count):
        phrase = [rng.randrange(VOCAB) for _ in range(6)]
        prompt = phrase + [rng.randrange(VOCAB) for _ in range(rng.randrange(4, 12))] + phrase[: rng.randrange(2, 6)]
        found.append(Text(prompt, blocks[6 * i : 6 * i + 6], **settings))  # type: ignore[arg-type]
    return found


def check(call: Call, outputs: list[RoundsOutput], starts: list[list[int]], is_tight: bool = False) -> int:
    """Every text is what one pass a token says, and every draft what its proposer would have guessed. Returns how many there were.

    is_tight: passes may be too short for whole guesses.
    """
    num_drafts = 0
    for row, text in enumerate(call.texts):
        plain = text.plain(call.executor, call.kv)
        said = call.text(row)
        assert said == plain[: len(said)]
        cursor = PredictionProposer(PredictionConfig(num_speculative_tokens=text.k))
        ends = [start[row] for start in starts[1:]] + [len(said)]
        for output, start, end in zip(outputs, starts, ends, strict=False):
            drafts = {start[row] + draft.first: draft for draft in output.drafts if draft.row == row}
            at = start[row]
            while at < end:
                source, guess, expected = text.guess(plain[:at], cursor, call)
                guess = list(takewhile(lambda token: 0 <= token < VOCAB, guess))[: text.room(plain[:at])]
                draft = drafts.pop(at, None)
                assert draft is not None or not guess or is_tight, f"nobody guessed at {at}"
                at += 1
                if draft is None:
                    continue
                assert draft.source == source and (draft.drafted == len(guess) or is_tight)
                guess = guess[: draft.drafted]
                assert len(guess) == draft.drafted and (is_tight or draft.expected == pytest.approx(expected, rel=1e-5))
                right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(guess, plain[at - 1 :], strict=False)))
                assert draft.emitted == right and draft.accepted >= right
                at += right
                num_drafts += 1
            assert not drafts, "guesses in the midst of others"
    return num_drafts


def until_one_ends(call: Call, rng: random.Random) -> tuple[list[RoundsOutput], list[list[int]]]:
    """Calls of a few rounds each, and how long the rows were before each."""
    outputs, starts = list[RoundsOutput](), list[list[int]]()
    while all(length < len(text.prompt) + text.most_new for length, text in zip(call.lengths, call.texts, strict=True)):
        starts.append([*call.lengths])
        outputs.append(call.run(rng.randrange(1, 8)))
    return outputs, starts


@pytest.mark.parametrize("temperature", [0.0, 0.4])
@pytest.mark.parametrize("match", ["earliest", "latest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_texts_are_those_of_one_pass_a_token(dtype: torch.dtype, match: str, temperature: float) -> None:
    rng = random.Random(3)
    call = Call(*network(dtype), texts(rng, 5, match=match, temperature=temperature))
    outputs, starts = until_one_ends(call, rng)
    assert check(call, outputs, starts) > 20
    assert sum(sum(output.tokens) for output in outputs) > sum(len(output.tokens) for output in outputs) * 5, "nobody guessed"


def test_a_row_that_ends_leaves_the_others_alone() -> None:
    call = Call(*network(), texts(random.Random(5), 4))
    call.texts[1].most_new = 3
    output = call.run(100)
    assert call.lengths == [len(text.prompt) + text.most_new for text in call.texts]
    assert check(call, [output], [[len(text.prompt) for text in call.texts]]) > 0
    assert output.tokens[-1] < 4 * 6 and len(output.tokens) == len(output.seconds) < 100


def test_a_stop_token_is_the_last_one() -> None:
    executor, kv = network()
    (text,) = texts(random.Random(7), 1)
    plain = text.plain(executor, kv)
    text.stops = [63, plain[len(text.prompt) + 9]]
    call = Call(executor, kv, [text])
    call.run(100)
    end = next(i for i in range(len(text.prompt), len(plain)) if plain[i] in text.stops)
    assert call.text(0) == plain[: end + 1]


@pytest.mark.parametrize("change", ["none", "inserted", "left out", "other", "foreign token"])
def test_predictions_are_followed_as_the_proposer_does(change: str) -> None:
    executor, kv = network()
    rng = random.Random(11)
    (text,) = texts(rng, 1, temperature=2.0)
    prediction = text.plain(executor, kv)[len(text.prompt) :]
    match change:
        case "inserted":
            prediction[12:12] = [1, 2, 3]
        case "left out":
            del prediction[10:14]
        case "other":
            prediction[15] = (prediction[15] + 1) % 64
        case "foreign token":
            prediction[8] = 64_000
    text.prediction = prediction
    call = Call(executor, kv, [text])
    outputs, starts = list[RoundsOutput](), list[list[int]]()
    while call.lengths[0] < len(text.prompt) + text.most_new:
        starts.append([*call.lengths])
        outputs.append(call.run(2))
    drafts = [draft for output in outputs for draft in output.drafts]
    assert check(call, outputs, starts) and all(draft.source == FROM_PREDICTION for draft in drafts if draft.accepted > 3)
    assert sum(draft.accepted for draft in drafts) > 15


def test_rows_without_a_place_left_stop_where_they_are() -> None:
    call = Call(*network(), texts(random.Random(13), 2))
    call.texts[0].num_places = len(call.texts[0].prompt) + 2
    call.run(100)
    assert call.lengths[0] == len(call.texts[0].prompt) + 3 and not any(call.failed)
    assert check(call, [], []) == 0


def test_no_round_begins_when_its_time_is_up() -> None:
    call = Call(*network(), texts(random.Random(3), 2))
    assert len(call.run(20, most_seconds=0.0).tokens) == 1


def test_scores_that_are_not_finite_end_it_behind_what_is_sound() -> None:
    program = small_program(vocab_size=VOCAB)
    weights = random_weights(program)
    name = next(name for name in weights if "embed" in name)
    (text,) = texts(random.Random(7), 1)
    sound = NativeExecutor(program, weights, Execution(torch.float32))
    plain = text.plain(sound, sound.allocate(64, 16))
    new = plain[len(text.prompt) :]
    bad = next(token for token in new if token not in text.prompt)
    weights[name] = weights[name].clone()
    weights[name][bad] = float("nan")  # of a token that comes later: what follows it cannot be computed
    executor = NativeExecutor(program, weights, Execution(torch.float32))
    call = Call(executor, executor.allocate(64, 16), [text])
    call.run(100)
    assert call.failed == [True] and call.text(0) == plain[: call.lengths[0]]
    assert call.lengths[0] <= plain.index(bad) + 1
    call.run(1)
    assert call.failed == [True]


def test_nothing_is_looked_up_where_nothing_may_be_guessed() -> None:
    call = Call(*network(), texts(random.Random(3), 3, k=0))
    output = call.run(10)
    assert not output.drafts and set(output.tokens) == {3} and FROM_TEXT == 1


def half_right(rng: random.Random, plain: list[list[int]], max_n: int) -> Runs:
    """What follows in these texts, and other things."""
    return {**made_up(rng, 20, max_n, VOCAB), **counted(plain, max_n)}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_tables_are_followed_as_the_proposer_does(temperature: float, seed: int) -> None:
    """Rows with all kinds of settings beside each other, some without the table, some with nothing but the table."""
    rng = random.Random(seed)
    executor, kv = network(torch.bfloat16 if seed % 2 else torch.float32)
    rows = texts(rng, 8, temperature=temperature)
    max_n = (1, 2, 3, MOST_N)[seed % 4]
    plain = [text.plain(executor, kv) for text in rows]
    for i, text in enumerate(rows):
        text.k = 5 if i == 3 else rng.choice([0, 2, 5])
        text.table_k = 0 if i == 3 else rng.choice([1, 4, 12])
        text.text_gain, text.trust = rng.choice([0.0, 0.5, 0.9, 2.0]), rng.choice([0.05, 0.6, 1.0, 1.2])
        text.prediction = plain[i][len(text.prompt) + 3 :] if i == 5 else []
    call = Call(executor, kv, rows, table_of(half_right(rng, plain[:6], max_n), max_n))
    call.prices = [0.0, *sorted(rng.uniform(0.0, 1.5) for _ in range(12))] if seed > 1 else call.prices
    outputs, starts = until_one_ends(call, rng)
    assert check(call, outputs, starts) > 10
    drafts = [draft for output in outputs for draft in output.drafts]
    assert {draft.source for draft in drafts} >= {FROM_TEXT, FROM_TABLE} and 3 not in {d.row for d in drafts if d.source == FROM_TABLE}
    assert all((draft.expected > 0) == (draft.source == FROM_TABLE) for draft in drafts)
    assert sum(draft.accepted for draft in drafts if draft.source == FROM_TABLE) > 0


def test_the_surer_one_guesses_first() -> None:
    executor, kv = network()
    (text,) = texts(random.Random(3), 1, table_k=4)
    last = text.prompt[-1]
    for chance, text_gain, k, source in (
        (0.5, 0.4, 5, FROM_TABLE),
        (0.5, 0.5, 5, FROM_TEXT),  # of two that are as sure, the text
        (0.5, 0.6, 5, FROM_TEXT),
        (0.5, 0.6, 0, FROM_TABLE),
    ):
        text.k, text.text_gain = k, text_gain
        call = Call(executor, kv, [text], table_of({(last,): (1, chance)}, 1))
        (draft,) = call.run(1).drafts
        assert draft.source == source and draft.expected == (chance if source == FROM_TABLE else 0.0)


def test_most_guesses_of_a_table_at_once() -> None:
    """As many as any proposer may have, whatever is asked for."""
    executor, kv = network()
    text = Text([1, 2, 3], list(range(9)), k=0, table_k=1000, most_new=130)
    table = table_of(counted([text.plain(executor, kv)], MOST_N), MOST_N)
    call = Call(executor, kv, [text], table)
    output = call.run(40)
    assert check(call, [output], [[3]]) and max(draft.drafted for draft in output.drafts) == MAX_NUM_SPECULATIVE_TOKENS
    assert sum(draft.accepted for draft in output.drafts) > 50


def test_a_table_guesses_no_further_than_there_is_room() -> None:
    executor, kv = network()
    rng = random.Random(13)
    rows = texts(rng, 3, k=0, table_k=12)
    table = table_of(counted([text.plain(executor, kv) for text in rows], 3), 3)
    rows[0].num_places, rows[1].most_new = len(rows[0].prompt) + 6, 9
    call = Call(executor, kv, rows, table)
    starts, outputs = [[*call.lengths]], [call.run(100)]
    assert check(call, outputs, starts) and call.lengths[0] <= len(rows[0].prompt) + 7
    tight = Call(executor, kv, rows[2:], table)
    starts, outputs = [[*tight.lengths]], [tight.run(100, most_tokens=5)]
    assert check(tight, outputs, starts, is_tight=True)
    assert max(draft.drafted for draft in outputs[0].drafts) == 4 and max(outputs[0].tokens) == 5
    alone = Call(executor, kv, rows, table)
    assert alone.run(3, most_tokens=3).tokens.tolist() == [3, 3, 3], "no room for a guess beside the rows"


def test_foreign_tokens_of_a_table_end_a_guess() -> None:
    rng = random.Random(1)
    executor, kv = network()
    rows = texts(rng, 4, k=0, table_k=8)
    plain = [text.plain(executor, kv) for text in rows]
    runs = {run: (token + VOCAB if i % 3 == 0 else token, chance) for i, (run, (token, chance)) in enumerate(counted(plain, 2).items())}
    call = Call(executor, kv, rows, table_of({**runs, (VOCAB - 1,): (2**31 - 1, 1.0)}, 2))
    starts, outputs = [[*call.lengths]], [call.run(12)]
    assert check(call, outputs, starts, is_tight=True) > 5


def test_as_many_rows_as_there_may_be() -> None:
    """Thirty-two, each with a table and a prompt of its own, one of a single token."""
    rng = random.Random(2)
    executor, kv = network()
    blocks = rng.sample(range(64), 64)
    rows = [
        Text([rng.randrange(VOCAB) for _ in range(1 + i % 9)], blocks[2 * i : 2 * i + 2], k=i % 3, table_k=1 + i % 6, most_new=15)
        for i in range(32)
    ]
    call = Call(executor, kv, rows, table_of(half_right(rng, [text.plain(executor, kv) for text in rows[::2]], 3), 3))
    starts, outputs = [[*call.lengths]], [call.run(100)]
    assert check(call, outputs, starts) > 32
    assert call.lengths == [len(text.prompt) + 15 for text in rows]


def test_without_a_table_nobody_guesses_from_one() -> None:
    call = Call(*network(), texts(random.Random(3), 2, k=0, table_k=5))
    assert not call.run(5).drafts
    call.table = table_of(every_token(random.Random(0), VOCAB), 1)
    assert len(call.run(5).drafts) == 10, "one of each row and round"
