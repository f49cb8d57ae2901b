from __future__ import annotations

import asyncio

import pytest

from chatrt.errors import ChatrtError, Conflict, InvalidValue, Overloaded
from chatrt.server.lanes import Lane, Lanes, Resumed, Waiting
from chatrt.wire.log import ResponseLog
from chatrt.wire.messages import InputMessage, ResponseCreate


class Host:
    """Records what a lane asks for; answers end when they are told to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.go_on = asyncio.Event()

    async def answer(self, lane: Lane, waiting: Waiting) -> None:
        self.calls.append(f"answer {waiting.message.input[0].content}")
        await self.go_on.wait()

    async def follow(self, lane: Lane, resumed: Resumed) -> None:
        self.calls.append(f"follow {resumed.log.response_id}")
        await resumed.sent.wait()

    async def prefill(self, lane: Lane, waiting: Waiting) -> None:
        self.calls.append(f"prefill {waiting.message.input[0].content}")
        await asyncio.sleep(0)

    def refuse(self, lane: Lane, error: ChatrtError) -> None:
        self.calls.append(f"refuse {error.message}")


def waiting(text: str) -> Waiting:
    return Waiting(ResponseCreate(input=(InputMessage("user", text),)), 0)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_lane_answers_in_order_with_refusals_in_their_place() -> None:
    host = Host()
    lane = Lane(None, host, max_queued=5)
    lane.submit(waiting("a"))
    await settle()
    lane.submit(InvalidValue("bad"))
    lane.submit(waiting("b"))
    await settle()
    assert host.calls == ["answer a"]
    host.go_on.set()
    await settle()
    assert host.calls == ["answer a", "refuse bad", "answer b"]
    assert lane.worker is None


async def test_a_full_lane_refuses_with_both_numbers() -> None:
    lane = Lane(None, Host(), max_queued=1)
    lane.submit(waiting("a"))
    await settle()
    lane.submit(waiting("b"))
    with pytest.raises(Overloaded, match=r"1 requests wait .* at most 1"):
        lane.submit(waiting("c"))
    for task in lane.tasks:
        task.cancel()


async def test_what_is_resumed_takes_a_free_lane_and_creates_queue_behind_it() -> None:
    host = Host()
    lane = Lane(None, host, max_queued=5)
    resumed = Resumed(ResponseLog("resp_1", "key"), asyncio.Event())
    lane.follow(resumed)
    lane.submit(waiting("a"))
    with pytest.raises(Conflict, match=r"busy .* resume resp_2 on another lane"):
        lane.follow(Resumed(ResponseLog("resp_2", "key"), asyncio.Event()))
    await settle()
    assert host.calls == ["follow resp_1"]
    resumed.sent.set()
    host.go_on.set()
    await settle()
    assert host.calls == ["follow resp_1", "answer a"]
    assert lane.worker is None


async def test_a_half_typed_prompt_never_stands_before_an_answer() -> None:
    host = Host()
    lane = Lane(None, host, max_queued=5)
    lane.submit(waiting("a"))
    lane.type_ahead(waiting("h"))
    lane.type_ahead(waiting("ha"))
    lane.submit(waiting("half"))
    host.go_on.set()
    await settle()
    assert host.calls == ["answer a", "answer half"]


async def test_only_the_newest_half_typed_prompt_is_kept_while_the_lane_answers() -> None:
    host = Host()
    lane = Lane(None, host, max_queued=5)
    lane.submit(waiting("a"))
    for text in ("h", "ha", "hal"):
        lane.type_ahead(waiting(text))
    host.go_on.set()
    await settle()
    assert host.calls == ["answer a", "prefill hal"]


async def test_a_free_lane_prefills_at_once_and_then_the_newest() -> None:
    host = Host()
    lane = Lane(None, host, max_queued=5)
    lane.type_ahead(waiting("h"))
    await asyncio.sleep(0)
    lane.type_ahead(waiting("ha"))
    lane.type_ahead(waiting("hal"))
    await settle()
    assert host.calls == ["prefill h", "prefill hal"]
    assert lane.tasks == []


async def test_named_lanes_are_limited_and_the_unnamed_one_is_not_counted() -> None:
    lanes = Lanes(Host(), max_names=2, max_queued=1)
    opened = [lanes.open(name) for name in (None, "a", "b", "a")]
    assert opened[1] is opened[3]
    with pytest.raises(Overloaded, match="has 2 lanes, at most 2") as caught:
        lanes.open("c")
    assert caught.value.code == "websocket_stream_limit_reached"
    assert lanes.find("c") is None
    assert lanes.find(None) is opened[0]
