"""Metrics: what a scrape shows after some turns."""

from __future__ import annotations

from dataclasses import replace

from chatrt.errors import OutOfPages
from chatrt.metrics import Metrics
from chatrt.reclaim import PoolFigures
from chatrt.turn import FinishedEvent, FinishReason, KVFigures, SpeculationFigures, Stamps


def finished(reason: FinishReason, *, reused: int = 0, generated: int = 5) -> FinishedEvent:
    return FinishedEvent(
        response_id="resp_secret",
        reason=reason,
        output_ids=tuple(range(generated)),
        num_generated=generated,
        text="",
        seed=0,
        kv=KVFigures(prefix="warm" if reused else "cold", reused_tokens=reused),
        speculation=SpeculationFigures(),
        first_token_ns=1_000_000,
        last_token_ns=9_000_000,
        time_ns=9_000_000,
        error=OutOfPages(1, 0, 0, 4) if reason is FinishReason.FAILED else None,
    )


POOL = PoolFigures(free=3, held=5, cached=4, shared=1, total=8)


def test_a_turn_is_counted_with_its_tokens_and_its_ttft() -> None:
    metrics = Metrics("tiny")
    stamps = Stamps(received_ns=1_000_000)
    metrics.observe_turn(stamps, finished(FinishReason.END_OF_TURN), 3_000_000, 20)
    metrics.observe_turn(stamps, finished(FinishReason.CANCELLED, reused=19), 3_000_000, 30)
    text = metrics.render(POOL).decode()
    assert 'chatrt_responses_total{status="end_of_turn"} 1.0' in text
    assert "chatrt_prompt_tokens_total 50.0" in text
    assert "chatrt_prompt_cached_tokens_total 19.0" in text
    assert "chatrt_generation_tokens_total 10.0" in text
    ttft = 'chatrt_time_to_first_token_seconds_sum{model="tiny",prefix="%s"} 0.002'
    assert ttft % "cold" in text
    assert ttft % "warm" in text
    assert 'chatrt_time_per_output_token_seconds_sum{model="tiny"} 0.004' in text


def test_a_failed_turn_is_counted_but_not_timed() -> None:
    metrics = Metrics("tiny")
    metrics.observe_turn(Stamps(), finished(FinishReason.FAILED), 5, 20)
    text = metrics.render(POOL).decode()
    assert 'chatrt_responses_total{status="failed"} 1.0' in text
    assert "chatrt_prompt_tokens_total 0.0" in text


def test_pages_are_those_of_the_scrape_and_no_id_is_a_label() -> None:
    metrics = Metrics("tiny")
    metrics.observe_turn(Stamps(), finished(FinishReason.END_OF_TURN), 5, 20)
    text = metrics.render(POOL).decode()
    assert 'chatrt_kv_pages{state="free"} 3.0' in text
    assert "resp_secret" not in text


def test_drafts_are_counted_by_who_made_them_and_pages_by_whose_they_are() -> None:
    metrics = Metrics("tiny", {"target": 5760, "drafts": 192})
    figures = SpeculationFigures(
        drafter="head", drafted=7, accepted=4, accepted_per_position=(3, 1), draft_ms=250.0
    )
    event = replace(finished(FinishReason.END_OF_TURN), speculation=figures)
    metrics.observe_turn(Stamps(), event, 5, 20)
    text = metrics.render(POOL).decode()
    for line in (
        'chatrt_spec_drafted_tokens_total{drafter="head"} 7.0',
        'chatrt_spec_accepted_tokens_total{drafter="head"} 4.0',
        'chatrt_spec_accepted_per_position_total{position="1"} 1.0',
        "chatrt_spec_draft_seconds_total 0.25",
        'chatrt_kv_bytes{owner="target"} 5760.0',
        'chatrt_kv_bytes{owner="drafts"} 192.0',
    ):
        assert line in text
