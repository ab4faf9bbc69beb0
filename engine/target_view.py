"""What drafters may know of the target: its sizes, and the names and scales of its embedding and head, which they share."""

from dataclasses import replace
from typing import Any

from ..kernels.ops import Embed, Linear, Op, Scale, Softcap
from ..kernels.program import Program
from ..proposers.loading import TargetView
from .model import LoadedModel


def target_view(target: LoadedModel) -> TargetView:
    text_config: Any = target.hf_config.get_text_config()
    config: dict[str, Any] = text_config.to_dict()
    view = TargetView(
        folder=target.path,
        config=config,
        tokenizer=target.tokenizer,
        num_layers=target.num_layers,
        hidden_size=int(text_config.hidden_size),  # by attribute: GPT-2 calls it n_embd in its file
        vocab_size=target.vocab_size,
        max_model_len=target.max_model_len,
        embedding="model.embed_tokens.weight",
        head="model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight",
        embed_scale=1.0,
        logits_scale=1.0,
        logits_softcap=None,
    )
    program = target.plan.program
    return view if program is None else _as_in_program(view, program)


def _as_in_program(view: TargetView, program: Program) -> TargetView:
    """Names and scales as the target's own program has them."""
    written_by: dict[str, Op] = {name: op for op in program.ops for name in op.outputs}
    name, scale, softcap = program.logits, 1.0, None
    while not isinstance(op := written_by[name], Linear):
        match op:
            case Scale():
                scale *= op.factor
            case Softcap():
                softcap = op.cap
            case _:
                raise AssertionError(f"logits that are written by {op}")
        name = op.inputs[0]
    embed = next(op for op in program.ops if isinstance(op, Embed))
    return replace(
        view,
        embedding=embed.weight,
        head=op.weights[0],
        embed_scale=embed.scale,
        logits_scale=scale,
        logits_softcap=softcap,
        kv_layers=program.kv_layers,
    )
