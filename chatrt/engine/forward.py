"""From a step's plan to its logits: the rows of every turn in one pass of the target.

Knows: planned rows, batches, the decoder.
Does not know: what is done with the logits, events, where a turn stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chatrt.batch import NO_SAMPLES, BatchRows
from chatrt.sampling import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from chatrt.batch import BatchBuilder
    from chatrt.kvcache import KVCache
    from chatrt.models.decoder import Decoder
    from chatrt.sampling import MakeSampler
    from chatrt.scheduler import PlannedRows
    from chatrt.text.tokenizer import Tokenizer

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Target:
    """The target model with all that one forward needs; samplers work on `sampling_device`."""

    decoder: Decoder
    kv: KVCache
    batches: BatchBuilder
    tokenizer: Tokenizer
    make_sampler: MakeSampler = Sampler
    sampling_device: torch.device = _CPU

    @property
    def vocab_size(self) -> int:
        """Ids that both the head and the tokenizer know; others cannot be sampled."""
        return min(self.decoder.config.vocab_size, self.tokenizer.vocab_size)

    def forward(
        self, rows: Sequence[BatchRows], feature_rows: Tensor | None = None
    ) -> list[Tensor]:
        """One pass; `[samples, vocab]` logits for each sequence.

        `feature_rows` are for the decoder's follower.
        """
        self.kv.land(page_id for one in rows for page_id in one.page_ids)
        batch = self.batches.build(rows)
        logits = self.decoder.forward(batch, self.kv, feature_rows=feature_rows)
        values = logits.values.to(self.sampling_device)  # no copy if they are there
        return [values[r.start : r.stop] for r in batch.logit_ranges]


def forward_in_passes(
    target: Target,
    rows: Sequence[BatchRows],
    observe: Callable[[Sequence[Sequence[int]], int], Tensor | None],
) -> list[Tensor]:
    """`[samples, vocab]` logits for each sequence, in as few passes as give rows their own bits.

    `observe` hears which sequences all passes have and which one is next, and says its feature
    rows.
    """
    passes = _passes([len(one.token_ids) for one in rows], target.decoder.even_rows)
    if len(passes) == 1:
        return target.forward(rows, observe(passes, 0))
    logits: dict[int, Tensor] = {}
    for part, chosen in enumerate(passes):
        found = target.forward([rows[i] for i in chosen], observe(passes, part))
        # the next pass has its logits in the same memory
        logits |= {i: values.clone() for i, values in zip(chosen, found, strict=True)}
    return [logits[i] for i in range(len(rows))]


def _passes(counts: Sequence[int], even_rows: int | None) -> list[list[int]]:
    """Which sequences, of so many rows, share a pass; None as `even_rows`: all of them.

    Those that fit into an even pass are packed into such, in order; the others, long chunks of
    prompts, share a pass beside them.
    """
    if even_rows is None or sum(counts) <= even_rows:
        return [list(range(len(counts)))]
    passes: list[list[int]] = []
    room, chunks = 0, []
    for index, count in enumerate(counts):
        if count > even_rows:
            chunks.append(index)
            continue
        if count > room:
            passes.append([])
            room = even_rows
        passes[-1].append(index)
        room -= count
    return passes + ([chunks] if chunks else [])


def batch_rows(planned: PlannedRows, drafts: Sequence[int], *, sample: bool) -> BatchRows:
    """Pending tokens and drafts of one sequence; sampled at the last pending one and each draft."""
    session = planned.entry.session
    num_pending = planned.num_rows - planned.num_drafts
    token_ids = session.token_ids[planned.start : planned.start + num_pending]
    wanted = range(num_pending - 1, num_pending + len(drafts)) if sample else NO_SAMPLES
    return BatchRows([*token_ids, *drafts], planned.start, session.page_ids, wanted)
