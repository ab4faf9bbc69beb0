"""`LLM`: the engine for scripts. Lists of prompts in, lists of outputs out, in the calling thread."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from tqdm import tqdm

from ..proposers.config import SpeculativeConfig
from .boot import Engine, boot
from .chat_template import ChatTemplate
from .embedding import Reading
from .engine_metrics import ENGINE, EngineCollector
from .errors import EngineDead, InvalidRequest
from .forking import let_forks_compute
from .interrupts import interrupts_held_back
from .llm_metrics import Metric, read
from .llm_options import engine_config
from .llm_prompts import Message, ParsedPrompt, Prompt, naming, parse_conversations, parse_prompts, turn_of
from .origin import Origin
from .outputs import EmbeddingOutput, EmbeddingRequestOutput, GrowingOutput, RequestOutput
from .request import Adapter, LoRARequest, Request, SamplingParams
from .stats import EngineStats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .model import LoadedModel

logger = logging.getLogger("foretoken.engine")
Bar = bool | Callable[..., Any]
"""Whether a call shows a bar, or what makes it, such as partial(tqdm, leave=False)."""

BAR_INTERVAL_S = 0.2

@dataclass(frozen=True)
class Job:
    """One prompt of a call: its requests (one per choice) and what becomes of them."""

    requests: list[Request]
    output: GrowingOutput


class LLM:
    """A model with its drafters, for offline use.

    model: a folder, a hub id, or None for the embedded model. speculative_config: as of `--speculative-config`, a dict, a
    list of them or JSON; None = the default (prompt lookup, and drafters that the model brings along), {"method": "off"} = none.
    Options are vLLM's: max_model_len, max_num_seqs, max_num_batched_tokens, gpu_memory_utilization, dtype, quantization ("int8",
    "int4"; GPU: "int4", "fp8"), kv_cache_dtype (CPU: "int8"; GPU: "fp8"), device ("cpu", "cuda"), enable_lora, max_loras,
    max_lora_rank, seed, ...; and threads, executor, kv_cache_gb, batch_invariant. Threads that share one take turns, call by call.

    Raises ConfigError or ModelLoadError if that cannot work, TypeError for an unknown option.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | Sequence[Mapping[str, Any]] | str | None = None,
        **options: Any,
    ) -> None:
        let_forks_compute()
        before = torch.get_num_threads()
        try:
            self._engine: Engine | None = boot(engine_config(model, speculative_config, options), logger.info)
            self._torch_threads = torch.get_num_threads()
        finally:
            torch.set_num_threads(before)
        self._close = weakref.finalize(self, self._engine.core.close)  # at the latest when the process ends
        self._num_prompts = 0
        self._turn = threading.Lock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Bar = True,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts together; outputs in their order. One SamplingParams for all, or one per prompt; None = the model's own.

        At the latest an output ends where the context does, whatever its max_tokens. prompt_token_ids: an older way to give prompts.
        priority: one per prompt, lower goes first. lora_request: the adapter of all prompts, or one for each; it is loaded if it is not yet
        (LLM(..., enable_lora=True)). Raises InvalidRequest before anything runs. A prompt that fails later has
        finish_reason "error"; the others are not affected.
        """
        engine, parsed = self._running(), parse_prompts(prompts if prompt_token_ids is None else prompt_token_ids)
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _one_each("sampling_params", given, SamplingParams, len(parsed))
        priorities = _one_each("priority", priority or 0, int, len(parsed))
        wanted = _one_each("lora_request", lora_request, (LoRARequest, type(None)), len(parsed))
        with self._at_work():
            adapters = _adapters(engine, wanted)
            jobs: list[Job] = []
            now = time.monotonic()
            for index, (prompt, settings, rank, adapter) in enumerate(zip(parsed, params, priorities, adapters, strict=True)):
                request_id = str(self._num_prompts + index)
                with naming("prompts", index, len(parsed)):
                    token_ids = _token_ids(engine, prompt)
                    room = engine.model.max_model_len - len(token_ids)
                    settings = replace(settings, max_tokens=room) if (settings.max_tokens or 0) > room > 0 else settings.clone()
                    requests = engine.intake.requests(request_id, token_ids, settings, now, Origin(rank, prompt.cache_salt), adapter)
                jobs.append(Job(requests, GrowingOutput(request_id, prompt.text, token_ids, settings, now)))
            self._num_prompts += len(jobs)
            self._run(engine, jobs, use_tqdm)
        return [job.output.build(engine.num_spec_tokens, engine.speculative.lossy) for job in jobs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Bar = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, rendered by the model's chat template. Otherwise as `generate`.

        tools: offered in every conversation, in OpenAI's shape. A call of one comes as the model writes it, as text.
        """
        engine, conversations = self._running(), parse_conversations(messages)
        template = ChatTemplate(engine.tokenizer, chat_template)
        if not template.text:
            raise InvalidRequest("this model has no chat template; use generate(), or pass chat_template", "messages")
        if tools and template.tools_from is None:
            raise InvalidRequest("the chat template does not know of tools: leave them out, or pass a chat_template that does", "tools")
        prompts: list[Prompt] = []
        for index, conversation in enumerate(conversations):
            with naming("conversations", index, len(conversations)):
                text = template.render(
                    [turn_of(message) for message in conversation],
                    generates=add_generation_prompt and not continue_final_message,
                    continues=continue_final_message,
                    tools=tools or (),
                    kwargs=chat_template_kwargs,
                )
                # The template writes the special tokens itself.
                prompts.append({"prompt": text, "prompt_token_ids": engine.intake.encode(text, add_special_tokens=False)})
        return self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request, priority=priority)

    def embed(self, prompts: Prompt | Sequence[Prompt], use_tqdm: Bar = True) -> list[EmbeddingRequestOutput]:
        """Texts as vectors of length 1: the states of their last tokens, as of the server's embeddings. Raises InvalidRequest."""
        engine, parsed = self._running(), parse_prompts(prompts)
        texts: list[list[int]] = []
        for index, prompt in enumerate(parsed):
            with naming("prompts", index, len(parsed)):
                texts.append(_token_ids(engine, prompt))
                engine.intake.check_text("the prompt", texts[-1])
        reading = Reading(texts, "last")
        with self._at_work(), interrupts_held_back() as let_through, _bar(use_tqdm, total=len(texts), unit="prompt") as bar:
            try:
                while not reading.done:
                    let_through()
                    reading.advance(engine.core)
                    bar.update(reading.num_done - bar.n)
            finally:
                reading.close(engine.core)
        vectors: list[list[float]] = reading.vectors().tolist() if texts else []
        return [EmbeddingRequestOutput(str(i), EmbeddingOutput(v), t) for i, (v, t) in enumerate(zip(vectors, texts, strict=True))]

    def beam_search(self, *arguments: Any, **named: Any) -> NoReturn:
        raise InvalidRequest("beam search is not served; generate() samples several answers with SamplingParams(n=...)", "use_beam_search")

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return self._running().tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends; generation_config="vllm" switches that off."""
        return SamplingParams(**self._running().sampling)

    @property
    def model_config(self) -> LoadedModel:
        """What is known of the model: max_model_len, hf_config, vocab_size."""
        return self._running().model

    @property
    def llm_engine(self) -> LLM:
        """Where scripts for vLLM look for model_config and get_tokenizer."""
        return self

    def stats(self) -> EngineStats:
        """Totals since the start."""
        return self._running().core.stats(time.monotonic())

    def get_metrics(self) -> list[Metric]:
        """The same as a server tells of its engine, under the same names."""
        engine = self._running()
        return read(EngineCollector(self.stats, (engine.model.name, ENGINE), engine.max_loras))

    def reset_prefix_cache(self) -> bool:
        with self._turn:
            self._running().core.scheduler.kv.forget_prefixes()
        return True

    def shutdown(self) -> None:
        """Give the model's memory back, and write what is kept across restarts. Nothing works afterwards."""
        self._close()
        self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _running(self) -> Engine:
        if self._engine is None:
            raise EngineDead("this LLM has been shut down; make a new one")
        return self._engine

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """One caller's turn. The number of torch's threads, which is the process's, is the engine's meanwhile."""
        with self._turn:
            before = torch.get_num_threads()
            torch.set_num_threads(self._torch_threads)
            try:
                yield
            finally:
                torch.set_num_threads(before)

    def _run(self, engine: Engine, jobs: Sequence[Job], use_tqdm: Bar) -> None:
        """Step until every job has ended. Interrupted between two steps, it leaves nothing behind in the core."""
        core, tokenizer = engine.core, engine.tokenizer
        outputs = {request.request_id: job.output for job in jobs for request in job.requests}
        unfinished = set(outputs)
        with interrupts_held_back() as let_through:
            progress = Progress(core.stats(), len(jobs), use_tqdm) if use_tqdm else None
            try:
                for job in jobs:
                    for request in job.requests:
                        core.add_request(request)
                while unfinished:
                    let_through()
                    assert core.has_work, f"the engine is idle but owes {len(unfinished)} requests"
                    deltas = core.step(time.monotonic())
                    now = time.monotonic()
                    num_ended = 0
                    for delta in deltas:
                        output = outputs[delta.request_id]
                        output.add(delta, tokenizer, now)
                        if delta.finish_reason is not None:
                            unfinished.discard(delta.request_id)
                            num_ended += output.finished
                    if progress is not None and (num_ended or progress.is_due(now)):
                        progress.show(core.stats(), num_ended, now)
            finally:
                for request_id in unfinished:
                    core.abort(request_id)
                if progress is not None:
                    progress.close()


