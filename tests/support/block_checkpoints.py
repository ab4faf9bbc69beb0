"""DFlash drafters, and those that grew out of them, as folders, in every published layout, beside a pretended target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import eagle_reference
import torch
from block_reference import Reference, Shared, Spec, random_weights
from compared_guesses import ReferencedDrafter
from pretended_engine import TORCH, Guess
from pretended_target import resources, save_beside, sizes_of
from torch import Tensor

from foretoken.kernels.execution import Execution
from foretoken.kernels.layout import Executor
from foretoken.proposers import dflash
from foretoken.proposers.config import BlockConfig
from foretoken.proposers.loading import LoadedProposer


@dataclass(frozen=True)
class Published:
    """One way in which drafters are published."""

    spec: Spec
    config: Mapping[str, Any]
    method: Literal["dflash", "dspark"] = "dflash"
    rename: Callable[[str], str] = lambda name: name
    more: Mapping[str, Tensor] = field(default_factory=dict)  # tensors that are there and mean nothing


def _sizes(spec: Spec, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        **sizes_of(spec, len(spec.causal)),
        "head_dim": spec.head_dim,
        "rope_theta": spec.theta,
        **more,
    }


def z_lab(spec: Spec, sizes: Mapping[str, Any] = {}, **more: Any) -> Published:
    inner = {"mask_token_id": spec.mask_token, "target_layer_ids": [tap - 1 for tap in spec.taps], **more}
    config = {"architectures": ["DFlashDraftModel"], **_sizes(spec, **sizes), "block_size": spec.block_size, "dflash_config": inner}
    return Published(spec, config)


def speculators(spec: Spec, kind: str, sizes: Mapping[str, Any] = {}, **more: Any) -> Published:
    config = {
        "speculators_model_type": kind,
        "architectures": ["DFlashDraftModel"],
        "speculators_config": {"algorithm": kind, "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]},
        "transformer_layer_config": _sizes(spec, **sizes),
        "block_size": spec.block_size,
        "aux_hidden_state_layer_ids": list(spec.taps),
        "mask_token_id": spec.mask_token,
        "draft_vocab_size": spec.draft_vocab,
        **more,
    }
    left_over = {"verifier_norm.weight": torch.ones(32), "verifier_lm_head.weight": torch.ones(4, 32)}
    return Published(spec, config, "dspark" if kind == "dspark" else "dflash", more=left_over)


def dflare(spec: Spec, sizes: Mapping[str, Any] = {}) -> Published:
    """Tencent's: z-lab's form."""
    published = z_lab(replace(spec, fusion="norm first"), sizes)
    return replace(published, config={**published.config, "architectures": ["DFlareQwen3Model"]})


def dflash2(spec: Spec, sizes: Mapping[str, Any] = {}, **more: Any) -> Published:
    inner = {"block_size": spec.block_size, "selector_rank": spec.rank, "selector_top_k": spec.selector_top}
    convolutions = {"conv_kernel_size": spec.conv_taps, "conv_group_size": spec.hidden // spec.conv_groups}
    published = z_lab(spec, sizes, **inner, **convolutions, **more)
    config = {key: value for key, value in published.config.items() if key != "block_size"}
    return replace(published, config={**config, "architectures": ["DFlash2DraftModel"], "is_causal": all(spec.causal)})


def lilicorr(spec: Spec, sizes: Mapping[str, Any] = {}, **more: Any) -> Published:
    """As NVIDIA publishes them: z-lab's form."""
    settings = {
        "enabled": True,
        "candidate_topk": spec.lattice_top,
        "hidden_size": spec.lattice_width,
        "num_layers": spec.lattice_layers,
        "num_heads": spec.lattice_heads,
        "mlp_ratio": spec.lattice_ratio,
        "factor_dim": spec.lattice_factors,
        "vector_eps": spec.vector_eps,
        "logit_scale": spec.lattice_scale,
    }
    published = z_lab(spec, sizes, **{f"lilicorr_{key}": value for key, value in settings.items()}, **more)
    return replace(published, config={**published.config, "architectures": ["LiLiCorrDraftModel"]})


def domino(spec: Spec, **more: Any) -> Published:
    """SpecForge's: z-lab's form as well."""
    published = z_lab(spec, projector_type="domino", gru_hidden_dim=spec.gru, emb_dim=spec.gru_mixed, **more)
    return replace(published, config={**published.config, "architectures": ["DominoDraftModel"], "emb_dim": spec.gru_mixed})


def in_head(name: str) -> Callable[[str], str]:
    """A Domino whose head's tensors have this before their names."""
    return lambda tensor: f"{name}.{tensor}" if tensor.startswith(("prefix_gru.", "embed_proj.")) else tensor


