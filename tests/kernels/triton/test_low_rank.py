import pytest
import torch
from triton_interpreter import DEVICE

from foretoken.kernels.adapters import Factors
from foretoken.kernels.triton.low_rank import low_rank


@pytest.mark.parametrize(("width", "outs", "rank"), [(64, (300, 40, 40), 16), (600, (72,), 5), (32, (530, 530), 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_residual", [False, True])
def test_each_token_has_its_own_adapter(width: int, outs: tuple[int, ...], rank: int, dtype: torch.dtype, has_residual: bool) -> None:
    generator, num_slots, tokens = torch.Generator().manual_seed(rank), 3, 5

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype).to(DEVICE)

    ranks = torch.full((len(outs), num_slots), rank, dtype=torch.int32)
    factors = Factors(random(len(outs), num_slots, rank, width), tuple(random(num_slots, rank, out) for out in outs), ranks)
    factors.down[:, 2] = torch.nan  # nobody's
    x, slots = random(tokens, 2 * width)[:, :width], torch.tensor([1, 0, 2, 2, 1], dtype=torch.int32, device=DEVICE)
    residual = random(tokens, sum(outs)) if has_residual else None
    found = low_rank(x, factors, slots, residual)
    for token, slot in enumerate(slots.tolist()):
        expected = torch.zeros(sum(outs), dtype=torch.float64)
        if slot:
            inner = [x[token].double() @ down[slot - 1].double().t() for down in factors.down]
            expected = torch.cat([part @ up[slot - 1].double() for part, up in zip(inner, factors.ups, strict=True)]).cpu()
        if residual is not None:
            expected += residual[token].double().cpu()
        tolerance = 1e-5 if dtype == torch.float32 else 1.6e-2
        torch.testing.assert_close(found[token].double().cpu(), expected, rtol=tolerance, atol=tolerance)
    alone = low_rank(x[2:3], factors, slots[2:3], None if residual is None else residual[2:3])
    assert torch.equal(alone[0], found[2])
