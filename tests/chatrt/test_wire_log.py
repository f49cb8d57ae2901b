from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from chatrt.wire.log import DELTA, ResponseLog, Subscription


def delta(text: str, item_id: str = "msg_1", **extra: Any) -> dict[str, Any]:
    return {"type": DELTA, "item_id": item_id, "delta": text, "logprobs": [], **extra}


def terminal(first_sent_ns: int | None) -> dict[str, Any]:
    return {"type": "response.completed", "sent": first_sent_ns}


def take_all(subscription: Subscription) -> list[dict[str, Any]]:
    events = []
    while (event := subscription.take()) is not None:
        events.append(event)
    return events


def new_log() -> ResponseLog:
    return ResponseLog("resp_1", "key")


def test_events_are_numbered_from_zero_in_the_order_of_appending() -> None:
    log = new_log()
    subscription = log.subscribe(lambda: None)
    log.append({"type": "a"})
    log.append({"type": "b"})
    log.finish(terminal)
    assert [event["sequence_number"] for event in take_all(subscription)] == [0, 1, 2]


def test_a_reader_that_keeps_up_gets_every_delta_alone() -> None:
    log = new_log()
    subscription = log.subscribe(lambda: None)
    taken = []
    for text in "abc":
        log.append(delta(text))
        taken.append(subscription.take())
    assert [event["delta"] for event in taken if event] == ["a", "b", "c"]
    assert subscription.take() is None


def test_deltas_that_wait_come_as_one_with_the_last_number() -> None:
    log = new_log()
    subscription = log.subscribe(lambda: None)
    log.append({"type": "a"})
    for text in "xyz":
        log.append(delta(text, chatrt={"t_ms": ord(text), "n": 2}))
    log.append({"type": "b"})
    _, merged, last = take_all(subscription)
    assert (merged["delta"], merged["sequence_number"]) == ("xyz", 3)
    assert merged["chatrt"] == {"t_ms": ord("z"), "n": 6}
    assert last["sequence_number"] == 4


def test_merging_keeps_every_logprob_in_order() -> None:
    log = new_log()
    subscription = log.subscribe(lambda: None)
    for text in "ab":
        log.append({**delta(text), "logprobs": [{"token": text, "top_logprobs": []}]})
    event = subscription.take()
    assert event is not None
    assert [entry["token"] for entry in event["logprobs"]] == ["a", "b"]


def test_a_merged_delta_stays_far_below_what_clients_refuse() -> None:
    log = new_log()
    subscription = log.subscribe(lambda: None)
    for _ in range(100):
        log.append(delta("x" * 4096))
    log.append(delta("y" * 100_000))
    sizes = [len(event["delta"]) for event in take_all(subscription)]
    assert sum(sizes) == 100 * 4096 + 100_000
    assert sizes == [65_536] * 6 + [16_384, 100_000]


def test_deltas_of_different_items_are_not_merged() -> None:
    log = new_log()
    subscription = log.subscribe(lambda: None)
    log.append(delta("a", "msg_1"))
    log.append(delta("b", "msg_2"))
    assert [event["delta"] for event in take_all(subscription)] == ["a", "b"]


@given(st.lists(st.sampled_from(["delta", "other", "take_1", "take_2"]), max_size=60))
def test_every_reader_gets_all_text_in_order_whatever_it_takes_when(steps: list[str]) -> None:
    log = new_log()
    readers = [log.subscribe(lambda: None), log.subscribe(lambda: None)]
    got: list[list[dict[str, Any]]] = [[], []]
    for number, step in enumerate(steps):
        if step == "delta":
            log.append(delta(f"{number},"))
        elif step == "other":
            log.append({"type": "other", "delta": f"[{number}]"})
        else:
            index = int(step[-1]) - 1
            event = readers[index].take()
            got[index].extend([] if event is None else [event])
    expected = "".join(
        f"{number}," if step == "delta" else f"[{number}]"
        for number, step in enumerate(steps)
        if step in ("delta", "other")
    )
    for reader, events in zip(readers, got, strict=True):
        events.extend(take_all(reader))
        assert "".join(event["delta"] for event in events) == expected
        numbers = [event["sequence_number"] for event in events]
        assert numbers == sorted(set(numbers))
        assert reader.pending_bytes == 0


def test_the_stream_id_is_on_each_event_exactly_if_the_reader_has_one() -> None:
    log = new_log()
    named, unnamed = log.subscribe(lambda: None, stream_id="s"), log.subscribe(lambda: None)
    log.append({"type": "a"})
    log.finish(terminal)
    assert all(event["stream_id"] == "s" for event in take_all(named))
    assert all("stream_id" not in event for event in take_all(unnamed))


def test_the_terminal_event_says_when_the_first_delta_was_sent_although_it_came_first() -> None:
    log = new_log()
    subscription = log.subscribe(lambda: None)
    log.append(delta("a"))
    log.finish(terminal)
    assert subscription.take() is not None
    log.mark_sent(7)
    log.mark_sent(9)
    event = subscription.take()
    assert event is not None
    assert event["sent"] == 7
    assert subscription.exhausted
    assert log.terminal_event() == event


def test_a_log_without_deltas_ends_without_a_send_stamp() -> None:
    log = new_log()
    log.finish(terminal)
    event = log.subscribe(lambda: None).take()
    assert event is not None
    assert event["sent"] is None


def test_a_reader_may_start_behind_a_number() -> None:
    log = new_log()
    for text in "abcd":
        log.append(delta(text))
    event = log.subscribe(lambda: None, after=1).take()
    assert event is not None
    assert (event["delta"], event["sequence_number"]) == ("cd", 3)
    assert log.subscribe(lambda: None, after=99).take() is None


def test_readers_are_woken_by_each_append_until_they_close() -> None:
    log = new_log()
    calls = []
    subscription = log.subscribe(lambda: calls.append(log.num_events))
    log.append({"type": "a"})
    log.finish(terminal)
    assert calls == [1, 2]
    other = new_log()
    closed = other.subscribe(lambda: calls.append(99))
    closed.close()
    closed.close()
    other.append({"type": "a"})
    assert 99 not in calls
    assert (other.num_subscribers, subscription.log.num_subscribers) == (0, 1)


def test_pending_bytes_grow_with_the_text_and_fall_as_it_is_taken() -> None:
    log = new_log()
    fast, slow = log.subscribe(lambda: None), log.subscribe(lambda: None)
    log.append(delta("x" * 1000))
    assert slow.pending_bytes >= 1000
    fast.take()
    assert fast.pending_bytes == 0
    assert log.least_pending_bytes == 0
    fast.close()
    assert log.least_pending_bytes == slow.pending_bytes


def test_what_a_reader_does_with_its_event_does_not_reach_the_others() -> None:
    log = new_log()
    first, second = log.subscribe(lambda: None), log.subscribe(lambda: None)
    log.append({"type": "a"})
    event = first.take()
    assert event is not None
    event["type"] = "changed"
    assert second.take() == {"type": "a", "sequence_number": 0}