def xpress(spec: Spec, **more: Any) -> Published:
    published = z_lab(spec)
    head = {"xpress_rank": spec.refiner, "xpress_mlp_hidden": spec.refiner_mlp, "xpress_num_passes": spec.passes}
    named = {"architectures": ["Qwen3XPressModel"], "xpress_block_size": spec.block_size, "sample_from_anchor": False}
    return replace(published, config={**published.config, **named, **head, **more})


_OF_REFINER = {
    **{"w1": "token_embed", "w2": "readout", "mix.L": "mix_l"},
    **{f"mlp.{part}_proj": f"mlp_{part}" for part in ("gate", "up", "down")},
}


def xpress_speculators(spec: Spec, **more: Any) -> Published:
    published = speculators(spec, "xpress", xpress_rank=spec.refiner, xpress_mlp_ratio=2, num_jacobi_passes=spec.passes, **more)

    def rename(name: str) -> str:
        if not name.startswith("xpress_head."):
            return name
        part = name.removeprefix("xpress_head.").removesuffix(".weight")
        return f"refiner_head.{_OF_REFINER.get(part, part)}{'.weight' if name.endswith('.weight') else ''}"

    return replace(published, rename=rename)


def nvidia(spec: Spec) -> Published:
    """z-lab's form, with DSpark's heads beside the layers."""
    heads = {"projector_type": "dspark", "markov_rank": spec.rank, "markov_head_type": spec.markov, "use_confidence_head": True}
    published = z_lab(spec, **heads, shift_label=True, causal=False)

    def rename(name: str) -> str:
        return name.replace("markov_head.", "").replace("confidence_head.", "confidence_")

    return replace(published, method="dspark", rename=rename)


def specforge(spec: Spec, place: str = "dflash_config", **sizes: Any) -> Published:
    """z-lab's form too, with a model type of its own. place: of the heads' settings."""
    heads = {"projector_type": "dspark", "markov_rank": spec.rank, "markov_head_type": spec.markov, "confidence_head_with_markov": True}
    config = {**z_lab(spec, {"model_type": "dspark", **sizes}).config, "architectures": ["DSparkDraftModel"]}
    return Published(spec, {**config, place: {**config.get(place, {}), **heads}}, "dspark")


def deepseek(spec: Spec) -> Published:
    config = {
        "architectures": ["Qwen3DSparkModel"],
        **_sizes(spec),
        "block_size": spec.block_size,
        "target_layer_ids": [tap - 1 for tap in spec.taps],
        "mask_token_id": spec.mask_token,
        "num_anchors": 512,
        "markov_rank": spec.rank if spec.markov else 0,
        "markov_head_type": spec.markov or None,
        "enable_confidence_head": bool(spec.confidence),
        "confidence_head_with_markov": "markov" in spec.confidence,
        "tie_word_embeddings": False,
    }
    return Published(spec, config, "dspark")


