from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from chatrt_tui import explained
from chatrt_tui.details import bar
from tests.chatrt_tui.test_figures import RESULT

if TYPE_CHECKING:
    from chatrt_tui.explained import Section


def with_timing(**timing: Any) -> Section | None:
    return explained.tokens(replace(RESULT, usage={}, timing=timing))


def test_the_stages_of_ttft_are_bars_in_proportion_and_those_of_0_are_left_out() -> None:
    section = explained.ttft(RESULT)
    assert section is not None
    assert section.title == "TTFT 8.0 ms, 7.2 ms in the server"
    assert [(one.label, one.text) for one in section.bars] == [
        ("queue", "0.1 ms"),
        ("prefill", "5.9 ms"),
    ]
    assert section.bars[1].share == 1.0
    assert section.bars[0].share == pytest.approx(0.1 / 5.9)


def test_tokens_are_told_by_where_they_came_from_and_a_miss_with_its_first_token() -> None:
    section = explained.tokens(RESULT)
    assert section is not None
    assert section.lines == (
        "768 cached · 32 computed · 12 written",
        "cache miss: the template writes an earlier answer differently now, "
        "from token 768 on: '<think>' was cached, '\\n' is asked for",
    )


def test_tokens_that_were_typed_ahead_are_told_beside_those_that_were_cached() -> None:
    section = with_timing(kv={"reused_tokens": 90, "typed_ahead_tokens": 7, "computed_tokens": 3})
    assert section is not None
    assert section.lines == ("90 cached, 7 of them typed ahead · 3 computed",)


@pytest.mark.parametrize(
    ("kv", "told"),
    [
        ({"prefix": "forked"}, "forked: it is shared with another branch"),
        (
            {"prefix": "restored", "restored_from": "disk"},
            "restored: it came back from disk",
        ),
        ({"resident_pages": 54, "shared_pages": 12}, "54 pages resident, 12 of them shared"),
        ({"resident_pages": 1, "shared_pages": 0}, "1 page resident"),
        (
            {"miss_reason": "evicted", "first_divergence": None},
            "cache miss: the server had given some of these pages away",
        ),
        (
            {
                "miss_reason": "moon_phase",
                "first_divergence": {"position": 9, "held": None, "asked": {"id": 6, "text": ""}},
            },
            "cache miss: moon phase, from token 9 on: the end was cached, token 6 is asked for",
        ),
    ],
)
def test_what_the_prefix_was_is_told_in_words(kv: dict[str, Any], told: str) -> None:
    section = with_timing(kv={"computed_tokens": 3, **kv})
    assert section is not None
    assert section.lines[1:] == (told,)


def test_acceptance_is_told_by_place_of_those_passes_that_drafted_so_far() -> None:
    speculation = {
        "drafter": "ngram",
        "drafted": 30,
        "accepted": 19,
        "mean_accepted_length": 2.9,
        "accepted_per_position": [12, 7, 0],
        "depths": [5, 0, 10, 5],
    }
    section = explained.drafts(replace(RESULT, timing={"speculation": speculation}))
    assert section is not None
    assert section.lines == ("19 of 30 accepted (ngram)", "2.9 tokens for each pass")
    assert [(one.label, one.text) for one in section.bars] == [
        ("place 1", "80 % of 15"),
        ("place 2", "47 % of 15"),
        ("place 3", "0 % of 5"),
    ]


def test_the_stream_is_told_by_its_speed_gaps_and_seed() -> None:
    section = explained.stream(replace(RESULT, timing={**RESULT.timing, "seed": 7}))
    assert section is not None
    assert section.lines == ("243 tokens a second", "gaps p50 4.1 · max 11 ms", "seed 7")


def test_an_answer_in_one_delta_has_no_gaps_and_an_unmeasured_turn_no_sections() -> None:
    gaps = {"p50": None, "p95": None, "p99": None, "max": None, "n": 0}
    section = explained.stream(replace(RESULT, timing={**RESULT.timing, "gap_ms": gaps}))
    assert section is not None
    assert not any("gaps" in line for line in section.lines)
    nothing = replace(RESULT, timing={}, usage={}, ttft_ms=None)
    for of in (explained.ttft, explained.tokens, explained.drafts, explained.stream):
        assert of(nothing) is None


@pytest.mark.parametrize(
    ("share", "painted"), [(1.0, "████"), (0.5, "██"), (0.28, "█▏"), (0.0, "▏"), (2.0, "████")]
)
def test_a_bar_is_as_long_as_its_share_in_eighths_and_never_empty(
    share: float, painted: str
) -> None:
    assert bar(share, 4) == painted
