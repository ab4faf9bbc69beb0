"""Which of its own answers a target is refined on: the good ones to learn, circles to unlearn. Generates and trains nothing.

Rejection sampling (https://arxiv.org/abs/2308.01825) keeps answers that came to their end, are of the form that was asked for, define the
function that was asked for, do not go round in circles, and differ from one another. What is learned from them is not new knowledge but
to do always what succeeds sometimes. Answers that do go round in circles show where one begins to (https://arxiv.org/abs/1908.04319).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .answers import check_answer
from .encoding import Prompt
from .packing import READ, UNLEARN, Document

LONGEST_PERIOD = 48                  # tokens of one round: about four lines of code
SHORTEST_CIRCLE = 12                 # repeated tokens; fewer may be meant: "1, 1, 1", or a rule of dashes
MOST_UNLEARNED = 64                  # tokens of one answer


@dataclass(frozen=True)
class Candidate:
    """One answer of the target."""

    prompt: Prompt
    prompt_token_ids: list[int]
    token_ids: list[int]             # with the end token, if it came to that
    text: str
    ended: bool                      # by itself


def chosen(candidates: Iterable[Candidate], most: int) -> Iterator[int]:
    """Places of the good ones, at most `most` different ones for each prompt."""
    taken: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for number, candidate in enumerate(candidates):
        before = taken.setdefault(tuple(candidate.prompt_token_ids), set())
        answer = tuple(candidate.token_ids)
        if len(before) < most and answer not in before and is_good(candidate):
            before.add(answer)
            yield number


def is_good(candidate: Candidate) -> bool:
    """Of good form, as far as that can be told without knowing whether it is true."""
    if not candidate.ended or goes_in_circles(candidate.token_ids):
        return False
    finding = check_answer(candidate.prompt, candidate.text)
    return (finding is None or finding.fault is None) and heading(candidate.prompt) in candidate.text


def heading(prompt: Prompt) -> str:
    """How the first function of the reference begins, if the prompt says so too: "" where that is left to the answer."""
    reference = str(prompt.reference.get("content") or "")
    asked = str(prompt.messages[-1].get("content") or "")
    first = next((line.strip() for line in reference.splitlines() if line.lstrip().startswith("def ")), "")
    signature = first.removeprefix("def ").rstrip(":")
    return signature if signature in asked else ""


def goes_in_circles(token_ids: Sequence[int]) -> bool:
    """Whether some stretch of tokens comes three times on end."""
    return circle(token_ids) is not None


def circle(token_ids: Sequence[int]) -> tuple[int, int] | None:
    """(begin, end) of the third and later rounds of the stretch that is the first to come three times on end."""
    ids = np.asarray(token_ids)
    found: list[tuple[int, int]] = []
    for period in range(1, min(LONGEST_PERIOD, len(ids) // 3) + 1):
        same = np.concatenate(([0], ids[period:] == ids[:-period], [0]))
        begins, ends = np.flatnonzero(np.diff(same)).reshape(-1, 2).T
        long = np.flatnonzero(ends - begins >= max(2 * period, SHORTEST_CIRCLE))
        found.extend((int(begins[place]) + 2 * period, int(ends[place]) + period) for place in long[:1])
    return min(found, default=None)


def unlearned(prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> Document | None:
    """An answer up to its first circle, whose third and later rounds are to be unlearned: twice may be right. None without."""
    if (found := circle(token_ids)) is None:
        return None
    begin, end = found[0], min(found[1], found[0] + MOST_UNLEARNED)
    ids = np.array([*prompt_token_ids, *token_ids[:end]], np.uint32)
    learn = np.full(len(ids), READ, np.uint8)
    learn[len(prompt_token_ids) + begin:] = UNLEARN
    return Document(ids, learn)
