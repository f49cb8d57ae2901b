"""The file of one page: a header that says exactly what it is, then the payload.

    magic 8 · version 4 · model 16 · key 16 · parent 16 · page size 4 · payload bytes 8
    token ids 4 each · CRC-32 of everything else 4 · payload                (little-endian)

Knows: the bytes of a file. Does not know: folders, which pages there are.
Invariant: `check` lets nothing pass that was not written for exactly this record.
CRC-32 is enough: it is there for damage (any burst of up to 32 bits is found, of other damage all
but one in four thousand million), while mix-ups are found by comparing model, key and ids. It is no
guard against an intruder: who can write these files is the user.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatrt.archive.faults import BadPage, Fault
from chatrt.archive.keys import pack_ids

if TYPE_CHECKING:
    from chatrt.archive.keys import PageRecord

MAGIC = b"chatrtKV"
VERSION = 1

_FIXED = struct.Struct("<8sI16s16s16sIQ")
_CRC = struct.Struct("<I")
_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class PageLayout:
    """What all page files of one model have in common; `fingerprint` has 16 bytes."""

    fingerprint: bytes
    page_size: int
    page_bytes: int

    @property
    def header_bytes(self) -> int:
        """Bytes in front of the payload."""
        return _FIXED.size + _ID_BYTES * self.page_size + _CRC.size

    @property
    def file_bytes(self) -> int:
        """Bytes of a whole file."""
        return self.header_bytes + self.page_bytes


def make_header(layout: PageLayout, record: PageRecord, payload: bytes | bytearray) -> bytes:
    """The header of a page's file, `layout.header_bytes` long."""
    facts = _facts(layout, record)
    return facts + _CRC.pack(zlib.crc32(payload, zlib.crc32(facts)))


def check(layout: PageLayout, record: PageRecord, header: bytes, payload: bytearray) -> None:
    """Makes sure that a file of the right size is undamaged and the record's own.

    Raises:
        BadPage: It is not; the fault says in which way.
    """
    facts, stored_crc = header[: -_CRC.size], header[-_CRC.size :]
    magic, version, fingerprint, _, _, page_size, page_bytes = _FIXED.unpack_from(facts)
    if magic != MAGIC:
        raise BadPage(Fault.DAMAGED, "it does not begin as a page file does")
    if version != VERSION:
        raise BadPage(Fault.FOREIGN, f"format {version}, {VERSION} is read here")
    if _CRC.pack(zlib.crc32(payload, zlib.crc32(facts))) != stored_crc:
        raise BadPage(Fault.DAMAGED, "its checksum is wrong")
    if (fingerprint, page_size, page_bytes) != (
        layout.fingerprint,
        layout.page_size,
        layout.page_bytes,
    ):
        raise BadPage(Fault.FOREIGN, "written for another model")
    if facts != _facts(layout, record):
        raise BadPage(Fault.MIXED_UP, "its key, parent or token ids are others")


def _facts(layout: PageLayout, record: PageRecord) -> bytes:
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        layout.fingerprint,
        record.key,
        record.parent,
        layout.page_size,
        layout.page_bytes,
    )
    return fixed + pack_ids(record.token_ids)
