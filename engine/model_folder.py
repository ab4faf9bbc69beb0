"""From a model's name to the folder with its files: a path, the embedded model, or a download from the hub.

What is wrong with the files is told in one sentence, before anything is loaded. Imports neither torch nor transformers.
"""

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..kernels.gguf_files import gguf_files
from .config import DEMO_MODEL
from .errors import ModelLoadError
from .gguf_folder import gguf_folder

HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[\w.-]+(:[\w.-]+)?)?")
HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
TOKENIZERS = ("tokenizer.json", "*.model", "vocab*", "tekken.json", "*.tiktoken")
"""Files that a tokenizer is read from, by what transformers has to say of them."""
TOKENIZER_FILES = [*TOKENIZERS, "*.json", "merges.txt", "*.jinja"]
HUB_FILES_LEFT_OUT = ["*/*", "consolidated*"]  # the same weights in other formats
ADAPTER = "adapter_config.json"
ADAPTER_FOLDER = "adapter"  # where some repositories have it
ADAPTER_FILES = [f"{place}adapter_{kind}" for place in ("", f"{ADAPTER_FOLDER}/") for kind in ("*.json", "*.safetensors")]
LFS_POINTER = b"version https://git-lfs.github.com/spec/"

Progress = Callable[[str], None]


def find_folder(
    model: str,
    revision: str | None,
    progress: Progress,
    converting: Callable[[str], str] | None = None,
    files: list[str] | None = None,
) -> Path:
    """The local folder of foretoken-demo, of its drafter foretoken-demo/METHOD, of a path or of a hub id, downloaded if needed.

    Of a GGUF file, or of a path or repository that has no more than one (HUB-ID:Q4_K_M is one of several): that in gguf_folder.py.
    converting: the command that writes ./converted of a hub id that has no safetensors; None = that of a whole model. files: those of
    a hub id that are wanted, whether they are there or not; None = those of a whole model.
    Raises ModelLoadError.
    """
    if model.split("/")[0] == DEMO_MODEL and model.count("/") <= 1:
        return embedded(model)
    path = Path(os.path.expanduser(model))
    try:
        is_dir, is_file = path.is_dir(), path.is_file()
    except PermissionError as error:
        raise ModelLoadError(_unreadable(path, error.strerror)) from error
    except OSError as error:  # a name that is too long, a disk that is gone
        raise ModelLoadError(f"there is no folder {str(path)[:200]}: {error.strerror}") from error
    if is_dir:
        if not os.access(path, os.R_OK | os.X_OK):
            raise ModelLoadError(_unreadable(path, "Permission denied"))
        is_whole = files is not None or (path / "config.json").exists()
        return path if is_whole else _of_gguf(path, "") or path
    if is_file:
        if path.suffix == ".gguf":
            return gguf_folder(path)
        raise ModelLoadError(f"{model} is a file; name the folder with config.json, tokenizer and safetensors instead")
    if not HUB_ID.fullmatch(model):
        raise ModelLoadError(f"there is no folder {model}")
    hub_id, _, kind = model.partition(":")
    if kind:
        spelled = {kind, kind.upper(), kind.lower()}
        folder = _fetch(hub_id, revision, progress, [f"*{name}*{end}" for name in spelled for end in (".gguf", "/*.gguf")], None)
        if (found := _of_gguf(folder, kind)) is None:
            raise ModelLoadError(f"{hub_id} has no GGUF file on the Hugging Face hub whose name has {kind} in it")
        return found
    return _download(model, revision, progress, converting, files)


def find_adapter(path: str, progress: Progress = lambda line: None, revision: str | None = None) -> Path:
    """The local folder of an adapter: a path, or a hub id, downloaded if needed; or `adapter` in it. Raises ModelLoadError."""
    folder = find_folder(path, revision, progress, files=ADAPTER_FILES)
    for place in (folder, folder / ADAPTER_FOLDER):
        if (place / ADAPTER).is_file():
            return place
    raise ModelLoadError(f"{folder} is no adapter: it has no {ADAPTER}, which PEFT writes beside adapter_model.safetensors")


def embedded(model: str) -> Path:
    """The folder of the embedded target, or of its drafter for a method. Raises ModelLoadError."""
    family = Path(__file__).parent / "demo_model"
    member = model.partition("/")[2] or "target"
    folder = family / member
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return folder
    if member == "target":
        raise ModelLoadError(f"the weights of the embedded model are not in this installation ({folder}); name another model")
    there = sorted(path.parent.name for path in family.glob("*/config.json") if path.parent.name != "target")
    raise ModelLoadError(f"the embedded model has no drafter for method {member!r}; there are {', '.join(there)}")


_NO_MODEL = re.compile(r"^mmproj|-(?!00001)\d{5}-of-\d{5}\.gguf$")  # what reads images, and all but the first part of several


def _of_gguf(folder: Path, kind: str) -> Path | None:
    """That of the GGUF file in it whose name has `kind` in it; None if it has none. Raises ModelLoadError if there are several."""
    names = (file for pattern in ("*.gguf", "*/*.gguf") for file in sorted(folder.glob(pattern)))
    named = (file for file in names if kind.lower() in str(file.relative_to(folder)).lower())
    files = [file for file in named if not _NO_MODEL.search(file.name)]
    if len(files) > 1:
        raise ModelLoadError(f"{folder} has {len(files)} GGUF files; name one of them: {', '.join(file.name for file in files[:20])}")
    return gguf_folder(files[0]) if files else None


