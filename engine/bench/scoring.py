"""What a network makes of a text, without an engine: each token's loss, greedy answers, a draft's hits among them and their worth."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.layout import Executor
from ..plan import PlanRow, StepPlan
from ..request import Request, SamplingParams
from ..runner import Runner

BLOCK = 16
PASS_TOKENS = 256  # of a text in one pass: as many whole rows of logits are in memory


@dataclass(frozen=True)
class Scores:
    """What a network makes of a text: one entry for each token but the first of each window."""

    losses: Tensor  # [N] float32, nats
    top: Tensor  # [N] int64, the token found most likely there

    @property
    def perplexity(self) -> float:
        return math.exp(self.losses.double().mean().item())


def score(executor: Executor, windows: Sequence[Sequence[int]]) -> Scores:
    """How likely each token is after those before it in its window."""
    runner, tables = _runner(executor, 1, max(map(len, windows)), wants_logits=True)
    losses: list[Tensor] = []
    top: list[Tensor] = []
    for window in windows:
        request = _request(window)
        for start in range(0, len(window) - 1, PASS_TOKENS):
            stop = min(start + PASS_TOKENS, len(window) - 1)
            # One known token and all others as its draft: verification scores every one of them.
            output = runner.forward(StepPlan([_row(request, start, 1, window[start + 1 : stop], tables[0])], BLOCK))
            assert output.logits is not None
            following = torch.tensor(window[start + 1 : stop + 1])
            losses.append(torch.nn.functional.cross_entropy(output.logits.float(), following, reduction="none"))
            top.append(output.argmax)
    return Scores(torch.cat(losses), torch.cat(top))


def greedy_answers(executor: Executor, prompts: Sequence[list[int]], ends: frozenset[int], max_tokens: int) -> list[list[int]]:
    """At most max_tokens most likely tokens behind each prompt, up to and with the first of `ends`."""
    runner, tables = _runner(executor, len(prompts), max(map(len, prompts)) + max_tokens)
    requests = [_request(prompt) for prompt in prompts]
    unfinished = list(range(len(prompts)))
    while unfinished:
        rows: list[PlanRow] = []
        for i in unfinished:
            start = 0 if not requests[i].num_output_tokens else len(requests[i].token_ids) - 1
            rows.append(_row(requests[i], start, len(requests[i].token_ids) - start, [], tables[i]))
        tokens = runner.forward(StepPlan(rows, BLOCK)).argmax.tolist()
        for i, token in zip(unfinished, tokens, strict=True):
            requests[i].token_ids.append(token)
        unfinished = [i for i in unfinished if requests[i].token_ids[-1] not in ends and requests[i].num_output_tokens < max_tokens]
    return [request.token_ids[request.num_prompt_tokens :] for request in requests]


def greedy_matches(draft: Executor, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[list[bool]]:
    """For each token of each answer: would the draft, given the same text before it, have said it?

    That is all acceptance needs: a greedy draft is kept up to its first miss, and up to there its tokens are the target's.
    """
    matches: list[list[bool]] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        runner, tables = _runner(draft, 1, len(prompt) + len(answer))
        row = _row(_request(prompt), 0, len(prompt), answer[:-1], tables[0])
        guesses = runner.forward(StepPlan([row], BLOCK)).argmax.tolist()
        matches.append([guess == token for guess, token in zip(guesses, answer, strict=True)])
    return matches


def mean_accepted_length(answers: Sequence[Sequence[bool]], k: int) -> float:
    """Tokens committed per target pass with drafts of k tokens. [1, 1, 0, 1, 1], k = 3 -> 3 tokens, then 2 -> 2.5."""
    tokens = passes = 0
    for matches in answers:
        position = 0
        while position < len(matches):
            kept = 0
            while kept < k and position + kept < len(matches) and matches[position + kept]:
                kept += 1
            committed = min(kept + 1, len(matches) - position)
            position, tokens, passes = position + committed, tokens + committed, passes + 1
    return tokens / max(1, passes)


def _runner(executor: Executor, num_rows: int, length: int, wants_logits: bool = False) -> tuple[Runner, list[range]]:
    """A cache for so many texts of so many tokens, and the block table of each."""
    blocks = -(-length // BLOCK)
    kv = executor.allocate(num_rows * blocks, BLOCK)
    return Runner(executor, kv, (), lambda request: wants_logits), [range(i * blocks, (i + 1) * blocks) for i in range(num_rows)]


def _request(tokens: Sequence[int]) -> Request:
    return Request("", tokens, SamplingParams(temperature=0.0), arrival_time=0.0, max_tokens=0, seed=0)


def _row(request: Request, start: int, num_known: int, draft: Sequence[int], table: Sequence[int]) -> PlanRow:
    """Reads num_known tokens, then the draft; scores behind the last known token and behind every draft token."""
    return PlanRow(request, start, num_known, list(draft), list(range(-1, len(draft) - 1)), [0] * len(draft), table, samples=True)
