"""Which conversation a new turn belongs to, and the turns that it follows.

Knows: what a request names. Does not know: the wire's checks of it, prompts, the engine.
Invariant: a turn that names the one before it belongs to that one's conversation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatrt.service.answer import check_unanswered

if TYPE_CHECKING:
    from collections.abc import Iterable

    from chatrt.service.answer import Answer
    from chatrt.service.conversations import Conversations
    from chatrt.service.history import History
    from chatrt.store import StoredTurn
    from chatrt.wire.messages import ResponseCreate


async def place(
    message: ResponseCreate,
    key_id: str,
    conversations: Conversations,
    history: History,
    answers: Iterable[Answer],
) -> tuple[str | None, list[StoredTurn]]:
    """The conversation's id, if any, and the turns before the new one, root first.

    Raises:
        NotFound: There is no such conversation, or the named turn cannot be continued.
        Conflict: One of the running `answers` will be the conversation's next turn.
    """
    if message.conversation is not None:
        if message.chatrt.new_branch:  # beside whatever runs, as any fork
            await conversations.require(message.conversation, key_id)
            return message.conversation, []
        parent_id = await conversations.newest(message.conversation, key_id)
        if not message.partial:
            check_unanswered(answers, message.conversation)
        chain = [] if parent_id is None else await history.chain(parent_id, key_id)
        return message.conversation, chain
    if message.previous_response_id is None:
        return None, []
    chain = await history.chain(message.previous_response_id, key_id)
    return chain[-1].conversation_id, chain
