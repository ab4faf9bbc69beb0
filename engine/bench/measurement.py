"""What a benchmark finds: a flat list of figures, each with its case, its unit and what it was compared with in the same rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from .checkpoints import Model
from .interleaved import Series, Spread
from .machine import Machine

Precision = Literal["float32", "bf16", "int8", "int4"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bf16", "int8", "int4")

MACHINE = "machine"
LEVELS = ("network", "LLM.generate", "HTTP", "HTTP streamed")
NETWORK, GENERATE, SERVER, STREAMED = LEVELS


@dataclass(frozen=True)
class Measurement:
    """One figure. `ratio` is to the case named by `ratio_to`, round by round; None if it stands for itself."""

    model: str  # "" = no model's
    precision: Precision
    level: str  # one of LEVELS, MACHINE, or the name of a peer
    case: str
    x: int  # what the case varies: context, tokens, rows, streams, threads
    unit: str
    value: Spread
    ratio: Spread | None = None
    ratio_to: str = ""


@dataclass(frozen=True)
class Subject:
    """What is measured: a model in a precision, with what its engine is to be told."""

    model: Model
    precision: Precision
    threads: int

    @property
    def options(self) -> dict[str, str | int]:
        """As `LLM(...)` names them; with hyphens they are flags of the server."""
        dtype = "float32" if self.precision == "float32" else "bfloat16"
        narrow = self.precision if self.precision.startswith("int") else "none"
        return {"device": "cpu", "dtype": dtype, "threads": self.threads, "quantization": narrow}  # also where there is a GPU

    def measurement(
        self, level: str, case: str, x: int, unit: str, value: Series, ratio_to: Series | None = None, named: str = ""
    ) -> Measurement:
        ratio = None if ratio_to is None else value.over(ratio_to)
        return Measurement(self.model.name, self.precision, level, case, x, unit, value.spread, ratio, named)


@dataclass(frozen=True)
class Results:
    """Everything of one run, as it is written to JSON."""

    schema: int
    command: str
    machine: Machine
    effort: Effort
    skipped: tuple[str, ...]  # what could not be measured, and why
    measurements: tuple[Measurement, ...]

    def of(self, level: str, case: str) -> list[Measurement]:
        return [m for m in self.measurements if m.level == level and m.case == case]


@dataclass(frozen=True)
class Effort:
    """How long to measure: everything that trades time for certainty."""

    rounds: int = 7
    slot_s: float = 0.2  # of one case in one round, for short cases
    decode_tokens: int = 64  # of one generation
    contexts: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)
    verified: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    rows: tuple[int, ...] = (1, 8, 32)
    decode_contexts: tuple[int, ...] = (128, 1024)
    prompt_tokens: int = 512  # of a prefill
    verified_context: int = 512
    rows_context: int = 256
    load_prompt_tokens: int = 128  # of a request under load, and of one that is compared with another program's
    drafted_prompts: int = 3  # a round: what a draft model gains differs by half from prompt to prompt

    def within(self, positions: int) -> Effort:
        """The same as far as a model of so many positions goes."""
        new = max(self.decode_tokens, *self.verified)
        return replace(
            self,
            contexts=tuple(c for c in self.contexts if c + new <= positions),
            decode_contexts=tuple(c for c in self.decode_contexts if c + new <= positions),
            prompt_tokens=min(self.prompt_tokens, max(positions - new, 1)),
            verified_context=min(self.verified_context, max(positions - new, 1)),
            rows_context=min(self.rows_context, max(positions - new, 1)),
            load_prompt_tokens=min(self.load_prompt_tokens, max(positions - new, 1)),
        )


QUICK = Effort(rounds=2, slot_s=0.02, decode_tokens=16, contexts=(128, 512, 1024), rows=(1, 4), verified=(1, 4, 16), drafted_prompts=1)

Announce = Callable[[str], None]
