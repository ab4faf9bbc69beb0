"""What an LLM says and guesses in tests, as tokens, and whether all was well behind it."""

from collections.abc import Sequence
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.engine.outputs import RequestOutput
from foretoken.proposers.base import Draft

Made = tuple[list[int], list[int]]
"""A text and what was guessed behind it."""


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def said(llm: LLM, prompts: Sequence[Any], params: SamplingParams | list[SamplingParams], **more: Any) -> list[list[int]]:
    return token_ids(llm.generate(prompts, params, use_tqdm=False, **more))


def check_engine(llm: LLM) -> None:
    """No proposer has failed, and the core's books are in order."""
    core = llm._running().core
    assert not [(health.name, health.off_reason) for health in core.proposers.stats() if health.num_failures], "a proposer failed"
    core.check()


def heard(patch: pytest.MonkeyPatch, proposer: Any) -> list[Made]:
    """All that a proposer guesses from now on, or, where it is a class, that each of its kind does."""
    found: list[Made] = []
    propose = proposer.propose

    def noted(*arguments: Any) -> Draft:
        texts = [list(row.token_ids) for row in arguments[-1].rows]
        draft = propose(*arguments)
        for text, start, end in zip(texts, draft.start_loc, draft.start_loc[1:], strict=False):
            found.extend([(text, draft.token_ids[start:end])] if end > start else [])
        return draft

    patch.setattr(proposer, "propose", noted)
    return found
