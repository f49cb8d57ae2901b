"""KV pages that left the device: kept in host memory and on disk, found again by their tokens.

    Archive ── Worker         the one thread that touches files
      └─ Tiers ── HostPages   payloads in memory           ┐ each with a PageIndex:
         │   └─── DiskPages   one file for each page       ┘ least recently used, leaf first
         └─ Loads             pages on their way back

Knows: keys, token ids, payloads as bytes, files. Does not know: tensors, sessions, which page of
the device held what. Invariant: a payload that is handed out is what was saved for exactly that
key, and the engine never waits for a file.
"""

from __future__ import annotations

from chatrt.archive.archive import Archive
from chatrt.archive.disk import DiskPages
from chatrt.archive.faults import Fault
from chatrt.archive.keys import PageKey, PageRecord, child_key, path_keys, root_key
from chatrt.archive.loads import Loaded
from chatrt.archive.tiers import ArchiveFigures

__all__ = [
    "Archive",
    "ArchiveFigures",
    "DiskPages",
    "Fault",
    "Loaded",
    "PageKey",
    "PageRecord",
    "child_key",
    "path_keys",
    "root_key",
]
