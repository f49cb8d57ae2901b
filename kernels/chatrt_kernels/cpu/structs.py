"""The C structs of `source/calls.h` and `source/chains.h`, field by field.

Knows: layouts. Does not know: what the fields mean to a kernel; the headers say that.
Invariant: `NativeLibrary` compares each struct's size with the library's before it is used.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_POINTER = ctypes.c_void_p
_INT32 = ctypes.c_int32
_INT64 = ctypes.c_int64
MAX_FUSED_WEIGHTS = 3
MAX_DRAFTS = 32  # of one chain


class Kind(IntEnum):
    """Of a call."""

    EMBED = 0
    NORM = 1
    QUANTISE = 2
    LINEAR = 3
    ROPE = 4
    ATTENTION = 5
    ADD = 6
    SWIGLU = 7
    GATHER = 8


class RowsOf(IntEnum):
    """Which of a step's counts is the number of rows of a call."""

    ALL = 0
    LOGITS = 1
    FEATURES = 2


class LinearMode(IntEnum):
    """What becomes of the products."""

    STORE = 0
    ADD_TO = 1
    GATED = 2


class StepStruct(ctypes.Structure):
    """What changes from step to step."""

    _fields_ = (
        ("token_ids", _POINTER),
        ("positions", _POINTER),
        ("write_slots", _POINTER),
        ("page_table", _POINTER),
        ("page_table_stride", _INT64),
        ("q_start", _POINTER),
        ("kv_len", _POINTER),
        ("logit_rows", _POINTER),
        ("feature_rows", _POINTER),
        ("num_rows", _INT32),
        ("num_sequences", _INT32),
        ("num_logit_rows", _INT32),
        ("num_feature_rows", _INT32),
    )


class CallStruct(ctypes.Structure):
    """One call: its kind, how many rows it has, and the struct of its kind."""

    _fields_ = (
        ("kind", _INT32),
        ("rows_of", _INT32),
        ("rows_per", _INT32),
        ("padding", _INT32),
        ("arguments", _POINTER),
    )


class WeightStruct(ctypes.Structure):
    """A matrix in strips."""

    _fields_ = (
        ("format", _INT32),
        ("num_outputs", _INT32),
        ("num_inputs", _INT32),
        ("sensitive", _INT32),
        ("strips", _POINTER),
        ("order", _POINTER),
        ("ranks", _POINTER),
    )


class TermStruct(ctypes.Structure):
    """One 8-bit term of activations."""

    _fields_ = (
        ("values", _POINTER),
        ("scales", _POINTER),
        ("scaled_sums", _POINTER),
        ("negative_sums", _POINTER),
    )


class QuantisedStruct(ctypes.Structure):
    """Activations in 8 bits, and what rounding left; all null where there are none."""

    _fields_ = (("first", TermStruct), ("remainder", TermStruct))


class KVLayerStruct(ctypes.Structure):
    """The pages of one layer."""

    _fields_ = (
        ("keys", _POINTER),
        ("values", _POINTER),
        ("key_scales", _POINTER),
        ("value_scales", _POINTER),
        ("page_stride", _INT64),
        ("scale_stride", _INT64),
        ("format", _INT32),
        ("page_size", _INT32),
        ("kv_heads", _INT32),
        ("head_dim", _INT32),
    )


class EmbedStruct(ctypes.Structure):
    """Arguments of EMBED."""

    _fields_ = (("weight", WeightStruct), ("out", _POINTER), ("out_stride", _INT64))


class NormStruct(ctypes.Structure):
    """Arguments of NORM."""

    _fields_ = (
        ("x", _POINTER),
        ("x_stride", _INT64),
        ("weight", _POINTER),
        ("width", _INT32),
        ("eps", ctypes.c_float),
        ("floats", _POINTER),
        ("out_stride", _INT64),
        ("quantised", QuantisedStruct),
    )


