"""Streams without a device, whose work is late until a test, or another stream, wants it done.

Knows: what was given, in which order. Does not know: tensors.
Invariant: work is done in the order of its stream and never before the marks that it waits for;
nothing else is promised, as with a device's streams.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from chatrt_kernels.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatrt_kernels.streams import Mark


@dataclass(slots=True, eq=False)
class LateMark:
    """Implements `Mark`; the host's waits are counted with its stream."""

    stream: LateStream
    done: bool = False

    def is_done(self) -> bool:
        """Whether its stream came by."""
        return self.done

    def wait(self) -> None:
        """The stream goes on up to here, and notes that the host waited."""
        self.stream.num_host_waits += not self.done
        self.stream.advance_to(self)


class LateStream:
    """Implements `Stream`; `advance` does its work.

    `num_stalls` counts marks of this stream that another one had to wait for, `num_host_waits`
    those that the host did.

    Args:
        prompt: Does all work as soon as it is given: a computing stream whose results a test reads.
    """

    def __init__(self, *, prompt: bool = False) -> None:
        self.num_stalls = 0
        self.num_host_waits = 0
        self._prompt = prompt
        self._items: deque[Callable[[], bool]] = deque()

    def __len__(self) -> int:
        """Items that are not done."""
        return len(self._items)

    def launch(self, work: Callable[[], None]) -> None:
        """Work behind all that was given."""
        self._give(partial(_worked, work))

    def record(self) -> LateMark:
        """A mark behind all that was given."""
        mark = LateMark(self)
        self._give(partial(_marked, mark))
        return mark

    def wait(self, mark: Mark) -> None:
        """What is given from now on comes behind `mark`."""
        assert isinstance(mark, LateMark), "a mark of another kind of stream"
        if self._prompt and not mark.done:
            mark.stream.num_stalls += 1
            mark.stream.advance_to(mark)
        self._give(mark.is_done)

    def advance(self) -> bool:
        """Do the next item; False if there is none, or it waits for another stream."""
        if not self._items or not self._items[0]():
            return False
        self._items.popleft()
        return True

    def advance_to(self, mark: LateMark) -> None:
        """Do everything up to a mark of this stream; what that waits for must be done."""
        while not mark.done:
            assert self.advance(), "the stream waits for work that is not done"

    def finish(self) -> None:
        """Do everything; what it waits for must be done."""
        while self._items:
            assert self.advance(), "the stream waits for work that is not done"

    def _give(self, item: Callable[[], bool]) -> None:
        self._items.append(item)
        if self._prompt:
            self.finish()


def late_streams() -> tuple[Streams, LateStream]:
    """A stream that computes at once and a late one for all copies, which is returned too."""
    beside = LateStream()
    return Streams(LateStream(prompt=True), beside, beside, pinned=False), beside


def _worked(work: Callable[[], None]) -> bool:
    work()
    return True


def _marked(mark: LateMark) -> bool:
    mark.done = True
    return True
