"""Which commands a half-typed slash may become, in a few lines above the prompt.

Knows: how commands are listed in little room. Does not know: what they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.content import Content
from textual.widgets import Static

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt_tui.commands import Command

_MOST = 8


class CommandHints(Static):
    """A list that is there only while a command is being typed."""

    DEFAULT_CSS = """
    CommandHints {
        display: none;
        height: auto;
        max-height: 40%;
        margin: 0 2;
        padding: 0 1;
        background: $boost;
        color: $text-muted;
        text-wrap: nowrap;
        text-overflow: ellipsis;
        &.-shown { display: block; }
    }
    """

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._shown: Sequence[Command] = ()

    def show(self, commands: Sequence[Command]) -> None:
        """List these commands; none hides the list."""
        if list(commands) == list(self._shown):
            return
        self._shown = list(commands)
        self.set_class(bool(commands), "-shown")
        if not commands:
            return
        width = max(len(command.usage) for command in commands[:_MOST])
        lines = [
            Content.assemble((command.usage.ljust(width), "bold"), "  ", command.told)
            for command in commands[:_MOST]
        ]
        left = len(commands) - _MOST
        if left > 0:
            lines.append(Content(f"… and {left} more · Tab completes"))
        self.update(Content("\n").join(lines))
