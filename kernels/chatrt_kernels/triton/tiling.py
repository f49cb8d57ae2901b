"""How attention cuts rows into tiles and positions into splits, and the scratch that takes.

Knows: sizes. Does not know: pages, kernels.
Invariant: a tiling is fixed for a process, whatever rows a step has: bits depend on it.
Cost: `Partials` takes `4 · rows · heads · splits · (head_dim + 2)` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

MAX_SPLITS = 128
_LEAST_SPLIT = 256
_PREFILL_DOT = 64


@dataclass(frozen=True, slots=True)
class Tiling:
    """How rows and positions are cut.

    `tile_rows` rows of a sequence are in one tile, `block` positions are met at once, `split`
    positions are summed on their own; None sums all of them in one go.
    """

    tile_rows: int
    block: int
    split: int | None = None
    num_warps: int = 4
    num_stages: int = 2

    def num_tiles(self, num_rows: int, num_sequences: int) -> int:
        """Tiles that any division of so many rows among so many sequences fits into."""
        return num_rows // self.tile_rows + num_sequences

    def num_splits(self, max_positions: int) -> int:
        """Splits of a sequence of so many positions."""
        return 1 if self.split is None else -(-max_positions // self.split)


def decode_tiling(max_positions: int) -> Tiling:
    """For decode and verify: up to eight rows of a sequence in one tile."""
    split = _LEAST_SPLIT
    while split * MAX_SPLITS < max_positions:
        split *= 2
    return Tiling(tile_rows=8, block=64, split=split, num_stages=3)


def prefill_tiling(group: int) -> Tiling:
    """For chunks of prompts, where `group` query heads share a KV head."""
    return Tiling(tile_rows=max(1, _PREFILL_DOT // group), block=64)


@dataclass(frozen=True, slots=True)
class Partials:
    """Scratch for the splits: `sums` `[rows, heads, splits, head_dim]`, `stats` `[…, 2]`.

    Of each split: its sum divided by nothing, the largest score, the sum of weights. Float32.
    """

    sums: Tensor
    stats: Tensor

    @classmethod
    def allocate(
        cls, num_rows: int, num_heads: int, num_splits: int, head_dim: int, device: torch.device
    ) -> Partials:
        """Unwritten scratch."""
        shape = (num_rows, num_heads, num_splits)
        return cls(
            torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
            torch.empty((*shape, 2), dtype=torch.float32, device=device),
        )
