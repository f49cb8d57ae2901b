from __future__ import annotations

from typing import Any

from chatrt.server.outbox import Outbox
from chatrt.testing.service import ScriptedService
from chatrt.wire.log import DELTA, ResponseLog


class Calls(ScriptedService):
    """A service that only records pause and resume."""

    def pause(self, response_id: str) -> None:
        self.paused.append(response_id)

    def resume(self, response_id: str) -> None:
        self.resumed.append(response_id)


def delta(text: str) -> dict[str, Any]:
    return {"type": DELTA, "item_id": "msg", "delta": text, "logprobs": []}


def terminal(_: int | None) -> dict[str, Any]:
    return {"type": "response.completed", "response": {}}


def drain(outbox: Outbox, time_ns: int = 1) -> list[dict[str, Any]]:
    events = []
    while (outgoing := outbox.next()) is not None:
        outbox.sent(outgoing, time_ns)
        events.append(outgoing.event)
    return events


def attached(outbox: Outbox, name: str) -> ResponseLog:
    log = ResponseLog(name, "key")
    outbox.attach(log, stream_id=name, on_sent=lambda: None)
    return log


async def test_logs_take_turns_and_replies_come_first() -> None:
    outbox = Outbox(Calls(), 1000)
    for name in ("a", "b"):
        log = attached(outbox, name)
        for kind in ("1", "2"):
            log.append({"type": kind})
    outbox.reply({"type": "error"})
    events = drain(outbox)
    assert events[0]["type"] == "error"
    assert [e["stream_id"] + e["type"] for e in events[1:]] == ["a1", "b1", "a2", "b2"]


async def test_the_end_of_a_log_is_told_once_its_last_event_was_sent() -> None:
    outbox = Outbox(Calls(), 1000)
    log, told = ResponseLog("a", "key"), []
    outbox.attach(log, stream_id=None, on_sent=lambda: told.append(True))
    log.append(delta("x"))
    log.finish(terminal)
    first, last = outbox.next(), None
    assert first is not None
    outbox.sent(first, 7)
    last = outbox.next()
    assert last is not None
    assert not told
    outbox.sent(last, 8)
    assert told
    assert log.first_sent_ns == 7
    assert log.num_subscribers == 0
    assert not outbox.sends(log)


async def test_a_response_is_paused_past_the_limit_and_resumed_at_half() -> None:
    service = Calls()
    outbox = Outbox(service, 1000)
    log = attached(outbox, "a")
    log.append(delta("x" * 900))
    assert service.paused == []
    log.append(delta("x" * 200))
    log.append(delta("x" * 200))
    assert service.paused == ["a"]
    assert service.resumed == []
    assert len(drain(outbox)) == 1
    assert service.resumed == ["a"]


async def test_one_lagging_viewer_does_not_pause_the_other() -> None:
    service = Calls()
    slow, fast = Outbox(service, 1000), Outbox(service, 1000)
    log = attached(slow, "a")
    fast.attach(log, stream_id=None, on_sent=lambda: None)
    for _ in range(5):
        log.append(delta("x" * 450))
        drain(fast)
    assert service.paused == []
    for _ in range(5):
        log.append(delta("x" * 450))
    assert service.paused == ["a", "a"]


async def test_closing_returns_the_running_logs_that_nobody_else_reads() -> None:
    service = Calls()
    outbox, other = Outbox(service, 10), Outbox(service, 10)
    alone, shared, done = (attached(outbox, name) for name in ("alone", "shared", "done"))
    other.attach(shared, stream_id=None, on_sent=lambda: None)
    done.finish(terminal)
    alone.append(delta("x" * 100))
    assert outbox.close() == [alone]
    assert service.paused == service.resumed == ["alone"]
    assert shared.num_subscribers == 1


async def test_the_reader_waits_while_many_replies_are_unsent() -> None:
    outbox = Outbox(Calls(), 1000)
    for number in range(64):
        assert outbox._room.is_set()
        outbox.reply({"type": str(number)})
    assert not outbox._room.is_set()
    drain(outbox)
    assert outbox._room.is_set()
