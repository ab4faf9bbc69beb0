"""The networks of block drafters as programs: what writes the context's cache entries, and the layers that fill in a block.

Both write the same cache layers. Layers that follow one another and let a block's tokens see each other in the same way form a
stage, with programs of its own: a batch has one mask for all layers of a program. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from ..kernels.decoder_builder import DecoderBuilder, hidden, layer
from ..kernels.fuse import fuse
from ..kernels.ops import Add, Attention, Embed, Linear, Op, RMSNorm, Scale
from ..kernels.program import Program, row_program
from .block_checkpoint import BlockDraft, Fusion
from .guessing import FEATURE

TOKEN_MAP = "token_map"
CONTEXT = "hidden_norm"
"""The buffer of c = hidden_norm(fc(states)), which every layer's entries are made of."""

Has = Callable[[str], bool]
"""Whether the checkpoint holds a weight."""


def stages(draft: BlockDraft) -> list[range]:
    """Runs of layers that are causal alike: [False, False, True] -> [range(0, 2), range(2, 3)]."""
    runs = [list(run) for _, run in groupby(range(len(draft.causal)), key=lambda i: draft.causal[i])]
    return [range(run[0], run[-1] + 1) for run in runs]


def block_program(draft: BlockDraft, layers: range, has: Has, max_model_len: int) -> Program:
    """A stage of the pass over a block (DFlash: Chen et al. 2026): the last known token and masks through ordinary layers.

    The first stage embeds, later ones have the input hidden.<first layer>; the last one has the norm and the head, the others
    hand on their FINAL state.
    """
    d = DecoderBuilder(draft.hf_config, max_model_len, torch.float32)
    rope = d.rope(partial=True)
    embedding, head, is_last = draft.embedding, draft.head, layers.stop == d.num_layers
    x = d.embed(embedding.scale, embedding.weight, embedding.rows) if layers.start == 0 else d.input(hidden(layers.start), d.hidden_size)
    for i in layers:
        name = f"{layer(i)}.self_attn"
        before, after = _around(d, draft, f"{layer(i)}.attention_conv")
        qkv = d.qkv(i, before(d.norm(f"{layer(i)}.input_layernorm", x)), has(f"{name}.q_proj.bias"))
        attended = d.attend(i, qkv, rope, draft.windows[i], head_norms=has(f"{name}.q_norm.weight"), bias=has(f"{name}.o_proj.bias"))
        x = d.add(x, after(attended), f"{layer(i)}.middle")
        before, after = _around(d, draft, f"{layer(i)}.mlp_conv")
        fed = d.mlp(i, before(d.norm(f"{layer(i)}.post_attention_layernorm", x)), has(f"{layer(i)}.mlp.gate_proj.bias"))
        x = d.add(x, after(fed), hidden(i + 1))
    if is_last:
        final = d.norm("norm", x)
        program = d.program(final, d.logits(final, head.weight, head.rows, head.scale, head.softcap))
        program = replace(program, token_map=TOKEN_MAP if draft.token_ids is not None else "")
    else:
        whole = d.program(x, x)
        program = replace(whole, ops=whole.ops[:-1], vocab_size=0, logits="", best=None)
    shared = frozenset(table.weight for table in (embedding, head) if table.is_shared and table.weight in program.weights)
    return fuse(replace(program, boundaries=(), shared=shared))


def _around(d: DecoderBuilder, draft: BlockDraft, name: str) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """What a sublayer's input and its output go through: the two convolutions of DFlash 2, whose kernels are made of that input."""
    if draft.conv_taps == 0:
        return lambda x: x, lambda x: x
    kernels = f"{name}.kernel_projection"

    def before(x: str) -> str:
        d.linear(kernels, x, 2 * draft.conv_taps * draft.conv_groups)
        return d.local_conv(name, x, kernels, draft.conv_taps, 0)

    return before, lambda x: d.local_conv(name, x, kernels, draft.conv_taps, 1)


