"""Which formats weights get that come unquantised, and the giving of them.

Knows: what each `quantize` setting means for layers and for the ends of a model.
Does not know: files, executors. Invariant: the bytes are those of the `gguf` library.
Cost: about 0.2 s for 100 MB of float32 numbers; the float32 copy is made in slices of rows.
Source: ggml's quantisers, as the `gguf` library states them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from chatrt_kernels.formats import QuantFormat, QuantizedTensor

if TYPE_CHECKING:
    from torch import Tensor

_SLICE_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class LoadQuantization:
    """Formats for dense matrices: of the layers, and of embedding and head (`ends`).

    None leaves a matrix as it comes.
    """

    layers: QuantFormat | None = None
    ends: QuantFormat | None = None


UNQUANTIZED = LoadQuantization()
# On normally distributed weights Q4_1 errs by 0.078 of their deviation (at most 0.29), Q4_0 by
# 0.086 (at most 0.47): worth half a bit more. The ends decide most about quality, so they keep 8.
_FORMATS = {
    "none": UNQUANTIZED,
    "q8": LoadQuantization(layers=QuantFormat.Q8_0, ends=QuantFormat.Q8_0),
    "q4": LoadQuantization(layers=QuantFormat.Q4_1, ends=QuantFormat.Q8_0),
}


def load_quantization(
    setting: Literal["auto", "none", "q8", "q4"], *, native_kernels: bool
) -> LoadQuantization:
    """The formats that a `quantize` setting means.

    `native_kernels`: whether the executor computes with 8-bit weights as they are, on a CPU; one
    that dequantises them would lose precision and gain nothing, so `auto` leaves it the originals.
    """
    if setting == "auto":
        setting = "q8" if native_kernels else "none"
    return _FORMATS[setting]


def quantize_matrix(matrix: Tensor, quant_format: QuantFormat) -> QuantizedTensor | Tensor:
    """A dense matrix `[out_features, in_features]` of any float dtype in Q8_0, Q4_0 or Q4_1.

    One whose rows are no whole number of blocks is returned as it is.
    """
    import gguf  # needed only where quantising at load is asked for

    out_features, in_features = matrix.shape
    if in_features % quant_format.block_size:
        return matrix
    kind = gguf.GGMLQuantizationType[quant_format.name]
    data = np.empty((out_features, quant_format.row_bytes(in_features)), dtype=np.uint8)
    step = max(1, _SLICE_ELEMENTS // in_features)
    for start in range(0, out_features, step):
        rows = matrix[start : start + step].to(torch.float32).numpy()
        # a block of subnormal numbers has no finite inverse scale; its own scale becomes 0
        with np.errstate(over="ignore", invalid="ignore"):
            data[start : start + step] = gguf.quants.quantize(rows, kind)
    return QuantizedTensor(quant_format, torch.from_numpy(data), (out_features, in_features))
