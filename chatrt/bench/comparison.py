"""Two documents of one measurement, figure by figure.

Knows: documents as nested objects of numbers. Does not know: any one measurement.
Invariant: only what both documents have is compared; raw samples and settings are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Group
from rich.text import Text

from chatrt.bench.report import NO_VALUE, new_table
from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import RenderableType

# What describes a run instead of being measured by it.
_NOT_FIGURES = (
    *("samples", "by_session", "settings", "machine", "versions", "git", "warm_up", "schema"),
    "seed",
)
_LEFT_OUT = ("n", "max")  # of a distribution: how much was measured, and its one worst value


def read_document(path: Path, benchmark: str | None = None) -> dict[str, Any]:
    """A saved document of `benchmark`, or of any measurement.

    Raises:
        InvalidValue: It cannot be read, or is something else.
    """
    try:
        document = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise InvalidValue(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{path} is not the JSON document of a measurement: {error}") from error
    if benchmark is not None and document.get("benchmark") != benchmark:
        raise InvalidValue(
            f"--compare needs two documents of bench {benchmark}, {path} is of "
            f"{document.get('benchmark')!r}"
        )
    return document


def compare_documents(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """By path (`ttft_ms.warm.p50`): the numbers `a` and `b`, and `ratio` b ÷ a unless a is 0."""
    ours, theirs = dict(_numbers(a)), dict(_numbers(b))
    entries: dict[str, dict[str, float]] = {}
    for path, number in ours.items():
        if path in theirs:
            entries[path] = {"a": number, "b": theirs[path]}
            if number:
                entries[path]["ratio"] = theirs[path] / number
    return entries


def comparison_report(
    entries: Mapping[str, Mapping[str, float]], notes: Sequence[str]
) -> RenderableType:
    """One row for each figure."""
    table = new_table("Two runs")
    table.add_column("")
    for heading in ("a", "b", "b ÷ a"):
        table.add_column(heading, justify="right")
    for path, one in entries.items():
        ratio = f"{one['ratio']:.2f}" if "ratio" in one else NO_VALUE
        table.add_row(path, f"{one['a']:.4g}", f"{one['b']:.4g}", ratio)
    return Group(table, *(Text(line, style="dim") for line in notes))


def _numbers(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    for name, one in value.items():
        if not path and name in _NOT_FIGURES:
            continue
        yield from _of_value(one, f"{path}.{name}" if path else name, name)


def _of_value(value: Any, path: str, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        yield from _numbers(value, path)
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _of_value(one, f"{path}.{index}", name)
    elif isinstance(value, int | float) and not isinstance(value, bool) and name not in _LEFT_OUT:
        yield path, float(value)
