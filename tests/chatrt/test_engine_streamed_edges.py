"""Who else meets pages that are copied beside the steps: drafters, an idle host, kernels."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from chatrt.cli.kv_archive import page_copier
from chatrt.host import EngineHost
from chatrt.page_bytes import PageBytes
from chatrt.streamed_pages import StreamedPages
from chatrt.testing.drafter import ScriptedDrafter
from chatrt.testing.engine import (
    engine_over,
    outcomes,
    run_outcome,
    run_until_idle,
    tiny_engine,
    tiny_target,
    turn_request,
)
from chatrt.testing.serving import eventually
from chatrt.testing.streams import LateStream, late_streams
from chatrt.turn import FinishedEvent
from chatrt_kernels.page_moves import TorchPageMoves
from chatrt_kernels.triton.page_moves import TritonPageMoves
from tests.chatrt.archiving_support import PROMPT, TIMEOUT_S, kept, world
from tests.chatrt.engine_support import ColdRuns

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from chatrt.drafter import DraftRequest
    from chatrt.kvcache import KVCache
    from chatrt.text.tokenizer import Tokenizer
    from chatrt.turn import EngineEvent
    from chatrt_kernels.streams import Streams


@pytest.fixture(scope="module")
def cold(tokenizer: Tokenizer) -> ColdRuns:
    return ColdRuns(tokenizer)


class DrafterWithPages(ScriptedDrafter):
    """Has pages of its own, and finds them landed whenever it proposes."""

    paired = True

    def __init__(self, kv: KVCache, sequence: list[int]) -> None:
        super().__init__([sequence])
        self.kv = kv  # type: ignore[assignment]  # the one without has None
        self.kv.arrivals = self  # type: ignore[attr-defined]
        self.landed: set[int] = set()
        self.num_proposals = 0

    def land(self, page_ids: Iterable[int]) -> None:
        self.landed.update(page_ids)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        used = {page_id for request in requests for page_id in request.page_ids}
        assert used <= self.landed
        self.landed.clear()
        self.num_proposals += 1
        return super().propose(requests)


def test_pages_of_a_drafter_land_before_it_proposes(tokenizer: Tokenizer, cold: ColdRuns) -> None:
    request = turn_request("a", PROMPT)
    sequence = [*PROMPT, *cold.run(request).token_ids]
    target, own = tiny_target(tokenizer), tiny_target(tokenizer).kv
    drafter = DrafterWithPages(own, sequence)
    engine = engine_over(target, max_context=256, drafter=drafter, num_drafts=3)
    cold.assert_equal(request, run_outcome(engine, replace(request)))
    assert drafter.num_proposals > 0


async def test_an_idle_engine_looks_after_its_copies_by_itself(tokenizer: Tokenizer) -> None:
    beside = LateStream()
    with world(tokenizer, None, host_bytes=2**24, beside=beside) as here:
        host = EngineHost(here.engine)
        host.start()
        try:
            ended = asyncio.Event()
            sink = partial(_set_when_finished, ended)
            host.submit(kept("a", PROMPT), sink)
            await ended.wait()
            await eventually(lambda: len(beside) > 0, TIMEOUT_S)
            assert here.archive.figures().num_host_pages == 0
            beside.finish()  # the device gets on, and tells nobody
            await eventually(lambda: here.archive.figures().num_host_pages >= 3, TIMEOUT_S)
        finally:
            await host.stop()


def _set_when_finished(ended: asyncio.Event, event: EngineEvent) -> None:
    if isinstance(event, FinishedEvent):
        ended.set()


def test_rows_that_one_kernel_copies_are_those_that_a_fork_goes_on_from(
    tokenizer: Tokenizer, cold: ColdRuns
) -> None:
    engine = tiny_engine(tokenizer)
    engine._target.kv.move_pages_by(TritonPageMoves)
    first = run_outcome(engine, turn_request("a", PROMPT))
    ids = [*PROMPT, *first.token_ids]
    forks = [
        turn_request(name, list(text), parent=first.end, history=ids)
        for name, text in (("b", b"why?"), ("c", b"how?"))
    ]
    for fork in forks:
        engine.submit(replace(fork))
    found = outcomes(run_until_idle(engine))
    for fork in forks:
        assert found[fork.response_id].end.kv.reused_tokens >= len(ids) - 1
        cold.assert_equal(fork, found[fork.response_id])


def test_pages_are_copied_at_once_on_a_cpu_and_beside_the_steps_where_moves_are_given(
    tokenizer: Tokenizer,
) -> None:
    kv = tiny_target(tokenizer).kv
    assert isinstance(page_copier([kv], None), PageBytes)
    streamed = page_copier([kv], TorchPageMoves, lambda _: late_streams()[0])
    assert isinstance(streamed, StreamedPages)
    assert kv.arrivals is streamed


def test_without_memory_for_buffers_pages_are_copied_between_steps_and_the_log_says_so(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    def no_streams(device: torch.device) -> Streams:
        raise torch.OutOfMemoryError("no room for 8 MiB")

    kv = tiny_target(tokenizer).kv
    assert isinstance(page_copier([kv], TorchPageMoves, no_streams), PageBytes)
    assert kv.arrivals is None
    assert "KV pages are copied between steps, which wait for it: no room for 8 MiB" in caplog.text
