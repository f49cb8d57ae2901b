"""llama.cpp on the same file: its own time to the first token of a follow-up, prefix cache on.

Knows: llama-cpp-python where it is installed, everyday words.
Does not know: chatrt's server. Invariant: one Llama object lives through the run, so that a
follow-up finds the history's keys and values, as its own prefix match allows.
Cost: a prefill of the history for each measurement, in this process.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from chatrt.bench.workload import sentence
from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    from pathlib import Path

    from chatrt.bench.histories import HistoriesOptions

_PACKAGE = "llama_cpp"
# Its template and everyday words come to about a token a word, as they do for the server.
_OVERHEAD_TOKENS = 30


@dataclass(frozen=True, slots=True)
class PeerSample:
    """A first turn as long as `history`, and a follow-up behind it; milliseconds to the first text.

    None where an answer had no text.
    """

    history: int
    repetition: int
    history_tokens: int
    cold_ms: float | None
    ttft_ms: float | None


def require_peer(path: Path | None) -> Path:
    """The file for llama.cpp.

    Raises:
        InvalidValue: llama-cpp-python is not installed, or the model is no GGUF file.
    """
    if importlib.util.find_spec(_PACKAGE) is None:
        raise InvalidValue("--peer needs llama-cpp-python, which is not installed")
    if path is None or path.suffix != ".gguf":
        raise InvalidValue(f"--peer needs a GGUF file on this machine, the model is {path}")
    return path


class LlamaPeer:
    """One model in llama.cpp.

    Args:
        path: The GGUF file.
        options: Lengths of texts and answers, as the server is asked.
        num_threads: Threads that compute.
        max_context: Tokens.
    """

    def __init__(
        self, path: Path, options: HistoriesOptions, *, num_threads: int, max_context: int
    ) -> None:
        package: Any = importlib.import_module(_PACKAGE)
        self.samples: list[PeerSample] = []
        self._options = options
        self._llama = package.Llama(
            model_path=str(path),
            n_ctx=max_context,
            n_threads=num_threads,
            n_threads_batch=num_threads,
            seed=options.seed,
            verbose=False,
        )

    def measure(self, history: int, repetition: int) -> None:
        """Take one sample."""
        random = Random(f"{self._options.seed}/llama.cpp/{history}/{repetition}")
        words = sentence(random, max(1, history - _OVERHEAD_TOKENS))
        messages = [{"role": "user", "content": f"{history}/{repetition}: {words}"}]
        answer, cold_ms = self._turn(messages)
        num_tokens = int(self._llama.n_tokens)
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": sentence(random, self._options.message_words)},
        ]
        _, ttft_ms = self._turn(messages)
        self.samples.append(PeerSample(history, repetition, num_tokens, cold_ms, ttft_ms))

    def close(self) -> None:
        """Give its memory back."""
        self._llama.close()

    def _turn(self, messages: list[dict[str, str]]) -> tuple[str, float | None]:
        """The answer and the time to its first text."""
        pieces: list[str] = []
        ttft_ms = None
        started_ns = time.perf_counter_ns()
        for chunk in self._llama.create_chat_completion(
            messages=messages,
            max_tokens=self._options.max_output_tokens,
            temperature=0.0,
            stream=True,
        ):
            text = chunk["choices"][0]["delta"].get("content")
            if text:
                if ttft_ms is None:
                    ttft_ms = (time.perf_counter_ns() - started_ns) / 1e6
                pieces.append(text)
        return "".join(pieces), ttft_ms
