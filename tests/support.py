"""What tests of every kind need: how patient to be, and the kernels compiled once."""

from __future__ import annotations

import os
from pathlib import Path

KERNEL_CACHE = Path(__file__).parents[1] / "build" / "kernels"

_MOST_GLUE = 16


def time_scale() -> float:
    """How much longer than on a quiet machine things may take (`CHATRT_TEST_TIME_SCALE`)."""
    return float(os.environ.get("CHATRT_TEST_TIME_SCALE", "1"))


def share_kernels(home: Path) -> Path:
    """Give `home` the kernels that the tests compile, so that it need not; returns `home`."""
    cache = home / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    KERNEL_CACHE.mkdir(parents=True, exist_ok=True)
    (cache / "kernels").symlink_to(KERNEL_CACHE, target_is_directory=True)
    return home


def assert_all_cached(num_cached: int, num_tokens: int) -> None:
    """A follow-up found its parent's tokens but the last, whose row is computed with its own.

    Idle time may have computed that one and the glue of the next turn too.
    """
    assert num_tokens - 1 <= num_cached <= num_tokens + _MOST_GLUE
