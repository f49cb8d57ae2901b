from __future__ import annotations

import pytest

from chatrt.errors import NotFound
from chatrt.service.recent import RecentLogs
from chatrt.wire.log import DELTA, ResponseLog


class Clock:
    """Seconds that pass when told to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def ended(name: str, *, num_deltas: int = 0, conversation_id: str | None = None) -> ResponseLog:
    log = ResponseLog(name, "key", conversation_id)
    for _ in range(num_deltas):
        log.append({"type": DELTA, "item_id": "m", "delta": "x", "logprobs": []})
    log.finish(lambda _: {"type": "response.failed", "response": {"id": name}})
    return log


def held(recent: RecentLogs, *names: str) -> list[str]:
    return [name for name in names if recent.response(name, "key") is not None]


def test_a_log_is_found_by_its_own_key_until_its_window_is_over() -> None:
    clock = Clock()
    recent = RecentLogs(window_s=60.0, clock=clock)
    log = ended("a")
    recent.keep(log)
    clock.now_s = 60.0
    assert recent.find("a", "key") is log
    assert recent.response("a", "key") == {"id": "a"}
    for response_id, key in (("a", "other"), ("b", "key")):
        with pytest.raises(NotFound, match=f"{response_id} cannot be resumed") as caught:
            recent.find(response_id, key)
        assert caught.value.code == "response_not_found"
    clock.now_s = 60.1
    assert held(recent, "a") == []
    assert (len(recent), recent.num_bytes) == (0, 0)


def test_the_oldest_leave_first_past_the_number_of_logs() -> None:
    recent = RecentLogs(max_logs=2)
    for name in "abc":
        recent.keep(ended(name))
    assert held(recent, "a", "b", "c") == ["b", "c"]


def test_the_oldest_leave_first_past_the_bytes_and_one_that_is_too_large_is_not_held() -> None:
    size = ended("x", num_deltas=100).held_bytes
    recent = RecentLogs(max_bytes=2 * size)
    for name in "abc":
        recent.keep(ended(name, num_deltas=100))
    assert held(recent, "a", "b", "c") == ["b", "c"]
    assert recent.num_bytes == 2 * size
    recent.keep(ended("huge", num_deltas=1000))
    assert recent.num_bytes <= 2 * size
    assert held(recent, "huge") == []


def test_what_was_deleted_is_not_found() -> None:
    recent = RecentLogs()
    for name, conversation_id in (("a", "conv_1"), ("b", "conv_1"), ("c", "conv_2"), ("d", None)):
        recent.keep(ended(name, conversation_id=conversation_id))
    recent.forget(["d", "unknown"])
    recent.forget_conversation("conv_1")
    assert held(recent, "a", "b", "c", "d") == ["c"]
    assert recent.num_bytes == ended("c").held_bytes
