"""A living server with its clients and conversations, through restarts, up to an empty store.

Knows: when all is quiet, and what must hold then; what a restart loses. Does not know: which
operations a test chooses.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.chatrt.living_server import KEYS, PATIENCE_S, ErrorLog, LivingServer, Pace, Size
from tests.chatrt.living_support import Clients, Line
from tests.chatrt.living_turns import ANSWER, PARTIAL, Conversation, Reading, Turn, text_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from chatrt.engine import Engine
    from chatrt.text.tokenizer import Tokenizer
    from tests.chatrt.living_oracle import Oracle

_TICK_S = 0.005


@dataclass
class World:
    """All there is."""

    tokenizer: Tokenizer
    folder: Path
    size: Size
    oracle: Oracle
    conversations: list[Conversation] = field(default_factory=list)
    lost_pages: bool = False  # a kill came between a page and its turn

    def __post_init__(self) -> None:
        self.errors = ErrorLog()
        logging.getLogger().addHandler(self.errors)
        self.server = LivingServer(self.tokenizer, self.folder, self.size)
        self.clients = Clients(lambda: self.server.pace.allow(1))
        self._begin()

    @property
    def turns(self) -> list[Turn]:
        """All that was ever asked."""
        return self.clients.turns

    @property
    def parents(self) -> list[Turn]:
        """Ended turns that can be continued, as far as is known."""
        return [turn for turn in self.turns if turn.checked and turn.is_parent]

    # Quiet ---------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let everything end, and check all that has to hold then."""
        self.server.pace.free()
        clients = self.clients
        for line in [*clients.lines]:
            if line.closed:  # it read too slowly
                clients.drop(line, "abort")
            else:
                clients.stall(line, reads=True)
        lines = clients.lines
        clients.until(lambda: not self._awaited(), self._awaited)
        self._wait(lambda: self.server.server.num_connections == len(lines), "lost connections")
        self._wait(lambda: not self.server.service._answers, "answers that nobody reads")
        self._find_lost()
        self._check_turns()
        self._check_engine()

    def _awaited(self) -> list[Turn]:
        """Turns of which something has to come still."""
        lines = [line for line in self.clients.lines if not line.closed]
        asked = [turn for line in lines for queue in line.waiting.values() for turn in queue]
        read = [turn for line in lines for turn in line.open_turns.values()]
        return [*(turn for turn in asked if turn.is_open and turn.kind != PARTIAL), *read]

    def _find_lost(self) -> None:
        """Learn what became of turns whose connection was lost."""
        for turn in self.turns:
            if turn.is_open and turn.response_id is not None:
                self._look_up(turn, turn.response_id)
        for response_id in self.server.known_turns() - {*self.clients.by_id}:
            self._adopt(response_id)
        for turn in self.turns:
            if turn.is_open and turn.kind == PARTIAL:
                turn.dropped = True

    def _look_up(self, turn: Turn, response_id: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            reply = self.clients.http("GET", f"/v1/responses/{response_id}", turn.key)
            if reply.status == 404:
                assert turn.gone or "lost" in turn.may or turn.kind == PARTIAL, turn.frame
                turn.gone = turn.dropped = True
                return
            assert reply.status == 200, reply
            if reply.body["status"] != "in_progress":
                turn.end = reply.body
                return
            assert time.monotonic() < deadline_s, f"turn {turn.number} does not end"
            time.sleep(_TICK_S)

    def _adopt(self, response_id: str) -> None:
        """A turn that began when nobody was there any more."""
        for key in KEYS:
            reply = self.clients.http("GET", f"/v1/responses/{response_id}", key)
            if reply.status == 200:
                turn = self.turns[int(reply.body["metadata"]["number"])]
                assert turn.key == key
                assert turn.response_id is None
                assert "cancelled" in turn.may, "a turn that its client never heard of"
                turn.response_id, turn.end, turn.dropped = response_id, reply.body, False
                self.clients.by_id[response_id] = turn
                return
        raise AssertionError(f"{response_id} is nobody's")

    def _check_turns(self) -> None:
        ended = [turn for turn in self.turns if not (turn.checked or turn.is_open)]
        self.oracle.check(ended)
        for turn in ended:
            for reading in turn.readings:
                self._check_reading(turn, reading)
        self.oracle.check_reuse(ended)
        late = [turn for turn in self.turns if turn.is_open and turn.kind != PARTIAL]
        assert not late, late
        for conversation in self.conversations:
            self._settle_newest(conversation, ended)

    @staticmethod
    def _check_reading(turn: Turn, reading: Any) -> None:
        if reading.end is None or reading.end["status"] == "failed" or turn.kind != ANSWER:
            return
        if reading.after is None and reading.end["output"]:
            part = reading.end["output"][0]["content"][0]
            assert reading.logprobs == part["logprobs"], turn.frame

    def _settle_newest(self, conversation: Conversation, ended: list[Turn]) -> None:
        ran = [
            turn
            for turn in ended
            if turn.conversation is conversation
            and turn.kind != PARTIAL
            and (turn.is_parent or turn.unsure or turn.gone)
            and turn.end is not None
        ]
        if len(ran) == 1 and not ran[0].gone:
            conversation.newest = [ran[0]]
        elif ran:
            before = [one for turn in ran if turn.gone for one in self._before(turn)]
            conversation.newest = [*conversation.newest, *ran, *before]

    def _check_engine(self) -> None:
        def is_quiet(engine: Engine) -> bool:
            engine.sessions.check_invariants()
            return not engine.num_running and not engine.num_waiting

        self._wait(lambda: self.server.call(is_quiet), "an engine without work")
        assert not self.errors.lines, "\n".join(self.errors.lines)
        self.clients.raise_faults()

    def _wait(self, holds: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline_s, f"not within {PATIENCE_S:g} s: {what}"
            time.sleep(_TICK_S)

    # Restarts ------------------------------------------------------------------------------------

    def restart(self, *, kill: bool) -> None:
        """Another life over the same folder; `kill` gives the old one no time for anything."""
        self.server.pace.hold()
        for turn in self.turns:
            self._note_end(turn)
        for turn in self.turns:
            if turn.is_open:
                turn.may |= {"cancelled", "lost", "server_unavailable", "server_error"}
            if turn.end is None and turn.error is None and not turn.checked:
                self.lost_pages = self.lost_pages or kill
        keys = [line.key for line in self.clients.lines]
        if kill:
            self.server.kill()
        else:
            for line in self.clients.lines:  # the server would wait for its half of a close
                self.clients.stall(line, reads=True)
            self.server.stop()
        for line in [*self.clients.lines]:
            self.clients.drop(line, "abort")
        for turn in self.turns:
            if turn.end is not None and not turn.stored:
                turn.gone = True
            elif turn.is_open and (not turn.stored or turn.kind == PARTIAL):
                turn.gone = turn.dropped = True
        self.server = LivingServer(self.tokenizer, self.folder, self.size, Pace())
        self._begin()
        for key in keys:
            self.clients.connect(key)
        self._find_lost()
        self._find_stored()

    def _begin(self) -> None:
        self.server.start()
        self.clients.port = self.server.port

    def _find_stored(self) -> None:
        """What a client was told to be there is there, word for word."""
        for turn in self.turns:
            if turn.response_id is None or turn.gone or turn.kind == PARTIAL:
                continue
            if turn.end is not None and turn.status != "failed":
                reply = self.clients.http("GET", f"/v1/responses/{turn.response_id}", turn.key)
                if reply.status == 404 and turn.unsure:
                    turn.gone = True
                    continue
                assert reply.status == 200, (turn, reply)
                assert reply.body["usage"] == turn.end["usage"], (turn, turn.end, reply)
                assert text_of(reply.body) == text_of(turn.end), turn
        for conversation in self.conversations:
            if not conversation.gone:
                stored = [t for t in self.turns if t.conversation is conversation and t.stored]
                conversation.newest = [None, *(t for t in stored if t.kind != PARTIAL)]

    # The end -------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Delete everything, and see that nothing is left of it."""
        self.settle()
        for line in [*self.clients.lines]:
            self.clients.drop(line, "close")
        self._find_lost()
        for conversation in self.conversations:
            if not conversation.gone:
                self.delete_conversation(conversation)
        for turn in self.turns:
            if turn.response_id is not None and turn.is_parent:
                self.delete(turn)
        self._find_lost()
        self._wait(self._all_free, "free pages")
        num_files = self.server.num_page_files()
        assert not num_files or self.lost_pages, f"{num_files} files of deleted conversations"
        for key in KEYS:
            assert self.clients.http("GET", "/v1/conversations", key).body["data"] == []
        assert self.server.known_turns() == set()

    def _all_free(self) -> bool:
        def all_free(engine: Engine) -> bool:
            engine.sessions.check_invariants()
            return engine.sessions.num_free == engine.sessions.num_pages

        return self.server.call(all_free)

    def close(self) -> None:
        """End the server and the clients, whatever happened before."""
        logging.getLogger().removeHandler(self.errors)
        try:
            self.clients.close()
        finally:
            self.server.stop()

    # What may follow -----------------------------------------------------------------------------

    def newest(self, conversation: Conversation) -> list[Turn | None]:
        """The turns that a turn of a conversation may follow."""
        late = [t for t in self.turns if t.conversation is conversation and not t.checked]
        return [*conversation.newest, *(turn for turn in late if turn.kind != PARTIAL)]

    def ask(self, line: Line, lane: str, text: str, **fields: Any) -> Turn:
        """Send a create (`Clients.ask`).

        Turns of one conversation that are open together may be refused for each other.
        """
        chat = fields.get("chat")
        others = [
            turn
            for turn in self.turns
            if chat is not None
            and turn.conversation is chat
            and turn.kind != PARTIAL
            and turn.end is None  # those included whose connection was lost
            and turn.error is None
        ]
        turn = self.clients.ask(line, lane, text, **fields)
        if turn.kind == PARTIAL or not others:
            return turn
        turn.may.add("response_already_in_flight")
        for other in others:
            other.may.add("response_already_in_flight")
            if "conversation" in other.frame:
                other.parents = [*other.parents, turn]
        return turn

    def cancel_lane(self, line: Line, lane: str) -> None:
        """Cancel what runs on a lane."""
        for one in [*line.open_turns.values(), *line.waiting.get(lane, ())]:
            one.may.add("cancelled")
        self.clients.send(line, {"type": "response.cancel", "stream_id": lane})

    def cancel(self, turn: Turn, line: Line, *, by_http: bool) -> None:
        """Cancel a response by its id, which need not be one of the connection's own."""
        turn.may.add("cancelled")
        if not by_http:
            frame = {"type": "response.cancel", "response_id": turn.response_id}
            self.clients.send(line, {**frame, "stream_id": "cancels"})
            return
        reply = self.clients.http("POST", f"/v1/responses/{turn.response_id}/cancel", turn.key)
        if reply.status != 200:
            assert turn.kind == PARTIAL or "lost" in turn.may, (turn, reply)
        else:
            assert reply.body["status"] != "in_progress"

    def resume(self, line: Line, turn: Turn, reading: Reading) -> None:
        """Go on reading a response on a connection, or be refused for a reason that there is."""
        is_read = turn in line.open_turns.values()
        error = self.clients.resume(line, turn, reading)
        if error is None:
            return
        if error["code"] == "response_already_in_flight":
            assert is_read or "lane" in error["message"], error
        elif error["code"] == "response_not_found":
            assert not turn.is_open or "lost" in turn.may, error
        else:
            assert error["code"] == "invalid_value", error
            assert turn.end is not None, error

    # Deleting ------------------------------------------------------------------------------------

    def delete(self, turn: Turn) -> None:
        """Delete a response; whoever builds on it cannot go on."""
        self._note_end(turn)
        reply = self.clients.http("DELETE", f"/v1/responses/{turn.response_id}", turn.key)
        assert reply.status == 200 or (reply.status == 404 and turn.unsure), (turn, reply)
        self._is_gone(turn)
        again = self.clients.http("GET", f"/v1/responses/{turn.response_id}", turn.key)
        assert again.status == 404, again

    def delete_conversation(self, conversation: Conversation) -> None:
        """Delete a conversation with all its turns."""
        of_it = [t for t in self.turns if t.conversation is conversation]
        for turn in of_it:
            self._note_end(turn)
            turn.may |= {"cancelled", "not_found", "lost"}
        path = f"/v1/conversations/{conversation.conversation_id}"
        reply = self.clients.http("DELETE", path, conversation.key)
        assert reply.status == 200, reply
        conversation.gone = True
        for turn in of_it:
            self._is_gone(turn)
        again = self.clients.http("GET", f"{path}/items", conversation.key)
        assert again.status == 404, again

    def _note_end(self, turn: Turn) -> None:
        """Learn how a turn ended of which nobody will hear when it is deleted."""
        if turn.end is None and turn.response_id and turn.kind != PARTIAL and not turn.gone:
            reply = self.clients.http("GET", f"/v1/responses/{turn.response_id}", turn.key)
            if reply.status == 200 and reply.body["status"] != "in_progress":
                turn.end = turn.end or reply.body

    def _is_gone(self, turn: Turn) -> None:
        turn.may |= {"cancelled", "not_found", "lost"}
        turn.gone = True
        below = {turn}
        for other in self.turns:
            if not below.isdisjoint(other.parents):
                below.add(other)
                if not other.checked:  # it runs, or did a moment ago: it is deleted with that one
                    other.may |= {"cancelled", "not_found", "lost"}
                    other.unsure = True
        conversation = turn.conversation
        if conversation is not None and turn in conversation.newest:
            rest = [one for one in conversation.newest if one is not turn]
            conversation.newest = [*rest, *self._before(turn)]

    def _before(self, turn: Turn) -> list[Turn | None]:
        """What may be its conversation's newest turn once a turn was deleted that was."""
        if turn.checked and turn.link is not None and not turn.link.gone:
            return [turn.link]
        there = [one for one in self.turns if one.conversation is turn.conversation]
        return [None, *(one for one in there if one.kind != PARTIAL and not one.gone)]
