"""A device's streams as whoever copies beside a computation needs them: work in order, and marks.

    # compute   … step │ gather │ mark a │ step │ wait for b │ scatter │ step …
    # out                         wait for a │ copy
    # back                  copy │ mark b

Knows: order within a stream, waiting of one for another. Does not know: what the work is.
Invariant: work begins when all that was given to its stream before is done, what it waits for too;
nothing here but `Mark.wait` makes the host wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class Mark(Protocol):
    """A place in a stream's order."""

    def is_done(self) -> bool:
        """Whether all in front of it is done, as far as is known now."""
        ...

    def wait(self) -> None:
        """Return when it is: the host waits."""
        ...


class Stream(Protocol):
    """Work that a device does in the order in which it is given."""

    def launch(self, work: Callable[[], None]) -> None:
        """Give what `work` launches to this stream."""
        ...

    def record(self) -> Mark:
        """A mark behind all that was given so far."""
        ...

    def wait(self, mark: Mark) -> None:
        """Whatever is given from now on begins when this mark, of any stream, is done."""
        ...


@dataclass(frozen=True, slots=True)
class Streams:
    """Where a model computes, and where is copied meanwhile, to main memory and from it.

    `pinned`: copies go on by themselves only where main memory is.
    """

    compute: Stream
    out: Stream
    back: Stream
    pinned: bool


@dataclass(frozen=True, slots=True)
class _CudaMark:
    event: torch.cuda.Event

    def is_done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class CudaStream:
    """Implements `Stream`: one of its own, or (None) the one that is current for the caller."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    def launch(self, work: Callable[[], None]) -> None:
        """Launched with this stream as the current one."""
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> _CudaMark:
        """An event."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._now())
        return _CudaMark(event)

    def wait(self, mark: Mark) -> None:
        """The stream waits for the event, the host does not."""
        assert isinstance(mark, _CudaMark), "a mark of another kind of stream"
        self._now().wait_event(mark.event)

    def _now(self) -> torch.cuda.Stream:
        return self._stream or torch.cuda.current_stream()


def cuda_streams(device: torch.device) -> Streams:
    """The stream that computes on a GPU, and two new ones: a device copies both ways at a time."""
    out, back = (
        CudaStream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    return Streams(CudaStream(None), out, back, pinned=True)
