"""A request's life inside the engine: what was asked (SamplingParams), what it has become (Request), what it gives (TokenDelta)."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal

from ..kernels.record import record
from .errors import InvalidRequest
from .grammar_spec import GrammarSpec, StructuredOutputsParams

if TYPE_CHECKING:
    from .grammar import GrammarState
    from .prompt_logprobs import PromptLogprobs
    from .thinking_budget import ThinkingBudget, ThinkingState

MAX_CHOICES = 16_384
MAX_LOGPROB_TOKENS = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_BIASED_TOKENS = 1024
_RANGES: dict[str, tuple[type[int] | type[float], float, float]] = {
    "n": (int, 1, MAX_CHOICES),
    "temperature": (float, 0, 100),
    "top_p": (float, 0, 1),
    "top_k": (int, -1, 2**31 - 1),
    "min_p": (float, 0, 1),
    "repetition_penalty": (float, 0.01, 100),
    "frequency_penalty": (float, -2, 2),
    "presence_penalty": (float, -2, 2),
    "max_tokens": (int, 0, 2**31 - 1),
    "min_tokens": (int, 0, 2**31 - 1),
    "logprobs": (int, -1, 2**31 - 1),
    "prompt_logprobs": (int, -1, 2**31 - 1),
    "seed": (int, -(2**63), 2**63 - 1),
}
_OPTIONAL = ("max_tokens", "logprobs", "prompt_logprobs", "seed")
_LISTS = ("stop", "bad_words", "stop_token_ids", "allowed_token_ids", "logprob_token_ids")
_NOTHING: dict[str, Any] = {"logit_bias": dict, "bad_words": list, "stop": list, "stop_token_ids": list}
"""What None means for fields of SamplingParams that vLLM's scripts may give as None, which is the default there."""
_WITHOUT: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (None, False), "length_penalty": (None, 1.0), "early_stopping": (None, False), "truncate_prompt_tokens": (None,),
}
"""Fields of vLLM that are not served, in their order below, and the values that mean so."""
_IN_VLLMS_WORDS = (StructuredOutputsParams, "StructuredOutputsParams(json={...})")
_FORMS: dict[str, tuple[type, str]] = {
    "grammar": (GrammarSpec, "GrammarSpec.json_schema({...})"), "structured_outputs": _IN_VLLMS_WORDS, "guided_decoding": _IN_VLLMS_WORDS,
}
"""Fields that say what form the output must have, and what they take."""
_CORPUS_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Speculation:
    """The request field `speculation`. method is "auto", "off" or the name of a configured proposer."""

    method: str = "auto"
    num_speculative_tokens: int | None = None
    corpus_id: str | None = None  # requests with the same one learn from each other's answers; None = those without

    @classmethod
    def parse(cls, value: Speculation | Mapping[str, Any] | None) -> Speculation:
        """Raises InvalidRequest for unknown keys and wrong types."""
        if value is None:
            return cls()
        if isinstance(value, Speculation):
            return value
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"speculation must be an object such as {{'method': 'off'}}, not {value!r}", "speculation")
        if unknown := sorted(set(value) - {"method", "num_speculative_tokens", "corpus_id"}):
            raise InvalidRequest(
                f"speculation has no key {unknown[0]!r}; it takes 'method', 'num_speculative_tokens' and 'corpus_id'",
                f"speculation.{unknown[0]}",
            )
        method, num = value.get("method", "auto"), value.get("num_speculative_tokens")
        if not isinstance(method, str):
            raise InvalidRequest("speculation.method must be a string", "speculation.method")
        if num is not None and (isinstance(num, bool) or not isinstance(num, int) or not 0 <= num <= 64):
            raise InvalidRequest(
                "speculation.num_speculative_tokens must be an integer from 0 to 64", "speculation.num_speculative_tokens"
            )
        corpus_id = value.get("corpus_id")
        if corpus_id is not None and not (isinstance(corpus_id, str) and _CORPUS_ID.fullmatch(corpus_id)):
            raise InvalidRequest(
                "speculation.corpus_id must be 1 to 64 letters, digits, '-' or '_'", "speculation.corpus_id"
            )
        return cls(method, num, corpus_id)


