"""Fields that no request model declares: other servers' names of ours, what is refused, what is of no matter, and what nobody knows.

A field whose loss would change an answer is never lost in silence: it is read as ours, or refused by name. Those that say what form an
output has are structured.py's.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import AliasChoices, BaseModel

from .errors import ApiError, unsupported
from .structured import FIELDS as FORM_FIELDS

ALIASES: dict[str, tuple[str, ...]] = {
    "n": ("n_cmpl",),  # llama.cpp
    "max_tokens": ("max_new_tokens", "n_predict", "num_predict"),  # SGLang, TGI, LMDeploy; llama.cpp; Ollama
    "max_completion_tokens": ("max_output_tokens",),  # OpenAI's Responses
    "min_tokens": ("min_new_tokens",),  # SGLang, LMDeploy
    "repetition_penalty": ("repeat_penalty",),  # llama.cpp, Ollama
    "seed": ("sampling_seed", "random_seed"),  # SGLang; LMDeploy
    "include_stop_str_in_output": ("no_stop_trim",),  # SGLang
    "truncate_prompt_tokens": ("truncate",),  # TGI
    "thinking_token_budget": ("thinking_budget", "thinking_budget_tokens"),  # Qwen's and llama.cpp's
}
"""Our fields under the names that other servers give them."""
_MEANS = {alias: name for name, aliases in ALIASES.items() for alias in aliases}

# Known and not served. The values listed mean "without it" and pass.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),  # of completions; chat declares it
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "suffix": (None, ""),  # of chat; completions declare it
    "modalities": (None, [], ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "prompt_embeds": (None,),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1.0),
    "documents": (None, []),
    "chat_template": (None,),
    "thinking_token_budget": (None,),
    "echo": (None, False),  # of chat; completions declare it
}
# The same of a body as a whole: names so common that inside of it they may mean anything.
_UNSUPPORTED_ABOVE: dict[str, tuple[Any, ...]] = {
    "structural_tag": (None, ""),
    "guided_whitespace_pattern": (None,),
    "grammar_lazy": (None, False),
    # How tokens are chosen. What only tunes one of these (mirostat_tau, dry_base, ...) does nothing without it, and passes.
    "typical_p": (None, 1.0),
    "tfs_z": (None, 1.0),
    "top_n_sigma": (None, -1, 0),
    "adaptive_target": (None, -1),
    "mirostat": (None, 0),
    "dynatemp_range": (None, 0),
    "xtc_probability": (None, 0),
    "dry_multiplier": (None, 0),
    "repeat_last_n": (None, -1, 64),  # all, as here; the default, as clients write it out
    "min_keep": (None, 0),
    "samplers": (None, []),
    "do_sample": (None, True),
    "logits_processors": (None, []),
    "custom_logit_processor": (None,),
    "watermark": (None, False),
    # Which weights choose them: requests that generate declare the first two.
    "lora": (None, []),
    "lora_path": (None,),
    "adapter_id": (None,),
    "adapters": (None,),
    # When they end, and what the prompt is.
    "stop_regex": (None, "", []),
    "repetition_detection": (None,),
    "n_indent": (None, 0),
    "t_max_predict_ms": (None, -1, 0),
    "add_special_tokens": (None, False),  # of chat, whose template writes them; completions declare it
    "enable_thinking": (None,),
    "image_data": (None, []),
    # What is told about them.
    "n_probs": (None, 0),
    "top_n_tokens": (None, 0),
    "return_logprob": (None, False),
    "return_hidden_states": (None, False),
    "return_full_text": (None, False),
    "separate_reasoning": (None, True),
    # Objects that servers with an API of their own put all of these into.
    "options": (None, {}),
    "parameters": (None, {}),
    "sampling_params": (None, {}),
}
_BESIDE = "its entries beside the prompt"
_AS_MODEL = "the adapter's name as model"
_INSTEAD = {
    "functions": "tools",
    "function_call": "tool_choice",
    "do_sample": "temperature: 0",
    "stop_regex": "stop",
    "enable_thinking": """chat_template_kwargs: {"enable_thinking": ...}""",
    **dict.fromkeys(("lora", "lora_path", "adapter_id", "adapters"), _AS_MODEL),
    "n_probs": "logprobs",
    "top_n_tokens": "logprobs",
    "return_logprob": "logprobs",
    "return_full_text": "echo",
    "options": _BESIDE,
    "parameters": _BESIDE,
    "sampling_params": _BESIDE,
}
# Known, and nothing to do for a text server that stores nothing.
_TOLERATED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention "
    "verbosity moderation include_obfuscation spaces_between_special_tokens request_id refusal annotations "
    "cache_prompt id_slot t_max_prompt_ms".split()
)


def any_name(name: str) -> str | AliasChoices:
    """Under which names a request's field may come: its own counts first."""
    return AliasChoices(name, *ALIASES[name]) if name in ALIASES else name


def settle_extras(body: BaseModel, refused: Mapping[str, tuple[Any, ...]] = _UNSUPPORTED | _UNSUPPORTED_ABOVE) -> int:
    """Refuse what is known but not served; return how many keys nobody knows, nested objects included. Raises ApiError."""
    unknown = 0
    for name, value in (body.model_extra or {}).items():
        if name in refused:
            if value not in refused[name]:
                raise unsupported(name, instead=_INSTEAD.get(name))
        elif not (_says_again(body, name, value) or name in _TOLERATED or name in FORM_FIELDS):
            unknown += 1
    given = body.model_fields_set
    for name, value in vars(body).items():
        if name not in given:
            continue  # a default is no object
        for nested in value if isinstance(value, list) else (value,):
            if isinstance(nested, BaseModel):
                unknown += settle_extras(nested, _UNSUPPORTED)
    return unknown


def _says_again(body: BaseModel, name: str, value: Any) -> bool:
    """Whether it is another name of a field that came under its own: then it has to say the same, or nothing."""
    meant = _MEANS.get(name)
    if meant is None or meant not in type(body).model_fields:
        return False
    if value is not None and value != getattr(body, meant):
        raise ApiError(400, f"{name} and {meant} are names of one setting, and they differ; give one of them", param=name)
    return True
