"""vLLM's flags that have no meaning here, so that its command lines run unchanged.

Owns the tables and the walk over a command line that takes those flags out. Knows no value of any flag of ours.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import yaml

# Flags of vLLM 0.5 to 0.33, without those that `options.py` offers itself.
SWITCHES = frozenset(
    """
    --aggregate-engine-logging --allow-credentials --async-scheduling --calculate-kv-scales --data-parallel-external-lb
    --data-parallel-hybrid-lb --disable-async-output-proc --disable-cascade-attn --disable-chunked-mm-input
    --disable-custom-all-reduce --disable-fastapi-docs --disable-frontend-multiprocessing --disable-hybrid-kv-cache-manager
    --disable-log-requests --disable-log-stats --disable-logprobs-during-spec-decoding --disable-mm-preprocessor-cache
    --disable-nccl-for-dp-synchronization --disable-sliding-window --disable-uvicorn-access-log --enable-auto-tool-choice
    --enable-chunked-prefill --enable-dbo --enable-eplb --enable-expert-parallel --enable-force-include-usage --enable-lora
    --enable-lora-bias --enable-log-deltas --enable-log-outputs --enable-log-requests --enable-mm-embeds
    --enable-multimodal-encoder-data-parallel --enable-offline-docs --enable-per-request-metrics --enable-prompt-adapter
    --enable-prompt-embeds --enable-prompt-tokens-details --enable-reasoning --enable-request-id-headers
    --enable-server-load-tracking --enable-sleep-mode --enable-ssl-refresh --enable-tokenizer-info-endpoint --enforce-eager
    --engine-use-ray --eplb-log-balancedness --exclude-tools-when-tool-choice-none --fully-sharded-loras
    --guided-decoding-disable-additional-properties --guided-decoding-disable-any-whitespace
    --guided-decoding-disable-fallback --headless --interleave-mm-strings --kv-sharing-fast-prefill --language-model-only
    --log-error-stack --multi-step-stream-outputs --ray-workers-use-nsight --return-tokens-as-token-ids --skip-mm-profiling
    --skip-tokenizer-init --speculative-disable-mqa-scorer --tokens-only --trust-remote-code --trust-request-chat-template
    --use-tqdm-on-load --use-v2-block-manager --worker-use-ray
    """.split()
)
TAKING_A_VALUE = frozenset(
    """
    --additional-config --all2all-backend --allowed-headers --allowed-local-media-path --allowed-methods --api-server-count -asc
    --attention-backend --block-size --chat-template --chat-template-content-format --code-revision --collect-detailed-traces
    --compilation-config -cc -O --config-format --convert --cpu-offload-gb --data-parallel-address -dpa --data-parallel-backend -dpb
    --data-parallel-rank -dpn --data-parallel-rpc-port -dpp --data-parallel-size-local -dpl --data-parallel-start-rank -dpr
    --dbo-decode-token-threshold --dbo-prefill-token-threshold --decode-context-parallel-size -dcp
    --default-chat-template-kwargs --disable-access-log-for-endpoints --distributed-executor-backend --download-dir
    --eplb-config --eplb-step-interval --eplb-window-size --expert-placement-strategy --fingerprint-mode --fingerprint-value
    --generation-config --guided-decoding-backend --h11-max-header-count --h11-max-incomplete-event-size --hf-config-path
    --hf-overrides --hf-token --io-processor-plugin --kv-events-config --kv-transfer-config --limit-mm-per-prompt
    --load-format --log-config-file --logits-processor-pattern --logprobs-mode --long-lora-scaling-factors
    --long-prefill-token-threshold --lora-dtype --lora-extra-vocab-size --mamba-block-size --mamba-cache-dtype
    --mamba-ssm-cache-dtype --max-context-len-to-capture --max-cpu-loras --max-cudagraph-capture-size --max-log-len
    --max-logprobs --max-long-partial-prefills --max-lora-rank --max-loras --max-num-partial-prefills --max-num-queued-tokens
    --max-parallel-loading-workers --max-prompt-adapter-token --max-prompt-adapters --max-seq-len-to-capture --media-io-kwargs
    --middleware --mm-encoder-attn-backend --mm-encoder-tp-mode --mm-processor-cache-gb --mm-processor-cache-type
    --mm-processor-kwargs --mm-shm-cache-max-object-size-mb --model-impl --model-loader-extra-config --num-lookahead-slots
    --num-redundant-experts --num-scheduler-steps --otlp-traces-endpoint --override-attention-dtype
    --override-generation-config --override-neuron-config --override-pooler-config --per-request-spec-decode-metrics --performance-mode
    --pooler-config
    --preemption-mode --prefix-caching-hash-algo --pt-load-map-location --qlora-adapter-name-or-path
    --renderer-num-workers --response-role --root-path --rope-scaling --rope-theta --runner --safetensors-load-strategy
    --scheduler-cls --scheduler-delay-factor --scheduling-policy --show-hidden-metrics-for-version --ssl-ca-certs
    --ssl-cert-reqs --ssl-ciphers --structured-outputs-config --swap-space --task --tokenizer --tokenizer-mode
    --tokenizer-pool-extra-config --tokenizer-pool-size --tokenizer-pool-type --tokenizer-revision
    --tool-parser-plugin --tool-server --typical-acceptance-sampler-posterior-alpha
    --typical-acceptance-sampler-posterior-threshold --uds --video-pruning-rate --worker-cls --worker-extension-cls
    """.split()
)
TAKING_VALUES = frozenset(
    """
    --allowed-media-domains --cuda-graph-sizes --cudagraph-capture-sizes --default-mm-loras --ignore-patterns --logits-processors
    --lora-modules --prompt-adapters
    """.split()
)
# What a user of these should know beyond "ignored".
NOTES = {
    "--block-size": "cache blocks hold 16 tokens",
    "--chat-template": "the template of the model folder is used",
    "--enable-lora": "adapters are not served",
    "--generation-config": "sampling defaults are those of the API",
    "--load-format": "weights are read from safetensors",
    "--lora-modules": "adapters are not served",
    "--override-generation-config": "sampling defaults are those of the API",
    "--tokenizer": "the tokenizer of the model folder is used",
    "--trust-remote-code": "code from a model folder is never run",
    "--uds": "the server listens on --host and --port",
}
# Ignoring these would leave somebody less safe than they asked to be.
REFUSED = {
    "--ssl-certfile": "TLS is not served: put a proxy that ends TLS in front",
    "--ssl-keyfile": "TLS is not served: put a proxy that ends TLS in front",
}
# What to say here in place of SGLang's, llama.cpp's, LMDeploy's, TGI's and mlx-lm's flags of speculation.
ELSEWHERE = {
    **dict.fromkeys(["--speculative-algorithm", "--spec-type"], "--spec-method"),
    **dict.fromkeys(
        ["--draft-model", "--model-draft", "-md", "--spec-draft-model", "--speculative-draft-model", "--speculative-draft-model-path"],
        "--speculative-model",
    ),
    **dict.fromkeys(
        ["--draft", "--draft-n", "--draft-max", "--spec-draft-n-max", "--num-draft-tokens", "--speculate"],
        "--num-speculative-tokens",
    ),
    "--speculative-num-draft-tokens": '--num-speculative-tokens, or for a tree "num_draft_tokens" in --speculative-config',
    "--speculative-num-steps": '--num-speculative-tokens, or for a tree "num_steps" in --speculative-config',
    "--speculative-eagle-topk": '"eagle_topk" in --speculative-config',
    **dict.fromkeys(["--draft-p-min", "--spec-draft-p-min"], '"confidence_threshold" in --speculative-config'),
    "--model-path": "--model",
    "--speculative-draft-model-quantization": "--speculative-model-quantization",
    "--speculative-draft-model-revision": '"revision" in --speculative-config',
}
_JSON_FLAGS = {"--speculative-config": "--speculative-config", "-sc": "--speculative-config"}
_BOOLEANS = {"true", "false"}
_NUMBER = re.compile(r"-\d|-\.\d")


class UnknownFlag(ValueError):
    """A flag that neither we nor vLLM know, or one that is refused; the message names the nearest."""


@dataclass(frozen=True)
class Separated:
    """A command line in two parts."""

    own: list[str]  # flags of ours, spelled with dashes, and positional words
    warnings: list[str]  # what was taken out, ready to be shown


def separate(argv: Sequence[str], own_flags: Collection[str]) -> Separated:
    """Take vLLM's flags without meaning here out of a command line.

    Underscores count as dashes (`--max_model_len`), `--speculative-config.method ngram` becomes part of one JSON value.
    Raises UnknownFlag.
    """
    own: list[str] = []
    ignored: list[str] = []
    dotted: dict[str, object] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--" or not word.startswith("-") or word == "-" or _NUMBER.match(word):
            own.append(word)
            continue
        name, equals, value = word.partition("=")
        name, dot, key = name.partition(".")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if dot and name in _JSON_FLAGS:
            _assign(dotted, key, value if equals else _take_value(words, word))
        elif name in own_flags:
            own.append(name + equals + value)
        elif name in REFUSED:
            raise UnknownFlag(f"{name} is refused: {REFUSED[name]}")
        elif _skip_foreign(name, bool(equals), words):
            ignored.append(name)
        else:
            raise UnknownFlag(_unknown(word, name, own_flags))
    if dotted:
        own.append("--speculative-config=" + json.dumps(dotted))
    return Separated(own, _warnings(ignored))


def _skip_foreign(name: str, has_value: bool, words: list[str]) -> bool:
    """Drop the values of a flag of vLLM's from the words that follow it. False if vLLM has no such flag."""
    switch = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
    if switch in SWITCHES:
        if not has_value and words and words[0].lower() in _BOOLEANS:  # old versions: --enable-chunked-prefill False
            words.pop(0)
    elif name in TAKING_A_VALUE:
        if not has_value and words and not _is_flag(words[0]):
            words.pop(0)
    elif name in TAKING_VALUES:
        while not has_value and words and not _is_flag(words[0]):
            words.pop(0)
    else:
        return re.fullmatch(r"-O\d", name) is not None
    return True


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not _NUMBER.match(word)


