"""The network of a dense MTP module as a program: MiMo's, and those that `speculators` writes in its form.

Knows no tensors. Modules of other families run through transformers (kernels/transformers_layer.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from ..kernels.decoder_builder import DecoderBuilder, hidden, layer
from ..kernels.layout import FINAL
from ..kernels.program import Program
from .guessing import FEATURE
from .loading import TargetView


def draft_program(hf_config: PretrainedConfig, target: TargetView, has: Callable[[str], bool], state_first: bool) -> Program:
    """o = layer(input_proj([hidden_layernorm(f); token_layernorm(E)])), scores = the target's head of final_layernorm(o).

    (MiMo: Xiaomi 2025.) state_first: else the projection reads the embedding's half first, as in all other families.
    hf_config: of the one layer. has: whether the module holds a tensor, by `published` names.
    """
    d = DecoderBuilder(hf_config, target.max_model_len, torch.float32)
    rope = d.rope(partial=True)
    window = d.window() if "sliding_attention" in (d.config.get("layer_types") or ()) else None
    state = d.norm("hidden_layernorm", d.input(FEATURE, d.hidden_size))
    token = d.norm("token_layernorm", d.embed(target.embed_scale, target.embedding, target.vocab_size, "embedded"))
    pair = (state, token) if state_first else (token, state)
    read = d.linear("input_proj", d.concat(pair, "pair"), d.hidden_size)
    qkv = d.qkv(0, d.norm(f"{layer(0)}.input_layernorm", read), has("self_attn.q_proj.bias"))
    head_norms, bias = has("self_attn.q_norm.weight"), has("self_attn.o_proj.bias")
    x = d.add(read, d.attend(0, qkv, rope, window, head_norms=head_norms, bias=bias), f"{layer(0)}.middle")
    x = d.add(x, d.mlp(0, d.norm(f"{layer(0)}.post_attention_layernorm", x), has("mlp.gate_proj.bias")), hidden(1))
    final = d.norm("final_layernorm", x)
    return replace(
        d.program(final, d.logits(final, target.head, target.vocab_size, target.logits_scale, target.logits_softcap)),
        boundaries=(read, x),
        recurrent=(FEATURE, FINAL),
        shared=frozenset((target.embedding, target.head)),
    )


def published(name: str) -> str:
    """What the module calls the weight that the program calls `name`."""
    return name.removeprefix(f"{layer(0)}.")
