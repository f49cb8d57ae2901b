"""The op interface: the few calls in which a decoder layer is written, on static buffers.

Knows: tensors, rows, pages as integers. Does not know: sessions, models, sampling.
Invariant: every op writes into `out=` (or in place into a KV cache) and reads its sequence metadata
from integer tensors, so that a recording of the calls can be replayed with new contents.

Executors: `reference.ReferenceOps` (PyTorch, any device; the oracle), `cpu.NativeOps` (C++ on a
CPU) and `triton.TritonOps` (a GPU); these two record a forward once and replay it as one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol, TypeAlias

from chatrt_kernels.kv_formats import KVFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from chatrt_kernels.formats import QuantizedTensor


@dataclass(frozen=True, slots=True)
class RowMeta:
    """Where the rows of one ragged forward belong. All tensors are integer, on the op's device.

    Sequence s owns the rows `[q_start[s], q_start[s + 1])`; they sit at the *last* positions of its
    `kv_len[s]` positions, causally. Page p at index i of its page table holds positions
    `[page_size * i, page_size * (i + 1))`. A sequence without rows is allowed (its `kv_len` may be
    0). Rows behind `q_start[-1]` are padding: they must write to a slot that no sequence reads, and
    what the ops leave in them means nothing.
    """

    token_ids: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    write_slots: Tensor  # int64 [rows], page_id * page_size + offset
    page_table: Tensor  # int32 [sequences, max_pages], entries past the end are 0
    q_start: Tensor  # int32 [sequences + 1]
    kv_len: Tensor  # int32 [sequences], rows of this forward included


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """All that changes from one forward to the next, as integer tensors.

    `logit_rows` int64 `[num_logit_rows]` and `feature_rows` int64 `[num_feature_rows]` choose among
    the rows. No sequence has more than `num_positions` positions; None where that is not known.
    """

    meta: RowMeta
    logit_rows: Tensor
    feature_rows: Tensor
    num_positions: int | None = None


class KVLayout(Enum):
    """How the numbers of a page lie; an executor states the one that it reads.

    ROWS: token by token, `[page_size, kv_heads, head_dim]`.
    HEADS: head by head, values as `[kv_heads, page_size, head_dim]` and keys transposed,
    `[kv_heads, head_dim, page_size]`: one load gives a dimension of 16 keys.
    """

    ROWS = "rows"
    HEADS = "heads"


@dataclass(frozen=True, slots=True)
class KVLayer:
    """The paged keys and values of one layer, in a format of `kv_formats`.

    `keys`, `values`: `[num_pages, page_size, kv_heads, stored_width]`, with the strides of the
    cache's `KVLayout`; `stored_width` is `head_dim`, half of it for 4 bits. The scales, present for
    quantised formats only, are `[num_pages, page_size, kv_heads, …]`, with the format's shape at
    their end.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @property
    def kv_heads(self) -> int:
        """Heads of keys and of values."""
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.keys.shape[3] * KVFormat.of(self.keys.dtype).codes_per_byte


class Weight(Protocol):
    """What an executor made of a weight matrix at load time; opaque to everyone else."""

    @property
    def shape(self) -> tuple[int, int]:
        """`(out_features, in_features)`."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds resident, those that it shares with another weight left out."""
        ...


class Program(Protocol):
    """A forward that can be run again and again on the same buffers."""

    def run(self, inputs: ForwardInputs) -> None:
        """All ops in order, on the rows of `inputs`."""
        ...

    def profile(self, inputs: ForwardInputs) -> dict[str, float] | None:
        """Run once and return milliseconds by family of ops; None, and no run, if it cannot."""
        ...


