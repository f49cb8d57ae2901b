from __future__ import annotations

from dataclasses import replace

from chatrt.client import TurnResult
from chatrt.errors import Conflict, ContextLengthExceeded
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
            "miss_reason": "template_drift",
            "first_divergence": {
                "position": 768,
                "held": {"id": 5, "text": "<think>"},
                "asked": {"id": 6, "text": "\n"},
            },
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


def test_left_out_turns_are_told_in_words_and_in_the_status() -> None:
    one = replace(RESULT, timing={"kv": {"dropped_turns": 1, "computed_tokens": 1}})
    assert figures.left_out(one) == (
        "The context is full: the oldest turn was left out of this answer. "
        "1 token had to be computed."
    )
    assert figures.status(one, 8192).endswith(" · 812/8192 tokens · 1 turn left out")
    assert figures.left_out(RESULT) == ""
    assert figures.status(RESULT, 8192) == f"{figures.summary(RESULT)} · 812/8192 tokens"


def test_context_use_names_the_size_when_it_is_known() -> None:
    assert figures.context_use(812, 8192) == "812/8192 tokens"
    assert figures.context_use(812, None) == "812 tokens"


def test_an_ending_says_why_an_answer_is_not_whole() -> None:
    assert figures.ending(RESULT) == ""
    assert figures.ending(replace(RESULT, reason="cancelled")) == "stopped"
    assert figures.ending(replace(RESULT, error=Conflict("one at a time"))) == "one at a time"


def test_a_refusal_of_a_long_message_says_what_helps() -> None:
    error = ContextLengthExceeded("9 tokens do not fit in 8")
    assert figures.ending(replace(RESULT, error=error)) == (
        "9 tokens do not fit in 8. Shorten the message (Ctrl+L empties the prompt), "
        "or begin a new chat with Ctrl+N."
    )
