"""Where a model's files lie on this machine, and whether they are the ones expected.

Knows: paths, sizes, SHA-256, the note beside a checked file, the small JSON files beside weights.
Does not know: networks, tensors. Importing this module imports no torch.
Invariant: a file is hashed again whenever its size or modification time differs from the note's.
Cost: a checked file costs one `stat` and one small read; hashing 98 MB takes about 0.1 s.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from chatrt.errors import ModelFileError
from chatrt.models.config import GenerationDefaults, generation_defaults_from_hf

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_SAMPLE_BYTES = 64 * 1024
_NUM_SAMPLES = 64


class Progress(Protocol):
    """Hears how far a fetch is; `total_bytes` None while the size is not known."""

    def __call__(self, done_bytes: int, total_bytes: int | None, what: str) -> None:
        """`what` is a short noun for people: a file's name, or "tokenizer"."""
        ...


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model that is complete on this machine.

    `path` is a `.gguf` file or a folder of safetensors; `tokenizer_dir` holds `tokenizer.json`.
    `generation` overrides the model's own recommendation, None leaves it.
    """

    name: str
    path: Path
    tokenizer_dir: Path
    generation: GenerationDefaults | None = None

    @property
    def is_gguf(self) -> bool:
        """Whether the weights are in one GGUF file."""
        return self.path.suffix == ".gguf"

    def weight_files(self) -> tuple[Path, ...]:
        """The files that hold tensors, in a fixed order."""
        return (self.path,) if self.is_gguf else tuple(sorted(self.path.glob("*.safetensors")))


def generation_defaults(files: ModelFiles) -> GenerationDefaults:
    """The sampling recommendation: the name list's, else `generation_config.json`, else nothing."""
    if files.generation is not None:
        return files.generation
    path = files.path / "generation_config.json"
    if files.is_gguf or not path.is_file():
        return GenerationDefaults()
    return generation_defaults_from_hf(read_json(path))


def read_json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file of a model.

    Raises:
        ModelFileError: It cannot be read, or holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelFileError(f"{path} is damaged: {error}") from error
    if not isinstance(values, dict):
        raise ModelFileError(
            f"{path} is damaged: it holds a {type(values).__name__}, not an object"
        )
    return values


def check_hash(path: Path, sha256: str) -> None:
    """Make sure that a file has the expected content; a note beside it avoids hashing twice.

    Raises:
        ModelFileError: The hash differs; the message has both.
    """
    note = _note_path(path)
    state = _state(path, sha256)
    try:
        if json.loads(note.read_text()) == state:
            return
    except (OSError, ValueError):
        pass  # no note, or half a note: hash
    found = hash_file(path)
    if found != sha256:
        raise ModelFileError(
            f"{path} has sha256 {found}, expected {sha256}; "
            "it is damaged: `chatrt pull` replaces it"
        )
    note_checked(path, sha256)


def note_checked(path: Path, sha256: str) -> None:
    """Remember that the file as it is now has this hash; a folder that is read-only is no error."""
    partial = _note_path(path).with_suffix(f".{os.getpid()}.tmp")
    try:
        partial.write_text(json.dumps(_state(path, sha256)))
        partial.replace(_note_path(path))
    except OSError:
        partial.unlink(missing_ok=True)


def hash_file(path: Path) -> str:
    """SHA-256 of the whole file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(paths: tuple[Path, ...], *facts: str) -> str:
    """32 hexadecimal digits that tell one set of weights from another.

    Reads 64 evenly spaced samples of 64 KiB from each file, so it takes milliseconds; `facts` are
    whatever else changes what the weights compute.
    """
    digest = hashlib.sha256("\0".join(facts).encode())
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for i in range(_NUM_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * i // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _note_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.checked")


def _state(path: Path, sha256: str) -> dict[str, object]:
    stat = path.stat()
    return {"sha256": sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
