"""Where each output stands in its grammar: which tokens may come next, behind its own tokens and behind guesses.

A state follows its request's tokens by itself. Looking ahead leaves no trace, so that the mask at a place depends on the tokens
before it only, whether they were guessed or not: a matcher goes forward only. Rolled back, llguidance's gives wrong masks now and
then (once in some 5,000 times, in recursive schemas), so guesses are read by a copy. Knows nothing of logits and of what is chosen.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidRequest
from .token_mask import Mask

if TYPE_CHECKING:
    from llguidance import LLMatcher

SLOW_MASK_S = 0.1
"""Of the processor's time. Masks are made between steps: everybody's tokens wait for one that takes longer."""
SLOW_MASKS_S = 0.5
"""All that one output may take up with such masks. Where a text can be read in ever more ways they become slower with its length, which
none of the compiler's limits knows beforehand."""

_LEFT = "the output has left its grammar"
_SLOW = "the grammar became too slow to follow: its text can be read in too many ways; simplify it"


@dataclass(frozen=True)
class Sayable:
    """What a target can say in a grammar: tokens that stand for text, and those that end it."""

    words: NDArray[np.uint32]  # bits as in Mask; ids behind the vocabulary are out, ends are in, other special tokens as the grammar says
    end_ids: frozenset[int]
    end: Mask  # end_ids only


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar over a target's tokens, ready for any number of outputs."""

    matcher: LLMatcher  # at the start; only ever copied
    sayable: Sayable

    def open(self, token_ids: Sequence[int]) -> GrammarState:
        """The state of an output that starts behind token_ids, which grow with it (a live view)."""
        return GrammarState(self, token_ids)


class GrammarState:
    """One output's place in its grammar.

    A path is tokens that are guessed to follow the known ones. `error`: why the grammar cannot be followed from here on; the output
    must end.
    """

    def __init__(self, grammar: CompiledGrammar, token_ids: Sequence[int]) -> None:
        self.error: str | None = None
        self._failure: Exception | None = None
        self._grammar = grammar
        self._token_ids = token_ids
        self._start = self._num_known = len(token_ids)
        self._has_ended = False
        self._matcher = grammar.matcher.deep_copy()  # has read known tokens only, the first _num_read of the output
        self._num_read = 0
        self._ahead: LLMatcher | None = None  # has read all known tokens and _path behind them
        self._path: tuple[int, ...] = ()
        self._masks: dict[tuple[int, ...], Mask | None] = {}  # by path behind the known tokens
        self._slow_s = 0.0  # that slow masks have taken
        self._pool: list[Mask] = []

    def require(self) -> None:
        """Raise InvalidRequest if the output cannot go on, or what was raised when its mask was made."""
        if self.mask(()) is None:
            raise self._failure or InvalidRequest(self.error or "the grammar cannot be followed")

    def mask(self, path: Sequence[int]) -> Mask | None:
        """What may come behind a path; valid until the request grows. None: the grammar cannot be followed there.

        Behind an end, and behind what is not in the language, only ends may come.
        """
        key = tuple(path)
        try:
            self._follow()
            if key not in self._masks:
                started = time.thread_time()
                self._masks[key] = self._computed(key)
                if (took := time.thread_time() - started) > SLOW_MASK_S:
                    self._slow_s += took
                    if self._slow_s > SLOW_MASKS_S:
                        self.error = _SLOW
        except Exception as error:  # masks are made between steps, too: raised there, it would end everybody's outputs
            self._failure = None if key else error
            self._broken(self._matcher, key, repr(error))
        return self._masks.get(key)

    def forced(self, limit: int) -> list[int]:
        """The next tokens as long as the grammar leaves no choice, at most `limit`."""
        run: list[int] = []
        while len(run) < limit and (mask := self.mask(run)) is not None and (token := mask.only) is not None:
            run.append(token)
            if token in self._grammar.sayable.end_ids:
                break
        return run

    def legal(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Nodes of a draft, in order, that may be said: each one behind those that lead to it."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        legal: list[int] = []
        open_nodes: list[tuple[int, tuple[int, ...]]] = [(-1, ())]
        while open_nodes:  # branch by branch: going back to another one takes a copy
            parent, path = open_nodes.pop()
            if (mask := self.mask(path)) is None:
                continue  # where the grammar breaks only the target itself may go: then the output ends there, guessed or not
            if parent >= 0:
                legal.append(parent)
            following = [node for node in children.get(parent, ()) if mask.allows(token_ids[node])]
            open_nodes += [(node, (*path, token_ids[node])) for node in reversed(following)]
        return sorted(legal)

    def _follow(self) -> None:
        """Take in what the request has grown by."""
        new = self._token_ids[self._num_known :]
        if not new:
            return
        self._num_known += len(new)
        self._pool += [mask for mask in self._masks.values() if mask is not None and mask is not self._grammar.sayable.end]
        self._masks.clear()
        if self._has_ended or self.error is not None:
            return
        if not self._grammar.sayable.end_ids.isdisjoint(new):
            self._has_ended = True
            return
        if self._ahead is not None and self._path[: len(new)] == tuple(new[: len(self._path)]):  # what was said is what was guessed
            rest = new[len(self._path) :]
            if self._ahead.try_consume_tokens([*rest]) == len(rest):
                self._path = self._path[len(new) :]
                return
        self._ahead = None
        self._catch_up()

    def _computed(self, path: tuple[int, ...]) -> Mask | None:
        sayable = self._grammar.sayable
        if self.error is not None:
            return None
        if self._has_ended or not sayable.end_ids.isdisjoint(path):
            return sayable.end
        matcher, understood = self._behind(path)
        if self.error is not None:
            return None
        if matcher.is_error():
            return self._broken(matcher, path)
        if not understood or matcher.is_stopped():
            return sayable.end
        mask = self._pool.pop() if self._pool else Mask(len(sayable.words))
        matcher.unsafe_compute_mask_ptr(mask.address, mask.bits.nbytes)
        if matcher.is_error():
            return self._broken(matcher, path)
        mask.bits &= sayable.words
        if not mask.bits.any():
            return self._broken(matcher, path, "the grammar asks for a token that stands for no text")
        return mask

    def _behind(self, path: tuple[int, ...]) -> tuple[LLMatcher, bool]:
        """A matcher that has read this path, and whether it could: else the language has no text that starts like this."""
        ahead = self._ahead
        if ahead is None or path[: len(self._path)] != self._path:
            if not self._catch_up() or not path:
                return self._matcher, self.error is None
            ahead, self._path = self._matcher.deep_copy(), ()
            self._ahead = ahead
        num_read = ahead.try_consume_tokens([*path[len(self._path) :]])
        self._path = path[: len(self._path) + num_read]
        return ahead, self._path == path

    def _catch_up(self) -> bool:
        """Let the matcher read what it has not of the known tokens. False if it cannot, which is an error."""
        new = [*self._token_ids[self._start + self._num_read : self._num_known]]
        if new and self._matcher.try_consume_tokens(new) < len(new):
            self.error = _too_complex(self._matcher) if self._matcher.is_error() else _LEFT
        self._num_read += len(new)
        return self.error is None

    def _broken(self, matcher: LLMatcher, path: tuple[int, ...], why: str = "") -> None:
        """The matcher gave up behind this path: for the known tokens that is the end, a guess is only not worth it."""
        if not path:
            self.error = why or _too_complex(matcher)
        self._ahead = None


def _too_complex(matcher: LLMatcher) -> str:
    return f"the grammar became too complex to follow ({matcher.stop_reason()}); simplify it"
