"""The command that writes a drafter's pickles as safetensors, once, for those who trust them.

Tensor by tensor, as they are: a head is no whole model, and what loads one would make up the tensors that it misses.
"""

from pathlib import Path

_IMPORTS = "import torch; from pathlib import Path; from safetensors.torch import save_file; "
_CONVERT = (
    "[save_file({k: v.clone() for k, v in torch.load(f, 'cpu', weights_only=True).items()}, f.with_suffix('.safetensors')) "
    "for pattern in ('*model*.bin', '*head*.pt', '*.pth') for f in folder.glob(pattern)]"
)


def conversion(source: Path | str) -> str:
    """Of a folder on this machine, or of a hub id (a str), which it first fetches to ./converted."""
    if isinstance(source, Path):
        return f"python -c \"{_IMPORTS}folder = Path({str(source)!r}); {_CONVERT}\""
    fetch = f"from huggingface_hub import snapshot_download; folder = Path(snapshot_download({source!r}, local_dir='converted')); "
    return f'python -c "{_IMPORTS}{fetch}{_CONVERT}"'


def only_pickles(folder: Path) -> str | None:
    """A sentence on a folder of pickles without safetensors; None if it is none."""
    pickles = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if not pickles or any(folder.glob("*.safetensors")):
        return None
    return (
        f"{pickles[0]} is a pickle, which can run code when it is read; convert it to safetensors once, which runs none: "
        f"{conversion(folder)}"
    )
