"""A drafter of every learned method for a given target, in its published layout, with random weights.

Random guesses are nearly always wrong: everything that a rejected guess could leave behind is left behind all the time.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from block_checkpoints import Published, deepseek, dflare, dflash2, z_lab
from block_reference import Spec, random_weights
from safetensors.torch import load_file, save_file
from torch import Tensor

HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 2, 32, 96


class Shapes:
    """What a drafter must fit."""

    def __init__(self, target: Path) -> None:
        config = json.loads((target / "config.json").read_text())
        self.folder = target
        self.hidden: int = config["hidden_size"]
        self.vocab: int = config["vocab_size"]
        self.layers: int = config["num_hidden_layers"]
        self.taps = (2, self.layers // 2, self.layers - 3)

    def llama(self, **more: Any) -> dict[str, Any]:
        return {
            "model_type": "llama", "hidden_size": self.hidden, "intermediate_size": INNER, "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_hidden_layers": 1, "rms_norm_eps": 1e-6, "vocab_size": self.vocab,
            "max_position_embeddings": 2048, "hidden_act": "silu", "rope_theta": 10000.0, **more,
        }

    def layer(self, prefix: str, width: int | None = None, *norms: str) -> dict[str, tuple[int, ...]]:
        read = width or self.hidden
        return {
            f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD_DIM, read),
            **{f"{prefix}self_attn.{part}_proj.weight": (KV_HEADS * HEAD_DIM, read) for part in "kv"},
            f"{prefix}self_attn.o_proj.weight": (self.hidden, HEADS * HEAD_DIM),
            **{f"{prefix}mlp.{part}_proj.weight": (INNER, self.hidden) for part in ("gate", "up")},
            f"{prefix}mlp.down_proj.weight": (self.hidden, INNER),
            **{f"{prefix}{norm}.weight": (self.hidden,) for norm in ("post_attention_layernorm", *norms)},
        }


Made = tuple[dict[str, Any], dict[str, tuple[int, ...]]]


def _eagle(s: Shapes) -> Made:
    config = s.llama(architectures=["LlamaForCausalLM"], bias=True)
    return config, {"fc.weight": (s.hidden, 2 * s.hidden), "fc.bias": (s.hidden,), **s.layer("layers.0.")}


def _gumiho(s: Shapes) -> Made:
    config, shapes = _eagle(s)
    for head in range(2):
        shapes |= {f"mlp.{head}.{place}.linear.weight": (s.hidden, (2 - place) * s.hidden) for place in range(2)}
    return config, shapes


def _eagle3(s: Shapes) -> Made:
    draft_vocab = s.vocab // 2
    config = s.llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=draft_vocab)
    return config, {
        "fc.weight": (s.hidden, 3 * s.hidden),
        "norm.weight": (s.hidden,),
        "lm_head.weight": (draft_vocab, s.hidden),
        "d2t": (draft_vocab,),
        **s.layer("midlayer.", 2 * s.hidden, "hidden_norm", "input_layernorm"),
    }


def _peagle(s: Shapes) -> Made:
    config, shapes = _eagle3(s)
    config |= {"architectures": ["PEagleLlamaForCausalLM"], "mask_token_id": s.vocab - 1}
    return config, {**shapes, "mask_hidden": (1, 1, 3 * s.hidden), "embed_tokens.weight": (s.vocab, s.hidden)}


def _medusa(s: Shapes) -> Made:
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(3):
        shapes[f"{head}.0.linear.weight"] = (s.hidden, s.hidden)
        shapes[f"{head}.0.linear.bias"] = (s.hidden,)
        shapes[f"{head}.1.weight"] = (s.vocab, s.hidden)
    return config, shapes


def _hydra(s: Shapes) -> Made:
    shapes = s.layer("prefix_embeding_layer.layers.0.", None, "input_layernorm")
    shapes["prefix_embeding_layer.norm.weight"] = (s.hidden,)
    for head in range(3):
        shapes |= {f"hydra_mlp.{head}.1.{part}.weight": (s.hidden, (2 + head) * s.hidden) for part in ("linear", "res_connection")}
        shapes |= {f"hydra_mlp.{head}.3.linear.weight": (s.hidden, s.hidden), f"hydra_lm_head.{head}.1.weight": (s.vocab, s.hidden)}
    return s.llama(hydra_num_layers=2, hydra_head_arch="prefix-mlp"), shapes


def _redrafter(s: Shapes) -> Made:
    inner = 48
    shapes = {"rnn_w.weight": (s.hidden, s.hidden), "rnn_u.weight": (s.hidden, s.hidden), "rnn_u.bias": (s.hidden,)}
    shapes |= {"input_proj.weight": (inner, 2 * s.hidden), "input_proj.bias": (inner,), "lm_head.1.weight": (s.vocab, inner)}
    shapes |= {"lm_head.0.linear.weight": (inner, inner), "lm_head.0.linear.bias": (inner,)}
    return {"model_type": "recurrent_drafting_drafter", "rnn": True, "num_draft_layers": 1, "exit_dim": inner}, shapes


def _mlp_speculator(s: Shapes) -> Made:
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "vocab_size": s.vocab, "emb_dim": s.hidden,
        "inner_dim": 64, "n_predict": 3, "top_k_tokens_per_head": [4, 3, 2], "n_candidates": 3, "tie_weights": False, "scale_input": True,
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(3):
        shapes |= {f"speculator.emb.{i}.weight": (s.vocab, 64), f"speculator.head.{i}.weight": (s.vocab, 64)}
        shapes |= {f"speculator.proj.{i}.weight": (64, s.hidden if i == 0 else 64)}
        shapes |= {f"speculator.ln.{i}.weight": (64,), f"speculator.ln.{i}.bias": (64,)}
    return config, shapes


def _lstm_speculator(s: Shapes) -> Made:
    config = {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "method": "sum_lstm", "n_predict": 3,
        "input_hidden_dim": s.hidden, "inner_dim": "64", "proj_dim": "64", "emb_dim": "64", "vocab_size": s.vocab, "tie_weights": True,
        "scale_input": True,
    }
    shapes: dict[str, tuple[int, ...]] = {"head.0.weight": (s.vocab, 64)}
    for gate in ("input", "forget", "cell", "output"):
        shapes |= {f"{gate}_emb.0.weight": (s.vocab, 64), f"{gate}_proj.0.weight": (64, s.hidden), f"{gate}_proj.1.weight": (64, 64)}
    for norm in ("cell_ln", "state_ln"):
        shapes |= {f"{norm}.0.weight": (64,), f"{norm}.0.bias": (64,)}
    return config, shapes


def _mtp(s: Shapes) -> Made:
    config = {
        "speculators_model_type": "mtp",
        "architectures": ["MTPDraftModel"],
        "transformer_layer_config": s.llama(),
        "num_nextn_predict_layers": 1,
    }
    prefix = "mtp_layers.0."
    norms = ("hidden_layernorm", "token_layernorm", "final_layernorm")
    return config, {
        **{f"{prefix}{norm}.weight": (s.hidden,) for norm in norms},
        f"{prefix}input_proj.weight": (s.hidden, 2 * s.hidden),
        **s.layer(prefix, None, "input_layernorm"),
    }


def _of_blocks(publish: Callable[[Spec], Published], **more: Any) -> Callable[[Shapes], Made]:
    def made(s: Shapes) -> Made:
        sizes: dict[str, Any] = {
            **dict.fromkeys(("hidden", "target_hidden"), s.hidden),
            **{"vocab": s.vocab, "draft_vocab": s.vocab, "mask_token": s.vocab - 1, "taps": (2, s.layers - 1), "block_size": 5},
        }
        published = publish(Spec(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, intermediate=INNER, **sizes | more))
        return {**published.config}, {name: tuple(tensor.shape) for name, tensor in random_weights(published.spec).items()}

    return made


_DSPARK: dict[str, Any] = {"block_size": 4, "from_anchor": True, "own_embedding": True, "own_head": True, "markov": "vanilla"}


def _whole_model(s: Shapes, **more: Any) -> Made:
    config = s.llama(architectures=["LlamaForCausalLM"], tie_word_embeddings=False, **more)
    return config, {
        "model.embed_tokens.weight": (s.vocab, s.hidden),
        "lm_head.weight": (s.vocab, s.hidden),
        "model.norm.weight": (s.hidden,),
        **s.layer("model.layers.0.", None, "input_layernorm"),
    }


def _pard(s: Shapes) -> Made:
    return _whole_model(s, pard_token=s.vocab - 1)


def _pard2(s: Shapes) -> Made:
    config, shapes = _whole_model(s, pard_token=s.vocab - 1, pard2_target_layers=[-1, -3], pard2_proj_bias=True)
    return config, {**shapes, "target_proj.weight": (s.hidden, 2 * s.hidden), "target_proj.bias": (s.hidden,)}


def _uno(s: Shapes) -> Made:
    """An adapter of the target, in the subfolder that the published one lies in."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, weight in load_file(s.folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            shapes |= {f"{prefix}.lora_A.weight": (4, weight.shape[1]), f"{prefix}.lora_B.weight": (weight.shape[0], 4)}
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 4}, shapes


