import random
import time
from collections.abc import Sequence

import pytest
from steps import count_lines

from foretoken.proposers.base import Draft, DraftContext, DraftRow, Draw
from foretoken.proposers.config import NgramConfig
from foretoken.proposers.corpus import Corpora
from foretoken.proposers.ngram import NgramProposer


def row(request_id: str, token_ids: Sequence[int], ceiling: int = 5, corpus_id: str = "") -> DraftRow:
    return DraftRow(request_id, token_ids, 1, len(token_ids), ceiling, 0, (), (), Draw(0.0, 0, 0), corpus_id=corpus_id)


def guess(proposer: NgramProposer, token_ids: Sequence[int], ceiling: int = 5, request_id: str = "r") -> list[int]:
    return proposer.propose(DraftContext([row(request_id, token_ids, ceiling)], 0, 16)).token_ids


def brute_force(tokens: Sequence[int], config: NgramConfig, ceiling: int) -> list[int]:
    """Every window of every size, as the rule says it."""
    for n in range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1):
        ends = [end for end in range(n, len(tokens)) if tokens[end - n : end] == tokens[len(tokens) - n :]]
        if n <= len(tokens) and ends:
            end = ends[0] if config.match == "earliest" else ends[-1]
            return list(tokens[end : end + min(ceiling, config.num_speculative_tokens)])
    return []


@pytest.mark.parametrize("seed", range(60))
def test_equals_brute_force_over_growing_and_preempted_texts(seed: int) -> None:
    dice = random.Random(seed)
    low = dice.randint(1, 3)
    config = NgramConfig(dice.randint(1, 6), low + dice.randint(0, 3), low, dice.choice(["earliest", "latest"]))
    proposer = NgramProposer(config)
    texts = {f"r{i}": [dice.randrange(dice.choice([1, 2, 4])) for _ in range(dice.randint(1, 30))] for i in range(3)}
    for _ in range(60):
        rows = [row(name, texts[name], dice.randint(0, 7)) for name in texts if dice.random() < 0.8]
        draft = proposer.propose(DraftContext(rows, 0, 16))
        proposer.check()
        for i, r in enumerate(rows):
            got = draft.token_ids[draft.start_loc[i] : draft.start_loc[i + 1]]
            assert got == brute_force(r.token_ids, config, r.ceiling)
            assert proposer.has_guess(r) == bool(brute_force(r.token_ids, config, 1))
        for name, text in texts.items():
            text.extend(dice.randrange(4) for _ in range(dice.randint(0, 4)))
            if dice.random() < 0.1:
                proposer.forget(name)


def test_overlap_with_the_end_of_the_text_is_a_match() -> None:
    assert guess(NgramProposer(NgramConfig(5, 2, 2)), [7, 7, 7, 7]) == [7, 7]
    assert guess(NgramProposer(NgramConfig(5, 2, 2, "latest")), [7, 7, 7, 7]) == [7]


def test_longest_match_wins_over_an_earlier_shorter_one() -> None:
    tokens = [3, 8, 1, 2, 3, 9, 1, 2, 3]
    assert guess(NgramProposer(NgramConfig(1, 3, 1)), tokens) == [9]
    assert guess(NgramProposer(NgramConfig(1, 1, 1)), tokens) == [8]


def test_ids_of_any_size_stay_apart() -> None:
    large = 2**31 - 1
    assert guess(NgramProposer(NgramConfig(2, 2, 1)), [large, 0, 5, 0, large, 6, large, 0]) == [5, 0]


def test_a_forgotten_request_may_return_with_another_text() -> None:
    proposer = NgramProposer(NgramConfig(3, 2, 2))
    assert guess(proposer, [1, 2, 3, 1, 2]) == [3, 1, 2]
    proposer.forget("r")
    proposer.forget("never seen")
    assert guess(proposer, [1, 2, 4, 1, 2]) == [4, 1, 2]


def test_the_cost_of_a_step_does_not_grow_with_the_context() -> None:
    """Also the worst text for a search: one token, repeated."""

    def best_us(length: int) -> float:
        proposer = NgramProposer(NgramConfig(5, 4, 1))
        tokens = [0] * length
        guess(proposer, tokens)
        times: list[float] = []
        for _ in range(200):
            tokens.append(0)
            context = DraftContext([row("r", tokens)], 0, 16)
            started = time.perf_counter()
            proposer.propose(context)
            times.append(time.perf_counter() - started)
        return sorted(times)[20] * 1e6

    short, long = best_us(100), best_us(40_000)
    assert long < 5 * short + 20


