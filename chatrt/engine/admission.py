"""The queue in front of the engine: who may start, who waits, who is refused.

Knows: requests, pages as numbers. Does not know: tensors, text, sockets.
Invariant: an arrival never takes a running stream's pages: it waits, or is refused when waiting
cannot help.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatrt.errors import CapacityError, ContextLengthExceeded, OutOfPages, Overloaded
from chatrt.turn import TurnKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from chatrt.session import Session
    from chatrt.session_manager import SessionManager
    from chatrt.turn import TurnRequest


_RANKS = {TurnKind.TYPED_AHEAD: 1, TurnKind.PREPARED: 0}
_ANSWERS = 2


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Caps of the engine.

    `max_context` counts prompt and answer of one session; `num_drafts` is the draft length when the
    request names none; `max_parked` bounds the sessions that are remembered between turns.
    Nothing is reserved for answers, but an arrival is admitted beside running ones only if each
    may still grow by `num_expected` tokens (or its own cap). `max_pages_per_owner` bounds what the
    running sessions of one owner (an API key) hold together; None leaves it open. `max_waiting`
    bounds the queue.
    """

    max_context: int
    max_num_seqs: int = 64
    page_size: int = 16
    num_drafts: int = 0
    max_parked: int = 1024
    num_expected: int = 256
    max_pages_per_owner: int | None = None
    max_waiting: int = 256


@dataclass(frozen=True, slots=True)
class Running:
    """A session that runs, how many tokens its turn may still add, and whose it is."""

    session: Session
    num_left: int
    owner: str = ""


class Admission:
    """Answers first, then what is typed ahead, then what nobody asked for yet.

    Each in order of priority, then arrival.
    """

    def __init__(self, sessions: SessionManager, limits: EngineLimits) -> None:
        self._sessions = sessions
        self._limits = limits
        self._waiting: deque[TurnRequest] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_answers(self) -> int:
        """Turns in the queue that somebody waits for."""
        return sum(_rank(request)[0] == _ANSWERS for request in self._waiting)

    def put(self, request: TurnRequest) -> None:
        """Queue a request.

        Raises:
            ContextLengthExceeded: The prompt leaves no room for one token; both numbers are named.
            CapacityError: The prompt alone needs more pages than its owner may hold.
            Overloaded: The queue is full.
        """
        rank, limit = _rank(request), self._limits.max_waiting
        num_before = sum(_rank(other)[0] >= rank[0] for other in self._waiting)
        if num_before >= limit:
            raise Overloaded(f"{num_before} turns wait already, at most {limit} may")
        length, limit = len(request.token_ids), self._limits.max_context
        if length >= limit:
            raise ContextLengthExceeded(
                f"the prompt has {length} tokens and the context holds {limit}, "
                "one of which is needed for the answer",
                param="input",
            )
        need, most = self._num_pages(length + 1), self._limits.max_pages_per_owner
        if most is not None and need > most:
            raise CapacityError(
                f"the prompt needs {need} KV pages, an API key may hold {most}", code="kv_exhausted"
            )
        later = (i for i, other in enumerate(self._waiting) if _rank(other) < rank)
        self._waiting.insert(next(later, len(self._waiting)), request)

    def take(self, matches: Callable[[TurnRequest], bool]) -> list[TurnRequest]:
        """Remove the waiting requests that match."""
        taken = [request for request in self._waiting if matches(request)]
        for request in taken:
            self._waiting.remove(request)
        return taken

    def holds_answer_up(self, running: Collection[Running]) -> bool:
        """Whether an answer waits whose owner may hold more, were only these running."""
        return any(
            _rank(request)[0] == _ANSWERS and self._may_hold_more(request, running)
            for request in self._waiting
        )

    def next(self, running: Collection[Running]) -> TurnRequest | None:
        """The first request whose owner may hold more, if it may start beside the running ones.

        Raises:
            OutOfPages: It could not start even alone; it stays first (see `refuse_first`).
        """
        if not self._waiting or len(running) >= self._limits.max_num_seqs:
            return None
        request = next((r for r in self._waiting if self._may_hold_more(r, running)), None)
        if request is None:
            return None
        length = len(request.token_ids)
        free, evictable = self._sessions.num_free, self._sessions.num_evictable
        if not running:
            need = self._num_pages(length + 1)
            if need > free + evictable:
                raise OutOfPages(need, free, evictable, self._sessions.num_pages)
            return self._taken(request)
        # An arrival that took the pages which running answers will grow into would stall them.
        need = self._num_pages(length + self._expected(request.sampling.max_output_tokens))
        growth = sum(
            self._num_pages(len(one.session.token_ids) + self._expected(one.num_left))
            - len(one.session.page_ids)
            for one in running
        )
        return self._taken(request) if need + growth <= free + evictable else None

    def refuse_first(self) -> TurnRequest:
        """Remove the request that `next` raised for."""
        return self._waiting.popleft()

    def _taken(self, request: TurnRequest) -> TurnRequest:
        self._waiting.remove(request)
        return request

    def _may_hold_more(self, request: TurnRequest, running: Collection[Running]) -> bool:
        most = self._limits.max_pages_per_owner
        if most is None:
            return True
        held = sum(len(one.session.page_ids) for one in running if one.owner == request.owner)
        return held + self._num_pages(len(request.token_ids) + 1) <= most

    def _expected(self, num_left: int | None) -> int:
        """Tokens by which an answer is expected to grow, of at most `num_left`."""
        expected = self._limits.num_expected
        return expected if num_left is None else min(expected, num_left)

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._limits.page_size)


def _rank(request: TurnRequest) -> tuple[int, int]:
    """Higher goes first; nobody waits for a prompt that is still being typed."""
    return (_RANKS.get(request.kind, _ANSWERS), request.priority)
