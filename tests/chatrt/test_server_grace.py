from __future__ import annotations

import asyncio
import gc
import weakref

from chatrt.server.grace import Graces
from chatrt.testing.service import ScriptedService
from chatrt.testing.serving import eventually
from chatrt.wire.log import ResponseLog


class Calls(ScriptedService):
    """A service that only records what is abandoned, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.times_s: list[float] = []

    def abandon(self, response_id: str) -> None:
        self.abandoned.append(response_id)
        self.times_s.append(asyncio.get_running_loop().time())


async def test_a_grace_of_zero_abandons_at_once() -> None:
    service = Calls()
    Graces(service, 0.0).begin(ResponseLog("a", "key"))
    assert service.abandoned == ["a"]


async def test_timers_do_not_pile_up_and_the_last_loss_counts() -> None:
    service = Calls()
    graces, log = Graces(service, 0.1), ResponseLog("a", "key")
    for _ in range(5):
        begun_s = asyncio.get_running_loop().time()
        graces.begin(log)
        await asyncio.sleep(0.03)
    assert len(graces) == 1
    await eventually(lambda: service.abandoned)
    assert service.times_s[0] >= begun_s + 0.1 - 0.002  # a timer may be early by its resolution
    assert len(graces) == 0
    await asyncio.sleep(0.15)
    assert service.abandoned == ["a"]


async def test_what_ended_or_is_read_is_not_abandoned() -> None:
    service = Calls()
    graces = Graces(service, 0.01)
    ended, read, lost = (ResponseLog(name, "key") for name in ("ended", "read", "lost"))
    for log in (ended, read, lost):
        graces.begin(log)
    ended.finish(lambda _: {})
    read.subscribe(lambda: None)
    await eventually(lambda: len(graces) == 0)
    assert service.abandoned == ["lost"]
    graces.drop(read)
    graces.drop(ended)
    assert service.abandoned == ["lost"]


async def test_a_grace_holds_no_log_in_memory() -> None:
    graces, log = Graces(Calls(), 60.0), ResponseLog("a", "key")
    graces.begin(log)
    alive = weakref.ref(log)
    del log
    gc.collect()
    assert alive() is None
    graces.end()
    assert len(graces) == 0


async def test_the_end_abandons_all_that_waits_and_all_that_comes() -> None:
    service = Calls()
    graces = Graces(service, 60.0)
    logs = [ResponseLog(name, "key") for name in "abc"]
    graces.begin(logs[0])
    graces.begin(logs[1])
    graces.end()
    graces.begin(logs[2])
    assert service.abandoned == ["a", "b", "c"]
