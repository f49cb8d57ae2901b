"""A folder of safetensors, in one file or in shards, memory-mapped.

Knows: `model.safetensors`, `model.safetensors.index.json`. Does not know: models, executors.
Invariant: a tensor is read when it is asked for; nothing is converted.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from chatrt.errors import ModelFileError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class SafetensorsFolder:
    """Tensors by name, wherever they lie.

    Raises:
        ModelFileError: No weights, a missing shard, or a truncated file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / INDEX_NAME
        if index.is_file():
            self._file_names = _read_index(index)
        elif (folder / SINGLE_NAME).is_file():
            handle = _open(folder / SINGLE_NAME)
            self._file_names = dict.fromkeys(handle.keys(), SINGLE_NAME)
        else:
            raise ModelFileError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}")
        self._handles = {
            name: _open(folder / name) for name in sorted(set(self._file_names.values()))
        }

    def matrix(self, name: str) -> torch.Tensor:
        """A matrix `[out_features, in_features]` in its stored dtype."""
        return self._tensor(name)

    def vector(self, name: str) -> torch.Tensor:
        """A vector in its stored dtype."""
        return self._tensor(name)

    def _tensor(self, name: str) -> torch.Tensor:
        file_name = self._file_names.get(name)
        if file_name is None:
            raise ModelFileError(f"{self.folder} has no tensor '{name}'")
        try:
            tensor: torch.Tensor = self._handles[file_name].get_tensor(name)
        except SafetensorError as error:
            raise ModelFileError(
                f"{self.folder / file_name} has no tensor '{name}': {error}"
            ) from error
        return tensor


def _read_index(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelFileError(f"{path} is damaged: {error}") from error


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelFileError(f"{path} cannot be read: {error}") from error
