"""What the tests of peers share: a tiny model for transformers, and a llama_cpp that misbehaves."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from chatrt.bench.peers_process import PeerProcess
from chatrt.testing.models import tiny_config
from chatrt.testing.tokenizer import tiny_tokenizer
from tests.chatrt.models_support import random_state, write_safetensors
from tests.support import time_scale

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

PYTHON = Path(sys.executable)

# The package's surface that the worker uses; what is asked for decides how it breaks, and two
# variables say at which beginning of a message it crashes or hangs.
_FAKE = """
import os, sys, time

class Llama:
    def __init__(self, **options):
        self.n_tokens = 0
        print("the package prints")
        os.write(1, b"so does what is beneath it\\n")
        if "broken" in options["model_path"]:
            raise ValueError("no tensors in this file\\nsecond line")

    def create_chat_completion(self, messages, max_tokens, **options):
        text = messages[-1]["content"]
        if text.startswith(os.environ.get("FAKE_LLAMA_CRASHES_AT", "crash")):
            print("out of memory", file=sys.stderr, flush=True)
            os._exit(3)
        if text.startswith(os.environ.get("FAKE_LLAMA_HANGS_AT", "hang")):
            open(os.path.join(os.path.dirname(__file__), "hanging"), "w").close()
            time.sleep(3600)
        if "refuse" in text:
            raise ValueError("Requested tokens exceed the context")
        yield {"choices": [{"delta": {"role": "assistant"}, "finish_reason": None}]}
        self.n_tokens = 10 * len(messages)
        if "silence" in text:
            yield {"choices": [{"delta": {}, "finish_reason": "stop"}]}
            return
        for piece in ("a", "b", "c"):
            yield {"choices": [{"delta": {"content": piece}, "finish_reason": None}]}
            self.n_tokens += 1
        self.n_tokens -= 1
        yield {"choices": [{"delta": {}, "finish_reason": "length"}]}
"""


def install_fake_llama(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers started from now on find it."""
    folder.mkdir(exist_ok=True)
    (folder / "llama_cpp.py").write_text(_FAKE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))


@contextlib.contextmanager
def process(engine: str, *, python: Path = PYTHON, timeout_s: float = 60) -> Iterator[PeerProcess]:
    """A peer's process, ended afterwards."""
    peer = PeerProcess(engine, python, num_threads=1, timeout_s=timeout_s * time_scale())
    try:
        yield peer
    finally:
        peer.close()


@contextlib.contextmanager
def loaded(engine: str, path: Path, *, timeout_s: float = 60) -> Iterator[PeerProcess]:
    """A peer with its model."""
    with process(engine, timeout_s=timeout_s) as peer:
        assert peer.find(path).missing == []
        peer.load(path, max_context=2048, seed=0)
        yield peer


def bare_python(folder: Path) -> Path:
    """An interpreter that has no packages beside the standard library."""
    script = folder / "bare-python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n', encoding="utf-8")
    script.chmod(0o700)
    return script


def write_tiny_model(folder: Path) -> Path:
    """A random model of a few layers in safetensors, which chatrt and transformers both read."""
    tokenizer = tiny_tokenizer(folder)
    config = tiny_config(vocab_size=tokenizer.vocab_size, max_context=4096)
    write_safetensors(folder, config, random_state(config))
    file = folder / "tokenizer_config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    values["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(values), encoding="utf-8")
    return folder


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
