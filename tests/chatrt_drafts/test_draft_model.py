"""The draft-model drafter: what it drafts, which of its rows it trusts, how it catches up."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from chatrt.batch import BatchRows
from chatrt.drafter import TargetPass
from chatrt.params import SamplingParams
from chatrt.testing.engine import PAGE_SIZE, engine_over, run_outcome, tiny_target, turn_request
from chatrt.testing.tokenizer import IM_END, IM_START, tiny_tokenizer
from chatrt_drafts.draft_model import ModelDrafter
from chatrt_kernels.cpu.binding import NativeLibrary
from chatrt_kernels.cpu.ops import NativeOps
from chatrt_kernels.reference import ReferenceOps
from tests.chatrt_drafts.model_support import GREEDY, SEEDED, Pair, Talk, prompt
from tests.chatrt_kernels.cpu_support import NATIVE_PATH, compiled

if TYPE_CHECKING:
    from torch import Tensor

    from chatrt.text.tokenizer import Tokenizer
    from chatrt_kernels.ops import Ops

EXECUTORS = ("reference", "native")


def executor(name: str) -> Ops:
    return (
        NativeOps(NativeLibrary(compiled(NATIVE_PATH)), 1) if name == "native" else ReferenceOps()
    )


def steps(pair: Pair, talk: Talk, num_drafts: int, num_steps: int) -> None:
    for _ in range(num_steps):
        pair.step({talk: num_drafts})


@pytest.mark.parametrize("name", EXECUTORS)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_every_draft_of_a_self_draft_is_accepted_at_every_depth(
    tokenizer: Tokenizer, name: str, params: SamplingParams
) -> None:
    pair = Pair(tokenizer, ops=executor(name))
    for k in (1, 2, 3, 4, 7):
        talk = pair.open(prompt(11, first=k), params, seed=k)
        for _ in range(8):
            found = pair.step({talk: k})[talk]
            assert len(found.drafts) == k
            assert found.verified.num_accepted == k
            pair.assert_right_rows_are_the_targets(talk)


@pytest.mark.parametrize("name", EXECUTORS)
def test_after_each_round_all_rows_are_right_but_the_last_and_of_a_full_acceptance_the_last_two(
    tokenizer: Tokenizer, name: str
) -> None:
    pair = Pair(tokenizer, ops=executor(name))
    talk = pair.open(prompt(9), SEEDED, seed=3)
    for k in (1, 2, 4, 5):
        for num_accepted in range(k + 1):
            talk.sampler.errs_at = num_accepted
            found = pair.step({talk: k})[talk]
            assert found.verified.num_accepted == num_accepted
            length = len(talk.session.token_ids)
            assert pair.num_right(talk) == length - (2 if num_accepted == k else 1)
            pair.assert_right_rows_are_the_targets(talk)


def test_another_model_drafts_what_its_own_logits_say_and_the_target_decides(
    tokenizer: Tokenizer,
) -> None:
    plain, drafted = Pair(tokenizer), Pair(tokenizer, draft_seed=5)
    one, other = (pair.open(prompt(9), SEEDED, seed=3) for pair in (plain, drafted))
    steps(plain, one, 0, 40)
    while len(other.session.token_ids) < len(one.session.token_ids):
        drafted.step({other: 3})
    length = len(one.session.token_ids)
    assert other.session.token_ids[:length] == one.session.token_ids
    assert drafted.num_right(other) >= len(other.session.token_ids) - 2


def test_sessions_of_different_depths_are_drafted_for_together_as_alone(
    tokenizer: Tokenizer,
) -> None:
    depths = (3, 0, 1, 5)
    alone = []
    for i, k in enumerate(depths):
        pair = Pair(tokenizer)
        alone.append(pair.step({pair.open(prompt(8 + i, first=i), SEEDED, seed=i): k}))
    pair = Pair(tokenizer)
    talks = [pair.open(prompt(8 + i, first=i), SEEDED, seed=i) for i in range(len(depths))]
    together = pair.step(dict(zip(talks, depths, strict=True)))
    expected = [found.drafts for one in alone for found in one.values()]
    assert [found.drafts for found in together.values()] == expected
    assert [len(drafts) for drafts in expected] == list(depths)


def test_no_token_is_drafted_behind_one_that_makes_the_chain_improbable(
    tokenizer: Tokenizer,
) -> None:
    pair = Pair(tokenizer)
    talk = pair.open(prompt(9), SEEDED, seed=3)
    pair.sessions.reserve(talk.session, 9)
    [whole] = pair.drafter.propose([talk.request(8)])
    lengths = []
    for floor in (1.1, 0.5, 0.1, 1e-3, 1e-30):
        [drafts] = pair.drafter.propose([talk.request(8, floor)])
        assert drafts == whole[: len(drafts)]
        lengths.append(len(drafts))
    assert lengths == sorted(lengths)
    assert lengths[0] == 1
    assert lengths[-1] == 8


def test_a_session_that_is_behind_is_caught_up_in_bounded_steps_without_drafts(
    tokenizer: Tokenizer,
) -> None:
    pair = Pair(tokenizer, max_catch_up_rows=16)
    talk = pair.open(prompt(50))
    right = []
    for _ in range(5):
        found = pair.step({talk: 2})[talk]
        right.append(pair.num_right(talk))
        assert bool(found.drafts) == (len(right) > 3)
        pair.assert_right_rows_are_the_targets(talk)
    # The fourth step has five rows to go; the drafts of the last two are accepted.
    assert right == [16, 32, 48, 53 + 1, 56 + 1]


def test_the_rows_of_a_call_are_bounded_over_all_sessions_and_the_others_go_on_drafting(
    tokenizer: Tokenizer,
) -> None:
    pair = Pair(tokenizer, max_catch_up_rows=16)
    up_to_date = pair.open(prompt(10))
    steps(pair, up_to_date, 2, 1)
    late = [pair.open(prompt(21, first=i)) for i in (1, 2)]
    for right in ((16, 0), (23, 10)):
        found = pair.step({up_to_date: 2, late[0]: 2, late[1]: 2})
        assert len(found[up_to_date].drafts) == 2
        assert tuple(pair.num_right(talk) for talk in late) == right
    # The first needed 6 of the second step's 16 rows, and could draft; now both can.
    found = pair.step({up_to_date: 2, late[0]: 2, late[1]: 2})
    assert all(found[talk].verified.num_accepted == 2 for talk in late)
    for talk in pair.talks:
        pair.assert_right_rows_are_the_targets(talk)


def test_sessions_that_share_a_page_may_catch_up_on_it_in_the_same_pass(
    tokenizer: Tokenizer,
) -> None:
    pair = Pair(tokenizer, max_catch_up_rows=24)
    one, other = pair.open(prompt(42)), pair.open(prompt(42))
    assert one.session.page_ids[:2] == other.session.page_ids[:2]
    steps(pair, one, 2, 1)
    assert pair.num_right(one) == 24  # in the middle of the second page
    for _ in range(3):
        pair.step({one: 2, other: 2})
        for talk in pair.talks:
            pair.assert_right_rows_are_the_targets(talk)
    found = pair.step({one: 2, other: 2})
    assert all(found[talk].verified.num_accepted == 2 for talk in pair.talks)


def test_a_session_that_drafted_nothing_for_a_while_is_caught_up(tokenizer: Tokenizer) -> None:
    pair = Pair(tokenizer)
    talk = pair.open(prompt(10))
    steps(pair, talk, 2, 2)
    right = pair.num_right(talk)
    steps(pair, talk, 0, 20)
    assert pair.num_right(talk) == right
    assert pair.step({talk: 3})[talk].verified.num_accepted == 3
    pair.assert_right_rows_are_the_targets(talk)


@pytest.mark.parametrize("name", EXECUTORS)
def test_pages_that_another_session_was_given_meanwhile_are_not_trusted(
    tokenizer: Tokenizer, name: str
) -> None:
    pair = Pair(tokenizer, num_pages=6, ops=executor(name))
    first = pair.open(prompt(40))
    steps(pair, first, 2, 3)
    pages = set(first.session.page_ids)
    pair.forget(first)
    second = pair.open(prompt(40, first=60))
    assert pages & set(second.session.page_ids)
    assert pair.num_right(second) == 0
    steps(pair, second, 2, 2)
    pair.assert_right_rows_are_the_targets(second)
    pair.forget(second)
    again = pair.open(prompt(40))
    assert pair.num_right(again) == 0
    assert pair.step({again: 4})[again].verified.num_accepted == 4
    pair.assert_right_rows_are_the_targets(again)


def test_pages_that_came_back_unwritten_are_still_known(tokenizer: Tokenizer) -> None:
    pair = Pair(tokenizer)
    first = pair.open(prompt(40))
    steps(pair, first, 2, 1)
    pages = list(first.session.page_ids)
    pair.forget(first)
    again = pair.open(prompt(40))
    same = [one == other for one, other in zip(pages, again.session.page_ids, strict=False)]
    expected = 39 if all(same) else PAGE_SIZE * same.index(False)
    assert pair.num_right(again) == expected
    pair.assert_right_rows_are_the_targets(again)


@pytest.mark.parametrize("name", EXECUTORS)
def test_a_fork_shares_the_rows_that_are_known_and_those_of_the_copied_page(
    tokenizer: Tokenizer, name: str
) -> None:
    pair = Pair(tokenizer, ops=executor(name))
    source = pair.open(prompt(42))
    steps(pair, source, 2, 2)
    length = len(source.session.token_ids)
    for num_tokens in (length - 2, 40, 33, 20):
        fork = pair.fork(source, num_tokens)
        assert pair.num_right(fork) == num_tokens - 1
        fork.sampler.seed += 1
        assert pair.step({fork: 3})[fork].verified.num_accepted == 3
        pair.assert_right_rows_are_the_targets(fork)
        pair.assert_right_rows_are_the_targets(source)


def test_a_prefix_that_another_session_drafted_behind_needs_no_catching_up(
    tokenizer: Tokenizer,
) -> None:
    pair = Pair(tokenizer)
    first = pair.open(prompt(40))
    steps(pair, first, 2, 1)
    pair.drafter.close(first.session.session_id)
    second = pair.open([*prompt(32), 99, 98, 97])
    assert pair.num_right(second) == 32
    assert len(pair.step({second: 2})[second].drafts) == 2
    pair.assert_right_rows_are_the_targets(second)


@pytest.mark.parametrize("kept", [8, 16, 17, 35, 41])
def test_a_rewound_session_keeps_the_rows_of_the_tokens_that_it_kept(
    tokenizer: Tokenizer, kept: int
) -> None:
    pair = Pair(tokenizer)
    talk = pair.open(prompt(42))
    steps(pair, talk, 3, 4)
    pair.rewind(talk, kept, prompt(30, first=50))
    # The target computes the last kept token anew, into a copy where the page is known to others.
    assert pair.num_right(talk) in (kept - 1, kept)
    pair.assert_right_rows_are_the_targets(talk)
    assert pair.step({talk: 3})[talk].verified.num_accepted == 3
    pair.assert_right_rows_are_the_targets(talk)


@pytest.mark.parametrize("told_by", ["commit", "observe"])
def test_tokens_that_changed_under_the_same_pages_are_compared_anew(
    tokenizer: Tokenizer, told_by: str
) -> None:
    pair = Pair(tokenizer)
    talk = pair.open(prompt(40))
    steps(pair, talk, 2, 2)
    session_id, page_ids = talk.session.session_id, talk.session.page_ids
    changed = [*talk.session.token_ids[:20], *prompt(20, first=77)]
    if told_by == "commit":
        pair.drafter.commit(session_id, 20)
    else:
        rows = [BatchRows(changed[20:39], 20, page_ids)]
        pair.drafter.observe(TargetPass([session_id], rows))
    assert pair.drafter.num_right(replace(talk.request(0), token_ids=changed)) == 20


def test_what_was_seen_of_a_session_goes_with_it(
    tokenizer: Tokenizer,
) -> None:
    pair = Pair(tokenizer)
    talk = pair.open(prompt(40))
    steps(pair, talk, 2, 1)
    pair.drafter.close(talk.session.session_id)
    other = replace(talk.request(0), token_ids=prompt(40, first=9))
    assert pair.drafter.num_right(other) == 0


def test_ids_that_only_one_of_the_models_has_are_neither_proposed_nor_fed(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    few = Pair(tokenizer, vocab_size=40)
    talk = few.open(prompt(9), SEEDED)
    drafts = [t for _ in range(10) for t in few.step({talk: 3})[talk].drafts]
    assert max(drafts) < 40
    larger = tiny_tokenizer(
        tmp_path_factory.mktemp("larger"), specials=(IM_START, IM_END, "<|tool|>")
    )
    target, draft = tiny_target(larger), tiny_target(tokenizer)
    drafter = ModelDrafter(
        draft.decoder, draft.kv, draft.batches, vocab_size=tokenizer.vocab_size, max_context=256
    )
    unknown = tokenizer.vocab_size
    assert unknown < target.vocab_size
    request = replace(talk.request(2), token_ids=[1, 2, unknown, 3], page_ids=[0])
    known = replace(request, session_id=99, token_ids=[1, 2, 3], page_ids=[1])
    assert [len(drafts) for drafts in drafter.propose([request, known])] == [0, 2]


def test_the_end_of_the_drafts_context_bounds_the_chain(tokenizer: Tokenizer) -> None:
    pair = Pair(tokenizer, max_context=20)
    talk = pair.open(prompt(17))
    pair.sessions.reserve(talk.session, 10)
    assert [len(d) for d in pair.drafter.propose([talk.request(9)])] == [4]
    pair.step({talk: 2})
    assert [len(d) for d in pair.drafter.propose([talk.request(9)])] == [1]
    pair.step({talk: 1})
    assert pair.step({talk: 2})[talk].drafts == []


def test_sessions_beyond_what_one_pass_holds_get_nothing(tokenizer: Tokenizer) -> None:
    pair = Pair(tokenizer, num_pages=128)
    talks = [pair.open(prompt(3, first=i)) for i in range(70)]
    requests = [talk.request(1) for talk in talks[:40]]
    for talk in talks:
        pair.sessions.reserve(talk.session, 2)
    found = [len(drafts) for drafts in pair.drafter.propose(requests)]
    assert found == [1] * 21 + [0] * 19  # 64 rows, three for each
    assert sum(map(len, pair.drafter.propose([talk.request(1) for talk in talks]))) <= 64


def test_rows_of_a_pass_that_failed_are_not_trusted(tokenizer: Tokenizer) -> None:
    ops = FailingOps()
    pair = Pair(tokenizer, ops=ops)
    talk = pair.open(prompt(20))
    pair.sessions.reserve(talk.session, 4)
    ops.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        pair.drafter.propose([talk.request(3)])
    ops.fails = False
    assert pair.num_right(talk) == 0
    assert pair.step({talk: 3})[talk].verified.num_accepted == 3


class FailingOps(ReferenceOps):
    """The reference, until it fails in the middle of a layer."""

    fails = False

    def swiglu(self, gate: Tensor, up: Tensor, *, out: Tensor) -> None:
        if self.fails:
            raise RuntimeError("out of memory")
        super().swiglu(gate, up, out=out)


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SamplingParams(temperature=0.8, seed=11, top_k=40, frequency_penalty=0.5)],
    ids=["greedy", "seeded"],
)
@pytest.mark.parametrize("draft_seed", [0, 5], ids=["self-draft", "another model"])
def test_an_engine_answers_with_it_as_without_it(
    tokenizer: Tokenizer, sampling: SamplingParams, draft_seed: int
) -> None:
    sampling = replace(sampling, max_output_tokens=40)
    draft = tiny_target(tokenizer, seed=draft_seed)
    drafter = ModelDrafter(
        draft.decoder, draft.kv, draft.batches, vocab_size=tokenizer.vocab_size, max_context=256
    )
    plain = engine_over(tiny_target(tokenizer), max_context=256)
    drafting = engine_over(tiny_target(tokenizer), max_context=256, drafter=drafter, num_drafts=4)
    request = turn_request("a", prompt(30), sampling=sampling)
    first = run_outcome(drafting, replace(request))
    assert first.token_ids == run_outcome(plain, replace(request)).token_ids
    figures = first.end.speculation
    assert figures.drafted > 0
    assert figures.accepted == figures.drafted or draft_seed != 0
    history = [*request.token_ids, *first.end.output_ids]
    more = turn_request("b", [7, 8], parent=first.end, history=history, sampling=sampling)
    assert run_outcome(drafting, replace(more)).token_ids == run_outcome(plain, more).token_ids
