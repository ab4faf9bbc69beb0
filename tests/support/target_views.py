"""What drafters may know of a target, in tests where most of it does not matter."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from foretoken.kernels.execution import Execution
from foretoken.kernels.layout import Executor
from foretoken.kernels.ops import ArgMax, Embed, GatherRows, Linear
from foretoken.kernels.program import Program
from foretoken.kernels.weights import bind_program
from foretoken.proposers.loading import TargetView


def a_view(**settings: Any) -> TargetView:
    usual: dict[str, Any] = {
        **{"folder": Path("."), "config": {}, "tokenizer": None, "num_layers": 4, "hidden_size": 8, "vocab_size": 32, "max_model_len": 64},
        **{"embedding": "model.embed_tokens.weight", "head": "lm_head.weight"},
        **{"embed_scale": 1.0, "logits_scale": 1.0, "logits_softcap": None},
    }
    return TargetView(**usual | settings)


def tables_alone(tables: Mapping[str, Tensor], execution: Execution) -> Executor:
    """A target of nothing but embedding and head [V, H], so that there is a bank to share them from."""
    (embedding, head), best = tables, ArgMax(("logits",), ("argmax", "top"))
    ops = (Embed((), ("x",), embedding), GatherRows(("x",), ("rows",)), Linear(("rows",), ("logits",), (head,)), best)
    shapes = {name: tuple(table.shape) for name, table in tables.items()}
    return bind_program(Program(ops, shapes, (), {}, len(tables[head]), 1000, ("x",), "x", "logits", best), tables, execution)
