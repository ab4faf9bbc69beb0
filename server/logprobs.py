"""Log probabilities in OpenAI's two shapes, and single tokens as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..engine.detokenizer import TokenBytes
from ..engine.request import TokenDelta


class TokenText:
    """Single tokens as text and as bytes. A token may be a piece of a character: then only its bytes are exact."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._bytes = TokenBytes(tokenizer)

    def __call__(self, token_id: int) -> tuple[str, bytes]:
        """(text, bytes). Bytes that are no text are spelled bytes:\\xe2\\x96, as OpenAI does: so alternatives stay distinct."""
        raw = self._bytes.piece(token_id)
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw


def chat_logprobs(delta: TokenDelta, spell: TokenText) -> dict[str, Any] | None:
    """{"content": [{token, logprob, bytes, top_logprobs}], "refusal": None}, or None if the delta brings none."""
    if delta.logprobs is None:
        return None
    content = [
        _entry(token_id, said.logprob, spell) | {"top_logprobs": [_entry(other, logprob, spell) for other, logprob in said.top]}
        for token_id, said in zip(delta.token_ids, delta.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _entry(token_id: int, logprob: float, spell: TokenText) -> dict[str, Any]:
    text, raw = spell(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


@dataclass
class CompletionLogprobs:
    """The older shape of one choice: parallel lists. Offsets count the characters of the tokens before."""

    offset: int = 0
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, delta: TokenDelta, spell: TokenText) -> None:
        for token_id, said in zip(delta.token_ids, delta.logprobs or (), strict=True):
            text = spell(token_id)[0]
            self.tokens.append(text)
            self.token_logprobs.append(_finite(said.logprob))
            # The chosen token is listed even where it is none of the best, as OpenAI does.
            best = {spell(other)[0]: _finite(logprob) for other, logprob in said.top}
            self.top_logprobs.append(best | {text: _finite(said.logprob)})
            self.text_offset.append(self.offset)
            self.offset += len(text)

    def body(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


def _finite(logprob: float) -> float:
    """JSON has no -Infinity, which a masked token has."""
    return max(logprob, -9999.0)


def speculation(delta: TokenDelta, proposer_names: Sequence[str]) -> list[dict[str, Any]]:
    """Who proposed each token; null = the target itself."""
    return [
        {"token_id": token_id, "proposer": proposer_names[source] if source >= 0 else None}
        for token_id, source in zip(delta.token_ids, delta.sources, strict=True)
    ]


def annotated(choice: dict[str, Any], delta: TokenDelta, proposer_names: Sequence[str] | None) -> dict[str, Any]:
    """A streamed choice with what OpenAI's lacks: what stopped it, and, if proposer_names are given, who guessed its tokens."""
    if delta.stop_reason is not None:
        choice["stop_reason"] = delta.stop_reason
    if proposer_names is not None:
        choice["speculation"] = speculation(delta, proposer_names)
    return choice
