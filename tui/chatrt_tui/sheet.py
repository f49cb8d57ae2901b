"""A screen above the chat that is left once, however fast the keys come that leave it.

Knows: which screen is current. Does not know: what a screen shows.
Invariant: leaving what has been left does nothing. Two keys that one read brings would otherwise
take the screen below away, too.
"""

from __future__ import annotations

from textual.await_complete import AwaitComplete
from textual.screen import ModalScreen, ScreenResultType


class Sheet(ModalScreen[ScreenResultType]):
    """A modal screen of ours."""

    @property
    def is_left(self) -> bool:
        """Whether the person went on: what comes now finds nothing to be shown in."""
        return self not in self.app.screen_stack

    def dismiss(self, result: ScreenResultType | None = None) -> AwaitComplete:
        """Leave it with a result, unless it is left already."""
        return AwaitComplete() if not self.is_current else super().dismiss(result)
