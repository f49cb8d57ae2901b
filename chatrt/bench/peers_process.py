"""A peer's process: started, asked, and ended, whatever it does.

Knows: processes, the lines of `peers_worker`, how long an answer may take.
Does not know: llama.cpp and transformers, what is measured. Never imports torch.
Invariant: a process that crashes, hangs or talks nonsense is ended, and one sentence says so; no
process is left behind, because it also ends when its stdin does.
Cost: one thread that waits for its lines.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

import msgspec

from chatrt.bench import peers_worker
from chatrt.errors import InvalidValue, PeerFailed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# By engine, as it is written in the JSON: its name for people.
PEERS = {"llama_cpp": "llama.cpp", "transformers": "transformers"}
TIMEOUT_S = 600.0
_FOLDER = ".venv-peers"  # where `make bench-peers` installs them
_LAST_WORDS = 300  # characters of a broken process's last line on stderr
_ENDING_S = 5.0

_T = TypeVar("_T")


class Found(msgspec.Struct, frozen=True):
    """What a peer's interpreter has: packages that are missing, versions of those that are not."""

    missing: list[str]
    versions: dict[str, str | None]


class PeerAnswer(msgspec.Struct, frozen=True):
    """One answer; `pieces_ms` are the times of its pieces of text since the call, and of its end.

    `cached_tokens` of the prompt were not computed; None for a peer that does not tell.
    """

    pieces_ms: list[float]
    ended_ms: float
    text: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None

    @property
    def ttft_ms(self) -> float:
        """From the call to the first piece of text, or to the end of an answer without any."""
        return self.pieces_ms[0] if self.pieces_ms else self.ended_ms


class _Failure(msgspec.Struct, frozen=True):
    error: str | None = None


def default_peer_python(prefix: Path | None = None) -> Path:
    """The interpreter of `.venv-peers` beside this environment, else this one.

    `prefix` is the environment's folder; None is that of this interpreter.
    """
    folder = (prefix or Path(sys.prefix)).parent / _FOLDER
    found = [folder / name for name in ("bin/python", "Scripts/python.exe")]
    return next((path for path in found if path.exists()), Path(sys.executable))


class PeerProcess:
    """One peer under `python`, not loaded yet.

    Args:
        engine: One of `PEERS`.
        python: The interpreter that has it.
        num_threads: Threads that compute.
        timeout_s: How long one answer may take, loading included.

    Raises:
        InvalidValue: The interpreter cannot be run.
    """

    def __init__(
        self, engine: str, python: Path, *, num_threads: int, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.engine = engine
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed with the process
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        try:
            self._process = subprocess.Popen(
                [str(python), str(peers_worker.__file__)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=_environment(num_threads),
            )
        except OSError as error:
            self._stderr.close()
            raise InvalidValue(
                f"--peer-python is {python}, which cannot be run: {error.strerror}",
                param="--peer-python",
            ) from error
        self._reader = threading.Thread(target=self._read, name=f"peer-{engine}", daemon=True)
        self._reader.start()

    @property
    def name(self) -> str:
        """For people."""
        return PEERS[self.engine]

    def find(self, path: Path) -> Found:
        """Whether its packages are installed that a model at `path` needs.

        Raises:
            PeerFailed: The process does not answer.
        """
        return self._ask({"do": "find", "engine": self.engine, "path": str(path)}, Found)

    def load(self, path: Path, *, max_context: int, seed: int) -> None:
        """Load a GGUF file, or a folder that the peer takes; `find` comes first.

        Raises:
            PeerFailed: It cannot.
        """
        request = {
            "do": "load",
            "path": str(path),
            "num_threads": self._num_threads,
            "max_context": max_context,
            "seed": seed,
        }
        self._ask(request, _Failure)

    def chat(self, messages: Sequence[Mapping[str, str]], *, max_tokens: int) -> PeerAnswer:
        """One greedy answer of at most `max_tokens`.

        Raises:
            PeerFailed: There was none.
        """
        request = {"do": "chat", "messages": list(messages), "max_tokens": max_tokens}
        return self._ask(request, PeerAnswer)

    def close(self) -> None:
        """End the process; what it was still computing is given up."""
        self._process.kill()
        self._process.wait(_ENDING_S)
        self._reader.join(_ENDING_S)
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            if pipe is not None:
                _close(pipe)

    def _ask(self, request: Mapping[str, object], kind: type[_T]) -> _T:
        line = self._answer_to(msgspec.json.encode(request) + b"\n")
        try:
            failure = msgspec.json.decode(line, type=_Failure)
            if failure.error is None:
                return msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            self._process.kill()
            shown = line[:_LAST_WORDS].decode(errors="replace").strip()
            raise PeerFailed(f"{self.name} answered {shown!r}, which makes no sense") from error
        raise PeerFailed(f"{self.name} failed: {failure.error}")

    def _answer_to(self, line: bytes) -> bytes:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except (OSError, ValueError):
            # It has ended; why is told below.
            self._process.kill()
        try:
            answer = self._lines.get(timeout=self._timeout_s)
        except queue.Empty:
            self._process.kill()
            raise PeerFailed(
                f"{self.name} did not answer within {self._timeout_s:g} s and was ended"
            ) from None
        if answer is None:
            self._lines.put(None)  # whoever asks again hears the same
            raise PeerFailed(self._last_words())
        return answer

    def _last_words(self) -> str:
        code = self._process.wait(_ENDING_S)
        said = ""
        if not self._stderr.closed:
            self._stderr.seek(0)
            lines = self._stderr.read().decode(errors="replace").split("\n")
            said = next((one.strip() for one in reversed(lines) if one.strip()), "")
        sentence = f"{self.name}'s process ended with {code}"
        return f"{sentence}: {said[-_LAST_WORDS:]}" if said else sentence

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)


def _close(pipe: IO[bytes]) -> None:
    # What it had not read yet cannot be flushed to a process that is gone.
    with contextlib.suppress(OSError):
        pipe.close()


def _environment(num_threads: int) -> dict[str, str]:
    """That of this process, with the threads, and without anything that would be downloaded."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(num_threads),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # The worker's folder is that of our modules, none of which the peer may find by accident.
        "PYTHONSAFEPATH": "1",
    }
