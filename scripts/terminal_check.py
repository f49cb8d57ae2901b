"""Times what a person at the terminal feels, against its bars: `python scripts/terminal_check.py`.

`chatrt chat` runs in a pseudo-terminal: keys are pressed and the screen is read. Streams of an even
pace come from a scripted server; decoding is that of the default model on a server of its own. The
machine should do nothing else meanwhile. Prints a table and, as its last line, one JSON document;
ends with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from chatrt.bench.figures import Distribution
from chatrt.cli.bench_server import choose_server, measured_server
from chatrt.testing.paced_server import paced_server
from chatrt.testing.terminal_times import (
    Answered,
    first_paint_times_ms,
    key_times_ms,
    long_answer,
    painted_answer,
    start_times_ms,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

STREAM_PER_S = 300.0


@dataclass(frozen=True)
class Line:
    """A figure and its bar; `n` is the number of samples."""

    what: str
    n: int
    value: float | None
    at_most: float

    @property
    def within(self) -> bool:
        """Whether it keeps its bar."""
        return self.value is not None and self.value <= self.at_most


def painting(num_samples: int) -> list[Line]:
    """The prompt, keys and first deltas, with a scripted server."""
    with paced_server(STREAM_PER_S) as server:
        starts = Distribution.of(start_times_ms(server.url, max(1, num_samples // 10)))
        keys = Distribution.of(key_times_ms(server, num_samples))
        paints = Distribution.of(first_paint_times_ms(server, max(1, num_samples // 5)))
    return [
        Line("command to prompt, p50 (ms)", starts.n, starts.p50, 1000.0),
        Line(
            f"key to screen while {STREAM_PER_S:g} tok/s stream, p99 (ms)", keys.n, keys.p99, 50.0
        ),
        Line("first delta sent to painted, p95 (ms)", paints.n, paints.p95, 16.0),
        Line("first delta sent to painted, p50 (ms)", paints.n, paints.p50, 16.0),
    ]


def decoding(num_pairs: int, num_tokens: int) -> tuple[Line, list[tuple[Answered, Answered]]]:
    """Milliseconds a token with the answer painted ÷ only read, in turns."""
    pairs, limit = [], ("--max-output-tokens", str(num_tokens))
    with (
        measured_server(choose_server(None, None, None), limit) as server,
        _key_file(server.endpoint.api_key) as file,
    ):
        arguments = ["--api-key-file", str(file)]
        alone = partial(long_answer, server.endpoint, num_tokens)
        painted = partial(painted_answer, server.endpoint, num_tokens, arguments)
        for seed in range(num_pairs):
            # whichever comes first meets another machine than the second: that takes turns
            both = [run(seed=seed) for run in ((alone, painted), (painted, alone))[seed % 2]]
            pairs.append((both[seed % 2], both[1 - seed % 2]))
    ratio = statistics.median(shown.tpot_ms / hidden.tpot_ms for hidden, shown in pairs)
    num_lines = statistics.median(shown.num_lines for _, shown in pairs)
    what = f"decoding, {num_lines:.0f} lines painted ÷ only read (median)"
    return Line(what, len(pairs), ratio, 1.15), pairs


@contextmanager
def _key_file(api_key: str | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "api-key"
        file.touch(mode=0o600)
        file.write_text(api_key or "none", encoding="ascii")
        yield file


def main() -> int:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=300, help="keys; a fifth of it paints")
    parser.add_argument("--pairs", type=int, default=3, help="long answers, painted and not")
    parser.add_argument("--tokens", type=int, default=7300, help="of a long answer")
    asked = parser.parse_args()
    lines = painting(asked.samples)
    pairs: list[tuple[Answered, Answered]] = []
    if asked.pairs:
        line, pairs = decoding(asked.pairs, asked.tokens)
        lines.append(line)
    for line in lines:
        value = "not measured" if line.value is None else f"{line.value:.4g}"
        mark = "" if line.within else "  MISSED"
        print(f"{line.what:58} n={line.n:<4} {value:>12}  ≤ {line.at_most:g}{mark}")
    samples = [[asdict(one) for one in pair] for pair in pairs]
    print(json.dumps({"lines": [asdict(line) for line in lines], "answers": samples}))
    return 0 if all(line.within for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
