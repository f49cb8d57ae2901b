"""The entry of the terminal client.

Knows: how the app is run. Does not know: servers, settings; the command line has found those.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl as ssl_module
    from pathlib import Path

# How soon the client's thread gets the interpreter back while the screen is painted: Python's own
# 5 ms would be part of each TTFT, for the question to leave and again for its first text.
_SWITCH_INTERVAL_S = 0.0005
# How often the screen may be painted. A key waits for the next such moment: half as long with twice
# as many; an answer is painted as often as its text comes, which is seldom enough.
_FRAMES_PER_S = 120
# Objects made, and collections of younger ones, before garbage is looked for. What is old is looked
# through seldom: with some turns on the screen that takes 60 ms, and a key has to wait for it.
_GARBAGE_THRESHOLDS = (5000, 20, 1000)


def run(
    url: str,
    api_key: str | None = None,
    *,
    inline: bool = False,
    typing_ahead: bool = True,
    ssl: ssl_module.SSLContext | None = None,
    state_file: Path | None = None,
) -> None:
    """Chat with the server at `url` until the person quits; `inline` keeps the shell visible.

    With `typing_ahead` what is being typed is sent before Enter, for the server to prefill. `ssl`
    says whom to trust at a `wss://` address (None: whom the system trusts); what the client is to
    remember is kept in `state_file`.
    """
    os.environ.setdefault("TEXTUAL_FPS", str(_FRAMES_PER_S))  # Textual reads it when it is imported
    # Imported here, so that a command line that only prints its help need not load Textual.
    from chatrt_tui.app import ChatApp
    from chatrt_tui.terminal import end_with_terminal

    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.freeze()  # what was imported stays: to look through it again would hold up a key press
    gc.set_threshold(*_GARBAGE_THRESHOLDS)
    understand_alt_enter()
    end_with_terminal()
    app = ChatApp(url, api_key, typing_ahead=typing_ahead, ssl=ssl, state_file=state_file)
    app.run(inline=inline)


def understand_alt_enter() -> None:
    """Let Alt+Enter make a new line in terminals without the kitty protocol too.

    They send escape and return in one, which Textual 8.2 does not know: it would take the escape
    away and send the prompt. It is taught that this is Ctrl+J.
    """
    from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
    from textual.keys import Keys

    assert isinstance(ANSI_SEQUENCES_KEYS, dict)
    ANSI_SEQUENCES_KEYS.setdefault("\x1b\r", (Keys.ControlJ,))