class Progress:
    """The bar of a call: prompts done, tokens a second, and the share of drafts accepted."""

    def __init__(self, before: EngineStats, num_prompts: int, use_tqdm: Bar) -> None:
        self._before = before
        self._start_time = self._shown_time = time.monotonic()
        self._bar = _bar(use_tqdm, total=num_prompts, desc="Processed prompts", unit="prompt", dynamic_ncols=True)

    def is_due(self, now: float) -> bool:
        return now - self._shown_time >= BAR_INTERVAL_S

    def show(self, stats: EngineStats, num_ended: int, now: float) -> None:
        self._shown_time = now
        tokens = stats.generation_tokens - self._before.generation_tokens
        drafted = stats.num_draft_tokens - self._before.num_draft_tokens
        accepted = stats.num_accepted_tokens - self._before.num_accepted_tokens
        acceptance = f", {accepted / drafted:.0%} of drafts accepted" if drafted else ""
        self._bar.set_postfix_str(f"{tokens / max(now - self._start_time, 1e-9):.1f} tokens/s{acceptance}", refresh=False)
        self._bar.update(num_ended)

    def close(self) -> None:
        self._bar.close()


def _bar(use_tqdm: Bar, **options: Any) -> tqdm[NoReturn]:
    return use_tqdm(**options) if callable(use_tqdm) else tqdm(**options, disable=not use_tqdm)


