"""The flags of `foretoken serve` by subject, which the other commands that load a model have too, and their help.

Owns names, aliases, forms and the words of the help. The defaults it tells are those of the config types.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from .help_format import HelpFormatter
from .option_forms import adapters, count, json_object, key, name, origins, port, positive, prefix, seconds, share
from .reasoning import REASONING_FORMATS
from .tools.formats import FORMATS, NO_PARSER

DESCRIPTION = """\
Serve a model behind an OpenAI-compatible API, with speculative decoding.

MODEL is a folder with safetensors weights, a GGUF file or a Hugging Face id;
without one, the small embedded model is served. Without a drafter the server
guesses by prompt lookup (n-gram), and by what the model itself brings along: an
MTP layer, or an Orthrus's second view; the output is the same with any drafter
or none.

Defaults stand in brackets.
"""
EXAMPLES = """\
examples:
  foretoken serve
  foretoken serve ./my-model --port 9000
  foretoken serve ./my-model --speculative-model ./my-draft
  foretoken serve ./my-model --speculative-config \\
      '{"method": "eagle3", "model": "./my-eagle3", "num_speculative_tokens": 5}'
  foretoken serve ./my-model --speculative-config \\
      '[{"method": "ngram"}, {"method": "draft_model", "model": "./my-draft"}]'
  foretoken serve ./my-model --speculative-config '{"method": "off"}'
  foretoken serve ./my-model --quantization int8 --kv-cache-gb 8
  foretoken serve ./my-model --lora-modules sql=./my-sql chat=./my-chat
  foretoken serve --host 0.0.0.0 --api-key "$KEY"
  foretoken serve --config server.yaml        (keys are the flags' names)

A setting is taken from the first of: command line, --config file, environment
(FORETOKEN_ and a flag's name: FORETOKEN_PORT, FORETOKEN_MAX_NUM_SEQS, ...),
default. vLLM's other flags are accepted with a warning that they have no
effect; unknown flags are errors.
"""
NETWORK, SECURITY = "network", "security"
ENGINE_SEED = "gives requests without a seed the same ones in each run, in the order in which they come [random]"


class ServeParser(argparse.ArgumentParser):
    """All flags of `foretoken serve`.

    `flags` holds every spelling, `switches` the names of those without a value, `settings` the names of serve's own, which may
    come from a file or the environment too (names have no dashes before them); `where` names the source being read.
    """

    operands: Sequence[str] = ("model",)
    """What the words without a flag are, in their order."""

    def __init__(
        self,
        command: str = "serve",
        usage: str = "[MODEL] [flags]",
        description: str = DESCRIPTION,
        examples: str = EXAMPLES,
        hidden: Collection[str] = (),
    ) -> None:
        """hidden: titles of sections that are understood, because command lines are shared, and have no effect."""
        super().__init__(
            prog=f"foretoken {command}",
            usage=f"foretoken {command} {usage}",
            description=description,
            epilog=examples,
            formatter_class=HelpFormatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
            add_help=False,
        )
        self.flags: set[str] = set()
        self.switches: set[str] = set()
        self.where = ""
        self._hidden = hidden
        self.add_own_flags()
        only_here = set(self.flags)
        self._add_model_flags()
        self._add_computing_flags()
        self._add_speculation_flags()
        self._add_adapter_flags()
        self._add_memory_flags()
        self._add_api_flags()
        self._add_network_flags()
        self._add_security_flags()
        self._add_logging_flags()
        self.settings = sorted(flag[2:] for flag in self.flags - only_here - {"--help"} if flag.startswith("--"))

    def add_own_flags(self) -> None:
        """Of another command, shown before serve's."""

    def error(self, message: str) -> NoReturn:
        """One line, whatever is wrong."""
        self.exit(2, f"foretoken: error: {self.where}{message}\n")

    def section(self, title: str) -> Section:
        return Section(self, title, hidden=title in self._hidden)

    def _add_model_flags(self) -> None:
        add = self.section("model").add
        add("--model", metavar="MODEL", help="the same as MODEL [foretoken-demo, the embedded one]")
        add("--revision", metavar="REV", help="branch, tag or commit of a Hugging Face id [its main branch]")
        add("--tokenizer", metavar="FOLDER", help="another tokenizer for it, or a Hugging Face id [the model's own]")
        add("--tokenizer-revision", metavar="REV", help="likewise [its main branch]")
        add("--max-model-len", type=count, metavar="N", help="context length; 8k and 8K are understood [the model's own]")
        add("--seed", type=int, metavar="N", help=ENGINE_SEED)

    def _add_computing_flags(self) -> None:
        add = self.section("computing and number formats").add
        add(
            "--dtype", choices=["auto", "float32", "float", "bfloat16", "half", "float16"], metavar="NAME",
            help="float32, bfloat16 or auto: what the machine computes best [auto]",
        )
        add("--quantization", "-q", type=str.lower, metavar="NAME", help="int8 (CPU), fp8 (GPU), int4 or none [auto: as the checkpoint]")
        add("--kv-cache-dtype", type=str.lower, metavar="NAME", help="int8 (CPU), fp8 (GPU), or auto: as --dtype [auto]")
        add("--executor", metavar="NAME", help="native, torch, transformers, or auto: the first of them that can [auto]")
        add("--device", metavar="DEVICE", help="cpu, cuda, cuda:N, or auto: a GPU if there is one [auto]")
        add("--threads", type=count, metavar="N", help="cores to compute with [all that the process may use]")
        add("--batch-invariant", action="store_true", help="on a GPU: the same bits in any batch and with any draft, slower [off]")
        add("--tensor-parallel-size", "-tp", type=count, metavar="N", help="devices to share the model; 1 is all there is [1]")
        add("--pipeline-parallel-size", "-pp", type=count, metavar="N", help="likewise [1]")
        add("--data-parallel-size", "-dp", type=count, metavar="N", help="likewise [1]")

    def _add_speculation_flags(self) -> None:
        add = self.section("speculation").add
        add(
            "--speculative-config", "-sc", metavar="CONFIG",
            help="who guesses, and how: an object or a list of them, as JSON, YAML or @FILE [prompt lookup, and an MTP layer of the "
            "model's own; the embedded model: its draft model, n-gram cache and prompt lookup]",
        )
        add("--spec-method", metavar="METHOD", help="ngram, ngram_cache, suffix, draft_model, eagle3, mtp, ... [what the folder holds]")
        add(
            "--speculative-model", "--spec-model", metavar="FOLDER",
            help="a draft model, heads or an n-gram cache; the content says which method; or [ngram] [none]",
        )
        add("--num-speculative-tokens", "--spec-tokens", type=count, metavar="K", help="most tokens guessed at once [the drafter's own]")
        add("--ngram-prompt-lookup-max", type=count, metavar="N", help="longest n-gram looked up [4]")
        add("--ngram-prompt-lookup-min", type=count, metavar="N", help="shortest n-gram looked up [1]")
        add("--speculative-max-model-len", type=count, metavar="N", help="context length of the draft model [its own]")
        add(
            "--speculative-disable-by-batch-size", "--speculative-disable-queue-size", type=count, metavar="N",
            help="guess nothing in steps of more than N running requests [decided by measured costs]",
        )
        add("--speculative-draft-tensor-parallel-size", "-spec-draft-tp", type=count, metavar="N", help="devices of the draft model [1]")
        add(
            "--speculative-model-quantization", type=str.lower, metavar="NAME",
            help="int8, fp8, int4 or none [int8 natively, int4 or fp8 on a GPU]",
        )
        add(
            "--spec-decoding-acceptance-method", choices=["rejection_sampler", "typical_acceptance_sampler"], metavar="NAME",
            help="rejection_sampler; typical_acceptance_sampler is lossy and refused [exact matching]",
        )
        add("--speculation-corpus-dir", metavar="DIR", help="keep the texts that suffix and ngram look in across restarts [none]")
        add("--allow-synthetic-acceptance", action="store_true", help="benchmarks only: guesses pass by chance, outputs are nonsense [off]")

    def _add_adapter_flags(self) -> None:
        add = self.section("adapters (LoRA)").add
        add(
            "--lora-modules", nargs="+", type=adapters, metavar="NAME=FOLDER",
            help='adapters to serve, each by its name as model; also JSON, {"name": NAME, "path": FOLDER} [none]',
        )
        add("--enable-lora", action="store_true", help="have room for adapters that are loaded later [on with --lora-modules]")
        add("--max-loras", type=count, metavar="N", help="most that are loaded at once [4, or all --lora-modules]")
        add("--max-lora-rank", type=count, metavar="N", help="greatest rank that there is room for [16, or theirs]")

    def _add_memory_flags(self) -> None:
        add = self.section("memory and batching").add
        add("--max-num-seqs", type=count, metavar="N", help="most requests running at once [128]")
        add("--max-num-batched-tokens", type=count, metavar="N", help="most tokens in one step [2048]")
        add("--max-draft-tokens-per-step", type=count, metavar="N", help="most guessed tokens among them [512]")
        add("--max-queued-requests", "--max-num-queued-reqs", type=count, metavar="N", help="more are answered with 503 [1024]")
        add("--kv-cache-gb", type=positive, metavar="GB", help="size of the KV cache in GiB [by --gpu-memory-utilization]")
        add("--kv-cache-memory-bytes", type=count, metavar="BYTES", help="the same in bytes [by --gpu-memory-utilization]")
        add(
            "--gpu-memory-utilization", type=share, metavar="SHARE",
            help="of a GPU, or of free memory for the cache [0.9; 0.3, at most 4 GiB]",
        )
        add("--num-gpu-blocks-override", type=count, metavar="N", help="exact number of cache blocks, for tests [what fits]")
        add("--enable-prefix-caching", action="store_true", help="reuse the cache of equal prompt beginnings [on]")
        add("--no-enable-prefix-caching", action="store_false", dest="enable_prefix_caching", help="do not")

    def _add_api_flags(self) -> None:
        add = self.section("API").add
        add("--served-model-name", nargs="+", type=name, metavar="NAME", help="name in the API; more are aliases [as MODEL is given]")
        add(
            "--tool-call-parser", choices=[*FORMATS, NO_PARSER], metavar="NAME",
            help=f"how the model writes tool calls: {', '.join((*FORMATS, NO_PARSER))} [what its chat template says]",
        )
        add(
            "--reasoning-parser", choices=[*REASONING_FORMATS, NO_PARSER], metavar="NAME",
            help=f"how it marks reasoning: {', '.join((*REASONING_FORMATS, NO_PARSER))} [what its chat template says]",
        )
        add("--chat-template", metavar="FILE", help="a Jinja template for conversations, or itself one [the model's]")
        add(
            "--default-chat-template-kwargs", type=json_object, metavar="JSON",
            help="what its template is told by default, as {\"enable_thinking\": false} [none]",
        )
        add("--generation-config", metavar="FROM", help="whose sampling is the default: auto, FOLDER or vllm (none) [auto]")
        add("--override-generation-config", type=json_object, metavar="JSON", help="changes to it, as {\"temperature\": 0.6} [none]")
        add("--request-timeout", type=positive, dest="request_timeout_s", metavar="S", help="a request that takes longer fails [600]")
        add("--response-store", metavar="PATH", help="a file that keeps /v1/responses across restarts; memory, or none [memory]")
        add("--max-stored-responses", type=count, metavar="N", help="more, and the least recently used go [10000]")
        add("--response-ttl", type=positive, dest="response_ttl_s", metavar="S", help="they go when unused for so long [2592000: 30 days]")

    def _add_network_flags(self) -> None:
        add = self.section(NETWORK).add
        add("--host", metavar="HOST", help="address to listen on; 0.0.0.0 = all [127.0.0.1]")
        add("--port", type=port, metavar="PORT", help="0 = any free one [8000]")
        add("--uds", metavar="PATH", help="listen on a unix domain socket there instead [none]")
        add("--root-path", type=prefix, metavar="PATH", help="where a proxy has the server; it may take it off requests or not [none]")
        add("--max-body-bytes", type=count, metavar="N", help="longer requests are refused [4194304]")
        add("--drain-timeout", "--shutdown-timeout", type=seconds, dest="drain_timeout_s", metavar="S", help="to finish on SIGTERM [30]")

    def _add_security_flags(self) -> None:
        add = self.section(SECURITY).add
        add(
            "--api-key", action="append", type=key, dest="api_keys", metavar="KEY",
            help="clients must send it; may be repeated, and end in :priority=N [none; made up if others can reach the server]",
        )
        add("--ssl-keyfile", metavar="FILE", help="the certificate's private key, in PEM [none]")
        add("--ssl-certfile", metavar="FILE", help="serve https with it; others up to its root follow in the file [none]")
        add("--ssl-ca-certs", metavar="FILE", help="who may have signed clients' certificates [none]")
        add("--ssl-cert-reqs", type=int, choices=(0, 1, 2), metavar="N", help="of clients: 0 none, 1 checked if shown, 2 needed [0]")
        add("--insecure-no-auth", action="store_true", help="no key although others can reach the server [off]")
        add(
            "--allow-runtime-lora-updating", action="store_true",
            help="clients may load adapters, from any path of this machine or the hub, and unload them: for clients you trust [off]",
        )
        add("--allowed-origins", type=origins, metavar="ORIGINS", help="web pages that may call: a JSON list, or commas [this machine's]")

    def _add_logging_flags(self) -> None:
        add = self.section("logging and settings").add
        add(
            "--log-level", "--uvicorn-log-level", choices=["debug", "info", "warning", "error"], metavar="LEVEL",
            help="debug, info, warning or error; debug shows tracebacks [info]",
        )
        add("--config", metavar="FILE", help="YAML with the flags' names as keys [none]")
        add("--help", "-h", action="help", help="show this and end")


class Section:
    """A titled group of flags that tells its parser every spelling."""

    def __init__(self, parser: ServeParser, title: str, hidden: bool) -> None:
        self.parser = parser
        self.group = parser.add_argument_group(title)
        self.hidden = hidden

    def add(self, *spellings: str, **settings: Any) -> None:
        self.parser.flags.update(spellings)
        if settings.get("action") in ("store_true", "store_false"):
            self.parser.switches.update(spelling.removeprefix("--") for spelling in spellings)
        if self.hidden:
            settings["help"] = argparse.SUPPRESS
        self.group.add_argument(*spellings, **settings)
