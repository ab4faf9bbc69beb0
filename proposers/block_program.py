"""The networks of block drafters as programs: what writes the context's cache entries, and the layers that fill in a block.

Both write the same cache layers. Layers that follow one another and let a block's tokens see each other in the same way form a
stage, with programs of its own: a batch has one mask for all layers of a program. Knows no tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from ..kernels.decoder_builder import DecoderBuilder, hidden, layer
from ..kernels.fuse import fuse
from ..kernels.gemma4 import behind_attention, keys_and_values, size_of_layer
from ..kernels.ops import Attention, Embed, Linear
from ..kernels.program import Program, row_program
from ..kernels.turned_pairs import keys_of_pairs, norms_of_pairs, qkv_of_pairs
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
    d, rope = _builder(draft, max_model_len)
    embedding, head, is_last = draft.embedding, draft.head, layers.stop == d.num_layers
    x = d.embed(embedding.scale, embedding.weight, embedding.rows) if layers.start == 0 else d.input(hidden(layers.start), d.hidden_size)
    for i in layers:
        x = _gemma4_layer(d, draft, i, x, rope) if draft.is_gemma4 else _layer(d, draft, i, x, rope, has)
    if is_last:
        final = d.norm("norm", x)
        program = d.program(final, d.logits(final, head.weight, head.rows, head.scale, head.softcap))
        program = replace(program, token_map=TOKEN_MAP if draft.token_ids is not None else "")
    else:
        program = _without_scores(d, x)
    shared = frozenset(table.weight for table in (embedding, head) if table.is_shared and table.weight in program.weights)
    return fuse(replace(program, boundaries=(), shared=shared))


def _builder(draft: BlockDraft, max_model_len: int) -> tuple[DecoderBuilder, str]:
    """And the name of the rotary table."""
    d = DecoderBuilder(draft.hf_config, max_model_len, torch.float32)
    if not draft.is_gemma4:
        return d, d.rope(partial=True)
    d.refuse("attention_bias", "enable_moe_block")
    d.activation_setting = "hidden_activation"
    d.head_dim, d.num_kv_heads = size_of_layer(d, 0, True)
    return d, d.rope("full_attention")


def _without_scores(d: DecoderBuilder, final: str) -> Program:
    whole = d.program(final, final)
    return replace(whole, ops=whole.ops[:-1], vocab_size=0, logits="", best=None)


def _layer(d: DecoderBuilder, draft: BlockDraft, i: int, x: str, rope: str, has: Has) -> str:
    name = f"{layer(i)}.self_attn"
    before, after = _around(d, draft, f"{layer(i)}.attention_conv")
    read, has_norms, bias = before(d.norm(f"{layer(i)}.input_layernorm", x)), has(f"{name}.q_norm.weight"), has(f"{name}.q_proj.bias")
    qkv = qkv_of_pairs(d, i, read, rope, bias) if draft.turns_pairs else d.qkv(i, read, bias)
    attended = d.attend(i, qkv, rope, draft.windows[i], head_norms=has_norms, bias=has(f"{name}.o_proj.bias"))
    if draft.turns_pairs and has_norms:
        norms_of_pairs(d, i, rope)
    x = d.add(x, after(attended), f"{layer(i)}.middle")
    before, after = _around(d, draft, f"{layer(i)}.mlp_conv")
    fed = d.mlp(i, before(d.norm(f"{layer(i)}.post_attention_layernorm", x)), has(f"{layer(i)}.mlp.gate_proj.bias"))
    return d.add(x, after(fed), hidden(i + 1))


def _gemma4_layer(d: DecoderBuilder, draft: BlockDraft, i: int, x: str, rope: str) -> str:
    """Like a Gemma 4's that sees everything (DeepSeek's DSpark for it)."""
    read = d.norm(f"{layer(i)}.input_layernorm", x)
    q = d.linear(f"{layer(i)}.self_attn.q_proj", read, d.num_heads * d.head_dim)
    kv = keys_and_values(d, i, read, d.flag("attention_k_eq_v"))
    x = behind_attention(d, i, x, d.attend(i, (q, *kv), rope, draft.windows[i], 1.0, head_norms=True), d.intermediate_size)
    return d.scale_by(x, f"{layer(i)}.layer_scalar", hidden(i + 1))


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
    d, rope = _builder(draft, block.max_model_len)
    fusion, final = draft.fusion, ""
    if fusion is not None:
        states = [d.input(f"{FEATURE}.{i}", d.hidden_size) for i in range(len(draft.taps))]
        read = _mixed(d, fusion, layers, states)
    elif layers.start == 0:
        fused = d.linear("fc", d.input(FEATURE, len(draft.taps) * state_width), d.hidden_size)
        read = dict.fromkeys(layers, d.norm("hidden_norm", fused, CONTEXT))
        final = CONTEXT if is_read or layers.stop < len(draft.causal) else ""
    else:
        read = dict.fromkeys(layers, d.input(CONTEXT, d.hidden_size))
    attentions = {op.layer: op for op in block.ops if isinstance(op, Attention)}
    for i in layers:
        name, width = f"{layer(i)}.self_attn", d.num_kv_heads * d.head_dim
        keys, values = ("k_proj", "v_proj") if fusion is None else (fusion.keys, fusion.values)
        if draft.is_gemma4:
            kv = keys_and_values(d, i, read[i], d.flag("attention_k_eq_v"))
        else:
            bias = has(f"{name}.{keys}.bias")
            k = keys_of_pairs(d, i, read[i], rope, bias) if draft.turns_pairs else d.linear(f"{name}.{keys}", read[i], width, bias)
            kv = k, d.linear(f"{name}.{values}", read[i], width, has(f"{name}.{values}.bias"))
        d.write(kv, attentions[i - layers.start])
    program = _without_scores(d, next(iter(read.values())))
    return fuse(replace(program, kv_layers=block.kv_layers, slices=block.slices, boundaries=(), final=final))


def _mixed(d: DecoderBuilder, fusion: Fusion, layers: range, states: Sequence[str]) -> dict[int, str]:
    """What each layer reads of the states."""
    if not fusion.norms:
        states = [d.norm("hidden_norm", state, f"{state}.normed") for state in states]
    read: dict[int, str] = {}
    for i in layers:
        total, *parts = [d.scale(state, share, f"{state}.{i}") for state, share in zip(states, fusion.shares[i], strict=True)]
        for t, part in enumerate(parts):
            total = d.add(total, part, f"{i}.mixed.{t}")
        read[i] = d.norm(fusion.norms[i], total) if fusion.norms else total
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
