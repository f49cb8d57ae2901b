"""`GET /metrics` of a real server over a real tiny engine, scraped while it works."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from chatrt.errors import ServerUnavailable
from chatrt.testing.serving import calling, eventually
from chatrt.testing.serving import serving as serving_port
from chatrt.wire.live import Sockets
from chatrt.wire.log import DELTA
from tests.chatrt.metrics_support import samples_of
from tests.chatrt.service_support import KEY, Chat, ended, has_text, serving
from tests.chatrt.test_metrics_documents import expressions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from chatrt.server.server import Server
    from chatrt.text.tokenizer import Tokenizer
    from chatrt.wire.log import ResponseLog

ENDLESS: dict[str, Any] = {"max_output_tokens": 400, "chatrt": {"ignore_eos": True}}
# MEASURING.md's list, each with the suffix that its type adds.
NAMES = [
    "chatrt_time_to_first_token_seconds_count",
    "chatrt_chunk_gap_seconds_count",
    "chatrt_time_per_output_token_seconds_count",
    "chatrt_request_duration_seconds_count",
    "chatrt_request_queue_seconds_count",
    "chatrt_request_prefill_seconds_count",
    "chatrt_request_decode_seconds_count",
    "chatrt_prompt_tokens_total",
    "chatrt_prompt_cached_tokens_total",
    "chatrt_generation_tokens_total",
    "chatrt_kv_pages",
    "chatrt_kv_evictions_total",
    "chatrt_kv_restored_tokens_total",
    "chatrt_sessions",
    "chatrt_ws_connections",
    "chatrt_ws_outbox_bytes",
    "chatrt_responses_total",
    "chatrt_cancel_seconds_count",
    "chatrt_out_of_memory_total",
    "chatrt_admission_refused_total",
]
# Those of drafts appear with the first draft.
DRAFTS = [
    "chatrt_spec_drafted_tokens_total",
    "chatrt_spec_accepted_tokens_total",
    "chatrt_spec_accepted_per_position_total",
]


@asynccontextmanager
async def server_of(chat: Chat) -> AsyncIterator[Server]:
    async with serving_port(chat.service, api_keys=(KEY,)) as server:
        yield server


def bearer() -> dict[str, Any]:
    return {"additional_headers": {"Authorization": f"Bearer {KEY}"}}


async def get_metrics(server: Server) -> tuple[str, str]:
    """The content type and the text of the route."""

    def blocking() -> tuple[str, str]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {KEY}"})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        assert response.status == 200, text
        return response.headers["Content-Type"], text

    return await asyncio.to_thread(blocking)


async def scraped(chat: Chat) -> dict[str, float]:
    return samples_of((await chat.service.metrics(Sockets())).decode())


def take_all(log: ResponseLog, *, sent_from_ns: int, step_ns: int) -> list[dict[str, Any]]:
    """Read a log to its end as a transport does that takes a delta every `step_ns`."""
    subscription, taken, now_ns = log.subscribe(lambda: None), [], sent_from_ns
    while (event := subscription.take()) is not None:
        taken.append(event)
        if event["type"] == DELTA:
            subscription.mark_sent(now_ns)
            now_ns += step_ns
    subscription.close()
    return taken


async def test_all_names_are_there_before_the_first_turn_and_true_after_it(
    tokenizer: Tokenizer,
) -> None:
    async with serving(tokenizer) as chat, server_of(chat) as server:
        kind, text = await get_metrics(server)
        before = samples_of(text)
        assert kind == "text/plain; version=0.0.4; charset=utf-8"
        names = {name.split("{")[0] for name in before}
        assert [name for name in NAMES if name not in names] == []
        assert [name for name in DRAFTS if f"# TYPE {name} counter" not in text] == []
        async with calling(server, **bearer()) as caller:
            await caller.create("hello", **ENDLESS | {"max_output_tokens": 9})
            frames = await caller.until()
            _, text = await get_metrics(server)
        after = samples_of(text)
    deltas = [frame for frame in frames if frame["type"] == DELTA]
    usage = frames[-1]["response"]["usage"]
    expected = {
        'chatrt_responses_total{status="max_output_tokens"}': 1,
        'chatrt_time_to_first_token_seconds_count{model="tiny",prefix="cold"}': 1,
        'chatrt_chunk_gap_seconds_count{model="tiny"}': len(deltas) - 1,
        'chatrt_request_duration_seconds_count{model="tiny"}': 1,
        'chatrt_request_queue_seconds_count{model="tiny"}': 1,
        'chatrt_request_prefill_seconds_count{model="tiny"}': 1,
        'chatrt_request_decode_seconds_count{model="tiny"}': 1,
        "chatrt_prompt_tokens_total": usage["input_tokens"],
        "chatrt_generation_tokens_total": 9,
        "chatrt_ws_connections": 1,
        "chatrt_spec_passes_total": 9,
    }
    assert {name: after[name] for name in expected} == expected
    assert after["chatrt_steps_total"] >= 9
    assert after["chatrt_step_seconds_total"] > 0


async def test_the_dashboard_asks_for_nothing_that_a_server_does_not_tell(
    tokenizer: Tokenizer,
) -> None:
    async with serving(tokenizer) as chat, server_of(chat) as server:
        _, text = await get_metrics(server)
    families = set(re.findall(r"# TYPE (\w+) ", text))
    asked = set(re.findall(r"\bchatrt_\w+", " ".join(expressions())))
    unknown = {
        name
        for name in asked
        if name not in families and re.sub(r"_(bucket|count|sum)$", "", name) not in families
    }
    assert unknown == set()


async def test_a_gap_is_between_two_deltas_that_one_transport_took(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as chat:
        log = await chat.create("hello", **ENDLESS | {"max_output_tokens": 9})
        first, second = log.subscribe(lambda: None), log.subscribe(lambda: None)
        first.mark_sent(1_000_000)
        second.mark_sent(5_000_000)
        first.mark_sent(7_000_000)
        await ended(log)
        found = await scraped(chat)
    assert found['chatrt_chunk_gap_seconds_count{model="tiny"}'] == 1
    assert found['chatrt_chunk_gap_seconds_sum{model="tiny"}'] == pytest.approx(0.006)


async def test_an_answer_that_ends_before_its_text_is_sent_is_timed_all_the_same(
    tokenizer: Tokenizer,
) -> None:
    ttft = 'chatrt_time_to_first_token_seconds_%s{model="tiny",prefix="cold"}'
    async with serving(tokenizer) as chat:
        log = await chat.create("hello", **ENDLESS | {"max_output_tokens": 9})
        await ended(log)
        assert (await scraped(chat))[ttft % "count"] == 0
        take_all(log, sent_from_ns=2_000_001, step_ns=10)  # it was received at 1 ns
        take_all(log, sent_from_ns=9_000_000, step_ns=10)
        found = await scraped(chat)
    assert found[ttft % "count"] == 1
    assert found[ttft % "sum"] == pytest.approx(0.002)


@pytest.mark.parametrize("how", ["asked", "abandoned"])
async def test_a_cancel_is_timed_from_the_first_time_that_it_is_asked_for(
    tokenizer: Tokenizer, how: str
) -> None:
    async with serving(tokenizer) as chat:
        log = await chat.create("tell me a story", **ENDLESS)
        await has_text(log)
        if how == "asked":
            await chat.service.cancel(log.response_id, KEY)
        else:
            chat.service.abandon(log.response_id)
        chat.service.abandon(log.response_id)
        await ended(log)
        found = await scraped(chat)
    assert found['chatrt_cancel_seconds_count{model="tiny"}'] == 1
    assert found['chatrt_responses_total{status="cancelled"}'] == 1


async def test_scrapes_at_once_share_one_and_each_later_one_is_new(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as chat:
        one, two = await asyncio.gather(
            chat.service.metrics(Sockets(1)), chat.service.metrics(Sockets(2))
        )
        assert one is two
        assert samples_of(one.decode())["chatrt_ws_connections"] == 1
        later = await chat.service.metrics(Sockets(2))
        assert samples_of(later.decode())["chatrt_ws_connections"] == 2


async def test_a_scraper_that_gives_up_takes_the_answer_from_nobody_else(
    tokenizer: Tokenizer,
) -> None:
    async with serving(tokenizer) as chat:
        impatient = asyncio.create_task(chat.service.metrics(Sockets()))
        patient = asyncio.create_task(chat.service.metrics(Sockets()))
        await asyncio.sleep(0)
        impatient.cancel()
        assert samples_of((await patient).decode())["chatrt_ws_connections"] == 0
        assert impatient.cancelled()


async def test_connections_and_outboxes_are_those_of_the_moment(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as chat, server_of(chat) as server:
        async with calling(server, **bearer()) as caller:
            await caller.create("hello", **ENDLESS | {"max_output_tokens": 9})
            await caller.until()
            _, text = await get_metrics(server)
            assert samples_of(text)["chatrt_ws_outbox_bytes"] == 0
        await eventually(lambda: server.num_connections == 0)
        _, text = await get_metrics(server)
    assert samples_of(text)["chatrt_ws_connections"] == 0


async def test_a_step_that_runs_out_of_memory_is_counted_and_the_server_goes_on(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tokenizer) as chat:

        def no_memory(*_: object, **__: object) -> None:
            raise MemoryError("9 GB asked for")

        monkeypatch.setattr(type(chat.engine), "_forward", no_memory)
        failed = await chat.ask("hello")
        monkeypatch.undo()
        answered = await chat.ask("hello", **ENDLESS | {"max_output_tokens": 2})
        found = await scraped(chat)
    assert (failed["status"], answered["status"]) == ("failed", "incomplete")
    assert found['chatrt_out_of_memory_total{of="device"}'] == 1
    assert found['chatrt_responses_total{status="failed"}'] == 1


async def test_a_scrape_of_a_server_whose_engine_has_stopped_is_refused(
    tokenizer: Tokenizer,
) -> None:
    async with serving(tokenizer) as chat:
        await chat.host.stop()
        with pytest.raises(ServerUnavailable, match="the engine has stopped"):
            await chat.service.metrics(Sockets())


async def test_no_id_key_or_text_is_on_the_page(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as chat:
        response = await chat.ask("marmalade skies")
        text = (await chat.service.metrics(Sockets())).decode()
    for secret in (response["id"], "resp_", "marmalade", json.dumps(KEY)):
        assert secret not in text
