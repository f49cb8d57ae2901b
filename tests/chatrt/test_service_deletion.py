"""A deletion leaves nothing of what was said: no page, no id, no word, in no file."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from chatrt.archive import Archive, DiskPages
from chatrt.engine.archiving import Archiving
from chatrt.errors import NotFound
from chatrt.host import EngineHost
from chatrt.metrics import Metrics
from chatrt.page_bytes import PageBytes
from chatrt.params import SamplingParams
from chatrt.service import ChatService, ServiceSettings
from chatrt.store import Store
from chatrt.testing.engine import PAGE_SIZE, engine_over, tiny_target
from chatrt.wire.messages import ConversationCreate
from tests.chatrt.service_support import KEY, MODEL, Chat, context, ended, has_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from chatrt.text.tokenizer import Tokenizer

SECRET = "the moon is made of cheese, the sea of salt and everything else of sand"
PATIENCE_S = 30.0


@asynccontextmanager
async def archived(
    tokenizer: Tokenizer,
    folder: Path,
    *,
    fingerprint: str = "tiny",
    share_prefixes: bool = False,
    max_context: int = 512,
) -> AsyncIterator[Chat]:
    """A service whose turns and pages are kept in `folder`."""
    target = tiny_target(tokenizer, num_pages=96, max_context=max_context)
    engine = engine_over(target, max_context=max_context)
    host = EngineHost(engine)
    page_bytes = PageBytes([target.kv])
    archive = Archive(
        page_bytes=page_bytes.num_bytes,
        page_size=PAGE_SIZE,
        fingerprint=fingerprint,
        host_bytes=0,
        disk=DiskPages(folder / "kv", max_bytes=2**26),
        wake=host.wake,
    )
    engine.keep_pages_in(Archiving(archive, page_bytes, engine.sessions, fingerprint=fingerprint))
    assert await asyncio.to_thread(archive.wait_ready, PATIENCE_S)
    host.start()
    store = Store.open(folder / "chat.db")
    settings = ServiceSettings(
        model=MODEL,
        max_context=max_context,
        sampling=SamplingParams(temperature=0.0, max_output_tokens=8),
        share_prefixes=share_prefixes,
    )
    service = ChatService(host, tokenizer, store, Metrics(MODEL), settings, archive=archive)
    try:
        yield Chat(service, host, engine, store)
    finally:
        await host.stop()
        await service.close()
        assert await asyncio.to_thread(archive.close, PATIENCE_S)


def num_files(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*.kv"))


async def test_pages_of_a_turn_go_with_its_conversation_though_the_next_one_began_anew(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with archived(tokenizer, tmp_path) as chat:
        body = await chat.service.conversation_create(ConversationCreate(), context())
        await chat.ask(SECRET, conversation=body["id"])
        await chat.ask("and?", conversation=body["id"], instructions="Be brief, be kind, be wise.")
        await chat.service.conversation_delete(body["id"], KEY)
    assert num_files(tmp_path) == 0


async def test_pages_from_before_prefixes_were_shared_go_with_their_conversation(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with archived(tokenizer, tmp_path) as chat:
        body = await chat.service.conversation_create(ConversationCreate(), context())
        await chat.ask(SECRET, conversation=body["id"])
    assert num_files(tmp_path) > 0
    async with archived(tokenizer, tmp_path, share_prefixes=True) as chat:
        await chat.service.conversation_delete(body["id"], KEY)
    assert num_files(tmp_path) == 0


async def test_pages_of_an_older_version_go_with_their_conversation(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with archived(tokenizer, tmp_path, fingerprint="version 1") as chat:
        body = await chat.service.conversation_create(ConversationCreate(), context())
        await chat.ask(SECRET, conversation=body["id"])
    assert num_files(tmp_path) > 0
    async with archived(tokenizer, tmp_path, fingerprint="version 2") as chat:
        await chat.service.conversation_delete(body["id"], KEY)
    assert num_files(tmp_path) == 0


async def test_what_was_half_typed_in_a_conversation_goes_with_it(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with archived(tokenizer, tmp_path) as chat:
        body = await chat.service.conversation_create(ConversationCreate(), context())
        await chat.ask(SECRET, conversation=body["id"])
        typing = {"generate": False, "chatrt": {"partial": True}, "conversation": body["id"]}
        await chat.ask("and wh", **typing)
        await chat.service.conversation_delete(body["id"], KEY)
        assert await chat.num_free() == 96
    assert num_files(tmp_path) == 0


async def test_a_turn_that_was_being_answered_goes_with_the_turn_that_it_builds_on(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with archived(tokenizer, tmp_path) as chat:
        first = await chat.ask(SECRET)
        log = await chat.create(
            "and?",
            previous_response_id=first["id"],
            max_output_tokens=300,
            chatrt={"ignore_eos": True},
        )
        await has_text(log)
        await chat.service.delete_response(first["id"], KEY)
        assert (await ended(log))["status"] == "cancelled"
        assert await chat.num_free() == 96
        with pytest.raises(NotFound):
            await chat.ask("more", previous_response_id=log.response_id)
    assert num_files(tmp_path) == 0
    async with archived(tokenizer, tmp_path) as chat:
        assert chat.store is not None
        left = chat.store.load_turn(log.response_id, KEY)
        assert left is None or SECRET not in tokenizer.decode(left.prompt_ids)


async def test_the_ids_of_a_deleted_turn_are_not_kept_by_one_that_began_anew_behind_it(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with archived(tokenizer, tmp_path) as chat:
        first = await chat.ask(SECRET)
        second = await chat.ask(
            "and?", previous_response_id=first["id"], instructions="Be brief, be kind, be wise."
        )
        await chat.service.delete_response(first["id"], KEY)
        assert chat.store is not None
        left = chat.store.load_turn(second["id"], KEY)
        assert left is None or SECRET not in tokenizer.decode(left.prompt_ids)
    assert num_files(tmp_path) == 0


async def test_a_turn_that_began_while_the_one_before_was_being_deleted_is_not_kept(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with archived(tokenizer, tmp_path) as chat:
        assert chat.store is not None
        body = await chat.service.conversation_create(ConversationCreate(), context())
        first = await chat.ask(SECRET, conversation=body["id"])
        log = await chat.create(
            "and?",
            conversation=body["id"],
            max_output_tokens=300,
            chatrt={"ignore_eos": True},
        )
        await has_text(log)
        # What a deletion does that did not see the turn yet.
        await asyncio.wrap_future(chat.store.delete_turn(first["id"], KEY))
        chat.service._history.forget([first["id"]])
        await chat.service.cancel(log.response_id, KEY)
        assert "does not exist" in (await ended(log))["chatrt"]["store_error"]
        with pytest.raises(NotFound):
            await chat.service.response(log.response_id, KEY)
        assert chat.store.load_turn(log.response_id, KEY) is None
        assert await chat.ask("hello", conversation=body["id"])
