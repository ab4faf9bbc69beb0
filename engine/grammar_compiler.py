"""From schemas, expressions and grammars to what masks a target's tokens, through llguidance. Compiled ones are kept for the next request.

Compiling runs in threads of its own, under a deadline and limits of size: nobody's grammar may hold up the others, or fill the memory.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TookTooLong
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from .errors import InvalidGrammar, QueueFull
from .gbnf import is_gbnf, lark_of
from .grammar import SLOW_MASK_S, CompiledGrammar, Sayable
from .grammar_spec import GrammarSpec
from .json_dialects import enforceable
from .token_mask import Mask, bits_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEADLINE_S = 2.0
QUEUE_S = 5.0
"""For so long one waits behind those of others."""
NUM_KEPT = 64
"""A lexer finds its states while outputs are written and keeps them: of a hostile expression some 50 MB, of most grammars none."""
NUM_THREADS = 2
STACK_BYTES = 256 * 2**20
"""Address space: llguidance follows references from schema to schema by recursion, and a stack that overflows ends the process.
The longest chain that the limits of size allow takes some 50 MB."""
WHITESPACE = r"(|\x20|\x0A[\x20\x09]{0,16})"
"""Between the parts of JSON: none, a space or an indented line. Small models like to go on with spaces for ever."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


