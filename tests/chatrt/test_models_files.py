from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

import pytest

from chatrt.errors import ModelFileError
from chatrt.models import files
from chatrt.models.files import ModelFiles, check_hash, fingerprint, hash_file, note_checked

if TYPE_CHECKING:
    from pathlib import Path

CONTENT = b"weights" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were hashed since."""
    calls: list[Path] = []

    def counted(path: Path) -> str:
        calls.append(path)
        return hash_file(path)

    monkeypatch.setattr(files, "hash_file", counted)
    return calls


def test_a_file_is_hashed_once_and_then_remembered(path: Path, hashed: list[Path]) -> None:
    check_hash(path, SHA256)
    check_hash(path, SHA256)
    assert hashed == [path]


@pytest.mark.parametrize("content", [CONTENT[:-1], b"W" + CONTENT[1:]])
def test_a_truncated_or_changed_file_is_noticed_in_spite_of_the_note(
    path: Path, content: bytes
) -> None:
    check_hash(path, SHA256)
    path.write_bytes(content)
    os.utime(path, (1, 1))
    found = hashlib.sha256(content).hexdigest()
    with pytest.raises(ModelFileError, match=f"{found}, expected {SHA256}; it is damaged"):
        check_hash(path, SHA256)


def test_a_touched_file_with_the_same_content_passes_and_is_remembered_again(
    path: Path, hashed: list[Path]
) -> None:
    check_hash(path, SHA256)
    os.utime(path, (1, 1))
    check_hash(path, SHA256)
    check_hash(path, SHA256)
    assert len(hashed) == 2


def test_half_a_note_is_no_note(path: Path, hashed: list[Path]) -> None:
    note_checked(path, SHA256)
    note = path.with_name("model.gguf.checked")
    note.write_text(note.read_text()[:20])
    check_hash(path, SHA256)
    assert hashed == [path]


def test_a_note_that_cannot_be_written_is_no_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("pathlib.Path.write_text", refuse)
    check_hash(path, SHA256)
    assert list(path.parent.iterdir()) == [path]


def test_fingerprints_differ_by_content_name_and_facts(path: Path) -> None:
    first = fingerprint((path,), "float32")
    assert len(first) == 32
    assert fingerprint((path,), "float32") == first
    assert fingerprint((path,), "float64") != first
    path.write_bytes(CONTENT[:-1] + b"?")
    assert fingerprint((path,), "float32") != first


def test_weight_files_are_the_gguf_or_all_shards_in_order(tmp_path: Path, path: Path) -> None:
    shards = [tmp_path / "b.safetensors", tmp_path / "a.safetensors"]
    for shard in shards:
        shard.touch()
    gguf, folder = (ModelFiles("m", p, tmp_path) for p in (path, tmp_path))
    assert gguf.is_gguf
    assert gguf.weight_files() == (path,)
    assert not folder.is_gguf
    assert folder.weight_files() == tuple(reversed(shards))
