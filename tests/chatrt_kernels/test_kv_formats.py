"""Keys and values in 8 and 4 bits: what comes back, how many bytes they take."""

from __future__ import annotations

import pytest
import torch

from chatrt_kernels.kv_formats import (
    KVFormat,
    bytes_per_head,
    dequantize,
    quantize,
    turn,
    why_not,
)

HEAD_DIM = 64
# The largest error of a number, as a share of its head's largest; of its group's range in 4 bits.
ERRORS = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 16.2 / 448, torch.uint8: 0.5 / 15}


def heads(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", ERRORS)
def test_numbers_come_back_within_half_a_step(dtype: torch.dtype) -> None:
    rows = heads(50, 3)
    stored, scales = quantize(rows, dtype)
    assert scales is not None
    kind = KVFormat.of(dtype)
    assert stored.dtype == dtype
    assert stored.shape == (50, 3, kind.stored_width(HEAD_DIM))
    assert scales.shape == (50, 3, *(kind.scale_shape(HEAD_DIM) or ()))
    back = dequantize(stored, scales, torch.float32)
    if dtype is torch.uint8:
        groups = rows.reshape(50, 3, -1, 16)
        size = (groups.amax(-1) - groups.amin(-1)).repeat_interleave(16, dim=-1)
        # float16 steps and minima add their own rounding
        slack = 2e-3 * rows.abs().amax()
    else:
        size, slack = rows.abs().amax(-1, keepdim=True), torch.tensor(1e-6)
    assert ((back - rows).abs() <= ERRORS[dtype] * size + slack).all()


@pytest.mark.parametrize("dtype", ERRORS)
def test_a_head_of_zeros_stays_zero(dtype: torch.dtype) -> None:
    stored, scales = quantize(torch.zeros(2, 3, HEAD_DIM), dtype)
    assert not dequantize(stored, scales, torch.float32).any()


@pytest.mark.parametrize("dtype", ERRORS)
def test_a_row_is_stored_the_same_beside_any_other(dtype: torch.dtype) -> None:
    rows = heads(5, 2)
    stored, scales = quantize(rows, dtype)
    alone, its_scales = quantize(rows[3:4], dtype)
    assert scales is not None
    assert its_scales is not None
    assert torch.equal(stored[3:4].view(torch.uint8), alone.view(torch.uint8))
    assert torch.equal(scales[3:4], its_scales)


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [
        (torch.bfloat16, 128),
        (torch.int8, 64 + 4),
        (torch.float8_e4m3fn, 64 + 4),
        (torch.uint8, 32 + 4 * 4),
    ],
)
def test_bytes_are_those_of_the_stored_tensors(dtype: torch.dtype, num_bytes: int) -> None:
    stored, scales = quantize(heads(1), dtype)
    assert stored.nbytes + (0 if scales is None else scales.nbytes) == num_bytes
    assert bytes_per_head(HEAD_DIM, dtype) == num_bytes


def test_four_bits_need_heads_of_whole_groups_in_both_halves() -> None:
    assert why_not(64, torch.uint8) is None
    assert why_not(80, torch.uint8) == (
        "heads have 80 dimensions, 4-bit pages need a multiple of 32"
    )
    assert why_not(80, torch.int8) is None


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_turned_rows_have_the_products_of_rows_as_they_were(head_dim: int) -> None:
    generator = torch.Generator().manual_seed(1)
    queries, keys = torch.randn(2, 7, head_dim, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(turn(queries) @ turn(keys).T, queries @ keys.T)


def test_one_large_dimension_of_a_turned_row_is_spread_over_all() -> None:
    spike = torch.zeros(HEAD_DIM)
    spike[37] = 8.0
    torch.testing.assert_close(turn(spike).abs(), torch.ones(HEAD_DIM))


def test_large_dimensions_cost_turned_keys_less_of_their_scores() -> None:
    keys, queries = heads(200), heads(50, seed=1)
    keys[:, 5] += 12.0
    errors = []
    for row, query in ((keys, queries), (turn(keys), turn(queries))):
        back = dequantize(*quantize(row, torch.uint8), torch.float32)
        errors.append(((back - row) @ query.T).square().mean())
    assert errors[1] < 0.7 * errors[0]
