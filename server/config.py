"""Settings of the server, one frozen object, and how flags, a file and the environment become one.

The only place that reads settings from the environment. Each setting is taken from the first source that has it: command line,
`--config` file, `FORETOKEN_*` environment, the default of its dataclass field.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from ..engine.config import DEMO_MODEL, AdapterConfig, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from ..engine.errors import ConfigError
from ..engine.llm_options import devices_found
from ..proposers.config import DraftModelConfig, EagleConfig, SpeculativeConfig
from ..proposers.config_entry import SpeculativeConfigError
from ..proposers.config_reading import parse_speculative_config, read_speculative_config
from .options import read_options
from .serve_parser import ServeParser
from .tls import TlsConfig

LOCAL_ORIGINS = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
"""Pages that may call when no origins are configured: those served from this machine."""

ENGINE_SETTINGS = ("max_queued_requests", "allow_synthetic_acceptance", "speculation_corpus_dir")  # EngineConfig's own

_OF_A_SERVICE = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP|SCTP)|=\w+://)")
_KEY_PRIORITY = re.compile(r"(.+):priority=(-?[0-9]{1,9})")

T = TypeVar("T")


def variable(name: str) -> str | None:
    """What the environment says; set and empty counts as not set."""
    return os.environ.get(name) or None


def variables(flags: Sequence[str]) -> dict[str, str]:
    """What the environment says of these flags, by name: `FORETOKEN_MAX_NUM_SEQS=8` -> {"max-num-seqs": "8"}."""
    found = {flag: text for flag in flags if (text := variable(_variable_of(flag)))}
    if found.get("port", "").startswith("tcp://"):  # Kubernetes sets FORETOKEN_PORT beside a Service named foretoken: that one's address
        del found["port"]
    return found


def unread_variables(flags: Sequence[str]) -> list[str]:
    """What to say of variables that are named like settings and are none. What Kubernetes says of Services is not meant for us."""
    known = {"FORETOKEN_CACHE", *map(_variable_of, flags)}
    said: list[str] = []
    for name in sorted(os.environ):
        if name.startswith("FORETOKEN_") and name not in known and not _OF_A_SERVICE.search(f"{name}={os.environ[name]}"):
            near = difflib.get_close_matches(name.removeprefix("FORETOKEN_").lower().replace("_", "-"), flags, n=1)
            said.append(f"{name} is no setting" + (f": did you mean {_variable_of(near[0])}?" if near else ""))
    return said


def _variable_of(flag: str) -> str:
    return "FORETOKEN_" + flag.upper().replace("-", "_")


@dataclass(frozen=True)
class ServerConfig:
    """Everything `foretoken serve` needs to know. `engine` goes to the engine as it is."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    host: str = "127.0.0.1"
    port: int = 8000  # 0 = any free one
    uds: str | None = None  # a unix domain socket to listen on instead
    root_path: str | None = None  # where a proxy has us; requests may begin with it
    tls: TlsConfig = field(default_factory=TlsConfig)
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # any of them opens; none = no authentication
    key_priorities: tuple[int, ...] = ()  # of api_keys: the best that their requests may have, lower goes first; empty = 0 for all
    insecure_no_auth: bool = False  # no key although the host is reachable from outside
    served_model_names: tuple[str, ...] = ()  # all names of the model in the API; empty = its own
    tool_call_parser: str | None = None  # how the model writes tool calls; None = what its chat template says
    reasoning_parser: str | None = None  # the same of its reasoning
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # of requests that do not name them
    allowed_origins: tuple[str, ...] = ()  # exact origins, or "*"; empty = LOCAL_ORIGINS
    allow_runtime_lora_updating: bool = False  # clients may load and unload adapters
    max_body_bytes: int = 4 * 2**20
    request_timeout_s: float = 600.0  # from a request's arrival to its last token
    drain_timeout_s: float = 30.0  # for requests in flight after SIGTERM
    response_store: str = "memory"  # where /v1/responses keeps them: a file, "memory" or "none"
    max_stored_responses: int = 10_000  # more, and the least recently used go
    response_ttl_s: float = 30 * 86400.0  # since they were last used
    log_level: str = "info"

    @property
    def max_queued_requests(self) -> int:
        return self.engine.max_queued_requests

    @property
    def allowed_origin_regex(self) -> str | None:
        return None if self.allowed_origins else LOCAL_ORIGINS

    @classmethod
    def from_cli(cls, argv: Sequence[str]) -> ServerConfig:
        """Read the words after `foretoken serve`, the file they name and the environment; print warnings on stderr.

        Raises ConfigError for settings that cannot work together. Mistakes of form end the process with status 2.
        """
        return cls.of_command(argv, ServeParser())[0]

    @classmethod
    def of_command(cls, argv: Sequence[str], parser: ServeParser) -> tuple[ServerConfig, dict[str, Any]]:
        """The same of a command with flags of its own, and what all flags say by their names with underscores."""
        options = read_options(argv, variables(parser.settings), parser)
        config = cls.from_options(options.values)
        if (variable("VLLM_ALLOW_RUNTIME_LORA_UPDATING") or "").lower() in ("1", "true"):
            config = replace(config, allow_runtime_lora_updating=True)
        speculative = config.engine.speculative
        said = (*options.warnings, *unread_variables(parser.settings), *_unapplied(options.values))
        for warning in (*said, *(speculative.warnings if speculative else ())):
            print(f"foretoken: warning: {warning}", file=sys.stderr)
        return config, options.values

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ServerConfig:
        """`options` maps flag names with underscores to parsed values. Raises ConfigError."""
        values = dict(options)
        _require_one_device(values)
        _translate(values)
        engine = EngineConfig(
            model=_fill(ModelConfig, values),
            cache=_fill(CacheConfig, values),
            scheduler=_fill(SchedulerConfig, values),
            speculative=speculation(values),
            adapters=_adapters(values),
            **{name: values[name] for name in ENGINE_SETTINGS if name in values},
        )
        return cls(engine=engine, tls=_fill(TlsConfig, values), **_named(cls, values))


