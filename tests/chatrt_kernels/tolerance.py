"""The one table of tolerances that executors are held to, by dtype.

Values compared are of order 1. Each tolerance is a few hundred roundings of the dtype: sums of that
many terms, in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}


def assert_agree(got: Tensor, expected: Tensor) -> None:
    """The tensors agree within the tolerance of `got`'s dtype; NaN agrees with nothing."""
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(
        got.to(torch.float64), expected.to(torch.float64), rtol=tolerance, atol=tolerance
    )