MAKERS: Mapping[str, Callable[[Shapes], Made]] = {
    "draft_model": _whole_model,
    "pard": _pard,
    "pard2": _pard2,
    "eagle": _eagle,
    "gumiho": _gumiho,
    "eagle3": _eagle3,
    "peagle": _peagle,
    "medusa": _medusa,
    "hydra": _hydra,
    "redrafter": _redrafter,
    "mlp_speculator": _mlp_speculator,
    "mtp": _mtp,
    "dflash": _of_blocks(z_lab),
    "dflare": _of_blocks(dflare),
    "dflash2": _of_blocks(dflash2, conv_taps=2, conv_groups=4, rank=16, selector_top=8),
    "dspark": _of_blocks(deepseek, confidence="h, markov", **_DSPARK),
    "uno": _uno,
}
VARIANTS = {"lstm_speculator": _lstm_speculator}  # further kinds of the above
WHOLE_MODELS = ("draft_model", "pard", "pard2")


def write(method: str, target: Path, folder: Path, seed: int = 0) -> Path:
    """A folder with such a drafter for the target."""
    shapes = Shapes(target)
    config, tensors = {**MAKERS, **VARIANTS}[method](shapes)
    generator = torch.Generator().manual_seed(seed)

    def filled(name: str, shape: tuple[int, ...]) -> Tensor:
        if name == "d2t":  # every second token
            return torch.arange(shape[0])
        if len(shape) == 1:
            return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    place, names = (folder / "adapter", "adapter_{}") if method == "uno" else (folder, "{}")
    place.mkdir(parents=True, exist_ok=True)
    (place / names.format("config.json")).write_text(json.dumps(config))
    save_file({name: filled(name, shape) for name, shape in tensors.items()}, str(place / names.format("model.safetensors")))
    if method in WHOLE_MODELS:
        for file in target.glob("*token*"):
            shutil.copy(file, folder / file.name)
    return folder
