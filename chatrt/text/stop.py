"""Stop strings in a stream of text.

Knows: text pieces and stop strings. Does not know: tokens.
Invariant: released + held text = pushed text until a stop is found; what is held is exactly the
longest suffix that is a proper prefix of a stop.
Cost: O(number of stops) per character, whatever their length.
Source: Knuth, Morris, Pratt, "Fast pattern matching in strings" (1977).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text that may be shown now, and the stop string that ended the stream, if one did."""

    text: str
    stop: str | None = None


class StopScanner:
    """Finds the stop string that is complete first; of several at one place, the longest.

    `stops` must not contain an empty string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would end every answer"
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""
        self._found: str | None = None

    @property
    def num_held(self) -> int:
        """Number of characters pushed but not yet released."""
        return len(self._held)

    def push(self, text: str) -> StopResult:
        """Take the next piece. At a stop, it and everything behind it are dropped, for good."""
        if self._found is not None:
            return StopResult("", self._found)
        if not self._patterns:
            return StopResult(text)
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            complete = [p.stop for p in self._patterns if p.advance(character)]
            if complete:
                self._found = max(complete, key=len)
                self._held = ""
                return StopResult(pending[: end - len(self._found)], self._found)
        num_held = max(pattern.num_matched for pattern in self._patterns)
        border = len(pending) - num_held
        self._held = pending[border:]
        return StopResult(pending[:border])

    def flush(self) -> str:
        """Release what is held, at the end of the stream."""
        text, self._held = self._held, ""
        for pattern in self._patterns:
            pattern.num_matched = 0
        return text


class _Pattern:
    """One stop string and how much of it the text's end matches."""

    __slots__ = ("_borders", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._borders = _borders(stop)

    def advance(self, character: str) -> bool:
        """Take one character; whether the stop string is now complete."""
        matched = self.num_matched
        while matched and self.stop[matched] != character:
            matched = self._borders[matched]
        self.num_matched = matched + (self.stop[matched] == character)
        return self.num_matched == len(self.stop)


def _borders(stop: str) -> list[int]:
    """For each length n, that of the longest proper suffix of `stop[:n]` which starts `stop`."""
    borders = [0] * (len(stop) + 1)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length]
        length += stop[index] == stop[length]
        borders[index + 1] = length
    return borders