def speculation(values: Mapping[str, Any]) -> SpeculativeConfig | None:
    """The drafter that the flags ask for; None if no flag speaks of one. Raises ConfigError."""
    if values.get("spec_decoding_acceptance_method") == "typical_acceptance_sampler":
        raise ConfigError(
            "--spec-decoding-acceptance-method typical_acceptance_sampler is lossy: it changes what the model says; leave the flag away, "
            'or ask for it in --speculative-config: "acceptance_method": "typical"'
        )
    old = old_style_speculation(values)
    if "speculative_config" not in values:
        return _speculative(lambda: parse_speculative_config(old, values.get("model", DEMO_MODEL))) if old else None
    if old:
        raise ConfigError("--speculative-config holds all settings of speculation: move the other --spec... flags into it")
    return _speculative(lambda: read_speculative_config(values["speculative_config"], values.get("model", DEMO_MODEL)))


def old_style_speculation(values: Mapping[str, Any]) -> dict[str, Any]:
    """The flags from before `--speculative-config`, as an entry of it; empty if there are none.

    {"speculative_model": "[ngram]", "num_speculative_tokens": 5} -> {"method": "ngram", "num_speculative_tokens": 5,
    "prompt_lookup_min": 1, "prompt_lookup_max": 4}. Without a model they mean prompt lookup.
    """
    renamed = {
        "spec_method": "method",
        "speculative_model": "model",
        "num_speculative_tokens": "num_speculative_tokens",
        "ngram_prompt_lookup_min": "prompt_lookup_min",
        "ngram_prompt_lookup_max": "prompt_lookup_max",
        "speculative_max_model_len": "max_model_len",
        "speculative_disable_by_batch_size": "disable_by_batch_size",
        "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
        "speculative_model_quantization": "quantization",
    }
    entry = {key: values[flag] for flag, key in renamed.items() if flag in values}
    if entry.get("model") in ("[ngram]", "ngram"):
        entry["method"] = "ngram"
        del entry["model"]
    if entry and entry.keys().isdisjoint({"method", "model"}):
        entry["method"] = "ngram"
    if entry.get("method") == "ngram":
        shortest = entry.setdefault("prompt_lookup_min", 1)
        entry.setdefault("prompt_lookup_max", max(4, shortest))
    elif not entry.keys().isdisjoint({"prompt_lookup_min", "prompt_lookup_max"}):
        raise ConfigError("--ngram-prompt-lookup-min and -max belong to --speculative-model '[ngram]'")
    return entry


