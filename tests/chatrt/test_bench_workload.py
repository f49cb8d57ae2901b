from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from chatrt.bench.lengths import Length
from chatrt.bench.prompts import Conversation, Prompt
from chatrt.bench.workload import (
    PlannedSession,
    PlannedTurn,
    Workload,
    generate,
    generate_session,
    warm_up_session,
)

THREE = Length(3, 3)
WORKLOAD = Workload(
    num_sessions=5,
    num_turns=THREE,
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
    assert generate(WORKLOAD, 7)[:2] == generate(Workload(2, THREE, *lengths()), 7)


def lengths() -> tuple[Length, Length, Length]:
    return WORKLOAD.system_tokens, WORKLOAD.input_tokens, WORKLOAD.think_ms


def test_no_two_sessions_begin_alike() -> None:
    starts = {session.system[:3] for session in generate(Workload(num_sessions=40), 0)}
    assert len(starts) == 40


def test_lengths_are_counted_in_words_and_spread_over_the_whole_range() -> None:
    sessions = generate(Workload(60, THREE, *lengths()), 0)
    counts = {len(text.split()) for session in sessions for text in texts(session)}
    assert counts == set(range(6, 13))
    assert {len(session.system.partition(": ")[2].split()) for session in sessions} == {4}


def test_the_first_turn_comes_at_once_and_each_later_one_after_a_pause() -> None:
    for session in generate(WORKLOAD, 0):
        assert session.turns[0].think_ms == 0
        assert [turn.is_fork for turn in session.turns] == [False, False, False, True]
        for turn in session.turns[1:]:
            assert 100 <= turn.think_ms <= 200


@pytest.mark.parametrize(("forks", "num_turns"), [(True, 4), (False, 3)])
def test_a_fork_is_one_turn_more(forks: bool, num_turns: int) -> None:
    workload = Workload(1, THREE, *lengths(), forks=forks)
    assert generate_session(workload, 0, 0).num_turns == num_turns


def many(**fields: Any) -> tuple[PlannedSession, ...]:
    return generate(replace(WORKLOAD, num_sessions=200, **fields), 0)


def turns_of(sessions: tuple[PlannedSession, ...]) -> list[PlannedTurn]:
    return [turn for session in sessions for turn in session.turns]


def lines(sessions: tuple[PlannedSession, ...]) -> list[list[str]]:
    """What each session's person says, forks left out."""
    return [[turn.text for turn in one.turns if not turn.is_fork] for one in sessions]


def test_every_turn_continues_the_last_answer_and_the_fork_the_first() -> None:
    (session,) = generate(Workload(num_sessions=1), 0)
    assert [turn.follows for turn in session.turns] == [None, 0, 1, 2, 0]


def test_the_usual_workload_is_eight_sessions_of_four_turns_and_a_fork() -> None:
    sessions = generate(Workload(), 0)
    assert [session.num_turns for session in sessions] == [5] * 8
    assert {turn.max_output_tokens for turn in turns_of(sessions)} == {32}


def test_turns_and_answers_have_lengths_that_are_drawn() -> None:
    sessions = many(num_turns=Length(2, 5), output_tokens=Length(8, 16))
    assert {len(line) for line in lines(sessions)} == {2, 3, 4, 5}
    assert {turn.max_output_tokens for turn in turns_of(sessions)} == set(range(8, 17))


def test_what_all_sessions_share_stands_before_what_each_has_of_its_own() -> None:
    systems = [session.system for session in generate(replace(WORKLOAD, prefix_tokens=20), 0)]
    shared = systems[0].partition(" 0: ")[0]
    assert len(shared.split()) == 20
    for index, system in enumerate(systems):
        assert system.startswith(f"{shared} {index}: ")


def test_a_rate_of_cancelling_is_a_share_of_turns_and_cuts_answers_in_their_first_half() -> None:
    turns = turns_of(many(cancel_rate=0.3))
    cut = [turn.cancel_after for turn in turns if turn.cancel_after is not None]
    assert 0.25 < len(cut) / len(turns) < 0.35
    assert set(cut) == set(range(1, 17))


def test_whoever_leaves_does_so_in_their_last_turn_and_comes_not_back() -> None:
    sessions = many(abandon_rate=0.4, fork_rate=0.5, cancel_rate=0.5, restarts=True)
    leaving = [session for session in sessions if session.leaves]
    assert 0.3 < len(leaving) / len(sessions) < 0.5
    assert {sum(not turn.is_fork for turn in one.turns) for one in leaving} == {1, 2, 3}
    for session in leaving:
        assert session.after_restart is None
        assert [turn.leave_after for turn in session.turns[:-1]] == [None] * (
            len(session.turns) - 1
        )
        assert session.turns[-1].cancel_after is None


def test_a_rate_of_forks_is_a_share_of_turns_behind_which_an_earlier_answer_is_continued() -> None:
    sessions = many(fork_rate=0.5, forks=False, num_turns=Length(6, 6))
    forks = [
        (session, at)
        for session in sessions
        for at, turn in enumerate(session.turns)
        if turn.is_fork
    ]
    assert 0.45 < len(forks) / (200 * 5) < 0.55
    for session, at in forks:
        follows, before = session.turns[at].follows, session.turns[at - 1]
        assert follows is not None
        assert not session.turns[follows].is_fork
        assert not before.is_fork
        assert follows < at - 1
    for session in sessions:
        line = [at for at, turn in enumerate(session.turns) if not turn.is_fork]
        assert [session.turns[at].follows for at in line] == [None, *line[:-1]]


def test_only_follow_ups_are_typed_ahead() -> None:
    sessions = many(typed_ahead_rate=1.0)
    assert {turn.typed_ahead for turn in turns_of(sessions) if turn.follows is None} == {False}
    assert {turn.typed_ahead for turn in turns_of(sessions) if turn.follows is not None} == {True}


def test_a_rate_changes_nothing_that_is_not_its_own() -> None:
    plain = many()
    assert lines(many(cancel_rate=0.5, typed_ahead_rate=0.5, fork_rate=0.5)) == lines(plain)
    busy = many(cancel_rate=0.5, typed_ahead_rate=0.5)
    assert [turn.cancel_after for turn in turns_of(busy)] == [
        turn.cancel_after for turn in turns_of(many(cancel_rate=0.5))
    ]


def test_pauses_change_no_text() -> None:
    paused = many(think_ms=Length(0, 900), fork_rate=0.5)
    assert [turn.text for turn in turns_of(paused)] == [
        turn.text for turn in turns_of(many(think_ms=Length(0, 0), fork_rate=0.5))
    ]
    assert len({turn.think_ms for turn in turns_of(paused)}) > 100


def test_a_workload_says_what_a_reader_of_its_figures_must_know() -> None:
    assert Workload(num_sessions=1, num_turns=Length(1, 1)).in_words() == (
        "1 conversation of 1 turn, messages of 48 words, answers of 32 tokens"
    )
    rates = replace(Workload(), cancel_rate=0.1, typed_ahead_rate=0.5, think_ms=Length(200, 800))
    assert rates.in_words("bundled") == (
        "8 conversations of 4 turns at once, messages from bundled, answers of 32 tokens, "
        "pauses of 200-800 ms, cancelled 0.1, typed ahead 0.5"
    )


def test_in_a_closed_loop_all_are_there_at_once() -> None:
    assert {session.arrives_ms for session in many()} == {0.0}


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    at_ms = [session.arrives_ms for session in many(rate_per_s=4.0)]
    assert at_ms == sorted(at_ms)
    assert at_ms[0] > 0
    assert 40_000 < at_ms[-1] < 60_000  # 200 at 4 a second, give or take three sigma
    gaps_ms = [later - sooner for sooner, later in itertools.pairwise(at_ms)]
    # an exponential gap exceeds its mean with the probability 1 ÷ e
    assert 0.30 < sum(gap > 250 for gap in gaps_ms) / len(gaps_ms) < 0.44


def test_a_restart_is_one_turn_more_behind_the_last_answer_of_the_line() -> None:
    for session in many(restarts=True, fork_rate=0.3):
        assert session.after_restart is not None
        line = [at for at, turn in enumerate(session.turns) if not turn.is_fork]
        assert session.after_restart.follows == line[-1]
        assert session.num_turns == len(session.turns) + 1


def test_in_the_warm_up_nothing_goes_wrong_and_nobody_thinks() -> None:
    wild = replace(
        WORKLOAD,
        cancel_rate=1.0,
        abandon_rate=1.0,
        fork_rate=1.0,
        typed_ahead_rate=1.0,
        restarts=True,
        prefix_tokens=5,
    )
    warm_up = warm_up_session(wild, 7)
    plain = generate_session(replace(WORKLOAD, prefix_tokens=5), 7, 5)
    assert warm_up == replace(plain, turns=tuple(replace(turn, think_ms=0) for turn in plain.turns))


CONVERSATIONS = tuple(
    Conversation(texts, Prompt(texts[0], "kind", texts[0]))
    for texts in (("a", "b", "c", "d"), ("e",))
)


def test_sessions_say_what_the_persons_of_conversations_say_up_to_the_turns_asked_for() -> None:
    sessions = generate(WORKLOAD, 0, CONVERSATIONS)
    assert lines(sessions) == [["a", "b", "c"], ["e"], ["a", "b", "c"], ["e"], ["a", "b", "c"]]
    # a fork says what begins the next conversation
    assert [session.turns[-1].text for session in sessions] == ["e", "a", "e", "a", "e"]
    assert len({session.system for session in sessions}) == 5
