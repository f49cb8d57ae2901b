"""PyTorch's operations for many conversations side by side, one row of each in every step.

Knows: that sequence s has one row, and that its pages are one contiguous run of the cache.
Does not know: conversations, sampling. Invariant: a position at or behind a sequence's `kv_len`
has weight 0, so the cache must hold finite numbers there.
Cost: keys and values are read where they lie; nothing is copied, and nothing waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from chatrt_kernels.reference import ReferenceOps

if TYPE_CHECKING:
    from torch import Tensor

    from chatrt_kernels.ops import KVLayer, RowMeta


class SlotOps(ReferenceOps):
    """`ReferenceOps` for decode steps over slots: row s belongs to sequence s.

    The pages of sequence s are `[s * n, (s + 1) * n)` for the cache's `n` pages per sequence, and
    the width of `meta.page_table` bounds the longest sequence.
    """

    name = "slots"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> None:
        """out = x / rms(x) * weight in the dtype of x, by the library's one kernel."""
        out.copy_(functional.rms_norm(x, (x.shape[-1],), weight, eps))

    def paged_attention(
        self, q: Tensor, meta: RowMeta, kv: KVLayer, scale: float, *, out: Tensor
    ) -> None:
        """Attention of one row per sequence over its own run of pages."""
        num_slots, num_pages = meta.page_table.shape
        _, page_size, kv_heads, head_dim = kv.keys.shape
        longest = num_pages * page_size
        positions = torch.arange(longest, device=q.device)
        mask = (positions < meta.kv_len[:, None])[:, None, None]
        # [slots, kv_heads, slots of the run, head_dim], as views
        keys, values = (
            data.view(num_slots, -1, kv_heads, head_dim)[:, :longest].transpose(1, 2)
            for data in (kv.keys, kv.values)
        )
        queries = q.view(num_slots, kv_heads, -1, head_dim).to(keys.dtype)
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scale
        )
        out.view(queries.shape).copy_(attended)
