"""A few of a family's held-out prompts, kept beside its weights: what `foretoken bench` measures the embedded model with.

Categories are those of the prompt sets (prompt_sets.py). Answers are not kept: they are the model's own.
"""

import gzip
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...proposers.training.encoding import Prompt

CATEGORIES: Mapping[str, Sequence[str]] = {
    "edits": ("edits",), "json": ("json",), "retrieval": ("stories",), "chat": ("talk", "shell", "facts"),
}
PER_CATEGORY = 32
FENCE = "```"


def write_prompts(path: Path, prompts: Sequence[tuple[str, Prompt]], seed: int) -> None:
    """JSON lines of category, messages and, for code to be edited, prediction; packed where the path ends in .gz.

    prompts: (domain, prompt).
    """
    rows: list[dict[str, Any]] = []
    for category, domains in CATEGORIES.items():
        waiting = [[prompt for of, prompt in prompts if of == domain and is_plain(prompt)] for domain in domains]
        for number, some in enumerate(waiting):
            random.Random(f"{seed} {category} {number}").shuffle(some)
            del some[PER_CATEGORY // len(domains):]
        for prompt in (one for some in waiting for one in some):
            row: dict[str, Any] = {"category": category, "messages": prompt.messages}
            if category == "edits" and (code := code_of(prompt.messages[-1]["content"])):
                row["prediction"] = code
            rows.append(row)
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def is_plain(prompt: Prompt) -> bool:
    """One question, without tools."""
    return not prompt.tools and [message["role"] for message in prompt.messages][-1:] == ["user"] and len(prompt.messages) <= 2 and all(
        message["role"] in ("system", "user") for message in prompt.messages)


def code_of(text: str) -> str:
    """The only block of code in a text, with its fences; "" if there is none, or more than one."""
    parts = text.split(FENCE)
    return f"{FENCE}{parts[1]}{FENCE}" if len(parts) == 3 else ""
