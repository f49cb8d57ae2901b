"""The op interface in plain PyTorch: the oracle for every other executor, on any device.

Knows: dense weights, ragged rows, pages, scales of quantised KV.
Does not know: sessions, models, graphs, fused kernels.
Invariant: sequence metadata is read from the tensors at each call; a position at or behind a
sequence's `kv_len` is never read into a result, whatever bits lie there.
Invariant: a row depends on its own sequence only; batching and chunking change it by rounding.
Cost: weights dequantised once, so 4 bytes per weight in float32. Attention copies the keys and
values of scattered pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from chatrt_kernels import kv_formats
from chatrt_kernels.formats import QuantizedTensor, dequantize
from chatrt_kernels.ops import DirectProgram, KVLayout
from chatrt_kernels.pages import movable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt_kernels.ops import Describe, ForwardInputs, KVLayer, RowMeta, Weight

# Decoding sequences are padded into batches of at most this many pages (3 MiB of the default
# model's float32 keys): larger copies fall out of the caches and lose to one call per sequence.
_MAX_BATCH_PAGES = 256
_FEW_ROWS = 8


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A dequantised matrix; `matrix` is `[out_features, in_features]`, `transposed` its view."""

    matrix: Tensor
    transposed: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """`(out_features, in_features)`."""
        out_features, in_features = self.matrix.shape
        return out_features, in_features

    @property
    def num_bytes(self) -> int:
        """Bytes of the dense matrix."""
        return self.matrix.numel() * self.matrix.element_size()


