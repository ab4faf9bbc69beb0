"""The networks of EAGLE drafters as programs: the layers that guess, and what turns the target's states into their input.

Which parts there are is for the checkpoint to say (eagle_checkpoint.py). Knows no tensors.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from ..kernels.decoder_builder import DecoderBuilder, hidden, layer
from ..kernels.latent_attention import latent_attention
from ..kernels.layer_order import Block
from ..kernels.layout import FINAL
from ..kernels.ops import Concat, Linear, Op, RMSNorm
from ..kernels.program import Program, row_program
from .eagle_checkpoint import EagleDraft
from .guessing import FEATURE

TOKEN_MAP = "token_map"
STATES = "states"
"""The encoder's input; with a norm for each tapped layer there is one input for each: states.0, states.1, ..."""


def draft_program(draft: EagleDraft, has: Callable[[str], bool], max_model_len: int) -> Program:
    """One slot reads the embedding E of a token and the feature f that predicted it, and makes the feature that follows.

    EAGLE (Li et al. 2024): x = fc([E; f]), which the first layer attends to without a norm; scores are the target's head of what
    the last layer writes. EAGLE-3 (Li et al. 2025): the first layer attends to [norm(E); norm(f)], E is never in the residual;
    a norm stands before the head. Further layers are those of a Llama, or have latent attention like the first. has: whether the
    checkpoint holds a weight.
    """
    d = DecoderBuilder(draft.hf_config, max_model_len, torch.float32)
    attention = latent_attention(d, d.flag("rope_interleave")) if draft.has_latent_attention else _attention(d, has)
    feature = d.input(FEATURE, d.hidden_size)
    embedding, head = draft.embedding, draft.head
    embedded = d.embed(embedding.scale, embedding.weight, embedding.rows, "embedded")
    if draft.kind == "EAGLE":
        x = read = d.linear("fc", d.concat((embedded, feature), "pair"), d.hidden_size, has("fc.bias"))
    else:
        normed = d.norm(f"{layer(0)}.hidden_norm", feature)
        x = normed if draft.norm_before_residual else feature
        read = d.concat((d.norm(f"{layer(0)}.input_layernorm", embedded), normed), "pair")
    boundaries = [x]
    for i in range(d.num_layers):
        if i:
            read = d.norm(f"{layer(i)}.input_layernorm", x)
        x = d.add(x, attention(i, read), f"{layer(i)}.middle")
        fed = d.mlp(i, d.norm(f"{layer(i)}.post_attention_layernorm", x), has(f"{layer(i)}.mlp.gate_proj.bias"))
        x = d.add(x, fed, hidden(i + 1))
        boundaries.append(x)
    final = d.norm("norm", x) if draft.has_final_norm else x
    return replace(
        d.program(final, d.logits(final, head.weight, head.rows, head.scale, head.softcap)),
        boundaries=tuple(boundaries),
        recurrent=(FEATURE, FINAL if draft.norm_output else d.num_layers),
        token_map=TOKEN_MAP if draft.token_ids is not None else "",
        shared=frozenset(table.weight for table in (embedding, head) if table.is_shared),
    )


def _attention(d: DecoderBuilder, has: Callable[[str], bool]) -> Block:
    """As a Llama's, with the norms and biases that are there."""
    rope = d.rope(partial=True)
    windows = d.windows() if d.config.get("layer_types") else [d.window()] * d.num_layers

    def attention(i: int, x: str) -> str:
        name = f"{layer(i)}.self_attn"
        qkv = d.qkv(i, x, has(f"{name}.q_proj.bias"))
        return d.attend(i, qkv, rope, windows[i], head_norms=has(f"{name}.q_norm.weight"), bias=has(f"{name}.o_proj.bias"))

    return attention


def encoder_program(draft: EagleDraft, has: Callable[[str], bool], state_width: int) -> Program:
    """EAGLE-3's f = fc([s_1; ...; s_n]) of the states of the tapped layers, each state_width wide, lowest layer first.

    In between there may be a norm for each state (`fc_norm`) or one for all together (`norm_before_fc`). FINAL is f.
    """
    eps, width, count = float(draft.hf_config.rms_norm_eps), int(draft.hf_config.hidden_size), len(draft.taps)
    ops: list[Op] = []
    inputs, x = {STATES: count * state_width}, STATES
    weights: dict[str, tuple[int, ...]] = {"fc.weight": (width, count * state_width)}
    if has("fc_norm.0.weight"):
        inputs = {f"{STATES}.{i}": state_width for i in range(count)}
        for i, name in enumerate(inputs):
            weights[f"fc_norm.{i}.weight"] = (state_width,)
            ops.append(RMSNorm((name,), (f"fc_norm.{i}",), f"fc_norm.{i}.weight", eps))
        ops.append(Concat(tuple(f"fc_norm.{i}" for i in range(count)), (x,)))
    elif has("input_norm.weight"):
        weights["input_norm.weight"] = (count * state_width,)
        ops.append(RMSNorm((x,), ("input_norm",), "input_norm.weight", eps))
        x = "input_norm"
    if has("fc.bias"):
        weights["fc.bias"] = (width,)
    ops.append(Linear((x,), ("fc",), ("fc.weight",), ("fc.bias",) if has("fc.bias") else ()))
    return row_program(ops, weights, inputs, final="fc")
