from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from chatrt.cli.main import app
from chatrt.models.files import fingerprint
from chatrt.testing.models import tiny_config
from chatrt.testing.tokenizer import tiny_tokenizer
from chatrt_drafts.head_file import HeadFile
from tests.chatrt.models_support import random_state, write_safetensors

if TYPE_CHECKING:
    from pathlib import Path

runner = CliRunner()


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("CHATRT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CHATRT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CHATRT_KERNELS", "reference")
    monkeypatch.setenv("CHATRT_THREADS", "1")


def test_train_draft_makes_a_head_for_a_local_model(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    config = tiny_config(max_context=1024)
    write_safetensors(folder, config, random_state(config))
    tiny_tokenizer(folder)
    out = tmp_path / "head"
    arguments = ["train-draft", str(folder), "--out", str(out), "--tokens", "3000", "--slots", "4"]
    arguments += ["--vocab", "64", "--training-minutes", "0.05"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{out / 'head.safetensors'}: ")
    assert "synthesis 100%" in result.stderr
    assert "training 100%" in result.stderr
    head = HeadFile.load(out / "head.safetensors")
    assert head.target == "tiny"
    assert head.fingerprint == fingerprint((folder / "model.safetensors",))
    assert (out / "card.json").is_file()
    again = runner.invoke(app, arguments)
    assert again.exit_code == 2
    assert "--resume" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--out is missing"),
        (["--out", "x", "--training-minutes", "0"], "need some time"),
        (["--out", "x", "--minutes", "nan"], "need some time"),
        (["--out", "x", "--minutes", "inf"], "and an end"),
        (["--out", "x", "--seed", str(1 << 64)], "--seed"),
    ],
)
def test_train_draft_says_what_is_missing(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["train-draft", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