def paths_of(draft: Draft, index: int = 0) -> list[tuple[int, ...]]:
    """The tokens from the root to each node of a row."""
    first, last = draft.start_loc[index : index + 2]
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.token_ids[first:last], draft.parents[first:last], strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def brute_force_tree(tokens: list[int], pool: Sequence[list[int]], config: NgramConfig, ceiling: int) -> list[tuple[int, ...]]:
    """Continuations one after the other, as the rule says it; every beginning of one is a node."""
    paths: list[tuple[int, ...]] = []
    num_branches = num_places = 0
    for n in range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1):
        tail = tokens[len(tokens) - n :]
        if n > len(tokens):
            continue
        own = [(tokens, end) for end in range(n, len(tokens)) if tokens[end - n : end] == tail]
        pooled = [(text, end) for text in pool for end in range(n, len(text)) if text[end - n : end] == tail]
        for text, end in (own if config.match == "earliest" else own[::-1]) + pooled[::-1]:
            continuation = tuple(text[end : end + min(config.num_speculative_tokens, ceiling)])
            new = [continuation[: i + 1] for i in range(len(continuation)) if continuation[: i + 1] not in paths]
            room = min(ceiling, config.num_speculative_tokens * config.num_branches, 64)
            paths += new[: room - len(paths)]
            num_branches += bool(new)
            num_places += 1
            if num_branches == config.num_branches or len(paths) == room or num_places == 32:
                return paths
    return paths


@pytest.mark.parametrize("seed", range(60))
def test_trees_and_pools_equal_brute_force(seed: int) -> None:
    dice = random.Random(seed)
    low = dice.randint(1, 2)
    config = NgramConfig(
        dice.randint(1, 4), low + dice.randint(0, 2), low, dice.choice(["earliest", "latest"]), dice.randint(1, 4), dice.random() < 0.6
    )
    corpora = Corpora(max_responses=dice.randint(1, 5))
    proposer = NgramProposer(config, corpora=corpora)
    texts = {f"r{i}": [dice.randrange(4) for _ in range(dice.randint(1, 20))] for i in range(2)}
    for _ in range(25):
        if dice.random() < 0.3:
            corpora.add("", [dice.randrange(4) for _ in range(dice.randint(1, 12))])
        rows = [row(name, text, dice.randint(0, 9)) for name, text in texts.items()]
        draft = proposer.propose(DraftContext(rows, 0, 16))
        proposer.check()
        corpus = corpora.get("")
        pool = [response.token_ids.tolist() for response in corpus] if corpus is not None and config.shared_pool else []
        for i, r in enumerate(rows):
            assert paths_of(draft, i) == (brute_force_tree(list(r.token_ids), pool, config, r.ceiling) if r.ceiling else [])
        for text in texts.values():
            text.extend(dice.randrange(4) for _ in range(dice.randint(0, 3)))


def test_branches_that_begin_alike_share_their_beginning() -> None:
    tokens = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 6, 7, 1, 2]
    draft = NgramProposer(NgramConfig(3, 2, 2, num_branches=3)).propose(DraftContext([row("r", tokens, 9)], 0, 16))
    assert paths_of(draft) == [(3,), (3, 4), (3, 4, 1), (3, 5), (3, 5, 1), (6,), (6, 7), (6, 7, 1)]


def test_the_pool_has_the_answers_of_the_rows_corpus_only() -> None:
    corpora = Corpora()
    corpora.add("ours", [1, 2, 3, 4, 5])
    corpora.add("ours", [8, 9])
    corpora.add("theirs", [1, 2, 7])
    proposer = NgramProposer(NgramConfig(5, 2, 2, shared_pool=True), corpora=corpora)

    def ask(corpus_id: str, tokens: list[int]) -> list[int]:
        return proposer.propose(DraftContext([row(f"r-{corpus_id}-{tokens}", tokens, 5, corpus_id)], 0, 16)).token_ids

    assert ask("ours", [1, 2]) == [3, 4, 5]  # and not on into the next answer
    assert ask("theirs", [1, 2]) == [7] and ask("", [1, 2]) == []
    assert ask("ours", [1, 2, 6, 1, 2]) == [6, 1, 2]  # the own text goes first
    has = {corpus_id: proposer.has_guess(row("new" + corpus_id, [5, 1, 2], 5, corpus_id)) for corpus_id in ("ours", "theirs", "")}
    assert has == {"ours": True, "theirs": True, "": False}
    corpora.delete("ours")
    assert ask("ours", [1, 2]) == [] and proposer.max_tokens == 5
    alone = NgramProposer(NgramConfig(5, 2, 2), corpora=corpora)
    assert alone.propose(DraftContext([row("r", [1, 2], 5, "theirs")], 0, 16)).token_ids == []


def test_a_guess_from_the_pool_costs_the_same_whatever_it_holds() -> None:
    def lines(num_answers: int) -> int:
        corpora = Corpora()
        for number in range(num_answers):
            corpora.add("", [1, 2, 3, number, number + 1])
        proposer = NgramProposer(NgramConfig(4, 3, 1, num_branches=3, shared_pool=True), corpora=corpora)
        context = DraftContext([row("r", [9, 1, 2, 3], 12)], 0, 16)
        for _ in range(5):
            assert len(proposer.propose(context).token_ids) == 6
        return count_lines(lambda: proposer.propose(context))

    assert lines(2000) <= 1.2 * lines(50)
