"""Nearest-rank percentiles, for turns' own figures and for the bench.

Knows: ordered numbers. Does not know: what they measure.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest of the values (in rising order) that at least `share` of them do not exceed."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
