from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from chatrt.bench.text_scale import TextScale, measure_scale
from chatrt.client import ChatClient
from chatrt.testing.scripted_server import ScriptedAnswer, ScriptedServer
from tests.chatrt.bench_support import ANSWER, tiny_server

if TYPE_CHECKING:
    from pathlib import Path


async def scale_of(url: str) -> TextScale:
    async with await ChatClient.connect(url) as client:
        return await measure_scale(client, seed=0)


async def test_two_prompts_tell_what_a_word_and_what_the_template_costs() -> None:
    def count(message: dict[str, Any]) -> ScriptedAnswer:
        num_words = len(message["input"].split()) - 1  # the number in front is the template's
        return ScriptedAnswer(usage={"input_tokens": 40 + 2 * num_words})

    async with ScriptedServer(count) as server:
        scale = await scale_of(server.url)
        creates = server.creates()
    assert scale == TextScale(tokens_per_word=2.0, overhead_tokens=40.0)
    assert scale.num_words(240) == 100
    assert {create["generate"] for create in creates} == {False}


async def test_a_server_that_does_not_count_is_given_a_token_a_word() -> None:
    async with ScriptedServer([ANSWER]) as server:
        assert await scale_of(server.url) == TextScale(1.0, 0.0)


async def test_a_length_below_the_templates_own_is_one_word() -> None:
    assert TextScale(1.0, 40.0).num_words(10) == 1


async def test_a_real_tokenizers_words_are_as_long_as_they_are(tmp_path: Path) -> None:
    async with tiny_server(tmp_path, max_context=512) as endpoint:
        scale = await scale_of(endpoint.url)
    assert scale.tokens_per_word == pytest.approx(5.3, abs=1.5)  # this tokenizer counts bytes
    assert abs(scale.num_words(300) - 50) < 20
