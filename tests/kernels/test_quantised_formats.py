from __future__ import annotations

from random import Random

import pytest
import torch
from quantised_checkpoints import FORMATS

from foretoken.kernels.quantised_checkpoint import _quantisation, plain, stored_parts, stored_shape


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_is_what_its_format_says(name: str) -> None:
    config, encode = FORMATS[name]
    tensors, values = encode(Random(1), 24, 40)
    stored = stored_parts([f"a.{part}" for part in tensors])
    assert set(stored) - {"a.bias"} == {"a.weight"}
    parts, quantisation = {part: tensors[full.removeprefix("a.")] for part, full in stored["a.weight"].items()}, _quantisation(config)
    assert stored_shape(parts, quantisation) == (24, 40)
    torch.testing.assert_close(plain(parts, quantisation), torch.tensor(values), rtol=1e-6, atol=1e-7)


def test_plain_tensors_keep_their_names() -> None:
    names = ["a.weight", "a.bias", "router.per_expert_scale", "attn.k_proj.k_scale"]
    assert stored_parts(names) == {name: {"": name} for name in sorted(names[:3])}


def test_parts_that_do_not_fit_are_refused() -> None:
    fp8 = _quantisation({"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(ValueError, match="do not fit"):
        plain({"": torch.zeros(8, 8).to(torch.float8_e4m3fn), "_scale_inv": torch.ones(2, 2)}, fp8)
    with pytest.raises(ValueError, match="_packed"):
        plain({"_packed": torch.zeros(8, 1, dtype=torch.int32)}, fp8)
