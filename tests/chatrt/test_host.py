"""The engine's thread: events in order, faults that stay where they are, a clean end."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from chatrt.errors import NotFound, ServerUnavailable
from chatrt.host import EngineHost
from chatrt.params import SamplingParams
from chatrt.testing.engine import GREEDY, Outcome, run_outcome, tiny_engine, turn_request
from chatrt.turn import FinishedEvent, FinishReason, TokensEvent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from chatrt.engine import Engine
    from chatrt.text.tokenizer import Tokenizer
    from chatrt.turn import EngineEvent, TurnRequest

ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> Engine:
    return tiny_engine(tokenizer)


@pytest.fixture
async def host(engine: Engine) -> AsyncIterator[EngineHost]:
    host = EngineHost(engine)
    host.start()
    yield host
    await host.stop()


class Taken:
    """A sink that checks the order and the thread of what it takes."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self.ended = asyncio.Event()
        self.has_tokens = asyncio.Event()
        self._thread = threading.current_thread()

    def __call__(self, event: EngineEvent) -> None:
        assert threading.current_thread() is self._thread
        self.outcome.add(event)
        if isinstance(event, TokensEvent):
            self.has_tokens.set()
        elif isinstance(event, FinishedEvent):
            self.ended.set()


def ask(tokenizer: Tokenizer, name: str, sampling: SamplingParams = GREEDY) -> TurnRequest:
    return turn_request(name, tokenizer.encode(f"hello {name}"), sampling=sampling)


async def test_events_arrive_on_the_loop_in_order_and_say_what_the_engine_says(
    host: EngineHost, tokenizer: Tokenizer
) -> None:
    taken = {name: Taken() for name in "abc"}
    for name, sink in taken.items():
        host.submit(ask(tokenizer, name), sink)
    for name, sink in taken.items():
        await sink.ended.wait()
        alone = run_outcome(tiny_engine(tokenizer), ask(tokenizer, name))
        assert sink.outcome.text == alone.text


async def test_a_fault_inside_a_step_ends_the_running_turns_and_the_host_goes_on(
    host: EngineHost,
    engine: Engine,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    running = Taken()
    host.submit(ask(tokenizer, "a", ENDLESS), running)
    await running.has_tokens.wait()

    def pull_the_cable() -> object:
        raise RuntimeError("a cable was pulled")

    def break_once(engine: Engine) -> None:
        plan = engine._scheduler.plan

        def plan_once(now_ns: int) -> object:
            engine._scheduler.plan = plan  # type: ignore[method-assign]
            return pull_the_cable()

        monkeypatch.setattr(engine._scheduler, "plan", plan_once)

    host.post(break_once)
    await running.ended.wait()
    end = running.outcome.end
    assert end.reason is FinishReason.FAILED
    assert end.error is not None
    assert "a cable was pulled" in end.error.message
    after = Taken()
    host.submit(ask(tokenizer, "b"), after)
    await after.ended.wait()
    assert after.outcome.end.reason is FinishReason.MAX_OUTPUT_TOKENS
    assert "step failed" in caplog.text


async def test_a_fault_while_a_turn_starts_ends_it_and_not_those_that_wait_behind_it(
    host: EngineHost, engine: Engine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = engine._residency.place

    def fail_for_a(request: TurnRequest) -> object:
        if request.response_id == "a":
            raise RuntimeError("a tree fell over")
        return place(request)

    monkeypatch.setattr(engine._residency, "place", fail_for_a)
    first, second = Taken(), Taken()
    host.submit(ask(tokenizer, "a"), first)
    host.submit(ask(tokenizer, "b"), second)
    await first.ended.wait()
    await second.ended.wait()
    assert first.outcome.end.reason is FinishReason.FAILED
    assert second.outcome.end.reason is FinishReason.MAX_OUTPUT_TOKENS


async def test_a_turn_that_cannot_be_queued_still_gets_its_last_event(
    host: EngineHost,
    engine: Engine,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(request: TurnRequest) -> None:
        raise RuntimeError("the queue is on fire")

    monkeypatch.setattr(engine, "submit", refuse)
    taken = Taken()
    host.submit(ask(tokenizer, "a"), taken)
    await taken.ended.wait()
    assert taken.outcome.end.reason is FinishReason.FAILED


async def test_a_sink_that_fails_does_not_take_another_turns_events(
    host: EngineHost, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    def faulty(event: EngineEvent) -> None:
        raise RuntimeError("a full disk")

    taken = Taken()
    host.submit(ask(tokenizer, "a"), faulty)
    host.submit(ask(tokenizer, "b"), taken)
    await taken.ended.wait()
    assert taken.outcome.end.num_generated == 12
    assert "could not be taken" in caplog.text


async def test_a_call_returns_what_the_function_returns_and_raises_what_it_raises(
    host: EngineHost,
) -> None:
    thread = await host.call(lambda _: threading.current_thread())
    assert thread is not threading.current_thread()

    def fail(_: Engine) -> None:
        raise NotFound("there is no such thing")

    with pytest.raises(NotFound, match="no such thing"):
        await host.call(fail)
    assert await host.call(lambda engine: engine.num_running) == 0


async def test_a_call_that_nobody_waits_for_any_more_harms_nothing(host: EngineHost) -> None:
    gate = threading.Event()
    waiting = asyncio.ensure_future(host.call(lambda _: gate.wait()))
    await asyncio.sleep(0)
    waiting.cancel()
    gate.set()
    assert await host.call(lambda _: 5) == 5


async def test_a_cancel_ends_a_running_turn_and_a_posted_fault_is_only_logged(
    host: EngineHost, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    taken = Taken()
    host.submit(ask(tokenizer, "a", ENDLESS), taken)
    await taken.has_tokens.wait()
    host.post(lambda _: 1 // 0)
    assert await host.call(lambda engine: engine.cancel("a"))
    await taken.ended.wait()
    assert taken.outcome.end.reason is FinishReason.CANCELLED
    assert "a call on the engine failed" in caplog.text


async def test_stop_cancels_what_runs_ends_the_thread_and_refuses_what_comes_later(
    tokenizer: Tokenizer,
) -> None:
    engine = tiny_engine(tokenizer, max_context=4096, num_pages=300)
    host = EngineHost(engine)
    host.start()
    running, late = Taken(), Taken()
    host.submit(ask(tokenizer, "a", ENDLESS), running)
    await running.has_tokens.wait()
    await host.stop()
    assert running.outcome.end.reason is FinishReason.CANCELLED
    assert not any(thread.name == "chatrt-engine" for thread in threading.enumerate())
    host.submit(ask(tokenizer, "b"), late)
    await late.ended.wait()
    assert isinstance(late.outcome.end.error, ServerUnavailable)
    with pytest.raises(ServerUnavailable):
        await host.call(lambda engine: engine.num_running)
    await host.stop()
