"""How fast `chatrt chat` paints, and what its painting takes from a server on the same machine.

Knows: the terminal client as a command with keys and a screen. Does not know: how it works.
Invariant: a time ends when what was waited for has been read back from the pseudo-terminal.
"""

from __future__ import annotations

import asyncio
import os
import string
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from chatrt.bench.pseudo_terminal import in_a_terminal
from chatrt.client import ChatClient, ResponseRequest
from chatrt.testing.paced_server import FIRST_PIECE, HELD
from chatrt.testing.reader import reading

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence

    from chatrt.bench.pseudo_terminal import Screen, Terminal
    from chatrt.launch import Endpoint
    from chatrt.testing.paced_server import PacedServer

_SIZE = {"num_rows": 40, "num_columns": 120}
_READY, _STREAMING, _DONE = "A new conversation", "epsilon", "and no more."
_ENTER, _BACKSPACE, _NEW_CHAT, _CONVERSATIONS = "\r", "\x7f", "\x0e", "\x0f"
_MOST_TYPED = 60  # so that what is typed stays on one line
_REST_S = 0.4
_WITHIN_S = 60.0
_GREETING = "Good morning."
_TASK = "Write a very long poem about the sea. Every line has four words."


@dataclass(frozen=True, slots=True)
class Answered:
    """A long answer: milliseconds for each token, its tokens, its lines."""

    tpot_ms: float
    num_tokens: int
    num_lines: int


@contextmanager
def chatting(url: str, arguments: Sequence[str] = ()) -> Iterator[Terminal]:
    """`chatrt chat` with its prompt shown."""
    command = [sys.executable, "-m", "chatrt", "chat", url, *arguments]
    with in_a_terminal(command, os.environ, **_SIZE) as terminal:
        _wait(terminal, lambda screen: _READY in str(screen), "its prompt")
        yield terminal


def start_times_ms(url: str, count: int, arguments: Sequence[str] = ()) -> list[float]:
    """From the command to the prompt, for `count` starts behind one that is left out."""
    times = []
    for _ in range(1 + count):
        started_ns = time.perf_counter_ns()
        with chatting(url, arguments):
            times.append(_ms_since(started_ns))
    return times[1:]


def key_times_ms(server: PacedServer, count: int, *, seed: int = 0) -> list[float]:
    """From a key to its letter in the prompt, while the server's stream is painted."""
    random, typed = Random(seed), ""
    times: list[float] = []
    with chatting(server.url) as terminal:
        terminal.press(f"go on{_ENTER}")
        _wait(terminal, lambda screen: _STREAMING in str(screen), "the stream")
        while len(times) < count:
            if len(typed) == _MOST_TYPED:
                terminal.press(_BACKSPACE * len(typed))
                typed = ""
            typed += random.choice(string.ascii_uppercase)
            terminal.rest(random.uniform(0.02, 0.12))
            pressed_ns = time.perf_counter_ns()
            terminal.press(typed[-1])
            _wait(terminal, partial(_shows, typed), "a typed letter")
            times.append(_ms_since(pressed_ns))
    return times


def first_paint_times_ms(server: PacedServer, count: int) -> list[float]:
    """From a first delta sent to its text on the screen, behind one turn that is left out."""
    times = []
    with chatting(server.url) as terminal:
        for number in range(1 + count):
            _wait(terminal, lambda screen: _READY in str(screen), "a new conversation")
            terminal.press(f"{HELD} {number}{_ENTER}")
            _wait(terminal, lambda screen: "answering" in str(screen), "that it waits")
            terminal.rest(_REST_S)
            sent_ns = server.release()
            _wait(terminal, lambda screen: FIRST_PIECE.strip() in str(screen), "the first piece")
            times.append(_ms_since(sent_ns))
            _wait(terminal, lambda screen: _DONE in str(screen), "the end")
            terminal.press(_NEW_CHAT)
    return times[1:]


def long_answer(endpoint: Endpoint, num_tokens: int, *, seed: int) -> Answered:
    """A long answer that is read and not painted; of one seed it is always the same text."""
    conversation_id = asyncio.run(_short_conversation(endpoint, _new_title()))
    with reading(endpoint, conversation_id):
        return asyncio.run(_long_answer(endpoint, conversation_id, num_tokens, seed))


def painted_answer(
    endpoint: Endpoint, num_tokens: int, arguments: Sequence[str], *, seed: int
) -> Answered:
    """The same answer, painted by a terminal as it comes."""
    title = _new_title()
    conversation_id = asyncio.run(_short_conversation(endpoint, title))
    with chatting(endpoint.url, arguments) as terminal:
        terminal.press(_CONVERSATIONS)
        _wait(terminal, lambda screen: title in str(screen), "the conversation in the list")
        terminal.press(title)
        terminal.rest(_REST_S)
        terminal.press(_ENTER)
        _wait(terminal, lambda screen: _GREETING in str(screen), "the conversation")
        answering = _long_answer(endpoint, conversation_id, num_tokens, seed)
        return asyncio.run(_painted(answering, terminal))


def _new_title() -> str:
    return f"watched {time.time_ns()}"


async def _painted(answer: Coroutine[Any, Any, Answered], terminal: Terminal) -> Answered:
    """What is painted is read all the while, as a terminal does, and not looked at."""
    answering = asyncio.ensure_future(answer)
    while not answering.done():
        await asyncio.to_thread(terminal.discard, 0.2)
    return await answering


async def _short_conversation(endpoint: Endpoint, title: str) -> str:
    async with await ChatClient.connect(endpoint.url, api_key=endpoint.api_key) as client:
        conversation_id = await client.create_conversation(title)
        request = ResponseRequest(
            # greedy, so that the long answers of a seed behind it are the same text
            input=_GREETING,
            conversation=conversation_id,
            sampling={"temperature": 0.0, "max_output_tokens": 4},
        )
        await (await client.send(request)).collect()
        return conversation_id


async def _long_answer(
    endpoint: Endpoint, conversation_id: str | None, num_tokens: int, seed: int
) -> Answered:
    async with await ChatClient.connect(endpoint.url, api_key=endpoint.api_key) as client:
        request = ResponseRequest(
            input=_TASK,
            conversation=conversation_id,
            sampling={
                "temperature": 0.8,  # greedy, a small model soon writes one line without end
                "seed": seed,
                "max_output_tokens": num_tokens,
                "ignore_eos": True,
            },
        )
        result = await (await client.send(request)).collect()
    num_generated = int(result.usage["output_tokens"])
    num_lines = 1 + result.text.count("\n")
    return Answered(float(result.timing["tpot_ms"]), num_generated, num_lines)


def _shows(typed: str, screen: Screen) -> bool:
    """Whether the prompt, and not what is painted above it, holds just what was typed."""
    return any(line.startswith(" │ ") and line.strip(" │") == typed for line in screen.lines())


def _wait(terminal: Terminal, seen: Any, what: str) -> None:
    terminal.until(seen, what, within_s=_WITHIN_S)


def _ms_since(started_ns: int) -> float:
    return (time.perf_counter_ns() - started_ns) / 1e6
