"""Turns as a client knows them: what was asked, what came of it, what may have.

Knows: frames of the wire. Does not know: sockets, what a turn must give.
Invariant: a reading's numbers grow, its last event is its last frame, and its text is the answer's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chatrt.wire.log import DELTA

if TYPE_CHECKING:
    from chatrt.text.messages import Message

TERMINAL = ("response.completed", "response.incomplete", "response.failed")
ANSWER, PREFILL, PARTIAL = "answer", "prefill", "partial"


@dataclass(eq=False)
class Conversation:
    """A conversation; `newest` are the turns of which one is its newest, None: it is empty."""

    key: str
    conversation_id: str
    newest: list[Turn | None] = field(default_factory=lambda: [None])
    gone: bool = False


@dataclass(eq=False)
class Reading:
    """What one connection got of one response, from behind `start_text` on."""

    start_text: str = ""
    after: int | None = None
    numbers: list[int] = field(default_factory=list)
    deltas: list[tuple[int, str]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None

    def take(self, event: dict[str, Any]) -> None:
        """One more frame; asserts that it may follow those before."""
        assert self.end is None, f"{event['type']} behind the last event of a response"
        number = event["sequence_number"]
        last = self.numbers[-1] if self.numbers else self.after
        assert number > (-1 if last is None else last), (number, last)
        self.numbers.append(number)
        if event["type"] == DELTA:
            self.deltas.append((number, event["delta"]))
            self.logprobs += event["logprobs"]
        elif event["type"] in TERMINAL:
            self.end = event["response"]
            assert self.text == text_of(event["response"])

    @property
    def text(self) -> str:
        """The answer's text as far as it is known here."""
        return self.start_text + "".join(delta for _, delta in self.deltas)

    def resumed(self, index: int) -> Reading:
        """A reading that goes on behind this one's event `index`."""
        after = self.numbers[index]
        shown = "".join(delta for number, delta in self.deltas if number <= after)
        return Reading(self.start_text + shown, after)


@dataclass(eq=False, repr=False)
class Turn:
    """A turn that was asked for. `parents` are the turns of which it follows one (None: none).

    `may` holds what may become of it besides an answer: status or error codes. `link` is the turn
    that it cannot go on without, known once it was `checked`.
    """

    number: int
    key: str
    kind: str
    frame: dict[str, Any]
    messages: tuple[Message, ...]
    parents: list[Turn | None]
    conversation: Conversation | None
    may: set[str] = field(default_factory=set)
    response_id: str | None = None
    readings: list[Reading] = field(default_factory=list)
    error: dict[str, Any] | None = None
    end: dict[str, Any] | None = None
    dropped: bool = False
    gone: bool = False
    unsure: bool = False
    checked: bool = False
    parent: Turn | None = None
    link: Turn | None = None
    base: Turn | None = None
    carried: tuple[Message, ...] = ()
    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)

    def __repr__(self) -> str:
        """Enough to find it by."""
        facts = f"{self.kind} {self.number} {self.status or self.error or 'without an end'}"
        return f"<{facts}, {self.response_id}, {self.frame}, may {self.may}>"

    @property
    def is_open(self) -> bool:
        """Whether its end is still to come."""
        return self.end is None and self.error is None and not self.dropped

    @property
    def status(self) -> str | None:
        """How its response ended."""
        return None if self.end is None else self.end["status"]

    @property
    def stored(self) -> bool:
        """Whether it is to be found after a restart."""
        return bool(self.frame.get("store", True))

    @property
    def is_parent(self) -> bool:
        """Whether it ended as something that can be continued."""
        usable = self.kind != PARTIAL and self.status not in (None, "failed")
        return usable and not self.gone

    @property
    def follows_unheard(self) -> bool:
        """Whether it may follow one of which nobody heard how it ended before it was gone."""
        return any(
            p is not None and p.end is None and p.error is None and (p.dropped or p.gone)
            for p in self.parents
        )

    @property
    def sequence_ids(self) -> list[int]:
        """All ids of its tip."""
        return [*self.prompt_ids, *self.output_ids]

    def goes_on(self) -> bool | None:
        """Whether it can be continued: all that it builds on is there; None if it is unsure."""
        turn: Turn | None = self
        unsure = False
        while turn is not None:
            if turn.gone or not turn.is_parent:
                return None if unsure else False
            unsure = unsure or turn.unsure
            turn = turn.link
        return None if unsure else True


def text_of(response: dict[str, Any]) -> str:
    """The text of a response object."""
    return "".join(part["text"] for item in response["output"] for part in item["content"])
