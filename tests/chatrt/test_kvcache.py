from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chatrt.errors import ModelError
from chatrt.kvcache import KVCache, MemoryPlan, format_bytes, plan_memory
from chatrt.session import PageCopy
from chatrt_kernels.page_moves import MakePageMoves, TorchPageMoves
from chatrt_kernels.reference import ReferenceOps
from chatrt_kernels.triton.page_moves import TritonPageMoves
from tests.chatrt_kernels.ragged import Shape, ragged

DTYPES = [torch.float32, torch.bfloat16, torch.int8]
# None: as on a CPU, one copy after the other
MOVES: list[MakePageMoves | None] = [None, TorchPageMoves, TritonPageMoves]


def cache(dtype: torch.dtype = torch.float32, *, num_pages: int = 5) -> KVCache:
    """Two layers of pages of 4 tokens, filled with values that all differ (as far as dtypes go)."""
    kv = KVCache.allocate(
        num_layers=2,
        num_pages=num_pages,
        page_size=4,
        kv_heads=3,
        head_dim=8,
        dtype=dtype,
        device="cpu",
    )
    kv.data.copy_(torch.arange(kv.data.numel()).view(kv.data.shape) % 127)
    if kv.scales is not None:
        kv.scales.copy_(torch.arange(kv.scales.numel()).view(kv.scales.shape))
    return kv


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_are_views_of_the_one_tensor(dtype: torch.dtype) -> None:
    kv = cache(dtype)

    layer = kv.layer(1)
    layer.keys[3, 2].fill_(7)
    layer.values[4, 1].fill_(9)

    assert layer.keys.shape == layer.values.shape == (5, 4, 3, 8)
    assert (kv.data[1, 0, 3, 2] == 7).all()
    assert (kv.data[1, 1, 4, 1] == 9).all()
    assert kv.layer(1) is layer


def test_only_quantised_caches_have_scales_one_per_token_and_head() -> None:
    plain, quantised = cache().layer(0), cache(torch.int8).layer(0)

    assert plain.key_scales is None
    assert plain.value_scales is None
    assert quantised.key_scales is not None
    assert quantised.value_scales is not None
    assert quantised.key_scales.shape == quantised.value_scales.shape == (5, 4, 3)
    assert quantised.key_scales.dtype == torch.float32


def test_scales_are_views_of_their_layers_keys_and_values() -> None:
    kv = cache(torch.int8)
    assert kv.scales is not None

    for index in (0, 1):
        layer = kv.layer(index)
        assert layer.key_scales is not None
        assert layer.value_scales is not None
        assert layer.key_scales.data_ptr() == kv.scales[index, 0].data_ptr()
        assert layer.value_scales.data_ptr() == kv.scales[index, 1].data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_per_page_are_those_that_a_page_really_takes(dtype: torch.dtype) -> None:
    kv = cache(dtype)

    per_page = KVCache.bytes_per_page(
        num_layers=2, page_size=4, kv_heads=3, head_dim=8, dtype=dtype
    )

    assert per_page * kv.num_pages == kv.num_bytes
    assert kv.num_bytes == kv.data.nbytes + (0 if kv.scales is None else kv.scales.nbytes)


def moved_by(kv: KVCache, make: MakePageMoves | None) -> KVCache:
    if make is not None:
        kv.move_pages_by(make)
    return kv


