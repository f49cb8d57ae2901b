"""What tests of every kind need: how patient to be."""

from __future__ import annotations

import os


def time_scale() -> float:
    """How much longer than on a quiet machine things may take (`CHATRT_TEST_TIME_SCALE`)."""
    return float(os.environ.get("CHATRT_TEST_TIME_SCALE", "1"))
