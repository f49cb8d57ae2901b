"""The user turns of the training data are many, whole, and the same for the same generator."""

from __future__ import annotations

import json
import random
import re
from importlib import resources
from typing import TYPE_CHECKING, Any

import pytest

from chatrt.errors import InvalidValue
from chatrt_drafts.training.seeds import SeedTurns

if TYPE_CHECKING:
    from pathlib import Path

_SLOT = re.compile(r"\{[a-z_]+(:\d+\.\.\d+)?\}")
_FILLERS = {"fruit": ["a fig", "a plum"]}


def bundled(name: str) -> Any:
    folder = resources.files("chatrt_drafts.training") / "data"
    return json.loads((folder / name).read_text(encoding="utf-8"))


def write_seeds(folder: Path, template: str) -> Path:
    """Data files whose one template and one follow-up are `template`."""
    files = {
        "instructions.json": [],
        "templates.json": {"templates": [template], "fillers": _FILLERS},
        "follow_ups.json": [template],
        "systems.json": [],
        "remarks.json": {"openers": [], "closers": []},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_there_are_enough_turns_of_each_kind_and_none_twice() -> None:
    data = bundled("templates.json")
    least = {"instructions.json": 400, "follow_ups.json": 150, "systems.json": 30}
    lists = {name: bundled(name) for name in least} | {"templates": data["templates"]}
    for name, entries in lists.items():
        assert len(entries) >= least.get(name, 200), name
        assert len(set(entries)) == len(entries), name
        assert all(entry == entry.strip() != "" for entry in entries), name
    assert sum(len(entry) > 150 for entry in lists["instructions.json"]) >= 80


def test_filler_lists_are_long_and_every_one_is_used() -> None:
    data = bundled("templates.json")
    fillers = data["fillers"]
    assert len(fillers) >= 40
    assert all(20 <= len(set(entries)) == len(entries) <= 150 for entries in fillers.values())
    passages = fillers["passage"]
    assert len(passages) >= 60
    assert all(30 <= len(passage.split()) <= 120 for passage in passages)
    text = "\n".join(data["templates"] + bundled("follow_ups.json"))
    assert [name for name in fillers if f"{{{name}}}" not in text] == []


def test_no_slot_stays_open() -> None:
    turns = SeedTurns()
    rng = random.Random(1)
    drawn = [turns.draw(rng) for _ in range(2_000)]
    drawn += [turns.draw_follow_up(rng) for _ in range(2_000)]
    assert [text for text in drawn if _SLOT.search(text) or not text.strip()] == []


def test_the_same_generator_draws_the_same_turns() -> None:
    def draws(seed: int) -> list[str]:
        turns = SeedTurns()
        rng = random.Random(seed)
        kinds = (turns.draw, turns.draw_follow_up, turns.draw_system)
        return [kinds[i % 3](rng) for i in range(300)]

    assert draws(7) == draws(7)
    assert draws(7) != draws(8)


def test_turns_rarely_repeat() -> None:
    turns = SeedTurns()
    rng = random.Random(2)
    assert len({turns.draw(rng) for _ in range(5_000)}) >= 0.95 * 5_000


def test_a_list_that_occurs_twice_gives_different_entries(tmp_path: Path) -> None:
    turns = SeedTurns(write_seeds(tmp_path, "{fruit} or {fruit}"))
    rng = random.Random(3)
    drawn = {turns.draw_follow_up(rng) for _ in range(100)}
    assert drawn == {"A fig or a plum", "A plum or a fig"}


def test_numbers_reach_both_ends_of_their_range(tmp_path: Path) -> None:
    turns = SeedTurns(write_seeds(tmp_path, "Is {number:9..11} odd?"))
    rng = random.Random(4)
    assert {turns.draw_follow_up(rng) for _ in range(100)} == {
        f"Is {number} odd?" for number in (9, 10, 11)
    }


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("Eat {vegetable}.", "no filler list is called 'vegetable'"),
        ("Eat {Fruit}.", "no filler list is called 'Fruit'"),
        ("Add {number:2-9}.", "no filler list is called 'number:2-9'"),
        ("Add {number:9..2}.", "9 is above 2"),
        ("{fruit}, {fruit}, {fruit}", "3 places for the 2 entries of {fruit}"),
    ],
)
def test_a_template_that_cannot_be_filled_is_refused_by_name(
    tmp_path: Path, template: str, reason: str
) -> None:
    with pytest.raises(InvalidValue, match=re.escape(reason)) as caught:
        SeedTurns(write_seeds(tmp_path, template))
    assert repr(template) in caught.value.message
