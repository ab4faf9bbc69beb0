"""EAGLE drafters as folders, in every published layout, and a pretended engine that runs a proposer over pretended states."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from eagle_reference import FINAL, Reference, Spec, Target, random_weights
from safetensors.torch import save_file
from torch import Tensor

from foretoken.kernels.execution import Execution
from foretoken.kernels.layout import Executor
from foretoken.kernels.program import ArgMax, Embed, GatherRows, Linear, Program
from foretoken.kernels.weights import bind_program
from foretoken.proposers import eagle
from foretoken.proposers.base import Draft, DraftContext, DraftRow, Draw, Feedback
from foretoken.proposers.config import EagleConfig
from foretoken.proposers.learned import LearnedProposer
from foretoken.proposers.loading import LoadedProposer, Opening, Resources, TargetView

NUM_LAYERS = 8
NUM_BLOCKS = 400
MAX_MODEL_LEN = 1000
GREEDY = Draw(0.0, 0, 0)
TORCH = Execution(torch.float32, prefer_native=False)

EAGLE1 = Spec(kind="eagle", taps=(FINAL,), own_head=False)
Rename = Callable[[str], str]


@dataclass(frozen=True)
class Published:
    """One way in which drafters are published: what is in it, what config.json says, what the tensors are called."""

    spec: Spec
    config: Mapping[str, Any]
    rename: Rename = lambda name: name
    more: Mapping[str, Tensor] = field(default_factory=dict)  # tensors that are there and mean nothing


def sizes(spec: Spec, **more: Any) -> dict[str, Any]:
    """The settings of config.json that every layout has."""
    settings = {
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": spec.eps,
        "vocab_size": spec.vocab,
        "num_hidden_layers": spec.layers,
        "max_position_embeddings": 64,  # short, as they are
    }
    return {**settings, **more}


def _midlayer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


def _published() -> dict[str, Published]:
    eagle1 = replace(EAGLE1, fc_bias=True)
    qwen2 = replace(EAGLE1, qkv_bias=True, layers=2, theta=500000.0)
    plain = Spec(draft_vocab=40)
    wide = Spec(hidden=48, head_dim=16, taps=(2, 3, 5, 7, 8), head_norms=True, own_embedding=True)
    spec31 = Spec(
        draft_vocab=50, layers=2, norm_before_residual=True, norm_before_fc=True, norm_output=True, own_embedding=True, taps=(1, 4, 7)
    )
    nvidia = Spec(draft_vocab=40, layers=2, taps=(2, 5, 8), fc_norm=True, qkv_bias=True, out_bias=True)
    no_taps = Spec(taps=(FINAL,), draft_vocab=40)
    parallel = Spec(draft_vocab=50, layers=2, own_embedding=True, parallel=True, norm_before_fc=True)
    nested = {"model_type": "llama", **sizes(spec31, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"})}
    return {
        "eagle": Published(
            eagle1,
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes(eagle1), "bias": True},
            more={"embed_tokens.weight": Target(eagle1).embedding},
        ),
        "eagle, qwen2, prefixed": Published(
            qwen2,
            {"architectures": ["Qwen2ForCausalLMEagle"], "model_type": "qwen2", **sizes(qwen2, rope_theta=500000.0), "qkv_bias": True},
            rename=lambda name: f"model.{name}",
        ),
        "eagle3": Published(
            plain,
            {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **sizes(plain), "draft_vocab_size": 40},
            rename=_midlayer,
        ),
        "eagle3, qwen3": Published(
            wide,
            {
                "architectures": ["Qwen3Eagle3Model"],
                "model_type": "qwen3",
                **sizes(wide, head_dim=16, target_hidden_size=32),
                "target_layer_ids": [1, 2, 4, 6, 7],
            },
        ),
        "eagle3, speculators": Published(
            spec31,
            {
                "speculators_model_type": "eagle3",
                "architectures": ["Eagle3Speculator"],
                "speculators_config": {
                    "algorithm": "eagle3",
                    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                    "verifier": {"name_or_path": "x", "architectures": ["LlamaForCausalLM"]},
                },
                "transformer_layer_config": nested,
                "draft_vocab_size": 50,
                "norm_before_fc": True,
                "norm_output": True,
                "eagle_aux_hidden_state_layer_ids": [1, 4, 7],
            },
            more={"verifier_norm.weight": torch.ones(32), "verifier_lm_head.weight": torch.ones(50, 32)},
        ),
        "eagle3, NVIDIA": Published(
            nvidia,
            {
                "architectures": ["LlamaForCausalLMEagle3"],
                "model_type": "llama",
                **sizes(nvidia, attention_bias=True),
                "draft_vocab_size": 40,
                "eagle_config": {
                    "eagle_aux_hidden_state_layer_ids": [1, 4, 7],
                    "use_aux_hidden_state": True,
                    "use_input_layernorm_in_first_layer": True,
                    "use_last_layernorm": True,
                    "use_mtp_layernorm": False,
                    "next_layer_regular": True,
                    "parallel_draft_step": 1,
                    "fc_norm": True,
                },
            },
            rename=lambda name: name.replace("layers.", "midlayer."),
        ),
        "eagle3, last state": Published(
            no_taps,
            {
                "architectures": ["LlamaForCausalLMEagle3"],
                "model_type": "llama",
                **sizes(no_taps),
                "draft_vocab_size": 40,
                "eagle_config": {"use_aux_hidden_state": False},
            },
            rename=_midlayer,
        ),
        "p-eagle": Published(
            parallel,
            {
                "speculators_model_type": "peagle",
                "architectures": ["PEagleDraftModel"],
                "transformer_layer_config": {"model_type": "llama", **sizes(parallel)},
                "draft_vocab_size": 50,
                "mask_token_id": 59,
                "norm_before_fc": True,
            },
        ),
    }


PUBLISHED = _published()


@dataclass
class Drafter:
    """A published drafter on disk beside its pretended target, and the reference for it."""

    folder: Path
    target_folder: Path
    spec: Spec
    target: Target
    reference: Reference
    bound: list[Executor] = field(default_factory=list)  # every network that was loaded

    @classmethod
    def write(cls, published: Published, folder: Path, target: Target | None = None) -> Drafter:
        target = target or Target(published.spec)
        weights = random_weights(published.spec)
        drafter, of_target = folder / "drafter", folder / "target"
        drafter.mkdir(exist_ok=True)
        of_target.mkdir(exist_ok=True)
        named = {published.rename(name): tensor for name, tensor in weights.items() if name not in ("d2t", "t2d", "mask_hidden")}
        kept = {name: tensor for name, tensor in weights.items() if name in ("d2t", "t2d", "mask_hidden")}
        save_file({k: v.contiguous() for k, v in {**named, **kept, **published.more}.items()}, drafter / "model.safetensors")
        (drafter / "config.json").write_text(json.dumps(published.config))
        save_file({"model.embed_tokens.weight": target.embedding, "lm_head.weight": target.head}, of_target / "model.safetensors")
        return cls(drafter, of_target, published.spec, target, Reference(published.spec, weights, target))

    def load(self, execution: Execution = TORCH, **settings: Any) -> LoadedProposer:
        network = _target_network(self.target, execution)

        def bind(program: Program, weights: Mapping[str, Tensor], quantization: str | None) -> Executor:
            self.bound.append(bind_program(program, weights, execution, network.bank))
            return self.bound[-1]

        resources = Resources(self._view(), lambda name, _: Path(name), bind, cast(Any, None))
        return eagle.load(EagleConfig(str(self.folder), **settings), resources)

    def open(self, execution: Execution = TORCH, return_probs: bool = False, **settings: Any) -> LearnedProposer:
        loaded = self.load(execution, **settings)
        size = block_size(execution)
        caches = [executor.allocate(NUM_BLOCKS, size) for executor in loaded.executors]
        return cast(LearnedProposer, loaded.open(Opening("eagle", caches, NUM_BLOCKS, size, return_probs)))

    def run(self, execution: Execution = TORCH, return_probs: bool = False, **settings: Any) -> PretendedEngine:
        return PretendedEngine(self.open(execution, return_probs, **settings), self.target, block_size(execution))

    def _view(self) -> TargetView:
        target = self.target
        return TargetView(
            folder=self.target_folder,
            config={},
            tokenizer=cast(Any, SimpleNamespace()),
            num_layers=NUM_LAYERS,
            hidden_size=target.spec.target_hidden,
            vocab_size=target.spec.vocab,
            max_model_len=MAX_MODEL_LEN,
            embedding="model.embed_tokens.weight",
            head="lm_head.weight",
            embed_scale=target.embed_scale,
            logits_scale=target.logits_scale,
            logits_softcap=target.softcap,
        )


def block_size(execution: Execution) -> int:
    """Small blocks show more edges; natively there is one size."""
    return 16 if execution.prefer_native else 4


def _target_network(target: Target, execution: Execution) -> Any:
    """Nothing but the target's embedding and head, so that there is a bank to share them from."""
    weights = {"model.embed_tokens.weight": target.embedding, "lm_head.weight": target.head}
    best = ArgMax(("logits",), ("argmax", "top"))
    program = Program(
        ops=(
            Embed((), ("x",), "model.embed_tokens.weight"),
            GatherRows(("x",), ("rows",)),
            Linear(("rows",), ("logits",), ("lm_head.weight",)),
            best,
        ),
        weights={name: tuple(tensor.shape) for name, tensor in weights.items()},
        kv_layers=(),
        ropes={},
        vocab_size=target.spec.vocab,
        max_model_len=MAX_MODEL_LEN,
        boundaries=("x",),
        final="x",
        logits="logits",
        best=best,
    )
    return bind_program(program, weights, execution)


