"""The draft-model drafter under any interleaving of what happens to sessions and their pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chatrt_drafts.model_support import SEEDED, Pair, prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.text.tokenizer import Tokenizer


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "step", "step", "step", "fork", "rewind", "forget"]),
        st.integers(0, 1 << 16),
    ),
    min_size=5,
    max_size=25,
)


@settings(max_examples=25, deadline=None)
@given(actions=ACTIONS)
def test_whatever_happens_to_sessions_right_rows_are_right(
    tokenizer: Tokenizer, actions: Sequence[tuple[str, int]]
) -> None:
    pair = Pair(tokenizer, num_pages=24, max_catch_up_rows=12)
    for name, number in [("open", 0), *actions]:
        act(pair, name, number)
        for talk in pair.talks:
            pair.assert_right_rows_are_the_targets(talk)


def act(pair: Pair, name: str, number: int) -> None:
    """One action of a random sort on sessions of at most 60 tokens, of which four may exist."""
    talk = pair.talks[number % len(pair.talks)] if pair.talks else None
    if talk is None or (name == "open" and len(pair.talks) < 4):
        if len(pair.talks) < 4:
            # Two prompts that begin alike, and shorter ones of the same.
            shared = 20 if number % 2 else 0
            pair.open([*prompt(shared), *prompt(3 + number % 23, first=number % 3)], SEEDED)
    elif len(talk.session.token_ids) > 60 or name == "forget":
        pair.forget(talk)
    elif name == "fork" and len(pair.talks) < 4:
        pair.fork(talk, 1 + number % len(talk.session.token_ids)).sampler.seed = number
    elif name == "rewind":
        pair.rewind(talk, 1 + number % len(talk.session.token_ids), prompt(number % 9, first=2))
    elif name == "step":
        for one in pair.talks:
            one.sampler.errs_at = number % 5
        pair.step({one: (number >> i) % 5 for i, one in enumerate(pair.talks)})
