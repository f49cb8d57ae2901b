"""From a step's plan to its logits: the rows of every turn in one pass of the target.

Knows: planned rows, batches, the decoder.
Does not know: what is done with the logits, events, where a turn stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatrt.batch import NO_SAMPLES, BatchRows
from chatrt.sampling import Sampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from chatrt.batch import BatchBuilder
    from chatrt.kvcache import KVCache
    from chatrt.models.decoder import Decoder
    from chatrt.sampling import MakeSampler
    from chatrt.scheduler import PlannedRows
    from chatrt.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Target:
    """The target model with all that one forward needs."""

    decoder: Decoder
    kv: KVCache
    batches: BatchBuilder
    tokenizer: Tokenizer
    make_sampler: MakeSampler = Sampler

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
        batch = self.batches.build(rows)
        logits = self.decoder.forward(batch, self.kv, feature_rows=feature_rows)
        values = logits.values.cpu()  # where the sampler works; no copy on a CPU
        return [values[r.start : r.stop] for r in batch.logit_ranges]


def batch_rows(planned: PlannedRows, drafts: Sequence[int], *, sample: bool) -> BatchRows:
    """Pending tokens and drafts of one sequence; sampled at the last pending one and each draft."""
    session = planned.entry.session
    num_pending = planned.num_rows - planned.num_drafts
    token_ids = session.token_ids[planned.start : planned.start + num_pending]
    wanted = range(num_pending - 1, num_pending + len(drafts)) if sample else NO_SAMPLES
    return BatchRows([*token_ids, *drafts], planned.start, session.page_ids, wanted)
