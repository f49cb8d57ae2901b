"""`GET /v1/chatrt/live`: a real tiny engine behind a real server, read while it works."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from chatrt.client.http import HttpRoutes
from chatrt.engine.snapshot import MOST_STEPS, StepLog, take_snapshot
from chatrt.errors import ServerUnavailable
from chatrt.service.deferred import DeferredService
from chatrt.service.live import MOST_RECENT, LiveBoard
from chatrt.testing.engine import tiny_engine, turn_request
from chatrt.testing.serving import calling
from chatrt.testing.serving import serving as serving_port
from chatrt.turn import TurnKind
from chatrt.wire.live import Acceptance, LiveFigures, RecentTurn, Sockets, Steps
from chatrt.wire.log import DELTA
from chatrt.wire.messages import ConversationCreate
from tests.chatrt.service_support import KEY, MODEL, Chat, context, ended, has_text, serving

if TYPE_CHECKING:
    from chatrt.server.server import Server
    from chatrt.text.tokenizer import Tokenizer

ENDLESS: dict[str, Any] = {"max_output_tokens": 400, "chatrt": {"ignore_eos": True}}
SECRET = "marmalade skies"


async def live(chat: Chat, key: str = KEY) -> LiveFigures:
    return await chat.service.live(key, Sockets(1, 2, 2))


def routes(server: Server, key: str) -> HttpRoutes:
    return HttpRoutes(f"ws://127.0.0.1:{server.port}", api_key=key)


def bearer(key: str) -> dict[str, Any]:
    return {"additional_headers": {"Authorization": f"Bearer {key}"}}


async def test_a_running_turn_is_told_with_its_tokens_its_phase_and_its_gaps(
    tokenizer: Tokenizer,
) -> None:
    async with serving(tokenizer) as chat:
        log = await chat.create("tell me a story", **ENDLESS)
        await has_text(log)
        figures = await live(chat)
        await chat.service.cancel(log.response_id, KEY)
        await ended(log)
    (turn,) = figures.turns
    assert (turn.response_id, turn.phase, turn.prefix) == (log.response_id, "decode", "cold")
    assert turn.prompt_tokens == turn.computed_tokens > 0
    assert turn.generated_tokens > 0
    assert turn.cached_tokens == 0
    assert turn.tokens_per_pass == 1.0
    server = figures.server
    assert (server.model, server.num_running, server.num_waiting) == (MODEL, 1, 0)
    assert server.phases == {"decode": 1}
    assert server.sessions["active"] == 1
    assert server.sockets == Sockets(1, 2, 2)
    assert server.steps.last_ms is not None
    assert server.pages["free"] + server.pages["held"] == server.pages["total"]
    assert figures.recent == ()


async def test_a_turn_that_ended_is_told_with_what_it_found_and_what_it_took(
    tokenizer: Tokenizer,
) -> None:
    async with serving(tokenizer) as chat:
        first = await chat.ask("hello", **ENDLESS | {"max_output_tokens": 6})
        await chat.ask("more", previous_response_id=first["id"])
        figures = await live(chat)
    assert figures.turns == ()
    cold, warm = figures.recent
    assert (cold.response_id, cold.status, cold.prefix) == (
        first["id"],
        "max_output_tokens",
        "cold",
    )
    assert cold.generated_tokens == 6
    assert cold.tpot_ms is not None
    assert warm.prefix == "warm"
    assert warm.prompt_tokens > warm.cached_tokens > 0
    assert warm.age_s <= cold.age_s
    acceptance = figures.server.acceptance
    assert acceptance.num_passes == acceptance.num_emitted > 6
    assert acceptance.drafted == 0


async def test_a_turn_whose_text_nobody_took_has_no_ttft_until_somebody_does(
    tokenizer: Tokenizer,
) -> None:
    async with serving(tokenizer) as chat:
        log = await chat.create("hello")
        await ended(log)
        (before,) = (await live(chat)).recent
        log.mark_sent(5_000_001)  # the context says that the turn was received at 1 ns
        (after,) = (await live(chat)).recent
    assert before.ttft_ms is None
    assert after.ttft_ms == 5.0


async def test_what_was_typed_ahead_is_not_among_the_turns_that_ended(
    tokenizer: Tokenizer,
) -> None:
    async with serving(tokenizer) as chat:
        await ended(await chat.create("half a", generate=False, chatrt={"partial": True}))
        figures = await live(chat)
    assert figures.recent == ()
    assert figures.turns == ()


async def test_what_was_deleted_is_told_no_more(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as chat:
        made = await chat.service.conversation_create(ConversationCreate(), context())
        conversation = made["id"]
        ids = [(await chat.ask("hello", max_output_tokens=1))["id"] for _ in range(2)]
        await chat.ask("hello", conversation=conversation, max_output_tokens=1)
        assert len((await live(chat)).recent) == 3
        await chat.service.delete_response(ids[0], KEY)
        await chat.service.conversation_delete(conversation, KEY)
        assert [turn.response_id for turn in (await live(chat)).recent] == ids[1:]


async def test_no_more_than_the_newest_turns_of_a_key_are_remembered(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as chat:
        ids = [
            (await chat.ask(f"{number}", max_output_tokens=1))["id"]
            for number in range(MOST_RECENT + 2)
        ]
        figures = await live(chat)
    assert [turn.response_id for turn in figures.recent] == ids[2:]


async def test_another_keys_turns_are_counted_but_not_told(tokenizer: Tokenizer) -> None:
    async with (
        serving(tokenizer) as chat,
        serving_port(chat.service, api_keys=("one", "two")) as server,
        calling(server, **bearer("one")) as caller,
    ):
        await caller.create("short", max_output_tokens=2)
        await caller.until()
        await caller.create(SECRET, **ENDLESS)
        await caller.until([DELTA])
        own = await routes(server, "one").live()
        other = await routes(server, "two").live()
        await caller.send({"type": "response.cancel"})
        await caller.until()
    assert len(own.turns) == len(own.recent) == 1
    assert own.recent[0].ttft_ms is not None
    assert own.turns[0].ttft_ms is not None
    assert (other.turns, other.recent) == ((), ())
    assert other.server.num_running == other.server.phases["decode"] == 1
    assert other.server.sockets.num_connections == 1
    assert own.turns[0].response_id not in json.dumps(msgspec.to_builtins(other))


async def test_no_text_of_anybody_is_in_it(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as chat:
        answer = await chat.ask(SECRET, instructions="umbrella", max_output_tokens=8)
        log = await chat.create(SECRET, **ENDLESS)
        await has_text(log)
        document = msgspec.json.encode(await live(chat)).decode()
        await chat.service.cancel(log.response_id, KEY)
        await ended(log)
    (part,) = answer["output"][0]["content"]
    for text in ("marmalade", "umbrella", part["text"]):
        assert text not in document


async def test_a_server_that_still_loads_says_so(tokenizer: Tokenizer) -> None:
    async with serving_port(DeferredService()) as server:
        with pytest.raises(ServerUnavailable, match="still loading"):
            await routes(server, "").live()


def test_a_document_of_another_version_is_read_as_far_as_it_is_known() -> None:
    turn = {"response_id": "r", "colour": "blue"}
    figures = msgspec.convert({"recent": [turn], "weather": 1}, LiveFigures)
    assert figures == LiveFigures(recent=(RecentTurn(response_id="r"),))


def test_a_share_of_nothing_is_not_known() -> None:
    assert RecentTurn(response_id="r").cached_share is None
    assert RecentTurn(response_id="r", prompt_tokens=8, cached_tokens=6).cached_share == 0.75
    assert Acceptance().tokens_per_pass is None
    assert Acceptance(num_passes=4, num_emitted=10).tokens_per_pass == 2.5


async def test_step_figures_are_those_of_the_last_seconds(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as chat:
        now_ns = [0]
        board = LiveBoard(MODEL, chat.host, clock=lambda: now_ns[0])
        steps = chat.host.steps = StepLog()
        for end_ms in (100, 9_000, 9_500, 9_900):
            steps.add(end_ms * 1_000_000 - 4_000_000, end_ms * 1_000_000)
        now_ns[0] = 10_000_000_000
        figures = (await board.read(KEY, (), Sockets())).server.steps
    assert figures == Steps(
        window_s=2.0,
        per_s=1.5,
        median_ms=4.0,
        p95_ms=4.0,
        last_ms=4.0,
        recent_ms=(4.0, 4.0, 4.0, 4.0),
    )


def test_steps_are_counted_on_but_only_the_last_are_held() -> None:
    steps = StepLog()
    for number in range(MOST_STEPS + 5):
        steps.add(number, number + 2)
    last = steps.last()
    assert (steps.num_steps, len(last)) == (MOST_STEPS + 5, MOST_STEPS)
    assert (last[0].end_ns, last[0].time_ns) == (7, 2)


def test_phases_follow_what_the_engine_does_with_a_turn(tokenizer: Tokenizer) -> None:
    engine = tiny_engine(tokenizer, max_num_batched_tokens=64)
    engine.submit(turn_request("a", tokenizer.encode("x" * 100)))
    assert (take_snapshot(engine).num_waiting, take_snapshot(engine).turns) == (1, ())
    engine.step()
    (turn,) = take_snapshot(engine).turns
    assert (turn.phase, turn.computed_tokens) == ("prefill", 64)
    engine.step()
    assert take_snapshot(engine).turns[0].phase == "decode"
    engine.pause("a")
    assert take_snapshot(engine).turns[0].phase == "paused"


def test_what_is_prepared_at_idle_time_waits_for_nobody(tokenizer: Tokenizer) -> None:
    engine = tiny_engine(tokenizer)
    engine.submit(turn_request("a", tokenizer.encode("hello"), kind=TurnKind.PREPARED))
    assert engine.num_waiting == 1
    assert take_snapshot(engine).num_waiting == 0
