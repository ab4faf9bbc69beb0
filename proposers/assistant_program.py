"""The network of Gemma 4's assistants as a program: layers that have queries alone and look at what the target keeps (Google 2026).

Knows no tensors.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from ..kernels.decoder_builder import DecoderBuilder, hidden, layer
from ..kernels.gemma4 import behind_attention, size_of_layer
from ..kernels.layout import FINAL
from ..kernels.program import Program
from .config_entry import SpeculativeConfigError
from .guessing import FEATURE
from .loading import TargetView

HEAD = "lm_head.weight"
"""Of its own, whose rows are its embedding, which nobody looks up: it reads the target's."""


def draft_program(hf_config: PretrainedConfig, target: TargetView, sources: Sequence[int]) -> Program:
    """o = norm(layers(pre_projection([E; f]))), scores = its own head of o, and post_projection(o) is what the next guess reads as f.

    E is the target's embedding, f [backbone_hidden_size] at first the target's last state. hf_config: of the layers, text only.
    sources: of each the layer of the target's cache that it looks at.
    Raises SpeculativeConfigError if a layer does not fit what it is to look at, UnsupportedModel.
    """
    d = DecoderBuilder(hf_config, target.max_model_len, torch.float32)
    d.refuse("enable_moe_block", "hidden_size_per_layer_input", "use_double_wide_mlp", "attention_bias")
    d.activation_setting = "hidden_activation"
    kinds = d.layer_types()
    state = d.input(FEATURE, target.hidden_size)
    token = d.embed(target.embed_scale, target.embedding, target.vocab_size, "embedded", target.hidden_size)
    x = d.linear("pre_projection", d.concat((token, state), "pair"), d.hidden_size)
    boundaries = [x]
    for i, (kind, source) in enumerate(zip(kinds, sources, strict=True)):
        there = target.kv_layers[source]
        d.head_dim, _ = size_of_layer(d, i, kind == "full_attention")
        if (window := d.windows()[i]) != there.window:
            raise SpeculativeConfigError(
                f"layer {i} of the assistant sees {window} positions, the target's layer {there.window}: take the assistant of this target"
            )
        if d.head_dim != there.k_dim or d.num_heads % there.num_kv_heads:
            raise SpeculativeConfigError(
                f"layer {i} of the assistant, {d.num_heads} heads of {d.head_dim}, does not fit the target's {there.num_kv_heads} of "
                f"{there.k_dim}: take the assistant of this target"
            )
        q = d.linear(f"{layer(i)}.self_attn.q_proj", d.norm(f"{layer(i)}.input_layernorm", x), d.num_heads * d.head_dim)
        attended = d.attend_elsewhere(i, q, source, d.rope(kind), 1.0)
        x = behind_attention(d, i, x, attended, d.intermediate_size)
        x = d.scale_by(x, f"{layer(i)}.layer_scalar", hidden(i + 1))
        boundaries.append(x)
    final = d.norm("model.norm", x)
    fed_back = d.linear("post_projection", final, target.hidden_size)
    return replace(
        d.program(fed_back, d.logits(final, HEAD, d.vocab_size)),
        kv_layers=target.kv_layers,
        boundaries=tuple(boundaries),
        recurrent=(FEATURE, FINAL),
        shared=frozenset((target.embedding,)),
    )
