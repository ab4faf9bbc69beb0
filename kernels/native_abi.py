"""The structs of the native library's C ABI, field by field as in native/kernels.h and native/network.h."""

import ctypes
import hashlib
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path


class Precision(IntEnum):
    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    INT2 = 4
    COMPACT = 5  # bfloat16 in some 12 bits, without loss


class CacheType(IntEnum):
    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2


class OpKind(IntEnum):
    EMBED = 0
    NORM = 1
    LINEAR = 2
    ATTENTION = 3
    ACTIVATION = 4
    ADD = 5
    CONCAT = 6
    GATHER_ROWS = 7
    SCALE = 8
    SOFTCAP = 9
    TOP_K = 10
    EXPERTS = 11
    LOCAL_CONV = 12
    LOW_RANK = 13
    CAUSAL_CONV = 14
    GATED_DELTA = 15
    STATE_SPACE = 16


PANEL = 16  # outputs packed side by side
INT4_TILE = (64, 512 + 32)  # inputs of a tile, and bytes of a panel over them: nibbles and group scales
MAX_HEAD_DIM = 640
MOST_INPUTS = 128 * 1024  # of a linear layer
MAX_THREADS = 256
FUNCTIONS = {"": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4, "sigmoid": 5, "relu2": 6, "clamped_swiglu": 7}
MAX_INPUTS = 8
MAX_TAPS = 16  # of a causal convolution


