"""GGUF files, memory-mapped: metadata, tensor directory, and each tensor's own bytes.

Knows: the container (versions 2 and 3), which tensor types are served, llama.cpp's row order of
query and key matrices. Does not know: models, executors.
Invariant: a file that opens has all the bytes that its directory promises; nothing is dequantised.
Cost: opening walks over the strings of the vocabulary without keeping them, about 40 ms for 49k
tokens (the gguf library's reader takes 2 s); tensors are pages of the map, read when touched.
Source: the GGUF specification in ggml's docs.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from chatrt.errors import ModelFileError, UnsupportedModel
from chatrt_kernels.formats import QuantFormat, QuantizedTensor, dequantize

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_KEPT_ARRAY = 4096  # longer arrays, and all arrays of strings, are skipped
_STRING, _ARRAY = 8, 9
# metadata value types by number, as struct formats
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_FORMATS = {
    0: QuantFormat.F32,
    1: QuantFormat.F16,
    2: QuantFormat.Q4_0,
    3: QuantFormat.Q4_1,
    8: QuantFormat.Q8_0,
    12: QuantFormat.Q4_K,
    13: QuantFormat.Q5_K,
    14: QuantFormat.Q6_K,
    30: QuantFormat.BF16,
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """One line of the tensor directory; `offset` counts from the file's start."""

    format: QuantFormat
    shape: tuple[int, ...]  # outermost dimension first, as torch has it
    offset: int
    num_bytes: int


class GgufFile:
    """An open GGUF file: `metadata` without long arrays, and tensors by name.

    Raises:
        ModelFileError: Missing, truncated, or not GGUF.
        UnsupportedModel: A tensor has a type that is not served, or the version is unknown.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                header = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelFileError(f"{path} cannot be read: {error}") from error
        with header:
            size = len(header)
            try:
                self.metadata, self._entries = _read_directory(header, path)
            except (struct.error, OverflowError) as error:
                raise ModelFileError(
                    f"{path} is truncated: it ends after {size} bytes, inside its header"
                ) from error
            except _UnknownType as error:
                raise ModelFileError(f"{path} is damaged: {error}") from error
        end = max((e.offset + e.num_bytes for e in self._entries.values()), default=0)
        if end > size:
            raise ModelFileError(
                f"{path} is truncated: it has {size} bytes, its tensors need {end}"
            )
        # copy-on-write: torch wants writable memory, and nobody writes
        self._bytes = np.memmap(path, dtype=np.uint8, mode="c")

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor, `(out_features, in_features)` for a matrix."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def matrix(self, name: str) -> QuantizedTensor:
        """A matrix in its own bytes, a view of the file."""
        entry = self._entry(name, num_dims=2)
        out_features, in_features = entry.shape
        rows = self._data(entry).view(out_features, -1)
        return QuantizedTensor(entry.format, rows, (out_features, in_features))

    def vector(self, name: str) -> torch.Tensor:
        """A vector as float32."""
        entry = self._entry(name, num_dims=1)
        row = self._data(entry).view(1, -1)
        return dequantize(QuantizedTensor(entry.format, row, (1, entry.shape[0])))[0]

    def _data(self, entry: _Entry) -> torch.Tensor:
        return torch.from_numpy(self._bytes[entry.offset : entry.offset + entry.num_bytes])

    def _entry(self, name: str, *, num_dims: int) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise ModelFileError(f"{self.path} has no tensor '{name}'")
        if len(entry.shape) != num_dims:
            raise ModelFileError(
                f"{self.path}: tensor '{name}' has {len(entry.shape)} dimensions, "
                f"expected {num_dims}"
            )
        return entry


def unpermute_rows(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order of a query or key matrix (or bias): a copy, `[out, …]`.

    It stores the two halves of each head interleaved; here dimension i turns with i + head_dim / 2.
    """
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


class _UnknownType(Exception):
    """A metadata value has a type that the format does not define."""


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack_from("<" + kind, self._data, self.position)
        self.position += struct.calcsize("<" + kind)
        return value

    def string(self) -> str:
        size = self.number("Q")
        start, self.position = self.position, self.position + size
        if self.position > len(self._data):
            raise struct.error("string behind the end")
        return self._data[start : self.position].decode("utf-8", errors="replace")

    def skip_strings(self, count: int) -> None:
        data, position, size_of = self._data, self.position, struct.Struct("<Q").unpack_from
        for _ in range(count):
            position += 8 + size_of(data, position)[0]
        self.position = position

    def value(self, kind: int) -> Any:
        """A metadata value; None for an array that is skipped."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self.number(_scalar(kind))

    def _array(self) -> Any:
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            self.skip_strings(count)
            return None
        scalar = _scalar(kind)
        if count <= _MAX_KEPT_ARRAY:
            return [self.number(scalar) for _ in range(count)]
        self.position += count * struct.calcsize("<" + scalar)
        return None


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise _UnknownType(f"its metadata has a value of the unknown type {kind}")
    return _SCALARS[kind]


def _read_directory(data: mmap.mmap, path: Path) -> tuple[dict[str, Any], dict[str, _Entry]]:
    if data[:4] != _MAGIC:
        raise ModelFileError(f"{path} is not a GGUF file: it starts with {data[:4]!r}")
    cursor = _Cursor(data)
    cursor.position = len(_MAGIC)
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise UnsupportedModel(f"{path} is GGUF version {version}; supported are 2 and 3")
    num_tensors, num_values = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(num_values):
        key, kind = cursor.string(), cursor.number("I")
        metadata[key] = cursor.value(kind)
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelFileError(f"{path} is damaged: its alignment is {alignment!r}")
    entries = [_read_entry(cursor, path) for _ in range(num_tensors)]
    start = -(-cursor.position // alignment) * alignment
    return metadata, {
        name: _Entry(e.format, e.shape, e.offset + start, e.num_bytes) for name, e in entries
    }


def _read_entry(cursor: _Cursor, path: Path) -> tuple[str, _Entry]:
    name = cursor.string()
    dims = [cursor.number("Q") for _ in range(cursor.number("I"))]
    kind, offset = cursor.number("I"), cursor.number("Q")
    quant_format = _FORMATS.get(kind)
    if quant_format is None:
        supported = ", ".join(f.value for f in _FORMATS.values())
        raise UnsupportedModel(
            f"{path}: tensor '{name}' has type {_type_name(kind)}; supported are {supported}"
        )
    if not dims or dims[0] % quant_format.block_size:
        raise ModelFileError(
            f"{path} is damaged: tensor '{name}' has dimensions {dims}, "
            f"the first must be a multiple of {quant_format.block_size}"
        )
    num_blocks = math.prod(dims) // quant_format.block_size
    num_bytes = num_blocks * quant_format.bytes_per_block
    return name, _Entry(quant_format, tuple(reversed(dims)), offset, num_bytes)


def _type_name(kind: int) -> str:
    import gguf  # only to name what is refused

    try:
        return str(gguf.GGMLQuantizationType(kind).name)
    except ValueError:
        return f"number {kind}"
