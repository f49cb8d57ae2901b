"""Tells what a model thinks aloud from what it answers.

Knows: `<think> … </think>` at the start of an answer, as reasoning models write it.
Does not know: widgets, Markdown. A think block anywhere else is text like any other.
Invariant: how the text was cut into pieces changes nothing; thought and answer together are the
text without the two marks and the blanks around them.
"""

from __future__ import annotations

from dataclasses import dataclass

_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Said:
    """What a piece of text adds: first to the thought, then to the answer."""

    thought: str = ""
    answer: str = ""


class ThoughtSplitter:
    """Takes an answer in pieces and says what each adds to thought and answer."""

    def __init__(self) -> None:
        self._held = ""
        self._state = "start"  # start, thinking, between, answering
        self._has_thought = False

    @property
    def is_thinking(self) -> bool:
        """Whether a thought has begun and not ended."""
        return self._state == "thinking"

    def feed(self, piece: str) -> Said:
        """What `piece` adds."""
        if self._state == "answering":
            return Said(answer=piece)
        text, self._held = self._held + piece, ""
        if self._state == "start":
            bare = text.lstrip()
            if _OPEN.startswith(bare[: len(_OPEN)]) and len(bare) < len(_OPEN):
                self._held = text
                return Said()
            if not bare.startswith(_OPEN):
                self._state = "answering"
                return Said(answer=text)
            self._state, text = "thinking", bare[len(_OPEN) :]
        if self._state == "thinking":
            return self._think(text)
        return self._begin_answer(text)

    def finish(self) -> Said:
        """What was still held back, at the end of the text."""
        held, self._held = self._held, ""
        return Said(thought=held) if self._state == "thinking" else Said(answer=held)

    def _think(self, text: str) -> Said:
        if not self._has_thought:
            text = text.lstrip("\n")  # models begin a line behind the mark, in a piece of its own
        thought, mark, rest = text.partition(_CLOSE)
        if mark:
            self._state = "between"
            return Said(thought.rstrip(), self._begin_answer(rest).answer)
        num_held = next((n for n in range(len(_CLOSE) - 1, 0, -1) if text.endswith(_CLOSE[:n])), 0)
        blank = len(text) - num_held - len(text[: len(text) - num_held].rstrip())
        keep = len(text) - num_held - blank
        self._held = text[keep:]
        self._has_thought = self._has_thought or keep > 0
        return Said(text[:keep])

    def _begin_answer(self, text: str) -> Said:
        answer = text.lstrip()
        if not answer:
            return Said()
        self._state = "answering"
        return Said(answer=answer)


def split_thought(text: str) -> Said:
    """Thought and answer of a whole text."""
    splitter = ThoughtSplitter()
    said, rest = splitter.feed(text), splitter.finish()
    return Said(said.thought + rest.thought, said.answer + rest.answer)
