"""Decoder families as programs: what a Hugging Face config means in ops, for targets and draft models alike.

Weights carry their checkpoint names. Knows no tensors and no executor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from .layout import KVLayerSpec
from .program import Activation, Add, ArgMax, Attention, Embed, GatherRows, Linear, Op, Program, RMSNorm
from .rope import UnsupportedModel, rope_table

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "relu": "relu"}


def supports(hf_config: PreTrainedConfig) -> bool:
    """Whether decoder_program understands this config. Whatever is odd about it, the answer is False, not an exception."""
    try:
        decoder_program(hf_config).buffers  # noqa: B018  computing them checks that the sizes fit together
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):  # UnsupportedModel is a ValueError
        return False
    return True


def decoder_program(hf_config: PreTrainedConfig, max_model_len: int | None = None) -> Program:
    """The program of a Llama, Mistral, Qwen2 or Qwen3 checkpoint (SmolLM2 is Llama), one op for each step of the paper.

    max_model_len: positions it is to run with, default max_position_embeddings. Raises UnsupportedModel.
    """
    family = _Family.of(hf_config)
    length = max_model_len or int(hf_config.to_dict()["max_position_embeddings"])
    lowering = _Lowering(family)
    for layer in range(family.num_layers):
        lowering.layer(layer)
    final, logits, best = lowering.head()
    return Program(
        ops=tuple(lowering.ops),
        weights=lowering.weights,
        kv_layers=tuple(KVLayerSpec(family.num_kv_heads, family.head_dim, family.head_dim, window) for window in family.windows),
        ropes={"rope": rope_table(hf_config, family.head_dim, length)},
        vocab_size=family.vocab_size,
        max_model_len=length,
        boundaries=tuple(_hidden(layer) for layer in range(family.num_layers + 1)),
        final=final,
        logits=logits,
        best=best,
    )


@dataclass(frozen=True)
class _Family:
    """What distinguishes these families, read from a config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    activation: str
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    windows: tuple[int | None, ...]  # per layer

    @classmethod
    def of(cls, hf_config: PreTrainedConfig) -> _Family:
        config: dict[str, Any] = hf_config.to_dict()
        model_type: str = config["model_type"]
        if model_type not in _ARCHITECTURES:
            raise UnsupportedModel(f"model type {model_type!r}")
        if (config.get("architectures") or [_ARCHITECTURES[model_type]]) != [_ARCHITECTURES[model_type]]:
            raise UnsupportedModel(f"architectures {config['architectures']}")
        if config.get("quantization_config"):
            raise UnsupportedModel("quantised checkpoint")
        if config["hidden_act"] not in _ACTIVATIONS:
            raise UnsupportedModel(f"activation {config['hidden_act']!r}")
        num_heads = int(config["num_attention_heads"])
        attention_bias = bool(config.get("attention_bias")) and model_type in ("llama", "qwen3")
        return cls(
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // num_heads),
            eps=float(config["rms_norm_eps"]),
            activation=_ACTIVATIONS[config["hidden_act"]],
            qkv_bias=attention_bias or model_type == "qwen2",
            o_bias=attention_bias,
            mlp_bias=bool(config.get("mlp_bias")) and model_type == "llama",
            qk_norm=model_type == "qwen3",
            tied=bool(config.get("tie_word_embeddings")),
            windows=_windows(config),
        )


def _windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    """Positions each layer sees. Mistral's window holds for all layers, Qwen's for those that layer_types calls sliding."""
    layers, window, types = int(config["num_hidden_layers"]), config.get("sliding_window"), config.get("layer_types")
    if config["model_type"] in ("llama", "mistral"):
        if types is not None or (window is not None and config["model_type"] == "llama"):
            raise UnsupportedModel("attention that differs by layer")
        return (window,) * layers
    if types is None or len(types) != layers or not {*types} <= {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(f"layer types {types}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _hidden(layer: int) -> str:
    return f"hidden.{layer}"


class _Lowering:
    """Ops in order, and the shapes of the weights they name."""

    def __init__(self, family: _Family) -> None:
        self.family = family
        self.weights: dict[str, tuple[int, ...]] = {}
        embedding = self._weight("model.embed_tokens.weight", family.vocab_size, family.hidden_size)
        self.ops: list[Op] = [Embed((), (_hidden(0),), embedding)]

    def layer(self, i: int) -> None:
        """hidden.i -> hidden.(i + 1)."""
        f, name = self.family, f"model.layers.{i}"
        q_width, kv_width = f.num_heads * f.head_dim, f.num_kv_heads * f.head_dim

        normed = self._norm(f"{name}.input_layernorm", _hidden(i))
        q, k, v = (
            self._linear(f"{name}.self_attn.{part}_proj", normed, f.hidden_size, width, f.qkv_bias)
            for part, width in (("q", q_width), ("k", kv_width), ("v", kv_width))
        )
        attention = Attention(
            inputs=(q, k, v),
            outputs=(f"{name}.self_attn",),
            layer=i,
            num_heads=f.num_heads,
            scale=f.head_dim**-0.5,
            rope="rope",
            q_norm=self._weight(f"{name}.self_attn.q_norm.weight", f.head_dim) if f.qk_norm else "",
            k_norm=self._weight(f"{name}.self_attn.k_norm.weight", f.head_dim) if f.qk_norm else "",
            norm_eps=f.eps,
        )
        self.ops.append(attention)
        attended = self._linear(f"{name}.self_attn.o_proj", attention.outputs[0], q_width, f.hidden_size, f.o_bias)
        middle = self._add(_hidden(i), attended, f"{name}.middle")

        normed = self._norm(f"{name}.post_attention_layernorm", middle)
        gate, up = (
            self._linear(f"{name}.mlp.{part}_proj", normed, f.hidden_size, f.intermediate_size, f.mlp_bias) for part in ("gate", "up")
        )
        self.ops.append(Activation((gate, up), (f"{name}.mlp.act",), f.activation, gated=True))
        down = self._linear(f"{name}.mlp.down_proj", f"{name}.mlp.act", f.intermediate_size, f.hidden_size, f.mlp_bias)
        self._add(middle, down, _hidden(i + 1))

    def head(self) -> tuple[str, str, ArgMax]:
        """Buffers of the final norm's output and of the logits, and the op that finds the best of them."""
        f = self.family
        final = self._norm("model.norm", _hidden(f.num_layers))
        lm_head = "model.embed_tokens.weight" if f.tied else self._weight("lm_head.weight", f.vocab_size, f.hidden_size)
        best = ArgMax(("logits",), ("argmax", "top"))
        self.ops += [GatherRows((final,), ("final.rows",)), Linear(("final.rows",), ("logits",), (lm_head,)), best]
        return final, "logits", best

    def _weight(self, name: str, *shape: int) -> str:
        self.weights[name] = shape
        return name

    def _norm(self, name: str, x: str) -> str:
        self.ops.append(RMSNorm((x,), (name,), self._weight(f"{name}.weight", self.family.hidden_size), self.family.eps))
        return name

    def _linear(self, name: str, x: str, width_in: int, width_out: int, bias: bool) -> str:
        biases = (self._weight(f"{name}.bias", width_out),) if bias else ()
        self.ops.append(Linear((x,), (name,), (self._weight(f"{name}.weight", width_out, width_in),), biases))
        return name

    def _add(self, x: str, y: str, output: str) -> str:
        self.ops.append(Add((x, y), (output,)))
        return output
