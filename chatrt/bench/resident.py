"""How much memory of its own this process holds, and which part of it is weights and KV pages.

Knows: what the operating system tells of a process. Does not know: models, engines.
Invariant: what this system does not tell is None, never a guess.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from chatrt.kvcache import KVCache

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class ResidentMemory:
    """Bytes. `rss_anon` is all that the process holds but files, `kv_touched` its part of pages.

    `other` is what is left of it without the weights and the touched pages.
    """

    rss_anon_bytes: int | None
    weight_bytes: int
    kv_bytes: int
    kv_touched_bytes: int | None

    @property
    def other_bytes(self) -> int | None:
        """Neither weights nor KV: the interpreter, libraries, scratch."""
        if self.rss_anon_bytes is None or self.kv_touched_bytes is None:
            return None
        return self.rss_anon_bytes - self.weight_bytes - self.kv_touched_bytes


def resident_memory(kv: KVCache, *, weight_bytes: int) -> ResidentMemory:
    """What this process holds at this moment; for a cache and weights in this machine's RAM.

    On other systems than Linux, and for a cache on a GPU, only the sizes are known.
    """
    on_cpu = kv.data.device.type == "cpu"
    known = sys.platform == "linux" and on_cpu
    return ResidentMemory(
        rss_anon_bytes=_rss_anon_bytes() if known else None,
        weight_bytes=weight_bytes,
        kv_bytes=kv.num_bytes,
        kv_touched_bytes=_touched_bytes(kv) if known else None,
    )


def _rss_anon_bytes() -> int | None:
    for line in _STATUS.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == "RssAnon":
            return int(value.split()[0]) * 1024
    return None


def _touched_bytes(kv: KVCache) -> int:
    """Anonymous memory of the mappings that hold the cache, up to the cache's own size.

    A small cache shares its mapping with other memory; for it this is an upper bound.
    """
    start = kv.data.data_ptr()
    end = start + kv.data.nbytes
    touched_bytes = 0
    for mapping in psutil.Process(os.getpid()).memory_maps(grouped=False):
        first, last = (int(border, 16) for border in mapping.addr.split("-"))
        if first < end and last > start:
            touched_bytes += min(int(mapping.anonymous), min(last, end) - max(first, start))
    return touched_bytes
