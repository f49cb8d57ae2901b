"""Every Triton kernel against the reference, on whatever device there is.

Knows: ops, pages of every format, shapes of models. Does not know: times.
Invariant: both compute from the same bits; the reference does so in float32.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chatrt.device_sampling import DeviceSampler
from chatrt.params import SamplingParams
from chatrt.sampling import Sampler
from chatrt_kernels.formats import QuantFormat, QuantizedTensor, dequantize
from chatrt_kernels.kv_formats import KVFormat, quantize
from chatrt_kernels.ops import KVLayer, RowMeta
from chatrt_kernels.reference import ReferenceOps
from chatrt_kernels.triton.ops import TritonOps

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
KV_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
}
# heads, KV heads, dimensions of a head
HEADS = {"8b": (32, 8, 128), "1b": (32, 8, 64), "0.6b": (16, 8, 128), "135m": (9, 3, 64)}
_PAGE_SIZE = 16
_SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "noisy": SamplingParams(temperature=0.8),
    "filtered": SamplingParams(top_k=40, top_p=0.9, min_p=0.02, frequency_penalty=0.4),
}


@dataclass(frozen=True, slots=True)
class Parity:
    """How far a kernel is from the reference, as a share of the largest number, and how far it
    may be."""

    name: str
    error: float
    tolerance: float

    @property
    def within(self) -> bool:
        """Whether it is near enough; NaN is not."""
        return self.error <= self.tolerance


@dataclass(frozen=True, slots=True)
class Checked:
    """Where and in which type kernels are checked."""

    device: torch.device
    dtype: torch.dtype

    def randn(self, *shape: int, seed: int = 0) -> Tensor:
        """Numbers of order 1, the same on every device."""
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return values.to(self.device, self.dtype)

    def parity(self, name: str, ours: Tensor, theirs: Tensor) -> Parity:
        """The largest difference of two results."""
        largest = theirs.float().abs().max().clamp_min(1e-6)
        error = float((ours.float() - theirs.float()).abs().max() / largest)
        return Parity(name, error, TOLERANCE[self.dtype])


def check_kernels(
    device: torch.device, dtype: torch.dtype, depth: int, shapes: Iterable[str] = tuple(HEADS)
) -> Iterator[Parity]:
    """All kernels, attention with heads of `shapes`; sequences are up to `depth` tokens deep."""
    checked = Checked(device, dtype)
    yield from _rows(checked)
    yield from _products(checked)
    for shape in shapes:
        for kv in KV_DTYPES:
            yield from _attention(checked, shape, kv, depth)
    yield from _sampling(checked)


def _rows(checked: Checked) -> Iterator[Parity]:
    ops, reference = _executors(checked)
    x, y, weight = (checked.randn(7, 4096, seed=seed) for seed in range(3))
    ours, theirs = torch.empty_like(x), torch.empty_like(x, dtype=torch.float32)
    ops.rms_norm(x, weight[0], 1e-5, out=ours)
    reference.rms_norm(x.float(), weight[0].float(), 1e-5, out=theirs)
    yield checked.parity("rms_norm", ours, theirs)
    ops.swiglu(x, y, out=ours)
    reference.swiglu(x.float(), y.float(), out=theirs)
    yield checked.parity("swiglu", ours, theirs)


def _products(checked: Checked) -> Iterator[Parity]:
    ops, _ = _executors(checked)
    for name, num_halves in ((QuantFormat.Q8_0, 1), (QuantFormat.Q4_1, 2)):
        seed = zlib.crc32(name.value.encode())
        generator = torch.Generator().manual_seed(seed)
        blocks = torch.randint(
            0, 256, (384, 1024 // 32, name.bytes_per_block), generator=generator, dtype=torch.uint8
        )
        halves = torch.rand(384, 1024 // 32, num_halves, generator=generator) / 64
        blocks[..., : 2 * num_halves] = halves.half().view(torch.uint8)
        matrix = QuantizedTensor(name, blocks.flatten(1), (384, 1024))
        values = dequantize(matrix).to(checked.device)
        for rows in (1, 5, 33, 200):
            x = checked.randn(rows, 1024, seed=rows)
            ours = torch.empty(rows, 384, device=checked.device, dtype=checked.dtype)
            ops.linear(x, ops.prepare(matrix), None, out=ours)
            yield checked.parity(f"linear {name.value}, {rows} rows", ours, x.float() @ values.T)


def _attention(checked: Checked, shape: str, kv: str, depth: int) -> Iterator[Parity]:
    heads, kv_heads, head_dim = HEADS[shape]
    ops, reference = _executors(checked)
    sequences = [(1, depth), (5, depth // 2 + 3), (1, 1), (8, 8)]
    meta = _meta(sequences, checked.device)
    rows = int(meta.q_start[-1])
    widths = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    q, k, v = (checked.randn(rows, width, seed=width + i) for i, width in enumerate(widths))
    angles = torch.outer(torch.arange(depth).float(), torch.linspace(1, 0.01, head_dim // 2))
    rope = torch.cat((angles.cos(), angles.sin()), dim=1).to(checked.device)
    ours = _pages(checked, sequences, (kv_heads, head_dim), KV_DTYPES[kv])
    theirs = KVLayer(*(None if t is None else t.clone() for t in _tensors(ours)))  # type: ignore[arg-type]
    turned, expected = torch.empty_like(q), torch.empty_like(q, dtype=torch.float32)
    ops.rope_and_write_kv(q, k, v, rope, meta, ours, out=turned)
    reference.rope_and_write_kv(q.float(), k.float(), v.float(), rope, meta, theirs, out=expected)
    yield checked.parity(f"rope {shape}, {kv} pages", turned, expected)
    for phase, executor in (("decode", ops), ("prefill", _large_tiles(checked))):
        out, attended = torch.empty_like(q), torch.empty_like(q, dtype=torch.float32)
        executor.paged_attention(turned, meta, ours, head_dim**-0.5, out=out)
        reference.paged_attention(turned.float(), meta, ours, head_dim**-0.5, out=attended)
        yield checked.parity(f"attention {shape}, {kv} pages, {phase}", out, attended)


def _sampling(checked: Checked) -> Iterator[Parity]:
    logits = checked.randn(5, 128_256, seed=4) * 3
    for name, params in _SAMPLINGS.items():
        known = {"seed": 3, "vocab_size": 128_256, "prompt_ids": [1, 2, 3]}
        host = Sampler(params, **known)  # type: ignore[arg-type]
        device = DeviceSampler(params, **known, device=checked.device)  # type: ignore[arg-type]
        rows, own = logits.float().cpu(), list[int]()
        for i in range(4):
            own.append(host.sample(rows[i], position=9 + i, drafts_before=own))
        chosen = device.choose_rows(logits, own, position=9)
        wrong = sum(a != b for a, b in zip(chosen, own, strict=False))
        yield Parity(f"sample {name}", float(wrong), 0.0)


def _executors(checked: Checked) -> tuple[TritonOps, ReferenceOps]:
    ops = TritonOps(checked.dtype, checked.device)
    return ops, ReferenceOps(torch.float32, checked.device)


def _large_tiles(checked: Checked) -> TritonOps:
    """An executor for which every pass is a prefill."""
    return TritonOps(checked.dtype, checked.device, even_rows=0)


def _meta(sequences: list[tuple[int, int]], device: torch.device) -> RowMeta:
    """Rows at the last positions of sequences that lie on pages one after the other."""
    tables, positions, slots, first = [], [], [], 0
    most = max(-(-kv_len // _PAGE_SIZE) for _, kv_len in sequences)
    for rows, kv_len in sequences:
        count = -(-kv_len // _PAGE_SIZE)
        # backwards, so that no kernel is right by reading straight on
        table = list(range(first + count - 1, first - 1, -1))
        tables.append(table + [0] * (most - count))
        for position in range(kv_len - rows, kv_len):
            positions.append(position)
            page, offset = divmod(position, _PAGE_SIZE)
            slots.append(table[page] * _PAGE_SIZE + offset)
        first += count
    starts = torch.tensor([0, *(rows for rows, _ in sequences)]).cumsum(0)
    ids = torch.zeros(len(positions), dtype=torch.int64, device=device)
    return RowMeta(
        token_ids=ids,
        positions=torch.tensor(positions, device=device),
        write_slots=torch.tensor(slots, device=device),
        page_table=torch.tensor(tables, dtype=torch.int32, device=device),
        q_start=starts.to(device, torch.int32),
        kv_len=torch.tensor([n for _, n in sequences], dtype=torch.int32, device=device),
    )


def _pages(
    checked: Checked, sequences: list[tuple[int, int]], heads: tuple[int, int], dtype: torch.dtype
) -> KVLayer:
    """Pages in which every slot has been written."""
    num_pages = sum(-(-kv_len // _PAGE_SIZE) for _, kv_len in sequences)
    made = []
    for seed in (11, 12):
        numbers = checked.randn(num_pages, _PAGE_SIZE, *heads, seed=seed)
        made.append(quantize(numbers, dtype))
    (keys, key_scales), (values, value_scales) = made
    assert (key_scales is None) == (KVFormat.of(dtype) is KVFormat.FLOAT)
    return KVLayer(keys, values, key_scales, value_scales)


def _tensors(kv: KVLayer) -> tuple[Tensor | None, ...]:
    return (kv.keys, kv.values, kv.key_scales, kv.value_scales)
