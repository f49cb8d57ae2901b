"""What is compiled or captured after a server is ready: counted, logged, exported, and nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch
import triton

from chatrt.wire.live import Sockets
from chatrt_kernels.compilations import CompilationFigures, Compilations
from chatrt_kernels.triton.ops import TritonOps
from chatrt_kernels.triton.program import eager
from chatrt_kernels.triton.watch import counted, watch_compilations
from tests.chatrt.metrics_support import samples_of
from tests.chatrt.service_support import KEY, serving
from tests.chatrt_kernels.triton_support import compiled_by_triton

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chatrt.text.tokenizer import Tokenizer
    from tests.chatrt.service_support import Chat

KERNELS = 'chatrt_late_compilations_total{of="kernel"}'
GRAPHS = 'chatrt_late_compilations_total{of="graph"}'


@pytest.fixture
def compilations() -> Iterator[Compilations]:
    """Watches Triton while the test runs."""
    watching = Compilations()
    end = watch_compilations(watching)
    yield watching
    end()


async def scraped(chat: Chat) -> tuple[float, float]:
    found = samples_of((await chat.service.metrics(Sockets())).decode())
    return found[KERNELS], found[GRAPHS]


async def test_turns_compile_and_capture_nothing_and_what_does_is_exported(
    tokenizer: Tokenizer, compilations: Compilations, caplog: pytest.LogCaptureFixture
) -> None:
    capture = counted(eager, compilations)
    ops = TritonOps(torch.float32, torch.device("cpu"), even_rows=8, capture=capture)
    async with serving(tokenizer, max_context=160, ops=ops, compilations=compilations) as chat:
        await chat.ask("hi", max_output_tokens=2)
        assert compilations.all.num_graphs > 0
        compilations.ready()
        for text in ("one", "a longer one", "three"):
            await chat.ask(text, max_output_tokens=2)
        assert await scraped(chat) == (0, 0)
        assert not caplog.records

        with caplog.at_level(logging.WARNING):
            compiled_by_triton("_forgotten")
            capture(lambda: None)
        assert await scraped(chat) == (1, 1)
        live = await chat.service.live(KEY, Sockets())
    assert live.server.late_compilations == {"kernel": 1, "graph": 1}
    assert [record.message for record in caplog.records] == [
        "kernel _forgotten was compiled after the server was ready: a step waited",
        "a graph was captured after the server was ready: a step waited",
    ]


def test_what_is_compiled_before_the_server_is_ready_is_not_late(
    compilations: Compilations, caplog: pytest.LogCaptureFixture
) -> None:
    compiled_by_triton("_warm")
    assert compilations.all == CompilationFigures(num_kernels=1)
    compilations.ready()
    compiled_by_triton("_cold")
    assert compilations.all == CompilationFigures(num_kernels=2)
    assert compilations.late == CompilationFigures(num_kernels=1)
    assert len(caplog.records) == 1


def test_a_hook_that_was_there_before_hears_of_compilations_too() -> None:
    first, second = Compilations(), Compilations()
    ends = [watch_compilations(one) for one in (first, second)]
    compiled_by_triton("_heard")
    for end in reversed(ends):
        end()
    compiled_by_triton("_not_heard")
    assert first.all.num_kernels == second.all.num_kernels == 1
    assert triton.knobs.runtime.jit_post_compile_hook is None
