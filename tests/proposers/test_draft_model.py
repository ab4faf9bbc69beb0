import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from plain_executor import PlainExecutor, PlainKV
from tokenizers import AddedToken, Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from foretoken.kernels.layout import ChainOutput, ForwardOutput, KVTensors, RaggedBatch, StateRoom
from foretoken.kernels.noise import Purpose, keys, sample, step_stream, stream
from foretoken.kernels.transformers_model import TransformersExecutor
from foretoken.proposers import draft_model
from foretoken.proposers.base import Draft, DraftContext, DraftRow, Draw, Feedback, Proposer
from foretoken.proposers.config import DraftModelConfig
from foretoken.proposers.config_entry import SpeculativeConfigError
from foretoken.proposers.guessing import length_of_chain
from foretoken.proposers.loading import Opening
from foretoken.proposers.vocabularies import check_vocabularies

VOCAB = 13
NUM_BLOCKS = 200


class PrefixKV(PlainKV[tuple[int, ...] | None]):
    """Each slot holds the whole text that its entry was computed from: wrong content cannot pass for right."""


class CheckingModel(PlainExecutor):
    """Logits are a function of the text before them. Raises if a place is read that does not hold the entry of that text."""

    def __init__(self, vocab_size: int = VOCAB, max_model_len: int = 1000, salt: int = 0) -> None:
        self.vocab_size, self.max_model_len, self.salt = vocab_size, max_model_len, salt
        self.fed: list[list[int]] = []  # tokens of every row of every pass

    def allocate(self, num_blocks: int, block_size: int, states: StateRoom | None = None) -> PrefixKV:
        return PrefixKV(num_blocks, block_size, None)

    def kv_block_bytes(self, block_size: int) -> int:
        raise NotImplementedError("these tests size the cache themselves")

    def logits(self, text: tuple[int, ...]) -> Tensor:
        return torch.tensor([hash((self.salt, *text, i)) % 10007 / 1500 for i in range(self.vocab_size)])

    def run(
        self, batch: RaggedBatch, kv: KVTensors, hidden: tuple[int, ...] = (), inputs: Mapping[str, Tensor] | None = None
    ) -> ForwardOutput:
        assert isinstance(kv, PrefixKV) and not inputs
        starts, size = batch.query_start_loc.tolist(), batch.block_size
        texts: list[tuple[int, ...]] = []
        for row, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
            table, first = batch.block_tables[row].tolist(), int(batch.seq_lens[row]) - (end - start)
            slots = [table[place // size] * size + place % size for place in range(first + end - start)]
            assert batch.slot_mapping[start:end].tolist() == slots[first:]
            assert batch.positions[start:end].tolist() == list(range(first, len(slots)))
            text = kv.slots[slots[first - 1]] if first else ()
            assert text is not None and len(text) == first, "read before it was written, or left by someone else"
            for place in range(first):
                assert kv.slots[slots[place]] == text[: place + 1], f"place {place} is not that of the text"
            self.fed.append(batch.token_ids[start:end].tolist())
            for slot, token in zip(slots[first:], self.fed[-1], strict=True):
                text = (*text, token)
                kv.slots[slot] = text
                texts.append(text)
        if not len(batch.logits_indices):
            return ForwardOutput(torch.zeros(0, dtype=torch.int64), torch.zeros(0), None)
        logits = torch.stack([self.logits(texts[i]) for i in batch.logits_indices.tolist()])
        return ForwardOutput(logits.argmax(-1), logits.amax(-1), logits[batch.full_logits] if len(batch.full_logits) else None)


def proposer_of(
    model: CheckingModel, config: DraftModelConfig, *, block_size: int = 4, return_probs: bool = False
) -> tuple[Proposer, PrefixKV]:
    kv = model.allocate(NUM_BLOCKS, block_size)
    resources: Any = SimpleNamespace(target=SimpleNamespace(vocab_size=VOCAB))
    loaded = draft_model._chains(config, resources, model, model.vocab_size, ())
    return loaded.open(Opening("draft_model", [kv], NUM_BLOCKS, block_size, return_probs)), kv


def row(
    request_id: str, tokens: Sequence[int], ceiling: int = 4, temperature: float = 0.0, seed: int = 0, blocks: Sequence[int] = range(8)
) -> DraftRow:
    return DraftRow(request_id, tokens, 1, len(tokens), ceiling, 0, blocks, (0,), Draw(temperature, seed, 0))


def by_row(draft: Draft) -> list[list[int]]:
    return [draft.token_ids[a:b] for a, b in zip(draft.start_loc, draft.start_loc[1:], strict=False)]


@dataclass
class Running:
    """One request of the pretended engine."""

    tokens: list[int]
    num_prompt: int
    table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_filled: int = 0
    claimed: int = 0


class Engine:
    """What the drafter sees of an engine: chunks, cuts, rejections, preemptions that leave cached blocks, off and on, reuse."""

    def __init__(self, seed: int) -> None:
        dice = self.dice = random.Random(seed)
        self.block_size = dice.choice([1, 2, 3, 4])
        self.k = dice.randint(1, 5)
        self.target = CheckingModel()
        self.draft_model = CheckingModel(max_model_len=dice.choice([25, 1000]))
        self.proposer, self.kv = proposer_of(self.draft_model, DraftModelConfig("D", self.k), block_size=self.block_size)
        self.free = list(range(NUM_BLOCKS))
        dice.shuffle(self.free)
        self.requests: dict[str, Running] = {}
        self.num_accepted = self.num_guessing = 0

    def step(self, number: int) -> None:
        dice, size = self.dice, self.block_size
        if len(self.requests) < 3 and dice.random() < 0.5:
            length = dice.randint(1, 14)
            self.requests[f"r{number}"] = Running([dice.randrange(VOCAB) for _ in range(length)], length)
        for name, request in list(self.requests.items()):
            if len(request.tokens) > 40 or dice.random() < 0.02:
                self.release(name, keep=0)
                del self.requests[name]
            elif dice.random() < 0.05:
                kept = dice.randint(0, min(request.claimed, len(request.tokens) - 1) // size)
                self.release(name, keep=kept)
                request.num_computed = request.num_filled = kept * size

        rows: list[DraftRow] = []
        for name, request in self.requests.items():
            missing = len(request.tokens) - request.num_computed
            scheduled = min(missing, dice.choice([1, 3, 8, 100]))
            after = request.num_computed + scheduled
            ceiling = dice.choice([0, 1, 3, 6]) if after == len(request.tokens) else 0
            while len(request.table) * size < after + ceiling:
                request.table.append(self.free.pop())
            rows.append(
                DraftRow(name, request.tokens, request.num_prompt, after, ceiling, 0, request.table, (request.num_filled,), Draw(0.0, 0, 0))
            )
        if not rows:
            return
        dice.shuffle(rows)
        draft = self.proposer.propose(DraftContext(rows, dice.choice([0, 2, 9, 1000, 1000]), size))
        self.proposer.check()
        feedback = self.verify(rows, draft)
        if dice.random() < 0.9:  # else nobody tells the drafter
            self.proposer.observe(feedback)
        self.proposer.check()

    def verify(self, rows: list[DraftRow], draft: Draft) -> Feedback:
        all_accepted: list[list[int]] = []
        all_emitted: list[list[int]] = []
        for r, guess in zip(rows, by_row(draft), strict=True):
            request = self.requests[r.request_id]
            assert len(guess) <= min(r.ceiling, self.k)
            claimed = request.claimed = draft.filled[0, r.request_id]
            assert claimed <= r.computed_after
            for place in range(claimed):
                slot = request.table[place // self.block_size] * self.block_size + place % self.block_size
                assert self.kv.slots[slot] == tuple(request.tokens[: place + 1]), "claimed as filled, but is not"
            self.num_guessing += bool(guess)
            assert not guess or r.computed_after == len(r.token_ids)
            for i, token in enumerate(guess):
                assert token == int(self.draft_model.logits((*r.token_ids, *guess[:i])).argmax())
            cut = guess[: self.dice.randint(0, len(guess))] if self.dice.random() < 0.3 else guess
            emitted: list[int] = []
            if r.computed_after == len(r.token_ids):
                while True:
                    text = (*request.tokens, *emitted)
                    emitted.append(int(self.target.logits(text).argmax()))
                    if self.dice.random() < 0.1:
                        emitted[-1] = self.dice.randrange(VOCAB)
                    if len(emitted) > len(cut) or cut[len(emitted) - 1] != emitted[-1]:
                        break
            self.num_accepted += max(len(emitted) - 1, 0)
            request.num_computed = r.computed_after + max(len(emitted) - 1, 0)
            request.tokens.extend(emitted)
            all_accepted.append(list(range(len(emitted) - 1)))
            all_emitted.append(emitted)
        for request in self.requests.values():  # roll back
            self.give_back(request, -(-request.num_computed // self.block_size))
        names = [r.request_id for r in rows]
        sizes = [b - a for a, b in zip(draft.start_loc, draft.start_loc[1:], strict=False)]
        return Feedback(names, [self.requests[n].num_computed for n in names], sizes, all_accepted, all_emitted, [False] * len(rows))

    def release(self, name: str, keep: int) -> None:
        self.proposer.forget(name)
        self.give_back(self.requests[name], keep)

    def give_back(self, request: Running, keep: int) -> None:
        """Blocks behind the first `keep`; whoever has them next writes there."""
        for block in request.table[keep:]:
            for slot in range(block * self.block_size, (block + 1) * self.block_size):
                self.kv.slots[slot] = None
            self.free.insert(0, block)
        del request.table[keep:]


@pytest.mark.parametrize("seed", range(12))
def test_the_cache_is_always_that_of_the_text(seed: int) -> None:
    """Chunked prompts, small ingestion budgets, rejections, cuts, preemptions onto cached blocks, silence, reuse of blocks."""
    engine = Engine(seed)
    for number in range(60):
        engine.step(number)
    assert engine.num_guessing > 10 and engine.num_accepted > 10


def test_a_perfect_draft_is_accepted_whole_and_reads_two_tokens_a_step() -> None:
    model = CheckingModel()
    proposer, _ = proposer_of(model, DraftModelConfig("D", 3))
    tokens = [1, 2, 3, 4]
    for step in range(5):
        model.fed.clear()
        draft = proposer.propose(DraftContext([row("r", tokens)], 100, 4))
        assert model.fed[0] == (tokens if step == 0 else tokens[-2:])
        assert [len(fed) for fed in model.fed[1:]] == [1, 1]  # the last guess is never fed
        assert draft.parents == [-1, 0, 1] and draft.source == [0, 0, 0] and draft.probs is None
        assert draft.filled == {(0, "r"): len(tokens)}
        expected: list[int] = []
        for _ in range(4):
            expected.append(int(model.logits((*tokens, *expected)).argmax()))
        assert draft.token_ids == expected[:3]
        probabilities = [torch.softmax(model.logits((*tokens, *expected[:i])), -1)[expected[i]].item() for i in range(3)]
        assert draft.confidence == pytest.approx(probabilities, abs=1e-5)
        proposer.observe(Feedback(["r"], [len(tokens) + 3], [3], [[0, 1, 2]], [expected], [False]))
        tokens += expected


def test_rows_of_all_kinds_share_one_chain_call() -> None:
    model = CheckingModel()
    proposer, _ = proposer_of(model, DraftModelConfig("D", 3))
    rows = [row("a", [1, 2, 3], 2, blocks=[0, 1]), row("b", [4] * 6, 0, blocks=[2, 3]), row("c", [5], 9, blocks=[4])]
    draft = proposer.propose(DraftContext(rows, 100, 4))
    assert [len(guess) for guess in by_row(draft)] == [2, 0, 3]
    assert model.fed[:3] == [[1, 2, 3], [4] * 6, [5]] and len(model.fed) == 3 + 2 + 1
    assert proposer.propose(DraftContext([], 100, 4)).token_ids == []


def test_the_first_unlikely_guess_is_the_last_and_is_kept() -> None:
    model, context = CheckingModel(), DraftContext([row("r", [1, 2, 3])], 100, 4)
    whole = proposer_of(model, DraftModelConfig("D", 4))[0].propose(context)
    assert whole.confidence is not None
    bar = sorted(whole.confidence)[1]
    cut = proposer_of(model, DraftModelConfig("D", 4, confidence_threshold=bar))[0].propose(context)
    count = length_of_chain(whole.confidence, bar)
    assert cut.token_ids == whole.token_ids[:count] and count < 4


def test_a_pass_that_fails_costs_nothing_but_its_guesses() -> None:
    model = CheckingModel()
    proposer, _ = proposer_of(model, DraftModelConfig("D", 3))
    context = DraftContext([row("r", [1, 2, 3])], 100, 4)
    whole = proposer.propose(context).token_ids

    def fails(*_: object) -> ChainOutput:
        raise RuntimeError("out of memory")

    run_chain, model.run_chain = model.run_chain, fails  # type: ignore[method-assign]
    fresh, _ = proposer_of(model, DraftModelConfig("D", 3))
    with pytest.raises(RuntimeError, match="out of memory"):
        fresh.propose(context)
    fresh.check()
    model.run_chain = run_chain  # type: ignore[method-assign]
    assert fresh.propose(context).token_ids == whole


def test_ids_that_the_target_does_not_have_are_never_guessed() -> None:
    model, text = CheckingModel(vocab_size=VOCAB + 40), (1, 2)
    assert int(model.logits(text).argmax()) >= VOCAB  # so that the executor's own argmax would not do
    proposer, _ = proposer_of(model, DraftModelConfig("D", 1))
    assert proposer.propose(DraftContext([row("r", text)], 100, 4)).token_ids == [int(model.logits(text)[:VOCAB].argmax())]


def test_ids_that_the_draft_does_not_have_leave_the_other_rows_alone() -> None:
    """A target may have more rows in its embedding than the draft; any request may name such an id."""
    model = CheckingModel()
    proposer, _ = proposer_of(model, DraftModelConfig("D", 2))
    rows = [row("foreign", [1, VOCAB, 2], blocks=[0, 1]), row("known", [1, 2, 3], blocks=[2, 3])]
    assert [len(guess) for guess in by_row(proposer.propose(DraftContext(rows, 100, 4)))] == [0, 2]
    assert model.fed == [[1, 2, 3], [model.fed[1][0]]]


@pytest.mark.parametrize(
    ("return_probs", "under"), [(False, stream(7, 0)), (True, step_stream(7, 0, 3, Purpose.DRAFT))], ids=["target's", "own"]
)
def test_sampling_uses_the_noise_of_the_guessed_position(return_probs: bool, under: int) -> None:
    """TARGET couples the draft with the target: the same network at the same temperature says the same. DRAFT must not."""
    model = CheckingModel()
    proposer, _ = proposer_of(model, DraftModelConfig("D", 4, draft_sample_method="probabilistic"), return_probs=return_probs)
    draft = proposer.propose(DraftContext([row("r", [1, 2, 3], temperature=0.8, seed=7)], 100, 4))
    assert len(draft.token_ids) == 4 and (draft.probs is not None) == return_probs
    for i, token in enumerate(draft.token_ids):
        logits = model.logits((1, 2, 3, *draft.token_ids[:i]))[None] / 0.8
        assert token == int(sample(logits, keys([under], [3 + i])))


@torch.no_grad()
def test_a_real_network_drafting_for_itself_is_always_right(tiny_target: Path) -> None:
    executor = TransformersExecutor.load(tiny_target, transformers.AutoConfig.from_pretrained(tiny_target), torch.float32)
    network: Any = transformers.AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [20, 21], list(range(30, 43))]
    texts = [list(prompt) for prompt in prompts]
    for text in texts:
        while len(text) < 40:
            text.append(int(network(torch.tensor([text])).logits[0, -1].argmax()))
    tables = [range(r, 48, 3) for r in range(3)]
    resources: Any = SimpleNamespace(target=SimpleNamespace(vocab_size=executor.vocab_size))
    loaded = draft_model._chains(DraftModelConfig("D", 5), resources, executor, executor.vocab_size, ())
    proposer = loaded.open(Opening("draft_model", [executor.allocate(48, 4)], 48, 4, return_probs=False))
    known = [len(prompt) for prompt in prompts]
    num_steps = 0
    while min(known) < 34:
        rows = [row(f"r{r}", text[:n], min(5, 39 - n), blocks=tables[r]) for r, (text, n) in enumerate(zip(texts, known, strict=True))]
        guesses = by_row(proposer.propose(DraftContext(rows, 10, 4)))  # too little for all three prompts at once
        emitted = [text[n : n + len(guess) + 1] for text, n, guess in zip(texts, known, guesses, strict=True)]
        assert guesses == [tokens[:-1] for tokens in emitted]
        accepted = [list(range(len(guess))) for guess in guesses]
        proposer.observe(Feedback([r.request_id for r in rows], [], [], accepted, emitted, [False] * 3))
        known = [n + len(tokens) for n, tokens in zip(known, emitted, strict=True)]
        num_steps += 1
    assert num_steps <= 9  # 5 to 6 for the longest way at 6 tokens a step, and the wait for the prompts


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], added: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.add_tokens([AddedToken(token) for token in added])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


ABC = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}
MERGES = [("a", "b"), ("b", "c")]


def test_equal_vocabularies_pass() -> None:
    check_vocabularies(_bpe(ABC, MERGES, ["<x>"]), _bpe(ABC, MERGES, ["<x>"]))


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (_bpe({**ABC, "b": 2, "c": 1}, MERGES, ["<x>"]), "token id 1 is 'b' in the target and 'c' in the draft"),
        (_bpe(ABC, MERGES), "token id 5 is '<x>' in the target and missing in the draft"),
        (_bpe(ABC, MERGES, ["<x>", "<y>"]), "token id 6 is missing in the target and '<y>' in the draft"),
        (_bpe(ABC, MERGES[::-1], ["<x>"]), "merge 0 is 'a + b' in the target and 'b + c' in the draft"),
        (_bpe(ABC, MERGES[:1], ["<x>"]), "merge 1 is 'b + c' in the target and 'missing' in the draft"),
        (_bpe({**ABC, "<x>": 5}, MERGES), "token '<x>' is an added token in the target only"),
    ],
)
def test_the_first_difference_of_vocabularies_is_named(draft: PreTrainedTokenizerFast, words: str) -> None:
    with pytest.raises(SpeculativeConfigError) as caught:
        check_vocabularies(_bpe(ABC, MERGES, ["<x>"]), draft)
    assert words in str(caught.value)
