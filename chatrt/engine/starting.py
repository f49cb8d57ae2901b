"""A turn starts: a session with its pages, a sampler, an entry for the scheduler.

Knows: requests, residency, the caches whose rows are copied. Does not know: the queue, events.
Invariant: when a turn has started, its session's rows `[0, num_computed)` are in place, or on their
way and the turn waits for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatrt.engine.live import LiveTurn
from chatrt.engine.report import placed
from chatrt.errors import InvalidValue
from chatrt.scheduler import Entry, Phase, Work
from chatrt.turn import TurnKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from chatrt.engine.admission import EngineLimits
    from chatrt.engine.archiving import Archiving
    from chatrt.engine.drafting import Drafting
    from chatrt.engine.forward import Target
    from chatrt.engine.residency import Residency
    from chatrt.session import PageCopy, Session
    from chatrt.turn import TurnRequest

_WORK = {TurnKind.TYPED_AHEAD: Work.TYPED_AHEAD, TurnKind.PREPARED: Work.IDLE}


class Starting:
    """Makes live turns of requests; the arguments are those of the engine."""

    def __init__(
        self,
        target: Target,
        residency: Residency,
        drafting: Drafting,
        limits: EngineLimits,
        *,
        clock: Callable[[], int],
        draw_seed: Callable[[], int],
    ) -> None:
        self._target = target
        self._residency = residency
        self._drafting = drafting
        self._limits = limits
        self._clock = clock
        self._draw_seed = draw_seed

    def start(self, request: TurnRequest, archiving: Archiving | None) -> LiveTurn:
        """Attach the request to a session; what the archive knows of it is on its way then."""
        stamps = request.stamps
        stamps.admitted_ns = self._clock()
        sampling = request.sampling
        # First of all: what it refuses must not leave a session behind.
        sampler = self._target.make_sampler(
            sampling,
            seed=sampling.seed if sampling.seed is not None else self._draw_seed(),
            vocab_size=self._target.vocab_size,
            prompt_ids=request.token_ids,
        )
        if (beside := self._residency.running_parent(request)) is not None:
            self._drafting.commit(beside)  # rows that wait to be written are not to be missed
        placement = self._residency.place(request)
        stamps.matched_ns = self._clock()
        self.copy(placement.copies)
        stamps.restored_ns = now_ns = self._clock()
        restores = archiving is not None and archiving.begin_restore(placement.session, now_ns)
        room = self._limits.max_context - len(request.token_ids)
        max_tokens = min(room, sampling.max_output_tokens or room)
        entry = self._entry(request, placement.session, room=max_tokens - 1)
        entry.phase = Phase.RESTORING if restores else Phase.RUNNING
        return LiveTurn(
            request,
            entry,
            sampler,
            self._target.tokenizer,
            max_tokens,
            placed(placement, has_parent=request.parent_id is not None),
            self._drafting.limit(request.speculation_tokens),
        )

    def check_ids(self, request: TurnRequest) -> None:
        """A tokenizer may know more tokens than the model has embeddings; history was checked.

        Raises:
            InvalidValue: The prompt has such a token.
        """
        new_ids = request.token_ids[request.num_history :]
        largest, size = max(new_ids, default=0), self._target.decoder.config.vocab_size
        if largest >= size:
            token = self._target.tokenizer.token(largest)
            raise InvalidValue(
                f"the prompt has token {largest} ({token!r}), the model has embeddings for {size}",
                param="input",
            )

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy rows in all KV tensors that the page ids name."""
        self._target.kv.copy_rows(copies)
        self._drafting.copy_rows(copies)

    def _entry(self, request: TurnRequest, session: Session, *, room: int) -> Entry:
        return Entry(
            session=session,
            work=_WORK.get(request.kind, Work.PREFILL),
            phase=Phase.RUNNING,
            priority=request.priority,
            arrival=request.stamps.received_ns,
            room=room,
        )
