"""From stored rows to what a training step reads: windows of rows, and labels of answer rows.

Knows: rows, the tokens that the head can draft, how labels are cut down to them.
Does not know: the network, losses, where rows came from.
Invariant: a window's rows lie behind each other in the store, across conversations; who may see
whom follows from the positions.
Cost: one gather of features for each row, 4.6 kB for the default model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chatrt_drafts.training.module import Window, normalise
from chatrt_drafts.training.store import ANSWER

if TYPE_CHECKING:
    from torch import Tensor

    from chatrt.models.loader import Model
    from chatrt_drafts.training.store import Rows
    from chatrt_kernels.ops import Ops, Weight

_LEAST_MASS = 1e-3  # of the kept tokens in a label, below which the row teaches nothing
_CHUNK_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The tokens that a head drafts: ids int64 `[n]`, most frequent first.

    `index_of` int64 `[vocab]` is the place of a token in `ids`, or -1. `head_rows` `[n, hidden]`
    are the target's own rows, `embeddings` `[vocab, hidden]` its normalised embeddings.
    """

    ids: Tensor
    index_of: Tensor
    head_rows: Tensor
    embeddings: Tensor


@dataclass(frozen=True, slots=True)
class Labels:
    """What answer rows teach: `places` int64 `[n]` in the flattened window.

    `indexes` int64 `[n, top]` count in the kept tokens, `probs` `[n, top]` add up to 1 and are 0
    for tokens that are not kept. `depth` int64 `[n]` counts the rows of the same conversation in
    front, inside the window: step s is real where it is at least s - 1.
    """

    places: Tensor
    indexes: Tensor
    probs: Tensor
    depth: Tensor


def keep_tokens(
    ids: Tensor, model: Model, ops: Ops, *, dtype: torch.dtype, device: torch.device
) -> KeptTokens:
    """Gather from the target what goes with these tokens; `dtype` is what is computed in."""
    weights, config = model.weights, model.config
    every = torch.arange(config.vocab_size, device=device)
    index_of = torch.full((config.vocab_size,), -1, dtype=torch.int64, device=device)
    index_of[ids] = torch.arange(len(ids), device=device)
    norm = weights.final_norm
    embeddings = _rows_of(ops, weights.embedding, every, norm)
    return KeptTokens(
        ids=ids,
        index_of=index_of,
        head_rows=_rows_of(ops, weights.head, ids, norm).to(dtype),
        embeddings=normalise(embeddings, config.rms_norm_eps).to(dtype),
    )


def count_tokens(rows: Rows, vocab_size: int) -> Tensor:
    """How often each token is expected in answers, float64 `[vocab]`.

    The target's own probabilities count beside what was written, so rare tokens are told apart.
    """
    device = rows.ids.device
    counts = torch.zeros(vocab_size, dtype=torch.float64, device=device)
    for start in range(0, len(rows), _CHUNK_ROWS):
        part = rows.part(start, start + _CHUNK_ROWS)
        chosen = (part.ids[:, 3] & ANSWER).nonzero().flatten()
        top_ids, probs = part.top_ids[chosen], part.top_logprobs[chosen].double().exp()
        counts.index_add_(0, top_ids.flatten().long(), probs.flatten())
        written = part.ids[chosen, 1].long()
        counts.index_add_(0, written, torch.ones_like(written, dtype=torch.float64))
    return counts


class WindowReader:
    """Reads windows of one store, onto `device`, in `dtype`, without waiting for the device."""

    def __init__(
        self, rows: Rows, kept: KeptTokens, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.rows = rows
        self.kept = kept
        self._device = device
        self._dtype = dtype
        # on the host, since how many rows of a window are answers decides shapes
        self._is_answer = ((rows.ids[:, 3] & ANSWER) != 0).cpu()

    def read(self, starts: Tensor, num_rows: int) -> tuple[Window, Labels]:
        """The windows `[starts[i], starts[i] + num_rows)`; `starts` int64, on the host.

        Rows behind the store's last one repeat it.
        """
        rows, device = self.rows, self._device
        on_host = (starts[:, None] + torch.arange(-1, num_rows)).clamp_(0, len(rows) - 1)
        answers = self._is_answer[on_host[:, 1:].flatten()].nonzero().flatten()
        stored = _sent(on_host[:, 1:].flatten()[answers], rows.ids.device)
        places, answers = _sent(on_host, rows.ids.device), _sent(answers, device)
        ids = rows.ids[places[:, 1:]].to(device)
        positions = ids[..., 2].long()
        first = positions == 0
        window = Window(
            features=rows.features[places[:, :-1]].to(device, self._dtype),
            known=~first,
            embedded=self.kept.embeddings[ids[..., 0].long()],
            positions=positions,
            conversations=first.cumsum(1),
        )
        indexes = self.kept.index_of[rows.top_ids[stored].to(device).long()]
        probs = rows.top_logprobs[stored].to(device).float().exp()
        probs = probs * (indexes >= 0)
        mass = probs.sum(-1, keepdim=True)
        probs = probs / mass.clamp_min(_LEAST_MASS) * (mass >= _LEAST_MASS)
        depth = _depth(first).flatten()[answers]
        return window, Labels(answers, indexes.clamp_min(0), probs, depth)


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device, where work that was queued before need not be done yet."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _depth(first: Tensor) -> Tensor:
    """int64 `[windows, rows]`: rows since the conversation's first one, or the window's."""
    rows = torch.arange(first.shape[1], device=first.device)
    return rows - (rows * first).cummax(dim=1).values


def _rows_of(ops: Ops, weight: Weight, ids: Tensor, like: Tensor) -> Tensor:
    """Rows of a matrix that only its executor can read, `[len(ids), in_features]`."""
    out = torch.empty(len(ids), weight.shape[1], dtype=like.dtype, device=like.device)
    for start in range(0, len(ids), _CHUNK_ROWS):
        part = slice(start, start + _CHUNK_ROWS)
        ops.embed(weight, ids[part].to(like.device), out=out[part])
    return out
