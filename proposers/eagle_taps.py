"""Which of the target's layers an EAGLE-3 drafter reads: publishers count them in two ways, and nothing crashes if they are confused.

Boundary id k is the input of layer k: the output of layer k - 1.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from .config_entry import SpeculativeConfigError
from .detection import nested

_BOUNDARIES = "eagle_aux_hidden_state_layer_ids"
_OUTPUTS = "target_layer_ids"
_NESTED = "eagle_config"


def tapped_layers(config: Mapping[str, Any], wanted: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """Boundary ids, ascending. config: the drafter's config.json; wanted: what the user says, which counts more.

    vLLM and `speculators` write boundary ids at the top of config.json; a list inside `eagle_config` (SpecForge, SGLang, NVIDIA)
    and `target_layer_ids` are the numbers of layers whose outputs are meant. Without any: (2, L // 2, L - 3), as everywhere.
    Not all keep to that. A list that is one off these three was counted the other way: boundary ids inside `eagle_config` (Kimi
    K2.5, MiniCPM), or a list that a converter moved to the top as it was. And no layer's output is L (gpt-oss).
    """
    key, ids = _named(config) if wanted is None else ("layers", tuple(wanted))
    usual = (2, num_layers // 2, num_layers - 3)
    if ids is None or (wanted is None and any(sorted(ids) == [boundary + off for boundary in usual] for off in (-1, 1))):
        ids = usual
    elif key == f"{_NESTED}.{_BOUNDARIES}" and max(ids) == num_layers + 1:
        ids = tuple(boundary - 1 for boundary in ids)
    if len(set(ids)) != len(ids) or not all(0 <= boundary <= num_layers for boundary in ids):
        raise SpeculativeConfigError(
            f"the drafter would read the target before layers {', '.join(map(str, ids))} ({key}), but it has layers 0 to "
            f"{num_layers - 1}: name the layers it was trained for in 'layers' (0 to {num_layers}, each once)"
        )
    return tuple(sorted(ids))


def _named(config: Mapping[str, Any]) -> tuple[str, tuple[int, ...] | None]:
    """(where it stands, boundary ids) of config.json."""
    if config.get(_BOUNDARIES) is not None:
        return _BOUNDARIES, _integers(_BOUNDARIES, config[_BOUNDARIES], 0)
    for where, part, keys in (("", config, (_OUTPUTS,)), (f"{_NESTED}.", nested(config, _NESTED), (_BOUNDARIES, _OUTPUTS, "layer_ids"))):
        for key in keys:
            if part.get(key) is not None:
                return where + key, _integers(where + key, part[key], 1)
    return "config.json names none", None


def _integers(key: str, value: Any, add: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(entry) is int for entry in cast(list[Any], value)):
        raise SpeculativeConfigError(f"the drafter's config.json: {key!r} must be a list of layers, not {value!r}")
    return tuple(entry + add for entry in cast(list[int], value))
