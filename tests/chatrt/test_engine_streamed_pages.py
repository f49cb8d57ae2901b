"""An engine whose pages leave and come back beside its steps: late copies harm nothing."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from chatrt.archive import DiskPages, Fault, PageRecord
from chatrt.params import SamplingParams
from chatrt.testing.engine import (
    PAGE_SIZE,
    outcomes,
    run_until_idle,
    turn_request,
)
from chatrt.turn import FinishReason
from tests.chatrt.archiving_support import (
    PROMPT,
    TIMEOUT_S,
    kept,
    world,
    world_beside,
    write_prompt,
)
from tests.chatrt.engine_support import ColdRuns

if TYPE_CHECKING:
    from pathlib import Path

    from chatrt.testing.streams import LateStream
    from chatrt.text.tokenizer import Tokenizer
    from chatrt.turn import TurnRequest
    from tests.chatrt.archiving_support import OpenWorld, World

NUM_FULL = len(PROMPT) // PAGE_SIZE


@pytest.fixture(scope="module")
def cold(tokenizer: Tokenizer) -> ColdRuns:
    return ColdRuns(tokenizer)


def beside(here: World) -> LateStream:
    assert here.beside is not None
    return here.beside


def run(here: World, request: TurnRequest) -> None:
    """A whole turn, during which no copy is done unless a step needs it."""
    here.engine.submit(request)
    run_until_idle(here.engine)


def begin(here: World, request: TurnRequest) -> None:
    """Start a turn until the pages that it asked for are on their way to the device, all of them.

    No pass of it was made.
    """
    here.engine.submit(request)
    assert here.engine.step()
    while not here.engine._take_restored():
        assert here.engine.poll_s == 0.0 or here.news.wait(TIMEOUT_S)
        here.news.clear()
    assert len(beside(here)) > 0


def files(folder: Path) -> dict[str, bytes]:
    """What is on disk, by name, locks left out."""
    return {
        path.name: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.stat().st_size > 500
    }


@pytest.mark.parametrize(
    ("before", "after"), [(world, world_beside), (world_beside, world)], ids=["in", "out"]
)
def test_what_one_way_of_copying_wrote_the_other_restores(
    before: OpenWorld, after: OpenWorld, tokenizer: Tokenizer, cold: ColdRuns, tmp_path: Path
) -> None:
    num_pages = write_prompt(before, tokenizer, tmp_path)
    with after(tokenizer, tmp_path) as here:
        request = kept("b", [*PROMPT, 5])
        found = here.run(replace(request))
        assert found.end.kv.restored_tokens == NUM_FULL * PAGE_SIZE
        assert num_pages >= NUM_FULL
        cold.assert_equal(request, found)


def test_both_ways_of_copying_write_the_same_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name, open_world in (("at once", world), ("beside", world_beside)):
        (tmp_path / name).mkdir()
        write_prompt(open_world, tokenizer, tmp_path / name)
    assert files(tmp_path / "at once") == files(tmp_path / "beside") != {}


def test_turns_go_on_while_copies_out_are_late_and_nothing_waits_for_them(
    tokenizer: Tokenizer, cold: ColdRuns, tmp_path: Path
) -> None:
    with world_beside(tokenizer, tmp_path) as here:
        run(here, kept("a", PROMPT))
        assert len(beside(here)) > 0
        for name in ("b", "c"):
            request = kept(name, [*name.encode(), *PROMPT])
            here.engine.submit(replace(request))
            cold.assert_equal(request, outcomes(run_until_idle(here.engine))[name])
        assert here.num_on_disk() == 0
        assert beside(here).num_stalls == beside(here).num_host_waits == 0
        assert here.engine.poll_s is not None
        here.settle()
        assert here.num_on_disk() >= 3 * NUM_FULL
        assert here.engine.poll_s is None


def test_pages_that_are_evicted_and_written_anew_before_their_copy_is_done_are_kept_as_they_were(
    tokenizer: Tokenizer, cold: ColdRuns, tmp_path: Path
) -> None:
    with world_beside(tokenizer, tmp_path, num_pages=8) as here:
        run(here, kept("a", PROMPT))
        num_leaving = len(beside(here))
        assert num_leaving > 0
        for number in range(3):
            run(here, turn_request(f"other {number}", [number + 1, *PROMPT]))
        assert here.engine.sessions.figures().evicted >= NUM_FULL
        assert len(beside(here)) == num_leaving  # not one was done for it
        here.settle()
        assert here.num_on_disk() > 0
        request = kept("b", [*PROMPT, 5])
        found = here.run(replace(request))
        assert found.end.kv.restored_tokens == here_restores(here) > 0
        cold.assert_equal(request, found)


def here_restores(here: World) -> int:
    return here.archive.figures().num_read_from_disk * PAGE_SIZE


def test_a_kill_while_copies_are_under_way_leaves_what_was_written_whole(
    tokenizer: Tokenizer, cold: ColdRuns, tmp_path: Path
) -> None:
    with world_beside(tokenizer, tmp_path) as here:
        run(here, kept("a", PROMPT))
        for _ in range(3):  # of the first copy: wait for its pages, copy, say so
            assert beside(here).advance()
        while here.engine.step():
            assert here.archive.flush(TIMEOUT_S)
        num_written = here.num_on_disk()
        assert 0 < num_written < NUM_FULL
        assert len(beside(here)) > 0
        # killed: neither a step nor a copy follows
    with world_beside(tokenizer, tmp_path) as after:
        request = kept("b", [*PROMPT, 5])
        found = after.run(replace(request))
        assert found.end.kv.restored_tokens == num_written * PAGE_SIZE
        cold.assert_equal(request, found)


def test_pages_that_come_back_late_are_waited_for_by_the_pass_that_reads_them_and_on_the_device(
    tokenizer: Tokenizer, cold: ColdRuns, tmp_path: Path
) -> None:
    write_prompt(world, tokenizer, tmp_path)
    with world_beside(tokenizer, tmp_path) as here:
        request, other = kept("b", [*PROMPT, 5]), turn_request("c", list(b"another one"))
        here.engine.submit(replace(other))
        assert here.engine.step()
        begin(here, replace(request))
        assert beside(here).num_stalls == 0
        found = outcomes(run_until_idle(here.engine))
        assert beside(here).num_stalls > 0
        assert beside(here).num_host_waits == 0
        assert found["b"].end.kv.restored_tokens == NUM_FULL * PAGE_SIZE
        cold.assert_equal(request, found["b"])
        cold.assert_equal(other, found["c"])


def test_a_pass_that_does_not_read_them_does_not_wait_for_pages_on_their_way(
    tokenizer: Tokenizer, cold: ColdRuns, tmp_path: Path
) -> None:
    write_prompt(world, tokenizer, tmp_path)
    with world_beside(tokenizer, tmp_path) as here:
        begin(here, kept("b", [*PROMPT, 5]))
        assert here.engine.cancel("b")
        here.engine.take_events()
        num_under_way = len(beside(here))
        request = turn_request("c", list(b"something else, which is longer than a page or two"))
        here.engine.submit(replace(request))
        cold.assert_equal(request, outcomes(run_until_idle(here.engine))["c"])
        assert beside(here).num_stalls == 0
        assert len(beside(here)) >= num_under_way


def test_more_pages_than_are_taken_at_once_are_asked_for_again_without_a_pause(
    tokenizer: Tokenizer, cold: ColdRuns
) -> None:
    with world_beside(tokenizer, None, num_pages=10, host_bytes=2**24) as here:
        here.run(kept("a", PROMPT))
        here.settle()
        for number in range(3):
            run(here, turn_request(f"other {number}", [number + 1, *PROMPT]))
        request = kept("b", [*PROMPT, 5])
        here.engine.submit(replace(request))
        assert here.engine.step()
        assert not here.engine._take_restored()  # three of four
        assert here.engine.poll_s == 0.0
        found = here.until_ended("b")
        assert found.end.kv.restored_tokens == NUM_FULL * PAGE_SIZE
        cold.assert_equal(request, found)
        here.settle()
        assert here.engine.poll_s is None


def test_a_fork_inside_a_page_that_is_on_its_way_copies_it_when_it_is_there(
    tokenizer: Tokenizer, cold: ColdRuns, tmp_path: Path
) -> None:
    write_prompt(world, tokenizer, tmp_path)
    with world_beside(tokenizer, tmp_path) as here:
        begin(here, kept("b", [*PROMPT, 5]))
        assert here.engine.cancel("b")
        # known now, and not there yet: rows of its second page are copied for this one
        request = kept("c", [*PROMPT[: PAGE_SIZE + 9], *b"!!"])
        found = here.run(replace(request))
        assert found.end.kv.reused_tokens == PAGE_SIZE + 9
        assert beside(here).num_host_waits == 0
        cold.assert_equal(request, found)


def test_a_turn_that_is_cancelled_while_its_pages_come_gives_them_to_the_next_at_once(
    tokenizer: Tokenizer, cold: ColdRuns, tmp_path: Path
) -> None:
    write_prompt(world, tokenizer, tmp_path)
    with world_beside(tokenizer, tmp_path, num_pages=9) as here:
        begin(here, kept("b", [*PROMPT, 5]))
        assert here.engine.cancel("b")
        here.engine.forget(["b"])
        assert here.engine.sessions.num_free == 9
        for name in ("c", "d"):  # all pages are written anew, and read again
            request = turn_request(name, [*name.encode(), *PROMPT, *PROMPT[:30]])
            found = here.run(replace(request))
            cold.assert_equal(request, found)
        beside(here).finish()
        request = turn_request("e", [*b"d", *PROMPT, *PROMPT[:30], 5])
        cold.assert_equal(request, here.run(replace(request)))


def test_what_is_deleted_while_its_copy_is_under_way_is_never_written(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with world_beside(tokenizer, tmp_path) as here:
        here.engine.submit(kept("a", PROMPT))
        events = run_until_idle(here.engine)
        ids = [*PROMPT, *outcomes(events)["a"].end.output_ids]
        assert len(beside(here)) > 0
        here.engine.forget(["a"], [("", ids)])
        assert here.engine.sessions.num_free == here.engine.sessions.num_pages
        here.settle()
        assert here.num_on_disk() == 0
        assert files(tmp_path) == {}


def test_deleting_one_end_of_a_path_spares_the_front_that_another_needs(
    tokenizer: Tokenizer, cold: ColdRuns, tmp_path: Path
) -> None:
    ends = {name: [*PROMPT[:PAGE_SIZE], *name.encode(), *PROMPT[:17]] for name in ("a", "b")}
    with world_beside(tokenizer, tmp_path) as here:
        for name, ids in ends.items():
            run(
                here, kept(name, ids, sampling=SamplingParams(temperature=0.0, max_output_tokens=1))
            )
        assert len(beside(here)) > 0
        assert not here.engine.step()  # all are on their way
        here.engine.forget(["a"], [("", ends["a"])])
        here.settle()
    with world_beside(tokenizer, tmp_path) as after:
        for name, num_pages in (("b", 2), ("a", 1)):
            request = kept(name, [*ends[name], 5], salt="")
            found = after.run(replace(request))
            assert found.end.kv.reused_tokens == num_pages * PAGE_SIZE
            cold.assert_equal(request, found)
            after.engine.forget([name])


def test_a_page_whose_copy_is_under_way_is_not_copied_for_the_next_turn_again(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with world_beside(tokenizer, tmp_path) as here:
        run(here, kept("a", PROMPT[:33]))
        num_under_way = len(beside(here))
        assert num_under_way > 0
        run(here, kept("b", PROMPT[:34]))
        assert len(beside(here)) == num_under_way


def test_no_more_copies_begin_than_a_slow_disk_takes(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, write = threading.Event(), DiskPages.write

    def write_late(disk: DiskPages, record: PageRecord, payload: bytes) -> Fault | None:
        answers.wait(TIMEOUT_S)
        return write(disk, record, payload)

    monkeypatch.setattr(DiskPages, "write", write_late)
    ids = [*PROMPT, *PROMPT, *PROMPT]
    with world_beside(tokenizer, tmp_path) as here:
        run(here, kept("a", ids))
        while here.engine.step() or here.finish_copies():
            pass
        assert here.archive.num_room == 0
        answers.set()
        here.settle()
        assert here.num_on_disk() >= len(ids) // PAGE_SIZE


def test_the_last_call_waits_for_copies_and_writes_all_that_is_left(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with world_beside(tokenizer, tmp_path) as here:
        run(here, kept("a", PROMPT))
        assert here.num_on_disk() == 0
        here.engine.close(time_ms=1e9)
        assert here.archive.flush(TIMEOUT_S)
        assert here.num_on_disk() >= NUM_FULL
        assert beside(here).num_host_waits > 0


@pytest.mark.parametrize("seed", range(6))
def test_conversations_in_a_small_pool_say_what_they_say_alone_however_late_copies_are(
    seed: int, tokenizer: Tokenizer, cold: ColdRuns
) -> None:
    chance = random.Random(seed)
    with world_beside(tokenizer, None, num_pages=14, host_bytes=2**24) as here:
        histories: dict[str, list[int]] = {"x": [], "y": [], "z": []}
        for number in range(24):
            name = chance.choice(list(histories))
            ids = [
                *histories[name],
                *f"{name} {number} ".encode(),
                *PROMPT[: chance.randint(1, 20)],
            ]
            if len(ids) > 150:
                ids = ids[-40:]
            request = kept(f"{name}{number}", ids)
            here.engine.submit(replace(request))
            is_cut = chance.random() < 0.25
            found = outcomes(here.engine.take_events())
            response_id, steps = request.response_id, 0
            while response_id not in found or found[response_id].finished is None:
                worked = here.engine.step()
                outcomes(here.engine.take_events(), found)
                for _ in range(chance.choice((0, 0, 1, 5))):
                    beside(here).advance()
                if not worked:
                    here.finish_copies()
                steps += 1
                if is_cut and steps == 3 and found.get(response_id) is not None:
                    here.engine.cancel(response_id)
            here.engine.sessions.check_invariants()
            outcome = found[response_id]
            if outcome.end.reason is not FinishReason.CANCELLED:
                cold.assert_equal(request, outcome)
                histories[name] = [*ids, *outcome.end.output_ids]
            for _ in range(chance.choice((0, 10, 40))):
                here.engine.step()
                beside(here).advance()
        assert beside(here).num_host_waits == 0
        assert here.archive.figures().num_read_from_host > 0
