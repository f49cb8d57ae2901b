"""What can be done to a living world, as operations that a test draws.

Knows: the world, hypothesis' strategies. Does not know: in which order things happen.
Invariant: what an operation is drawn from depends on nothing that happened before: what there is
then depends on time. An operation that finds nothing to do does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from hypothesis import strategies as st

from tests.chatrt.living_draws import (
    MAX_CONTEXT,
    TOKENIZER,
    UNKNOWN_CONVERSATION,
    UNKNOWN_RESPONSE,
    lanes,
    options,
    paces,
    picks,
    texts,
)
from tests.chatrt.living_oracle import Oracle
from tests.chatrt.living_server import KEYS, Size
from tests.chatrt.living_turns import ANSWER, PARTIAL, PREFILL, Conversation, Reading, Turn
from tests.chatrt.living_world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.chatrt.living_support import Line

T = TypeVar("T")

# The operations by name, with what their arguments are drawn from; the first does nothing.
OPERATIONS: dict[str, st.SearchStrategy[dict[str, Any]]] = {"nothing": st.just({})}


def operation(
    **arguments: st.SearchStrategy[Any],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds a method to the operations."""

    def add(method: Callable[..., None]) -> Callable[..., None]:
        OPERATIONS[method.__name__] = st.fixed_dictionaries(arguments)
        return method

    return add


def picked(several: Sequence[T], pick: int) -> T | None:
    """One of several, counted from the newest on; None if there is none."""
    return several[-1 - pick % len(several)] if several else None


