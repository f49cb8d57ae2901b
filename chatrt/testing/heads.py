"""A tiny random draft head, and engines that draft with it.

Knows: the shapes of a head, how a head drafter is put together. Does not know: training, files.
Invariant: the same arguments give the same weights on every machine.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from chatrt.batch import BatchBuilder
from chatrt.kvcache import KVCache
from chatrt_drafts.head import HeadDrafter
from chatrt_drafts.head_file import HeadFile, expected_shapes
from chatrt_drafts.head_network import HeadNetwork, prepare_weights
from chatrt_drafts.native_chains import find_chains

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.engine import Target
    from chatrt.models.config import ModelConfig
    from chatrt_kernels.ops import Ops


def tiny_head(
    config: ModelConfig,
    *,
    seed: int = 0,
    feature_layers: tuple[int, ...] = (0, 1),
    token_ids: Sequence[int] | None = None,
    fingerprint: str = "tiny",
) -> HeadFile:
    """A random head for a configuration that drafts `token_ids`, by default all of them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(
        hidden=config.hidden_size,
        num_features=len(feature_layers),
        q_width=config.num_heads * config.head_dim,
        kv_width=config.num_kv_heads * config.head_dim,
        intermediate=config.intermediate_size,
    )
    tensors = {
        name: torch.randn(shape, generator=generator) / math.sqrt(shape[1])
        if len(shape) == 2
        else 1 + torch.randn(shape, generator=generator) / 10
        for name, shape in shapes.items()
    }
    kept = range(config.vocab_size) if token_ids is None else token_ids
    ids = torch.tensor(list(kept), dtype=torch.int32)
    return HeadFile("tiny", fingerprint, feature_layers, ids, tensors)


def head_drafter(
    head: HeadFile, target: Target, ops: Ops, *, num_slots: int = 16, num_deferred: int = 512
) -> HeadDrafter:
    """Drafts with `head` for a target, whose passes it follows from now on; pages are NaN.

    It remembers what `num_slots - 1` sessions go on from, and has `num_deferred` rows wait.
    """
    kv, config = target.kv, target.decoder.config
    own = KVCache.allocate(
        num_layers=1,
        num_pages=kv.num_pages,
        page_size=kv.page_size,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=kv.dtype,
        device=kv.data.device,
        layout=ops.kv_layout,
    )
    own.data.fill_(float("nan"))
    weights = prepare_weights(head, target.decoder, ops, None)
    network = HeadNetwork(
        weights,
        head.feature_layers,
        target.decoder,
        ops,
        own,
        num_slots=num_slots,
        num_deferred=num_deferred,
    )
    batches = target.batches
    builder = BatchBuilder(
        batches.max_rows,
        batches.max_sequences,
        batches.max_pages_per_sequence,
        kv.page_size,
        kv.data.device,
    )
    chains = find_chains(network, own, head.token_ids.to(torch.int64), builder)
    return HeadDrafter(network, own, chains)
