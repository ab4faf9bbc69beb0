"""Which methods `bench speculation` and `tune` try on a model: those that are configured, or all that there are for it.

A family's folder holds the target and a folder for each trained method; every model has the methods without weights.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...engine.bench.speculation import Method
from ...engine.config import DEMO_MODEL
from ...engine.errors import ConfigError
from ...engine.model_folder import embedded
from ...proposers.config_entry import SpeculativeConfigError
from ...proposers.config_reading import load_speculative_config
from ...proposers.detection import detect_method, has_mtp_layers, has_view, read_config, tensor_shapes
from ..train.members import LEARNED, WITHOUT_WEIGHTS, FamilyFolder

TRIED = ("num_speculative_tokens", "adaptive", "disable_by_batch_size", "num_speculative_tokens_per_batch_size")
"""Settings of an entry that are found out and not taken from it."""


def find_methods(model: str, configured: str | None, wanted: Sequence[str] = ()) -> tuple[Method, ...]:
    """configured: as of `--speculative-config`; None = all methods that the model has. wanted: names of some of them.

    Entries of a list are tried one by one, then all together. Raises ConfigError.
    """
    methods = _of_model(model) if configured is None else _of_config(configured, model)
    names = [method.name for method in methods]
    if unknown := [name for name in wanted if name not in names]:
        raise ConfigError(f"--methods: there is no {unknown[0]} for {model}; there are {', '.join(names)}")
    return tuple(method for method in methods if method.name in wanted) if wanted else methods


def _of_model(model: str) -> tuple[Method, ...]:
    folder = embedded(model) if model == DEMO_MODEL else Path(model)
    is_family = folder.name == "target" and any((folder.parent / name / "config.json").is_file() for name in LEARNED)
    if is_family:
        family = FamilyFolder(folder.parent)
        entries = {name: _bare(family.speculation(name, 1)) for name in family.methods}
        if model == DEMO_MODEL:  # a name that works wherever the package is installed
            entries |= {name: {**entry, "model": f"{DEMO_MODEL}/{name}"} for name, entry in entries.items() if "model" in entry}
    else:
        entries = {name: {"method": name, **settings} for name, settings in WITHOUT_WEIGHTS.items()}
        entries["lookahead"] = {"method": "lookahead"}
        shapes = tensor_shapes(folder)
        if has_mtp_layers(read_config(folder), shapes):
            entries["mtp"] = {"method": "mtp"}
        if has_view(shapes):
            entries["orthrus"] = {"method": "orthrus"}
    return tuple(Method(name, (entry,)) for name, entry in entries.items())


def _of_config(configured: str, model: str) -> tuple[Method, ...]:
    try:
        value = load_speculative_config(configured)
        mappings: Sequence[Mapping[str, Any]] = [value] if isinstance(value, Mapping) else value
        named = [(_name(mapping, model), _bare(mapping)) for mapping in mappings]
    except (SpeculativeConfigError, TypeError) as error:
        raise ConfigError(f"--speculative-config: {error}") from None
    seen: Counter[str] = Counter()
    methods: list[Method] = []
    for name, entry in named:
        seen[name] += 1
        methods.append(Method(name if seen[name] == 1 else f"{name} {seen[name]}", (entry,)))
    if not methods or "off" in seen:
        raise ConfigError("--speculative-config: there is nothing to compare with no speculation; name a method")
    if len(methods) > 1:
        methods.append(Method("together", tuple(entry for _, entry in named)))
    return tuple(methods)


def _name(mapping: Mapping[str, Any], model: str) -> str:
    if not isinstance(mapping, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"an object or a list of objects is needed, not {mapping!r}")
    given = mapping.get("method")
    named = mapping.get("model") or mapping.get("draft_model")
    return str(given) if given else detect_method(str(named), model) if named else "ngram"


def _bare(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in TRIED}