@dataclass
class Request:
    tokens: list[int]
    num_prompt: int
    table: list[int]
    computed: int = 0  # tokens with committed states
    filled: int = 0
    draw: Draw = GREEDY


@dataclass(frozen=True)
class Guess:
    """What was drafted for a row that had this text."""

    text: list[int]
    tokens: list[int]
    parents: list[int]
    confidence: list[float]
    probs: Tensor | None

    def path(self, node: int) -> list[int]:
        """Nodes from the root to this one."""
        return [*self.path(self.parents[node]), node] if node >= 0 else []


Choose = Callable[[str, Guess], tuple[Sequence[int], int]]
"""(request, its guesses) -> accepted path of nodes, and the token behind it."""


class PretendedEngine:
    """Steps over requests whose target says what the test wants, and has states that depend on the whole text."""

    def __init__(self, proposer: LearnedProposer, target: Target, block_size: int) -> None:
        self.proposer, self.target, self.block_size = proposer, target, block_size
        self.requests: dict[str, Request] = {}
        self.filled: dict[str, int] = {}
        self._next_block = 0

    def add(self, request_id: str, prompt: Sequence[int], shared: Sequence[int] = (), draw: Draw = GREEDY) -> Request:
        """shared: blocks of the prompt's beginning that another request has filled."""
        count = (len(prompt) + 160) // self.block_size - len(shared)
        table = [*shared, *range(self._next_block, self._next_block + count)]
        self._next_block += count
        known = len(shared) * self.block_size
        self.requests[request_id] = Request(list(prompt), len(prompt), table, known, known, draw)
        return self.requests[request_id]

    def step(
        self,
        choose: Choose,
        ceiling: int = 4,
        chunk: int = 1000,
        order: Sequence[str] | None = None,
        asks: bool = True,
        ingest: int = 1000,
    ) -> dict[str, Guess]:
        """One step over all requests. asks False: the proposer is not asked at all."""
        names = list(self.requests) if order is None else list(order)
        afters = {name: min(len(r.tokens), r.computed + chunk) for name in names for r in [self.requests[name]]}
        rows = [self._row(name, afters[name], ceiling) for name in names]
        draft = self.proposer.propose(DraftContext(rows, ingest, self.block_size)) if asks else Draft.empty(len(rows))
        self.filled.update({name: n for (_, name), n in draft.filled.items()})
        guesses = {name: self._guess(draft, i, self.requests[name]) for i, name in enumerate(names)}
        self._finish(names, afters, guesses, choose)
        self.proposer.check()
        return guesses

    def _row(self, name: str, after: int, ceiling: int) -> DraftRow:
        r = self.requests[name]
        return DraftRow(name, r.tokens, r.num_prompt, after, ceiling, 0, r.table, (r.filled,), r.draw)

    def _guess(self, draft: Draft, i: int, request: Request) -> Guess:
        start, end = draft.start_loc[i], draft.start_loc[i + 1]
        confidence = draft.confidence or [1.0] * len(draft.token_ids)
        probs = None if draft.probs is None else draft.probs[start:end]
        return Guess(list(request.tokens), draft.token_ids[start:end], draft.parents[start:end], confidence[start:end], probs)

    def _finish(self, names: Sequence[str], afters: Mapping[str, int], guesses: Mapping[str, Guess], choose: Choose) -> None:
        hidden: dict[int, list[Tensor]] = {boundary: [] for boundary in self.proposer.needs.hidden}
        accepted: list[list[int]] = []
        emitted: list[list[int]] = []
        committed: list[int] = []
        scheduled: list[int] = []
        starts = [0]
        for name in names:
            request, guess = self.requests[name], guesses[name]
            texts = [request.tokens[: i + 1] for i in range(request.computed, afters[name])]
            texts += [request.tokens + [guess.tokens[n] for n in guess.path(node)] for node in range(len(guess.tokens))]
            for boundary, states in hidden.items():
                states += [self.target.state(text, boundary) for text in texts]
            starts.append(starts[-1] + len(texts))
            scheduled.append(afters[name] - request.computed)
            path, more = choose(name, guess) if afters[name] == len(request.tokens) else ((), None)
            accepted.append(list(path))
            emitted.append([guess.tokens[node] for node in path] + ([] if more is None else [more]))
            request.tokens += emitted[-1]
            request.computed = afters[name] + len(path)
            committed.append(request.computed)
        self.proposer.observe(
            Feedback(
                request_ids=names,
                num_committed=committed,
                num_drafted=[len(guesses[name].tokens) for name in names],
                accepted=accepted,
                emitted=emitted,
                finished=[False] * len(names),
                hidden={boundary: torch.stack(states) for boundary, states in hidden.items()},
                query_start_loc=starts,
                num_scheduled=scheduled,
            )
        )
