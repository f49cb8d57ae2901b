"""The n-gram drafter continues as the conversation did before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chatrt.drafter import DraftRequest
from chatrt.params import SamplingParams
from chatrt.sampling import Sampler
from chatrt_drafts.ngram import NgramDrafter

SAMPLER = Sampler(SamplingParams(temperature=0.0), seed=0, vocab_size=8, prompt_ids=())


def propose(drafter: NgramDrafter, tokens: list[int], *, limit: int = 3) -> list[int]:
    return drafter.propose([DraftRequest(7, tokens, [], limit, SAMPLER)])[0]


def slow_proposal(tokens: list[int], limit: int) -> list[int]:
    """The same rule by scanning everything."""
    for length in range(min(4, len(tokens)), 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                return tokens[end : end + limit]
    return []


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 6))
def test_incremental_proposals_equal_a_full_scan(tokens: list[int], limit: int) -> None:
    drafter = NgramDrafter()
    for length in range(1, len(tokens) + 1):
        prefix = tokens[:length]
        assert propose(drafter, prefix, limit=limit) == slow_proposal(prefix, limit)


def test_nothing_is_proposed_for_tokens_that_never_occurred() -> None:
    assert propose(NgramDrafter(), [1, 2, 3, 4, 5]) == []


def test_a_rewound_session_is_indexed_anew() -> None:
    drafter = NgramDrafter()
    propose(drafter, [1, 2, 9, 9, 1, 2])
    drafter.commit(7, 2)
    assert propose(drafter, [1, 2, 5, 6, 1, 2]) == [5, 6, 1]


def test_a_closed_session_is_forgotten() -> None:
    drafter = NgramDrafter()
    propose(drafter, [1, 2, 3, 1, 2])
    drafter.close(7)
    assert propose(drafter, [1, 2]) == []


def test_a_long_history_is_indexed_over_several_steps_and_drafts_when_it_is_done() -> None:
    drafter, tokens = NgramDrafter(), [*range(1500), 0, 1]
    steps = [propose(drafter, tokens[:length]) for length in (1500, 1501, 1502)]
    assert steps == [[], [], [2, 3, 4]]


def test_a_step_that_asks_twice_is_answered_alike_while_a_long_history_is_indexed() -> None:
    drafter, tokens = NgramDrafter(), [*range(600), 0, 1]
    assert [drafter.find(7, tokens) for _ in range(2)] == [None, None]
    assert drafter.find(7, [*tokens, 2]) is not None


def test_a_match_says_how_many_tokens_recur() -> None:
    match = NgramDrafter().find(7, [1, 2, 3, 9, 5, 1, 2, 3])
    assert match is not None
    assert (match.length, match.position) == (3, 3)


def test_indexes_of_sessions_not_drafted_for_lately_are_let_go() -> None:
    drafter = NgramDrafter(max_sessions=2)
    tokens = [1, 2, 3, 1, 2]
    for session_id in (1, 2, 1, 3):
        assert drafter.find(session_id, tokens) is not None
    # Only an index that is still there remembers more than the tokens that it is shown now.
    kept = [drafter.find(session_id, [8, 9]) for session_id in (3, 1)]
    assert kept == [None, None]
    assert len(drafter._indexes) == 2
    assert 2 not in drafter._indexes
