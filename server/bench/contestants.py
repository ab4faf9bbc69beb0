"""Who can be compared: servers by their address, and transformers' own `generate`, behind one interface.

A contestant answers a group of requests at once and says how long that took. Knows nothing of whom it is compared with.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .load_client import Answer, LoadClient, ServerFailed

if TYPE_CHECKING:
    from ...engine.bench.transformers_peer import TransformersPeer

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True)
class Turn:
    """What one contestant made of one group of requests sent together."""

    tokens: int
    seconds: float  # until the last answer
    first_s: float | None  # mean time to the first text, if streamed
    gap_s: float | None  # mean time between tokens after it, if streamed
    texts: tuple[str, ...]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Contestant(Protocol):
    """Something that answers."""

    name: str

    def run(self, prompts: Sequence[str]) -> Turn:
        """All prompts at once. Raises ServerFailed."""
        ...


@dataclass(frozen=True)
class Asking:
    """What every request asks for."""

    endpoint: str  # a key of PATHS
    max_tokens: int
    stream: bool
    ignore_eos: bool

    def body(self, model: str, prompt: str) -> dict[str, Any]:
        question = {"messages": [{"role": "user", "content": prompt}]} if self.endpoint == "chat" else {"prompt": prompt}
        extension = {"ignore_eos": True} if self.ignore_eos else {}  # not every server knows it
        return {"model": model, "max_tokens": self.max_tokens, "temperature": 0, **question, **extension}


class Server:
    """A server by its address."""

    def __init__(self, url: str, model: str | None, api_key: str | None, asking: Asking, runner: asyncio.Runner) -> None:
        """Raises ServerFailed if nothing answers there."""
        self.name = url
        self._client = LoadClient(url, api_key)
        self._asking, self._runner = asking, runner
        self._model = model or runner.run(self._client.model())

    def run(self, prompts: Sequence[str]) -> Turn:
        return turn(self._runner.run(self._all(prompts)), self._asking.stream)

    async def _all(self, prompts: Sequence[str]) -> list[Answer]:
        path, stream = PATHS[self._asking.endpoint], self._asking.stream
        return await asyncio.gather(*(self._client.complete(path, self._asking.body(self._model, p), stream) for p in prompts))


class Transformers:
    """transformers' `generate`, which takes the requests of a group as one batch."""

    def __init__(self, peer: TransformersPeer, tokenizer: Any, asking: Asking) -> None:
        self.name = "transformers"
        self._peer, self._tokenizer, self._asking = peer, tokenizer, asking

    def run(self, prompts: Sequence[str]) -> Turn:
        from ...engine.errors import ModelLoadError

        try:
            answer = self._peer.generate([self._encoded(prompt) for prompt in prompts], self._asking.max_tokens, self._asking.ignore_eos)
        except ModelLoadError as error:
            raise ServerFailed(str(error)) from error
        texts = [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in answer.token_ids]
        return turn(
            [
                Answer(answer.seconds, len(ids), 0, text, (answer.first_s, answer.seconds))
                for ids, text in zip(answer.token_ids, texts, strict=True)
            ],
            self._asking.stream,
        )

    def _encoded(self, prompt: str) -> list[int]:
        if self._asking.endpoint == "completions":
            return self._tokenizer.encode(prompt)
        text = self._tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        return self._tokenizer.encode(text, add_special_tokens=False)


def turn(answers: Sequence[Answer], streamed: bool) -> Turn:
    """The answers to a group of requests that were sent together."""
    firsts = [answer.first_s for answer in answers if answer.first_s is not None]
    gaps = [answer.token_s for answer in answers if answer.token_s is not None]
    return Turn(
        tokens=sum(answer.tokens for answer in answers),
        seconds=max(answer.seconds for answer in answers),
        first_s=statistics.mean(firsts) if streamed and firsts else None,
        gap_s=statistics.mean(gaps) if streamed and gaps else None,
        texts=tuple(answer.text for answer in answers),
    )
