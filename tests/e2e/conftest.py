"""The server with a tiny model that the end-to-end tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from chatrt.testing.models import tiny_config
from chatrt.testing.tokenizer import tiny_tokenizer
from tests.chatrt.models_support import random_state, write_safetensors
from tests.e2e.process import ServerProcess
from tests.support import share_kernels

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TINY_CONTEXT = 4096


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a tokenizer: real files that load in no time."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = tiny_tokenizer(folder)
    config = tiny_config(vocab_size=tokenizer.vocab_size, max_context=TINY_CONTEXT)
    write_safetensors(folder, config, random_state(config))
    return folder


@pytest.fixture(scope="session")
def tiny_server(
    tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """The tiny model, served; every test leaves it as it found it."""
    home = share_kernels(tmp_path_factory.mktemp("tiny_server") / "home")
    flags = ("--kv-memory-bytes", "64MiB", "--disconnect-grace", "0")
    running = ServerProcess.start(home, str(tiny_model_folder), *flags)
    yield running
    running.kill()
