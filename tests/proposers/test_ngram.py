import random
import time
from collections.abc import Sequence

import pytest

from foretoken.proposers.base import DraftContext, DraftRow, Draw
from foretoken.proposers.config import NgramConfig
from foretoken.proposers.ngram import NgramProposer


def row(request_id: str, token_ids: Sequence[int], ceiling: int = 5) -> DraftRow:
    return DraftRow(request_id, token_ids, 1, len(token_ids), ceiling, 0, (), (), Draw(0.0, 0, 0))


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