def _download(
    hub_id: str, revision: str | None, progress: Progress, converting: Callable[[str], str] | None, files: list[str] | None
) -> Path:
    """All of a repository that is wanted."""
    left_out = HUB_FILES_LEFT_OUT if files is None else None
    folder = _fetch(hub_id, revision, progress, files or HUB_FILES, left_out)
    if files is None and not any(folder.glob("*.safetensors")):
        start = f"{hub_id} has no safetensors on the Hugging Face hub. If you trust what it has, convert it once"
        if converting is not None:
            raise ModelLoadError(f"{start}: {converting(hub_id)}; then name ./converted")
        raise ModelLoadError(f"{start}: {_conversion(hub_id)}; then serve ./converted. Of a GGUF file add its kind: {hub_id}:Q4_K_M")
    return folder


def _fetch(hub_id: str, revision: str | None, progress: Progress, wanted: list[str], left_out: list[str] | None) -> Path:
    """A snapshot in the hub's cache; files already there are not fetched again, partial ones go on where they stopped."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    progress(f"looking for {hub_id} on the Hugging Face hub")
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=wanted, ignore_patterns=left_out))
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError, ValueError) as error:
        raise ModelLoadError(
            f"there is no folder {hub_id}, and the model of that name could not be fetched from the Hugging Face hub: {one_line(error)}"
        ) from error


def config_json(folder: Path) -> dict[str, Any]:
    """What config.json says. Raises ModelLoadError if there is none."""
    raw = read_json(folder, "config.json")
    if raw is None:
        if (folder / ADAPTER).is_file():
            raise ModelLoadError(_adapter_sentence(folder))
        inside = next(folder.glob("snapshots/*/config.json"), None)  # as the hub's cache has it
        instead = f"name {inside.parent}" if inside else "name the folder that holds config.json and *.safetensors"
        raise ModelLoadError(f"{folder} has no config.json: {instead}")
    return raw


def weight_files(folder: Path) -> list[Path]:
    """The safetensors or GGUF files that hold the network, all of them there. Raises ModelLoadError: other formats, parts missing."""
    files = gguf_files(folder) or _weight_files(folder)
    require_files(files)
    return files


def require_files(files: Iterable[Path]) -> None:
    """Raise ModelLoadError for files that may not be read, and for what `git clone` leaves in their place without Git LFS."""
    for file in files:
        try:
            with file.open("rb") as opened:
                start = opened.read(len(LFS_POINTER))
        except OSError as error:
            raise ModelLoadError(_unreadable(file, error.strerror)) from error
        if start == LFS_POINTER:
            raise ModelLoadError(f"{file} is only a pointer of Git LFS: run `git lfs install` and `git lfs pull` in {file.parent}")


def _weight_files(folder: Path) -> list[Path]:
    index = read_json(folder, "model.safetensors.index.json")
    if index is not None:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelLoadError(f"{folder / 'model.safetensors.index.json'} has no weight_map; fetch the file again")
        files = [folder / str(name) for name in sorted(set(weight_map.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing and not (folder / "model.safetensors").is_file():  # else the index is of an earlier, larger save
            raise ModelLoadError(f"{folder} lacks {len(missing)} of its {len(files)} weight files, the first is {missing[0]}")
        if not missing:
            return files
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if ggufs := sorted(folder.glob("*.gguf")):
        raise ModelLoadError(f"{folder} has no model.safetensors; {ggufs[0].name} has the weights: name that file")
    if pickles := sorted(file for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern)):
        raise ModelLoadError(
            f"{folder} has its weights as {pickles[0].name} only, a format that can run code when it is read. If you trust it, "
            f"convert it once: {_conversion(folder)}; then serve ./converted"
        )
    if (folder / ADAPTER).is_file():
        raise ModelLoadError(_adapter_sentence(folder))
    others = sorted(file.name for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))  # Mistral's own format
    if any(re.search(r"-\d+-of-\d+\.", name) for name in others):
        raise ModelLoadError(f"{folder} has {others[0]} but no model.safetensors.index.json, which says what is where; fetch that too")
    there = f"if {others[0]} holds the whole network, name it so" if others else "weights are read from safetensors only"
    raise ModelLoadError(f"{folder} has no model.safetensors: {there}")


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """None if there is no such file. Raises ModelLoadError if it is no JSON object."""
    file = folder / name
    if not file.is_file():
        return None
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        require_files([file])
        raise ModelLoadError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file} is not a JSON object")
    return value


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _unreadable(path: Path, why: str | None) -> str:
    return f"{path} cannot be read ({why}): it must be readable for the user that runs Foretoken, in a container too"


def _adapter_sentence(folder: Path) -> str:
    base = (read_json(folder, ADAPTER) or {}).get("base_model_name_or_path") or "BASE-MODEL"
    serve = f"foretoken serve {base} --lora-modules {folder.name}={folder}"
    return f"{folder} is an adapter, which is served beside the model it was made for: {serve}; in scripts LLM(..., enable_lora=True)"


def _conversion(source: Path | str) -> str:
    """A command line that writes a folder `converted` with safetensors and tokenizer."""
    return (
        'python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
        f"[x.from_pretrained({str(source)!r}).save_pretrained('converted') for x in (M, T)]\""
    )
