"""How the served model writes reasoning and tool calls, and a reply in the making: from its text to the parts of a message.

Owns the choice of formats, from the flags or the model's template. Knows the API's shape of a message, not of a response.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..engine.chat_template import takes_tools, template_text
from ..engine.grammar_spec import GrammarSpec
from ..engine.request import TokenDelta
from ..engine.thinking_budget import ThinkingBudget
from ..engine.token_bytes import TokenBytes
from .chat_format import ChatPrompt
from .errors import ApiError
from .harmony import HarmonyParser
from .reasoning import REASONING_FORMATS, ReasoningParser, ReasoningTokens
from .reasoning import detected as detected_reasoning
from .reply_grammar import reply_grammar
from .tools.formats import FORMATS
from .tools.formats import detected as detected_tools
from .tools.parser import ToolParser, quoted
from .tools.request import Offer
from .tools.scanner import Arguments, CallBegun, Content, Piece, Reasoning


class ReplyFormats:
    """Those of one model. tool_parser, reasoning_parser: names, "none", or None for what the chat template says."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tool_parser: str | None, reasoning_parser: str | None) -> None:
        template = template_text(tokenizer)
        self._takes_tools = takes_tools(tokenizer) is not None
        self._tools = detected_tools(template) if tool_parser is None else FORMATS.get(tool_parser)
        self._reasoning = detected_reasoning(template) if reasoning_parser is None else REASONING_FORMATS.get(reasoning_parser)
        self._token_bytes = TokenBytes(tokenizer)
        self._added = {str(entry): (token, entry.special) for token, entry in tokenizer.added_tokens_decoder.items()}

    def describe(self) -> str:
        """Which they are, for people."""
        if not self._takes_tools:
            calls = "none: its chat template takes no tools"
        elif self._tools is None:
            calls = "not read: --tool-call-parser names a format"
        else:
            calls = next(f"as {name}" for name, format in FORMATS.items() if format is self._tools)
        thoughts = next((f"as {name}" for name, format in REASONING_FORMATS.items() if format == self._reasoning), "none")
        return f"tool calls {calls}; reasoning {thoughts}"

    def of_tools(self, offer: Offer) -> type[ToolParser] | None:
        """The format that this offer needs; None for an empty one. Raises ApiError if the model has none."""
        if not offer.tools:
            return None
        if not self._takes_tools:
            message = "this model cannot call tools: its chat template does not know of them; leave tools out"
            raise ApiError(400, message, param="tools", code="unsupported_parameter")
        if self._tools is None:
            message = "how this model writes tool calls is not known; the server's flag --tool-call-parser names a format"
            raise ApiError(400, message, param="tools", code="unsupported_parameter")
        return self._tools

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, each a name and its arguments, as the model writes them; "" where that is not known."""
        return "" if self._tools is None else self._tools.written(calls)

    def needs_special_tokens(self, tools: type[ToolParser] | None) -> bool:
        """Whether a marker has a special token, which would not be in the text."""
        markers = [*(tools.markers if tools else ()), *((self._reasoning.begin, self._reasoning.end) if self._reasoning else ())]
        return any(special and word in marker for marker in markers for word, (_, special) in self._added.items())

    def grammar(self, wanted: GrammarSpec | None, tools: type[ToolParser] | None, offer: Offer, prompt: ChatPrompt) -> GrammarSpec | None:
        """What the reply must look like; None if it may be anything. wanted: the form that an answer must have."""
        reasoning = self._reasoning
        if reasoning is not None and reasoning.lead and prompt.continued is not None:
            reasoning = None  # the prompt has begun the answer
        return reply_grammar(wanted, tools, offer, reasoning, reasoning is not None and self._inside(prompt), self._spell)

    def thinking(self, max_tokens: int | None, prompt: ChatPrompt) -> ThinkingBudget | None:
        """What holds the reasoning of a reply to max_tokens; None if it has no bound, or the model does not reason."""
        if max_tokens is None or self._reasoning is None:
            return None
        return ThinkingBudget(max_tokens, self._reasoning.begin, self._reasoning.end, self._inside(prompt), self._reasoning.call)

    def _inside(self, prompt: ChatPrompt) -> bool:
        return self._reasoning is not None and self._reasoning.inside(prompt.text, prompt.continued)

    def _spell(self, marker: str) -> str:
        """A marker as grammars write it: by the token that it begins with, and by special ones, since no text stands for those."""
        word = max((word for word in self._added if marker.startswith(word)), key=len, default="")
        rest = marker[len(word) :]
        end = min((at for other, (_, special) in self._added.items() if special and (at := rest.find(other)) >= 0), default=len(rest))
        parts = [f"<[{self._added[word][0]}]>"] if word else []
        parts += [quoted(rest[:end])] if end or not word else []
        return " ".join([*parts, *([self._spell(rest[end:])] if end < len(rest) else [])])

    def reply(self, tools: type[ToolParser] | None, offer: Offer, prompt: ChatPrompt, include_reasoning: bool) -> Reply:
        """A reply to this prompt."""
        reasoning = tokens = None
        if self._reasoning is not None:
            inside = self._inside(prompt)
            reasoning = HarmonyParser(inside) if self._reasoning.lead else ReasoningParser(self._reasoning, inside)
            tokens = ReasoningTokens(self._reasoning, inside, self._token_bytes.piece)
        return Reply(reasoning, tokens, tools(offer.tools) if tools else None, offer.parallel, include_reasoning)

    def plain(self, tools: type[ToolParser] | None) -> bool:
        """Whether a reply is its text alone."""
        return tools is None and self._reasoning is None


class Reply:
    """One choice: text in, parts of an assistant's message out, as deltas of a stream have them."""

    def __init__(
        self,
        reasoning: ReasoningParser | HarmonyParser | None,
        reasoning_tokens: ReasoningTokens | None,
        tools: ToolParser | None,
        parallel: bool,
        include_reasoning: bool,
    ) -> None:
        self._reasoning = reasoning
        self._reasoning_tokens = reasoning_tokens
        self._tools = tools
        self._parallel = parallel
        self._include_reasoning = include_reasoning
        self.num_calls = 0
        self._ids: set[str] = set()
        self._arguments: list[str] = []  # of the last one that is told

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._reasoning_tokens is None else self._reasoning_tokens.count

    def feed(self, delta: TokenDelta) -> list[dict[str, Any]]:
        """The parts that its text settles, in order; the last one settles all."""
        if self._reasoning_tokens is not None:
            self._reasoning_tokens.feed(delta.token_ids)
        pieces = _fed(self._reasoning, [Content(delta.text)], delta)
        return [part for piece in _joined(_fed(self._tools, pieces, delta)) if (part := self._part(piece)) is not None]

    def finish_reason(self, delta: TokenDelta) -> str | None:
        """As chat completions tell it. A call that a stop string cut is none that a client can make."""
        called = delta.finish_reason == "stop" and self.num_calls and (not delta.was_cut or self._is_whole())
        return "tool_calls" if called else delta.finish_reason

    def _is_whole(self) -> bool:
        """Whether the last call has all of its arguments."""
        try:
            json.loads("".join(self._arguments))
        except (ValueError, RecursionError):
            return False
        return True

    def _part(self, piece: Piece) -> dict[str, Any] | None:
        if isinstance(piece, CallBegun):
            self.num_calls += 1
        match piece:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return _reasoning(text) if self._include_reasoning else None
            case _ if self.num_calls > 1 and not self._parallel:
                return None
            case CallBegun(name, id):
                self._arguments = []
                call = {"id": self._id(id), "type": "function", "function": {"name": name, "arguments": ""}}
            case Arguments(text):
                self._arguments.append(text)
                call = {"function": {"arguments": text}}
        return {"tool_calls": [{"index": self.num_calls - 1} | call]}

    def _id(self, written: str | None) -> str:
        """The model's own id, which its template shows it again; one of ours if it wrote none, or the same one twice."""
        assert self._tools is not None, "a call without a parser of calls"
        id = self._tools.new_id() if written is None or written in self._ids else written
        self._ids.add(id)
        return id


