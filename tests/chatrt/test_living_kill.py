"""A server that is killed while it answers, and what the next one finds in its folder."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from chatrt.archive import child_key, root_key
from chatrt.testing.engine import PAGE_SIZE
from chatrt.testing.tokenizer import tiny_tokenizer
from tests.chatrt.living_oracle import Oracle
from tests.chatrt.living_process import ServerProcess
from tests.chatrt.living_server import FINGERPRINT, KEYS, Size
from tests.chatrt.living_support import Clients, Line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.chatrt.living_turns import Turn

pytestmark = pytest.mark.slow

NUM_PAGES = 40
TEXTS = (
    "amber: the moon is made of cheese, and all of this is told at length",
    "birch: hello world, and what if all of this were told",
    "coral: why is it that the sea is made of salt?",
)


def num_on_disk(folder: Path, turn: Turn) -> int:
    """Tokens of the turn's sequence that lie in page files, from its front on."""
    files = {path.name.split(".")[0] for path in (folder / "pages").rglob("*.kv")}
    with closing(sqlite3.connect(folder / "chats.sqlite")) as store:
        sql = "SELECT key_id FROM turns WHERE response_id = ?"
        (salt,) = store.execute(sql, (turn.response_id,)).fetchone()
    key, ids, num_tokens = root_key(FINGERPRINT, salt), turn.sequence_ids, 0
    for end in range(PAGE_SIZE, len(ids) + 1, PAGE_SIZE):
        key = child_key(key, ids[end - PAGE_SIZE : end])
        if key.hex() not in files:
            break
        num_tokens = end
    return num_tokens


def ask_all(clients: Clients, line: Line, tips: Sequence[Turn | None]) -> list[Turn]:
    """One more turn of each conversation, all at once, to their ends."""
    turns = []
    for text, tip in zip(TEXTS, tips, strict=True):
        fields: dict[str, Any] = {}
        if tip is not None:
            fields["previous_response_id"] = tip.response_id
        lane = text[:5]
        said = text if tip is None else "And?"
        turns.append(clients.ask(line, lane, said, parents=[tip], max_output_tokens=20, **fields))
    clients.until(lambda: all(turn.end is not None for turn in turns), lambda: turns)
    return turns


def be_in_the_middle(clients: Clients, line: Line) -> list[Turn]:
    """Long answers, of which at least one has begun."""
    turns = [clients.ask(line, f"long-{text[:5]}", text, max_output_tokens=150) for text in TEXTS]
    clients.until(lambda: any(one.deltas for t in turns for one in t.readings), lambda: turns)
    return turns


def test_after_kill_9_in_the_middle_of_answers_each_conversation_goes_on_from_what_was_written(
    tmp_path: Path,
) -> None:
    tokenizer_folder, folder = tmp_path / "tokenizer", tmp_path / "server"
    oracle = Oracle(tiny_tokenizer(tokenizer_folder), Size(num_pages=NUM_PAGES))
    clients = Clients(lambda: None)
    tips: list[Turn | None] = [None] * len(TEXTS)
    written = [0] * len(TEXTS)
    process = ServerProcess.start(tokenizer_folder, folder, num_pages=NUM_PAGES)
    try:
        for _ in range(3):
            clients.port = process.port
            line = clients.connect(KEYS[0])
            turns = ask_all(clients, line, tips)
            oracle.check(turns)
            for turn, num_written in zip(turns, written, strict=True):
                assert turn.end is not None
                kv = turn.end["chatrt"]["kv"]
                # Of its first page some rows may have been another conversation's.
                assert kv["reused_tokens"] >= num_written
                assert kv["restored_tokens"] > num_written - PAGE_SIZE
            lost = be_in_the_middle(clients, line)
            process.kill()
            clients.drop(line, "abort")
            written = [num_on_disk(folder, turn) for turn in turns]
            tips = [*turns]
            process = ServerProcess.start(tokenizer_folder, folder, num_pages=NUM_PAGES)
            clients.port = process.port
            for turn in [*turns, *lost]:  # whole, or not there at all
                reply = clients.http("GET", f"/v1/responses/{turn.response_id}", turn.key)
                if reply.status == 404:
                    assert turn.end is None, turn
                elif turn.end is not None:
                    assert reply.body["usage"] == turn.end["usage"]
        assert sum(written) > 0
    finally:
        clients.close()
        process.kill()
