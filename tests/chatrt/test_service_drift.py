"""Template drift through the service: the figures say where, and only the suffix is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.chatrt.drift_support import family_named, merging_tokenizer
from tests.chatrt.service_support import serving

if TYPE_CHECKING:
    from pathlib import Path

    from chatrt.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return merging_tokenizer(family_named("qwen3-empty"), tmp_path_factory.mktemp("qwen3"))


def kv(response: dict[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = response["chatrt"]["kv"]
    return figures


async def test_a_drifted_answer_costs_its_suffix_and_says_where(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with serving(tokenizer, tmp_path / "conversations.sqlite3") as chat:
        first = await chat.ask("hello")
        second = await chat.ask("and?", previous_response_id=first["id"])
        assert kv(first)["miss_reason"] is None
        assert kv(second)["miss_reason"] == "template_drift"
        divergence = kv(second)["first_divergence"]
        # The opening of an answer has an empty block, which is left out afterwards.
        num_block = len(tokenizer.encode("<think>\n\n</think>\n\n"))
        assert divergence["position"] == first["usage"]["input_tokens"] - num_block
        assert divergence["held"] == {"id": ord("<"), "text": "<"}
        assert kv(second)["reused_tokens"] >= divergence["position"]
        # The same parent again is the same text, from pages that are there.
        again = await chat.ask("and?", previous_response_id=first["id"])
        assert again["output"][0]["content"] == second["output"][0]["content"]
        assert await chat.num_free() > 0
