"""The queue in front of the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chatrt.engine.admission import Admission, EngineLimits, Running
from chatrt.errors import CapacityError, ContextLengthExceeded, OutOfPages
from chatrt.pages import PageAllocator
from chatrt.params import SamplingParams
from chatrt.prefix import PrefixTree
from chatrt.session_manager import SessionManager
from chatrt.testing.engine import turn_request
from chatrt.turn import TurnKind, TurnRequest


def queue(num_pages: int = 8, **limits: int) -> tuple[Admission, SessionManager]:
    allocator = PageAllocator(num_pages)
    sessions = SessionManager(allocator, PrefixTree(allocator), page_size=16)
    return Admission(sessions, EngineLimits(max_context=100, **limits)), sessions


def ask(name: str, length: int = 5, **fields: object) -> TurnRequest:
    request = turn_request(name, [1] * length)
    return replace(request, **fields)  # type: ignore[arg-type]  # names of its own fields


def names(admission: Admission) -> list[str]:
    return [request.response_id for request in admission.take(lambda _: True)]


def test_answers_go_before_what_is_typed_and_each_by_priority_then_arrival() -> None:
    admission, _ = queue()
    for name, priority, kind in (
        ("typed", 9, TurnKind.TYPED_AHEAD),
        ("low", -1, TurnKind.ANSWER),
        ("one", 0, TurnKind.ANSWER),
        ("two", 0, TurnKind.PREFILL),
        ("high", 3, TurnKind.ANSWER),
    ):
        admission.put(ask(name, priority=priority, kind=kind))
    assert names(admission) == ["high", "one", "two", "low", "typed"]


def test_a_prompt_needs_room_for_one_token_in_the_context() -> None:
    admission, _ = queue()
    admission.put(ask("fits", 99))
    with pytest.raises(ContextLengthExceeded, match=r"100 tokens.*100"):
        admission.put(ask("too long", 100))
    assert len(admission) == 1


def test_only_matching_requests_are_taken_out() -> None:
    admission, _ = queue()
    for name in "abc":
        admission.put(ask(name))
    taken = admission.take(lambda request: request.response_id == "b")
    assert [request.response_id for request in taken] == ["b"]
    assert names(admission) == ["a", "c"]


def test_an_arrival_waits_where_running_answers_are_expected_to_grow_into_its_pages() -> None:
    admission, sessions = queue(num_pages=8, num_expected=20)
    running = sessions.open("", [2] * 32).session
    sessions.reserve(running, 32)
    admission.put(ask("a", 52, sampling=SamplingParams(max_output_tokens=100)))
    # Six pages are free: 52 + 20 tokens take five, 20 more of the running session two.
    assert admission.next([Running(running, num_left=100)]) is None
    # With room for 16 more tokens only, the running session needs one.
    taken = admission.next([Running(running, num_left=16)])
    assert taken is not None
    assert taken.response_id == "a"


def test_an_arrival_that_waited_starts_when_nobody_runs_any_more() -> None:
    admission, sessions = queue(num_pages=4)
    running = sessions.open("", [2] * 32).session
    sessions.reserve(running, 32)
    admission.put(ask("a", 31))
    assert admission.next([Running(running, num_left=1)]) is None
    sessions.close(running)
    taken = admission.next([])
    assert taken is not None
    assert taken.response_id == "a"
    assert admission.next([]) is None


def test_no_more_than_so_many_sequences_run() -> None:
    admission, sessions = queue(max_num_seqs=1)
    running = sessions.open("", [2]).session
    admission.put(ask("a"))
    assert admission.next([Running(running, num_left=1)]) is None


def test_what_cannot_fit_alone_is_refused_and_the_next_one_may_start() -> None:
    admission, _ = queue(num_pages=2)
    admission.put(ask("large", 32))
    admission.put(ask("small", 31))
    with pytest.raises(OutOfPages, match="need 3 pages, 2 free and 0 evictable of 2"):
        admission.next([])
    assert admission.refuse_first().response_id == "large"
    taken = admission.next([])
    assert taken is not None
    assert taken.response_id == "small"


def test_a_key_that_holds_its_pages_waits_and_holds_nobody_else_up() -> None:
    admission, sessions = queue(num_pages=20, max_pages_per_owner=3)
    running = sessions.open("", [2] * 32).session
    sessions.reserve(running, 32)
    admission.put(ask("greedy", 20, owner="a"))
    admission.put(ask("other", 20, owner="b"))
    with pytest.raises(CapacityError, match="needs 4 KV pages, an API key may hold 3"):
        admission.put(ask("never", 50, owner="a"))
    taken = admission.next([Running(running, 5, "a")])
    assert taken is not None
    assert taken.response_id == "other"
    assert admission.next([Running(running, 5, "a")]) is None
    taken = admission.next([])
    assert taken is not None
    assert taken.response_id == "greedy"
