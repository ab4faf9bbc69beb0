"""Held-out prompts, and the target's plain answers to them: greedy, without speculation, and how many of them are well-formed.

And how likely the target finds the answers that the corpus has.
"""

import json
from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

from transformers import PreTrainedTokenizerFast

from ...engine.bench.acceptance import answer
from ...engine.bench.scoring import score
from ...engine.bench.speculation_turn import Answer
from ...engine.boot import Engine, boot
from ...engine.llm_options import engine_config
from ...proposers.training.answers import check_answer
from ...proposers.training.corpus import Conversation
from ...proposers.training.encoding import Prompt, encode, encode_prompt
from ...proposers.training.reading import DataError, parse_record
from .cells import Cells
from .members import FamilyFolder

NUM_TRANSCRIPTS = 3
MAX_NUM_SEQS = 32                    # answered together, few enough for every row to have a full draft


@dataclass(frozen=True)
class Asked:
    """A held-out prompt in the target's tokens."""

    prompt: Prompt
    token_ids: list[int]


@dataclass(frozen=True)
class Effort:
    """What is asked of everybody."""

    max_tokens: int
    ks: tuple[int, ...]
    threads: int | None

    @property
    def options(self) -> dict[str, Any]:
        """Of engines: nothing is remembered from one run to the next."""
        threads = {"threads": self.threads} if self.threads else {}
        return {"max_num_seqs": MAX_NUM_SEQS, "enable_prefix_caching": False, **threads}


class Booted:
    """An engine with one method."""

    def __init__(self, family: FamilyFolder, method: str, effort: Effort) -> None:
        speculation = family.speculation(method, max(effort.ks))
        self.engine: Engine = boot(engine_config(family.target, speculation, effort.options))
        self.mark = family.mark(method)
        self.most = max((p.max_tokens for p in self.engine.core.controller.proposers if p.name == method), default=0)

    def close(self) -> None:
        self.engine.core.close()


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerFast, per_domain: int, room: int) -> dict[str, list[Asked]]:
    """By domain, evenly over the file's prompts; those of more than `room` tokens are left out. Raises DataError with file and line."""
    rows: dict[str, list[Prompt]] = {}
    for number, line in enumerate(path.read_bytes().removeprefix(BOM_UTF8).splitlines(), 1):
        if line.strip():
            try:
                domain, prompt = _prompt(json.loads(line))
            except ValueError as error:
                raise DataError(f"{path}:{number}: {error}") from error
            rows.setdefault(domain, []).append(prompt)
    if not rows:
        raise DataError(f"{path}: there are no prompts in it")
    asked: dict[str, list[Asked]] = {}
    for domain, prompts in rows.items():
        step = max(1, len(prompts) // per_domain)
        evenly = sorted(range(len(prompts)), key=lambda i: (i % step, i))    # the others stand in for what is too long
        fitting = (one for i in evenly if len((one := Asked(prompts[i], encode_prompt(prompts[i], tokenizer))).token_ids) <= room)
        asked[domain] = list(islice(fitting, per_domain))
    return asked


def _prompt(row: Any) -> tuple[str, Prompt]:
    """One record and its domain: "prompts" where it names none. Its reference, a message or only its text, may be missing.

    Raises DataError, without a place.
    """
    if not isinstance(row, dict) or "messages" not in row:
        raise DataError("is no object with `messages`")
    parsed = parse_record({"messages": row["messages"], "tools": row.get("tools")}, "")
    assert isinstance(parsed, Conversation)
    said = row.get("reference") or ""
    reference = {"role": "assistant", "content": said} if isinstance(said, str) else said
    if said:
        whole = parse_record({"messages": [*parsed.messages, reference]}, "")
        assert isinstance(whole, Conversation)
        reference = whole.messages[-1]
    return str(row.get("domain") or "prompts"), Prompt(parsed.messages, parsed.tools, reference)


def plain_answers(plain: Booted, domain: str, asked: Sequence[Asked], effort: Effort, cells: Cells) -> list[Answer]:
    """The target's own, greedy, without speculation."""
    key = ("answers", domain, plain.mark, effort.max_tokens, digest(asked))
    kept = cells.get(*key) or cells.put(
        *key, result={"answers": [asdict(one) for one in answer(plain.engine, [one.token_ids for one in asked], effort.max_tokens)]})
    return [Answer(**one) for one in kept["answers"]]


def reference_losses(plain: Booted, tokenizer: PreTrainedTokenizerFast, asked: Sequence[Asked]) -> list[float]:
    """Nats of each token of the corpus's answers, behind their prompts. What is missing or beyond the context has none."""
    model, losses = plain.engine.model, list[float]()
    for one in asked:
        said = one.prompt.reference
        if not (said.get("content") or said.get("tool_calls")):
            continue
        (whole,) = encode([Conversation([*one.prompt.messages, said], 0, one.prompt.tools)], tokenizer)
        if len(whole) <= model.max_model_len:
            first = len(one.token_ids)
            found = score(model.executor, [whole.token_ids.tolist()]).losses.numpy()
            losses += found[first - 1:][whole.learn[first:] == 1].tolist()
    return losses


def form_of(asked: Sequence[Asked], answers: Sequence[Answer]) -> dict[str, Any]:
    """Well-formed answers by kind as [good, all], and the first transcripts as they came."""
    findings = [check_answer(one.prompt, found.text) for one, found in zip(asked, answers, strict=True)]
    counts: dict[str, list[int]] = {}
    for finding in findings:
        if finding is not None:
            good, total = counts.get(finding.kind, (0, 0))
            counts[finding.kind] = [good + (finding.fault is None), total + 1]
    transcripts = [
        {"messages": one.prompt.messages, "tools": one.prompt.tools, "answer": found.text,
         "finish_reason": found.finish_reason, "fault": finding and finding.fault}
        for one, found, finding in islice(zip(asked, answers, findings, strict=True), NUM_TRANSCRIPTS)
    ]
    cut = sum(found.finish_reason == "length" for found in answers)
    return {"prompts": len(asked), "cut_off": cut, "well_formed": counts, "transcripts": transcripts}


def digest(asked: Sequence[Asked]) -> int:
    return crc32(json.dumps([one.token_ids for one in asked]).encode())