def gemma4(spec: Spec) -> Published:
    """DeepSeek's for Gemma 4: a copy of the target's config, whose layers that slide have other heads."""
    published = deepseek(replace(spec, own_embedding=True, own_head=True, softcap=3.0))
    full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": spec.theta}
    settings = {
        **{"model_type": "gemma4_text", "architectures": ["Gemma4DSparkModel"], "layer_types": ["full_attention"] * 2},
        **{"head_dim": 8, "global_head_dim": spec.head_dim, "num_global_key_value_heads": spec.kv_heads},
        **{"attention_k_eq_v": spec.gemma == "keys", "num_key_value_heads": spec.kv_heads * (2 if spec.gemma == "keys" else 1)},
        **{"rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 9.0}}},
        **{"hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 3.0, "enable_moe_block": False},
    }
    config = {key: value for key, value in published.config.items() if key != "rope_theta"}
    return replace(published, config={**config, **settings})


def liquid(spec: Spec) -> Published:
    """Liquid AI's for LFM2: z-lab's form, DSpark's settings at the top."""
    heads = {"markov_rank": spec.rank, "markov_head_type": spec.markov, "enable_confidence_head": True, "rope_is_neox_style": False}
    published = z_lab(spec, num_target_layers=8)
    return Published(spec, {**published.config, **heads, "architectures": ["Lfm2DSparkDraftModel"]}, "dspark")


def _published() -> dict[str, Published]:
    base = Spec()
    sliding: dict[str, Any] = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 7,
        "use_sliding_window": True,
    }
    slides = replace(base, windows=(7, None))
    all_sliding = {**sliding, "layer_types": ["sliding_attention"] * 2}
    dspark = replace(base, from_anchor=True, own_embedding=True, own_head=True)
    aliases = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    reduced = replace(base, draft_vocab=40, own_head=True, own_embedding=True, bias=True)
    convolved = replace(base, conv_taps=2, conv_groups=8, selector_top=5)
    recurrent = replace(base, gru=12, gru_mixed=10)
    refined = replace(base, refiner=8, refiner_mlp=12, passes=6)
    shifted: dict[str, Any] = {"projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 0}
    return {
        "z-lab": z_lab(base),
        "z-lab, aliases": replace(z_lab(replace(base, theta=500000.0)), rename=lambda name: aliases.get(name, name)),
        "z-lab, TorchSpec": z_lab(base, {"model_type": "dflash"}),
        "z-lab, wide": z_lab(replace(base, hidden=48, own_embedding=True, own_head=True, taps=(1, 8, 3, 5))),
        "z-lab, causal": z_lab(replace(base, causal=(True, True), pairs=True, bias=True), {"is_neox_style": False}, causal=True),
        "JetSpec": z_lab(replace(base, causal=(True, True)), causal_head=True),
        "z-lab, sliding": z_lab(replace(slides, causal=(True, False)), sliding),
        "z-lab, all sliding": z_lab(replace(base, windows=(7, 7), causal=(True, True)), all_sliding),
        "z-lab, sliding, bidirectional": z_lab(slides, sliding, causal=False),
        "NVIDIA, windows": z_lab(
            replace(base, windows=(7, 7)),
            {"layer_types": ["full_attention"] * 2, "sliding_window": 7},
            use_swa=True,
            swa_window_size=7,
            causal=False,
        ),
        "z-lab, narrow windows": z_lab(replace(slides, windows=(3, None)), {**sliding, "sliding_window": 3}, causal=False),
        "z-lab, from anchor": z_lab(replace(base, from_anchor=True), query_zero_predicts_next=True),
        "z-lab, default layers": replace(
            z_lab(replace(base, taps=(2, 6))),
            config={k: v for k, v in z_lab(base).config.items() if k != "dflash_config"} | {"dflash_config": {"mask_token_id": 59}},
        ),
        "speculators": speculators(reduced, "dflash"),
        "speculators, sliding": speculators(replace(slides, causal=(True, False)), "dflash", sliding),
        "speculators, open windows": speculators(slides, "dflash", sliding, sliding_window_non_causal=True),
        "speculators, from anchor": speculators(replace(base, from_anchor=True), "dflash", sample_from_anchor=True),
        "dflare": dflare(base),
        "dflare, sliding": dflare(replace(slides, causal=(True, False)), sliding),
        "dflare, speculators": speculators(replace(base, fusion="mix first"), "dflare"),
        "dflare, speculators, the block's own keys": speculators(replace(base, fusion="mix first", own_keys=False), "dflare"),
        "dflash2": dflash2(
            replace(convolved, windows=(7, 7), logits_scale=0.4, softcap=3.0),
            all_sliding,
            output_multiplier=0.4,
            final_logit_softcapping=3.0,
        ),
        "dflash2, three taps": dflash2(replace(convolved, conv_taps=3, conv_groups=2, causal=(True, True))),
        "dflash2, speculators": speculators(
            replace(reduced, windows=(7, None), conv_taps=2, conv_groups=4, selector_top=40),
            "dflash2",
            sliding,
            conv_kernel_size=2,
            conv_group_size=8,
            selector_rank=8,
            selector_top_k=40,
        ),
        "lilicorr": lilicorr(replace(base, lattice_top=4)),
        "lilicorr, own width": replace(
            lilicorr(
                replace(slides, causal=(True, False), conv_taps=2, conv_groups=8, lattice_top=3, lattice_width=24, lattice_heads=3),
                sliding,
                conv_kernel_size=2,
                conv_group_size=4,
            ),
            rename=lambda name: name.replace(".in_proj_", ".in_proj."),
        ),
        "lilicorr, own head": lilicorr(replace(base, own_embedding=True, own_head=True, lattice_top=5, lattice_layers=1)),
        "domino": domino(replace(recurrent, from_anchor=True, gru_first=1), shift_label=True, pure_draft_prefix_len=1),
        "domino, masks": domino(replace(recurrent, own_embedding=True), shift_label=False),
        "domino, first files": replace(domino(replace(recurrent, gru_first=2), pure_draft_prefix_len=2), rename=in_head("logit_head")),
        "domino, speculators": replace(
            speculators(
                replace(reduced, own_embedding=False, gru=12, gru_mixed=10, gru_first=1, from_anchor=True),
                "domino",
                gru_hidden_dim=12,
                logits_correction_emb_dim=10,
            ),
            rename=in_head("logits_correction"),
        ),
        "domino, speculators, masks": replace(
            speculators(replace(recurrent, gru_first=1), "domino", sample_from_anchor=False, pure_draft_prefix_len=1),
            rename=in_head("logits_correction"),
        ),
        "domino, speculators once": replace(
            speculators(replace(recurrent, from_anchor=True), "dflash", **shifted), rename=in_head("domino_head")
        ),
        "xpress": xpress(refined),
        "xpress, two passes": xpress(replace(refined, passes=2, windows=(7, None), causal=(True, False)), **sliding),
        "xpress, speculators": xpress_speculators(replace(reduced, refiner=8, refiner_mlp=16, passes=1)),
        "xpress, speculators, from anchor": xpress_speculators(
            replace(refined, refiner_mlp=16, from_anchor=True, passes=3), sample_from_anchor=True
        ),
        "xpress, DFlash 2": xpress_speculators(
            replace(convolved, refiner=8, refiner_mlp=16, passes=1, selector_top=9),
            xpress_backbone="dflash2",
            xpress_selector=True,
            selector_rank=8,
            selector_top_k=9,
        ),
        "dspark": deepseek(replace(dspark, markov="vanilla", confidence="h, markov")),
        "dspark, gated": deepseek(replace(dspark, markov="gated", confidence="h")),
        "dspark, rnn": deepseek(replace(dspark, markov="rnn", confidence="h, markov")),
        "dspark, no heads": deepseek(dspark),  # published as "dflash"
        "dspark, confidence only": deepseek(replace(dspark, confidence="h")),
        "dspark, of LFM2": liquid(replace(base, from_anchor=True, markov="vanilla", confidence="h, markov", pairs=True)),
        "dspark, of Gemma 4": gemma4(replace(dspark, markov="vanilla", confidence="h, markov", gemma="keys")),
        "dspark, of Gemma 4, values": gemma4(replace(dspark, gemma="values")),
        "dspark, NVIDIA": nvidia(replace(base, from_anchor=True, markov="gated", confidence="h, markov")),
        "dspark, SpecForge": specforge(replace(base, from_anchor=True, markov="vanilla", confidence="h, markov")),
        "dspark, SpecForge, of Qwen3-VL": specforge(
            replace(base, from_anchor=True, markov="gated", confidence="h, markov"),
            "dspark_config",
            model_type="qwen3_vl_text",
            rope_scaling={"mrope_interleaved": True, "mrope_section": [2, 1, 1], "rope_type": "default", "partial_rotary_factor": 0.5},
        ),
        "dspark, speculators": speculators(
            replace(reduced, markov="vanilla", confidence="h, markov"),
            "dspark",
            markov_rank=8,
            markov_head_type="vanilla",
            sample_from_anchor=False,
        ),
    }


PUBLISHED = _published()


@dataclass
class Drafter(ReferencedDrafter):
    """A published drafter on disk beside its pretended target, and the reference for it."""

    folder: Path
    target_folder: Path
    spec: Spec
    method: Literal["dflash", "dspark"]
    target: eagle_reference.Target
    reference: Reference
    bound: list[Executor] = field(default_factory=list)

    @classmethod
    def write(cls, published: Published, folder: Path, **target: Any) -> Drafter:
        spec = published.spec
        pretended = eagle_reference.Target(eagle_reference.Spec(vocab=spec.vocab, target_hidden=spec.target_hidden), **target)
        weights = random_weights(spec)
        named = {published.rename(name): tensor for name, tensor in weights.items()}
        folders = save_beside(pretended, folder, published.config, {**named, **published.more})
        shared = Shared(
            pretended.embedding, pretended.head, pretended.state, pretended.embed_scale, pretended.logits_scale, pretended.softcap
        )
        return cls(*folders, spec, published.method, pretended, Reference(spec, weights, shared))

    def probs(self, guess: Guess, first: int = 0) -> Tensor:
        return self.reference.probs(guess.text, len(guess.tokens), guess.tokens[:-1], first)

    def confidences(self, guess: Guess, probs: Tensor) -> Sequence[float]:
        if self.spec.confidence:
            return self.reference.confidences(guess.text, len(guess.tokens), guess.tokens).tolist()
        return super().confidences(guess, probs)

    def load(self, execution: Execution = TORCH, **settings: Any) -> LoadedProposer:
        given = resources(self.target, self.target_folder, execution, self.bound)
        return dflash.load(BlockConfig(str(self.folder), self.method, **settings), given)
