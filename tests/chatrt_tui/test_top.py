"""`chatrt top` against a server: what is shown, what happens while it is away, keys."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest
from textual.widgets import Static

from chatrt.client import HttpRoutes
from chatrt.server.server import Server
from chatrt.server.settings import ServerSettings
from chatrt.service.deferred import DeferredService
from chatrt.testing.service import ScriptedService
from chatrt.testing.serving import calling, serving
from chatrt.testing.tokenizer import tiny_tokenizer
from chatrt.wire.live import (
    Acceptance,
    LiveFigures,
    LiveServer,
    LiveTurn,
    RecentTurn,
    Sockets,
    Steps,
)
from chatrt.wire.log import DELTA
from chatrt_tui.status import Banner
from chatrt_tui.top import TopApp
from chatrt_tui.top_widgets import FiguresTable
from tests.chatrt import service_support
from tests.chatrt_tui.driving import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from textual.pilot import Pilot

INTERVAL_S = 0.1
FIGURES = LiveFigures(
    server=LiveServer(
        model="some-model",
        version="9.8.7",
        uptime_s=7384.0,
        num_running=3,
        num_waiting=2,
        phases={"decode": 2, "prefill": 1},
        steps=Steps(5.0, 212.4, 4.1, 7.25, 3.9, (3.0, 4.0, 5.0)),
        pages={"free": 22, "held": 42, "cached": 30, "shared": 5, "total": 64},
        archived={"host": 0, "disk": 120},
        sessions={"active": 3, "parked": 4},
        sockets=Sockets(3, 1500, 1400),
        acceptance=Acceptance(60.0, 200, 122, 100, 241),
    ),
    turns=(
        LiveTurn(
            response_id="resp_aaaaaaaa1111",
            phase="decode",
            age_ms=4200.0,
            prompt_tokens=812,
            cached_tokens=789,
            generated_tokens=97,
            ttft_ms=41.2,
            mean_gap_ms=4.36,
            tokens_per_pass=2.41,
            pending_bytes=1400,
        ),
        LiveTurn(response_id="resp_bbbbbbbb2222", phase="typed ahead", age_ms=100.0),
        LiveTurn(
            response_id="resp_cccccccc3333", phase="prefill", age_ms=900.0, prompt_tokens=4100
        ),
    ),
    recent=tuple(
        RecentTurn(
            response_id=f"resp_dddddddd{number}",
            status="end_of_turn",
            prefix="restored",
            age_s=30.0 - number,
            prompt_tokens=100,
            cached_tokens=96,
            generated_tokens=50,
            ttft_ms=10.0 + number,
            tpot_ms=3.25,
            gap_p50_ms=4.0,
            gap_p95_ms=9.0,
            gap_max_ms=17.3,
        )
        for number in range(20)
    ),
)


def scripted(figures: LiveFigures = FIGURES) -> ScriptedService:
    service = ScriptedService()
    service.figures = figures
    return service


@asynccontextmanager
async def top_at(
    port: int, *, size: tuple[int, int] = (80, 24), api_key: str | None = None
) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    app = TopApp(
        HttpRoutes(f"ws://127.0.0.1:{port}", api_key=api_key, timeout_s=2.0), interval_s=INTERVAL_S
    )
    async with app.run_test(size=size) as pilot:
        yield app, pilot


def lines(app: TopApp) -> list[str]:
    """What is painted."""
    return [strip.text.rstrip() for strip in app.screen._compositor.render_strips()]


def painted(app: TopApp) -> str:
    return "\n".join(lines(app))


def rows(app: TopApp, name: str) -> list[str]:
    """The first cells of a table's rows."""
    table = app.query_one(f"#{name}", FiguresTable)
    return [str(table.get_row_at(index)[0]) for index in range(table.row_count)]


def state(app: TopApp) -> str:
    return str(app.query_one(".state", Static).render())


