from __future__ import annotations

from dataclasses import replace

from chatrt.client import TurnResult
from chatrt.errors import ContextLengthExceeded
from chatrt_tui import figures

RESULT = TurnResult(
    text="x",
    status="completed",
    response_id="resp_1",
    usage={
        "input_tokens": 800,
        "input_tokens_details": {"cached_tokens": 768},
        "output_tokens": 12,
        "total_tokens": 812,
    },
    timing={
        "ttft_ms": 7.25,
        "stages": {"queue_ms": 0.1, "prefill_ms": 5.9, "send_ms": 0},
        "decode_tps": 243.4,
        "kv": {
            "reused_tokens": 768,
            "computed_tokens": 32,
            "typed_ahead_tokens": 0,
            "miss_reason": "edited",
            "first_divergence": 768,
        },
        "gap_ms": {"p50": 4.1, "max": 11.2},
        "speculation": {
            "drafter": "ngram",
            "steps": 10,
            "drafted": 30,
            "accepted": 19,
            "mean_accepted_length": 2.9,
        },
    },
    ttft_ms=8.04,
    gaps_ms=(4.0,),
)


def test_the_summary_reads_like_the_status_line() -> None:
    assert figures.summary(RESULT) == "TTFT 8.0 ms · 243 tok/s · 96 % cached · 2.9 tokens/step"


def test_what_is_not_known_is_left_out() -> None:
    assert figures.summary(replace(RESULT, timing={}, usage={}, ttft_ms=123.4)) == "TTFT 123 ms"
    assert figures.summary(replace(RESULT, timing={}, usage={}, ttft_ms=None)) == ""
    assert figures.details(replace(RESULT, timing={}, usage={}, ttft_ms=None)) == ""


def test_details_tell_stages_tokens_gaps_and_drafts_and_leave_out_what_is_0() -> None:
    text = figures.details(RESULT)
    assert "TTFT  8.0 ms, 7.2 ms of it in the server" in text
    assert "stages  queue 0.1 · prefill 5.9 ms" in text.splitlines()
    assert "tokens  768 cached · 32 computed · 12 written" in text.splitlines()
    assert "gaps  p50 4.1 · max 11 ms" in text
    assert "19 of 30 accepted (ngram)" in text
    assert "edited at token 768" in text


def test_tokens_that_were_typed_ahead_are_told() -> None:
    text = figures.details(replace(RESULT, timing={"kv": {"typed_ahead_tokens": 7}}))
    assert "7 typed ahead" in text


def test_details_of_an_answer_in_one_delta_have_no_gaps() -> None:
    gaps = {"p50": None, "p95": None, "p99": None, "max": None, "n": 0}
    text = figures.details(replace(RESULT, timing={**RESULT.timing, "gap_ms": gaps}))
    assert "gaps" not in text


def test_a_miss_without_a_divergence_names_no_token() -> None:
    kv = {"miss_reason": "evicted", "first_divergence": None}
    text = figures.details(replace(RESULT, timing={"kv": kv}))
    assert "cache miss  evicted" in text.splitlines()


def test_context_use_names_the_size_when_it_is_known() -> None:
    assert figures.context_use(812, 8192) == "812/8192 tokens"
    assert figures.context_use(812, None) == "812 tokens"


def test_an_ending_says_why_an_answer_is_not_whole() -> None:
    assert figures.ending(RESULT) == ""
    assert figures.ending(replace(RESULT, reason="cancelled")) == "stopped"
    error = ContextLengthExceeded("9 tokens do not fit in 8")
    assert figures.ending(replace(RESULT, error=error)) == "9 tokens do not fit in 8"
