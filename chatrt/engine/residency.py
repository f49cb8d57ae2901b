"""Which session holds which response: tips, what was prepared behind them, half-typed prompts.

    # a tip's session    ids of the turn │ glue of any next turn     prepared in place
    # beside it          ids of the turn as a later turn reads them  prepared where these differ
    # of a lane          ids of the turn │ glue │ what was typed     a fork (ADR 4)

Knows: response ids, sessions, token ids. Does not know: tensors, text, the scheduler.
Invariant: a tip names a session whose first `num_tokens` ids are exactly the tip's; a session that
moved on keeps serving its older tips as forks until it is closed. Ids are compared, never names.
Cost: a comparison of all ids for each turn (80 µs at 8,000), whatever is computed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from chatrt.prefix import num_common_tokens
from chatrt.session import SessionState
from chatrt.turn import LEAST_PRIORITY, TurnKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from chatrt.session import Attached, PageCopy, Session
    from chatrt.session_manager import SessionManager
    from chatrt.turn import TurnRequest


# In place, drafts go on from what came before, and no page is copied: that is worth a row.
_WORTH_COMPUTING = 1


@dataclass(frozen=True, slots=True)
class Tip:
    """A response's place: the first `num_tokens` ids of `session`."""

    session: Session
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Pin:
    """How late a session's pages are given up (a higher rank is later), and until when."""

    rank: int
    until_ns: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A session that holds exactly a request's ids, with what was reused and copies still to do.

    `in_place` if it is one that was there before.
    """

    session: Session
    in_place: bool
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
        self._prepared: dict[str, Session] = {}
        self._typed_behind: dict[str, str | None] = {}  # lane → the response it was typed behind
        self._pins: dict[int, Pin] = {}
        # (until_ns, session id), the next to end first; outdated where that is not the pin's end.
        self._pin_ends: list[tuple[int, int]] = []

    @property
    def num_tips(self) -> int:
        """Responses that a session still holds."""
        return len(self._tips)

    def place(self, request: TurnRequest) -> Placement:
        """A session for the request: one that it continues in place, or a new one.

        A session is continued in place if the request begins with all of its ids and nobody knows
        more of them. A new one shares all pages that are known, whoever computed them.
        """
        typed = self._take_typed(request)
        tip = self._tips.get(request.parent_id) if request.parent_id else None
        if tip is not None and tip.session.salt != request.salt:
            tip = None
        known = self._sessions.num_known(
            request.salt, request.token_ids, beside=tip.session if tip else None
        )
        taken = self._to_take_over(request, typed, tip)
        if taken is not None and known > taken.num_computed + _WORTH_COMPUTING:
            taken = None
        attached = self._take_over(taken, request) if taken else self._open(request, tip)
        num_ahead = 0
        if typed is not None:
            num_common = num_common_tokens(typed.token_ids, request.token_ids)
            num_ahead = min(attached.num_reused, num_common) - request.num_history
            if typed is not attached.session:
                self._close(typed)
        is_missed = request.num_history > 0 and attached.num_reused < request.num_history - 1
        return Placement(
            attached.session,
            taken is not None,
            attached.num_reused,
            max(0, num_ahead),
            attached.copies,
            "evicted" if is_missed else None,
        )

    def running_parent(self, request: TurnRequest) -> Session | None:
        """The session of a request's parent if a turn runs in it: `place` may copy rows of it."""
        tip = self._tips.get(request.parent_id) if request.parent_id else None
        if tip is None or tip.session.state is not SessionState.ACTIVE:
            return None
        return tip.session

    def holds(self, response_id: str) -> bool:
        """Whether a session still holds this response."""
        return response_id in self._tips

    def pin(self, session: Session, request: TurnRequest, *, now_ns: int) -> None:
        """Pin an active session's pages from its parking on, as its turn asks, if it does.

        They go after those without a pin, or of lower priority: where nothing else is left. A pin
        of an earlier turn of the session that lasts longer, or has a higher rank, does so still.
        """
        if not request.pin_ms:
            return
        rank = 1 + max(0, request.priority - LEAST_PRIORITY)
        until_ns = now_ns + int(request.pin_ms * 1e6)
        old = self._pins.get(session.session_id)
        if old is not None:
            rank, until_ns = max(rank, old.rank), max(until_ns, old.until_ns)
        self._set_pin(session, Pin(rank, until_ns))

    def end_pins(self, now_ns: int) -> None:
        """End the pins whose time is over."""
        while self._pin_ends and self._pin_ends[0][0] <= now_ns:
            until_ns, session_id = heappop(self._pin_ends)
            pin = self._pins.get(session_id)
            if pin is None or pin.until_ns != until_ns:
                continue
            del self._pins[session_id]
            session = self._parked.get(session_id)
            if session is not None:  # a running one is pinned only when it is parked
                self._sessions.unpin(session)

    def keep_tip(self, response_id: str, session: Session) -> None:
        """The turn ended: park its session, which now holds `response_id`."""
        self._park(session)
        self._tips[response_id] = Tip(session, len(session.token_ids))
        self._tips_of.setdefault(session.session_id, set()).add(response_id)

    def keep_typed(self, key: str, session: Session, *, parent_id: str | None = None) -> None:
        """A half-typed prompt was prefilled: park it for the lane's next turn.

        It goes when the response that it was typed behind is deleted, whose ids it begins with.
        """
        old = self._typed.pop(key, None)
        if old is not None and old is not session:
            self._close(old)
        self._park(session)
        self._typed[key] = session
        self._typed_behind[key] = parent_id

    def keep_prepared(self, response_id: str, session: Session) -> tuple[PageCopy, ...]:
        """What every turn behind a response begins with was computed, as far as there was time.

        Returns copies to do.
        """
        self._park(session)
        tip = self._tips.get(response_id)
        if tip is None:  # it was deleted meanwhile
            return self._cut_back(session)
        if tip.session is not session:
            old = self._prepared.get(response_id)
            if old is not None and old is not session:
                self._close(old)
            self._prepared[response_id] = session
        return ()

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

        What was prepared or typed behind them goes too. Returns copies to do, in order and before
        any row is written.
        """
        left: dict[int, Session] = {}
        deleted = set(response_ids)
        for key in [key for key, parent in self._typed_behind.items() if parent in deleted]:
            self.drop_typed(key)
        for response_id in deleted:
            tip = self._tips.pop(response_id, None)
            if tip is not None:
                left[tip.session.session_id] = tip.session
                self._tips_of[tip.session.session_id].discard(response_id)
            prepared = self._prepared.get(response_id)
            if prepared is not None:
                self._close(prepared)
        return tuple(copy for session in left.values() for copy in self._cut_back(session))

    def _to_take_over(
        self, request: TurnRequest, typed: Session | None, tip: Tip | None
    ) -> Session | None:
        """The longest session that may be continued in place: the request begins with its ids."""
        candidates = [typed]
        # A half-typed prompt may never be sent: it leaves the tip, and what is prepared, alone.
        if tip is not None and request.kind is not TurnKind.TYPED_AHEAD:
            candidates += [tip.session, self._prepared.get(request.parent_id or "")]
        ids = request.token_ids
        fitting = [
            one
            for one in candidates
            if one is not None
            and one.state is SessionState.PARKED
            and one.token_ids == ids[: len(one.token_ids)]
        ]
        return max(fitting, key=lambda one: len(one.token_ids), default=None)

    def _take_over(self, session: Session, request: TurnRequest) -> Attached:
        self._parked.pop(session.session_id, None)
        self._let_go(session)
        if session.session_id in self._pins:  # its end is about to move on
            self._sessions.unpin(session)
        # Extended first: of ids that were all of the session's, the last has its row already.
        self._sessions.extend(session, request.token_ids[len(session.token_ids) :])
        return self._sessions.resume(session)

    def _open(self, request: TurnRequest, tip: Tip | None) -> Attached:
        beside = None if tip is None else tip.session
        if beside is not None and beside.session_id in self._parked:
            self._parked.move_to_end(beside.session_id)
        return self._sessions.open(request.salt, request.token_ids, beside=beside)

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

    def _set_pin(self, session: Session, pin: Pin) -> None:
        self._pins[session.session_id] = pin
        heappush(self._pin_ends, (pin.until_ns, session.session_id))
        if len(self._pin_ends) > 2 * len(self._pins) + 64:
            self._pin_ends = sorted((one.until_ns, name) for name, one in self._pins.items())

    def _park(self, session: Session) -> None:
        pin = self._pins.get(session.session_id)
        if pin is not None:
            self._sessions.pin(session, pin.rank)
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
        pin = self._pins.get(session.session_id)
        self._close(session)
        if pin is not None:
            self._set_pin(attached.session, pin)
        self._tips |= {name: Tip(attached.session, length) for name, length in lengths.items()}
        self._tips_of[attached.session.session_id] = response_ids
        self._park(attached.session)
        return attached.copies

    def _close(self, session: Session) -> None:
        """End a session; what only it had cached goes with it, so that deleted text is gone."""
        self._unlist(session)
        if self._pins.pop(session.session_id, None) and session.state is SessionState.PARKED:
            self._sessions.unpin(session)
        self._sessions.forget(session)
        self._on_close(session.session_id)

    def _unlist(self, session: Session) -> None:
        self._parked.pop(session.session_id, None)
        for response_id in self._tips_of.pop(session.session_id, ()):
            self._tips.pop(response_id, None)
        self._let_go(session)

    def _let_go(self, session: Session) -> None:
        """Nobody's lane, and nobody's preparation, any more."""
        for held in (self._typed, self._prepared):
            for name in [name for name, one in held.items() if one is session]:
                del held[name]
        if len(self._typed_behind) > len(self._typed):
            self._typed_behind = {key: self._typed_behind[key] for key in self._typed}