WORDS = (
    "some-model · up 2 h 3 min · 3 connections · v9.8.7",
    "TTFT p50 19 p95 28 ms",
    "gap p50 4.0 p95 9.0 ms",
    "step p50 4.1 p95 7.2 ms",
    "cached 30 ▓ other 12 ░ free 22 of 64 pages · 5 shared · disk 120",
    "running 3: 2 decode, 1 prefill · queue 2 · 4 sessions parked · 212 steps/s",
    "61 % of 200 drafts accepted, 2.41 tokens/pass in the last 60 s · outboxes 2kB",
    "Your turns that run, by age",
    "Your turns that ended, the newest first",
    "aaaaaaaa",
    "dddddddd",
    "q Quit",
)


async def test_all_that_matters_is_on_a_screen_of_80_by_24_and_nothing_wraps() -> None:
    async with serving(scripted()) as server, top_at(server.port) as (app, _):
        await until(lambda: all(words in painted(app) for words in WORDS))
        seen = lines(app)
    assert len(seen) == 24
    (first,) = [line for line in seen if "aaaaaaaa" in line]
    assert first.split() == [
        *("aaaaaaaa", "decode", "4.2s", "812", "789", "97", "41", "4.4", "1kB")
    ]
    assert sum("dddddddd" in line for line in seen) >= 5
    assert seen[-1].split()[:2] == ["q", "Quit"]


async def test_the_bar_of_pages_is_as_wide_as_the_screen_and_tells_its_parts_by_shape() -> None:
    async with serving(scripted()) as server, top_at(server.port) as (app, _):
        await until(lambda: "free 22" in painted(app))
        (bar,) = [line.strip() for line in lines(app) if line.count("░") > 1]
    assert (bar.count("█"), bar.count("▓"), bar.count("░")) == (36, 15, 27)


async def test_a_wide_screen_has_further_columns_and_takes_them_back_when_it_shrinks() -> None:
    async with serving(scripted()) as server, top_at(server.port, size=(200, 50)) as (app, pilot):
        await until(lambda: "computed" in painted(app))
        await until(lambda: "gap p95" in painted(app))
        await pilot.resize_terminal(80, 24)
        await until(lambda: "computed" not in painted(app))
        assert rows(app, "live") == ["aaaaaaaa", "cccccccc", "bbbbbbbb"]


async def test_turns_that_run_are_ordered_by_age_first_and_otherwise_by_a_key() -> None:
    async with serving(scripted()) as server, top_at(server.port) as (app, pilot):
        await until(lambda: rows(app, "live") == ["aaaaaaaa", "cccccccc", "bbbbbbbb"])
        await pilot.press("s", "s")
        await until(lambda: rows(app, "live") == ["cccccccc", "aaaaaaaa", "bbbbbbbb"])
        await until(lambda: "Your turns that run, by prompt" in painted(app))


async def test_a_turn_that_ends_leaves_the_one_table_for_the_top_of_the_other() -> None:
    service = scripted()
    async with serving(service) as server, top_at(server.port) as (app, _):
        await until(lambda: len(rows(app, "live")) == 3)
        ended = RecentTurn(response_id="resp_aaaaaaaa1111", status="cancelled")
        service.figures = msgspec.structs.replace(
            FIGURES, turns=FIGURES.turns[1:], recent=(*FIGURES.recent[1:], ended)
        )
        await until(lambda: rows(app, "live") == ["cccccccc", "bbbbbbbb"])
        assert rows(app, "recent")[0] == "aaaaaaaa"
        assert len(rows(app, "recent")) == 20


async def test_pause_leaves_the_screen_as_it_is_until_the_same_key_goes_on() -> None:
    service = scripted()
    async with serving(service) as server, top_at(server.port) as (app, pilot):
        await until(lambda: "queue 2" in painted(app))
        await pilot.press("p")
        assert state(app) == "paused"
        busier = msgspec.structs.replace(FIGURES.server, num_waiting=9)
        service.figures = LiveFigures(server=busier)
        await asyncio.sleep(5 * INTERVAL_S)  # it would have been asked by now
        assert "queue 2" in painted(app)
        await pilot.press("p")
        await until(lambda: "queue 9" in painted(app))
        assert state(app) == "every 0.1 s"