def _token_ids(engine: Engine, prompt: ParsedPrompt) -> list[int]:
    return engine.intake.encode(prompt.text or "") if prompt.token_ids is None else prompt.token_ids


def _adapters(engine: Engine, wanted: Sequence[LoRARequest | None]) -> list[Adapter | None]:
    """Each prompt's own, loaded. Raises InvalidRequest, ModelLoadError."""
    asked = {request.lora_name: os.fspath(request.lora_path) for request in wanted if request is not None}
    for request in wanted:
        if request is not None and os.fspath(request.lora_path) != asked[request.lora_name]:
            raise InvalidRequest(f"lora_request has two adapters of the name {request.lora_name!r}: give each its own", "lora_request")
    if not asked:
        return [None] * len(wanted)
    if engine.adapters is None:
        raise InvalidRequest("lora_request needs LLM(..., enable_lora=True)", "lora_request")
    engine.adapters.ensure(asked)
    return [None if request is None else engine.adapters.require(request.lora_name) for request in wanted]


def _one_each(name: str, value: Any, kind: type | tuple[type, ...], count: int) -> list[Any]:
    """One value for all prompts, or a list with one for each."""
    is_one = isinstance(value, kind) or isinstance(value, Mapping) or not isinstance(value, Iterable)
    values: list[Any] = [value] * count if is_one else list(value)
    for one in values:
        if not isinstance(one, kind):
            told = kind.__name__ if isinstance(kind, type) else kind[0].__name__
            raise TypeError(f"{name} is {told}, one for all prompts or one for each, not {one!r}")
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts")
    return values
