"""What the service does right now and did a moment ago, for `GET /v1/chatrt/live`.

Knows: running answers, the engine's snapshot, turns that ended, whose they are.
Does not know: sockets, text, who shows it.
Invariant: turns are told to their own key only, others are in the counts; what is remembered of
ended turns is numbers and ids, at most `MOST_RECENT` turns of a key.
Cost: some microseconds for each turn that ends, nothing for a token. A reading copies numbers
between two steps of the engine and computes on the loop, below a millisecond.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

import chatrt
from chatrt.engine.snapshot import MOST_STEPS, PREPARED, take_snapshot
from chatrt.percentiles import percentile
from chatrt.service.figures import gap_figures
from chatrt.turn import FinishReason
from chatrt.wire.live import (
    Acceptance,
    LiveFigures,
    LiveServer,
    LiveTurn,
    RecentTurn,
    Sockets,
    Steps,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from chatrt.archive import Archive
    from chatrt.engine import Engine
    from chatrt.engine.snapshot import EngineSnapshot, StepTime, TurnSnapshot
    from chatrt.host import EngineHost
    from chatrt.reclaim import PoolFigures
    from chatrt.service.answer import Answer
    from chatrt.turn import FinishedEvent
    from chatrt.wire.log import ResponseLog

MOST_RECENT = 50
_STEPS_WINDOW_NS = 2_000_000_000
_DRAFTS_WINDOW_NS = 60_000_000_000
_MOST_DRAFTED = 512
_MOST_STEP_TIMES = 120
_QUEUED, _ENDING = "queued", "ending"


@dataclass(frozen=True, slots=True)
class _Ended:
    """A turn that ended at `end_ns`; its log knows when the first text was sent, if not yet now."""

    turn: RecentTurn
    end_ns: int
    received_ns: int
    log: weakref.ref[ResponseLog]

    def told(self, now_ns: int) -> RecentTurn:
        """The turn as it is shown now."""
        log, ttft_ms = self.log(), self.turn.ttft_ms
        if ttft_ms is None and log is not None and log.first_sent_ns is not None:
            ttft_ms = _ms(log.first_sent_ns - self.received_ns)
        age_s = round((now_ns - self.end_ns) / 1e9, 3)
        return msgspec.structs.replace(self.turn, ttft_ms=ttft_ms, age_s=age_s)


@dataclass(frozen=True, slots=True)
class _Drafted:
    """What one turn's passes gave."""

    end_ns: int
    drafted: int
    accepted: int
    num_passes: int
    num_emitted: int


