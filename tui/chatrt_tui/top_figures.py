"""Puts what a server does right now into words, lines and columns.

Knows: which figures people look at, their units, how wide a column is.
Does not know: widgets, terminals, where the figures come from.
Invariant: what a server says is cleaned of everything that a terminal would obey.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from chatrt.percentiles import percentile
from chatrt.wire.live import LiveFigures, LiveServer, LiveTurn, RecentTurn
from chatrt_tui.clean import clean_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

T = TypeVar("T", LiveTurn, RecentTurn)
NONE = "–"
_WIDE, _WIDER = 108, 130  # cells of a screen that has room for further columns
_ID_CELLS = 8
_PREPARED = "prepared"  # turns that nobody asked for: they are not among those that run
_STATUSES = {"end_of_turn": "complete", "max_output_tokens": "cut off"}


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """A column of `width` cells; left out on screens that are narrower than `from_cells`."""

    title: str
    width: int
    text: Callable[[T], str]
    is_text: bool = False
    from_cells: int = 0


@dataclass(frozen=True, slots=True)
class Series:
    """One figure by turn or step, the oldest first: drawn as a line, told by two percentiles."""

    name: str
    values_ms: tuple[float, ...]
    p50_ms: float | None
    p95_ms: float | None

    @property
    def title(self) -> str:
        """`TTFT p50 41 p95 60 ms`."""
        if self.p50_ms is None:
            return f"{self.name} {NONE}"
        return f"{self.name} p50 {ms(self.p50_ms)} p95 {ms(self.p95_ms)} ms"


# Numbers ------------------------------------------------------------------------------------------


def ms(value_ms: float | None) -> str:
    """Milliseconds in at most five characters, without the unit below 100 s."""
    if value_ms is None:
        return NONE
    if value_ms >= 99_999.5:
        return f"{value_ms / 1e3:.0f}s"
    return f"{value_ms:.1f}" if 0 < value_ms < 9.95 else f"{value_ms:.0f}"


def age(seconds: float) -> str:
    """How long something has lasted, in at most four characters."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size:.0f}{unit}"
    return f"{seconds:.0f}s"


def uptime(seconds: float) -> str:
    """How long a server has been up: the two largest units."""
    minutes = int(seconds // 60)
    days, hours = minutes // 1440, minutes // 60 % 24
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {seconds % 60:.0f} s" if minutes else f"{seconds:.0f} s"


def size(num_bytes: int) -> str:
    """Bytes in at most six characters."""
    for factor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.0f}{unit}"
    return f"{num_bytes}B"


def _share(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.0f}%"


def _ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _short_id(name: str | None) -> str:
    """The first letters of an id behind its prefix: enough to tell some turns apart."""
    return NONE if name is None else clean_line(name).rpartition("_")[2][:_ID_CELLS]


def _phase(turn: LiveTurn) -> str:
    return clean_line(turn.phase)


def _prefix(turn: LiveTurn | RecentTurn) -> str:
    return clean_line(turn.prefix or NONE)


def _status(turn: RecentTurn) -> str:
    return clean_line(_STATUSES.get(turn.status, turn.status.replace("_", " ")))


# Tables -------------------------------------------------------------------------------------------

LIVE_COLUMNS: tuple[Column[LiveTurn], ...] = (
    Column("response", _ID_CELLS, lambda t: _short_id(t.response_id), is_text=True),
    Column(
        "convers.",
        _ID_CELLS,
        lambda t: _short_id(t.conversation_id),
        is_text=True,
        from_cells=_WIDE,
    ),
    Column("phase", 11, _phase, is_text=True),
    Column("prefix", 8, _prefix, is_text=True, from_cells=_WIDER),
    Column("age", 4, lambda t: age(t.age_ms / 1e3)),
    Column("prompt", 6, lambda t: str(t.prompt_tokens)),
    Column("cached", 6, lambda t: str(t.cached_tokens)),
    Column("computed", 8, lambda t: str(t.computed_tokens), from_cells=_WIDER),
    Column("out", 5, lambda t: str(t.generated_tokens)),
    Column("TTFT", 5, lambda t: ms(t.ttft_ms)),
    Column("gap", 5, lambda t: ms(t.mean_gap_ms)),
    Column("last gap", 8, lambda t: ms(t.last_gap_ms), from_cells=_WIDE),
    Column("t/pass", 6, lambda t: _ratio(t.tokens_per_pass), from_cells=_WIDE),
    Column("outbox", 6, lambda t: size(t.pending_bytes)),
)
RECENT_COLUMNS: tuple[Column[RecentTurn], ...] = (
    Column("response", _ID_CELLS, lambda t: _short_id(t.response_id), is_text=True),
    Column(
        "convers.",
        _ID_CELLS,
        lambda t: _short_id(t.conversation_id),
        is_text=True,
        from_cells=_WIDE,
    ),
    Column("ended", 9, _status, is_text=True),
    Column("prefix", 8, _prefix, is_text=True),
    Column("ago", 4, lambda t: age(t.age_s)),
    Column("prompt", 6, lambda t: str(t.prompt_tokens), from_cells=_WIDE),
    Column("cached", 6, lambda t: _share(t.cached_share)),
    Column("out", 5, lambda t: str(t.generated_tokens)),
    Column("TTFT", 5, lambda t: ms(t.ttft_ms)),
    Column("TPOT", 5, lambda t: ms(t.tpot_ms)),
    Column("gap p95", 7, lambda t: ms(t.gap_p95_ms), from_cells=_WIDER),
    Column("max", 5, lambda t: ms(t.gap_max_ms)),
    Column("t/pass", 6, lambda t: _ratio(t.tokens_per_pass), from_cells=_WIDE),
    Column("took", 5, lambda t: ms(t.duration_ms), from_cells=_WIDER),
)


