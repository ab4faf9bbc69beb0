from random import Random
from typing import Any

import pytest
import torch
from quantised_checkpoints import FORMATS, Encoder, gptq

from foretoken.kernels.quantised_checkpoint import _quantisation, plain, stored_parts, stored_shape


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_is_what_its_format_says(name: str) -> None:
    require_equal(*FORMATS[name], 40)


def test_three_bits_of_gptq_cross_from_word_to_word() -> None:
    """Its savers ask for inputs in 32s."""
    require_equal({"quant_method": "gptq", "bits": 3}, gptq(3, True, True), 64)


def require_equal(config: dict[str, Any], encode: Encoder, inputs: int) -> None:
    tensors, values = encode(Random(1), 24, inputs)
    stored = stored_parts([f"a.{part}" for part in tensors])
    assert set(stored) - {"a.bias"} == {"a.weight"}
    parts, quantisation = {part: tensors[full.removeprefix("a.")] for part, full in stored["a.weight"].items()}, _quantisation(config)
    assert stored_shape(parts, quantisation) == (24, inputs)
    torch.testing.assert_close(plain(parts, quantisation), torch.tensor(values), rtol=1e-6, atol=1e-7)


def test_plain_tensors_keep_their_names() -> None:
    names = ["a.weight", "a.bias", "router.per_expert_scale", "attn.k_proj.k_scale"]
    assert stored_parts(names) == {name: {"": name} for name in sorted(names[:3])}


@pytest.mark.parametrize("name", ["w8a8-asymmetric", "fp8", "modelopt-nvfp4"])
def test_scales_beside_a_wide_weight_are_not_its_own(name: str) -> None:
    """As savers leave them that skip a weight, or that save it after it was made plain."""
    config, encode = FORMATS[name]
    wide = torch.arange(960.0).view(24, 40).bfloat16()
    parts = {part.removeprefix("weight"): tensor for part, tensor in encode(Random(1), 24, 40)[0].items() if part.startswith("weight")}
    assert torch.equal(plain(parts | {"": wide}, _quantisation(config)), wide.float())