class LiveBoard:
    """Remembers turns that ended, and reads what runs. `clock` gives nanoseconds."""

    def __init__(
        self,
        model: str,
        host: EngineHost,
        archive: Archive | None = None,
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._model = model
        self._host = host
        self._archive = archive
        self._clock = clock
        self._began_ns = clock()
        self._recent: dict[str, deque[_Ended]] = {}
        self._drafted: deque[_Drafted] = deque(maxlen=_MOST_DRAFTED)

    def ended(self, answer: Answer, event: FinishedEvent) -> None:
        """Remember a turn that ended."""
        now_ns, drafts = self._clock(), event.speculation
        if drafts.steps:
            self._drafted.append(
                _Drafted(now_ns, drafts.drafted, drafts.accepted, drafts.steps, drafts.emitted)
            )
        recent = self._recent.setdefault(answer.log.key_id, deque(maxlen=MOST_RECENT))
        received_ns = answer.request.stamps.received_ns
        turn = _recent_turn(answer, event, duration_ms=_ms(now_ns - received_ns))
        recent.append(_Ended(turn, now_ns, received_ns, weakref.ref(answer.log)))

    def forget(self, name: str, key_id: str) -> None:
        """A response or conversation of this id was deleted: tell of its turns no more."""
        held = self._recent.get(key_id, ())
        kept = [one for one in held if name not in (one.turn.response_id, one.turn.conversation_id)]
        if len(kept) < len(held):
            self._recent[key_id] = deque(kept, maxlen=MOST_RECENT)

    async def read(self, key_id: str, answers: Iterable[Answer], sockets: Sockets) -> LiveFigures:
        """The document for a key; of `answers`, which all run, its own are told.

        Raises:
            ServerUnavailable: The engine has stopped.
        """

        def taken(engine: Engine) -> tuple[EngineSnapshot, Sequence[StepTime]]:
            return take_snapshot(engine), self._host.steps.last()

        snapshot, steps = await self._host.call(taken)
        now_ns = self._clock()
        running = {turn.response_id: turn for turn in snapshot.turns}
        turns = tuple(
            _live_turn(answer, running.get(answer.request.response_id), now_ns)
            for answer in answers
            if answer.log.key_id == key_id
        )
        recent = tuple(one.told(now_ns) for one in self._recent.get(key_id, ()))
        server = self._server(snapshot, steps, sockets, now_ns)
        return LiveFigures(server=server, turns=turns, recent=recent)

    def _server(
        self, snapshot: EngineSnapshot, steps: Sequence[StepTime], sockets: Sockets, now_ns: int
    ) -> LiveServer:
        phases: dict[str, int] = {}
        for turn in snapshot.turns:
            phases[turn.phase] = phases.get(turn.phase, 0) + 1
        archived: dict[str, int] = {}
        if self._archive is not None:
            figures = self._archive.figures()
            archived = {"host": figures.num_host_pages, "disk": figures.num_disk_pages}
        late = self._host.compilations.late
        return LiveServer(
            model=self._model,
            version=chatrt.__version__,
            uptime_s=round((now_ns - self._began_ns) / 1e9, 3),
            num_running=len(snapshot.turns) - phases.get(PREPARED, 0),
            num_waiting=snapshot.num_waiting,
            phases=phases,
            steps=_step_figures(steps, now_ns, max(now_ns - self._began_ns, 1)),
            pages=_pages(snapshot.pool),
            archived=archived,
            sessions=dict(snapshot.pool.sessions),
            sockets=sockets,
            acceptance=self._acceptance(snapshot.turns, now_ns),
            late_compilations={"kernel": late.num_kernels, "graph": late.num_graphs},
        )

    def _acceptance(self, running: Sequence[TurnSnapshot], now_ns: int) -> Acceptance:
        """Of turns that run, and of those that ended within the window."""
        start_ns = now_ns - _DRAFTS_WINDOW_NS
        ended = self._drafted
        if len(ended) == ended.maxlen:  # older ones of the window may be forgotten
            start_ns = max(start_ns, ended[0].end_ns)
        late = [one for one in ended if one.end_ns >= start_ns]
        counted: list[_Drafted | TurnSnapshot] = [*late, *running]
        return Acceptance(
            window_s=round((now_ns - start_ns) / 1e9, 3),
            drafted=sum(one.drafted for one in counted),
            accepted=sum(one.accepted for one in counted),
            num_passes=sum(one.num_passes for one in counted),
            num_emitted=sum(one.num_emitted for one in counted),
        )


def _live_turn(answer: Answer, running: TurnSnapshot | None, now_ns: int) -> LiveTurn:
    request, times_ns, log = answer.request, answer.delta_times_ns, answer.log
    stamps = request.stamps
    is_timed, sent_ns = len(times_ns) > 1, log.first_sent_ns
    mean_ms = _ms(times_ns[-1] - times_ns[0]) / (len(times_ns) - 1) if is_timed else None
    told = LiveTurn(
        response_id=log.response_id,
        conversation_id=log.conversation_id,
        phase=_ENDING if stamps.admitted_ns else _QUEUED,
        age_ms=_ms(now_ns - stamps.received_ns),
        prompt_tokens=len(request.token_ids),
        ttft_ms=None if sent_ns is None else _ms(sent_ns - stamps.received_ns),
        mean_gap_ms=None if mean_ms is None else round(mean_ms, 4),
        last_gap_ms=_ms(times_ns[-1] - times_ns[-2]) if is_timed else None,
        pending_bytes=log.least_pending_bytes,
    )
    if running is None:
        return told
    num_passes, num_emitted = running.num_passes, running.num_emitted
    return msgspec.structs.replace(
        told,
        phase=running.phase,
        prefix=running.prefix,
        cached_tokens=running.cached_tokens,
        computed_tokens=running.computed_tokens,
        generated_tokens=num_emitted,
        tokens_per_pass=round(num_emitted / num_passes, 4) if num_passes else None,
    )


def _recent_turn(answer: Answer, event: FinishedEvent, *, duration_ms: float) -> RecentTurn:
    log, stamps = answer.log, answer.request.stamps
    sent_ns, num_gaps = log.first_sent_ns, event.num_generated - 1
    decode_ms = _ms(event.last_token_ns - event.first_token_ns)
    gaps = gap_figures(answer.delta_times_ns)
    has_failed, drafts = event.reason is FinishReason.FAILED, event.speculation
    return RecentTurn(
        response_id=log.response_id,
        conversation_id=log.conversation_id,
        status=event.reason.value,
        prefix=None if has_failed else event.kv.prefix,
        duration_ms=duration_ms,
        prompt_tokens=len(answer.request.token_ids),
        cached_tokens=event.kv.reused_tokens,
        generated_tokens=event.num_generated,
        ttft_ms=None if sent_ns is None else _ms(sent_ns - stamps.received_ns),
        tpot_ms=round(decode_ms / num_gaps, 4) if num_gaps > 0 else None,
        gap_p50_ms=gaps["p50"],
        gap_p95_ms=gaps["p95"],
        gap_max_ms=gaps["max"],
        tokens_per_pass=round(drafts.mean_accepted_length, 4) if drafts.steps else None,
    )


def _step_figures(steps: Sequence[StepTime], now_ns: int, most_ns: int) -> Steps:
    """Steps of the last seconds, or since the server began, or as far back as they are known."""
    window_ns = min(_STEPS_WINDOW_NS, most_ns)
    late = [one for one in steps if one.end_ns >= now_ns - window_ns]
    if len(late) == MOST_STEPS:  # older ones are forgotten
        window_ns = max(now_ns - late[0].end_ns, 1)
    times_ms = [_ms(one.time_ns) for one in late]
    ordered = sorted(times_ms)
    return Steps(
        window_s=round(window_ns / 1e9, 3),
        per_s=round(len(late) / (window_ns / 1e9), 3),
        median_ms=percentile(ordered, 0.50),
        p95_ms=percentile(ordered, 0.95),
        last_ms=_ms(steps[-1].time_ns) if steps else None,
        recent_ms=tuple(_ms(one.time_ns) for one in steps[-_MOST_STEP_TIMES:]),
    )


def _pages(pool: PoolFigures) -> dict[str, int]:
    return {name: getattr(pool, name) for name in ("free", "held", "cached", "shared", "total")}


def _ms(time_ns: int) -> float:
    return round(time_ns / 1e6, 4)
