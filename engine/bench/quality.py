"""What narrow number formats cost in perplexity, in the choice of tokens and in accepted drafts.

Every format reads the same text and continues the same prompts. Loads networks and runs them; no requests are served.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from ...kernels import native
from ...kernels.layout import Executor
from ...proposers.config_entry import SpeculativeConfigError
from ...proposers.vocabularies import check_vocabularies
from ..config import ModelConfig
from ..errors import ConfigError
from ..model import LoadedModel, load_model
from .held_out import read_sample
from .machine import Machine, this_machine
from .measurement import Announce
from .network import set_threads
from .scoring import Scores, greedy_answers, greedy_matches, mean_accepted_length, score

FORMATS: Mapping[str, Mapping[str, str]] = {
    "bfloat16": {"dtype": "bfloat16", "quantization": "none"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int8-cache": {"dtype": "bfloat16", "quantization": "none", "kv_cache_dtype": "int8"},
    "float32": {"dtype": "float32", "quantization": "none"},
}
REFERENCE = "bfloat16"  # measured whatever is asked for: the others are compared with it
DRAFT_FORMATS = ("bfloat16", "int8", "int4")
DRAFT_LENGTHS = (3, 5)


@dataclass(frozen=True)
class FormatQuality:
    """One format of the target beside the reference."""

    name: str
    weight_mb: float  # read by a pass
    perplexity: float
    change: float  # of the perplexity, relative
    change_error: float  # standard error of `change`, token by token
    agreement: float  # share of positions whose most likely token is the reference's
    accepted_length: dict[str, dict[int, float]]  # by format of the draft and k: mean accepted length, greedy


@dataclass(frozen=True)
class QualityReport:
    """Everything of one run, as it is written to JSON."""

    command: str
    machine: Machine
    model: str
    draft: str | None
    num_tokens: int  # scored
    num_prompts: int
    answer_tokens: int  # most in an answer
    formats: list[FormatQuality]
    skipped: list[str]  # what could not be measured, and why


def measure(
    model: str, draft: str | None, text: str, formats: Sequence[str], context: int, num_prompts: int, answer_tokens: int,
    announce: Announce, command: str = "",
) -> QualityReport:
    """Run every format, one network in memory at a time beside the drafts. Raises ConfigError, with ModelLoadError.

    A format that cannot be had on this machine is left out, and the report says why; the reference must be there.
    """
    native.set_threads(native.usable_cores())
    skipped: list[str] = []
    reference = load(model, REFERENCE, announce)
    drafts = _load_drafts(draft, reference.tokenizer, skipped, announce) if draft else {}
    longest = min([reference.max_model_len, *(executor.max_model_len for executor in drafts.values())])
    sample = read_sample(reference.tokenizer, text, min(context, reference.max_model_len), num_prompts, longest - answer_tokens)
    expected = score(reference.executor, sample.windows)
    found: list[FormatQuality] = []
    for name in dict.fromkeys((REFERENCE, *formats)):
        try:
            target = reference if name == REFERENCE else load(model, name, announce)
        except ConfigError as error:
            skipped.append(f"{name}: {error}")
            announce(f"left out: {skipped[-1]}")
            continue
        scores = expected if name == REFERENCE else score(target.executor, sample.windows)
        answers = greedy_answers(target.executor, sample.prompts, target.eos_token_ids, answer_tokens) if drafts else []
        accepted: dict[str, dict[int, float]] = {}
        for kind, executor in drafts.items():
            matches = greedy_matches(executor, sample.prompts, answers)
            accepted[kind] = {k: mean_accepted_length(matches, k) for k in DRAFT_LENGTHS}
        found.append(_compare(name, target.executor, scores, expected, accepted))
        announce(f"{name}: perplexity {scores.perplexity:.3f}")
    return QualityReport(
        command, this_machine(), model, draft, len(expected.losses), len(sample.prompts), answer_tokens, found, skipped
    )


def load(model: str, name: str, announce: Announce = lambda line: None) -> LoadedModel:
    """A network in one of FORMATS. Raises ConfigError where this machine has no such format for it."""
    loaded = load_model(replace(ModelConfig(model), **FORMATS[name]), announce)
    set_threads(loaded.plan, native.usable_cores())
    return loaded


def _load_drafts(draft: str, tokenizer: PreTrainedTokenizerBase, skipped: list[str], announce: Announce) -> dict[str, Executor]:
    drafts: dict[str, Executor] = {}
    for name in DRAFT_FORMATS:
        try:
            loaded = load(draft, name, announce)
            check_vocabularies(tokenizer, loaded.tokenizer)
        except SpeculativeConfigError as error:
            raise ConfigError(f"draft {draft}: {error}") from error
        except ConfigError as error:
            if name == REFERENCE:
                raise
            skipped.append(f"{name} draft: {error}")
            announce(f"left out: {skipped[-1]}")
            continue
        drafts[name] = loaded.executor
    return drafts


def _compare(name: str, executor: Executor, scores: Scores, expected: Scores, accepted: dict[str, dict[int, float]]) -> FormatQuality:
    difference = (scores.losses - expected.losses).double()
    change = math.expm1(difference.mean().item())
    error = (1 + change) * difference.std().item() / math.sqrt(len(difference))
    agreement = (scores.top == expected.top).double().mean().item()
    return FormatQuality(name, executor.weight_bytes / 1e6, scores.perplexity, change, error, agreement, accepted)
