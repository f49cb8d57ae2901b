"""A scripted server in a process of its own, for clients whose painting is timed.

    "hold …"   the answer waits until `release`, which says when its first piece was sent
    anything   pieces at an even pace, for as long as the client lets them come

Knows: the scripted server, a pipe to the process. Does not know: the client, terminals.
Invariant: the process has ended when the context does.
Source: `time.perf_counter_ns`, which on Linux and macOS is one clock for all processes.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from chatrt.testing.scripted_answer import ScriptedAnswer
from chatrt.testing.scripted_server import ScriptedServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

HELD = "hold"
FIRST_PIECE = "Xylophone "
_WORDS = ("alpha ", "beta ", "gamma, ", "*delta* ", "epsilon ", "zeta ", "eta ", "theta. ")
_PARAGRAPH_PIECES = 60
_LONGEST_STREAM = 100_000


class PacedServer:
    """Where the server listens, and how its held answer is let go."""

    def __init__(self, url: str, pipe: Connection) -> None:
        self.url = url
        self._pipe = pipe

    def release(self) -> int:
        """Send the first piece of the answer that is held; the `perf_counter_ns` of it."""
        self._pipe.send("release")
        sent_ns: int = self._pipe.recv()
        return sent_ns


@contextmanager
def paced_server(pieces_per_s: float) -> Iterator[PacedServer]:
    """The server while it runs; its streams have so many pieces a second."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, pieces_per_s), daemon=True)
    process.start()
    try:
        yield PacedServer(ours.recv(), ours)
    finally:
        process.kill()
        process.join()


def paragraphs() -> Iterator[str]:
    """Words without end, with an empty line now and then."""
    for number, word in enumerate(itertools.cycle(_WORDS), 1):
        yield word if number % _PARAGRAPH_PIECES else f"{word}\n\n"


def _serve(pipe: Connection, pieces_per_s: float) -> None:
    asyncio.run(_Paced(pipe, pieces_per_s).run())


class _Paced:
    def __init__(self, pipe: Connection, pieces_per_s: float) -> None:
        self._pipe = pipe
        self._stream = list(itertools.islice(paragraphs(), _LONGEST_STREAM))
        self._pause_s = 1 / pieces_per_s
        self._release = asyncio.Event()

    async def run(self) -> None:
        async with ScriptedServer(self._answer) as server:
            self._pipe.send(server.url)
            while await asyncio.to_thread(self._pipe.recv) == "release":
                sent_ns = time.perf_counter_ns()
                self._release.set()
                self._pipe.send(sent_ns)

    def _answer(self, message: dict[str, Any]) -> ScriptedAnswer:
        self._release = asyncio.Event()
        if HELD in str(message.get("input")):
            return ScriptedAnswer([FIRST_PIECE, "and no more."], holds_at=0, go_on=self._release)
        return ScriptedAnswer(self._stream, delay_s=self._pause_s)
