"""`foretoken generate`: one prompt, one answer, without a server; step by step if wanted.

Owns the flags and what is printed. The model is loaded as `serve` loads it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .config import ServerConfig
from .exit_status import USAGE, failed
from .generate_options import GenerateParser
from .launch import require_folders
from .loading import Loading, imported, kept
from .terminal.colors import Painter
from .terminal.tokens import TokenPlacer

if TYPE_CHECKING:
    from ..engine.bench.speculation_turn import Step, Turn
    from ..engine.boot import Engine
    from ..engine.request import Adapter, TokenDelta


def generate(argv: Sequence[str]) -> int:
    """Returns the exit status. Raises ForetokenError."""
    from ..engine.errors import InvalidRequest  # imports nothing heavy

    parser = GenerateParser()
    config, values = ServerConfig.of_command(argv, parser)
    prompt = values.get("prompt")
    if prompt is None:
        parser.error('which PROMPT? foretoken generate "Once upon a time", or - to read it from stdin')
    if prompt == "-":
        prompt = sys.stdin.read().rstrip("\n")
    if not prompt:
        parser.error("the PROMPT is empty")
    require_folders(config.engine)
    with Loading(brief=True) as progress:
        progress("loading PyTorch")
        with imported():
            from ..engine.boot import boot
        with kept():
            engine = boot(config.engine, progress)
    try:
        return _generate(engine, prompt, values)
    except InvalidRequest as error:
        return failed(error, USAGE)
    finally:
        engine.core.close()


def _generate(engine: Engine, prompt: str, values: dict[str, Any]) -> int:
    from ..engine.bench.speculation_turn import take
    from ..engine.request import SamplingParams

    token_ids = _token_ids(engine, prompt, values)
    params = SamplingParams(
        temperature=values.get("temperature", 0.0),
        top_p=values.get("top_p", 1.0),
        max_tokens=values.get("max_tokens"),
        stop=values.get("stop", ()),
        seed=values.get("seed"),
        speculation={"method": values.get("speculation", "auto")},
    )
    adapter = _adapter(engine, values["adapter"]) if "adapter" in values else None
    request = engine.intake.requests("generate", token_ids, params, time.monotonic(), adapter=adapter)
    written = Written(engine, Painter(sys.stdout, values.get("color", "auto")), steps="show_steps" in values, quiet="json" in values)
    turn = take(engine.core, request, 1, written.on_step, written.on_deltas)
    written.end()
    if "json" in values:
        print(json.dumps(_report(engine, prompt, token_ids, written, turn), ensure_ascii=False, indent=1))
    else:
        print(written.painter.dim(f"[{_summary(turn)}]"), file=sys.stdout if "show_steps" in values else sys.stderr)
    return 0


def _adapter(engine: Engine, name: str) -> Adapter:
    from ..engine.errors import InvalidRequest

    if engine.adapters is None:
        raise InvalidRequest(f"--adapter {name} needs --lora-modules {name}=FOLDER")
    return engine.adapters.require(name)


def _token_ids(engine: Engine, prompt: str, values: dict[str, Any]) -> list[int]:
    """As a question by the chat template, or as it is: by default whatever the model was made for. Raises ForetokenError."""
    from ..engine.chat_template import template_text
    from ..engine.errors import InvalidRequest
    from .chat_format import ChatFormat
    from .chat_messages import Message
    from .errors import ApiError

    has_template = bool(template_text(engine.tokenizer))
    if not values.get("chat", has_template):
        if "system" in values:
            raise InvalidRequest("--system is for chats, and this prompt is continued as it is: leave --system away, or ask with --chat")
        return engine.intake.encode(prompt)
    messages = [Message(role="system", content=values["system"])] if values.get("system") else []
    try:
        form = ChatFormat(engine.tokenizer, engine.intake.encode, defaults=values.get("default_chat_template_kwargs", {}))
        return asyncio.run(form.encode_chat([*messages, Message(role="user", content=prompt)])).token_ids
    except ApiError as error:
        message = "this model has no chat template; leave --chat away" if not has_template else error.message
        raise InvalidRequest(message, "prompt") from error


@dataclass
class Written:
    """What has come of the answer, shown as it comes: its text, or a line for each step."""

    engine: Engine
    painter: Painter
    steps: bool
    quiet: bool
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    proposers: list[str | None] = field(default_factory=list)  # who guessed each token; None = the target
    by_step: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    _placer: TokenPlacer = field(default_factory=TokenPlacer)
    _new: str = ""  # text of the step in progress, as it is shown

    def on_deltas(self, deltas: Sequence[TokenDelta]) -> None:
        self._new = ""
        for delta in deltas:
            proposers = [self.engine.proposer_names[source] if source >= 0 else None for source in delta.sources]
            tokens = [
                (str(self.engine.tokenizer.decode([token])), proposer)
                for token, proposer in zip(delta.token_ids, proposers, strict=True)
            ]
            self.text += delta.text
            self.token_ids += delta.token_ids
            self.proposers += proposers
            self.finish_reason = delta.finish_reason or self.finish_reason
            for piece in self._placer.add(delta.text, tokens):
                shown = repr(piece.text)[1:-1] if self.steps else piece.text
                self._new += self.painter.token(shown, piece.proposer)

    def on_step(self, step: Step) -> None:
        self.by_step.append(
            {"draft_ms": _ms(step.draft_s), "verify_ms": _ms(step.target_s), "drafted": step.drafted, "accepted": step.accepted}
        )
        if self.quiet:
            return
        if self.steps:
            print(f"{len(self.by_step):>4}  {step.describe():<58} '{self._new}'")
        else:
            print(self._new, end="", flush=True)

    def end(self) -> None:
        if not self.quiet and not self.steps:
            for piece in self._placer.finish():
                print(self.painter.token(piece.text, piece.proposer), end="")
            print(flush=True)


def _summary(turn: Turn) -> str:
    answer = turn.answers[0]
    tokens = len(answer.token_ids)
    guessed = f", {answer.accepted / answer.drafted:.0%} of guesses accepted" if answer.drafted else ""
    return f"{tokens} tokens, {tokens / max(turn.seconds, 1e-9):,.0f} tokens/s; {tokens / max(answer.passes, 1):.2f} a pass{guessed}"


def _report(engine: Engine, prompt: str, prompt_ids: Sequence[int], written: Written, turn: Turn) -> dict[str, Any]:
    answer = turn.answers[0]
    return {
        "model": engine.model.name,
        "prompt": prompt,
        "text": written.text,
        "token_ids": written.token_ids,
        "proposers": written.proposers,
        "finish_reason": written.finish_reason,
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(answer.token_ids),
            "total_tokens": len(prompt_ids) + len(answer.token_ids),
        },
        "metrics": {
            "time_to_first_token_ms": _ms(answer.first_s),
            "generation_time_ms": _ms(answer.decode_s),
            "tokens_per_second": round(len(answer.token_ids) / max(turn.seconds, 1e-9), 2),
            "tokens_per_pass": round(len(answer.token_ids) / max(answer.passes, 1), 4),
            "num_draft_tokens": answer.drafted,
            "num_accepted_draft_tokens": answer.accepted,
            "acceptance_histogram": answer.histogram,
        },
    } | ({"steps": written.by_step} if written.steps else {})


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
