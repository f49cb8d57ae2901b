"""What the containers leave out is not seen: the screen is the same, cell for cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from chatrt.testing.scripted_server import ScriptedAnswer, ScriptedServer
from chatrt_tui.containers import Blank, HighAsContent
from chatrt_tui.transcript import Transcript
from tests.chatrt_tui.driving import app_at, has_answered, say, until

if TYPE_CHECKING:
    from textual.strip import Strip

    from chatrt_tui.app import ChatApp

ANSWER = """A paragraph with *emphasis*, which is long enough that it goes on in a second line.

- one
- two
  1. three

> quoted

| a | b |
|---|---|
| 1 | 2 |

```python
print("code")
```

# And a heading
"""


def lines(app: ChatApp) -> list[Strip]:
    """The transcript with its colours, without the times below it."""
    rows = app.query_one(Transcript).region.line_range
    strips = app.screen._compositor.render_strips()
    return [strips[y].simplify() for y in rows]


async def screens(*, plain: bool) -> list[list[Strip]]:
    """The same conversation: as it is answered, selected, scrolled, in a narrower terminal."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        if plain:
            patch.delattr(Blank, "render_lines")
            patch.delattr(HighAsContent, "arrange")
        replies = [ScriptedAnswer(list(ANSWER)), ScriptedAnswer(list(ANSWER))]
        async with ScriptedServer(replies) as server, app_at(server.url) as (app, pilot):
            for text in ("one", "two"):
                await say(pilot, text)
                await until(lambda question=text: has_answered(app, question))  # type: ignore[misc]
            for keys in ((), ("ctrl+up",), ("up",), ("escape", "pageup")):
                await pilot.press(*keys)
                await pilot.pause(0.2)
                seen.append(lines(app))
            await pilot.resize_terminal(60, 30)
            await pilot.pause(0.2)
            seen.append(lines(app))
            assert app.query_one(Transcript).max_scroll_y > 0
    return seen


async def test_the_screen_is_the_same_cell_for_cell_as_with_plain_containers() -> None:
    ours, plain = await screens(plain=False), await screens(plain=True)
    assert len(ours) == len(plain) == 5
    assert "code" in "".join(strip.text for strip in ours[0])
    for number, (one, other) in enumerate(zip(ours, plain, strict=True)):
        differing = [y for y, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
        assert not differing, f"screen {number}, lines {differing}"
