"""The native executor's cache: what passes write, and writing, reading and moving slots from outside."""

import random

import torch
from native_attention import Layer, Row, Shape, deal, each_isa, each_type, needs_library, ragged

from foretoken.kernels.native_abi import CacheType

pytestmark = needs_library


@each_isa
@each_type
def test_passes_write_what_write_writes(type: CacheType, isa: int):
    """Pads, scales and rounding included: the bytes are the same."""
    shape = Shape(type=type, kv_heads=2, k_dim=37, v_dim=21, rope_half=0)
    row = Row(0, 50)
    blocks = deal([row], random.Random(4))
    batch = ragged([row], blocks)
    x = torch.randn(50, shape.width, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 6, 50)[:, None]
    x[7] = 0.0
    x[8, -1] = torch.inf
    x[9, -1] = torch.nan
    by_pass, by_write = Layer(shape), Layer(shape)
    by_pass.run(batch, x[:, 6 * 37 :], isa, only_write=True)
    _, k, v = by_write.heads(x, batch.positions)
    by_write.kv.write(0, batch.slot_mapping, k, v)
    assert by_pass.bytes() == by_write.bytes()
    _, stored = by_write.kv.gather(0, batch.slot_mapping)
    assert not torch.isfinite(stored[[8, 9], 1]).all(1).any()


@each_type
def test_write_skips_padding_and_gather_returns_it(type: CacheType):
    shape = Shape(type=type, kv_heads=2, k_dim=8, v_dim=5)
    layer = Layer(shape)
    k, v = torch.randint(-127, 128, (3, 2, 8)).float(), torch.randint(-127, 128, (3, 2, 5)).float()
    k[:, :, 0] = v[:, :, 0] = 127.0  # scale 1: exact in all types
    before = layer.bytes()
    layer.kv.write(0, torch.tensor([-1, -1, -1]), k, v)
    assert layer.bytes() == before
    layer.kv.write(0, torch.tensor([5, -1, 37]), k, v)
    gathered_k, gathered_v = layer.kv.gather(0, torch.tensor([37, 5]))
    assert torch.equal(gathered_k, k[[2, 0]]) and torch.equal(gathered_v, v[[2, 0]])


@each_type
def test_move_reads_all_before_it_writes(type: CacheType):
    layer = Layer(Shape(type=type, kv_heads=2, k_dim=40, v_dim=24))
    slots = torch.arange(64)
    layer.fill(slots, torch.Generator().manual_seed(1))
    k, v = layer.kv.gather(0, slots)
    source = torch.arange(64)
    source[torch.tensor([2, 3, 1, 20, 33])] = torch.tensor([1, 2, 3, 33, 63])
    moved = (source != slots).nonzero()[:, 0]
    layer.kv.move(source[moved], moved)
    moved_k, moved_v = layer.kv.gather(0, slots)
    assert torch.equal(moved_k, k[source]) and torch.equal(moved_v, v[source])
