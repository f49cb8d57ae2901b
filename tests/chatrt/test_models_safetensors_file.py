from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from chatrt.errors import ModelFileError
from chatrt.models.safetensors_file import INDEX_NAME, SINGLE_NAME, SafetensorsFolder

if TYPE_CHECKING:
    from pathlib import Path

A = torch.arange(6, dtype=torch.float32).view(2, 3)
B = torch.arange(4, dtype=torch.bfloat16)


def write_shards(folder: Path) -> None:
    save_file({"a": A}, folder / "one.safetensors")
    save_file({"b": B}, folder / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_one_file_and_shards_give_tensors_in_their_own_dtype(tmp_path: Path) -> None:
    shards, single = tmp_path / "shards", tmp_path / "single"
    shards.mkdir()
    single.mkdir()
    write_shards(shards)
    save_file({"a": A, "b": B}, single / SINGLE_NAME)
    for folder in (SafetensorsFolder(shards), SafetensorsFolder(single)):
        assert torch.equal(folder.matrix("a"), A)
        assert torch.equal(folder.vector("b"), B)
        assert folder.vector("b").dtype == torch.bfloat16


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / SINGLE_NAME)
    with pytest.raises(ModelFileError, match=r"no tensor 'lm_head\.weight'"):
        SafetensorsFolder(tmp_path).matrix("lm_head.weight")


def test_a_tensor_that_the_index_promises_and_its_shard_lacks_is_named(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "one.safetensors")
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"b": "one.safetensors"}}))
    with pytest.raises(ModelFileError, match=r"one\.safetensors has no tensor 'b'"):
        SafetensorsFolder(tmp_path).vector("b")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"two\.safetensors"):
        SafetensorsFolder(tmp_path)


def test_truncated_and_damaged_files_are_errors_of_the_file(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / SINGLE_NAME)
    whole = (tmp_path / SINGLE_NAME).read_bytes()
    (tmp_path / SINGLE_NAME).write_bytes(whole[:-4])
    with pytest.raises(ModelFileError, match="cannot be read"):
        SafetensorsFolder(tmp_path)
    (tmp_path / INDEX_NAME).write_text("{")
    with pytest.raises(ModelFileError, match=r"index\.json is damaged"):
        SafetensorsFolder(tmp_path)


def test_a_folder_without_weights_says_what_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"neither model\.safetensors nor"):
        SafetensorsFolder(tmp_path)