class QuantiseStruct(ctypes.Structure):
    """Arguments of QUANTISE."""

    _fields_ = (
        ("x", _POINTER),
        ("x_stride", _INT64),
        ("width", _INT64),
        ("quantised", QuantisedStruct),
    )


class LinearStruct(ctypes.Structure):
    """Arguments of LINEAR."""

    _fields_ = (
        ("mode", _INT32),
        ("num_weights", _INT32),
        ("weights", WeightStruct * MAX_FUSED_WEIGHTS),
        ("bias", _POINTER * MAX_FUSED_WEIGHTS),
        ("out", _POINTER * MAX_FUSED_WEIGHTS),
        ("out_stride", _INT64 * MAX_FUSED_WEIGHTS),
        ("x", _POINTER),
        ("x_stride", _INT64),
        ("quantised", QuantisedStruct),
        ("activated", QuantisedStruct),
    )


class RopeStruct(ctypes.Structure):
    """Arguments of ROPE."""

    _fields_ = (
        ("q", _POINTER),
        ("k", _POINTER),
        ("v", _POINTER),
        ("q_stride", _INT64),
        ("k_stride", _INT64),
        ("v_stride", _INT64),
        ("table", _POINTER),
        ("out", _POINTER),
        ("out_stride", _INT64),
        ("num_heads", _INT32),
        ("padding", _INT32),
        ("kv", KVLayerStruct),
    )


class AttentionStruct(ctypes.Structure):
    """Arguments of ATTENTION."""

    _fields_ = (
        ("q", _POINTER),
        ("q_stride", _INT64),
        ("out", _POINTER),
        ("out_stride", _INT64),
        ("quantised", QuantisedStruct),
        ("num_heads", _INT32),
        ("scale", ctypes.c_float),
        ("kv", KVLayerStruct),
        ("partials", _POINTER),
        ("num_partials", _INT64),
    )


class PairwiseStruct(ctypes.Structure):
    """Arguments of ADD and SWIGLU."""

    _fields_ = (
        ("x", _POINTER),
        ("y", _POINTER),
        ("out", _POINTER),
        ("x_stride", _INT64),
        ("y_stride", _INT64),
        ("out_stride", _INT64),
        ("width", _INT64),
    )


class GatherStruct(ctypes.Structure):
    """Arguments of GATHER."""

    _fields_ = (
        ("x", _POINTER),
        ("out", _POINTER),
        ("x_stride", _INT64),
        ("out_stride", _INT64),
        ("width", _INT64),
    )


class ChainStruct(ctypes.Structure):
    """One chain: what it starts from, how far it may go, and the drafts that were made."""

    _fields_ = (
        ("sampler", _POINTER),
        ("position", _INT64),
        ("floor", ctypes.c_double),
        ("token_id", _INT32),
        ("base_row", _INT32),
        ("max_tokens", _INT32),
        ("num_drafts", _INT32),
        ("drafts", _INT32 * MAX_DRAFTS),
    )


class ChainsStruct(ctypes.Structure):
    """What all chains share."""

    _fields_ = (
        ("program", _POINTER),
        ("pool", _POINTER),
        ("subset", _POINTER),
        ("logits", _POINTER),
        ("logits_stride", _INT64),
        ("page_table", _POINTER),
        ("page_table_stride", _INT64),
        ("memory", _POINTER),
        ("page_size", _INT32),
        ("first_following", _INT32),
    )


# In the order in which the library states their sizes.
STRUCTS: tuple[type[ctypes.Structure], ...] = (
    StepStruct,
    CallStruct,
    WeightStruct,
    QuantisedStruct,
    KVLayerStruct,
    EmbedStruct,
    NormStruct,
    QuantiseStruct,
    LinearStruct,
    RopeStruct,
    AttentionStruct,
    PairwiseStruct,
    GatherStruct,
    ChainStruct,
    ChainsStruct,
)


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's first element lies; None, which C sees as null, without a tensor."""
    return None if tensor is None else tensor.data_ptr()
