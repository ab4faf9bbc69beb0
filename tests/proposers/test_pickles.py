import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from eagle_checkpoints import PUBLISHED, Drafter
from safetensors.torch import load_file

from foretoken import LLM
from foretoken.engine.errors import ModelLoadError
from foretoken.proposers.config_entry import SpeculativeConfigError
from foretoken.proposers.detection import detect_method
from foretoken.proposers.pickles import conversion


def test_the_command_keeps_every_tensor_of_a_head(tmp_path: Path) -> None:
    drafter = Drafter.write(PUBLISHED["eagle3"], tmp_path)
    file = drafter.folder / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    torch.save({**tensors, "again": tensors["fc.weight"]}, drafter.folder / "pytorch_model.bin")  # one storage under two names
    torch.save({}, drafter.folder / "training_args.bin")
    config = json.loads((drafter.folder / "config.json").read_text())
    (drafter.folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))  # as most are published
    assert detect_method(str(drafter.folder)) == "eagle3"
    with pytest.raises(SpeculativeConfigError) as told:
        drafter.load()
    command = conversion(drafter.folder)
    assert str(told.value).endswith(command)
    subprocess.run(command.replace("python", sys.executable, 1), shell=True, check=True)
    (written,) = drafter.folder.glob("*.safetensors")
    read = load_file(written)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert drafter.load().found


def test_the_command_reads_every_name_that_pickles_have(tmp_path: Path) -> None:
    names = ("pytorch_model.bin", "medusa_lm_head.pt", "model.pth")
    for name in names:
        torch.save({name: torch.ones(2)}, tmp_path / name)
    subprocess.run(conversion(tmp_path).replace("python", sys.executable, 1), shell=True, check=True)
    assert {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)} == set(names)


def test_a_head_on_the_hub_is_not_converted_as_a_whole_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which would make up the layers that it has not, and leave its own out."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda hub_id, **_: str(tmp_path))
    for model, words in (("someone/EAGLE3-LLaMA3.1-Instruct-8B", "torch.load"), ("someone/Llama-3.2-1B", "AutoModelForCausalLM")):
        with pytest.raises(ModelLoadError, match=rf"{model} has no safetensors.*{words}.*converted"):
            LLM("foretoken-demo", speculative_config={"model": model, "num_speculative_tokens": 2})
