"""Metrics: what a scrape shows after some turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from chatrt.errors import OutOfPages, Overloaded
from chatrt.metrics import EngineFigures, Metrics
from chatrt.reclaim import PoolFigures
from chatrt.turn import FinishReason, KVFigures, SpeculationFigures, TurnKind
from chatrt.wire.live import Sockets
from tests.chatrt.metrics_support import POOL, STAMPS, ended_turn, scrape, tell

if TYPE_CHECKING:
    from chatrt.metrics import EndedTurn


def failed(error: Exception, *, admitted: bool) -> EndedTurn:
    stamps = STAMPS if admitted else {"received_ns": 1_000_000, "tokenized_ns": 1_100_000}
    return ended_turn(FinishReason.FAILED, error=error, stamps=stamps)


async def test_a_turn_is_counted_with_its_tokens_and_its_ttft() -> None:
    metrics = Metrics("tiny")
    tell(metrics, ended_turn(FinishReason.END_OF_TURN))
    tell(metrics, ended_turn(FinishReason.CANCELLED, num_input=30, reused=19))
    found = await scrape(metrics)
    assert found['chatrt_responses_total{status="end_of_turn"}'] == 1
    assert found["chatrt_prompt_tokens_total"] == 50
    assert found["chatrt_prompt_cached_tokens_total"] == 19
    assert found["chatrt_generation_tokens_total"] == 10
    ttft = 'chatrt_time_to_first_token_seconds_sum{model="tiny",prefix="%s"}'
    assert found[ttft % "cold"] == pytest.approx(0.002)
    assert found[ttft % "warm"] == pytest.approx(0.002)
    tpot = 'chatrt_time_per_output_token_seconds_sum{model="tiny"}'
    assert found[tpot] == pytest.approx(0.004)


async def test_a_failed_turn_is_counted_but_not_timed() -> None:
    metrics = Metrics("tiny")
    tell(metrics, failed(OutOfPages(1, 0, 0, 4), admitted=False), first_sent_ns=None)
    found = await scrape(metrics)
    assert found['chatrt_responses_total{status="failed"}'] == 1
    assert found["chatrt_prompt_tokens_total"] == 0
    assert found['chatrt_request_duration_seconds_count{model="tiny"}'] == 0


async def test_the_stages_of_a_request_are_those_of_its_stamps() -> None:
    metrics = Metrics("tiny")
    tell(metrics, ended_turn(FinishReason.END_OF_TURN))
    found = await scrape(metrics)
    seconds = {
        name: found[f'chatrt_request_{name}_seconds_sum{{model="tiny"}}']
        for name in ("queue", "prefill", "decode", "duration")
    }
    expected = {"queue": 0.0001, "prefill": 0.0008, "decode": 0.008, "duration": 0.01}
    assert seconds == pytest.approx(expected)


async def test_a_turn_that_was_cancelled_in_the_queue_has_a_duration_and_no_stage() -> None:
    metrics = Metrics("tiny")
    stamps = {"received_ns": 1_000_000, "tokenized_ns": 1_100_000}
    turn = ended_turn(
        FinishReason.CANCELLED,
        stamps=stamps,
        generated=0,
        first_token_ns=0,
        last_token_ns=0,
        cancel_asked_ns=9_000_000,
    )
    tell(metrics, turn, first_sent_ns=None)
    found = await scrape(metrics)
    assert found['chatrt_request_duration_seconds_count{model="tiny"}'] == 1
    for name in ("request_queue", "request_prefill", "request_decode", "time_per_output_token"):
        assert found[f'chatrt_{name}_seconds_count{{model="tiny"}}'] == 0
    assert found['chatrt_cancel_seconds_sum{model="tiny"}'] == pytest.approx(0.001)


async def test_a_cancel_that_came_too_late_is_none() -> None:
    metrics = Metrics("tiny")
    tell(metrics, ended_turn(FinishReason.END_OF_TURN, cancel_asked_ns=9_000_000))
    assert (await scrape(metrics))['chatrt_cancel_seconds_count{model="tiny"}'] == 0


async def test_what_is_typed_ahead_distorts_neither_the_cached_share_nor_the_ends_of_turns() -> (
    None
):
    metrics = Metrics("tiny")
    kv = KVFigures(prefix="warm", reused_tokens=19, computed_tokens=7)
    turn = ended_turn(FinishReason.PREFILLED, kind=TurnKind.TYPED_AHEAD, generated=0, kv=kv)
    tell(metrics, turn, first_sent_ns=None)
    found = await scrape(metrics)
    assert found["chatrt_typed_ahead_tokens_total"] == 7
    for name in ("prompt_tokens", "prompt_cached_tokens", 'responses_total{status="prefilled"}'):
        assert found[f"chatrt_{name}" + ("" if "{" in name else "_total")] == 0


async def test_a_turn_that_lost_its_pages_is_out_of_memory_and_one_at_the_door_is_refused() -> None:
    metrics = Metrics("tiny")
    no_pages = OutOfPages(1, 0, 0, 4)
    tell(metrics, failed(no_pages, admitted=True), first_sent_ns=None)
    tell(metrics, failed(no_pages, admitted=False), first_sent_ns=None)
    tell(metrics, failed(Overloaded("256 turns wait"), admitted=False), first_sent_ns=None)
    found = await scrape(metrics, EngineFigures(POOL, num_out_of_memory=2))
    assert found['chatrt_out_of_memory_total{of="pages"}'] == 1
    assert found['chatrt_out_of_memory_total{of="device"}'] == 2
    assert found['chatrt_admission_refused_total{reason="kv_exhausted"}'] == 1
    assert found['chatrt_admission_refused_total{reason="rate_limit_exceeded"}'] == 1


async def test_pages_are_those_of_the_scrape_and_no_id_is_a_label() -> None:
    metrics = Metrics("tiny")
    tell(metrics, ended_turn(FinishReason.END_OF_TURN))
    found = await scrape(metrics)
    assert found['chatrt_kv_pages{state="free"}'] == 3
    assert not [name for name in found if "resp_secret" in name]


async def test_totals_that_are_counted_elsewhere_grow_by_what_came_since() -> None:
    metrics = Metrics("tiny")
    for evicted, num_steps in ((2, 10), (5, 30)):
        pool = PoolFigures(free=3, held=5, cached=4, shared=1, total=8, evicted=evicted)
        engine = EngineFigures(pool, num_waiting=4, num_steps=num_steps, step_ns=num_steps * 10**6)
        found = await scrape(metrics, engine, Sockets(3, 70, 40))
    assert found['chatrt_kv_evictions_total{reason="room"}'] == 5
    assert found["chatrt_steps_total"] == 30
    assert found["chatrt_step_seconds_total"] == pytest.approx(0.03)
    assert found["chatrt_queue_length"] == 4
    assert (found["chatrt_ws_connections"], found["chatrt_ws_outbox_bytes"]) == (3, 70)


async def test_drafts_are_counted_by_who_made_them_and_pages_by_whose_they_are() -> None:
    metrics = Metrics("tiny", {"target": 5760, "drafts": 192})
    figures = SpeculationFigures(
        drafter="head",
        steps=5,
        drafted=7,
        accepted=4,
        emitted=9,
        accepted_per_position=(3, 1),
        depths=(1, 1, 3),
        draft_ms=250.0,
    )
    tell(metrics, ended_turn(FinishReason.END_OF_TURN, speculation=figures))
    found = await scrape(metrics)
    for name, value in (
        ('chatrt_spec_drafted_tokens_total{drafter="head"}', 7),
        ('chatrt_spec_accepted_tokens_total{drafter="head"}', 4),
        ('chatrt_spec_accepted_per_position_total{position="1"}', 1),
        ('chatrt_spec_drafted_per_position_total{position="0"}', 4),
        ("chatrt_spec_draft_seconds_total", 0.25),
        ("chatrt_spec_passes_total", 5),
        ("chatrt_spec_emitted_tokens_total", 9),
        ('chatrt_kv_bytes{owner="target"}', 5760),
        ('chatrt_kv_bytes{owner="drafts"}', 192),
    ):
        assert found[name] == value


async def test_the_same_drafters_are_one_label_whoever_drafted_most() -> None:
    metrics = Metrics("tiny")
    for drafter in ("head+ngram", "ngram+head"):
        figures = SpeculationFigures(drafter=drafter, drafted=3, accepted=1)
        tell(metrics, ended_turn(FinishReason.END_OF_TURN, speculation=figures))
    found = await scrape(metrics)
    assert found['chatrt_spec_drafted_tokens_total{drafter="head+ngram"}'] == 6
    assert not [name for name in found if "ngram+head" in name]


async def test_a_gap_is_in_the_bucket_of_its_length() -> None:
    metrics = Metrics("tiny")
    for gap_ns in (499_999, 500_000, 500_001, 9_000_000, 10**10):
        metrics.on_gap(gap_ns)
    found = await scrape(metrics)
    bucket = 'chatrt_chunk_gap_seconds_bucket{le="%s",model="tiny"}'
    counts = [found[bucket % le] for le in ("0.0005", "0.001", "0.0075", "0.01", "5.0", "+Inf")]
    assert counts == [2, 3, 3, 4, 4, 5]
    assert found['chatrt_chunk_gap_seconds_count{model="tiny"}'] == 5
    assert found['chatrt_chunk_gap_seconds_sum{model="tiny"}'] == pytest.approx(10.0105)


async def test_latency_buckets_begin_at_half_a_millisecond() -> None:
    buckets = [name for name in await scrape(Metrics("tiny")) if 'le="0.0005"' in name]
    families = {name.split("_bucket")[0] for name in buckets}
    assert families == {
        "chatrt_time_to_first_token_seconds",
        "chatrt_time_per_output_token_seconds",
        "chatrt_chunk_gap_seconds",
        "chatrt_request_duration_seconds",
        "chatrt_request_queue_seconds",
        "chatrt_request_prefill_seconds",
        "chatrt_request_decode_seconds",
        "chatrt_cancel_seconds",
    }