class PackedLinear(ctypes.Structure):
    _fields_ = [
        ("precision", c_int32),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("weights", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
    ]


class NativeLowRank(ctypes.Structure):
    _fields_ = [
        ("precision", c_int32),
        ("num_weights", c_int32),
        ("num_slots", c_int32),
        ("rank", c_int32),
        ("inputs", c_int32),
        ("gated", c_int32),
        ("outputs", c_void_p),
        ("ranks", c_void_p),
        ("down", c_void_p),
        ("ups", POINTER(c_void_p)),
    ]


class NativeOp(ctypes.Structure):
    _fields_ = [
        ("kind", c_int32),
        ("num_inputs", c_int32),
        ("inputs", c_int32 * MAX_INPUTS),
        ("output", c_int32),
        ("second_output", c_int32),
        ("residual", c_int32),
        ("for_logits", c_int32),
        ("is_head", c_int32),
        ("normalise", c_int32),
        ("centred", c_int32),
        ("function", c_int32),
        ("gated", c_int32),
        ("outputs", c_int32),
        ("num_experts", c_int32),
        ("renormalise", c_int32),
        ("sigmoid", c_int32),
        ("top_groups", c_int32),
        ("groups", c_int32),
        ("first_kernel", c_int32),
        ("eps", c_float),
        ("scale", c_float),
        ("softcap", c_float),
        ("least", c_float),
        ("most", c_float),
        ("norm_weight", c_void_p),
        ("norm_bias", c_void_p),
        ("weights", POINTER(PackedLinear)),
        ("low_rank", POINTER(NativeLowRank)),
        ("layer", c_int32),
        ("num_heads", c_int32),
        ("kv_heads", c_int32),
        ("k_dim", c_int32),
        ("v_dim", c_int32),
        ("window", c_int32),
        ("rope_half", c_int32),
        ("rope", c_void_p),
        ("growth", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("norm_last", c_int32),
        ("values_in_keys", c_int32),
        ("sinks", c_void_p),
        ("rate", c_void_p),
        ("step", c_void_p),
        ("skip", c_void_p),
    ]


class NetworkSpec(ctypes.Structure):
    _fields_ = [
        ("ops", POINTER(NativeOp)),
        ("num_ops", c_int32),
        ("widths", POINTER(c_int32)),
        ("places", POINTER(c_int32)),
        ("num_buffers", c_int32),
        ("num_places", c_int32),
        ("vocab_size", c_int32),
        ("cache_type", c_int32),
        ("isa", c_int32),
    ]


class RowStatesView(ctypes.Structure):
    _fields_ = [
        ("sources", c_void_p),
        ("targets", c_void_p),
        ("accepted", c_void_p),
        ("num_known", c_void_p),
        ("copy_places", c_void_p),
        ("copy_slots", c_void_p),
        ("chain_slots", c_void_p),
    ]


class BatchView(ctypes.Structure):
    _fields_ = [
        ("num_tokens", c_int32),
        ("num_rows", c_int32),
        ("table_width", c_int32),
        ("num_logits", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("num_causal", c_void_p),
        ("tree_mask", c_void_p),
        ("logits_indices", c_void_p),
        ("first_places", c_void_p),
        ("adapters", c_void_p),
        ("states", POINTER(RowStatesView)),
    ]


class RunRequest(ctypes.Structure):
    _fields_ = [
        ("batch", BatchView),
        ("cache", POINTER(c_void_p)),
        ("states", POINTER(c_void_p)),
        ("num_guesses", c_int32),
        ("num_bound", c_int32),
        ("bound", POINTER(c_int32)),
        ("bound_memory", POINTER(c_void_p)),
        ("num_full", c_int32),
        ("full_logits", c_void_p),
        ("logits", c_void_p),
        ("argmax", c_void_p),
        ("top", c_void_p),
    ]


class ChainRequest(ctypes.Structure):
    _fields_ = [
        ("run", RunRequest),
        ("counts", c_void_p),
        ("steps", c_int32),
        ("token_ids", c_void_p),
        ("confidence", c_void_p),
        ("choosable", c_int32),
        ("temperatures", c_void_p),
        ("streams", c_void_p),
        ("first_positions", c_void_p),
        ("logits", c_void_p),
        ("token_map", c_void_p),
        ("limits_columns", c_int32),
        ("input", c_int32),
        ("state", c_int32),
    ]


class NativeTable(ctypes.Structure):
    _fields_ = [("keys", c_void_p), ("token_ids", c_void_p), ("chances", c_void_p), ("shift", c_int32), ("max_n", c_int32)]


class RoundsDrafter(ctypes.Structure):
    _fields_ = [
        ("network", c_void_p),
        ("cache", POINTER(c_void_p)),
        ("choosable", c_int32),
        ("readable", c_int32),
        ("max_length", c_int32),
        ("samples", c_int32),
        ("threshold", c_float),
    ]


class RoundsRequest(ctypes.Structure):
    _fields_ = [
        ("cache", POINTER(c_void_p)),
        ("rows", c_void_p),
        ("drafter", POINTER(RoundsDrafter)),
        ("table", NativeTable),
        ("prices", c_void_p),
        ("num_prices", c_int32),
        ("num_rows", c_int32),
        ("most_rounds", c_int32),
        ("most_tokens", c_int32),
        ("most_seconds", c_double),
        ("ends_with_row", c_int32),
        ("interrupt", c_void_p),
        ("drafts", c_void_p),
        ("seconds", c_void_p),
        ("draft_seconds", c_void_p),
        ("tokens", c_void_p),
        ("num_drafts", c_int32),
        ("num_rounds", c_int32),
    ]


SAMPLE_ROW_BYTES = 128  # SampleRow, whose fields are in sampling.py
ROUNDS_BYTES = 256 + 28  # RoundsRow and RoundsDraft, whose fields are in rounds.py


def sources_digest(folder: Path) -> str:
    """What setup.py compiles into the library: which sources it was made from."""
    digest = hashlib.sha256()
    for path in sorted([*folder.rglob("*.cpp"), *folder.rglob("*.h")]):
        digest.update(path.name.encode() + b"\n" + path.read_bytes())
    return digest.hexdigest()


def fits(library: ctypes.CDLL, sources: Path) -> bool:
    """Whether the library was compiled from these sources. Where there are none, in an installed package, the two came together."""
    structs = (PackedLinear, NativeLowRank, NativeOp, NetworkSpec, RowStatesView, RunRequest, ChainRequest, RoundsDrafter, RoundsRequest)
    try:
        library.ft_sources.restype = c_char_p
        return library.ft_abi_bytes() == sum(map(ctypes.sizeof, structs)) + SAMPLE_ROW_BYTES + ROUNDS_BYTES and (
            not sources.is_dir() or library.ft_sources() == sources_digest(sources).encode()
        )
    except AttributeError:  # older than this check
        return False


def declare(library: ctypes.CDLL) -> None:
    """Types of the functions that take or give more than 32 bits; pointers would be cut without them."""
    library.ft_packed_bytes.restype = c_int64
    library.ft_compaction_begin.restype = c_void_p
    library.ft_compaction_raw_bytes.restype = c_int64
    library.ft_network_create.argtypes = [POINTER(NetworkSpec)]
    library.ft_network_create.restype = c_void_p
    library.ft_network_set_shortlist.argtypes = [c_void_p, POINTER(PackedLinear)]
    library.ft_network_set_shortlist.restype = None
    library.ft_network_destroy.argtypes = [c_void_p]
    library.ft_network_destroy.restype = None
    library.ft_network_most_at_once.argtypes = [c_void_p]
    library.ft_network_most_at_once.restype = c_int32
    library.ft_network_state_slot_bytes.argtypes = [c_void_p, c_int32, c_int32]
    library.ft_network_state_slot_bytes.restype = c_int64
    library.ft_network_run.argtypes = [c_void_p, POINTER(RunRequest)]
    library.ft_network_run.restype = c_char_p
    library.ft_network_run_chain.argtypes = [c_void_p, POINTER(ChainRequest)]
    library.ft_network_run_chain.restype = c_char_p
    library.ft_network_run_rounds.argtypes = [c_void_p, POINTER(RoundsRequest)]
    library.ft_network_run_rounds.restype = c_char_p