def message(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The whole message that the parts of a reply make."""
    calls: list[dict[str, Any]] = []
    for part in parts:
        for delta in part.get("tool_calls", ()):
            if "id" in delta:
                calls.append({"id": delta["id"], "type": delta["type"], "function": dict(delta["function"])})
            else:
                calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
    content = "".join(part.get("content", "") for part in parts)
    whole: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning := "".join(part.get("reasoning", "") for part in parts):
        whole |= _reasoning(reasoning)
    return whole | ({"tool_calls": calls} if calls else {})


def _reasoning(text: str) -> dict[str, Any]:
    """By vLLM's and OpenRouter's name, and by DeepSeek's, SGLang's and llama.cpp's: clients know one or the other."""
    return {"reasoning": text, "reasoning_content": text}


def _fed(parser: ReasoningParser | HarmonyParser | ToolParser | None, pieces: Iterable[Piece], delta: TokenDelta) -> Iterable[Piece]:
    """The pieces of a delta with their content read by the parser."""
    if parser is None:
        return pieces
    found: list[Piece] = []
    for piece in pieces:
        found.extend(parser.feed(piece.text) if isinstance(piece, Content) else [piece])
    return found if delta.finish_reason is None else found + parser.finish(cut=delta.was_cut)


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces without empty ones, and one in place of neighbours of a kind."""
    joined: list[Piece] = []
    for piece in pieces:
        match joined[-1] if joined else None, piece:
            case (Content(before), Content(text)):
                joined[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                joined[-1] = Reasoning(before + text)
            case (Arguments(before), Arguments(text)):
                joined[-1] = Arguments(before + text)
            case _ if isinstance(piece, CallBegun) or piece.text:
                joined.append(piece)
            case _:
                pass
    return joined
