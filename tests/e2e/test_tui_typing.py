"""A person types into `chatrt chat`, in a terminal, with the default model behind it."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

from chatrt.bench.pseudo_terminal import Screen, in_a_terminal
from tests.e2e.process import environment
from tests.support import time_scale

if TYPE_CHECKING:
    from tests.e2e.process import ServerProcess

pytestmark = [pytest.mark.model, pytest.mark.slow]

QUESTION = "What is the capital of France? Please answer in one short sentence."
KEY_PAUSE_S = 0.05
# Longer than the pause that lets a half-typed text be sent, and time to prefill it.
REST_S = 0.6
ENTER, CTRL_T = "\r", "\x14"


def typed_ahead(screen: Screen) -> int:
    """What the details of the turn say, 0 while they say nothing."""
    found = re.search(r"(\d+) of them typed ahead", str(screen))
    return int(found[1]) if found else 0


def asked(screen: Screen) -> list[str]:
    """The lines that the question is on, in the transcript or still in the prompt."""
    return [line for line in screen.lines() if QUESTION in line]


def test_what_a_person_types_slowly_is_computed_before_enter_and_shown_once(
    server: ServerProcess,
) -> None:
    within_s = 10 * time_scale()
    arguments = [sys.executable, "-m", "chatrt", "chat", server.url]
    arguments += ["--api-key-file", str(server.paths.api_key)]
    with in_a_terminal(arguments, environment(server.home)) as terminal:
        terminal.until(
            lambda screen: "smollm2" in str(screen), "the model is named", within_s=within_s
        )
        terminal.type_slowly(QUESTION, pause_s=KEY_PAUSE_S)
        terminal.until(asked, "the prompt shows what was typed", within_s=within_s)
        terminal.rest(REST_S)
        terminal.press(ENTER)
        terminal.until(
            lambda screen: "TTFT" in str(screen), "the turn has ended", within_s=within_s
        )
        assert len(asked(terminal.screen)) == 1
        assert "Paris" in str(terminal.screen)
        terminal.press(CTRL_T)
        terminal.until(typed_ahead, "the details say how much was typed ahead", within_s=within_s)
        # More than the words "user" and "assistant" of the template: most of the question.
        assert typed_ahead(terminal.screen) > len(QUESTION.split()) // 2
    listed = server.get("/v1/conversations").body["data"]
    (path,) = [f"/v1/conversations/{one['id']}" for one in listed if one["title"] in QUESTION]
    items = server.get(f"{path}/items").body["data"]
    server.delete(path)
    assert [item["content"][0]["text"] for item in items if item["role"] == "user"] == [QUESTION]
