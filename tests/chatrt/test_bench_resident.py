"""Resident memory: touched pages count, reserved ones do not."""

from __future__ import annotations

import sys

import pytest
import torch

from chatrt.bench.resident import resident_memory
from chatrt.kvcache import KVCache


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_touched_pages_count_and_others_do_not() -> None:
    kv = KVCache.allocate(
        num_layers=2,
        num_pages=4096,
        page_size=16,
        kv_heads=2,
        head_dim=64,
        dtype=torch.float32,
        device="cpu",
    )
    before = resident_memory(kv, weight_bytes=1000)
    assert before.kv_bytes == kv.num_bytes == 128 * 2**20
    assert before.kv_touched_bytes is not None
    assert before.kv_touched_bytes < 4 * 2**20
    kv.data[0].fill_(1)
    after = resident_memory(kv, weight_bytes=1000)
    assert after.kv_touched_bytes == pytest.approx(64 * 2**20, abs=4 * 2**20)
    assert after.rss_anon_bytes is not None
    assert after.kv_touched_bytes is not None
    assert after.rss_anon_bytes > after.kv_touched_bytes
    assert after.other_bytes == after.rss_anon_bytes - 1000 - after.kv_touched_bytes
