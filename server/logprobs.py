"""Log probabilities in OpenAI's two shapes, and single tokens as text."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..engine.prompt_logprobs import PromptLogprobs
from ..engine.request import SamplingParams, TokenDelta
from ..engine.token_bytes import TokenBytes


class TokenText:
    """Single tokens as text and as bytes. A token may be a piece of a character: then only its bytes are exact."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._bytes = TokenBytes(tokenizer)

    def place(self, params: SamplingParams) -> Place:
        """Of a choice's first token."""
        return Place(self._bytes.special_ids if params.skip_special_tokens else ())

    def __call__(self, token_id: int) -> tuple[str, bytes]:
        """(text, bytes). Bytes that are no text are spelled bytes:\\xe2\\x96, as OpenAI does: so alternatives stay distinct."""
        raw = self._bytes.piece(token_id)
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def as_ids(self) -> TokenText:
        """The same with every token's text as token_id:N, which tells tokens of equal texts apart."""
        return _TokenIds(self)


class _TokenIds(TokenText):
    def __init__(self, texts: TokenText) -> None:
        self._bytes = texts._bytes

    def __call__(self, token_id: int) -> tuple[str, bytes]:
        return f"token_id:{token_id}", self._bytes.piece(token_id)


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


def prompt_logprobs(said: PromptLogprobs, spell: TokenText) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's shape: by token id, each prompt token and the best at its place; None for the first, which follows nothing."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": spell(token_id)[0]}

    entries: list[dict[str, dict[str, Any]] | None] = [None]
    for token_id, logprob, rank, top in said:
        best = {str(other): entry(other, its_logprob, place) for place, (other, its_logprob) in enumerate(top, 1)}
        entries.append({str(token_id): entry(token_id, logprob, rank)} | best)
    return entries


class Place:
    """Where in a choice's text its next token begins, in characters; one within a character begins where that does."""

    def __init__(self, hidden: Collection[int] = ()) -> None:
        """hidden: tokens that the choice's text leaves out."""
        self._hidden = hidden
        self._offset = 0
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def prompt(self, pieces: Sequence[bytes], text: str) -> list[int]:
        """Of each token of an echoed prompt. What the tokenizer puts in front of a text, as a token or a space, is no part of it."""
        begins = [self._pass(piece) for piece in pieces]
        self._offset += len(self._decoder.decode(b"", True))  # token ids may end within a character, which the answer does not go on with
        before, self._offset = self._offset - len(text), len(text)
        return [max(0, begin - before) for begin in begins]

    def next(self, token_id: int, piece: bytes) -> int:
        """Of one token more."""
        return self._pass(b"" if token_id in self._hidden else piece)

    def _pass(self, piece: bytes) -> int:
        if piece and piece[0] & 0xC0 != 0x80:  # it begins a character: one that is still open will not be completed
            self._offset += len(self._decoder.decode(b"", True))
        begin = self._offset
        self._offset += len(self._decoder.decode(piece))
        return begin


@dataclass
class CompletionLogprobs:
    """The older shape of one choice: parallel lists."""

    place: Place
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add_prompt(self, token_ids: Sequence[int], said: PromptLogprobs, spell: TokenText, echoed: str) -> None:
        """Tokens of a prompt, and how it is echoed. The first has no logprobs: nothing comes before it."""
        self.text_offset += self.place.prompt([spell(token_id)[1] for token_id in token_ids], echoed)
        self._add(spell(token_ids[0])[0], None, None)
        for token_id, logprob, _, top in said:
            self._add_token(token_id, logprob, top, spell)

    def add(self, delta: TokenDelta, spell: TokenText) -> None:
        for token_id, said in zip(delta.token_ids, delta.logprobs or (), strict=True):
            self.text_offset.append(self.place.next(token_id, spell(token_id)[1]))
            self._add_token(token_id, said.logprob, said.top, spell)

    def _add_token(self, token_id: int, logprob: float, top: Sequence[tuple[int, float]], spell: TokenText) -> None:
        text = spell(token_id)[0]
        # The token itself is listed even where it is none of the best, as OpenAI does.
        best = {spell(other)[0]: _finite(its_logprob) for other, its_logprob in top}
        self._add(text, _finite(logprob), best | {text: _finite(logprob)})

    def _add(self, text: str, logprob: float | None, best: dict[str, float] | None) -> None:
        self.tokens.append(text)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(best)

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


def annotated(
    choice: dict[str, Any], delta: TokenDelta, proposer_names: Sequence[str] | None, token_ids: bool = False
) -> dict[str, Any]:
    """A streamed choice with what OpenAI's lacks: what stopped it, its tokens if wanted, and, if there are names, who guessed them."""
    if token_ids:
        choice["token_ids"] = delta.token_ids
    if delta.stop_reason is not None:
        choice["stop_reason"] = delta.stop_reason
    if proposer_names is not None:
        choice["speculation"] = speculation(delta, proposer_names)
    return choice
