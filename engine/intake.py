"""The door of the engine: what a caller asks for becomes checked requests, or an error that says what to change.

Everything that depends on the model (vocabulary, context, tokenizer, configured proposers) is checked here, before anything
is queued; what does not was checked when SamplingParams was made. Knows no queue and no step.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from .errors import ContextTooLong, InvalidRequest
from .origin import ANYBODY, Origin
from .prompt_logprobs import PromptLogprobs
from .request import Adapter, Request, SamplingParams
from .thinking_budget import ThinkingBudget, ThinkingState
from .token_bytes import TokenBytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

    from .grammar_compiler import GrammarCompiler

MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORDS_CHARS = 16_384
"""Of all words of a request together: encoding them is work before the queue, where nothing else bounds it."""
MAX_PRIORITY = 2**31


class Intake:
    """Makes requests for one model.

    vocab_size: width of the target's logits. tokenizer_size: ids that the tokenizer knows; a padded vocabulary has more.
    cache_tokens: how many the cache can hold, of prompt and output together. seed: of the seeds that requests without one get.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        tokenizer_size: int,
        max_model_len: int,
        cache_tokens: int,
        eos_token_ids: Iterable[int],
        proposer_names: Sequence[str],
        seed: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._chance = random.Random(seed)
        self._backend = _backend(tokenizer)
        self._vocab_size = vocab_size
        self._tokenizer_size = tokenizer_size
        self.max_tokens = min(max_model_len, cache_tokens)  # of one request, prompt and output together
        # OpenAI's and vLLM's words, and Anthropic's "prompt is too long: 9 tokens > 8 maximum" below: what agents look for, and read the
        # numbers of, to shorten a conversation and ask again.
        self._limit = f"This model's maximum context length is {self.max_tokens} tokens"
        if cache_tokens < max_model_len:
            self._limit += ", which is what the KV cache holds"
        self._eos_token_ids = frozenset(eos_token_ids)
        self._methods = ("auto", "off", *dict.fromkeys(proposer_names))
        longest_token = max((len(name.encode()) for name in tokenizer.get_vocab()), default=1)
        self._max_prompt_bytes = longest_token * max_model_len
        # The prompts of one API request come one by one with the same words.
        self._bad_word_ids = lru_cache(maxsize=16)(self._encode_bad_words)
        self._token_bytes = TokenBytes(tokenizer)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        from .grammar_compiler import GrammarCompiler  # llguidance is only for those who ask for a form

        return GrammarCompiler(self._tokenizer, self._vocab_size, self._eos_token_ids)

    def encode(self, text: str, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Token ids of a text. Raises InvalidRequest that names `param`; ContextTooLong, unread, if its bytes cannot fit the context."""
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{param} is not valid Unicode: a lone surrogate at character {error.start:,}", param) from None
        if num_bytes > self._max_prompt_bytes:
            raise ContextTooLong(
                f"{param} is too long: {num_bytes:,} bytes, which is more than {self._max_prompt_bytes:,}. {self._limit}; shorten it", param
            )
        tokenizer, backend = self._tokenizer, self._backend
        # Whoever else uses the tokenizer leaves the backend as his last call wanted it.
        if (
            backend is None
            or backend.truncation is not None
            or backend.padding is not None
            or backend.encode_special_tokens != tokenizer.split_special_tokens
        ):
            return list(tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def is_prepared(self, params: SamplingParams) -> bool:
        """Whether nothing would make `requests` slow."""
        return (form := params.form) is None or ("_grammars" in vars(self) and self._grammars.has(form))  # to import it takes time, too

    def prepare(self, params: SamplingParams, asked_at: float | None = None) -> None:
        """Do now what would make `requests` slow: compiling a grammar may take seconds. May be called from any thread. asked_at: since
        when, by the monotonic clock, it waits for others'; None = now.

        Raises InvalidGrammar, QueueFull.
        """
        if (form := params.form) is not None:
            self._grammars.compile(form, asked_at)

    def check_text(self, param: str, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequest that names `param` unless this can be read, ContextTooLong if it is too long to be."""
        if not token_ids:
            raise InvalidRequest(f"{param} is empty; it must have at least one token", param, "empty_prompt")
        self._check_ids(param, token_ids)
        if len(token_ids) > self.max_tokens:
            told = f"{param} is too long: {len(token_ids)} tokens > {self.max_tokens} maximum"
            raise ContextTooLong(f"{told}. {self._limit}; shorten it", param)

    def requests(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        now: float,
        origin: Origin = ANYBODY,
        adapter: Adapter | None = None,
    ) -> list[Request]:
        """One request per choice, named request_id, or request_id-0, request_id-1, ... if n > 1. now: the engine's clock, s.

        adapter: that the target has for it. Raises InvalidRequest (InvalidGrammar among them), ContextTooLong.
        """
        self._check_ids("prompt", prompt_token_ids)
        max_tokens = self._room(len(prompt_token_ids), params)
        self._check_params(params, max_tokens)
        if type(origin.priority) is not int or abs(origin.priority) > MAX_PRIORITY:
            raise InvalidRequest(f"priority must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}", "priority")
        prompt = tuple(prompt_token_ids)
        # One seed for all choices: the choice's index is part of the noise key.
        seed = self._chance.getrandbits(63) if params.seed is None else params.seed
        prediction, bad_word_ids = self._prediction(params), self._bad_word_ids(tuple(params.bad_words))
        grammar = None if (form := params.form) is None else self._grammars.compile(form)
        requests = [
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}-{choice}",
                prompt_token_ids=prompt,
                params=params,
                arrival_time=now,
                max_tokens=max_tokens,
                seed=seed,
                eos_token_ids=self._eos_token_ids,
                choice=choice,
                priority=origin.priority,
                cache_salt=origin.whole_salt,
                adapter=adapter,
                corpus_id=origin.corpus_id(params.speculation_settings.corpus_id),
                prediction=prediction,
                bad_word_ids=bad_word_ids,
            )
            for choice in range(params.n)
        ]
        for request in requests:
            if grammar is not None:
                request.grammar = grammar.open(request.token_ids)
            if params.prompt_logprobs is not None:
                request.prompt_logprobs = PromptLogprobs(prompt, params.prompt_logprobs)
            if params.thinking is not None:
                request.thinking = self._thinking(params.thinking, request.token_ids)
        return requests

    def _thinking(self, budget: ThinkingBudget, token_ids: Sequence[int]) -> ThinkingState:
        end_ids = self.encode(budget.end, False, "thinking_token_budget")
        return ThinkingState(budget, end_ids, self._token_bytes.piece, token_ids, self._vocab_size)

    def _room(self, num_prompt: int, params: SamplingParams) -> int:
        """max_tokens, or what the context leaves."""
        if num_prompt == 0:
            raise InvalidRequest("the prompt is empty; it must have at least one token", "prompt", "empty_prompt")
        longest = self.max_tokens - (params.max_tokens != 0)
        if num_prompt > longest:
            told = f"the prompt is too long: {num_prompt} tokens > {longest} maximum"
            raise ContextTooLong(f"{told}. {self._limit}, output included; shorten the prompt", "prompt")
        room = self.max_tokens - num_prompt
        if params.max_tokens is None:
            return room
        if params.max_tokens > room:
            told = f"you requested {num_prompt + params.max_tokens} tokens, {num_prompt} of the prompt and max_tokens {params.max_tokens}"
            raise ContextTooLong(f"{self._limit}. However, {told}; shorten the prompt or ask for at most {room}", "max_tokens")
        return params.max_tokens

    def _check_params(self, params: SamplingParams, max_tokens: int) -> None:
        if params.min_tokens > max_tokens:
            raise InvalidRequest(f"min_tokens {params.min_tokens:,} is above the {max_tokens:,} tokens that fit", "min_tokens")
        if params.stop and not params.detokenize:
            raise InvalidRequest("stop strings need the text: they cannot be used with detokenize=False", "stop")
        self._check_bad_words(params.bad_words)
        self._check_ids("logit_bias", list(params.logit_bias))
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logprob_token_ids", params.logprob_token_ids or ())
        if params.allowed_token_ids is not None:
            if len(params.allowed_token_ids) > self._vocab_size:
                raise InvalidRequest(f"allowed_token_ids has more ids than there are tokens, {self._vocab_size:,}", "allowed_token_ids")
            self._check_ids("allowed_token_ids", params.allowed_token_ids)
            if min(params.allowed_token_ids) >= self._tokenizer_size:
                raise InvalidRequest(
                    f"allowed_token_ids names no token of the tokenizer, which has {self._tokenizer_size:,}", "allowed_token_ids"
                )
        method = params.speculation_settings.method
        if method not in self._methods:
            raise InvalidRequest(
                f"speculation.method is {method!r}, but this server has {', '.join(map(repr, self._methods))}", "speculation.method"
            )

    def _check_ids(self, param: str, token_ids: Sequence[int]) -> None:
        if not token_ids:
            return
        if set(map(type, token_ids)) != {int}:  # bool, float and str are not token ids
            wrong = next(token for token in token_ids if type(token) is not int)
            raise InvalidRequest(f"{param} must hold token ids, which are integers, not {wrong!r}", param)
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self._vocab_size:
            raise InvalidRequest(
                f"{param} has the token id {low if low < 0 else high}; ids go from 0 to {self._vocab_size - 1:,}", param, "invalid_token_id"
            )

    def _prediction(self, params: SamplingParams) -> tuple[int, ...]:
        if isinstance(params.prediction, str):
            return tuple(self.encode(params.prediction, False, "prediction"))
        self._check_ids("prediction", params.prediction or ())
        return tuple(params.prediction or ())

    def _check_bad_words(self, words: Sequence[str]) -> None:
        for word in words:
            if not isinstance(word, str) or not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
                raise InvalidRequest(f"bad_words takes strings of 1 to {MAX_BAD_WORD_CHARS} characters, not only spaces", "bad_words")
        if sum(map(len, words)) > MAX_BAD_WORDS_CHARS:
            raise InvalidRequest(f"bad_words takes at most {MAX_BAD_WORDS_CHARS:,} characters in all", "bad_words")

    def _encode_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Every spelling of each word: at the start of a text and, with a space before it, in the middle."""
        spellings: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()):
                token_ids = tuple(self.encode(text, False, "bad_words"))
                self._check_ids("bad_words", token_ids)
                if token_ids:
                    spellings[token_ids] = None
        return tuple(spellings)


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """What gives the same ids as the tokenizer's own `encode`, which takes half as long again; None if that does more than to ask it."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    kinds = type(tokenizer).__mro__
    does_more = any({"encode", "_encode_plus"} & vars(kind).keys() for kind in kinds[: kinds.index(PreTrainedTokenizerFast)])
    return None if does_more else tokenizer.backend_tokenizer
