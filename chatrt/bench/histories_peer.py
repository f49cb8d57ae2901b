"""llama.cpp on the same file: its own time to the first token of a follow-up, prefix cache on.

Knows: the peer's process, everyday words.
Does not know: chatrt's server. Invariant: one process lives through the run, so that a follow-up
finds the history's keys and values, as its own prefix match allows. A peer that fails takes no
further part; what it had measured counts, and `failure` says why.
Cost: a prefill of the history for each measurement, in its process.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from chatrt.bench.peers_process import PeerProcess
from chatrt.bench.workload import sentence
from chatrt.errors import InvalidValue, PeerFailed

if TYPE_CHECKING:
    from pathlib import Path

    from chatrt.bench.histories import HistoriesOptions
    from chatrt.bench.peers_process import PeerAnswer

_ENGINE = "llama_cpp"
# Its template and everyday words come to about a token a word, as they do for the server.
_OVERHEAD_TOKENS = 30
# Behind the longest history: both answers, the follow-up, the template.
_ROOM_TOKENS = 512


@dataclass(frozen=True, slots=True)
class PeerSample:
    """A first turn as long as `history`, and a follow-up behind it; milliseconds to the first text.

    For an answer that had no text, because the model ended it at once, until it ended.
    """

    history: int
    repetition: int
    history_tokens: int
    cold_ms: float
    ttft_ms: float


class LlamaPeer:
    """One model in llama.cpp; `samples` and `failure` are what it has come to.

    Args:
        path: The GGUF file.
        options: Lengths of texts and answers, as the server is asked.
        python: The interpreter that has llama-cpp-python.
        num_threads: Threads that compute.

    Raises:
        InvalidValue: llama-cpp-python is not installed there, or the model is no GGUF file.
        PeerFailed: It cannot load the model.
    """

    def __init__(
        self, path: Path, options: HistoriesOptions, *, python: Path, num_threads: int
    ) -> None:
        if path.suffix != ".gguf":
            raise InvalidValue(f"--peer needs a GGUF file, the model is {path}")
        self.samples: list[PeerSample] = []
        self.failure: str | None = None
        self._options = options
        self._process = PeerProcess(_ENGINE, python, num_threads=num_threads)
        try:
            missing = self._process.find(path).missing
            if missing:
                raise InvalidValue(
                    f"--peer needs {' and '.join(missing)}, which the peers' Python lacks "
                    "(make bench-peers installs it)"
                )
            room = max(options.histories) + _ROOM_TOKENS
            self._process.load(path, max_context=room, seed=options.seed)
        except BaseException:
            self._process.close()
            raise

    def measure(self, history: int, repetition: int) -> None:
        """Take one sample; nothing behind a failure."""
        if self.failure is not None:
            return
        random = Random(f"{self._options.seed}/llama.cpp/{history}/{repetition}")
        words = sentence(random, max(1, history - _OVERHEAD_TOKENS))
        messages = [{"role": "user", "content": f"{history}/{repetition}: {words}"}]
        try:
            first = self._turn(messages)
            messages += [
                {"role": "assistant", "content": first.text},
                {"role": "user", "content": sentence(random, self._options.message_words)},
            ]
            second = self._turn(messages)
        except PeerFailed as error:
            self.failure = error.message
            return
        num_tokens = first.prompt_tokens + first.output_tokens
        self.samples.append(
            PeerSample(history, repetition, num_tokens, first.ttft_ms, second.ttft_ms)
        )

    def close(self) -> None:
        """End its process."""
        self._process.close()

    def _turn(self, messages: list[dict[str, str]]) -> PeerAnswer:
        return self._process.chat(messages, max_tokens=self._options.max_output_tokens)
