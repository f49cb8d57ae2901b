"""Pages that are written behind an answer, and what a turn finds of them after a restart.

Copied at once, as on a CPU, and beside the steps, as on a GPU, where copies are done when nothing
else is left to do.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from chatrt.archive import DiskPages, Fault, PageRecord
from chatrt.testing.engine import PAGE_SIZE, Outcome, outcomes, turn_request
from chatrt.turn import FinishReason, TurnKind
from tests.chatrt import archiving_support
from tests.chatrt.archiving_support import PROMPT, TIMEOUT_S, kept, write_prompt
from tests.chatrt.engine_support import ColdRuns

if TYPE_CHECKING:
    from pathlib import Path

    from chatrt.text.tokenizer import Tokenizer
    from tests.chatrt.archiving_support import OpenWorld


@pytest.fixture(params=["world", "world_beside"])
def world(request: pytest.FixtureRequest) -> OpenWorld:
    opened: OpenWorld = getattr(archiving_support, request.param)
    return opened


@pytest.fixture(scope="module")
def cold(tokenizer: Tokenizer) -> ColdRuns:
    return ColdRuns(tokenizer)


def test_after_a_restart_the_next_turn_reuses_all_that_was_written(
    world: OpenWorld, tokenizer: Tokenizer, cold: ColdRuns, tmp_path: Path
) -> None:
    with world(tokenizer, tmp_path) as before:
        first = before.run(kept("a", PROMPT))
        before.settle()
        num_written = before.num_on_disk() * PAGE_SIZE
    ids = [*PROMPT, *first.end.output_ids]
    assert num_written == (len(ids) - 1) // PAGE_SIZE * PAGE_SIZE
    request = kept("b", [*ids, *b"and why?"], num_history=len(ids), parent_id="a")
    with world(tokenizer, tmp_path) as after:
        found = after.run(replace(request))
        assert found.end.kv.restored_tokens == found.end.kv.reused_tokens == num_written
        assert found.end.kv.prefix == "restored"
        assert found.end.kv.restored_from == "disk"
        assert found.end.kv.computed_tokens == len(request.token_ids) - num_written
        cold.assert_equal(request, found)


def test_what_is_written_is_only_what_may_be_kept(
    world: OpenWorld, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with world(tokenizer, tmp_path) as here:
        here.run(replace(kept("private", PROMPT), archived=False))
        typed = replace(kept("typed", PROMPT), kind=TurnKind.TYPED_AHEAD, typed_ahead_key="lane")
        here.run(typed)
        here.settle()
        assert here.num_on_disk() == 0


def test_a_shared_front_is_written_once(
    world: OpenWorld, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with world(tokenizer, tmp_path) as here:
        here.run(kept("a", PROMPT))
        here.settle()
        num_before = here.num_on_disk()
        here.run(kept("b", [*PROMPT[: 3 * PAGE_SIZE], *b"another end of it, which is as long"]))
        here.settle()
        assert here.num_on_disk() - num_before < num_before


def test_pages_that_were_evicted_come_back_from_host_memory(
    world: OpenWorld, tokenizer: Tokenizer, cold: ColdRuns
) -> None:
    with world(tokenizer, None, num_pages=12, host_bytes=2**24) as here:
        first = here.run(kept("a", PROMPT))
        here.settle()
        for number in range(3):
            here.run(turn_request(f"other {number}", [number + 1, *PROMPT]))
        ids = [*PROMPT, *first.end.output_ids]
        request = kept("b", [*ids, 5], num_history=len(ids), parent_id="a")
        found = here.run(replace(request))
        assert found.end.kv.restored_from == "host"
        assert found.end.kv.computed_tokens <= PAGE_SIZE
        assert found.end.kv.miss_reason is None
        cold.assert_equal(request, found)


def test_other_turns_go_on_while_pages_are_on_their_way(
    world: OpenWorld, tokenizer: Tokenizer, cold: ColdRuns, tmp_path: Path
) -> None:
    write_prompt(world, tokenizer, tmp_path)
    with world(tokenizer, tmp_path) as after:
        request, other = kept("b", [*PROMPT, 5]), turn_request("c", list(b"another one"))
        after.engine.submit(replace(other))
        after.engine.submit(replace(request))
        found: dict[str, Outcome] = {}
        while len(found) < 2 or any(one.finished is None for one in found.values()):
            after.engine.step()
            outcomes(after.engine.take_events(), found)
        cold.assert_equal(request, found["b"])
        cold.assert_equal(other, found["c"])


def test_a_turn_that_is_cancelled_while_its_pages_are_on_their_way_leaves_nothing_behind(
    world: OpenWorld, tokenizer: Tokenizer, cold: ColdRuns, tmp_path: Path
) -> None:
    write_prompt(world, tokenizer, tmp_path)
    with world(tokenizer, tmp_path) as after:
        after.engine.submit(kept("b", [*PROMPT, 5]))
        after.engine.step()
        assert after.engine.cancel("b")
        ended = outcomes(after.engine.take_events())["b"].end
        assert ended.reason is FinishReason.CANCELLED
        after.engine.forget(["b"])
        assert after.engine.sessions.num_free + after.engine.sessions.num_evictable == 64
        request = kept("c", [*PROMPT, 5])
        cold.assert_equal(request, after.run(replace(request)))


def test_a_damaged_page_ends_what_is_restored_and_the_rest_is_computed(
    world: OpenWorld, tokenizer: Tokenizer, cold: ColdRuns, tmp_path: Path
) -> None:
    num_pages = write_prompt(world, tokenizer, tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.stat().st_size > 500 and path.is_file()]
    assert len(files) == num_pages
    for path in files[::2]:
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 1
        path.write_bytes(damaged)
    with world(tokenizer, tmp_path) as after:
        request = kept("b", [*PROMPT, 5])
        found = after.run(replace(request))
        assert found.end.kv.restored_tokens < num_pages * PAGE_SIZE
        cold.assert_equal(request, found)


def test_deleting_wipes_what_was_written_and_what_was_about_to_be(
    world: OpenWorld, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with world(tokenizer, tmp_path) as here:
        first = here.run(kept("a", PROMPT))
        here.engine.step()
        here.engine.forget(["a"], [("", [*PROMPT, *first.end.output_ids])])
        here.settle()
        assert here.num_on_disk() == 0
        assert here.engine.sessions.num_free == 64
        second = here.run(kept("b", PROMPT))
        here.settle()
        assert here.num_on_disk() > 0
        here.engine.forget(["b"], [("", [*PROMPT, *second.end.output_ids])])
        assert here.archive.flush(TIMEOUT_S)
        assert here.num_on_disk() == 0


def test_without_room_for_the_pages_the_turn_is_computed_instead(
    world: OpenWorld, tokenizer: Tokenizer, cold: ColdRuns, tmp_path: Path
) -> None:
    write_prompt(world, tokenizer, tmp_path)
    with world(tokenizer, tmp_path, num_pages=7) as after:
        request = kept("b", [*PROMPT, 5])
        found = after.run(replace(request))
        cold.assert_equal(request, found)


def test_other_keys_restore_nothing(world: OpenWorld, tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_prompt(world, tokenizer, tmp_path)
    with world(tokenizer, tmp_path) as after:
        found = after.run(kept("b", [*PROMPT, 5], salt="another"))
        assert found.end.kv.restored_tokens == found.end.kv.reused_tokens == 0


def test_a_disk_that_hangs_delays_a_turn_for_two_seconds_and_no_more(
    world: OpenWorld,
    tokenizer: Tokenizer,
    cold: ColdRuns,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_prompt(world, tokenizer, tmp_path)
    answers = threading.Event()
    read = DiskPages.read
    with world(tokenizer, tmp_path) as after:

        def read_late(disk: DiskPages, record: PageRecord) -> bytearray | Fault:
            answers.wait(TIMEOUT_S)
            return read(disk, record)

        monkeypatch.setattr(DiskPages, "read", read_late)
        request = kept("b", [*PROMPT, 5])
        after.engine.submit(replace(request))
        assert after.engine.step()
        assert not after.engine.step()
        assert after.engine.poll_s is not None
        start_ns = after.engine._clock()
        monkeypatch.setattr(after.engine, "_clock", lambda: start_ns + 2 * 10**9 + 10**6)
        found = after.until_ended("b")
        answers.set()
        assert found.end.kv.restored_tokens == 0
        after.settle()
        assert after.engine.poll_s is None
        cold.assert_equal(request, found)