class ReferenceOps:
    """Implements `chatrt_kernels.ops.Ops` with weights and activations in `dtype` on `device`.

    Norms, rotations and softmax are computed in float32 or wider whatever `dtype` is.
    """

    name = "reference"
    kv_layout = KVLayout.ROWS
    even_rows = None
    wide_buffers = False

    def __init__(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        self.dtype = dtype
        self.device = torch.device(device)

    def prepare(
        self,
        weight: QuantizedTensor | Tensor,
        *,
        sensitive: bool = False,
        first_rows: Tensor | None = None,
    ) -> DenseWeight:
        """Dequantise (or convert) a matrix `[out_features, in_features]` once, onto the device."""
        del sensitive, first_rows  # activations are not rounded, and `restrict` copies
        if isinstance(weight, QuantizedTensor):
            matrix = dequantize(weight, self.dtype).to(self.device)
        else:
            matrix = weight.to(device=self.device, dtype=self.dtype).contiguous()
        return DenseWeight(matrix, matrix.t())

    def restrict(self, weight: Weight, rows: Tensor) -> DenseWeight:
        """A copy of rows int64 `[n]`, in this order."""
        matrix = _dense(weight).matrix.index_select(0, rows.to(self.device))
        return DenseWeight(matrix, matrix.t())

    def compile(
        self, describe: Describe, largest: ForwardInputs, outputs: Sequence[Tensor]
    ) -> DirectProgram:
        """The description itself, run call by call."""
        del largest, outputs  # nothing is recorded
        return DirectProgram(describe, self)

    def embed(self, weight: Weight, token_ids: Tensor, *, out: Tensor) -> None:
        """out[r] = weight[token_ids[r]]."""
        torch.index_select(_dense(weight).matrix, 0, token_ids, out=out)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, *, out: Tensor) -> None:
        """out = x @ weight.T + bias; out must not overlap x."""
        if x.device.type == "cpu" and x.shape[0] <= _FEW_ROWS:
            _multiply_few_rows(x, _dense(weight).matrix, out=out)
            if bias is not None:
                out += bias
        elif bias is None:
            torch.mm(x, _dense(weight).transposed, out=out)
        else:
            torch.addmm(bias, x, _dense(weight).transposed, out=out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> None:
        """out = x / rms(x) * weight, over the last dimension; out may be x."""
        wide = _widen(x)
        inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        torch.mul(wide * inverse, weight, out=out)

    def add(self, x: Tensor, y: Tensor, *, out: Tensor) -> None:
        """out = x + y; out may be either."""
        torch.add(x, y, out=out)

    def swiglu(self, gate: Tensor, up: Tensor, *, out: Tensor) -> None:
        """out = silu(gate) * up; out may be either."""
        torch.mul(functional.silu(gate), up, out=out)

    def gather_rows(self, x: Tensor, rows: Tensor, *, out: Tensor) -> None:
        """out[i] = x[rows[i]]; out must not overlap x."""
        torch.index_select(x, 0, rows, out=out)

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
        """Rotate q into `out` (which may be q) and k into the cache, where v follows unrotated."""
        num_rows = q.shape[0]
        kv_heads, head_dim = kv.kv_heads, kv.head_dim
        num_heads = q.shape[1] // head_dim
        angles = rope.index_select(0, meta.positions).view(num_rows, 1, 2, head_dim // 2)
        turned = _rotated(torch.cat((q, k), dim=1), angles)
        if kv_formats.KVFormat.of(kv.keys.dtype).turns_keys:
            turned = kv_formats.turn(turned)
        out.view(num_rows, num_heads, head_dim).copy_(turned[:, :num_heads])
        _write_rows(turned[:, num_heads:], meta.write_slots, kv.keys, kv.key_scales)
        rows = v.view(num_rows, kv_heads, head_dim)
        _write_rows(rows, meta.write_slots, kv.values, kv.value_scales)

    def paged_attention(
        self, q: Tensor, meta: RowMeta, kv: KVLayer, scale: float, *, out: Tensor
    ) -> None:
        """Causal attention of ragged rows; rows behind `q_start[-1]` (padding) become 0.

        Decoding sequences (one row each) of similar length run as one padded batch, all others one
        after the other. out must not overlap q.
        """
        starts: list[int] = meta.q_start.tolist()
        lengths: list[int] = meta.kv_len.tolist()
        page_size = kv.keys.shape[1]
        for group in _group_sequences(starts, lengths, page_size):
            if len(group) > 1:
                _attend_batch(q, meta, group, kv, scale, out=out)
                continue
            (sequence,) = group
            rows = slice(starts[sequence], starts[sequence + 1])
            kv_len = lengths[sequence]
            page_ids = meta.page_table[sequence, : _num_pages(kv_len, page_size)]
            _attend_sequence(q[rows], page_ids, kv_len, kv, scale, out=out[rows])
        if starts[-1] < out.shape[0]:
            out[starts[-1] :] = 0


def _multiply_few_rows(x: Tensor, matrix: Tensor, *, out: Tensor) -> None:
    """out = x @ matrix.T with the matrix on the left.

    The CPU library has a fast path for a matrix times two to eight columns, but none for one: all
    products of the default model take 20 ms with two columns, 45 ms with one or the other way
    round. So a single row goes twice.
    """
    num_rows = x.shape[0]
    columns = (x if num_rows > 1 else x.repeat(2, 1)).t()
    out.copy_(torch.mm(matrix, columns)[:, :num_rows].t())


def _dense(weight: Weight) -> DenseWeight:
    assert isinstance(weight, DenseWeight), f"{type(weight).__name__} is another executor's weight"
    return weight


def _widen(x: Tensor) -> Tensor:
    """The tensor in the dtype in which it is computed with: float32 at least."""
    return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """A new tensor `[rows, heads, head_dim]`: x `[rows, heads * head_dim]` turned by its angles.

    `angles` is `[rows, 1, 2, head_dim / 2]`: cosines, sines.
    """
    num_rows, _, _, half = angles.shape
    pairs = _widen(x).view(num_rows, x.shape[1] // (2 * half), 2, half)
    cos, sin = angles.unbind(2)
    first, second = pairs.unbind(2)
    turned = pairs * cos.unsqueeze(2)
    turned[:, :, 0].addcmul_(second, sin, value=-1)
    turned[:, :, 1].addcmul_(first, sin)
    return turned.flatten(2)


def _write_rows(rows: Tensor, slots: Tensor, data: Tensor, scales: Tensor | None) -> None:
    """Write rows `[rows, kv_heads, head_dim]` to their slots, as the pages store them."""
    stored, row_scales = kv_formats.quantize(rows, data.dtype)
    _write_slots(movable(data), slots, movable(stored))
    if scales is not None:
        assert row_scales is not None
        _write_slots(scales, slots, row_scales)


def _write_slots(pages: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Put rows `[rows, …]` into pages `[num_pages, page_size, …]`, however these lie."""
    page_size = pages.shape[1]
    if pages.stride(0) == page_size * pages.stride(1):
        pages.view(-1, *pages.shape[2:]).index_copy_(0, slots, rows)
    else:
        pages[slots // page_size, slots % page_size] = rows


def _select_pages(data: Tensor, page_ids: Tensor) -> Tensor:
    """The pages `[len(page_ids), …]`: a view where their ids ascend one by one, else a copy."""
    ids: list[int] = page_ids.tolist()
    first, end = ids[0], ids[0] + len(ids)
    # a session that grew alone lies in one piece, and copying its keys would double the time
    if ids == list(range(first, end)):
        return data[first:end]
    return movable(data).index_select(0, page_ids).view(data.dtype)


def _as_rows(pages: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Selected pages, dequantised where there are scales: `[slots, kv_heads, head_dim]`."""
    return kv_formats.dequantize(pages, scales, dtype).flatten(0, 1)


def _num_pages(kv_len: int, page_size: int) -> int:
    return -(-kv_len // page_size)


def _group_sequences(starts: list[int], lengths: list[int], page_size: int) -> list[list[int]]:
    """Sequences with rows, in groups: a group of several is worth one padded batch.

    Such a group holds sequences of one row each whose page counts are within a factor of two.
    """
    groups: list[list[int]] = []
    decoding: dict[int, list[int]] = {}
    for sequence, kv_len in enumerate(lengths):
        num_rows = starts[sequence + 1] - starts[sequence]
        assert kv_len >= num_rows, f"sequence {sequence}: {num_rows} rows, but {kv_len=}"
        if num_rows == 1:
            size_class = (_num_pages(kv_len, page_size) - 1).bit_length()
            decoding.setdefault(size_class, []).append(sequence)
        elif num_rows:
            groups.append([sequence])
    for size_class, members in decoding.items():
        count = max(1, _MAX_BATCH_PAGES >> size_class)
        groups.extend(members[i : i + count] for i in range(0, len(members), count))
    return groups


def _attend_sequence(
    q: Tensor, page_ids: Tensor, kv_len: int, kv: KVLayer, scale: float, *, out: Tensor
) -> None:
    """The rows `[rows, heads * head_dim]` of one sequence, at its last positions."""
    num_rows, kv_heads, head_dim = q.shape[0], kv.kv_heads, kv.head_dim
    # [kv_heads, heads per kv head, rows, head_dim]; a kv head is repeated by stride 0, not copied
    queries = q.view(num_rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    shape = (kv_heads, queries.shape[1], kv_len, head_dim)
    keys, values = (
        _as_rows(
            _select_pages(data, page_ids),
            None if scales is None else _select_pages(scales, page_ids),
            q.dtype,
        )[:kv_len]
        .transpose(0, 1)[:, None]
        .expand(shape)
        for data, scales in ((kv.keys, kv.key_scales), (kv.values, kv.value_scales))
    )
    mask = None
    if 1 < num_rows < kv_len:
        positions = torch.arange(kv_len, device=q.device)
        mask = positions <= positions[kv_len - num_rows :, None]
    attended = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=1 < num_rows == kv_len, scale=scale
    )
    out.view(num_rows, kv_heads, -1, head_dim).copy_(attended.permute(2, 0, 1, 3))


def _attend_batch(
    q: Tensor, meta: RowMeta, sequences: list[int], kv: KVLayer, scale: float, *, out: Tensor
) -> None:
    """One row for each of several sequences, padded to the longest of them."""
    chosen = torch.tensor(sequences, device=q.device)
    rows = meta.q_start.index_select(0, chosen).to(torch.int64)
    lengths = meta.kv_len.index_select(0, chosen)
    page_size, kv_heads, head_dim = kv.keys.shape[1], kv.kv_heads, kv.head_dim
    num_pages = _num_pages(int(lengths.max()), page_size)
    page_ids = meta.page_table[chosen, :num_pages].flatten()
    mask = torch.arange(num_pages * page_size, device=q.device) < lengths[:, None]
    # padding is overwritten before any arithmetic: NaN there would survive a product with 0
    padding = mask.logical_not().flatten().nonzero().flatten()
    keys, values = (
        _as_rows(
            movable(data).index_select(0, page_ids).view(data.dtype),
            None if scales is None else scales.index_select(0, page_ids),
            q.dtype,
        )
        .index_fill_(0, padding, 0)
        .view(len(sequences), -1, kv_heads, head_dim)
        .transpose(1, 2)
        for data, scales in ((kv.keys, kv.key_scales), (kv.values, kv.value_scales))
    )
    queries = q.index_select(0, rows).view(len(sequences), kv_heads, -1, head_dim)
    attended = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask[:, None, None], scale=scale
    )
    out.index_copy_(0, rows, attended.flatten(1))
