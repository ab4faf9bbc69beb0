"""Configs that guess whether it pays or not: what a proposer does must not depend on how fast the machine is just now."""

from collections.abc import Mapping, Sequence
from typing import Any, overload


@overload
def fixed(config: Mapping[str, Any]) -> dict[str, Any]: ...
@overload
def fixed(config: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]: ...
def fixed(config: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> dict[str, Any] | list[dict[str, Any]]:
    """As `speculative_config` takes it, with k fixed; {"method": "off"} stays as it is."""
    if not isinstance(config, Mapping):
        return [fixed(one) for one in config]
    return dict(config) if config.get("method") == "off" else {"disable_by_batch_size": 64, **config, "adaptive": False}
