"""The cache of one network in the layout that the native executor reads. Owns its memory; knows no rows and no attention."""

import ctypes

import torch
from torch import Tensor

from .large_pages import in_large_pages
from .layout import KVLayerSpec, StateRoom
from .native_abi import CacheType

BLOCK_SIZE = 16


class NativeKV:
    """Per layer one run of blocks, per recurrent layer one of states; memory is taken as it is used. Implements `KVTensors`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        layers: tuple[KVLayerSpec, ...],
        num_blocks: int,
        block_size: int,
        type: CacheType,
        slot_bytes: tuple[int, ...] = (),
        room: StateRoom | None = None,
    ) -> None:
        """slot_bytes: of a state of each recurrent layer, with the room's guesses. Raises ValueError unless block_size is 16."""
        if block_size != BLOCK_SIZE:
            raise ValueError(f"the native executor's cache has blocks of {BLOCK_SIZE} slots, not {block_size}; use block_size 16")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._library, self._layers, self._type = library, layers, type
        sizes = [block_bytes(library, layer, type) * num_blocks for layer in layers]
        self._memory = [in_large_pages(size) for size in sizes]
        self.bases = (ctypes.c_void_p * len(layers))(*(memory.data_ptr() for memory in self._memory))
        self.states: ctypes.Array[ctypes.c_void_p] | None = None  # slot 0 of each recurrent layer
        self.num_guesses = 0
        if room is not None and slot_bytes:
            self._states = [in_large_pages(size * room.num_slots) for size in slot_bytes]
            self.states = (ctypes.c_void_p * len(slot_bytes))(*(memory.data_ptr() for memory in self._states))
            self.num_guesses = room.num_guesses

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """See `KVTensors.write`."""
        slots, k, v = slots.contiguous(), k.float().contiguous(), v.float().contiguous()
        self._library.ft_cache_write(*self._layer(layer), len(slots), _pointer(slots), _pointer(k), _pointer(v))

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See `KVTensors.gather`; float32."""
        spec, slots = self._layers[layer], slots.contiguous()
        k = torch.empty(len(slots), spec.num_kv_heads, spec.k_dim, dtype=torch.float32)
        v = torch.empty(len(slots), spec.num_kv_heads, spec.v_dim, dtype=torch.float32)
        self._library.ft_cache_gather(*self._layer(layer), len(slots), _pointer(slots), _pointer(k), _pointer(v))
        return k, v

    def move(self, src: Tensor, dst: Tensor) -> None:
        """See `KVTensors.move`."""
        src, dst = src.contiguous(), dst.contiguous()
        for layer in range(len(self._layers)):
            self._library.ft_cache_move(*self._layer(layer), len(src), _pointer(src), _pointer(dst))

    def _layer(self, layer: int) -> tuple[ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p]:
        spec, int32 = self._layers[layer], ctypes.c_int32
        return int32(self._type), int32(spec.num_kv_heads), int32(spec.k_dim), int32(spec.v_dim), ctypes.c_void_p(self.bases[layer])


def block_bytes(library: ctypes.CDLL, layer: KVLayerSpec, type: CacheType, block_size: int = BLOCK_SIZE) -> int:
    """Bytes of one block of one layer."""
    return library.ft_cache_block_bytes(ctypes.c_int32(type), layer.num_kv_heads, layer.k_dim, layer.v_dim) * block_size // BLOCK_SIZE


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
