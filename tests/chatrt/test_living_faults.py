"""What the random machine found against the running server, each by its symptom."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from chatrt.testing.tokenizer import tiny_tokenizer
from tests.chatrt.living_oracle import Oracle
from tests.chatrt.living_server import KEYS, Size
from tests.chatrt.living_turns import PARTIAL
from tests.chatrt.living_world import World

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

QUESTION = "the moon is made of cheese, the sea of salt, and all of it was told before, twice"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    tokenizer, size = tiny_tokenizer(tmp_path / "tokenizer"), Size()
    world = World(tokenizer, tmp_path / "server", size, Oracle(tokenizer, size))
    yield world
    world.close()


@pytest.mark.parametrize("parent_first", [True, False])
def test_of_a_turn_whose_parent_was_deleted_before_it_no_page_files_stay(
    world: World, *, parent_first: bool
) -> None:
    line = world.clients.connect(KEYS[0])
    first = world.ask(line, "one", QUESTION)
    world.settle()
    second = world.ask(
        line, "one", "And why?", parents=[first], previous_response_id=first.response_id
    )
    world.settle()
    assert world.server.num_page_files() > 0
    for turn in (first, second) if parent_first else (second, first):
        world.delete(turn)
    assert world.server.num_page_files() == 0
    world.finish()


def test_pages_of_a_deleted_turn_are_not_written_because_a_half_typed_prompt_shares_them(
    world: World,
) -> None:
    line = world.clients.connect(KEYS[0])
    world.ask(line, "one", QUESTION, kind=PARTIAL)
    world.settle()
    world.server.pace.hold()
    turn = world.ask(line, "two", QUESTION, max_output_tokens=2)
    world.clients.until(lambda: turn.end is not None, lambda: turn)
    world.delete(turn)
    world.settle()
    assert world.server.num_page_files() == 0
    world.finish()


def test_what_is_deleted_when_the_engine_has_ended_already_leaves_no_page_files(
    world: World,
) -> None:
    line = world.clients.connect(KEYS[0])
    turn = world.ask(line, "one", QUESTION)
    world.settle()
    assert world.server.num_page_files() > 0
    server, (key_id,) = world.server, {one.key_id for one in world.server.server._connections}
    server.run(server.host.stop())
    server.run(server.service._upkeep.wipe([str(turn.response_id)], [(key_id, turn.sequence_ids)]))
    assert server.num_page_files() == 0
