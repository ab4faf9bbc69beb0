"""A folder beside a GGUF file: what it says of the model, its tokenizer and its recommendations, as the files of a model's folder say it.

It is made once and kept in the cache folder. The weights stay where they are. Imports neither torch nor transformers.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..kernels.gguf_files import FILES
from .cache_folder import cache_folder, written_whole
from .errors import ModelLoadError
from .gguf_tokenizer import ends, tokenizer_files

_VERSION = 1  # of what is written: one more where that changes
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def gguf_folder(file: Path) -> Path:
    """The folder for a file, or for the files that it is the first of. Raises ModelLoadError."""
    files = _parts(file.absolute())  # not where a link of the hub's cache leads: that has no name
    state = [(str(part), part.stat().st_size, part.stat().st_mtime_ns) for part in files]
    key = hashlib.sha256(repr((_VERSION, state)).encode()).hexdigest()[:12]
    folder = cache_folder() / "gguf" / f"{file.stem}-{key}"
    if not folder.is_dir():
        contents = _contents(files)
        try:
            written_whole(folder, lambda made: _write(made, contents))
        except OSError as error:
            raise ModelLoadError(
                f"{folder.parent} cannot be written ({error.strerror}), where a tokenizer and a config.json are made from a GGUF file: "
                "name another folder in FORETOKEN_CACHE"
            ) from error
    return folder


def _write(folder: Path, contents: Mapping[str, Any]) -> None:
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _parts(file: Path) -> list[Path]:
    match = _PART.fullmatch(file.name)
    if match is None:
        return [file]
    parts = [file.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, int(match[3]) + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ModelLoadError(f"{file.parent} lacks {len(missing)} of the {len(parts)} files of {match[1]}, the first is {missing[0]}")
    return parts


def _contents(files: list[Path]) -> dict[str, Any]:
    from ..kernels.gguf_file import GgufError, GgufFile
    from ..kernels.gguf_model import gguf_config

    try:
        file = GgufFile(files)
        config, last, tokenizer = gguf_config(file), ends(file.values), tokenizer_files(file.values)
    except GgufError as error:
        raise ModelLoadError(str(error)) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelLoadError(f"what {files[0]} says of its model makes no sense ({error}); fetch the file again") from error
    ids = {f"{kind}_token_id": file.values.get(f"tokenizer.ggml.{key}_token_id") for kind, key in (("bos", "bos"), ("pad", "padding"))}
    # Where nothing is said, transformers' classes have ids of their own.
    config |= ids | {"eos_token_id": last or None, FILES: [str(part) for part in files]}
    said = {name: file.values[key] for own, name in _SAMPLING.items() if (key := f"general.sampling.{own}") in file.values}
    return {
        "config.json": config,
        "generation_config.json": said,
        **(tokenizer or {}),
    }
