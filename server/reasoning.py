"""The reasoning that a model writes before its answer, between markers such as <think> and </think>, told from the answer.

Knows the names that vLLM gives to these formats, and which of them a chat template speaks of.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .tools.scanner import Content, Reasoning, Scanner, Waiting
from .tools.sections import KimiK2


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model family marks its reasoning."""

    begin: str = "<think>"
    end: str = "</think>"
    begins_inside: bool = False  # an answer without a marker at its start is reasoning up to the end marker
    answer: tuple[str, str] | None = None  # markers of what follows the reasoning
    turn: str = ""  # begins another message behind the reasoning
    call: str = ""  # begins calls, and so ends reasoning as well; it belongs to what follows
    lead: str = ""  # begins the answer's message, reasoning or not; a prompt that is continued has it

    @property
    def ends(self) -> tuple[str, ...]:
        """The markers that end reasoning."""
        return (self.end, self.call) if self.call else (self.end,)

    def inside(self, prompt: str, continued: str | None = None) -> bool:
        """Whether what follows this prompt begins inside of reasoning. continued: the message of the assistant that it goes on with.

        Only the prompt's very end counts, which is the template's: what a user writes opens nothing.
        """
        if continued is not None:
            opened, closed = continued.rfind(self.begin), continued.rfind(self.end)
            return opened > closed
        prompt = prompt.rstrip()
        if prompt.endswith(self.end):
            return False
        return self.begins_inside or prompt.endswith(self.begin)


_THINK, _THINK_AT_ONCE = ReasoningFormat(), ReasoningFormat(begins_inside=True)
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "deepseek_r1": _THINK_AT_ONCE,
    "minimax_m2": _THINK_AT_ONCE,
    "qwen3": _THINK,
    "deepseek_v3": _THINK,  # V3.1: not at all unless the prompt begins it
    "ernie45": ReasoningFormat(begins_inside=True, answer=("<response>", "</response>")),
    "glm45": _THINK,
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),  # 3.2
    "granite3_3": ReasoningFormat(answer=("<response>", "</response>")),
    "hunyuan_a13b": ReasoningFormat(answer=("<answer>", "</answer>")),
    "kimi_k2": ReasoningFormat(call=KimiK2.opening),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "olmo3": _THINK_AT_ONCE,
    "openai_gptoss": ReasoningFormat(
        "<|channel|>analysis<|message|>", "<|end|>", turn="<|start|>assistant", lead="<|channel|>final<|message|>"
    ),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>", begins_inside=True),
}


def detected(template: str) -> ReasoningFormat | None:
    """The format that a chat template speaks of; None if it speaks of none that is known."""
    for name in ("openai_gptoss", "mistral", "seed_oss", "gemma4", "granite", "granite3_3", "hunyuan_a13b", "kimi_k2"):
        format = REASONING_FORMATS[name]
        if all(word in template for word in (format.begin, format.end, format.call, *(format.answer or ()))):
            return format
    # Some only drop the reasoning of earlier turns: whether there is any is then the model's matter, which writes the first marker, too.
    return _THINK if _THINK.end in template else None


class ReasoningParser(Scanner):
    """Gives out reasoning and what follows it, without the markers and the white space around them."""

    def __init__(self, format: ReasoningFormat, inside: bool) -> None:
        super().__init__()
        self._format = format
        self.inside = inside  # so far

    def scan(self) -> Waiting[None]:
        yield from self.space()
        if (yield from self.skip(self._format.begin)):
            self.inside = True
        if self.inside:
            yield from self.space()
            self.settle()
            if not (marker := (yield from self.until(self._format.ends, Reasoning))):
                return
            self.inside = False
            if marker == self._format.call:
                self._at -= len(marker)
                self.settle()
                return
            yield from self.space()
            self.settle()
        if self._format.answer is not None:
            begin, end = self._format.answer
            yield from self.space()
            if (yield from self.skip(begin)):
                yield from self.space()
                self.settle()
                if (yield from self.until((end,), Content)):
                    self.settle()
                return
        self._at = self._mark


class ReasoningTokens:
    """Counts an output's tokens up to the one that ends its reasoning, by their own bytes: it does not matter how many come at once."""

    def __init__(self, format: ReasoningFormat, inside: bool, piece: Callable[[int], bytes]) -> None:
        """piece(token): its bytes."""
        self.count = 0
        self._begin, self._ends = format.begin.encode(), tuple(marker.encode() for marker in format.ends)
        self._inside = inside
        self._piece = piece
        self._num_read = 0
        self._tail = b""  # what a marker may have begun in
        self._is_over = False

    def feed(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if self._is_over:
                return
            self._num_read += 1
            self._tail += self._piece(token)
            if not self._inside:
                self._tail = self._tail.lstrip()
                self._inside = self._tail.startswith(self._begin)
                self._is_over = not self._inside and not self._begin.startswith(self._tail)
            if self._inside:
                self.count = self._num_read
                self._is_over = any(end in self._tail for end in self._ends)
                self._tail = self._tail[-max(map(len, self._ends)) :]
