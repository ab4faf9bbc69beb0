"""The torch cache, most of all with e4m3 numbers: what is written, read and moved, and what a whole network says over it."""

import pytest
import torch
from decoding import ragged
from elsewhere import THERE, Elsewhere, here, there
from small_networks import random_weights, small_program
from torch import Tensor

from foretoken.kernels import native
from foretoken.kernels.execution import Execution
from foretoken.kernels.fp8 import FP8, LARGEST, nearest
from foretoken.kernels.layout import KVLayerSpec
from foretoken.kernels.torch_executor import TorchExecutor
from foretoken.kernels.torch_kv import TorchKV
from foretoken.kernels.weights import bind_program

LAYERS = (KVLayerSpec(2, 16, 24), KVLayerSpec(1, 8, 8))
BLOCK_SIZE = 4


def filled(dtype: torch.dtype = torch.bfloat16, is_fp8: bool = True) -> tuple[TorchKV, list[tuple[Tensor, Tensor]]]:
    """A cache of 12 slots and what was written to them."""
    generator = torch.Generator().manual_seed(0)
    kv = TorchKV(LAYERS, 3, BLOCK_SIZE, dtype, is_fp8=is_fp8)
    given: list[tuple[Tensor, Tensor]] = []
    for i, layer in enumerate(LAYERS):
        k, v = (3 * torch.randn(12, layer.num_kv_heads, dim, generator=generator).to(dtype) for dim in (layer.k_dim, layer.v_dim))
        kv.write(i, torch.arange(12), k, v)
        given.append((k, v))
    return kv, given


def test_numbers_are_rounded_and_come_back_wide() -> None:
    kv, given = filled()
    slots = torch.tensor([7, 0, 7, 11])
    for i, (k, v) in enumerate(given):
        assert kv.k[i].dtype == kv.v[i].dtype == FP8
        for found in (kv.gather(i, slots), kv.read(i, slots)):
            for got, wrote in zip(found, (k, v), strict=True):
                assert torch.equal(got, nearest(wrote[slots]).to(wrote))
                assert not torch.equal(got, wrote[slots])
        for got, wrote in zip(kv.read(i, slice(3, 9)), (k, v), strict=True):
            assert torch.equal(got, nearest(wrote[3:9]).to(wrote))


def test_what_is_beyond_the_range_stays_at_its_end() -> None:
    found = nearest(torch.tensor([500.0, -1e9, torch.inf, -torch.inf, 448.0, 0.0]))
    assert found.float().tolist() == [LARGEST, -LARGEST, LARGEST, -LARGEST, LARGEST, 0.0]
    assert nearest(torch.tensor([torch.nan])).float().isnan().all()


@pytest.mark.parametrize("is_fp8", [True, False])
def test_nothing_is_written_at_slot_minus_1(is_fp8: bool) -> None:
    kv, given = filled(is_fp8=is_fp8)
    before = [cache.view(torch.uint8).clone() for cache in (*kv.k, *kv.v)]
    k, v = given[0]
    kv.write(0, torch.tensor([5, *[-1] * 11]), k + 9, v + 9)
    changed = [cache.view(torch.uint8) != bits for cache, bits in zip((*kv.k, *kv.v), before, strict=True)]
    assert [of_slots.flatten(1).any(1).nonzero()[:, 0].tolist() for of_slots in changed] == [[5], [], [5], []]


def test_slots_move_as_they_are() -> None:
    """As if all were read before any is written; the bits are not rounded again."""
    kv, _ = filled()
    before = [cache.view(torch.uint8).clone() for cache in (*kv.k, *kv.v)]
    src, dst = torch.tensor([5, 1, 2]), torch.tensor([1, 2, 9])
    kv.move(src, dst)
    for cache, bits in zip((*kv.k, *kv.v), before, strict=True):
        expected = bits.clone()
        expected[dst] = bits[src]
        assert torch.equal(cache.view(torch.uint8), expected)


class Rounded(TorchKV):
    """A wide cache of numbers that are e4m3."""

    def write_all(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        super().write_all(layer, slots, nearest(k).to(k), nearest(v).to(v))


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "phi3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_network_attends_over_the_rounded_numbers_and_over_nothing_else(family: str, dtype: torch.dtype) -> None:
    """Its own tokens' too, so that a token reads the same whether it came as part of a prompt or alone."""
    program = small_program(family, hidden_size=64, intermediate_size=96, vocab_size=320)
    weights = random_weights(program)
    exact = TorchExecutor(program, weights, dtype)
    narrow = bind_program(program, weights, Execution(dtype, kv_cache="fp8", prefer_native=False))
    tokens = torch.randint(320, (13,), generator=torch.Generator().manual_seed(2)).tolist()
    rounded, wide = (make(exact.kv_layers, 4, BLOCK_SIZE, dtype) for make in (Rounded, TorchKV))
    kv = narrow.allocate(4, BLOCK_SIZE)
    for first, end in ((0, 9), (9, 10), (10, 13)):
        batch = ragged([(tokens[first:end], first, [3, 0, 2, 1])])
        found = narrow.run(batch, kv).logits
        assert found is not None
        assert torch.equal(found, exact.run(batch, rounded).logits)  # pyright: ignore[reportArgumentType]
        assert not torch.equal(found, exact.run(batch, wide).logits)  # pyright: ignore[reportArgumentType]


def test_the_native_executor_does_not_pretend_to_have_it() -> None:
    program = small_program("llama")
    refusal = native.supports(program, Execution(torch.float32, kv_cache="fp8"))
    assert refusal == ("the native executor's narrow cache is int8" if native.availability().isa else native.availability().reason)


def test_slots_of_all_layers_move_in_a_few_calls() -> None:
    """Of layers of one shape by one read and one write, wherever they stand among others; the indices go to the device once."""
    layers = tuple(KVLayerSpec(2, 16, 16) if i % 4 else KVLayerSpec(1, 8, 24) for i in range(12))
    with Elsewhere() as device:
        kv = TorchKV(layers, 3, BLOCK_SIZE, torch.float32, THERE)
        given = [torch.randn(here(cache).shape) for cache in (*kv.k, *kv.v)]
        for cache, values in zip((*kv.k, *kv.v), given, strict=True):
            cache.copy_(there(values))
        device.calls.clear()
        device.to_device.clear()
        src, dst = torch.tensor([5, 1, 2]), torch.tensor([1, 2, 9])
        kv.move(src, dst)
        names = [str(call) for call in device.calls]
        assert sum("index" in name for name in names) == 2 * 3 and device.to_device == [6] and not device.to_host
        for cache, values in zip((*kv.k, *kv.v), given, strict=True):
            values[dst] = values[src]
            assert torch.equal(here(cache), values)