def _take_value(words: list[str], flag: str) -> str:
    if not words:
        raise UnknownFlag(f"{flag} expects a value")
    return words.pop(0)


def _assign(target: dict[str, object], key: str, text: str) -> None:
    """`a.b`, "1" -> {"a": {"b": 1}}."""
    *parents, last = key.replace("-", "_").split(".")
    for parent in parents:
        inner = target.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise UnknownFlag(f"--speculative-config.{key} contradicts an earlier value of {parent}")
        target = inner
    target[last] = yaml.safe_load(text)


def _unknown(word: str, name: str, own_flags: Collection[str]) -> str:
    if name in ELSEWHERE:
        return f"unknown flag {name}: here it is {ELSEWHERE[name]}"
    known = [flag[2:] for flag in (*own_flags, *SWITCHES, *TAKING_A_VALUE, *TAKING_VALUES) if flag.startswith("--")]
    near = difflib.get_close_matches(name.lstrip("-"), known, n=1)
    hint = f": did you mean --{near[0]}?" if near else "; `foretoken serve --help` lists the flags"
    return f"unknown flag {word.partition('=')[0]}{hint}"


def _warnings(ignored: list[str]) -> list[str]:
    names = list(dict.fromkeys(ignored))
    warnings = [f"{name} has no effect: {NOTES[name]}" for name in names if name in NOTES]
    if plain := [name for name in names if name not in NOTES]:
        warnings.append(f"vLLM's {', '.join(plain)} {'has' if len(plain) == 1 else 'have'} no meaning here and no effect")
    return warnings
