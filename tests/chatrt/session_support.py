"""Pages of 4 tokens, and `Memory`, which stands in for the KV tensors of a session manager."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatrt.pages import PageAllocator
from chatrt.prefix import PrefixTree
from chatrt.session_manager import SessionManager

if TYPE_CHECKING:
    from chatrt.session import Attached, PageCopy, Session

PAGE_SIZE = 4


class Memory:
    """Page contents: each row remembers the whole token prefix that it was computed from."""

    def __init__(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.tree = PrefixTree(self.allocator, PAGE_SIZE)
        self.manager = SessionManager(self.allocator, self.tree, page_size=PAGE_SIZE)
        self.rows: list[list[tuple[int, ...] | None]] = [
            [None] * PAGE_SIZE for _ in range(num_pages)
        ]

    def open(self, token_ids: list[int], salt: str = "") -> Attached:
        return self.copied(self.manager.open(salt, token_ids))

    def copied(self, attached: Attached) -> Attached:
        self.copy(attached.copies)
        return attached

    def copy(self, copies: tuple[PageCopy, ...]) -> None:
        for copy in copies:
            self.rows[copy.dst][: copy.num_rows] = self.rows[copy.src][: copy.num_rows]

    def compute(self, session: Session, num_rows: int, drafts: list[int] | None = None) -> None:
        """Reserves and writes rows for pending tokens and drafts, as a forward pass does."""
        self.manager.reserve(session, num_rows)
        tokens = session.token_ids + (drafts or [])
        for position in range(session.num_computed, session.num_computed + num_rows):
            page_id = session.page_ids[position // PAGE_SIZE]
            assert self.allocator.num_sharers(page_id) == 1, "wrote into a shared page"
            assert not self.tree.knows(page_id), "wrote into a published page"
            self.rows[page_id][position % PAGE_SIZE] = tuple(tokens[: position + 1])

    def run(self, session: Session, *answer: int) -> None:
        """Prefills what is pending, then decodes `answer`, one token a step."""
        for token_id in answer:
            num_rows = session.num_pending
            self.compute(session, num_rows)
            end = session.num_computed + num_rows
            self.manager.commit(session, [token_id], num_computed=end)

    def check(self, session: Session) -> None:
        """The canary: every computed position holds exactly the session's own prefix."""
        for position in range(session.num_computed):
            row = self.rows[session.page_ids[position // PAGE_SIZE]][position % PAGE_SIZE]
            assert row == tuple(session.token_ids[: position + 1])