@pytest.mark.parametrize("make", MOVES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_copied_rows_reach_every_layer_keys_values_and_scales(
    dtype: torch.dtype, make: MakePageMoves | None
) -> None:
    kv, before = moved_by(cache(dtype), make), cache(dtype)

    kv.copy_rows([PageCopy(src=1, dst=3, num_rows=2), PageCopy(src=0, dst=4, num_rows=4)])

    for now, old in ((kv.data, before.data), (kv.scales, before.scales)):
        if now is not None and old is not None:
            assert torch.equal(now[:, :, 3, :2], old[:, :, 1, :2])
            assert torch.equal(now[:, :, 3, 2:], old[:, :, 3, 2:])
            assert torch.equal(now[:, :, 4], old[:, :, 0])
            assert torch.equal(now[:, :, :3], old[:, :, :3])


@pytest.mark.parametrize("make", MOVES)
def test_copies_are_done_in_order(make: MakePageMoves | None) -> None:
    kv, before = moved_by(cache(), make), cache()

    kv.copy_rows([PageCopy(src=0, dst=1, num_rows=4), PageCopy(src=1, dst=2, num_rows=4)])

    assert torch.equal(kv.data[:, :, 2], before.data[:, :, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_gathered_from_one_cache_can_be_scattered_into_another(dtype: torch.dtype) -> None:
    source, target = cache(dtype), cache(dtype, num_pages=9)
    target.data.zero_()

    contents = source.gather([4, 1])
    target.scatter([0, 8], contents)

    assert contents.data.shape == (2, 2, 2, 4, 3, 8)
    assert contents.data.is_contiguous()
    assert torch.equal(target.data[:, :, [0, 8]], source.data[:, :, [4, 1]])
    assert not target.data[:, :, 1:8].any()
    assert (contents.scales is not None) == (dtype is torch.int8)
    if source.scales is not None:
        assert target.scales is not None
        assert torch.equal(target.scales[:, :, [0, 8]], source.scales[:, :, [4, 1]])


def test_pages_of_another_dtype_are_our_bug() -> None:
    with pytest.raises(AssertionError, match=r"bfloat16 into torch\.float32"):
        cache().scatter([0], cache(torch.bfloat16).gather([0]))


def test_scales_belong_to_quantised_dtypes_and_to_no_other() -> None:
    rows = torch.zeros(1, 2, 1, 4, 1, 2)

    with pytest.raises(AssertionError):
        KVCache(rows.to(torch.int8))
    with pytest.raises(AssertionError):
        KVCache(rows, rows[..., 0])


def test_stale_rows_of_reused_pages_never_reach_a_result() -> None:
    """NaN and huge values left by an earlier owner of the pages, in all rows behind kv_len."""
    shape = Shape(num_pages=32)
    case = ragged([(1, 5), (1, 7), (3, 6), (2, 2)], shape)
    outs = []
    for stale in (0.0, torch.nan, torch.inf, 3e38):
        kv = KVCache.allocate(
            num_layers=1,
            num_pages=shape.num_pages,
            page_size=shape.page_size,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=torch.float32,
            device="cpu",
        )
        kv.data.copy_(torch.stack((case.kv.keys, case.kv.values)))
        kv.data.masked_fill_(kv.data.isnan(), stale)
        outs.append(torch.full_like(case.q, torch.nan))
        ReferenceOps().paged_attention(case.q, case.meta, kv.layer(0), 0.25, out=outs[-1])

    assert not outs[0].isnan().any()
    assert all(torch.equal(out, outs[0]) for out in outs)


def plan(
    *, explicit_bytes: int | None = None, fraction: float = 0.25, available_bytes: int = 48 << 30
) -> MemoryPlan:
    return plan_memory(
        available_bytes=available_bytes,
        fraction_of="RAM",
        fraction=fraction,
        explicit_bytes=explicit_bytes,
        bytes_per_page=720 << 10,
        page_size=16,
        max_context=8192,
    )


def test_a_fraction_is_taken_of_what_is_available_in_whole_pages() -> None:
    made = plan()

    assert made.num_pages == (12 << 30) // (720 << 10)
    assert made.kv_bytes == made.num_pages * (720 << 10) <= 12 << 30
    assert made.num_tokens == 16 * made.num_pages
    assert not made.explicit


def test_bytes_given_outright_win_over_the_fraction_even_beyond_what_is_available() -> None:
    assert plan(explicit_bytes=(720 << 10) * 3 + 1).num_pages == 3
    assert plan(explicit_bytes=96 << 30, available_bytes=1 << 30).num_pages == (96 << 20) // 720


def test_a_budget_below_one_page_is_refused_with_both_sizes() -> None:
    expected = "one KV page of 16 tokens needs 720.0 KiB, the KV memory budget is 719.0 KiB"

    with pytest.raises(ModelError, match=expected):
        plan(explicit_bytes=719 << 10)
    with pytest.raises(ModelError, match=r"budget is 250 bytes"):
        plan(available_bytes=1000)


def test_exactly_one_page_is_enough() -> None:
    assert plan(explicit_bytes=720 << 10).num_pages == 1


def test_a_plan_says_of_what_it_is_a_share() -> None:
    assert plan().describe() == [
        "KV cache: 17,476 pages of 16 tokens (12.0 GiB = 25 % of 48.0 GiB RAM), 279,616 tokens",
        "context: up to 8,192 tokens (512 pages), which the cache holds 34.1 times",
    ]


def test_a_plan_of_given_bytes_says_so() -> None:
    lines = plan(explicit_bytes=1 << 30).describe()

    assert lines[0] == (
        "KV cache: 1,456 pages of 16 tokens (1023.8 MiB of 1.0 GiB given), 23,296 tokens"
    )


def test_a_plan_shows_that_a_full_context_does_not_fit() -> None:
    made = replace(plan(), num_pages=256)

    assert made.describe()[1].endswith("which the cache holds 0.5 times")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB")],
)
def test_sizes_are_written_in_binary_units(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_a_large_size_stays_in_gibibytes() -> None:
    assert format_bytes(2000 << 30) == "2,000.0 GiB"
