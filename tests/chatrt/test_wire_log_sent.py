"""What a log is told of sending: the first delta, and the gaps of each reader."""

from __future__ import annotations

from chatrt.wire.log import DELTA, ResponseLog


def log_of(num_deltas: int, gaps: list[int]) -> ResponseLog:
    log = ResponseLog("resp", "key", on_gap=gaps.append)
    for _ in range(num_deltas):
        log.append({"type": DELTA, "item_id": "msg", "delta": "a", "logprobs": []})
    return log


def nothing() -> None:
    pass


def test_each_reader_has_its_own_gaps_and_the_first_of_all_sends_is_the_logs() -> None:
    gaps: list[int] = []
    log = log_of(3, gaps)
    one, two = log.subscribe(nothing), log.subscribe(nothing)
    one.mark_sent(10)
    two.mark_sent(15)
    two.mark_sent(22)
    one.mark_sent(40)
    assert gaps == [7, 30]
    assert log.first_sent_ns == 10


def test_who_waits_for_the_first_send_is_told_once() -> None:
    log, told = log_of(2, []), list[int]()
    log.when_sent(told.append)
    assert told == []
    one, two = log.subscribe(nothing), log.subscribe(nothing)
    one.mark_sent(10)
    two.mark_sent(15)
    assert told == [10]


def test_who_asks_behind_the_first_send_is_told_at_once() -> None:
    log, told = log_of(1, []), list[int]()
    log.subscribe(nothing).mark_sent(10)
    log.when_sent(told.append)
    assert told == [10]


def test_a_log_without_a_listener_is_sent_all_the_same() -> None:
    log = ResponseLog("resp", "key")
    reader = log.subscribe(nothing)
    reader.mark_sent(10)
    reader.mark_sent(20)
    assert log.first_sent_ns == 10
