"""What a block drafter's config.json means: publishers count layers in two ways and say in five whether a block is causal.

Knows no tensors. Nothing crashes if these are confused; guesses only get worse.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from .config_entry import SpeculativeConfigError
from .detection import ASSISTANT, nested

_WINDOWS = ("layer_types", "sliding_window", "use_sliding_window")
_KNOWN_OTHERWISE = {
    *("conv_group_size", "conv_kernel_size", "selector_rank", "emb_dim", "gru_hidden_dim", "markov_rank"),
    *("use_confidence_head", "confidence_head_with_markov", "shift_label", "num_target_layers"),
}
"""By tensors, or by what kind of drafter it is."""
_BOUNDARIES, _OUTPUTS = "aux_hidden_state_layer_ids", "target_layer_ids"


class BlockSettings:
    """Settings stand in `dspark_config`, in `dflash_config` or at the top, those of the layers at the top or in
    `transformer_layer_config`."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder
        own = nested(config, "transformer_layer_config")
        # First folders of `speculators` have the windows beside what they say of the layers, as vLLM reads them.
        self.layers = {**own, **{key: config[key] for key in _WINDOWS if config.get(key) is not None}} if own else config
        self._top, self._inner = config, {**nested(config, "dflash_config"), **nested(config, "dspark_config")}
        self._read: set[str] = set()
        kind = config.get("speculators_model_type")
        self._speculators = kind if isinstance(kind, str) else None
        architectures = config.get("architectures")
        self._architecture = str(architectures).lower() if isinstance(architectures, list) else ""
        self.is_assistant = config.get("model_type") == ASSISTANT

    @property
    def is_dspark(self) -> bool:
        """Also where there is no Markov head: DeepSeek publishes such files as "dflash"."""
        if self._speculators is not None:
            return self._speculators == "dspark"
        return "dspark" in self._architecture or self.find("markov_rank") is not None

    def is_lilicorr(self, has_tensors: bool) -> bool:
        """By any mark that servers look for, unless the config switches it off."""
        is_named = "lilicorr" in self._architecture or self.find("projector_type") == "lilicorr"
        return self.flag("lilicorr_enabled", is_named or has_tensors)

    def is_called(self, kind: str) -> bool:
        return kind in (self._speculators, self.find("projector_type")) or kind in self._architecture

    @property
    def layout(self) -> str:
        others = "DeepSeek" if self.is_dspark else "Meta" if self.is_assistant else "z-lab"
        return others if self._speculators is None else "speculators"

    @property
    def takes_bare_tables(self) -> bool:
        """Whether it was trained with the target's embedding and head as they are, whatever the target multiplies theirs by (Gemma,
        Granite): `speculators` copies the numbers, transformers takes Muse Glimmer's so, others call the target."""
        return self._speculators is not None or self.is_assistant

    @property
    def turns_pairs(self) -> bool:
        """Whether dimensions 2 i and 2 i + 1 of a head turn together: LFM2's drafters say so in SGLang's word, the other is vLLM's."""
        return not self.flag("rope_is_neox_style", self.flag("is_neox_style", True))

    def find(self, key: str) -> Any:
        value = self._inside(key)
        return self._top.get(key) if value is None else value

    def leftovers(self) -> tuple[str, ...]:
        """A line about settings beside those that were read: what they mean is not known here."""
        names = sorted(self._inner.keys() - self._read - _KNOWN_OTHERWISE)
        return (f"settings that nothing reads: {', '.join(names)}",) if names else ()

    def flag(self, key: str, default: bool) -> bool:
        value = self.find(key)
        if value not in (None, False, True):  # 0 and 1 will do
            raise SpeculativeConfigError(f"{self.folder}/config.json: {key!r} must be true or false, not {value!r}")
        return default if value is None else bool(value)

    def number(self, key: str, default: float) -> float:
        """Far from where float32 ends, so that no score becomes infinite by it."""
        value = self.find(key)
        if value is None:
            return default
        if type(value) not in (int, float) or not abs(value) < 1e6:
            raise SpeculativeConfigError(f"{self.folder}/config.json: {key!r} must be a number below a million, not {value!r}")
        return float(value)

    def count(self, key: str, most: int, least: int = 1) -> int:
        """A setting that has no default."""
        value = self.find(key)
        if type(value) is not int or not least <= value <= most:
            raise SpeculativeConfigError(f"{self.folder}/config.json: {key!r} must be an integer from {least} to {most}, not {value!r}")
        return value

    def from_anchor(self, is_dspark: bool, is_domino: bool) -> bool:
        """Whether the last known token's own place has the first guess.

        A Domino says so as shift_label, and `speculators`, whose own name is another, means it where nothing is said. DeepSpec's
        DFlash has a third name.
        """
        shifts = self.flag("shift_label", self._speculators == "domino") if is_domino else is_dspark
        return self.flag("sample_from_anchor", self.flag("query_zero_predicts_next", shifts))

    def block_size(self, default: int | None) -> int:
        value = self.find("block_size")
        value = default if value is None else value
        if type(value) is not int:
            raise SpeculativeConfigError(f"{self.folder}/config.json: 'block_size' must be an integer, not {value!r}")
        return value

    def other_kinds(self) -> list[str]:
        """Drafters of the same family that are none of those that are read."""
        kinds: list[str] = []
        if self._speculators not in (None, "dflash", "dflash2", "dflare", "dspark", "domino", "xpress"):
            kinds.append(str(self._speculators))
        if self.find("projector_type") not in (None, "dflash", "dspark", "dflash2", "lilicorr", "domino", "xpress"):
            kinds.append(str(self.find("projector_type")))
        if self.flag("attention_sink_bias", False) or self.number("attention_value_scale", 1.0) != 1.0:
            kinds.append("DFlash with attention sinks or scaled values")
        if self.flag("use_correction_target_fusion", False):
            kinds.append("Domino with fused layers")
        return kinds

    def taps(self, num_draft_layers: int, num_layers: int) -> tuple[int, ...]:
        """Boundary ids of the target's states that are read.

        `speculators` writes boundary ids; target_layer_ids are the numbers of layers whose outputs are meant (-1 = the
        embedding). Without any, as many as the drafter has layers, evenly spread.
        """
        key, value = (_BOUNDARIES, self.find(_BOUNDARIES)) if self._speculators is not None else (_OUTPUTS, self.find(_OUTPUTS))
        if value is None and self._speculators is not None:
            raise SpeculativeConfigError(f"{self.folder}/config.json does not say which layers of the target are read ({key!r})")
        if value is None:
            count, span = num_draft_layers - 1, num_layers - 4
            value = [round(1 + i * span / count) for i in range(count + 1)] if count else [num_layers // 2]
        ids = cast(list[Any], value) if isinstance(value, list) else []
        if not ids or not all(type(entry) is int for entry in ids):
            raise SpeculativeConfigError(f"{self.folder}/config.json: {key!r} must be a list of layers, not {value!r}")
        taps = tuple(entry + (key == _OUTPUTS) for entry in cast(list[int], ids))
        if len(set(taps)) != len(taps) or not all(0 <= boundary <= num_layers for boundary in taps):
            raise SpeculativeConfigError(
                f"{self.folder} would read the target before layers {', '.join(map(str, taps))} ({key}), but it has layers 0 to "
                f"{num_layers - 1}: take the drafter that was trained for this target"
            )
        return taps

    def windows(self, num_layers: int) -> tuple[int | None, ...]:
        """Positions that each layer sees, itself included.

        use_swa makes all layers slide where `layer_types` says of none that it does: NVIDIA's exporter lists full ones even then.
        Muse Glimmer's assistant sees what is so far away, not what is nearer: one more.
        """
        slides = self._slides(num_layers)
        size = self.layers.get("sliding_window") if self.layers.get("use_sliding_window") is not False else None
        if self.flag("use_swa", False):
            slides = slides if any(slides) else (True,) * num_layers
            size = self.find("swa_window_size") or self.layers.get("sliding_window")
        if size is not None and (type(size) is not int or size < 1):
            raise SpeculativeConfigError(f"{self.folder}/config.json: a sliding window of {size!r} positions")
        size = size + 1 if size is not None and self.is_assistant else size
        return tuple(size if is_sliding else None for is_sliding in slides)

    def causal(self, num_layers: int, is_dspark: bool) -> tuple[bool, ...]:
        """Whether tokens of a block see only those before them, layer by layer.

        z-lab: layers that `layer_types` calls sliding do, those that slide by use_swa do not, unless `is_causal`, or in dflash_config
        `causal` or JetSpec's `causal_head`, speaks for all. `speculators`: sliding layers do, unless sliding_window_non_causal, which
        is what a DFlash 2 means that says nothing. DeepSeek's DSpark and Meta's assistant: none.
        """
        if self._speculators is not None:
            is_open = self.flag("sliding_window_non_causal", self._speculators == "dflash2")
            return tuple(slides and not is_open for slides in self._slides(num_layers))
        named = self.find("is_causal"), self._inside("causal"), self._inside("causal_head")
        explicit = next((value for value in named if value is not None), None)
        if explicit is not None or is_dspark or self.is_assistant:
            return (bool(explicit),) * num_layers
        return self._slides(num_layers)

    def _inside(self, key: str) -> Any:
        self._read.add(key)
        return self._inner.get(key)

    def _slides(self, num_layers: int) -> tuple[bool, ...]:
        """Of each layer, whether `layer_types` says so."""
        kinds = self.layers.get("layer_types")
        if kinds is None:
            return (False,) * num_layers
        if not isinstance(kinds, list) or len(named := [kind for kind in cast(list[Any], kinds) if isinstance(kind, str)]) < num_layers:
            raise SpeculativeConfigError(f"{self.folder}/config.json: 'layer_types' must name {num_layers} layers, not {kinds!r}")
        if unknown := set(named) - {"full_attention", "sliding_attention"}:
            raise SpeculativeConfigError(f"{self.folder}/config.json: layers of the types {', '.join(unknown)} are not supported")
        return tuple(kind == "sliding_attention" for kind in named[:num_layers])
