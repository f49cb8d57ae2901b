"""Containers that make little work while what is inside them grows.

Knows: how Textual places and paints. Does not know: what is inside.
Invariant: what is on the screen is the same with them and without.
Cost: measured in ADR 24.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.geometry import Region, Size
from textual.widget import Widget

if TYPE_CHECKING:
    from textual.layout import DockArrangeResult
    from textual.strip import Strip


class HighAsContent(Widget):
    """A container in which every height is that of its content.

    Textual remembers where the widgets inside are by the size of the container, which says nothing
    about them here: without it those that have not changed cost nothing while the container grows.
    """

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        """Where the widgets inside are, whatever height they are given."""
        return super().arrange(Size(size.width, 0), optimal)


class Blank(Widget):
    """A container that paints nothing of its own but its background: all of its lines are alike."""

    def render_lines(self, crop: Region) -> list[Strip]:
        """Paints one line, and takes it for all."""
        line = Region(crop.x, crop.y, crop.width, min(crop.height, 1))
        return super().render_lines(line) * crop.height
