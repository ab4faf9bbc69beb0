"""POST /v1/fim/completions: completions as Mistral's clients ask for them, told as a chat's message."""

from dataclasses import dataclass
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from ..engine.request import TokenDelta
from .completions import CompletionShape, complete
from .errors import unsupported
from .schemas import CompletionRequest, StreamOptions
from .serving import Serving


class FimRequest(CompletionRequest):
    most_unasked: ClassVar[int | None] = None


async def create_fim(request: Request, serving: Serving) -> Response:
    body = await serving.read(request, FimRequest)
    if body.logprobs is not None:
        raise unsupported("logprobs")
    # Mistral's streams tell the usage in the chunk that ends the text.
    options = serving.stream_options(body) if body.stream_options else StreamOptions(continuous_usage_stats=True)
    return await complete(request, body, serving, options, lambda *asked: FimShape(CompletionShape(*asked)))


@dataclass(frozen=True)
class FimShape:
    texts: CompletionShape

    @property
    def only_text(self) -> bool:
        return self.texts.only_text

    def envelope(self, *, chunk: bool) -> dict[str, Any]:
        return self.texts.envelope(chunk=chunk) | {"object": "chat.completion.chunk" if chunk else "chat.completion"}

    def opening(self) -> list[dict[str, Any]]:
        return [_spoken(choice, "delta") for choice in self.texts.opening()]

    def chunks(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
        return [_spoken(choice, "delta") for choice in self.texts.chunks(index, delta)]

    def choice(self, index: int, deltas: list[TokenDelta]) -> dict[str, Any]:
        return _spoken(self.texts.choice(index, deltas), "message")


def _spoken(choice: dict[str, Any], name: str) -> dict[str, Any]:
    return choice | {name: {"role": "assistant", "content": choice.pop("text"), "refusal": None}}
