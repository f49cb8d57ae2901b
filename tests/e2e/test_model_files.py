"""Model files that cannot be used: the commands say why in one sentence."""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING

import pytest

from chatrt.cli.main import main
from tests.conftest import DEFAULT_GGUF

if TYPE_CHECKING:
    from pathlib import Path

_HEAD_BYTES = 8 * 2**20  # holds all of the default model's metadata


def sentence_of(capsys: pytest.CaptureFixture[str], model: str, exit_code: int) -> str:
    """What `chatrt run` says of a model that it cannot use; all of it is one line."""
    assert main(["run", "hello", "--model", model, "--local"]) == exit_code
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = [line for line in printed.err.splitlines() if not line.startswith("fetching")]
    assert len(lines) == 1, printed.err
    assert lines[0].startswith("chatrt: ")
    return lines[0]


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "missing.gguf" in sentence_of(capsys, str(tmp_path / "missing.gguf"), 2)


def test_a_default_model_with_the_wrong_hash_is_refused_with_both_hashes(
    chatrt_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = chatrt_home / "cache" / "models"
    models.mkdir(parents=True)
    (models / DEFAULT_GGUF).write_bytes(b"GGUF" + bytes(1000))
    said = sentence_of(capsys, "smollm2-135m-instruct", 1)
    assert "has sha256" in said
    assert "expected b179c9523d0e" in said


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"not a model at all", b"GGUF" + struct.pack("<I", 99) + bytes(64)]
)
def test_a_file_that_is_no_gguf_is_named(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    assert str(path) in sentence_of(capsys, str(path), 1)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_a_truncated_model_is_named(
    share: float, default_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "short.gguf"
    num_bytes = int(default_gguf.stat().st_size * share)
    with default_gguf.open("rb") as whole:
        path.write_bytes(whole.read(num_bytes))
    assert str(path) in sentence_of(capsys, str(path), 1)


@pytest.mark.model
@pytest.mark.slow
def test_an_architecture_that_is_not_served_is_named_with_those_that_are(
    default_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.gguf"
    with default_gguf.open("rb") as whole:
        head = whole.read(_HEAD_BYTES)
    path.write_bytes(head.replace(b"llama", b"mamba", 1))
    os.truncate(path, default_gguf.stat().st_size)
    said = sentence_of(capsys, str(path), 1)
    assert "mamba" in said
    assert "llama" in said


def test_a_folder_of_another_architecture_or_without_weights_is_named(
    tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    assert str(folder) in sentence_of(capsys, str(folder), 1)
    for name in os.listdir(tiny_model_folder):
        (folder / name).write_bytes((tiny_model_folder / name).read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    assert "mamba" in sentence_of(capsys, str(folder), 1)
    (folder / "config.json").write_text(json.dumps(config))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert str(weights) in sentence_of(capsys, str(folder), 1)
    weights.unlink()
    assert str(folder) in sentence_of(capsys, str(folder), 1)


def test_no_memory_for_one_page_is_said_with_both_numbers(
    tiny_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CHATRT_KV_MEMORY_BYTES", "1000")
    said = sentence_of(capsys, str(tiny_model_folder), 1)
    assert "1000" in said.replace(",", "") or "1,000" in said
    assert "4096" in said.replace(",", "") or "4.0 KiB" in said
