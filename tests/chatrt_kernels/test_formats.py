from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from chatrt_kernels.formats import QuantFormat, QuantizedTensor, dequantize

BLOCK_FORMATS = [QuantFormat.Q8_0, QuantFormat.Q4_0, QuantFormat.Q4_1]
K_FORMATS = [QuantFormat.Q4_K, QuantFormat.Q5_K, QuantFormat.Q6_K]
# where in a block its float16 numbers start
HALVES = {
    QuantFormat.Q8_0: (0,),
    QuantFormat.Q4_0: (0,),
    QuantFormat.Q4_1: (0, 2),
    QuantFormat.Q4_K: (0, 2),
    QuantFormat.Q5_K: (0, 2),
    QuantFormat.Q6_K: (208,),
}


def random_rows(
    quant_format: QuantFormat, num_rows: int, num_blocks: int, seed: int = 0
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random bytes, but with finite float16 scales, negative and subnormal ones among them."""
    rng = np.random.default_rng(seed)
    shape = (num_rows, num_blocks, quant_format.bytes_per_block)
    blocks = rng.integers(0, 256, shape, dtype=np.uint8)
    for start in HALVES[quant_format]:
        high = blocks[..., start + 1]
        # exponent 31 is inf or NaN
        high[(high & 0x7C) == 0x7C] ^= 0x40
    return blocks.reshape(num_rows, -1)


def ggml_type(quant_format: QuantFormat) -> Any:
    return gguf.GGMLQuantizationType[quant_format.value]


@pytest.mark.parametrize("quant_format", QuantFormat)
def test_block_layouts_are_those_of_the_gguf_library(quant_format: QuantFormat) -> None:
    expected = gguf.GGML_QUANT_SIZES[ggml_type(quant_format)]

    assert (quant_format.block_size, quant_format.bytes_per_block) == expected


@pytest.mark.parametrize("quant_format", BLOCK_FORMATS + K_FORMATS)
@pytest.mark.parametrize("num_blocks", [1, 3, 18, 63])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_random_blocks_dequantise_to_exactly_what_the_gguf_library_says(
    quant_format: QuantFormat, num_blocks: int, num_rows: int
) -> None:
    rows = random_rows(quant_format, num_rows, num_blocks)
    shape = (num_rows, quant_format.block_size * num_blocks)
    tensor = QuantizedTensor(quant_format, torch.from_numpy(rows), shape)

    expected = torch.from_numpy(quants.dequantize(rows, ggml_type(quant_format)))

    # the bits, so that a negative zero is told from zero
    assert torch.equal(dequantize(tensor).view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("quant_format", BLOCK_FORMATS)
def test_every_code_of_a_format_is_told_apart(quant_format: QuantFormat) -> None:
    values = np.linspace(-1.0, 1.0, 256, dtype=np.float32).reshape(1, 256)
    rows = quants.quantize(values, ggml_type(quant_format))

    got = dequantize(QuantizedTensor(quant_format, torch.from_numpy(rows), (1, 256)))

    assert np.abs(got.numpy() - values).max() < 0.1
    assert torch.equal(got, torch.from_numpy(quants.dequantize(rows, ggml_type(quant_format))))


@pytest.mark.parametrize(
    ("quant_format", "num_rows"), [(QuantFormat.Q4_1, 45000), (QuantFormat.Q6_K, 4501)]
)
def test_a_matrix_of_several_slices_is_dequantised_as_a_whole(
    quant_format: QuantFormat, num_rows: int
) -> None:
    rows = np.resize(random_rows(quant_format, 7, 1), (num_rows, quant_format.bytes_per_block))
    shape = (num_rows, quant_format.block_size)
    tensor = QuantizedTensor(quant_format, torch.from_numpy(rows), shape)

    expected = torch.from_numpy(quants.dequantize(rows, ggml_type(quant_format)))

    assert torch.equal(dequantize(tensor), expected)


@pytest.mark.parametrize(
    ("quant_format", "dtype"),
    [
        (QuantFormat.F32, torch.float32),
        (QuantFormat.F16, torch.float16),
        (QuantFormat.BF16, torch.bfloat16),
    ],
)
def test_plain_formats_keep_their_values(quant_format: QuantFormat, dtype: torch.dtype) -> None:
    values = torch.randn(3, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    tensor = QuantizedTensor(quant_format, values.view(torch.uint8), (3, 7))

    assert torch.equal(dequantize(tensor), values.to(torch.float32))
    assert torch.equal(dequantize(tensor, torch.float64), values.to(torch.float64))


def test_other_dtypes_are_rounded_from_the_float32_values() -> None:
    rows = random_rows(QuantFormat.Q4_1, 4, 3)
    tensor = QuantizedTensor(QuantFormat.Q4_1, torch.from_numpy(rows), (4, 96))

    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert torch.equal(dequantize(tensor, dtype), dequantize(tensor).to(dtype))


def test_rows_inside_a_larger_buffer_need_no_copy_and_are_not_written() -> None:
    rows = random_rows(QuantFormat.Q8_0, 8, 2)
    whole = torch.from_numpy(rows.copy())
    tensor = QuantizedTensor(QuantFormat.Q8_0, whole[3:5], (2, 64))

    dequantize(tensor)

    assert tensor.data.data_ptr() == whole[3:].data_ptr()
    assert np.array_equal(whole.numpy(), rows)


def test_a_stored_size_counts_its_bytes() -> None:
    rows = torch.from_numpy(random_rows(QuantFormat.Q4_1, 4, 3))

    assert QuantizedTensor(QuantFormat.Q4_1, rows, (4, 96)).num_bytes == 4 * 3 * 20


@pytest.mark.parametrize("shape", [(4, 64), (3, 96), (4, 97)])
def test_bytes_that_do_not_fit_the_shape_are_our_bug(shape: tuple[int, int]) -> None:
    rows = torch.from_numpy(random_rows(QuantFormat.Q4_1, 4, 3))

    with pytest.raises(AssertionError):
        QuantizedTensor(QuantFormat.Q4_1, rows, shape)
