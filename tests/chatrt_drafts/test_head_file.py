from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from chatrt.errors import ModelFileError
from chatrt_drafts.head_file import (
    NORMS,
    HeadFile,
    default_feature_layers,
    expected_shapes,
)

if TYPE_CHECKING:
    from pathlib import Path


def random_head() -> HeadFile:
    shapes = expected_shapes(hidden=8, num_features=2, q_width=16, kv_width=4, intermediate=12)
    generator = torch.Generator().manual_seed(0)
    return HeadFile(
        target="tiny",
        fingerprint="f" * 32,
        feature_layers=(0, 3),
        token_ids=torch.tensor([5, 2, 9], dtype=torch.int32),
        tensors={name: torch.randn(shape, generator=generator) for name, shape in shapes.items()},
    )


def test_a_saved_head_is_loaded_as_it_was_with_matrices_in_bfloat16(tmp_path: Path) -> None:
    head = random_head()
    head.save(tmp_path / "head.safetensors")
    loaded = HeadFile.load(tmp_path / "head.safetensors")
    assert (loaded.target, loaded.fingerprint) == (head.target, head.fingerprint)
    assert loaded.feature_layers == (0, 3)
    assert loaded.hidden_size == 8
    assert loaded.token_ids.tolist() == [5, 2, 9]
    assert loaded.token_ids.dtype == torch.int32
    for name, tensor in head.tensors.items():
        dtype = torch.float32 if name in NORMS else torch.bfloat16
        assert loaded.tensors[name].dtype == dtype
        torch.testing.assert_close(loaded.tensors[name], tensor.to(dtype), rtol=0, atol=0)


def test_saving_leaves_no_partial_file(tmp_path: Path) -> None:
    random_head().save(tmp_path / "head.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["head.safetensors"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"gone\.safetensors does not exist"):
        HeadFile.load(tmp_path / "gone.safetensors")


def test_a_truncated_file_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    random_head().save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match="cannot be read as safetensors"):
        HeadFile.load(path)


def test_other_safetensors_are_no_head(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(ModelFileError, match="is no draft head"):
        HeadFile.load(path)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "version"),
        ('{"version": 2}', "version 2, expected 1"),
        ('{"version": 1, "target": "x", "feature_layers": []}', "lacks fingerprint"),
        ('{"version": 1, "target": "x", "fingerprint": "y", "feature_layers": 3}', "lacks a list"),
    ],
)
def test_damaged_facts_are_refused(tmp_path: Path, facts: str, message: str) -> None:
    path = tmp_path / "head.safetensors"
    random_head().save(path)
    save_file(load_file(path), path, metadata={"chatrt_head": facts})
    with pytest.raises(ModelFileError, match=message):
        HeadFile.load(path)


def test_a_shape_that_does_not_fit_is_refused_with_both_shapes(tmp_path: Path) -> None:
    head = random_head()
    wrong = {**head.tensors, "down.weight": torch.zeros(8, 13)}
    with pytest.raises(ModelFileError, match=r"'down.weight' is \[8, 13\], expected \[8, 12\]"):
        replace(head, tensors=wrong).save(tmp_path / "head.safetensors")


def test_a_missing_and_an_unknown_tensor_are_named(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    head = random_head()
    head.save(path)
    tensors = load_file(path)
    facts = {"version": 1, "target": "t", "fingerprint": "f", "feature_layers": [0, 3]}
    metadata = {"chatrt_head": json.dumps(facts)}
    for name in ("up.weight", "gate.weight", "token_ids"):
        save_file({k: v for k, v in tensors.items() if k != name}, path, metadata=metadata)
        with pytest.raises(ModelFileError, match=f"'{name}' is missing"):
            HeadFile.load(path)
    save_file({**tensors, "bias": torch.zeros(1)}, path, metadata=metadata)
    with pytest.raises(ModelFileError, match="'bias' is none of"):
        HeadFile.load(path)


@pytest.mark.parametrize("ids", [[1, 1], [], [-1, 2]])
def test_token_ids_must_be_distinct_and_real(tmp_path: Path, ids: list[int]) -> None:
    head = replace(random_head(), token_ids=torch.tensor(ids, dtype=torch.int32))
    with pytest.raises(ModelFileError, match="distinct ids"):
        head.save(tmp_path / "head.safetensors")


@pytest.mark.parametrize("layers", [(), (3, 0), (1, 1), (-1, 2)])
def test_feature_layers_must_ascend(tmp_path: Path, layers: tuple[int, ...]) -> None:
    with pytest.raises(ModelFileError, match="feature layers are"):
        replace(random_head(), feature_layers=layers).save(tmp_path / "head.safetensors")


def test_default_feature_layers_are_low_middle_high_and_last() -> None:
    assert default_feature_layers(30) == (2, 14, 26, 29)
    for num_layers in range(1, 81):
        layers = default_feature_layers(num_layers)
        assert layers[-1] == num_layers - 1
        assert list(layers) == sorted(set(layers))
        assert len(layers) == min(4, num_layers)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, value: float) -> None:
    head = random_head()
    head.tensors["down.weight"][3, 5] = value
    with pytest.raises(ModelFileError, match=r"'down.weight' has values that are no finite"):
        head.save(tmp_path / "head.safetensors")
