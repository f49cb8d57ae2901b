"""Which session holds which response: tips, half-typed prompts, and how a new turn attaches.

Knows: response ids, sessions, token ids. Does not know: tensors, text, the scheduler.
Invariant: a tip names a session whose first `num_tokens` ids are exactly the tip's; a session that
moved on keeps serving its older tips as forks until it is closed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatrt.session import SessionState
from chatrt.turn import TurnKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from chatrt.session import PageCopy, Session, SessionManager
    from chatrt.turn import TurnRequest


@dataclass(frozen=True, slots=True)
class Tip:
    """A response's place: the first `num_tokens` ids of `session`."""

    session: Session
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A session that holds exactly a request's ids, with what was reused and copies still to do."""

    session: Session
    num_reused: int
    num_typed_ahead: int
    copies: tuple[PageCopy, ...]
    miss_reason: str | None


class Residency:
    """Attaches turns to sessions and parks these afterwards.

    Args:
        sessions: The pages' bookkeeping.
        max_sessions: Parked sessions remembered at most; the least recently used is closed first.
        on_close: Told the id of every session that ends.
    """

    def __init__(
        self, sessions: SessionManager, *, max_sessions: int, on_close: Callable[[int], None]
    ) -> None:
        self._sessions = sessions
        self._max_sessions = max_sessions
        self._on_close = on_close
        self._tips: dict[str, Tip] = {}
        self._parked: OrderedDict[int, Session] = OrderedDict()
        self._tips_of: dict[int, set[str]] = {}
        self._typed: dict[str, Session] = {}

    @property
    def num_tips(self) -> int:
        """Responses that a session still holds."""
        return len(self._tips)

    def place(self, request: TurnRequest) -> Placement:
        """A session for the request: typed ahead, its tip in place, a fork of it, or a new one.

        Raises:
            OutOfPages: Not even the copies of partly matched pages found room.
        """
        typed = self._take_typed(request)
        tip = self._tips.get(request.parent_id) if request.parent_id else None
        if tip is not None and not _holds(tip, request):
            tip = None
        if typed is not None:
            return self._continue_typed(typed, tip, request)
        if tip is None:
            attached = self._sessions.open(request.salt, request.token_ids)
            missed = request.num_history > 0 and attached.num_reused < request.num_history - 1
            return Placement(
                attached.session,
                attached.num_reused,
                0,
                attached.copies,
                "evicted" if missed else None,
            )
        return self._continue_tip(tip, request)

    def keep_tip(self, response_id: str, session: Session) -> None:
        """The turn ended: park its session, which now holds `response_id`."""
        self._park(session)
        self._tips[response_id] = Tip(session, len(session.token_ids))
        self._tips_of.setdefault(session.session_id, set()).add(response_id)

    def keep_typed(self, key: str, session: Session) -> None:
        """A half-typed prompt was prefilled: park it for the lane's next turn."""
        old = self._typed.pop(key, None)
        if old is not None and old is not session:
            self._close(old)
        self._park(session)
        self._typed[key] = session

    def drop(self, session: Session) -> None:
        """Close a session that holds nothing worth keeping."""
        self._close(session)

    def drop_typed(self, key: str) -> None:
        """The lane is gone: its half-typed prompt will not be continued."""
        session = self._typed.pop(key, None)
        if session is not None:
            self._close(session)

    def forget(self, response_ids: Iterable[str]) -> None:
        """Delete responses: their tips, and the pages that no other response needs."""
        for response_id in response_ids:
            tip = self._tips.pop(response_id, None)
            if tip is None:
                continue
            owners = self._tips_of.get(tip.session.session_id, set())
            owners.discard(response_id)
            if not owners and tip.session.state is SessionState.PARKED:
                self._unlist(tip.session)
                self._sessions.forget(tip.session)
                self._on_close(tip.session.session_id)

    def _continue_tip(self, tip: Tip, request: TurnRequest) -> Placement:
        session = tip.session
        at_tip = session.state is SessionState.PARKED and len(session.token_ids) == tip.num_tokens
        # A half-typed prompt may never be sent: it works on a fork and leaves the tip as it is.
        if at_tip and request.kind is not TurnKind.TYPED_AHEAD:
            attached = self._sessions.resume(session)
            self._parked.pop(session.session_id, None)
        else:
            attached = self._sessions.fork(session, tip.num_tokens)
        self._sessions.extend(attached.session, request.token_ids[tip.num_tokens :])
        missed = attached.num_reused < tip.num_tokens - 1
        reason = "evicted" if missed else None
        return Placement(attached.session, attached.num_reused, 0, attached.copies, reason)

    def _continue_typed(self, typed: Session, tip: Tip | None, request: TurnRequest) -> Placement:
        num_common = _common_prefix(typed.token_ids, request.token_ids)
        at_least = max(tip.num_tokens if tip else 0, 1)
        if num_common <= at_least:
            self._close(typed)
            return self._continue_tip(tip, request) if tip else self.place(request)
        attached = self._sessions.resume(typed)
        self._parked.pop(typed.session_id, None)
        copies = attached.copies + self._sessions.rewind(typed, num_common)
        self._sessions.extend(typed, request.token_ids[num_common:])
        # At least one row is computed for the turn, or there would be no logits to sample from.
        num_reused = min(typed.num_computed, len(request.token_ids) - 1)
        num_ahead = max(0, num_reused - max(request.num_history - 1, 0))
        return Placement(typed, num_reused, num_ahead, copies, None)

    def _take_typed(self, request: TurnRequest) -> Session | None:
        if request.typed_ahead_key is None:
            return None
        session = self._typed.pop(request.typed_ahead_key, None)
        if session is None or session.state is not SessionState.PARKED:
            return None
        if session.salt != request.salt:
            self._close(session)
            return None
        return session

    def _park(self, session: Session) -> None:
        self._sessions.park(session)
        self._parked[session.session_id] = session
        while len(self._parked) > self._max_sessions:
            _, oldest = self._parked.popitem(last=False)
            self._close(oldest)

    def _close(self, session: Session) -> None:
        self._unlist(session)
        self._sessions.close(session)
        self._on_close(session.session_id)

    def _unlist(self, session: Session) -> None:
        self._parked.pop(session.session_id, None)
        for response_id in self._tips_of.pop(session.session_id, ()):
            self._tips.pop(response_id, None)
        for key in [key for key, typed in self._typed.items() if typed is session]:
            del self._typed[key]


def _holds(tip: Tip, request: TurnRequest) -> bool:
    """Ids are compared, never only names: a tip serves a request that starts with its ids."""
    held = tip.session.token_ids
    return (
        tip.session.salt == request.salt
        and len(held) >= tip.num_tokens == request.num_history
        and held[: tip.num_tokens] == request.token_ids[: tip.num_tokens]
    )


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix, by halving: slices compare at C speed."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
