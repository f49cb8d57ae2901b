"""Rendering: the library's text, written in parts that hold nobody up."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from chatrt.metrics import EngineFigures, Metrics
from chatrt.metrics.rendering import LINES_PER_PART, render, text_parts
from chatrt.turn import FinishReason
from chatrt.wire.live import Sockets
from tests.chatrt.metrics_support import POOL, ended_turn, tell
from tests.support import time_scale


def used() -> CollectorRegistry:
    metrics = Metrics("tiny", {"target": 5})
    for reason in FinishReason:
        tell(metrics, ended_turn(reason))
    metrics.on_gap(3_000_000)
    metrics.update(EngineFigures(POOL), Sockets())
    return metrics.registry


def own_lines(text: bytes) -> list[str]:
    """The lines but those of the process, which are another moment's, and of creation times."""
    lines = text.decode().splitlines()
    return [line for line in lines if "process_" not in line and "_created" not in line]


def times_ms(registry: CollectorRegistry) -> list[float]:
    """How long each part takes."""
    times, parts = [], text_parts(registry)
    started = time.perf_counter()
    while next(parts, None) is not None:
        ended = time.perf_counter()
        times.append((ended - started) * 1e3)
        started = ended
    return times


def test_no_part_has_more_than_a_few_lines_whatever_the_registry_holds() -> None:
    registry = used()
    wide = Gauge("wide", "Many.", ("n",), registry=registry)
    for n in range(1000):
        wide.labels(str(n)).set(n)
    parts = list(text_parts(registry))
    samples = [[line for line in p.splitlines() if not line.startswith(b"#")] for p in parts]
    assert max(map(len, samples)) == LINES_PER_PART
    assert sum(map(len, samples)) > 1000


def test_the_parts_together_are_what_the_library_writes_in_one_go() -> None:
    registry = used()
    assert own_lines(b"".join(text_parts(registry))) == own_lines(generate_latest(registry))


def test_the_text_read_back_is_what_the_registry_holds() -> None:
    registry = used()
    text = b"".join(text_parts(registry)).decode()
    read = {family.name: family for family in text_string_to_metric_families(text)}
    for family in registry.collect():
        if family.name.startswith("chatrt_"):
            held = {
                (s.name, *sorted(s.labels.items()), s.value)
                for s in family.samples
                if not s.name.endswith("_created")
            }
            found = read[family.name]
            assert {(s.name, *sorted(s.labels.items()), s.value) for s in found.samples} == held
            assert (found.type, found.documentation) == (family.type, family.documentation)


def test_a_part_holds_the_interpreter_for_half_a_millisecond_at_most() -> None:
    registry = used()
    runs = [times_ms(registry) for _ in range(25)]
    # Whatever else runs here only adds to a time: the best of each part is the code's own.
    assert max(map(min, zip(*runs, strict=True))) <= 0.5 * time_scale()


async def test_others_run_between_any_two_parts() -> None:
    registry = used()
    num_parts = sum(1 for _ in text_parts(registry))
    rounds = 0

    async def other() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await render(registry)
    task.cancel()
    assert rounds >= num_parts