@dataclass
class SamplingParams:
    """How to choose tokens and when to stop. Names and defaults are vLLM's; temperature 0 is greedy.

    Raises InvalidRequest, with the field's name, for values out of range. LLM works with checked copies, so fields may be assigned.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 = all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    max_tokens: int | None = 16  # None = up to the context's end, 0 = only read the prompt
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    seed: int | None = None  # None or -1 = any
    logprobs: int | None = None  # None = none, 0 = the chosen token's only, k = and the k best, -1 = and all
    prompt_logprobs: int | None = None  # the same of the prompt's tokens
    logprob_token_ids: Sequence[int] | None = None  # with logprobs: these in place of the best
    skip_special_tokens: bool = True
    detokenize: bool = True
    prediction: str | Sequence[int] | None = None  # Predicted Output, as text or token ids
    speculation: Speculation | Mapping[str, Any] | None = None
    grammar: GrammarSpec | None = None  # the form that the output must have
    thinking: ThinkingBudget | None = None  # how long it may reason
    structured_outputs: StructuredOutputsParams | None = None  # the same in vLLM's words
    guided_decoding: StructuredOutputsParams | None = None  # the older name of these
    # What scripts for vLLM write out.
    spaces_between_special_tokens: InitVar[bool | None] = None
    best_of: InitVar[int | None] = None
    use_beam_search: InitVar[bool | None] = None
    length_penalty: InitVar[float | None] = None
    early_stopping: InitVar[bool | str | None] = None
    truncate_prompt_tokens: InitVar[int | None] = None

    def __post_init__(self, spaces_between_special_tokens: bool | None, best_of: int | None, *unserved: Any) -> None:
        for name, nothing in _NOTHING.items():
            if getattr(self, name) is None:
                setattr(self, name, nothing())
        for (name, without), value in zip((_WITHOUT | {"best_of": (None, self.n)}).items(), (*unserved, best_of), strict=True):
            if value not in without:
                raise InvalidRequest(f"{name} is not served", name)
        self.speculation = Speculation.parse(self.speculation)
        for name, limits in _RANGES.items():
            if (value := getattr(self, name)) is not None or name not in _OPTIONAL:
                setattr(self, name, _number(name, value, *limits))
        if self.seed == -1:  # any, as at vLLM and llama.cpp, whose clients write their default out
            self.seed = None
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) == -1:  # all tokens, as in vLLM
                setattr(self, name, 2**31 - 1)
        for name in _LISTS:
            if (value := getattr(self, name)) is not None:
                setattr(self, name, _listed(name, value))
        if self.top_p == 0:
            raise InvalidRequest("top_p must be above 0; for greedy decoding use temperature 0", "top_p")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", "min_tokens")
        if self.logprob_token_ids and (self.logprobs is None or len(self.logprob_token_ids) > MAX_LOGPROB_TOKENS):
            raise InvalidRequest(f"logprob_token_ids takes at most {MAX_LOGPROB_TOKENS} tokens, and needs logprobs", "logprob_token_ids")
        if len(self.stop) > MAX_STOPS or any(not isinstance(s, str) or not s or len(s) > MAX_STOP_CHARS for s in self.stop):
            raise InvalidRequest(
                f"stop takes at most {MAX_STOPS} non-empty strings of at most {MAX_STOP_CHARS} characters", "stop"
            )
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(f"logit_bias must be a dict of token ids and numbers, not {self.logit_bias!r:.60}", "logit_bias")
        self.logit_bias = {_plain(token): _plain(bias) for token, bias in self.logit_bias.items()}
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise InvalidRequest(f"logit_bias takes at most {MAX_BIASED_TOKENS} tokens", "logit_bias")
        if any(not isinstance(b, (int, float)) or not abs(b) <= 100 for b in self.logit_bias.values()):
            raise InvalidRequest("logit_bias values must be from -100 to 100", "logit_bias")
        if len(self.bad_words) > MAX_BIASED_TOKENS:
            raise InvalidRequest(f"bad_words takes at most {MAX_BIASED_TOKENS} entries", "bad_words")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must name at least one token", "allowed_token_ids")
        self._check_form()

    def _check_form(self) -> None:
        asked = [name for name in _FORMS if getattr(self, name) is not None]
        for name in asked:
            kind, example = _FORMS[name]
            if not isinstance(getattr(self, name), kind):
                raise InvalidRequest(f"{name} must be {kind.__name__}, such as {example}", name)
        if len(asked) > 1:
            raise InvalidRequest(f"{' and '.join(asked)} each ask for a form of the output; give one of them", asked[1])
        if asked and self.allowed_token_ids is not None:
            raise InvalidRequest("allowed_token_ids cannot be combined with a grammar: say there what is allowed", "allowed_token_ids")

    @property
    def form(self) -> GrammarSpec | None:
        """That the output must have, by whichever name it was asked for."""
        asked = self.structured_outputs or self.guided_decoding
        return self.grammar if asked is None else asked.spec

    def clone(self) -> SamplingParams:
        """A copy, checked."""
        return replace(self)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @cached_property
    def is_penalised(self) -> bool:
        """Whether any of the three penalties is on."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @cached_property
    def needs_scores(self) -> bool:
        """Whether the best token of a step is not all there is to know, whatever the request says besides."""
        wanted = self.logprobs is not None or self.allowed_token_ids is not None or bool(self.logit_bias)
        return wanted or not self.greedy or self.is_penalised

    @property
    def speculation_settings(self) -> Speculation:
        """`speculation`, parsed (it is replaced on construction; this says so to the type checker)."""
        assert isinstance(self.speculation, Speculation)
        return self.speculation


