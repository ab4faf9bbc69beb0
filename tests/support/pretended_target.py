"""What a drafter is given of a pretended target: its embedding and head, and a description of the rest."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from eagle_reference import Target
from safetensors.torch import save_file
from target_views import a_view, tables_alone
from torch import Tensor

from foretoken.kernels.execution import Execution
from foretoken.kernels.layout import Executor
from foretoken.kernels.program import Program
from foretoken.kernels.weights import bind_program
from foretoken.proposers.loading import Resources, TargetView

NUM_LAYERS = 8
MAX_MODEL_LEN = 1000


def resources(target: Target, folder: Path, execution: Execution, bound: list[Executor]) -> Resources:
    """bound: gets every network that is loaded."""
    network = tables_alone(_tables(target), execution)

    def bind(program: Program, weights: Mapping[str, Tensor], quantization: str | None) -> Executor:
        bound.append(bind_program(program, weights, execution, network.bank))
        return bound[-1]

    return Resources(_view(target, folder), lambda name, _: Path(name), bind, cast(Any, None))


def sizes_of(spec: Any, num_layers: int) -> dict[str, Any]:
    """What the config.json of any drafter says."""
    return {
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": spec.eps,
        "vocab_size": spec.vocab,
        "num_hidden_layers": num_layers,
        "max_position_embeddings": 64,  # short, as they are
    }


def save_beside(target: Target, folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[Path, Path]:
    """The folders of a drafter and of what it may read of its target."""
    drafter, of_target = folder / "drafter", folder / "target"
    drafter.mkdir(exist_ok=True)
    of_target.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, drafter / "model.safetensors")
    (drafter / "config.json").write_text(json.dumps(config))
    save_file(_tables(target), of_target / "model.safetensors")
    return drafter, of_target


def _tables(target: Target) -> dict[str, Tensor]:
    return {"model.embed_tokens.weight": target.embedding, "lm_head.weight": target.head}


def _view(target: Target, folder: Path) -> TargetView:
    return a_view(
        folder=folder, num_layers=NUM_LAYERS, hidden_size=target.spec.target_hidden, vocab_size=target.spec.vocab,
        max_model_len=MAX_MODEL_LEN, embed_scale=target.embed_scale, logits_scale=target.logits_scale, logits_softcap=target.softcap,
    )
