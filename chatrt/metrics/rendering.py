"""Prometheus' text of a registry, written in parts that each hold the interpreter briefly.

Knows: families and samples. Does not know: what they count.
Invariant: the parts together are what the library writes in one go, but for the times of creation,
which a server with one start has no use for; a family is read in one piece.
Cost: about 0.1 ms for each part, 30 parts for a server; its 350 lines in one go would hold its
streams up for 5 to 10 ms.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from prometheus_client import CollectorRegistry
    from prometheus_client.samples import Sample

LINES_PER_PART = 12
_PAUSE_S = 0.001  # for streams, and for the engine's thread, which waits for the interpreter too


class _Slice(Collector):
    """Some samples of a family, as a collector of its own."""

    def __init__(self, family: Metric, samples: Sequence[Sample]) -> None:
        self._part = Metric(family.name, family.documentation, family.type, family.unit)
        self._part.samples = list(samples)

    def collect(self) -> Iterable[Metric]:
        yield self._part


async def render(registry: CollectorRegistry) -> bytes:
    """All metrics in Prometheus' text format; streams are served between the parts."""
    parts = []
    for part in text_parts(registry):
        parts.append(part)
        await asyncio.sleep(_PAUSE_S)
    return b"".join(parts)


def text_parts(registry: CollectorRegistry) -> Iterator[bytes]:
    """The text in parts of at most `LINES_PER_PART` samples.

    Reading the values of a large family ends a part too.
    """
    part, num_lines = b"", 0
    for family in registry.collect():
        samples = [one for one in family.samples if not one.name.endswith("_created")]
        is_large = len(samples) > LINES_PER_PART
        for start in range(0, max(len(samples), 1), LINES_PER_PART):
            some = samples[start : start + LINES_PER_PART]
            if (start == 0 and is_large) or num_lines + len(some) > LINES_PER_PART:
                yield part
                part, num_lines = b"", 0
            text = generate_latest(_Slice(family, some))
            part += text if start == 0 else _without_head(text)
            num_lines += len(some)
    yield part


def _without_head(text: bytes) -> bytes:
    """The samples without the two lines about their family, which its first part has."""
    return text.split(b"\n", 2)[2]
