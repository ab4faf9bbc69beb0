"""EAGLE drafters as folders, in every published layout, beside a pretended target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from compared_guesses import ReferencedDrafter
from eagle_reference import FINAL, Latent, Reference, Spec, Target, random_weights
from pretended_engine import TORCH, Guess
from pretended_target import resources, save_beside, sizes_of
from torch import Tensor

from foretoken.kernels.execution import Execution
from foretoken.kernels.layout import Executor
from foretoken.proposers import eagle
from foretoken.proposers.config import EagleConfig
from foretoken.proposers.loading import LoadedProposer

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
    return {**sizes_of(spec, spec.layers), **more}


def _midlayer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


def _published() -> dict[str, Published]:
    eagle1 = replace(EAGLE1, fc_bias=True)
    gumiho = replace(EAGLE1, fc_bias=True, layers=2, further_heads=2)
    qwen2 = replace(EAGLE1, qkv_bias=True, layers=2, theta=500000.0)
    plain = Spec(draft_vocab=40)
    wide = Spec(hidden=48, head_dim=16, taps=(2, 3, 5, 7, 8), head_norms=True, own_embedding=True)
    spec31 = Spec(
        draft_vocab=50, layers=2, norm_before_residual=True, norm_before_fc=True, norm_output=True, own_embedding=True, taps=(1, 4, 7)
    )
    nvidia = Spec(draft_vocab=40, layers=2, taps=(2, 5, 8), fc_norm=True, qkv_bias=True, out_bias=True)
    no_taps = Spec(taps=(FINAL,), draft_vocab=40, heads=6)  # which do not share 32 evenly
    parallel = Spec(draft_vocab=50, layers=2, own_embedding=True, parallel=True, norm_before_fc=True)
    kimi = Spec(layers=2, latent=Latent(stretch=4.0), own_embedding=True, taps=(1, 4, 7), fc_norm=True, norm_output=True, theta=500.0)
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}
    halves = Spec(draft_vocab=40, latent=Latent(q_rank=0, pairs=False))
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
        "gumiho": Published(
            gumiho,
            {"model_type": "gumiho", "model": sizes(gumiho)},
            rename=lambda name: f"mlp.{name}" if name.startswith("mlp.") else name,
        ),
        "eagle3": Published(
            plain,
            {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **sizes(plain), "draft_vocab_size": 40},
            rename=_midlayer,
        ),
        "eagle3, qwen3": Published(
            wide,
            {
                "architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", **sizes(wide, head_dim=16, target_hidden_size=32),
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
                    "eagle_aux_hidden_state_layer_ids": [1, 4, 7], "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
                    "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
                    "fc_norm": True,
                },
            },
            rename=lambda name: name.replace("layers.", "midlayer."),
        ),
        "eagle3, last state": Published(
            no_taps,
            {
                "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **sizes(no_taps), "draft_vocab_size": 40,
                "eagle_config": {"use_aux_hidden_state": False},
            },
            rename=_midlayer,
        ),
        "eagle3, latent attention": Published(  # as Kimi's, whose config says more of experts than of the drafter
            kimi,
            {
                "architectures": ["Eagle3DeepseekV2ForCausalLM"],
                "model_type": "kimi_k2",
                **sizes(kimi, num_key_value_heads=4, kv_lora_rank=16, n_routed_experts=1, first_k_dense_replace=0),
                **{"rope_theta": 500.0, "rope_scaling": yarn},
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]},
                "fc_norm": True,
                "norm_output": True,
            },
            rename=_midlayer,
        ),
        "eagle3, latent attention, whole queries": Published(
            halves,
            {
                "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v3", **sizes(halves, rope_interleave=False),
                "draft_vocab_size": 40,
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
class Drafter(ReferencedDrafter):
    """A published drafter on disk beside its pretended target, and the reference for it."""

    folder: Path
    target_folder: Path
    spec: Spec
    target: Target
    reference: Reference
    bound: list[Executor] = field(default_factory=list)
    target_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return self.spec.kind

    @classmethod
    def write(cls, published: Published, folder: Path, target: Target | None = None) -> Drafter:
        target = target or Target(published.spec)
        weights = random_weights(published.spec)
        named = {published.rename(name): tensor for name, tensor in weights.items() if name not in ("d2t", "t2d", "mask_hidden")}
        kept = {name: tensor for name, tensor in weights.items() if name in ("d2t", "t2d", "mask_hidden")}
        folders = save_beside(target, folder, published.config, {**named, **kept, **published.more})
        return cls(*folders, published.spec, target, Reference(published.spec, weights, target))

    def probs(self, guess: Guess, first: int = 0) -> Tensor:
        if self.spec.parallel:
            return self.reference.parallel_probs(guess.text, len(guess.tokens), first)
        return torch.stack([self.reference.probs(guess.text, guess.tokens[:i], first) for i in range(len(guess.tokens))])

    def load(self, execution: Execution = TORCH, **settings: Any) -> LoadedProposer:
        given = resources(self.target, self.target_folder, execution, self.bound)
        given = replace(given, target=replace(given.target, config=self.target_config))
        return eagle.load(EagleConfig(str(self.folder), **settings), given)
