"""Rows of finished conversations, one behind the other: what a draft head is trained on.

Knows: columns, their widths and types, files that hold them. Does not know: models, training.
Invariant: rows `[0, num_rows)` are whole conversations; each begins at position 0.
Cost: 4.8 kB for each row of the default model. On a CPU the columns are files that are mapped into
memory; on a GPU they are tensors there, written to files at checkpoints where that is wanted.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from chatrt.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

NUM_TOP = 20
ANSWER = 1  # flag of a row that predicts a token of an answer
GREEDY = 2  # flag of such a row whose answer is decoded greedily
_COPY_ROWS = 65_536
_SPARE_BYTES = 256 << 20  # left on the disk: the training keeps its own state there


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns of consecutive rows.

    `ids` int32 `[n, 4]`: token, the token that follows it, position, flags. `top_ids` int32 and
    `top_logprobs` float16 `[n, NUM_TOP]`: the target's likeliest next tokens, likeliest first, and
    their log-probabilities at temperature 1. `features` float16 `[n, feature layers * hidden]`:
    normalised residuals of the row itself.
    """

    ids: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    features: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """The same columns, each changed by `change`."""
        return Rows(*(change(getattr(self, field.name)) for field in fields(self)))

    def part(self, start: int, end: int) -> Rows:
        """Views of the rows `[start, end)`, as far as there are any."""
        return self.map(lambda column: column[start:end])

    def __len__(self) -> int:
        return self.ids.shape[0]


def row_bytes(feature_width: int) -> int:
    """Bytes of one row in a store."""
    return sum(width * dtype.itemsize for _, width, dtype in _columns(feature_width))


def allocate_rows(num_rows: int, feature_width: int, device: torch.device) -> Rows:
    """Unwritten rows on a device."""
    return Rows(
        *(
            torch.empty(num_rows, width, dtype=dtype, device=device)
            for _, width, dtype in _columns(feature_width)
        )
    )


class RowStore:
    """Rows that are appended once and read often.

    `folder` keeps them beyond this process; None keeps them in the device's memory only. A store
    that is opened on a folder continues what is there.

    Raises:
        ModelFileError: The folder holds rows of another width.
    """

    def __init__(
        self, folder: Path | None, capacity: int, feature_width: int, device: torch.device
    ) -> None:
        self.num_rows = 0
        self.num_conversations = 0
        self.num_answer_tokens = 0
        self._folder = folder
        self._width = feature_width
        self._mapped = folder is not None and device.type == "cpu"
        self._num_saved = 0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._read_counts(folder)
        self.capacity = max(capacity, self.num_rows)
        self._rows = (
            self._map_files()
            if self._mapped
            else allocate_rows(self.capacity, feature_width, device)
        )
        if folder is not None and not self._mapped:
            self._load()

    @property
    def rows(self) -> Rows:
        """All rows so far, as views."""
        return self._rows.part(0, self.num_rows)

    def has_room(self, num_rows: int) -> bool:
        """Whether so many rows more fit, on the disk too.

        A mapped file has holes where nothing was written: without room for them the process would
        end by a signal (SIGBUS), with nothing said.
        """
        if self._mapped:
            assert self._folder is not None
            free = shutil.disk_usage(self._folder).free - _SPARE_BYTES
            if num_rows * row_bytes(self._width) > free:
                return False
        return self.num_rows + num_rows <= self.capacity

    def append(self, conversation: Rows) -> None:
        """Copy a conversation behind the others; there must be room."""
        start, end = self.num_rows, self.num_rows + len(conversation)
        assert end <= self.capacity, (end, self.capacity)
        for field in fields(Rows):
            getattr(self._rows, field.name)[start:end] = getattr(conversation, field.name)
        self.num_rows = end
        self.num_conversations += 1

    def checkpoint(self) -> None:
        """Make what was appended so far survive the process, where there is a folder."""
        if self._folder is None:
            return
        if not self._mapped:
            self._save()
        counts = {
            "rows": self.num_rows,
            "conversations": self.num_conversations,
            "answer_tokens": self.num_answer_tokens,
            "feature_width": self._width,
        }
        partial = self._folder / "rows.json.partial"
        partial.write_text(json.dumps(counts))
        partial.replace(self._folder / "rows.json")

    def _read_counts(self, folder: Path) -> None:
        path = folder / "rows.json"
        if not path.is_file():
            return
        counts = json.loads(path.read_text())
        if counts["feature_width"] != self._width:
            raise ModelFileError(
                f"{folder} holds features of {counts['feature_width']} numbers, "
                f"expected {self._width}"
            )
        self.num_rows = self._num_saved = counts["rows"]
        self.num_conversations = counts["conversations"]
        self.num_answer_tokens = counts["answer_tokens"]

    def _map_files(self) -> Rows:
        """Columns over files as large as the capacity; what is not written takes no space."""
        columns = []
        for path, width, dtype in self._files():
            num_bytes = self.capacity * width * dtype.itemsize
            with path.open("ab") as file:
                if file.tell() < num_bytes:
                    file.truncate(num_bytes)
            flat = torch.from_file(str(path), shared=True, size=self.capacity * width, dtype=dtype)
            columns.append(flat.view(self.capacity, width))
        return Rows(*columns)

    def _save(self) -> None:
        for (path, width, dtype), column in zip(self._files(), self._tensors(), strict=True):
            with path.open("r+b" if path.exists() else "w+b") as file:
                file.seek(self._num_saved * width * dtype.itemsize)
                for start in range(self._num_saved, self.num_rows, _COPY_ROWS):
                    part = column[start : min(start + _COPY_ROWS, self.num_rows)]
                    file.write(part.cpu().numpy().tobytes())
        self._num_saved = self.num_rows

    def _load(self) -> None:
        for (path, width, dtype), column in zip(self._files(), self._tensors(), strict=True):
            if not self.num_rows:
                return
            size = self.num_rows * width
            stored = torch.from_file(str(path), shared=False, size=size, dtype=dtype)
            column[: self.num_rows] = stored.view(self.num_rows, width)

    def _tensors(self) -> list[Tensor]:
        return [getattr(self._rows, field.name) for field in fields(Rows)]

    def _files(self) -> list[tuple[Path, int, torch.dtype]]:
        assert self._folder is not None
        return [
            (self._folder / f"{name}.bin", width, dtype)
            for name, width, dtype in _columns(self._width)
        ]


def _columns(feature_width: int) -> tuple[tuple[str, int, torch.dtype], ...]:
    return (
        ("ids", 4, torch.int32),
        ("top_ids", NUM_TOP, torch.int32),
        ("top_logprobs", NUM_TOP, torch.float16),
        ("features", feature_width, torch.float16),
    )
