"""Fixtures of all tests: folders of their own, the default model and its server, patience."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from chatrt.paths import Paths
from tests.support import share_kernels, time_scale

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from chatrt.models.files import ModelFiles
    from chatrt.text.tokenizer import Tokenizer
    from tests.e2e.process import ServerProcess

DEFAULT_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_THREADS = 4  # tiny matrices on many cores spend their time waiting for each other
# Where it stands before tests get a home of their own.
USER_MODELS = Paths.find(os.environ).cache / "models"


def pytest_configure() -> None:
    # Read when torch is first imported, here and in the processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", str(min(MAX_THREADS, os.cpu_count() or 1)))
    # Triton's kernels run as Python, also where there is a GPU, which scripts/gpu_check.py is for.
    # Read when they are first imported; who compiles them takes it away.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Threads that spin while they wait collapse where other processes want the cores too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A shell's background jobs ignore Ctrl+C, and so would every program that a test interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    scale = time_scale()
    if scale == 1:
        return
    for item in items:
        own = item.get_closest_marker("timeout")
        seconds = own.args[0] if own is not None else float(config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(seconds * scale), append=False)


@pytest.fixture(autouse=True)
def chatrt_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own for every test, and none of the settings of whoever runs it."""
    for name in [name for name in os.environ if name.startswith("CHATRT_")]:
        if not name.startswith("CHATRT_TEST_"):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    monkeypatch.setenv("CHATRT_HOME", str(home))
    return home


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tiny byte-level tokenizer, which encodes every text."""
    from chatrt.testing.tokenizer import tiny_tokenizer

    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@dataclass(frozen=True, slots=True)
class ModelCache:
    """A cache folder that holds the default model, as a link, and its converted tokenizer."""

    folder: Path

    @property
    def gguf(self) -> Path:
        return self.folder / "models" / DEFAULT_GGUF

    def share_with(self, home: Path) -> Path:
        """Make it the cache of `home`; returns `home`."""
        home.mkdir(parents=True, exist_ok=True)
        (home / "cache").symlink_to(self.folder, target_is_directory=True)
        return home


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    """The default model's file: `CHATRT_TEST_GGUF`, else the one in the user's cache."""
    named = os.environ.get("CHATRT_TEST_GGUF")
    path = Path(named) if named else USER_MODELS / DEFAULT_GGUF
    if not path.is_file():
        _no_model(f"the default model is not at {path} (chatrt pull, or CHATRT_TEST_GGUF)")
    return path


@pytest.fixture(scope="session")
def model_cache(default_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelCache:
    """A cache for servers and commands under test; nothing is copied, the user's is left alone."""
    cache = ModelCache(tmp_path_factory.mktemp("shared") / "cache")
    share_kernels(cache.folder.parent)
    cache.gguf.parent.mkdir(parents=True)
    cache.gguf.symlink_to(default_gguf.resolve())
    return cache


@pytest.fixture(scope="session")
def default_model_files(model_cache: ModelCache) -> ModelFiles:
    """The default model with its tokenizer, which is converted once for all tests."""
    from chatrt.models.sources import fetch, resolve
    from chatrt.settings import DEFAULT_MODEL

    source = resolve(DEFAULT_MODEL, cache_dir=model_cache.folder)
    return fetch(source, cache_dir=model_cache.folder, progress=lambda *_: None)


@pytest.fixture(scope="session")
def server(
    model_cache: ModelCache,
    default_model_files: ModelFiles,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServerProcess]:
    """The default model, served; every test leaves it as it found it."""
    from tests.e2e.process import ServerProcess

    del default_model_files  # its tokenizer is there
    home = model_cache.share_with(tmp_path_factory.mktemp("server") / "home")
    flags = ("--kv-memory-bytes", "512MiB", "--max-context", "1024")
    running = ServerProcess.start(home, None, *flags)
    yield running
    running.kill()


def _no_model(sentence: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(sentence)
    pytest.skip(sentence)
