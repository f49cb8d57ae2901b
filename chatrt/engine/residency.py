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
from chatrt.turn import TurnKind, num_common_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
        max_sessions: Parked sessions remembered, at least 1; the least recently used goes first.
        on_close: Told the id of every session that ends.
    """

    def __init__(
        self, sessions: SessionManager, *, max_sessions: int, on_close: Callable[[int], None]
    ) -> None:
        assert max_sessions >= 1, "a turn's own session has to be remembered"
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
        """A session for the request: typed ahead, its tip in place, a fork of it, or a new one."""
        typed = self._take_typed(request)
        tip = self._tips.get(request.parent_id) if request.parent_id else None
        if tip is not None and not _holds(tip, request):
            tip = None
        if typed is not None:
            return self._continue_typed(typed, tip, request)
        return self._continue_tip(tip, request) if tip else self._open(request)

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

    def keep_older(self, session: Session) -> tuple[PageCopy, ...]:
        """The turn failed: its session stays for the older responses that it holds, if any.

        Returns copies to do.
        """
        if session.state is SessionState.ACTIVE:
            self._park(session)
        return self._cut_back(session)

    def drop_typed(self, key: str) -> None:
        """The lane is gone: its half-typed prompt will not be continued."""
        session = self._typed.pop(key, None)
        if session is not None:
            self._close(session)

    def forget(self, response_ids: Iterable[str]) -> tuple[PageCopy, ...]:
        """Delete responses: their tips, and the pages that no other response needs.

        Returns copies to do, in order and before any row is written.
        """
        left: dict[int, Session] = {}
        for response_id in response_ids:
            tip = self._tips.pop(response_id, None)
            if tip is not None:
                left[tip.session.session_id] = tip.session
                self._tips_of[tip.session.session_id].discard(response_id)
        return tuple(copy for session in left.values() for copy in self._cut_back(session))

    def _open(self, request: TurnRequest) -> Placement:
        attached = self._sessions.open(request.salt, request.token_ids)
        missed = request.num_history > 0 and attached.num_reused < request.num_history - 1
        reason = "evicted" if missed else None
        return Placement(attached.session, attached.num_reused, 0, attached.copies, reason)

    def _continue_tip(self, tip: Tip, request: TurnRequest) -> Placement:
        session = tip.session
        at_tip = session.state is SessionState.PARKED and len(session.token_ids) == tip.num_tokens
        # A half-typed prompt may never be sent: it works on a fork and leaves the tip as it is.
        if at_tip and request.kind is not TurnKind.TYPED_AHEAD:
            attached = self._sessions.resume(session)
            self._parked.pop(session.session_id, None)
        else:
            attached = self._sessions.fork(session, tip.num_tokens)
            if session.state is SessionState.PARKED:
                self._parked.move_to_end(session.session_id)
        self._sessions.extend(attached.session, request.token_ids[tip.num_tokens :])
        missed = attached.num_reused < tip.num_tokens - 1
        reason = "evicted" if missed else None
        return Placement(attached.session, attached.num_reused, 0, attached.copies, reason)

    def _continue_typed(self, typed: Session, tip: Tip | None, request: TurnRequest) -> Placement:
        num_common = num_common_tokens(typed.token_ids, request.token_ids)
        at_least = max(tip.num_tokens if tip else 0, 1)
        if num_common <= at_least:
            self._close(typed)
            return self._continue_tip(tip, request) if tip else self._open(request)
        if tip is None and self._knows_more(request, min(num_common, typed.num_computed)):
            self._close(typed)
            return self._open(request)
        if num_common < len(typed.token_ids):
            # Text was taken back: what it left in the tree goes with the old session.
            attached = self._sessions.fork(typed, num_common)
            self._close(typed)
        else:
            attached = self._sessions.resume(typed)
            self._parked.pop(typed.session_id, None)
        self._sessions.extend(attached.session, request.token_ids[num_common:])
        num_ahead = max(0, attached.num_reused - max(request.num_history - 1, 0))
        return Placement(attached.session, attached.num_reused, num_ahead, attached.copies, None)

    def _knows_more(self, request: TurnRequest, num_tokens: int) -> bool:
        """Whether other sessions left more than so many leading tokens of the request."""
        attached = self._sessions.open(request.salt, request.token_ids)
        self._sessions.close(attached.session)
        return attached.num_reused > num_tokens

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

    def _cut_back(self, session: Session) -> tuple[PageCopy, ...]:
        """Shorten a parked session to the longest response that it holds, or close it."""
        if session.state is not SessionState.PARKED:
            return ()
        response_ids = set(self._tips_of.get(session.session_id, ()))
        lengths = {response_id: self._tips[response_id].num_tokens for response_id in response_ids}
        longest = max(lengths.values(), default=0)
        if longest == len(session.token_ids):
            return ()
        if longest == 0:
            self._close(session)
            return ()
        attached = self._sessions.fork(session, longest)
        self._close(session)
        self._tips |= {name: Tip(attached.session, length) for name, length in lengths.items()}
        self._tips_of[attached.session.session_id] = response_ids
        self._park(attached.session)
        return attached.copies

    def _close(self, session: Session) -> None:
        """End a session; what only it had cached goes with it, so that deleted text is gone."""
        self._unlist(session)
        self._sessions.forget(session)
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
