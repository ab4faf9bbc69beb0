from pathlib import Path

import pytest
import torch
from decoding import Decoding
from pairs import assert_near, random_tokens
from safetensors.torch import load_file, save_file
from tiny_models import random_model, tiny_config
from torch import Tensor

from foretoken.kernels.execution import Execution
from foretoken.kernels.quantised_formats import fp4
from foretoken.kernels.stored_tensors import WeightError, read_tensors
from foretoken.kernels.weights import load_program_executor

REFERENCE = Execution(prefer_native=False)


def test_experts_in_mxfp4_are_decoded_when_they_are_asked_for(tmp_path: Path) -> None:
    """What was one tensor is two, with its matrices the other way round."""
    config, generator = tiny_config("gpt_oss", hidden_size=64, intermediate_size=96), torch.Generator().manual_seed(0)
    model = random_model(config)
    model.save_pretrained(tmp_path)
    tensors, added = load_file(tmp_path / "model.safetensors"), dict[str, Tensor]()
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        count, columns, rows = tensors.pop(name).shape
        parts = added[f"{name}_blocks"], added[f"{name}_scales"] = (
            torch.randint(256, (count, rows, columns // 32, 16), generator=generator, dtype=torch.uint8),
            torch.randint(120, 126, (count, rows, columns // 32), generator=generator, dtype=torch.uint8),
        )
        model.get_parameter(name).data = torch.stack([fp4(codes.flatten(-2), scale).mT for codes, scale in zip(*parts, strict=True)])
    save_file(tensors | added, tmp_path / "model.safetensors", {"format": "pt"})
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config.save_pretrained(tmp_path)
    prompt = random_tokens(1, 20, 97)
    executor = load_program_executor(read_tensors([tmp_path / "model.safetensors"]), config, REFERENCE)
    assert_near(Decoding(executor).feed([prompt]).logits, model(torch.tensor([prompt])).logits[0])
    for kind, phrase in (("blocks", "missing: .*experts.down_proj"), ("scales", r"down_proj cannot be read as config.json says")):
        name = f"model.layers.1.mlp.experts.down_proj_{kind}"
        changed = {other: tensor for other, tensor in added.items() if other != name}
        if kind == "scales":
            changed[name] = added[name][..., :2].contiguous()
        save_file(tensors | changed, tmp_path / "other.safetensors")
        with pytest.raises(WeightError, match=phrase):
            load_program_executor(read_tensors([tmp_path / "other.safetensors"]), config, REFERENCE)