class Calls(Protocol):
    """The calls. Shapes: x `[rows, features]`; q `[rows, heads * head_dim]`, k and v likewise.

    `out` has the shape of the result and may be an input itself in `rms_norm`, `add`, `swiglu` and
    (as q) `rope_and_write_kv`; elsewhere it must not overlap one. No other argument is changed.
    Rows may lie apart, as columns of a wider buffer do.
    """

    def embed(self, weight: Weight, token_ids: Tensor, *, out: Tensor) -> None:
        """out[r] = weight[token_ids[r]]."""
        ...

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, *, out: Tensor) -> None:
        """out = x @ weight.T + bias."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> None:
        """out = x / rms(x) * weight, over the last dimension."""
        ...

    def add(self, x: Tensor, y: Tensor, *, out: Tensor) -> None:
        """out = x + y (the residual stream; out may be x)."""
        ...

    def rope_and_write_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: Tensor,
        meta: RowMeta,
        kv: KVLayer,
        *,
        out: Tensor,
    ) -> None:
        """Rotate q into `out` and k, then write k and v to `meta.write_slots` of the cache.

        Whoever wants keys and values only gives q and `out` 0 columns.

        `rope` is `[max_positions, head_dim]`: cosines of the head_dim / 2 angles, then their sines.
        Rotation pairs dimension i with i + head_dim / 2 (the "neox" order). Layers without rotation
        pass cosines of 1 and sines of 0. Where the cache has scales, each head's row is quantised.
        """
        ...

    def paged_attention(
        self, q: Tensor, meta: RowMeta, kv: KVLayer, scale: float, *, out: Tensor
    ) -> None:
        """Causal attention of ragged rows over their sequences' pages; heads may share KV heads."""
        ...

    def swiglu(self, gate: Tensor, up: Tensor, *, out: Tensor) -> None:
        """out = silu(gate) * up."""
        ...

    def gather_rows(self, x: Tensor, rows: Tensor, *, out: Tensor) -> None:
        """out[i] = x[rows[i]]: the rows whose logits (or hidden states) are wanted.

        In a program `rows` are the inputs' `logit_rows` or `feature_rows`. They may choose among
        the rows of any buffer, which may have more rows than the forward.
        """
        ...


Describe: TypeAlias = "Callable[[Calls, ForwardInputs], None]"


class Ops(Calls, Protocol):
    """An executor: the calls, each computed at once, and whole forwards."""

    name: str
    kv_layout: KVLayout
    wide_buffers: bool  # whether results of matrices over one input had better lie side by side

    @property
    def even_rows(self) -> int | None:
        """Rows up to which a pass gives each the same bits whatever else is in it.

        None where all passes do, or none does.
        """
        ...

    def prepare(
        self,
        weight: QuantizedTensor | Tensor,
        *,
        sensitive: bool = False,
        first_rows: Tensor | None = None,
    ) -> Weight:
        """Turn a matrix `[out_features, in_features]` into the executor's own form, once.

        `sensitive`: errors of its products weigh more than others' (queries, keys, values, logits);
        an executor that rounds activations rounds them less there.

        `first_rows`, distinct numbers int64 `[n]` in main memory: rows that `restrict` will be
        asked for. An executor may have them lie first in memory. All rows keep their numbers, and
        every result its bits.
        """
        ...

    def restrict(self, weight: Weight, rows: Tensor) -> Weight:
        """A weight `[n, in_features]` of the rows int64 `[n]` of another, in this order.

        Its products are those of the whole weight, on the native path bit for bit. Where `weight`
        was prepared with these first rows, in any order, it may share their memory, else it is a
        copy.

        Raises:
            ValueError: The executor cannot copy, and other rows lie first.
        """
        ...

    def compile(
        self, describe: Describe, largest: ForwardInputs, outputs: Sequence[Tensor]
    ) -> Program:
        """Make a program of the calls that `describe` makes.

        `largest` has as many rows of each sort as any run will have; `outputs` are the buffers that
        are read behind a run. All other buffers are scratch: what they hold afterwards means
        nothing.
        """
        ...


class DirectProgram:
    """Implements `Program` by describing the forward anew to the executor in every run."""

    def __init__(self, describe: Describe, ops: Calls) -> None:
        self._describe = describe
        self._ops = ops

    def run(self, inputs: ForwardInputs) -> None:
        """All ops in order, on the rows of `inputs`."""
        self._describe(self._ops, inputs)

    def profile(self, inputs: ForwardInputs) -> None:
        """None: ops that a device runs in its own time cannot be told apart from here."""
