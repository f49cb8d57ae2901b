"""No draft is trained on what drafts are judged by."""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import TYPE_CHECKING

from chatrt.bench.prompts import bundled_prompts

if TYPE_CHECKING:
    from collections.abc import Iterator

_RUN = 8  # words that no two texts share by chance


def words(text: str) -> list[str]:
    return re.sub(r"[^\w ]", "", text.lower()).split()


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from strings(one)


def seeds() -> list[str]:
    folder = resources.files("chatrt_drafts.training") / "data"
    files = [file for file in folder.iterdir() if file.name.endswith(".json")]
    return [text for file in files for text in strings(json.loads(file.read_text("utf-8")))]


def test_no_seed_is_one_of_the_bundled_prompts_or_shares_eight_words_in_a_row_with_one() -> None:
    judged: set[str] = set()
    runs: set[tuple[str, ...]] = set()
    for prompt in bundled_prompts():
        for text in (prompt.text, *(message.content for message in prompt.history)):
            said = words(text)
            judged.add(" ".join(said))
            runs.update(tuple(said[i : i + _RUN]) for i in range(len(said) - _RUN + 1))
    texts = seeds()
    assert len(texts) > 2000
    for text in texts:
        said = words(text)
        if len(said) > 2:
            assert " ".join(said) not in judged
        assert not runs.intersection(tuple(said[i : i + _RUN]) for i in range(len(said)))
