"""What heads on the target's states are made of, as programs: layers that add to what they read, and scores of what comes out."""

from ..kernels.ops import Activation, Add, ArgMax, GatherRows, Linear, Op, Scale, Softcap
from ..kernels.program import Program, row_program
from .draft_tables import Table
from .guessing import FEATURE


def silu_layer(x: str, result: str, weight: str, bias: str = "") -> list[Op]:
    """SiLU(W x + b); without a bias if that is ""."""
    linear = f"{result}.linear"
    return [
        Linear((x,), (linear,), (weight,), (bias,) if bias else ()),
        Activation((linear,), (result,), "silu", gated=False),
    ]


def residual_layer(x: str, result: str, weight: str, bias: str = "") -> list[Op]:
    """x + SiLU(W x + b)."""
    activated = f"{result}.activated"
    return [*silu_layer(x, activated, weight, bias), Add((x, activated), (result,))]


def scores_program(head: Table, width: int, token_map: str = "") -> Program:
    """From states [R, width] to the head's scores. The target's is used as the target uses it: scores then have its scale.

    token_map: a weight, [rows of the head] token ids; "" = rows are ids.
    """
    scores = "scores"
    ops: list[Op] = [GatherRows((FEATURE,), ("rows",)), Linear(("rows",), (scores,), (head.weight,))]
    if head.scale != 1.0:
        ops.append(Scale((scores,), ("scaled",), head.scale))
        scores = "scaled"
    if head.softcap is not None:
        ops.append(Softcap((scores,), ("capped",), head.softcap))
        scores = "capped"
    best = ArgMax((scores,), ("best", "top"))
    weights: dict[str, tuple[int, ...]] = {head.weight: (head.rows, width)} | ({token_map: (head.rows,)} if token_map else {})
    shared = frozenset({head.weight} if head.is_shared else ())
    return row_program((*ops, best), weights, {FEATURE: width}, best=best, token_map=token_map, shared=shared)
