"""What is on disk: nothing of what was deleted, no holes, and a backlog that ends."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from chatrt.archive import Fault, child_key, root_key
from chatrt.testing.engine import PAGE_SIZE, run_until_idle, turn_request
from chatrt.turn import TurnKind
from tests.chatrt import archiving_support
from tests.chatrt.archiving_support import PROMPT, kept

if TYPE_CHECKING:
    from pathlib import Path

    from chatrt.archive import PageKey
    from chatrt.text.tokenizer import Tokenizer
    from tests.chatrt.archiving_support import OpenWorld, World

GLUE = list(b"|end||user|")


@pytest.fixture(params=["world", "world_beside"])
def world(request: pytest.FixtureRequest) -> OpenWorld:
    opened: OpenWorld = getattr(archiving_support, request.param)
    return opened


def keys_of(token_ids: list[int]) -> list[PageKey]:
    keys = [root_key("tiny", "")]
    for start in range(0, len(token_ids) - PAGE_SIZE + 1, PAGE_SIZE):
        keys.append(child_key(keys[-1], token_ids[start : start + PAGE_SIZE]))
    return keys[1:]


def one_turn(here: World) -> list[int]:
    """The ids of a turn whose pages are not written yet."""
    ended = here.run(kept("a", PROMPT)).end
    return [*PROMPT, *ended.output_ids]


def test_a_deleted_turn_is_not_written_later_because_someone_was_typing_behind_it(
    world: OpenWorld, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with world(tokenizer, tmp_path) as here:
        ids = one_turn(here)
        typed = kept("typed", [*ids, *GLUE, *b"and w"], num_history=len(ids), parent_id="a")
        here.engine.submit(replace(typed, kind=TurnKind.TYPED_AHEAD, typed_ahead_key="lane"))
        here.engine.step()
        here.engine.forget(["a"], [("", ids)])
        here.settle()
        assert here.num_on_disk() == 0
        run_until_idle(here.engine)
        assert here.engine.sessions.num_free == here.engine.sessions.num_pages


def test_a_deleted_turn_is_not_written_later_because_its_next_one_was_being_prepared(
    world: OpenWorld, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with world(tokenizer, tmp_path) as here:
        ids = one_turn(here)
        request = kept("p", [*ids, *PROMPT, *PROMPT[:60]], parent_id="a")  # several steps
        here.engine.prepare(replace(request, kind=TurnKind.PREPARED))
        here.engine.step()
        here.engine.forget(["a"], [("", ids)])
        here.settle()
        assert here.num_on_disk() == 0
        assert here.engine.sessions.num_free == here.engine.sessions.num_pages


def test_a_deletion_leaves_the_pages_on_which_another_waiting_turn_builds(
    world: OpenWorld, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with world(tokenizer, tmp_path) as here:
        ids = one_turn(here)
        front = PROMPT[: 3 * PAGE_SIZE]
        here.settle()
        request = kept("b", [*front, *b"another end of it, which is as long"])
        # Beside a stream pages are written now and then only: none of it is yet.
        long = replace(request.sampling, max_output_tokens=100, ignore_eos=True)
        here.engine.submit(turn_request("stream", list(b"hello"), sampling=long))
        few = replace(request.sampling, max_output_tokens=2)
        other = here.run(replace(request, sampling=few)).end
        assert not any(here.archive.knows(key) for key in keys_of(request.token_ids)[3:])
        here.engine.forget(["a"], [("", ids)])
        here.settle()
        whole = [*request.token_ids, *other.output_ids]
        assert all(here.archive.knows(key) for key in keys_of(whole[:-1]))
        assert not any(here.archive.knows(key) for key in keys_of(ids)[3:])


def test_a_damaged_page_in_the_middle_is_written_again_behind_the_next_turn(
    world: OpenWorld, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with world(tokenizer, tmp_path) as before:
        ids = one_turn(before)
        before.settle()
    keys = keys_of(ids[:-1])
    (file,) = tmp_path.rglob(f"{keys[2].hex()}.*")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with world(tokenizer, tmp_path) as after:
        after.run(kept("b", [*ids, 5], num_history=len(ids), parent_id="a"))
        after.settle()
        assert after.archive.figures().failures == {Fault.DAMAGED: 1}
    with world(tokenizer, tmp_path) as again:
        found = again.run(kept("c", [*ids, 6], num_history=len(ids), parent_id="a"))
        assert found.end.kv.restored_tokens == len(keys) * PAGE_SIZE


def test_turns_without_a_pause_do_not_pile_up_what_is_to_be_written(
    world: OpenWorld, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with world(tokenizer, tmp_path, num_pages=12) as here:
        here.archive.close(30.0)  # as a full disk: nothing is taken
        for number in range(40):
            here.run(kept(f"turn {number}", [number, *PROMPT]))
        archiving = here.engine._archiving
        assert archiving is not None
        assert len(archiving._backlog) <= 3 * 12


def test_the_end_does_not_wait_for_a_disk_that_takes_nothing(
    world: OpenWorld, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with world(tokenizer, tmp_path) as here:
        one_turn(here)
        here.archive.close(30.0)  # as a full disk: nothing is taken
        archiving = here.engine._archiving
        assert archiving is not None
        num_asked = 0

        def clock() -> int:
            nonlocal num_asked
            num_asked += 1
            return time.perf_counter_ns()

        archiving.finish(clock, time_ms=500.0)
        assert num_asked < 10
