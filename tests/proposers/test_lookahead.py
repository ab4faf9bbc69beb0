"""Lookahead decoding: its window is the papers' Jacobi iteration, its trees are trees, and what it holds of a text is bounded."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from saying import check_engine, said

from foretoken import LLM, SamplingParams
from foretoken.proposers.base import Draft, DraftContext, DraftRow, Draw, Feedback, VerifiedNodes
from foretoken.proposers.config import LookaheadConfig
from foretoken.proposers.config_entry import SpeculativeConfigError
from foretoken.proposers.config_reading import parse_speculative_config
from foretoken.proposers.lookahead import MAX_KEYS, MAX_READ_TOKENS, MAX_TOKENS_A_CALL, LookaheadProposer

Target = Callable[[Sequence[int]], int]
VOCAB = 50


def row(text: list[int], ceiling: int, num_prompt_tokens: int | None = None) -> DraftRow:
    return DraftRow("r", text, num_prompt_tokens or len(text), len(text), ceiling, 0, (), (), Draw(0.0, 0, 0))


def last_three(text: Sequence[int]) -> int:
    """A target that looks at three tokens."""
    return (text[-1] * 7 + text[-2] * 3 + text[-3] + 1) % VOCAB


def by_heart(text: Sequence[int]) -> int:
    """A target that says a text in which nothing comes twice, whatever it has read."""
    return len(text) * 7 % 1009


def step(
    proposer: LookaheadProposer, text: list[int], target: Target, ceiling: int = 64, lets_pass: Callable[[int, int], bool] = lambda *_: True
) -> Draft:
    """What an engine does of it for one row: the text grows by what is accepted, and one token more.

    lets_pass: nodes (number, token) that are verified, if their parents are, as a form allows them or a cut leaves them.
    """
    draft = proposer.propose(DraftContext([row(text, ceiling)], 0, 16))
    places, tokens, parents, paths = {-1: -1}, [], [], [text]
    for node, (token, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
        if parent in places and lets_pass(node, token):
            places[node] = len(tokens)
            tokens.append(token)
            parents.append(places[parent])
            paths.append([*paths[1 + parents[-1]], token])
    best = [target(path) for path in paths]
    accepted: list[int] = []
    emitted = [best[0]]
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == (accepted[-1] if accepted else -1) and token == emitted[-1]:
            accepted.append(node)
            emitted.append(best[1 + node])
    text += emitted
    nodes = VerifiedNodes([tokens], [parents], [2], torch.tensor([7, 7, *best]))  # another row's first
    counts = [len(text) - 1], [len(tokens)]
    proposer.observe(Feedback(["r"], *counts, [accepted], [emitted], [False], token_ids=[text], nodes=nodes))
    proposer.check()
    return draft


class Window:
    """The papers' window written out: `levels[j][c]` was guessed j steps after `levels[0][c]`, for place c + j behind the text."""

    def __init__(self, columns: Sequence[Sequence[int]]) -> None:
        self.levels = [list(level) for level in zip(*columns, strict=True)]

    def go_on(self, text: Sequence[int], target: Target) -> list[list[int]]:
        """One Jacobi iteration of all columns behind a text, which ends with the first column's first token. Their n-grams."""
        first = [text[-1], *self.levels[0][1:]]
        ngrams: list[list[int]] = []
        for c in range(len(first)):
            column = [first[c], *(level[c] for level in self.levels[1:])]
            ngrams.append([*column, target([*text[:-1], *first[:c], *column])])
        self.levels = [[ngram[1 + j] for ngram in ngrams] for j in range(len(self.levels))]
        return ngrams


@pytest.mark.parametrize(("width", "size"), [(4, 3), (1, 4), (5, 5), (3, 2)])
@pytest.mark.parametrize("room", [1.0, 0.6])
def test_the_window_is_the_papers_jacobi_iteration(width: int, size: int, room: float) -> None:
    """Columns that are gone over go on; all come nearer by what the text has grown."""
    proposer = LookaheadProposer(config := LookaheadConfig(width, size, 3))
    text = [3, 1, 4, 1, 5, 9]
    step(proposer, text, last_three)
    own = proposer._rows["r"]
    ceiling = round(room * config.num_nodes)
    columns = (ceiling + 1) * width // (config.num_nodes + 1)
    for turn in range(12):
        before, ngrams, ahead = [[*column] for column in own._columns], Window(own._columns).go_on(text, last_three), -len(text)
        step(proposer, text, last_three, ceiling)
        ahead += len(text)
        gone_over = [ngram[1:] for ngram in ngrams[:columns]][ahead - 1 :]
        rest = before[max(columns, ahead - 1) + 1 :]
        assert own._columns[: len(gone_over) + len(rest)] == gone_over + rest, f"step {turn}"
        assert all(tuple(ngram[1:]) in own._found[ngram[0]] for ngram in ngrams[:columns][-3:])


def test_what_never_stood_in_a_text_is_guessed() -> None:
    """Columns are right once they have been gone over, wherever they began."""
    proposer = LookaheadProposer(LookaheadConfig(8, 4, 4))
    text, steps = [5, 11], 0
    while len(text) < 200:
        step(proposer, text, by_heart)
        steps += 1
    assert text[2:] == [by_heart(text[:i]) for i in range(2, len(text))]
    assert len(text) / steps > 3


