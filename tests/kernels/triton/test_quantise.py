import pytest
import torch
from decoding import ragged
from small_networks import random_weights, small_program
from triton_interpreter import DEVICE

from foretoken.kernels import fp8, triton_steps
from foretoken.kernels.torch_executor import TorchExecutor
from foretoken.kernels.triton.quantise import quantised


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 100, 1088])
def test_the_same_bits_as_the_reference(width: int, dtype: torch.dtype):
    """Rows that need not lie side by side, of all sizes, without any and with what is no number."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(12, width + 8, generator=generator) * 10.0 ** torch.arange(-6, 6)[:, None]
    x = x.to(dtype)[:, :width]
    x[0] = 0
    x[1, 3] = torch.nan
    x[2, 5], x[2, 6] = torch.inf, -torch.inf
    x[3] = 1e-44
    x[4, 1:] = x[4, 0]
    values, scales = quantised(x.to(DEVICE))
    expected, expected_scales = fp8.quantised(x)
    assert torch.equal(scales.cpu(), expected_scales)
    is_nan = expected.float().isnan()
    assert torch.equal(values.cpu().float().isnan(), is_nan)
    assert torch.equal(values.cpu().view(torch.uint8)[~is_nan], expected.view(torch.uint8)[~is_nan])


def test_no_rows():
    values, scales = quantised(torch.zeros(0, 32, device=DEVICE))
    assert values.shape == (0, 32) and scales.shape == (0, 1)


def test_few_rows_take_one_launch_and_many_are_quantised_in_one(monkeypatch: pytest.MonkeyPatch):
    """Of a product with 8-bit weights: scales, bias, residual and activation go into the launch that multiplies."""
    program = small_program("qwen2", hidden_size=64, intermediate_size=96, vocab_size=320)
    kernels = triton_steps.TritonKernels(quantization="fp8", skinny_rows=8)
    launches: list[tuple[bool, ...]] = []
    skinny, quantise = triton_steps.skinny_linear, triton_steps.quantised
    quantised_rows: list[int] = []

    def counted(x: torch.Tensor, weight: torch.Tensor, workspace: object, *extras: torch.Tensor | str | None) -> torch.Tensor:
        if weight.dtype == fp8.FP8:
            launches.append(tuple(extra is not None for extra in extras))
        return skinny(x, weight, workspace, *extras)  # type: ignore[arg-type]

    def counting(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        quantised_rows.append(len(x))
        return quantise(x)

    monkeypatch.setattr(triton_steps, "skinny_linear", counted)
    monkeypatch.setattr(triton_steps, "quantised", counting)
    network = TorchExecutor(program, random_weights(program), torch.bfloat16, device=DEVICE, kernels=kernels)
    network.run(ragged([([1, 2, 3], 0, [0])]), network.allocate(4, 16))
    qkv, sums, gate_up = (True, False, True, False), (False, True, True, False), (False, False, True, True)
    assert {qkv, sums, gate_up} == set(launches) and not quantised_rows
    network.run(ragged([(list(range(12)), 0, [0, 1, 2])]), network.allocate(4, 16))
    assert set(quantised_rows) == {12}
