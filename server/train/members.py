"""The folder of a family: which of its parts exist, how each method is configured, and what tells its weights from others."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .generating import fingerprint

OFF = "off"
WITHOUT_WEIGHTS: Mapping[str, Mapping[str, Any]] = {
    "ngram": {"prompt_lookup_min": 2, "prompt_lookup_max": 4}, "suffix": {},
}
LEARNED = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "pard", "dflash", "ngram_cache")
OF_THEIR_OWN_LENGTH = ("medusa", "mlp_speculator", "dflash")     # as many guesses as the checkpoint has heads or places
ARGMAX_ONLY = ("medusa", "ngram_cache")


@dataclass(frozen=True)
class FamilyFolder:
    """Folders of a family: target/, and one for each learned method."""

    folder: Path

    @property
    def target(self) -> Path:
        return self.folder / "target"

    @property
    def methods(self) -> tuple[str, ...]:
        return (*WITHOUT_WEIGHTS, *(name for name in LEARNED if (self.folder / name / "config.json").exists()))

    def speculation(self, method: str, most: int) -> dict[str, Any]:
        """A speculative config for always so many guesses, at any batch size."""
        if method == OFF:
            return {"method": OFF}
        config: dict[str, Any] = {"method": method, "adaptive": False, "disable_by_batch_size": 1024, **WITHOUT_WEIGHTS.get(method, {})}
        if method not in OF_THEIR_OWN_LENGTH:
            config["num_speculative_tokens"] = most
        if method in LEARNED:
            config["model"] = str(self.folder / method)
            if method not in ARGMAX_ONLY:
                config["draft_sample_method"] = "probabilistic"      # greedy requests get the argmax anyway
        return config

    def mark(self, method: str) -> str:
        """Fingerprint of the weights behind a method's figures; "target" alone for those without."""
        own = fingerprint(self.folder / method) if method in LEARNED else ""
        return f"{fingerprint(self.target)}{own}"
