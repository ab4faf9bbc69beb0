"""Which GGUF files have the weights of a folder that has none of its own (engine/gguf_folder.py makes such folders)."""

import json
from pathlib import Path

FILES = "gguf_files"
"""In the folder's config.json: their names."""


def gguf_files(folder: Path) -> list[Path]:
    try:
        return [Path(file) for file in json.loads((folder / "config.json").read_text(encoding="utf-8")).get(FILES, ())]
    except (OSError, ValueError, AttributeError, TypeError):  # whoever needs config.json tells what is wrong with it
        return []
