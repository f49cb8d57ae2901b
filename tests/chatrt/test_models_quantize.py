from __future__ import annotations

from typing import Literal, get_args, get_type_hints

import gguf
import pytest
import torch

from chatrt.models import quantize
from chatrt.models.quantize import (
    UNQUANTIZED,
    LoadQuantization,
    load_quantization,
    quantize_matrix,
)
from chatrt.settings import Settings
from chatrt_kernels.formats import QuantFormat, QuantizedTensor, dequantize

FORMATS = [QuantFormat.Q8_0, QuantFormat.Q4_0, QuantFormat.Q4_1]
Q8 = LoadQuantization(layers=QuantFormat.Q8_0, ends=QuantFormat.Q8_0)


def normal(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def quantized(matrix: torch.Tensor, quant_format: QuantFormat) -> QuantizedTensor:
    found = quantize_matrix(matrix, quant_format)
    assert isinstance(found, QuantizedTensor)
    return found


@pytest.mark.parametrize("quant_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bytes_are_those_of_the_gguf_library(
    quant_format: QuantFormat, dtype: torch.dtype
) -> None:
    matrix = normal(37, 96).to(dtype)
    found = quantized(matrix, quant_format)
    kind = gguf.GGMLQuantizationType[quant_format.value]
    assert found.shape == (37, 96)
    assert torch.equal(
        found.data, torch.from_numpy(gguf.quants.quantize(matrix.float().numpy(), kind))
    )


def test_a_matrix_of_several_slices_is_quantised_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matrix = normal(23, 64)
    whole = quantized(matrix, QuantFormat.Q8_0)
    monkeypatch.setattr(quantize, "_SLICE_ELEMENTS", 5 * 64)
    assert torch.equal(quantized(matrix, QuantFormat.Q8_0).data, whole.data)


@pytest.mark.parametrize("quant_format", FORMATS)
def test_zeros_and_numbers_too_small_for_a_scale_become_zero(quant_format: QuantFormat) -> None:
    matrix = torch.cat((torch.zeros(1, 32), torch.full((1, 32), 1e-40)))
    assert not dequantize(quantized(matrix, quant_format)).any()


def test_a_matrix_with_rows_of_no_whole_blocks_is_returned_as_it_is() -> None:
    matrix = normal(4, 33)
    assert quantize_matrix(matrix, QuantFormat.Q8_0) is matrix


def test_four_bits_with_a_minimum_err_less_than_without() -> None:
    matrix = normal(64, 2048)
    errors = {
        one: (dequantize(quantized(matrix, one)) - matrix).square().mean().sqrt().item()
        for one in FORMATS
    }
    assert errors[QuantFormat.Q4_1] == pytest.approx(0.078, abs=0.001)
    assert errors[QuantFormat.Q4_0] == pytest.approx(0.086, abs=0.001)
    assert errors[QuantFormat.Q8_0] < 0.006


def test_the_ends_keep_eight_bits_where_layers_get_four() -> None:
    found = load_quantization("q4", native_kernels=True)
    assert found == LoadQuantization(layers=QuantFormat.Q4_1, ends=QuantFormat.Q8_0)


@pytest.mark.parametrize(
    ("setting", "native_kernels", "expected"),
    [
        ("auto", True, Q8),
        ("auto", False, UNQUANTIZED),
        ("none", True, UNQUANTIZED),
        ("q8", False, Q8),
    ],
)
def test_auto_is_eight_bits_only_with_native_kernels(
    setting: Literal["auto", "none", "q8"], native_kernels: bool, expected: LoadQuantization
) -> None:
    assert load_quantization(setting, native_kernels=native_kernels) == expected


def test_every_word_of_the_setting_has_a_meaning() -> None:
    for word in get_args(get_type_hints(Settings)["quantize"]):
        assert isinstance(load_quantization(word, native_kernels=True), LoadQuantization)
