"""The cache of one network as torch tensors. Owns their memory layout; knows no rows and no attention."""

from collections import Counter

import torch
from torch import Tensor

from .fp8 import FP8, nearest
from .layout import KVLayerSpec, StateLayerSpec, StateRoom
from .upload import upload


class TorchKV:
    """The cache as torch tensors: per layer k [slots, kv_heads, k_dim] and v [slots, kv_heads, v_dim], which may be a view of k.

    Of recurrent layers, states [slots, numbers] float32 and guesses [slots, guesses, numbers].

    Slots start uninitialised, so that memory is taken as it is used. Nothing reads a slot that no pass has written.
    """

    def __init__(
        self,
        layers: tuple[KVLayerSpec, ...],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        is_fp8: bool = False,
        state_layers: tuple[StateLayerSpec, ...] = (),
        room: StateRoom | None = None,
    ) -> None:
        """dtype: of what is read. is_fp8: k and v are stored as e4m3 whatever that is, rounded when they are written. room: for states."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._device, self._dtype, self._is_fp8 = torch.device(device), dtype, is_fp8
        slots, stored = num_blocks * block_size, FP8 if is_fp8 else dtype
        with_values = [spec for spec in layers if not spec.values_in_keys]
        shapes = [(spec.num_kv_heads, spec.k_dim) for spec in layers] + [(spec.num_kv_heads, spec.v_dim) for spec in with_values]
        # Those of one shape lie in one piece of memory, so that a few calls move slots in all layers.
        stacks = {shape: torch.empty(count, slots, *shape, dtype=stored, device=device) for shape, count in Counter(shapes).items()}
        caches = {shape: iter(stack.unbind()) for shape, stack in stacks.items()}
        every = [next(caches[shape]) for shape in shapes]
        self.k, values = every[: len(layers)], iter(every[len(layers) :])
        self.v = [k[..., -spec.v_dim :] if spec.values_in_keys else next(values) for k, spec in zip(self.k, layers, strict=True)]
        self._has_values = [not spec.values_in_keys for spec in layers]
        firsts = [torch.arange(len(stack), device=device)[:, None] * slots for stack in stacks.values()]
        self._stacks = [(_copyable(stack.flatten(0, 1)), first) for stack, first in zip(stacks.values(), firsts, strict=True)]
        self._k_scratch = self._v_scratch = torch.empty(0, dtype=stored, device=device)
        self.num_states, self.num_guesses = (0, 0) if room is None else (room.num_slots, room.num_guesses)
        self.states = [torch.empty(self.num_states, spec.state, dtype=torch.float32, device=device) for spec in state_layers]
        self.guesses = [torch.empty(self.num_states, self.num_guesses, spec.guess, dtype=dtype, device=device) for spec in state_layers]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k [T, kv_heads, k_dim], v [T, kv_heads, v_dim] at slots [T]; slot -1 is written nowhere."""
        slots = slots.to(self._device)
        kept = slots >= 0
        self.write_all(layer, slots[kept], k[kept], v[kept])

    def write_all(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """`write` for callers that know that no slot is -1."""
        if self._is_fp8:
            k, v = nearest(k), nearest(v)
        _copyable(self.k[layer]).index_copy_(0, slots, _copyable(k))
        if self._has_values[layer]:
            _copyable(self.v[layer]).index_copy_(0, slots, _copyable(v))

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """k [n, kv_heads, k_dim] and v [n, kv_heads, v_dim] at slots [n]."""
        slots = slots.to(self._device)
        k, v = (_copyable(cache[layer]).index_select(0, slots).view(cache[layer].dtype) for cache in (self.k, self.v))
        return k.to(self._dtype), v.to(self._dtype)

    def read(self, layer: int, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
        """`gather` without a copy of its own: what it returns holds until the next read.

        A slice is a view of the cache. Other slots are copied to one buffer that all layers and passes reuse: page faults of
        a fresh one would cost more than the copy. What is e4m3 is widened anew.
        """
        k, v = self.k[layer], self.v[layer]
        if isinstance(slots, slice):
            return k[slots].to(self._dtype), v[slots].to(self._dtype)
        if self._is_fp8:
            return self.gather(layer, slots)
        self._k_scratch, self._v_scratch = (
            _at_least(buffer, len(slots) * cache[0].numel()) for buffer, cache in ((self._k_scratch, k), (self._v_scratch, v))
        )
        return _select(k, slots, self._k_scratch), _select(v, slots, self._v_scratch)

    def move(self, src: Tensor, dst: Tensor) -> None:
        """Copy slots src [n] to dst [n] in all layers, as if all were read before any is written."""
        moved = upload(torch.stack([src, dst]), self._device)
        for stack, firsts in self._stacks:
            sources, targets = (firsts + moved[:, None]).flatten(1)
            stack.index_copy_(0, targets, stack.index_select(0, sources))


def _copyable(cache: Tensor) -> Tensor:
    """As bytes where the numbers are 8 bits wide: torch copies slots of those on every device."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def _at_least(buffer: Tensor, numel: int) -> Tensor:
    if buffer.numel() >= numel:
        return buffer
    with torch.inference_mode(False):  # else it could not be written to outside inference mode
        return torch.empty(numel, dtype=buffer.dtype, device=buffer.device)


def _select(cache: Tensor, slots: Tensor, buffer: Tensor) -> Tensor:
    shape = (len(slots), *cache.shape[1:])
    out = buffer[: len(slots) * cache[0].numel()].view(shape)
    return torch.index_select(cache, 0, slots, out=out)