class Life:
    """A world, and what can be done in it. Where there is nothing to do it to, nothing happens."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.w = World(TOKENIZER, folder, size, Oracle(TOKENIZER, size))
        for key in (KEYS[0], KEYS[0], KEYS[1]):
            self.w.clients.connect(key)
        self.w.server.pace.hold()

    def nothing(self) -> None:
        """Nothing happens."""

    # Helpers -------------------------------------------------------------------------------------

    def line(self, pick: int, key: str | None = None) -> Line:
        """A connection that is read, of a key if one is named; a new one where there is none."""
        lines = [
            one
            for one in self.w.clients.lines
            if key in (None, one.key) and not one.closed and one.may_read.is_set()
        ]
        return picked(lines, pick) or self.w.clients.connect(key or KEYS[pick % 2])

    def go_on(self, num_steps: int | None) -> None:
        """Let the engine take so many steps, or run."""
        pace = self.w.server.pace
        if num_steps is None:
            pace.free()
        else:
            pace.hold()
            pace.allow(num_steps)
            pace.wait_used()
        self.w.clients.raise_faults()

    def ask(self, pick: int, lane: str, text: str, parent: Turn | None, **fields: Any) -> Turn:
        """A turn behind a parent, on a connection of its key."""
        if parent is not None:
            fields["previous_response_id"] = parent.response_id
        fields.setdefault("parents", [parent])
        fields.setdefault("chat", parent.conversation if parent else None)
        line = self.line(pick, parent.key if parent else None)
        return self.w.ask(line, lane, text, **fields)

    def known(self) -> list[Turn]:
        """Turns whose ids the clients know."""
        return [t for t in self.w.turns if t.response_id is not None]

    def there(self) -> list[Conversation]:
        """Conversations that are not deleted."""
        return [one for one in self.w.conversations if not one.gone]

    # Turns ---------------------------------------------------------------------------------------

    @operation(pick=picks, lane=lanes, text=texts, fields=options, pace=paces)
    def open_chat(
        self, pick: int, lane: str, text: str, fields: dict[str, Any], pace: int | None
    ) -> None:
        """A first turn, in no conversation."""
        self.ask(pick, lane, text, None, **fields)
        self.go_on(pace)

    @operation(which=picks, pick=picks, lane=lanes, text=texts, fields=options, pace=paces)
    def follow_up(
        self, which: int, pick: int, lane: str, text: str, fields: dict[str, Any], pace: int | None
    ) -> None:
        """In place behind the newest turn; behind an older one a fork, or an edited message."""
        parent = picked(self.w.parents, which)
        if parent is not None:
            self.ask(pick, lane, text, parent, **fields)
        self.go_on(pace)

    @operation(which=picks, pick=picks, lane=lanes, fields=options, pace=paces)
    def regenerate(
        self, which: int, pick: int, lane: str, fields: dict[str, Any], pace: int | None
    ) -> None:
        """The same question once more."""
        old = picked([t for t in self.w.parents if t.kind == ANSWER], which)
        if old is not None and (old.parent is None or old.parent.is_parent):
            self.ask(pick, lane, old.frame["input"], old.parent, **fields)
        self.go_on(pace)

    @operation(which=picks, pick=picks, lane=lanes, text=texts, pace=paces, begins=st.booleans())
    def prefill(
        self, which: int, pick: int, lane: str, text: str, pace: int | None, *, begins: bool
    ) -> None:
        """A prompt whose answer is not wanted yet."""
        parent = None if begins else picked(self.w.parents, which)
        self.ask(pick, lane, text, parent, kind=PREFILL)
        self.go_on(pace)

    @operation(
        which=picks,
        lane=lanes,
        text=texts,
        lengths=st.lists(st.integers(0, 60), min_size=1, max_size=4),
        fields=options,
        pace=paces,
        sent=st.booleans(),
    )
    def type_ahead(
        self,
        which: int,
        lane: str,
        text: str,
        lengths: list[int],
        fields: dict[str, Any],
        pace: int | None,
        *,
        sent: bool,
    ) -> None:
        """Typed in pieces, perhaps taken back in part, each computed in part, perhaps sent."""
        parent = picked([None, *self.w.parents], which)
        line = self.line(which, parent.key if parent else None)
        shared: dict[str, Any] = {
            "parents": [parent],
            "chat": parent.conversation if parent else None,
        }
        if parent is not None:
            shared["previous_response_id"] = parent.response_id
        for length in lengths:
            self.w.ask(line, lane, text[:length], kind=PARTIAL, **shared)
            self.go_on(pace)
        if sent and not line.closed:
            self.w.ask(line, lane, text, **shared, **fields)
            self.go_on(pace)

    @operation(which=picks, pick=picks, lane=lanes, text=texts, fields=options, pace=paces)
    def converse(
        self, which: int, pick: int, lane: str, text: str, fields: dict[str, Any], pace: int | None
    ) -> None:
        """In a conversation, by its id; a new one now and then."""
        chosen = None if which == 5 else picked(self.there()[-3:], which)
        line = self.line(pick, chosen.key if chosen else None)
        if chosen is None:
            reply = self.w.clients.request(line, {"type": "chatrt.conversation.create"})
            chosen = Conversation(line.key, reply["conversation"]["id"])
            self.w.conversations.append(chosen)
        self.w.ask(
            line,
            lane,
            text,
            parents=self.w.newest(chosen),
            chat=chosen,
            **{**fields, "conversation": chosen.conversation_id},
        )
        self.go_on(pace)

    # What comes between --------------------------------------------------------------------------

    @operation(pick=picks, lane=lanes, how=st.sampled_from(["lane", "id", "http"]), pace=paces)
    def cancel(self, pick: int, lane: str, how: str, pace: int | None) -> None:
        """What runs on a lane, or one response by its id."""
        if how == "lane":
            self.w.cancel_lane(self.line(pick), lane)
        else:
            turn = picked([t for t in self.known() if t.is_open], pick)
            if turn is not None:
                self.w.cancel(turn, self.line(pick, turn.key), by_http=how == "http")
        self.go_on(pace)

    @operation(
        which=picks,
        pick=picks,
        text=texts,
        fields=options,
        num_steps=st.integers(0, 40),
        how=st.sampled_from(["cancel", "reset", "delete", "kill", "lane", "restart"]),
        pace=paces,
    )
    def interrupt(
        self,
        which: int,
        pick: int,
        text: str,
        fields: dict[str, Any],
        num_steps: int,
        how: str,
        pace: int | None,
    ) -> None:
        """A long answer that something happens to on the way; lost ones are read on elsewhere."""
        parent = picked([None, *self.w.parents], which)
        line = self.line(pick, parent.key if parent else None)
        named = {} if parent is None else {"previous_response_id": parent.response_id}
        chat = parent.conversation if parent else None
        fields = {**fields, **named, "max_output_tokens": 60}
        is_free = not any(lane == "long" for lane, _ in line.open_turns)
        is_free = is_free and not any(t.is_open for t in line.waiting.get("long", ()))
        turn = self.w.ask(line, "long", text, parents=[parent], chat=chat, **fields)
        self.go_on(num_steps)
        if is_free:
            self.w.clients.until(lambda: turn.response_id or not turn.is_open, lambda: (turn, line))
        if turn.response_id is None:
            return
        if how == "lane":
            self.w.cancel_lane(line, "long")
        elif how == "cancel":
            self.w.cancel(turn, line, by_http=num_steps % 2 == 0)
        elif how == "delete":
            self.w.delete(turn)
        elif how == "reset":
            self.w.clients.drop(line, "abort")
            seen = turn.readings[0]
            self.go_on(pace)
            self.w.resume(self.line(pick, turn.key), turn, seen.resumed(len(seen.numbers) - 1))
        else:
            self.w.restart(kill=how == "kill")
        self.go_on(pace)

    @operation(pick=picks, how=st.sampled_from(["abort", "close", "stalled"]), pace=paces)
    def lose_connection(self, pick: int, how: str, pace: int | None) -> None:
        """By a reset, a close frame, or after it was not read for a while."""
        line = self.line(pick)
        if how == "stalled":
            self.w.clients.stall(line, reads=False)
            self.go_on(pace)
        self.w.clients.drop(line, "close" if how == "close" else "abort")
        self.go_on(pace)

    @operation(pick=picks, pace=paces)
    def stop_reading(self, pick: int, pace: int | None) -> None:
        """A connection is not read until all is quiet, or it is lost."""
        self.w.clients.stall(self.line(pick), reads=False)
        self.go_on(pace)

    @operation(which=picks, pick=picks, seen=st.integers(0, 40), pace=paces)
    def resume(self, which: int, pick: int, seen: int, pace: int | None) -> None:
        """On any connection of the key, from the start or from behind an event that was seen."""
        turn = picked([t for t in self.known() if t.kind != PARTIAL and not t.gone], which)
        if turn is not None:
            line = self.line(pick, turn.key)
            earlier = picked([one for one in turn.readings if one.numbers], pick)
            if earlier is None or seen == 0:
                reading = Reading()
            else:
                reading = earlier.resumed(seen % len(earlier.numbers))
            self.w.resume(line, turn, reading)
        self.go_on(pace)

    @operation(which=picks, pick=picks, pace=paces)
    def view(self, which: int, pick: int, pace: int | None) -> None:
        """Watch a conversation from another connection, or from its own."""
        chosen = picked(self.there(), which)
        if chosen is not None:
            frame = {"type": "chatrt.conversation.subscribe", "id": chosen.conversation_id}
            line = self.line(pick, chosen.key)
            self.w.clients.send(line, {**frame, "stream_id": "views"})
        self.go_on(pace)

    @operation(which=picks, pace=paces)
    def delete_response(self, which: int, pace: int | None) -> None:
        """Whether it runs or has ended."""
        there = [t for t in self.known() if t.kind != PARTIAL and not t.gone]
        turn = picked([t for t in there if "lost" not in t.may], which)
        if turn is not None:
            self.w.delete(turn)
        self.go_on(pace)

    @operation(which=picks, pace=paces)
    def delete_conversation(self, which: int, pace: int | None) -> None:
        """With what runs in it."""
        chosen = picked(self.there(), which)
        if chosen is not None and which > 2:  # else there would hardly be any
            self.w.delete_conversation(chosen)
        self.go_on(pace)

    # Who may not, and what cannot ----------------------------------------------------------------

    @operation(which=picks, what=st.sampled_from(["follow", "resume", "cancel", "get", "delete"]))
    def be_a_stranger(self, which: int, what: str) -> None:
        """Another key's ids do not exist, in the words of ids that nobody has."""
        turn = picked(self.known(), which)
        if turn is not None:
            key = KEYS[1 - KEYS.index(turn.key)]
            mine = self.refusal(which, what, key, str(turn.response_id))
            nobodys = self.refusal(which, what, key, UNKNOWN_RESPONSE)
            assert mine.replace(str(turn.response_id), UNKNOWN_RESPONSE) == nobodys

    def refusal(self, pick: int, what: str, key: str, response_id: str) -> str:
        """The sentence with which a response is refused."""
        if what in ("get", "delete"):
            path = f"/v1/responses/{response_id}"
            reply = self.w.clients.http(what.upper(), path, key)
            assert reply.status == 404, reply
            return str(reply.body["error"]["message"])
        frame: dict[str, Any] = {"type": "response.cancel", "response_id": response_id}
        if what == "follow":
            frame = {"type": "response.create", "input": "?", "previous_response_id": response_id}
        elif what == "resume":
            frame["type"] = "chatrt.resume"
        event = self.w.clients.request(self.line(pick, key), frame)
        assert event["type"] == "error", event
        assert event["error"]["code"].endswith("not_found"), event
        return str(event["error"]["message"])

    @operation(
        which=picks, pick=picks, lane=lanes, what=st.sampled_from(["chat", "number", "long"])
    )
    def ask_the_impossible(self, which: int, pick: int, lane: str, what: str) -> None:
        """A conversation that nobody has, an event that never was, a prompt that does not fit."""
        turn = picked([t for t in self.known() if t.end is not None and not t.gone], which)
        if what == "chat":
            frame = {"type": "response.create", "input": "?", "conversation": UNKNOWN_CONVERSATION}
            event = self.w.clients.request(self.line(pick), frame)
            assert event["error"]["code"] == "not_found", event
        elif what == "number" and turn is not None:
            frame = {"type": "chatrt.resume", "response_id": str(turn.response_id)}
            line = self.line(pick, turn.key)
            event = self.w.clients.request(line, {**frame, "after_sequence_number": 10**6})
            assert event["error"]["code"] in ("invalid_value", "response_not_found"), event
        elif what == "long" and which == 0:
            parent = picked([None, *self.w.parents], pick)
            self.ask(pick, lane, "x" * (MAX_CONTEXT + 5), parent)

    # Quiet, and restarts -------------------------------------------------------------------------

    @operation(pace=st.sampled_from([1, 5, 20]))
    def wait(self, pace: int) -> None:
        """The engine goes on."""
        self.go_on(pace)

    @operation()
    def settle(self) -> None:
        """Everything ends."""
        self.w.settle()
        self.w.server.pace.hold()

    @operation(kill=st.booleans(), quiet=st.booleans())
    def restart(self, *, kill: bool, quiet: bool) -> None:
        """Kindly or as by a kill, in the middle of everything or at rest."""
        if quiet:
            self.w.settle()
        self.w.restart(kill=kill)
        self.w.server.pace.hold()
