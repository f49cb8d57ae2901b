"""Tokens become text, and an answer ends: stops, caps, characters, cuts."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatrt.engine.live import LiveTurn
from chatrt.pages import PageAllocator
from chatrt.params import SamplingParams
from chatrt.prefix import PrefixTree
from chatrt.sampling import Sampler
from chatrt.scheduler import Entry, Phase, Work
from chatrt.session_manager import SessionManager
from chatrt.testing.engine import run_outcome, run_turn, tiny_engine, turn_request
from chatrt.testing.tokenizer import IM_END, tiny_sentencepiece_tokenizer
from chatrt.turn import FinishReason, KVFigures
from tests.chatrt.engine_support import ColdRuns

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from chatrt.engine.live import Emitted
    from chatrt.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("sentencepiece")
    return tiny_sentencepiece_tokenizer(folder)


def live_turn(
    tokenizer: Tokenizer, sampling: SamplingParams | None = None, *, max_tokens: int = 100
) -> LiveTurn:
    allocator = PageAllocator(4)
    sessions = SessionManager(allocator, PrefixTree(allocator), page_size=16)
    request = turn_request("a", [1, 2, 3], sampling=sampling or SamplingParams())
    session = sessions.open("", request.token_ids).session
    entry = Entry(session, Work.DECODE, Phase.RUNNING, priority=0, arrival=0)
    sampler = Sampler(request.sampling, seed=0, vocab_size=tokenizer.vocab_size, prompt_ids=())
    return LiveTurn(request, entry, sampler, tokenizer, max_tokens, KVFigures())


def push(turn: LiveTurn, token_ids: Sequence[int]) -> Emitted:
    return turn.push(token_ids, (), time_ns=1)


def kept_ids(turn: LiveTurn) -> list[int]:
    cut = turn.cut()
    return [*turn.token_ids[: cut.num_kept], *cut.remainder_ids]


def end_id(tokenizer: Tokenizer) -> int:
    found = tokenizer.id_of(IM_END)
    assert found is not None
    return found


def test_an_end_of_turn_inside_a_run_drops_what_is_behind_it(tokenizer: Tokenizer) -> None:
    turn = live_turn(tokenizer)
    emitted = push(turn, [97, 98, end_id(tokenizer), 99])
    assert turn.finish is FinishReason.END_OF_TURN
    assert emitted.text == turn.text == "ab"
    assert emitted.token_ids == (97, 98, end_id(tokenizer))
    assert kept_ids(turn) == turn.token_ids == [97, 98, end_id(tokenizer)]


def test_ignore_eos_goes_on_behind_an_end_of_turn(tokenizer: Tokenizer) -> None:
    turn = live_turn(tokenizer, SamplingParams(ignore_eos=True))
    assert push(turn, [97, end_id(tokenizer), 98]).text == "ab"
    assert turn.finish is None


def test_a_stop_token_ends_the_answer_without_being_shown(tokenizer: Tokenizer) -> None:
    turn = live_turn(tokenizer, SamplingParams(stop_token_ids=(98,)))
    assert push(turn, [97, 98, 99]).text == "a"
    assert turn.finish is FinishReason.END_OF_TURN
    assert turn.stop_string is None


def test_the_cap_counts_tokens_and_a_stop_at_the_cap_wins(tokenizer: Tokenizer) -> None:
    capped = live_turn(tokenizer, max_tokens=2)
    assert push(capped, [97, 98, 99]).token_ids == (97, 98)
    assert capped.finish is FinishReason.MAX_OUTPUT_TOKENS
    for sampling in (SamplingParams(stop=("b",)), SamplingParams(stop_token_ids=(98,))):
        stopped = live_turn(tokenizer, sampling, max_tokens=2)
        push(stopped, [97, 98, 99])
        assert stopped.finish is FinishReason.END_OF_TURN


def test_a_stop_string_across_tokens_is_never_seen_in_part(tokenizer: Tokenizer) -> None:
    turn = live_turn(tokenizer, SamplingParams(stop=("x, y",)))
    pieces = [push(turn, [token]).text for token in b"a x, x, y z"[:10]]
    assert "".join(pieces) == turn.text == "a x, "
    assert turn.stop_string == "x, y"
    assert tokenizer.decode(kept_ids(turn)) == "a x, "


def test_a_stop_inside_a_token_cuts_before_it_and_encodes_its_sent_part_anew(
    tokenizer: Tokenizer,
) -> None:
    (hello,) = tokenizer.encode("hello")
    turn = live_turn(tokenizer, SamplingParams(stop=("lo",)))
    emitted = push(turn, [97, hello, 98])
    assert emitted.text == "ahel"
    assert emitted.token_ids == (97, hello)
    assert turn.cut().num_kept == 1
    assert kept_ids(turn) == [97, *tokenizer.encode("hel")]


def test_a_stop_inside_the_first_token_cuts_everything(tokenizer: Tokenizer) -> None:
    (hello,) = tokenizer.encode("hello")
    turn = live_turn(tokenizer, SamplingParams(stop=("hell",)))
    assert push(turn, [hello]).text == ""
    assert kept_ids(turn) == []


@pytest.mark.parametrize("text", ["ahello", "a hello", "hello", "hello world"])
def test_the_sent_part_of_a_token_gets_no_space_that_was_not_sent(
    spaced: Tokenizer, text: str
) -> None:
    token_ids = spaced.encode(text)
    turn = live_turn(spaced, SamplingParams(stop=("lo",)))
    push(turn, token_ids)
    assert turn.text == text[: text.index("lo")]
    assert spaced.decode(kept_ids(turn)) == turn.text


def test_half_a_character_is_held_until_it_is_whole(tokenizer: Tokenizer) -> None:
    turn = live_turn(tokenizer)
    pieces = [push(turn, [byte]).text for byte in "é€🙂".encode()]
    assert pieces == ["", "é", "", "", "€", "", "", "", "🙂"]


def test_half_a_character_that_the_cap_cuts_off_is_not_shown(tokenizer: Tokenizer) -> None:
    turn = live_turn(tokenizer, max_tokens=3)
    pieces = [push(turn, [byte]).text for byte in (97, *"🙂".encode()[:2])]
    assert pieces == ["a", "", ""]
    assert kept_ids(turn) == turn.token_ids


def test_half_a_character_that_the_model_ended_with_is_one_replacement(
    tokenizer: Tokenizer,
) -> None:
    turn = live_turn(tokenizer)
    (end,) = tokenizer.eos_token_ids
    pieces = [push(turn, [token]).text for token in (97, *"🙂".encode()[:2], end)]
    assert pieces == ["a", "", "", "\ufffd"]


def test_a_stop_that_the_last_half_character_completes_is_found_at_the_end(
    tokenizer: Tokenizer,
) -> None:
    turn = live_turn(tokenizer, SamplingParams(stop=("a\ufffd",)))
    (end,) = tokenizer.eos_token_ids
    push(turn, [97, "é".encode()[0], end])
    assert turn.text == ""
    assert turn.stop_string == "a\ufffd"
    assert turn.finish is FinishReason.END_OF_TURN
    assert kept_ids(turn) == []


def test_a_cancel_drops_tokens_of_a_character_that_was_not_sent(tokenizer: Tokenizer) -> None:
    turn = live_turn(tokenizer)
    push(turn, [97, *"🙂".encode()[:3]])
    turn.finish = FinishReason.CANCELLED
    assert kept_ids(turn) == [97]


def test_a_cancel_drops_what_a_stop_string_held_back(tokenizer: Tokenizer) -> None:
    (hello,) = tokenizer.encode("hello")
    turn = live_turn(tokenizer, SamplingParams(stop=("lollipop",)))
    assert push(turn, [97, hello]).text == "ahel"
    turn.finish = FinishReason.CANCELLED
    assert tokenizer.decode(kept_ids(turn)) == turn.text == "ahel"


def test_held_text_is_released_when_the_answer_ends_without_its_stop(
    tokenizer: Tokenizer,
) -> None:
    for max_tokens, last in ((3, 98), (9, end_id(tokenizer))):
        turn = live_turn(tokenizer, SamplingParams(stop=("abz",)), max_tokens=max_tokens)
        pieces = [push(turn, [token]).text for token in (99, 97, last)]
        assert pieces[:2] == ["c", ""]
        assert turn.text == ("cab" if last == 98 else "ca")
        assert turn.stop_string is None
        assert kept_ids(turn) == turn.token_ids


def test_the_room_for_drafts_ends_one_token_before_the_cap(tokenizer: Tokenizer) -> None:
    turn = live_turn(tokenizer, max_tokens=3)
    rooms = [turn.room]
    for token in b"abc":
        push(turn, [token])
        rooms.append(turn.room)
    assert rooms == [2, 1, 0, 0]


_STOPS = st.lists(
    st.sampled_from(["a", "lo", "wor", "o w", "\ufffd", "é", "\n\n", "hello hello"]), max_size=3
)


@given(
    token_ids=st.lists(
        st.one_of(st.sampled_from(b"aelo w\n"), st.integers(0, 270)), min_size=1, max_size=25
    ),
    sizes=st.lists(st.integers(1, 5), min_size=25, max_size=25),
    stops=_STOPS,
    cancelled=st.booleans(),
)
def test_in_any_grouping_of_tokens_text_and_kept_ids_agree(
    tokenizer: Tokenizer,
    token_ids: list[int],
    sizes: list[int],
    stops: list[str],
    cancelled: bool,
) -> None:
    sampling = SamplingParams(stop=tuple(stops), ignore_eos=True)
    one_by_one = live_turn(tokenizer, sampling, max_tokens=len(token_ids))
    grouped = live_turn(tokenizer, sampling, max_tokens=len(token_ids))
    for token_id in token_ids:
        if one_by_one.finish is None:
            push(one_by_one, [token_id])
    left, pieces = list(token_ids), []
    for size in sizes:
        if grouped.finish is None and left:
            pieces.append(push(grouped, left[:size]).text)
            del left[:size]
    assert grouped.text == one_by_one.text == "".join(pieces)
    assert grouped.token_ids == one_by_one.token_ids
    assert kept_ids(grouped) == kept_ids(one_by_one)
    spelled = b"".join(tokenizer.token_bytes(i, skip_special=True) for i in grouped.token_ids)
    # The cap ends the answer: half a character at its end is not shown.
    whole = codecs.getincrementaldecoder("utf-8")("replace").decode(spelled)
    found = [whole.find(stop) for stop in stops]
    if grouped.stop_string is None:
        assert grouped.text == whole
        assert max(found, default=-1) == -1
    else:
        assert grouped.text == whole[: len(grouped.text)]
        assert whole[len(grouped.text) :].startswith(grouped.stop_string)
    if grouped.stop_string is not None and "\ufffd" not in grouped.text:
        assert tokenizer.decode(kept_ids(grouped)) == grouped.text
    if cancelled:
        partial = live_turn(tokenizer, sampling)
        push(partial, token_ids[: len(token_ids) // 2 + 1])
        if partial.finish is None:
            partial.finish = FinishReason.CANCELLED
        if partial.finish is FinishReason.CANCELLED and "\ufffd" not in partial.text:
            assert tokenizer.decode(kept_ids(partial)) == partial.text


# Through the engine ------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, 13, 14, 15, 16, 17, 30])
def test_a_follow_up_behind_a_cut_answer_is_that_of_the_cut_ids(
    tokenizer: Tokenizer, length: int
) -> None:
    (hello,) = tokenizer.encode("hello")
    bias = {hello: 100.0}
    sampling = SamplingParams(
        temperature=0.0, logit_bias=bias, stop=("lohellohel",), max_output_tokens=9
    )
    engine = tiny_engine(tokenizer)
    prompt = tokenizer.encode("b" * length)
    end = run_turn(engine, turn_request("a", prompt, sampling=sampling))
    assert end.text == "hel"
    assert end.stop_string == "lohellohel"
    assert end.num_generated == 3
    assert list(end.output_ids) == tokenizer.encode("hel")
    history = [*prompt, *end.output_ids]
    more = turn_request("b", tokenizer.encode("and?"), parent=end, history=history)
    found = run_outcome(engine, more)
    ColdRuns(tokenizer).assert_equal(more, found)
    # Of the cut answer nothing is computed yet, and the prompt's last row may have to be again.
    assert found.end.kv.reused_tokens in (len(prompt) - 1, len(prompt))