class GrammarCompiler:
    """Compiles for one target. May be called from any thread, but not from one that others wait for."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        end_ids: Iterable[int],
        deadline_s: float = DEADLINE_S,
        num_kept: int = NUM_KEPT,
    ) -> None:
        """vocab_size: width of the logits. end_ids: tokens that end an output. The vocabulary is read on first use: a second."""
        self.deadline_s = deadline_s
        self._num_kept = num_kept
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = frozenset(end_ids)
        self._tokens: _Vocabulary | None = None
        self._kept: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()  # latest used last
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "foretoken-grammar")  # which start when there is something to do

    def has(self, spec: GrammarSpec) -> bool:
        """Whether it is compiled."""
        with self._lock:
            return spec in self._kept

    def compile(self, spec: GrammarSpec, asked_at: float | None = None) -> CompiledGrammar:
        """asked_at: since when one waits for it, by the monotonic clock; None = now.

        Raises InvalidGrammar with what is wrong, also if it takes longer than the deadline; QueueFull if others take too long.
        """
        asked_at = time.monotonic() if asked_at is None else asked_at
        with self._lock:
            if spec in self._kept:
                self._kept.move_to_end(spec)
                return self._kept[spec]
        before = time.monotonic()
        vocabulary = self._vocabulary(spec)
        asked_at += time.monotonic() - before  # which is no other form's doing
        begun = threading.Event()

        def work() -> CompiledGrammar:
            begun.set()
            return _compiled(spec, vocabulary)

        job = self._submit(work)
        if not begun.wait(max(asked_at + QUEUE_S - time.monotonic(), 0)) and job.cancel():
            raise QueueFull("too many forms are being compiled", 1)
        try:
            compiled = job.result(self.deadline_s)
        except TookTooLong:
            raise InvalidGrammar(
                f"the {_NAMES[spec.kind]} could not be compiled within {self.deadline_s:g} s; simplify it", spec.param
            ) from None
        with self._lock:
            self._kept[spec] = compiled
            while len(self._kept) > self._num_kept:
                self._kept.popitem(last=False)
        return compiled

    def _submit(self, work: Callable[[], CompiledGrammar]) -> Future[CompiledGrammar]:
        with self._lock:
            before = threading.stack_size(STACK_BYTES)
            try:
                return self._threads.submit(work)
            finally:
                threading.stack_size(before)

    def _vocabulary(self, spec: GrammarSpec) -> _Vocabulary:
        with self._reading:
            if self._tokens is None:
                self._tokens = _read_vocabulary(self._tokenizer, self._vocab_size, self._end_ids, spec.param)
            return self._tokens


@dataclass(frozen=True)
class _Vocabulary:
    tokenizer: LLTokenizer
    text: Sayable
    text_and_special: Sayable


def _read_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_ids: frozenset[int], param: str) -> _Vocabulary:
    known_ids = tokenizer.get_vocab().values()
    size = max(vocab_size, max(known_ids, default=0) + 1)
    ends = sorted(token for token in end_ids if 0 <= token < vocab_size)
    if not ends:
        raise InvalidGrammar("this model has no token that ends an output, so that no form can be enforced", param)
    try:
        tokens = LLTokenizer(_nameless(tokenizer), n_vocab=size, eos_token=ends)
    except (AttributeError, ValueError, RuntimeError) as error:
        raise InvalidGrammar(f"the form of an output cannot be enforced with this model's tokenizer: {_line(error)}", param) from error
    can_come = {token for token in known_ids if token < vocab_size}
    special = {token for token in can_come if tokens.is_special_token(token)}
    end = Mask.of(ends, size)
    text, everything = (bits_of([*some, *ends], size) for some in (can_come - special, can_come))
    return _Vocabulary(tokens, Sayable(text, frozenset(ends), end), Sayable(everything, frozenset(ends), end))


def _nameless(tokenizer: PreTrainedTokenizerBase) -> str:
    """A tokenizer as JSON, its special tokens, and those that look so, under names that no text has.

    To the library they are no text, but where a text is all that may come it takes the tokens that the tokenizer makes of it: of a word
    that is such a token's name that would be the token, and the output had left its grammar.
    """
    backend: Any = copy(tokenizer.backend_tokenizer)  # type: ignore[attr-defined]
    backend.no_padding()
    backend.no_truncation()
    names = {
        json.dumps(entry.content, ensure_ascii=False): f'"<\ue000{token}>"'
        for token, entry in tokenizer.added_tokens_decoder.items()
        if entry.special or (entry.content.startswith("<") and entry.content.endswith(">"))
    }
    return _STRING.sub(lambda found: names.get(found[0], found[0]), backend.to_str())


def _compiled(spec: GrammarSpec, vocabulary: _Vocabulary) -> CompiledGrammar:
    what = _NAMES[spec.kind]
    try:
        text = _grammar_text(spec)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(f"the {what} is not valid: {_line(error)}", spec.param) from None
    matcher = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=LIMITS)
    if matcher.is_error():
        why = _OFFERED.sub("", matcher.get_error().replace(*_ONE_OF))
        raise InvalidGrammar(f"the {what} cannot be enforced: {_line(why)}", spec.param)
    sayable = vocabulary.text_and_special if spec.trusted else vocabulary.text
    compiled = CompiledGrammar(matcher, sayable)
    first = compiled.open(())
    if first.mask(()) is None:  # before anybody waits for it
        raise InvalidGrammar(f"the {what} cannot be enforced: {first.error}", spec.param)
    again = compiled.open(())  # the first time builds the states of the lexer too, which all share
    started = time.thread_time()
    again.mask(())
    if (took := time.thread_time() - started) > SLOW_MASK_S:  # thousands of symbols that can all be empty: with their square it grows
        raise InvalidGrammar(f"the {what} cannot be enforced: every token would wait {took:.1f} s for it; use fewer symbols", spec.param)
    return compiled


def _grammar_text(spec: GrammarSpec) -> str:
    """In llguidance's own form."""
    json_options = {"whitespace_pattern": WHITESPACE, "lenient": not spec.strict}
    match spec.kind:
        case "json_schema":
            text = json.dumps(enforceable(json.loads(spec.text), spec.strict), allow_nan=False)
            return LLMatcher.grammar_from_json_schema(text, overrides=json_options)  # type: ignore[arg-type]
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=json_options)  # type: ignore[arg-type]
        case "regex":
            return LLMatcher.grammar_from_regex(spec.text)
        case "choice":
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(json.loads(spec.text)))
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        case "grammar":
            return LLMatcher.grammar_from_lark(lark_of(spec.text) if is_gbnf(spec.text) else spec.text)


_ONE_OF = (
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
    "more than one schema of a oneOf could hold; use anyOf, or require a property with a const of its own in each",
)
"""What the library says of options that a client does not have, and what a client can do."""
_OFFERED = re.compile("; following special tokens are available: ⟦.*⟧")
_NAMES = {
    "json_schema": "JSON schema",
    "json_object": "JSON object",
    "regex": "regular expression",
    "choice": "list of choices",
    "grammar": "grammar",
}


def _line(error: object) -> str:
    """An error on one line of at most 300 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."
