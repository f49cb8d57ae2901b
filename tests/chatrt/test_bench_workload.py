from __future__ import annotations

from random import Random

import pytest

from chatrt.bench.workload import Length, PlannedSession, Workload, generate, generate_session
from chatrt.errors import InvalidValue

WORKLOAD = Workload(
    num_sessions=5,
    num_turns=3,
    system_tokens=Length(4, 4),
    input_tokens=Length(6, 12),
    think_ms=Length(100, 200),
)


def texts(session: PlannedSession) -> list[str]:
    return [turn.text for turn in session.turns]


def test_the_same_seed_gives_the_same_sessions_and_another_seed_other_ones() -> None:
    assert generate(WORKLOAD, 7) == generate(WORKLOAD, 7)
    first, other = generate(WORKLOAD, 7)[0], generate(WORKLOAD, 8)[0]
    assert not set(texts(first)) & set(texts(other))


def test_a_session_does_not_depend_on_how_many_there_are() -> None:
    assert generate(WORKLOAD, 7)[:2] == generate(Workload(2, 3, *lengths()), 7)


def lengths() -> tuple[Length, Length, Length]:
    return WORKLOAD.system_tokens, WORKLOAD.input_tokens, WORKLOAD.think_ms


def test_no_two_sessions_begin_alike() -> None:
    starts = {session.system[:3] for session in generate(Workload(num_sessions=40), 0)}
    assert len(starts) == 40


def test_lengths_are_counted_in_words_and_spread_over_the_whole_range() -> None:
    sessions = generate(Workload(60, 3, *lengths()), 0)
    counts = {len(text.split()) for session in sessions for text in texts(session)}
    assert counts == set(range(6, 13))
    assert {len(session.system.partition(": ")[2].split()) for session in sessions} == {4}


def test_the_first_turn_comes_at_once_and_each_later_one_after_a_pause() -> None:
    for session in generate(WORKLOAD, 0):
        assert session.turns[0].think_ms == 0
        assert session.fork is not None
        for turn in (*session.turns[1:], session.fork):
            assert 100 <= turn.think_ms <= 200


@pytest.mark.parametrize(("forks", "num_turns"), [(True, 4), (False, 3)])
def test_a_fork_is_one_turn_more(forks: bool, num_turns: int) -> None:
    workload = Workload(1, 3, *lengths(), forks=forks)
    assert generate_session(workload, 0, 0).num_turns == num_turns


@pytest.mark.parametrize(
    ("text", "expected"), [("64", Length(64, 64)), ("32-128", Length(32, 128)), ("1", Length(1, 1))]
)
def test_a_length_is_a_number_or_a_range(text: str, expected: Length) -> None:
    assert Length.parse(text, param="--input-tokens") == expected


@pytest.mark.parametrize("text", ["", "x", "3-", "-3", "0", "9-3", "1.5"])
def test_what_is_no_length_is_refused_with_its_name_and_value(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"^--input-tokens is "):
        Length.parse(text, param="--input-tokens")


def test_a_range_includes_both_its_ends() -> None:
    random = Random(0)
    assert {Length(2, 4).draw(random) for _ in range(100)} == {2, 3, 4}