def context_program(draft: BlockDraft, layers: range, block: Program, has: Has, state_width: int, is_read: bool = False) -> Program:
    """What writes the context's entries of a stage: k and v of each layer straight from c, which goes through no layer.

    The first stage makes c of the FEATURE input, the states of all tapped layers side by side, and hands it on as FINAL; later
    stages have it as the input CONTEXT. block: the stage's other program, whose cache layers these are. is_read: c is wanted even
    where there is but one stage. Of a DFlare every stage has all states, an input for each, and makes a c for each layer.
    """
    eps, width = float(draft.hf_config.rms_norm_eps), int(draft.hf_config.hidden_size)
    weights: dict[str, tuple[int, ...]] = {}
    ops: list[Op] = []
    inputs, keys, values = {CONTEXT: width}, "k_proj", "v_proj"
    read = dict.fromkeys(layers, CONTEXT)
    if (fusion := draft.fusion) is not None:
        inputs, keys, values = {f"{FEATURE}.{i}": width for i in range(len(draft.taps))}, fusion.keys, fusion.values
        read = _mixed(fusion, layers, list(inputs), eps, ops, weights, width)
    elif layers.start == 0:
        inputs = {FEATURE: len(draft.taps) * state_width}
        weights = {"fc.weight": (width, len(draft.taps) * state_width), "hidden_norm.weight": (width,)}
        ops = [
            Linear((FEATURE,), ("fc",), ("fc.weight",)),
            RMSNorm(("fc",), (CONTEXT,), "hidden_norm.weight", eps),
        ]
    attentions = {op.layer: op for op in block.ops if isinstance(op, Attention)}
    for i in layers:
        name, spec = f"{layer(i)}.self_attn", block.kv_layers[i - layers.start]
        attention = attentions[i - layers.start]
        parts: list[str] = []
        for part, rows in ((keys, spec.num_kv_heads * spec.k_dim), (values, spec.num_kv_heads * spec.v_dim)):
            weights[f"{name}.{part}.weight"] = (rows, width)
            bias = (f"{name}.{part}.bias",) if has(f"{name}.{part}.bias") else ()
            weights |= {b: (rows,) for b in bias}
            ops.append(Linear((read[i],), (f"{name}.{part}",), (f"{name}.{part}.weight",), bias))
            parts.append(f"{name}.{part}")
        if attention.k_norm:
            weights[attention.k_norm] = (spec.k_dim,)
        ops.append(replace(attention, inputs=tuple(parts), outputs=(), num_heads=0, q_norm=""))
    program = Program(
        ops=tuple(ops),
        weights=weights,
        kv_layers=block.kv_layers,
        ropes=block.ropes,
        vocab_size=0,
        max_model_len=block.max_model_len,
        boundaries=(),
        final=CONTEXT if fusion is None and layers.start == 0 and (is_read or layers.stop < len(draft.causal)) else "",
        logits="",
        best=None,
        inputs=inputs,
    )
    return fuse(program)


def _mixed(
    fusion: Fusion, layers: range, states: Sequence[str], eps: float, ops: list[Op], weights: dict[str, tuple[int, ...]], width: int
) -> dict[int, str]:
    """Adds the ops and weights that make what each layer reads of the states; the buffers that it stands in."""
    if not fusion.norms:
        weights["hidden_norm.weight"] = (width,)
        ops += [RMSNorm((state,), (f"{state}.normed",), "hidden_norm.weight", eps) for state in states]
        states = [f"{state}.normed" for state in states]
    read: dict[int, str] = {}
    for i in layers:
        total = ""
        for t, (state, share) in enumerate(zip(states, fusion.shares[i], strict=True)):
            part = f"{i}.share.{t}"
            ops.append(Scale((state,), (part,), share))
            if total:
                ops.append(Add((total, part), (f"{i}.mixed.{t}",)))
            total = f"{i}.mixed.{t}" if total else part
        if fusion.norms:
            weights[fusion.norms[i]] = (width,)
            ops.append(RMSNorm((total,), (f"{i}.normed",), fusion.norms[i], eps))
            total = f"{i}.normed"
        read[i] = total
    return read


def product_program(weight: str, rows: int, columns: int) -> Program:
    """FEATURE [T, columns] -> FINAL [T, rows] by a weight [rows, columns]."""
    product = Linear((FEATURE,), ("product",), (weight,))
    return row_program((product,), {weight: (rows, columns)}, {FEATURE: columns}, final="product")


def table_program(weight: str, rows: int, columns: int) -> Program:
    """Token ids [T] -> FINAL [T, columns], the rows of a table [rows, columns] that is the target's."""
    return row_program((Embed((), ("rows",), weight),), {weight: (rows, columns)}, final="rows", shared=frozenset({weight}))


def embedding_program(draft: BlockDraft, weight: str, rows: int) -> Program:
    """Token ids [T] -> FINAL [T, rows]: their embeddings, as the block has them, by a weight [rows, H]."""
    table, width = draft.embedding, int(draft.hf_config.hidden_size)
    ops = Embed((), ("embedded",), table.weight, table.scale), Linear(("embedded",), ("product",), (weight,))
    weights = {table.weight: (table.rows, width), weight: (rows, width)}
    return row_program(ops, weights, final="product", shared=frozenset({table.weight}) if table.is_shared else frozenset())