def fitting(columns: Sequence[Column[T]], num_cells: int) -> list[Column[T]]:
    """The columns for a screen of so many cells."""
    return [column for column in columns if column.from_cells <= num_cells]


# The orders of live turns, by name: the first one is the usual one.
ORDERS: Mapping[str, Callable[[LiveTurn], float | str]] = {
    "age": lambda turn: -turn.age_ms,
    "phase": lambda turn: turn.phase,
    "prompt": lambda turn: -turn.prompt_tokens,
    "out": lambda turn: -turn.generated_tokens,
    "TTFT": lambda turn: -(turn.ttft_ms or 0.0),
    "gap": lambda turn: -(turn.mean_gap_ms or 0.0),
}


def ordered(turns: Iterable[LiveTurn], order: str) -> list[LiveTurn]:
    """Live turns in an order of `ORDERS`: the most first."""
    return sorted(turns, key=ORDERS[order])


# Lines --------------------------------------------------------------------------------------------


def headline(server: LiveServer) -> str:
    """Which server it is, for how long, and for how many."""
    number = server.sockets.num_connections
    parts = (
        clean_line(server.model),
        f"up {uptime(server.uptime_s)}",
        f"{number} connection{_s(number)}",
        f"v{clean_line(server.version)}",
    )
    return " · ".join(parts)


def work_line(server: LiveServer) -> str:
    """Turns that run, by phase, the queue, sessions that are parked, steps per second.

    What was compiled after the server was ready stands there if anything was.
    """
    phases = ", ".join(
        f"{number} {clean_line(name)}"
        for name, number in server.phases.items()
        if name != _PREPARED
    )
    prepared = server.phases.get(_PREPARED, 0)
    parked = server.sessions.get("parked", 0)
    late = sum(server.late_compilations.values())
    parts = (
        f"running {server.num_running}" + (f": {phases}" if phases else ""),
        *([f"{prepared} prepared"] if prepared else []),
        f"queue {server.num_waiting}",
        f"{parked} session{_s(parked)} parked",
        f"{server.steps.per_s:.0f} steps/s",
        *([f"{late} compiled late"] if late else []),
    )
    return " · ".join(parts)


def drafts_line(server: LiveServer) -> str:
    """How drafts fare and over which time, and what waits to be sent."""
    made, sockets = server.acceptance, server.sockets
    parts = []
    if made.drafted:
        share = 100 * made.accepted / made.drafted
        parts.append(f"{share:.0f} % of {made.drafted} drafts accepted")
    if made.tokens_per_pass is not None:
        parts.append(f"{made.tokens_per_pass:.2f} tokens/pass")
    told = ", ".join(parts) or "no passes"
    waiting = f"outboxes {size(sockets.outbox_bytes)}"
    if sockets.outbox_bytes:
        waiting += f", largest {size(sockets.largest_outbox_bytes)}"
    return f"{told} in the last {made.window_s:.0f} s · {waiting}"


def page_parts(server: LiveServer) -> tuple[tuple[str, int], ...]:
    """The pages of the device in parts that add up: known to the tree, held besides, free."""
    cached, held = server.pages.get("cached", 0), server.pages.get("held", 0)
    return (
        ("cached", min(cached, held)),
        ("other", max(held - cached, 0)),
        ("free", server.pages.get("free", 0)),
    )


def more_pages(server: LiveServer) -> str:
    """What the parts of the bar do not say: how many there are, shared ones, those elsewhere."""
    parts = [f"of {server.pages.get('total', 0)} pages", f"{server.pages.get('shared', 0)} shared"]
    kept = [(clean_line(name), number) for name, number in server.archived.items() if number]
    return " · ".join([*parts, *(f"{name} {number}" for name, number in kept)])


def cells_of(parts: Sequence[int], num_cells: int) -> list[int]:
    """Cells of a bar for each part, together `num_cells`; what is not empty gets one at least."""
    total = sum(parts)
    if not total:
        return [0] * len(parts)
    cells = [max(round(part * num_cells / total), 1) if part else 0 for part in parts]
    largest = cells.index(max(cells))
    cells[largest] = max(cells[largest] + num_cells - sum(cells), 0)
    return cells


def meters(figures: LiveFigures) -> tuple[Series, Series, Series]:
    """TTFT and gaps of the turns that ended last, and what the last steps took.

    Of the gaps it is the median turn's p50 and p95; the line has each turn's p95.
    """
    recent, steps = figures.recent, figures.server.steps
    ttft = [turn.ttft_ms for turn in recent if turn.ttft_ms is not None]
    gap_p50 = [turn.gap_p50_ms for turn in recent if turn.gap_p50_ms is not None]
    gap_p95 = [turn.gap_p95_ms for turn in recent if turn.gap_p95_ms is not None]
    return (
        Series("TTFT", tuple(ttft), _at(ttft, 0.50), _at(ttft, 0.95)),
        Series("gap", tuple(gap_p95), _at(gap_p50, 0.50), _at(gap_p95, 0.50)),
        Series("step", steps.recent_ms, steps.median_ms, steps.p95_ms),
    )


def _at(values: Sequence[float], share: float) -> float | None:
    return percentile(sorted(values), share)


def _s(number: int) -> str:
    return "" if number == 1 else "s"