async def test_a_lost_server_is_told_in_a_banner_and_found_again_by_itself() -> None:
    service = scripted()
    async with serving(service) as server, top_at(server.port) as (app, _):
        await until(lambda: "queue 2" in painted(app))
        port = server.port
        await server.stop()
        await until(lambda: app.query_one(Banner).has_class("-shown"))
        await until(lambda: "no server answers at 127.0.0.1" in painted(app))
        assert "queue 2" in painted(app)  # what was known last
        assert state(app) == "asking again"
        again = Server(service, replace(ServerSettings(), port=port))
        await again.start()
        await until(lambda: not app.query_one(Banner).has_class("-shown"))
        await again.stop()


async def test_a_server_that_still_loads_is_waited_for(tmp_path: Path) -> None:
    service = DeferredService()
    async with (
        service_support.serving(tiny_tokenizer(tmp_path)) as chat,
        serving(service) as server,
        top_at(server.port) as (app, _),
    ):
        await until(lambda: "the model is still loading" in painted(app))
        service.begin(chat.service)
        await until(lambda: "tiny · up" in painted(app))
        assert not app.query_one(Banner).has_class("-shown")


async def test_a_server_that_does_not_answer_holds_up_no_key() -> None:
    answers = asyncio.Event()

    class Slow(ScriptedService):
        async def live(self, key_id: str, sockets: Sockets) -> LiveFigures:
            await answers.wait()
            return await super().live(key_id, sockets)

    async with serving(Slow()) as server, top_at(server.port) as (app, pilot):
        await pilot.press("p")
        assert state(app) == "paused"
        await pilot.press("p")
        assert state(app) == "every 0.1 s"
        answers.set()
        await until(lambda: "scripted" in painted(app))


async def test_what_a_server_says_cannot_reach_the_terminal_as_a_sequence() -> None:
    turn = LiveTurn(response_id="resp_\x1b[2Jevil", phase="dec\x1b]0;x\x07ode")
    figures = LiveFigures(server=LiveServer(model="m\x1b[31mred"), turns=(turn,))
    async with serving(scripted(figures)) as server, top_at(server.port) as (app, _):
        await until(lambda: "evil" in painted(app))
        await until(lambda: "mred" in painted(app) and "decode" in painted(app))
        assert "\x1b" not in painted(app)


@pytest.mark.parametrize("theme", ["textual-light", "textual-dark", "ansi-light"])
async def test_every_theme_shows_the_same_words(theme: str) -> None:
    async with serving(scripted()) as server, top_at(server.port) as (app, pilot):
        app.theme = theme
        await until(lambda: "queue 2" in painted(app))
        await pilot.pause()
        await until(lambda: "cached 30" in painted(app))


async def test_q_quits() -> None:
    async with serving(scripted()) as server, top_at(server.port) as (app, pilot):
        await pilot.press("q")
        await until(lambda: not app.is_running)


async def test_a_real_turn_is_seen_while_it_runs_and_when_it_has_ended(tmp_path: Path) -> None:
    async with (
        service_support.serving(tiny_tokenizer(tmp_path)) as chat,
        serving(chat.service, api_keys=("one", "two")) as server,
        calling(server, additional_headers={"Authorization": "Bearer one"}) as caller,
        top_at(server.port, api_key="one") as (app, _),
    ):
        await caller.create("hello", max_output_tokens=450, chatrt={"ignore_eos": True})
        events = await caller.until([DELTA])
        name = str(events[0]["response"]["id"]).removeprefix("resp_")[:8]
        await until(lambda: rows(app, "live") == [name])
        await until(lambda: "1 decode" in painted(app))
        await caller.send({"type": "response.cancel"})
        await caller.until()
        await until(lambda: rows(app, "live") == [] and rows(app, "recent") == [name])
        await until(lambda: "cancelled" in painted(app))