def test_trees_keep_to_any_ceiling_and_have_no_twins() -> None:
    rng = random.Random(0)
    proposer = LookaheadProposer(LookaheadConfig(6, 4, 6))
    text = [1, 2, 3] * 5
    for _ in range(60):
        ceiling, cut = rng.randrange(66), rng.choice([3, 64, 64])
        draft = step(proposer, text, last_three, ceiling, lambda node, _, cut=cut: node < cut)
        assert len(draft.token_ids) <= ceiling and all(parent < node for node, parent in enumerate(draft.parents))
        assert len(set(zip(draft.token_ids, draft.parents, strict=True))) == len(draft.token_ids)
    assert proposer.max_tokens == 35


@pytest.mark.parametrize("lets_pass", [lambda node, _: node < 4, lambda _, token: token % 4 > 0], ids=["cut", "form"])
def test_what_was_verified_teaches_and_nothing_else(lets_pass: Callable[[int, int], bool]) -> None:
    proposer = LookaheadProposer(LookaheadConfig(6, 3, 6))
    text, learnt = [1, 2, 3, 4], 0
    step(proposer, text, last_three)
    own = proposer._rows["r"]
    for _ in range(30):
        known = {(key, *rest) for key, ngrams in own._found.items() for rest in ngrams}
        possible = {tuple(ngram) for ngram in Window(own._columns).go_on(text, last_three)}
        in_text = {tuple(text[i : i + 3]) for i in range(len(text))}
        step(proposer, text, last_three, lets_pass=lets_pass)
        new = {(key, *rest) for key, ngrams in own._found.items() for rest in ngrams} - known - in_text
        assert new <= possible
        learnt += len(new)
    assert 10 < learnt < 150


def test_prompts_are_read_piece_by_piece() -> None:
    proposer = LookaheadProposer(LookaheadConfig())
    rows = [replace(row([i * 1000 + j for j in range(900)], 8), request_id=f"r{i}") for i in range(3)]
    for _ in range(2):
        proposer.propose(DraftContext(rows, 0, 16))
    counts = [sum(map(len, proposer._rows[f"r{i}"]._found.values())) for i in range(3)]
    assert sum(counts) == 2 * MAX_TOKENS_A_CALL and counts[0] == 898
    proposer.propose(DraftContext(rows, 0, 16))
    assert all(sum(map(len, own._found.values())) == 898 for own in proposer._rows.values())


def test_what_is_held_of_long_texts_is_bounded() -> None:
    proposer = LookaheadProposer(LookaheadConfig())
    text = list(range(3 * MAX_READ_TOKENS))
    for end in (len(text) - MAX_READ_TOKENS, len(text)):
        for _ in range(2 + MAX_READ_TOKENS // MAX_TOKENS_A_CALL):
            proposer.propose(DraftContext([row(text[:end], 8, 5)], 0, 16))
        own = proposer._rows["r"]
        assert min(own._found) >= end - MAX_READ_TOKENS - 16 and MAX_KEYS - 16 <= len(own._found) <= MAX_KEYS
        proposer.check()
    proposer.forget("r")
    assert not proposer._rows


def test_trees_of_more_nodes_than_there_may_be_are_refused() -> None:
    with pytest.raises(SpeculativeConfigError, match=r"'max_window_size' 15 .* = 119 guesses, above 64: lower one of them"):
        parse_speculative_config({"method": "lookahead", "max_window_size": 15, "max_ngram_size": 5, "max_verification_set_size": 15})
    assert LookaheadConfig().num_nodes == 15 and LookaheadConfig(8, 4, 8).num_nodes == 47
    assert LookaheadConfig(8, 4, 8, num_speculative_tokens=7).num_nodes == 7


@pytest.mark.parametrize("executor", ["torch", "auto"])
def test_it_hears_what_the_target_thinks_behind_each_guess(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches of rows that guess, rows that do not, and prompts in pieces: greedy rows emit what they say is best."""
    target = Path(__file__).parents[2] / "engine" / "demo_model" / "target"
    checked = 0
    observe = LookaheadProposer.observe

    def watched(self: LookaheadProposer, feedback: Feedback) -> None:
        nonlocal checked
        assert feedback.nodes is not None
        best = feedback.nodes.argmax.tolist()
        for i, emitted in enumerate(feedback.emitted):
            if first := feedback.nodes.first[i] + 1:
                assert [best[first - 1], *(best[first + node] for node in feedback.accepted[i])][: len(emitted)] == emitted
                checked += len(feedback.accepted[i]) > 0
        observe(self, feedback)

    monkeypatch.setattr(LookaheadProposer, "observe", watched)
    config = {"method": "lookahead", "max_window_size": 6, "max_ngram_size": 4, "adaptive": False}
    prompts = [[(37 * i + 11 * j * j) % 3000 + 40 for j in range(9 + 13 * i)] for i in range(6)]
    found: list[list[list[int]]] = []
    with LLM(str(target), config, executor=executor, max_num_batched_tokens=64, max_num_seqs=6, kv_cache_gb=0.1) as llm:
        for method in ("off", "lookahead"):
            own = [{"method": name} for name in (*[method] * 5, "off")]
            asked = [SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, speculation=one) for one in own]
            found.append(said(llm, prompts, asked))
        check_engine(llm)
        assert checked > 20
    assert found[0] == found[1]
