"""What a person at the terminal waits for: its prompt, and the first painted character.

Knows: `chatrt chat` as a command, where on its screen an answer begins, the keys of the client.
Does not know: how the client works, percentiles, tables.
Invariant: a painted time runs from the moment Enter is written to the terminal until a character of
the answer has been read back from it; nothing inside the client is asked.
Cost: reading and placing what is painted is part of each time, below a millisecond.
"""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Literal, TypeAlias

from chatrt.bench.pseudo_terminal import in_a_terminal
from chatrt.errors import ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from chatrt.bench.pseudo_terminal import Screen, Terminal

Case: TypeAlias = Literal["cold", "follow_up", "typed_ahead"]
CASES: tuple[Case, ...] = ("cold", "follow_up", "typed_ahead")

_QUESTIONS: dict[Case, str] = {
    "cold": "What is the capital of France? Please answer in one short sentence.",
    "follow_up": "And which city is the capital of Italy? One short sentence again.",
    "typed_ahead": "Thank you. Which of the two has more people? A single short sentence.",
}
_SIZE = {"num_rows": 60, "num_columns": 100}  # three short turns without scrolling
_ENTER, _NEW_CHAT = "\r", "\x0e"
_KEY_PAUSE_S = 0.03
_REST_S = 0.8  # longer than the pause behind which a half-typed text is sent, and its prefill
_WITHIN_S = 60.0
_TTFT = re.compile(r"TTFT\s+([\d.,]+) ms")
_WELCOME = "A new conversation"
_SAID, _ANSWERING = "▌", "answering"
_BELOW = 2  # rows from the last one of a question to the first one of its answer


@dataclass(frozen=True, slots=True)
class StartSample:
    """From the command to the prompt that one can type into, with a server that runs."""

    prompt_ms: float


@dataclass(frozen=True, slots=True)
class PaintSample:
    """One turn: Enter to the first painted character, and the client's own TTFT as it shows it."""

    case: Case
    repetition: int
    painted_ms: float
    client_ttft_ms: float | None


class TerminalBench:
    """Starts terminals and types into them; `on_sample` hears of each sample as it is taken.

    Args:
        url: The server.
        key_file: The file with its API key.
        repetitions: Terminals, and conversations of three turns.
        seed: What makes the questions of this run others than those of another one.
        on_sample: Called once for each of `num_samples`.
    """

    def __init__(
        self,
        url: str,
        key_file: Path,
        *,
        repetitions: int,
        seed: int,
        on_sample: Callable[[], None],
    ) -> None:
        self.starts: list[StartSample] = []
        self.paints: list[PaintSample] = []
        self.nonces: list[str] = []  # each conversation's first word, and so its title's
        self._arguments = [sys.executable, "-m", "chatrt", "chat", url]
        self._arguments += ["--api-key-file", str(key_file)]
        self._repetitions = repetitions
        self._seed = seed
        self._on_sample = on_sample

    def run(self) -> None:
        """Take all samples, behind one start and one conversation that are left out.

        Raises:
            ServerUnavailable: The terminal did not show what it should within a minute.
        """
        try:
            self._start()
            for _ in range(self._repetitions):
                self.starts.append(self._start())
                self._on_sample()
            self._chats()
        except TimeoutError as error:
            raise ServerUnavailable(f"the terminal client did not paint {error}") from error

    def _start(self) -> StartSample:
        started_ns = time.perf_counter_ns()
        with in_a_terminal(self._arguments, os.environ, **_SIZE) as terminal:
            _wait(terminal, lambda screen: _WELCOME in str(screen), "its prompt")
            return StartSample(_ms_since(started_ns))

    def _chats(self) -> None:
        with in_a_terminal(self._arguments, os.environ, **_SIZE) as terminal:
            for repetition in range(-1, self._repetitions):
                _wait(terminal, lambda screen: _WELCOME in str(screen), "a new conversation")
                # Nobody asked it before: what is shared is the template's own start.
                nonce = str(Random(f"{self._seed}/{repetition}").randrange(10**6))
                self.nonces.append(nonce)
                for case in CASES:
                    sample = _turn(terminal, case, f"{nonce}: {_QUESTIONS[case]}", repetition)
                    if repetition >= 0:
                        self.paints.append(sample)
                        self._on_sample()
                terminal.press(_NEW_CHAT)


def num_samples(repetitions: int) -> int:
    """How many samples a whole run takes."""
    return repetitions * (1 + len(CASES))


def _turn(terminal: Terminal, case: Case, question: str, repetition: int) -> PaintSample:
    if case == "typed_ahead":
        terminal.type_slowly(question, pause_s=_KEY_PAUSE_S)
    else:
        terminal.press(question)
    _wait(terminal, lambda screen: question in str(screen), "what was typed")
    if case == "typed_ahead":
        terminal.rest(_REST_S)
    sent_ns = time.perf_counter_ns()
    terminal.press(_ENTER)
    _wait(terminal, lambda screen: _answer_has_begun(screen, question), "an answer")
    painted_ms = _ms_since(sent_ns)
    _wait(terminal, lambda screen: _shown_ttft(screen) is not None, "the figures of the turn")
    return PaintSample(case, repetition, painted_ms, _shown_ttft(terminal.screen))


def _answer_has_begun(screen: Screen, question: str) -> bool:
    """Whether a letter stands below the question; one that is still in the prompt has a frame."""
    lines = screen.lines()
    asked = [row for row, line in enumerate(lines) if question in line and _SAID in line]
    return bool(asked) and re.search(r"\w", "".join(lines[asked[-1] + _BELOW :][:1])) is not None


def _shown_ttft(screen: Screen) -> float | None:
    """What the status line says of the last turn, None while it runs."""
    if _ANSWERING in str(screen):
        return None
    found = _TTFT.findall(str(screen))
    return float(found[-1].replace(",", "")) if found else None


def _wait(terminal: Terminal, seen: Callable[[Screen], object], what: str) -> None:
    terminal.until(seen, what, within_s=_WITHIN_S)


def _ms_since(started_ns: int) -> float:
    return (time.perf_counter_ns() - started_ns) / 1e6