def _speculative(read: Callable[[], SpeculativeConfig]) -> SpeculativeConfig:
    try:
        config = read()
    except SpeculativeConfigError as error:
        raise ConfigError(f"speculative config: {error}") from error
    for proposer in config.proposers:
        match proposer:
            case DraftModelConfig(draft_tensor_parallel_size=ranks) | EagleConfig(draft_tensor_parallel_size=ranks) if ranks > 1:
                raise ConfigError(_one_device("draft_tensor_parallel_size", ranks))
            case _:
                pass
    return config


def _translate(values: dict[str, Any]) -> None:
    """Put values of vLLM's spelling into the words of our config types."""
    if names := values.pop("served_model_name", None):
        values["served_model_names"] = tuple(names)
        values["served_model_name"] = names[0]
    if keys := values.pop("api_keys", None):
        split = [_KEY_PRIORITY.fullmatch(key) for key in keys]
        if any(":priority=" in key and not found for key, found in zip(keys, split, strict=True)):  # else a key with that ending
            raise ConfigError("--api-key KEY:priority=N needs a whole number as N, such as -5")
        values["api_keys"] = tuple(found[1] if found else key for key, found in zip(keys, split, strict=True))
        if any(split):
            values["key_priorities"] = tuple(int(found[2]) if found else 0 for found in split)
    if "gpu_memory_utilization" in values:
        values["memory_share"] = values["gpu_memory_utilization"]
        values["max_kv_cache_gb"] = math.inf  # a share that somebody chose is meant
    if "kv_cache_memory_bytes" in values:
        values.setdefault("kv_cache_gb", values["kv_cache_memory_bytes"] / 2**30)
    if "num_gpu_blocks_override" in values:
        values["num_blocks"] = values["num_gpu_blocks_override"]
    match values.get("dtype"):
        case "float":
            values["dtype"] = "float32"
        case "half" | "float16":
            values["dtype"] = "auto"


def _unapplied(values: Mapping[str, Any]) -> list[str]:
    """Values of our own flags that are understood and cannot be followed."""
    dtype = values.get("dtype")
    found = [f"--dtype {dtype} is not served; auto is used"] if dtype in ("half", "float16") else []
    if "ssl_ca_certs" in values and not values.get("ssl_cert_reqs"):
        found.append("--ssl-ca-certs has no effect without --ssl-cert-reqs 1 or 2")
    if values.keys().isdisjoint({"enable_lora", "lora_modules"}):
        alone = ("--max-loras", "--max-lora-rank", "--allow-runtime-lora-updating")
        found += [f"{flag} has no effect without --enable-lora" for flag in alone if flag[2:].replace("-", "_") in values]
    return found


def _adapters(values: Mapping[str, Any]) -> AdapterConfig | None:
    """None if there is to be no room for any. Raises ConfigError."""
    modules = tuple(module for word in values.get("lora_modules", ()) for module in word)
    if not (modules or values.get("enable_lora")):
        return None
    own = values.get("served_model_names") or (values.get("model", DEMO_MODEL),)
    if taken := [module.name for module in modules if module.name in own]:
        raise ConfigError(f"--lora-modules: {taken[0]!r} is the model's own name; give the adapter another")
    return AdapterConfig(modules, **_named(AdapterConfig, values))


def _require_one_device(values: Mapping[str, Any]) -> None:
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if values.get(name, 1) > 1:
            raise ConfigError(_one_device("--" + name.replace("_", "-"), values[name]))


def _one_device(setting: str, wanted: int) -> str:
    return f"{setting} {wanted} is not available: a server uses one device; found here: {devices_found()}"


def _named(config: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {f.name: values[f.name] for f in fields(config) if f.name in values}


def _fill(config: type[T], values: Mapping[str, Any]) -> T:
    """Defaults stand in the dataclasses only: what nobody gave is not passed."""
    return config(**_named(config, values))
