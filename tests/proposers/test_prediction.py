import random
from collections.abc import Sequence

from foretoken.proposers.base import DraftContext, DraftRow, Draw
from foretoken.proposers.config import PredictionConfig
from foretoken.proposers.prediction import PredictionProposer

PROMPT = [901, 902, 903]


def row(output: Sequence[int], prediction: Sequence[int], ceiling: int = 16, request_id: str = "r") -> DraftRow:
    tokens = [*PROMPT, *output]
    return DraftRow(request_id, tokens, len(PROMPT), len(tokens), ceiling, 0, (), (), Draw(0.0, 0, 0), prediction)


def guess(proposer: PredictionProposer, output: Sequence[int], prediction: Sequence[int], ceiling: int = 16) -> list[int]:
    draft = proposer.propose(DraftContext([row(output, prediction, ceiling)], 0, 16))
    proposer.check()
    return draft.token_ids


def steps(output: Sequence[int], prediction: Sequence[int], k: int = 16) -> int:
    """Target passes that it takes to say `output`, each confirming as much of the draft as is right."""
    proposer = PredictionProposer(PredictionConfig(k))
    done = count = 0
    while done < len(output):
        draft = guess(proposer, output[:done], prediction)
        accepted = 0
        while accepted < len(draft) and done + accepted < len(output) and draft[accepted] == output[done + accepted]:
            accepted += 1
        done += accepted + 1
        count += 1
    return count


def test_begins_at_the_beginning_and_goes_along() -> None:
    proposer = PredictionProposer(PredictionConfig(3))
    assert guess(proposer, [], [1, 2, 3, 4, 5, 6]) == [1, 2, 3]
    assert guess(proposer, [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]) == [5, 6]
    assert guess(proposer, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], ceiling=0) == []
    assert guess(proposer, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]) == []


def test_rows_without_a_prediction_get_nothing() -> None:
    draft = PredictionProposer(PredictionConfig()).propose(
        DraftContext([row([], ()), row([], [4, 5], request_id="s"), row([], (), request_id="t")], 0, 16)
    )
    assert (draft.token_ids, draft.start_loc) == ([4, 5], [0, 0, 2, 2])


def test_silent_while_lost_and_found_again_behind_the_change() -> None:
    prediction = list(range(10, 40))
    proposer = PredictionProposer(PredictionConfig(4))
    output = [10, 11, 12]
    assert guess(proposer, output, prediction) == [13, 14, 15, 16]
    output += [99]  # replaces 13
    assert guess(proposer, output, prediction) == []
    output += [14]
    assert guess(proposer, output, prediction) == []  # one token is no evidence
    output += [15]
    assert guess(proposer, output, prediction) == [16, 17, 18, 19]
    output += [30, 31]  # 16 to 29 deleted
    assert guess(proposer, output, prediction) == [32, 33, 34, 35]
    output += [77, 78, 79, 32, 33]  # three inserted
    assert guess(proposer, output, prediction) == [34, 35, 36, 37]


def test_the_first_place_ahead_is_preferred_to_one_behind() -> None:
    prediction = [1, 2, 50, 3, 4, 1, 2, 51, 5, 6, 1, 2, 52, 7]
    proposer = PredictionProposer(PredictionConfig(1))
    assert guess(proposer, [1, 2, 50, 3, 4], prediction) == [1]
    assert guess(proposer, [1, 2, 50, 3, 4, 99, 1, 2], prediction) == [51]
    assert guess(proposer, [1, 2, 50, 3, 4, 99, 1, 2, 88, 1, 2], prediction) == [52]
    assert guess(proposer, [1, 2, 50, 3, 4, 99, 1, 2, 88, 1, 2, 77, 3, 4], prediction) == [1]  # only behind


def test_longer_agreement_beats_nearness() -> None:
    prediction = [9, 9, 1, 2, 60, 8, 3, 4, 1, 2, 61]
    assert guess(PredictionProposer(PredictionConfig(1)), [7, 3, 4, 1, 2], prediction) == [61]


def test_the_prompt_is_no_evidence() -> None:
    prediction = [901, 902, 903, 5, 6]
    assert guess(PredictionProposer(PredictionConfig(2)), [70], prediction) == []


def test_token_by_token_or_after_a_preemption_the_cursor_is_the_same() -> None:
    for seed in range(40):
        dice = random.Random(seed)
        prediction = [dice.randrange(5) for _ in range(30)]
        output = list(prediction)
        for _ in range(3):
            at = dice.randrange(len(output))
            output[at : at + dice.randint(0, 2)] = [dice.randrange(5) for _ in range(dice.randint(0, 2))]
        stepwise = PredictionProposer(PredictionConfig())
        for end in range(len(output) + 1):
            fresh = PredictionProposer(PredictionConfig())
            assert guess(stepwise, output[:end], prediction) == guess(fresh, output[:end], prediction)
            if dice.random() < 0.1:
                stepwise.forget("r")


def cursor(output: Sequence[int], prediction: Sequence[int]) -> int | None:
    """The rule by exhaustive search: index of the predicted next token, None while lost."""
    at, lost = 0, False
    for i, token in enumerate(output):
        if not lost and at < len(prediction) and prediction[at] == token:
            at += 1
            continue
        lost = True
        for n in (8, 4, 2):
            ends = [end for end in range(n, len(prediction) + 1) if n <= i + 1 and prediction[end - n : end] == output[i + 1 - n : i + 1]]
            if ends:
                at, lost = next((end for end in ends if end > at), ends[-1]), False
                break
    return None if lost else at


def test_equals_exhaustive_search() -> None:
    for seed in range(60):
        dice = random.Random(seed)
        prediction = [dice.randrange(dice.choice([2, 3, 6])) for _ in range(dice.randint(1, 40))]
        proposer, output = PredictionProposer(PredictionConfig(4)), list[int]()
        while len(output) < 40:
            at = cursor(output, prediction)
            expected = [] if at is None else prediction[at : at + 4]
            if dice.random() < 0.5:
                assert proposer.has_guess(row(output, prediction)) == bool(expected)
            assert guess(proposer, output, prediction) == expected
            for _ in range(dice.randint(1, 3)):
                follows = at is not None and at < len(prediction) and dice.random() < 0.8
                output.append(prediction[at] if follows and at is not None else dice.randrange(6))
                at = cursor(output, prediction)


def test_an_edited_text_costs_few_steps() -> None:
    """200 tokens, one replaced, three inserted, five deleted: 13 passes would be the least without any edit."""
    prediction = list(range(200))
    output = [*range(50), 999, *range(51, 100), 777, 778, 779, *range(100, 150), *range(155, 200)]
    assert steps(prediction, prediction) == 12
    assert steps(output, prediction) <= 12 + 10
