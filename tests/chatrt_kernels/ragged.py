"""Random ragged batches on a poisoned paged cache, for tests of any executor.

Each sequence is (rows of this forward, kv_len). Pages are handed out in random order; whatever no
sequence owns, and the rows behind each kv_len, hold NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chatrt_kernels.ops import KVLayer, RowMeta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that all sequences share."""

    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4
    num_pages: int = 128


@dataclass(frozen=True, slots=True)
class Ragged:
    """A batch, its cache, and the same keys and values unpaged: `[kv_len, kv_heads, head_dim]`."""

    shape: Shape
    sequences: list[tuple[int, int]]
    meta: RowMeta
    kv: KVLayer
    keys: list[Tensor]
    values: list[Tensor]
    q: Tensor


def page_tables(
    sequences: Sequence[tuple[int, int]], shape: Shape, generator: torch.Generator
) -> list[list[int]]:
    """Random pages for each sequence, none shared; page 0, which pads the tables, is never used."""
    free = (1 + torch.randperm(shape.num_pages - 1, generator=generator)).tolist()
    return [[free.pop() for _ in range(-(-kv_len // shape.page_size))] for _, kv_len in sequences]


def row_meta(
    sequences: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]], page_size: int
) -> RowMeta:
    """The metadata of rows at the last positions of their sequences."""
    positions = [p for rows, kv_len in sequences for p in range(kv_len - rows, kv_len)]
    owners = [s for s, (rows, _) in enumerate(sequences) for _ in range(rows)]
    slots = [
        tables[owner][position // page_size] * page_size + position % page_size
        for owner, position in zip(owners, positions, strict=True)
    ]
    page_table = torch.zeros(len(tables), max(map(len, tables), default=0) + 1, dtype=torch.int32)
    for table, page_ids in zip(page_table, tables, strict=True):
        table[: len(page_ids)] = torch.tensor(page_ids, dtype=torch.int32)
    counts = torch.tensor([0, *(rows for rows, _ in sequences)])
    return RowMeta(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        write_slots=torch.tensor(slots, dtype=torch.int64),
        page_table=page_table,
        q_start=counts.cumsum(0).to(torch.int32),
        kv_len=torch.tensor([kv_len for _, kv_len in sequences], dtype=torch.int32),
    )


def poisoned_layer(shape: Shape, dtype: torch.dtype) -> KVLayer:
    """A layer without a written row: NaN wherever the dtype has it, NaN scales for int8."""
    rows = (shape.num_pages, shape.page_size, shape.kv_heads)
    if dtype is not torch.int8:
        keys, values = torch.full((2, *rows, shape.head_dim), torch.nan, dtype=dtype)
        return KVLayer(keys, values)
    keys, values = torch.full((2, *rows, shape.head_dim), 127, dtype=dtype)
    key_scales, value_scales = torch.full((2, *rows), torch.nan)
    return KVLayer(keys, values, key_scales, value_scales)


def ragged(
    sequences: Sequence[tuple[int, int]],
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Ragged:
    """A batch whose cache already holds all rows of all sequences."""
    shape = shape or Shape()
    generator = torch.Generator().manual_seed(seed)
    tables = page_tables(sequences, shape, generator)
    kv = poisoned_layer(shape, dtype)

    def fill(data: Tensor, table: list[int], kv_len: int) -> Tensor:
        size = (kv_len, shape.kv_heads, shape.head_dim)
        rows = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
        for position, row in enumerate(rows):
            data[table[position // shape.page_size], position % shape.page_size] = row
        return rows

    lengths = [kv_len for _, kv_len in sequences]
    keys = [fill(kv.keys, table, n) for table, n in zip(tables, lengths, strict=True)]
    values = [fill(kv.values, table, n) for table, n in zip(tables, lengths, strict=True)]
    meta = row_meta(sequences, tables, shape.page_size)
    q = torch.randn(
        (len(meta.positions), shape.heads * shape.head_dim),
        generator=generator,
        dtype=torch.float64,
    ).to(dtype)
    return Ragged(shape, list(sequences), meta, kv, keys, values, q)


def attend_plainly(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, *, first_position: int
) -> Tensor:
    """One sequence's attention, row by row and head by head in float64: the formula itself.

    q is `[rows, heads, head_dim]`, keys and values `[kv_len, kv_heads, head_dim]`.
    """
    out = torch.empty(q.shape, dtype=torch.float64)
    group = q.shape[1] // keys.shape[1]
    for row in range(q.shape[0]):
        visible = slice(0, first_position + row + 1)
        for head in range(q.shape[1]):
            k = keys[visible, head // group].to(torch.float64)
            v = values[visible, head // group].to(torch.float64)
            scores = k @ q[row, head].to(torch.float64) * scale
            out[row, head] = scores.softmax(0) @ v
    return out
