"""The panel that explains a turn: its figures as bars, and the TTFT of the turns before it.

Knows: how sections of figures are painted, beside the transcript or below it.
Does not know: where the figures come from, which turn is selected.
Cost: nothing while it is hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Sparkline, Static

from chatrt_tui import explained
from chatrt_tui.clean import clean_line
from chatrt_tui.figures import short_ms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult

    from chatrt.client import TurnResult
    from chatrt_tui.explained import Bar, Section

_BAR_CELLS = 14
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_NOTHING = "No figures are known of this turn."


def bar(share: float, num_cells: int = _BAR_CELLS) -> str:
    """A bar of `share` of so many cells, in steps of an eighth; never empty."""
    eighths = max(1, round(min(share, 1.0) * num_cells * 8))
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


class Details(VerticalScroll, can_focus=False):
    """The figures of one turn; `-shown` on demand."""

    DEFAULT_CSS = """
    Details {
        display: none;
        width: 48;
        border-left: vkey $border-blurred;
        padding: 0 1;
        scrollbar-size-vertical: 1;
        &.-shown { display: block; }
        & Static { height: auto; }
        & > Vertical { height: auto; }
        & Sparkline { height: 2; margin-top: 0; }
        & .caption { color: $text-muted; padding-top: 1; }
        &.-below {
            width: 100%; height: 12; max-height: 50%; layout: horizontal; border-left: none;
            border-top: hkey $border-blurred;
            & > Vertical { width: 1fr; padding-right: 1; }
        }
    }
    """

    def compose(self) -> ComposeResult:
        """Two parts: where the time went, and all the rest."""
        with Vertical():
            yield Static(markup=False, id="time")
        with Vertical():
            yield Static(markup=False, id="rest")
            yield Static(markup=False, classes="caption")
            yield Sparkline([])

    @property
    def is_shown(self) -> bool:
        """Whether one sees it."""
        return self.has_class("-shown")

    def explain(self, heading: str, result: TurnResult | None, ttfts_ms: Sequence[float]) -> None:
        """Show the figures of a turn, and the times to first token up to it."""
        first: list[Section | None] = []
        second: list[Section | None] = []
        if result is not None:
            first = [explained.ttft(result), explained.stream(result)]
            second = [explained.tokens(result), explained.drafts(result)]
        head = Content.styled(clean_line(heading), "bold")
        known = [section for section in first if section is not None]
        lines = [head, *_painted(known)] if known else [head, Content(_NOTHING)]
        self.query_one("#time", Static).update(Content("\n").join(lines))
        rest = _painted([section for section in second if section is not None])
        self.query_one("#rest", Static).update(Content("\n").join(rest))
        self._show_course(ttfts_ms)

    def _show_course(self, ttfts_ms: Sequence[float]) -> None:
        spark, caption = self.query_one(Sparkline), self.query_one(".caption", Static)
        spark.display = caption.display = len(ttfts_ms) > 1
        if len(ttfts_ms) > 1:
            low, high = short_ms(min(ttfts_ms)), short_ms(max(ttfts_ms))
            caption.update(f"TTFT by turn, {low} to {high} ms")
            spark.data = list(ttfts_ms)


def _painted(sections: Sequence[Section]) -> list[Content]:
    lines: list[Content] = []
    for section in sections:
        lines.append(Content.styled(clean_line(section.title), "$text-accent"))
        lines += [Content(f" {clean_line(line)}") for line in section.lines]
        width = max((len(one.label) for one in section.bars), default=0)
        lines += [_bar_line(one, width) for one in section.bars]
    return lines


def _bar_line(one: Bar, width: int) -> Content:
    painted = bar(one.share).ljust(_BAR_CELLS)
    return Content.assemble(f" {one.label.ljust(width)} ", (painted, "$primary"), f" {one.text}")