def _plain(value: Any) -> Any:
    """numpy's numbers, which loops over arrays give, as Python's; anything else as it is."""
    if isinstance(value, (int, float, str)) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _number(name: str, value: object, kind: type[int] | type[float], low: float, high: float) -> int | float:
    number = _plain(value)
    if isinstance(number, bool) or not isinstance(number, (int, kind)) or not low <= number <= high:  # NaN is in no range
        told = "an integer" if kind is int else "a number"
        raise InvalidRequest(f"{name} must be {told} from {low} to {high}, not {value!r}", name)
    return number


def _listed(name: str, value: Any) -> list[Any]:
    """One string is a list of one."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} must be a list, not {value!r:.60}", name)
    return [_plain(one) for one in value]


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass
class SpeculationStats:
    """What speculation did for one request. A step is one target pass with at least one draft token for the row."""

    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    histogram: list[int] = field(default_factory=list)  # histogram[j]: steps in which j drafts were accepted
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    of_proposer: dict[int, tuple[int, int]] = field(default_factory=dict)  # index -> (drafts verified, their tokens accepted)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per speculative target pass, the extra one included; 1.0 if there was none."""
        return 1.0 + (self.num_accepted_tokens / self.num_steps if self.num_steps else 0.0)

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclass(frozen=True)
class LoRARequest:
    """The adapter that a prompt wants, in vLLM's words; the number is vLLM's own business."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str | os.PathLike[str] = ""


@record
class Adapter:
    """An adapter of the target that is loaded (LoRA)."""

    name: str  # that requests ask for it by
    path: str  # as it was named when it was loaded
    slot: int  # in the network's AdapterBank
    rank: int
    number: int  # no other has, nor one that had this name or slot before


def adapter_names(requests: Iterable[Request]) -> tuple[str, ...]:
    """Of their adapters, each once."""
    return tuple(sorted({request.adapter.name for request in requests if request.adapter is not None}))


@dataclass(eq=False)
class Request:
    """One choice of one API request. Token ids and status are written by the committer, queue membership by the scheduler."""

    request_id: str  # one per choice
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    arrival_time: float  # seconds, the engine's clock
    max_tokens: int  # resolved: params.max_tokens, or what the context leaves
    seed: int  # resolved: params.seed, or a random one
    eos_token_ids: frozenset[int] = frozenset()
    choice: int = 0  # index among n; part of the noise key
    priority: int = 0  # lower goes first
    cache_salt: str = ""
    adapter: Adapter | None = None  # that the target has for it
    corpus_id: str = ""  # whose answers it may learn from, and may learn from its own
    prediction: Sequence[int] = ()  # params.prediction as token ids
    bad_word_ids: Sequence[Sequence[int]] = ()  # params.bad_words as token ids
    grammar: GrammarState | None = None  # of params.form; follows token_ids
    thinking: ThinkingState | None = None  # of params.thinking; follows token_ids
    token_ids: list[int] = field(default_factory=list)  # prompt, then output
    num_computed_tokens: int = 0  # leading tokens with committed target KV
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    first_scheduled_time: float | None = None  # seconds, the engine's clock
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    prompt_logprobs: PromptLogprobs | None = None  # in the making, if they are wanted

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)

    @property
    def queue_time_s(self) -> float | None:
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)


@record
class TokenLogprobs:
    """The target's logprob of one emitted token and of the best alternatives (raw logits, before any penalty)."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]  # (token id, logprob), best first


@record
class TokenDelta:
    """What one step added to one request. The last delta of a request carries its finish_reason."""

    request_id: str
    choice: int  # index among n
    token_ids: list[int]
    text: str  # "" if not detokenized or held back
    sources: list[int]  # [len(token_ids)] index of the proposer that guessed each token, -1 = the target's own
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    error: str | None = None  # with finish_reason "error": what to tell the client
    error_code: str | None = None
    stats: SpeculationStats | None = None  # with a finish_reason only
    num_cached_tokens: int = 0
    queue_time_s: float | None = None  # with a finish_reason only: from arrival to the first step; None = it never ran
    prompt_logprobs: PromptLogprobs | None = None  # with the first token only, if they were asked for
    num_passes: int = 1  # of the target that gave it tokens

    @property
    def was_cut(self) -> bool:
        """Whether it ends an answer that the model had not ended: a limit or a stop string did."""
        return self.finish_reason not in (None, "stop") or isinstance(self.stop_reason, str)
