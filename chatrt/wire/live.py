"""What a server does right now, as `GET /v1/chatrt/live` says it.

Knows: names and units of the figures. Does not know: where they come from, how they are shown.
Invariant: no text of anybody and no id of another key is in it; a field that one side does not know
is left out or keeps its default, so that client and server of different versions get along.
"""

from __future__ import annotations

import msgspec


class Sockets(msgspec.Struct, frozen=True):
    """Open WebSocket connections, and about how many bytes wait to be sent on them."""

    num_connections: int = 0
    outbox_bytes: int = 0
    largest_outbox_bytes: int = 0


class Steps(msgspec.Struct, frozen=True):
    """Steps of the engine that did something, over the last `window_s` seconds.

    Times are None where there was none. `recent_ms` are the newest ones, the oldest first.
    """

    window_s: float = 0.0
    per_s: float = 0.0
    median_ms: float | None = None
    p95_ms: float | None = None
    last_ms: float | None = None
    recent_ms: tuple[float, ...] = ()


class Acceptance(msgspec.Struct, frozen=True):
    """Drafts of turns that run or ended within the last `window_s` seconds, of all keys.

    `num_passes` counts the target's passes that gave `num_emitted` tokens.
    """

    window_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    num_passes: int = 0
    num_emitted: int = 0

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens emitted per pass, the bonus token included; None without a pass."""
        return self.num_emitted / self.num_passes if self.num_passes else None


class LiveServer(msgspec.Struct, frozen=True, kw_only=True):
    """The whole server: counts only, of all keys together.

    `num_running` turns are attached to a session, beside those that nobody asked for (`prepared`);
    `phases` counts both by phase. `num_waiting` wait in the engine's queue, and somebody for them.
    `pages` has `free`, `held`, `cached`, `shared` and `total`: free + held = total, cached and
    shared are among the held. `archived` counts pages by where they are kept besides,
    `late_compilations` what was compiled after the server was ready: `kernel`, `graph`.
    """

    model: str = ""
    version: str = ""
    uptime_s: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    phases: dict[str, int] = {}
    steps: Steps = Steps()
    pages: dict[str, int] = {}
    archived: dict[str, int] = {}
    sessions: dict[str, int] = {}
    sockets: Sockets = Sockets()
    acceptance: Acceptance = Acceptance()
    late_compilations: dict[str, int] = {}


class LiveTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of the caller's key that is not over.

    `phase` is `queued`, `restoring`, `prefill`, `decode`, `paused` (its reader lags), `ending`
    (being stored) or `typed ahead`. Of its `prompt_tokens` `cached_tokens` were there and
    `computed_tokens` were computed so far. Gaps are between deltas. `pending_bytes` wait for its
    reader.
    """

    response_id: str
    conversation_id: str | None = None
    phase: str = "queued"
    prefix: str | None = None
    age_ms: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    ttft_ms: float | None = None
    mean_gap_ms: float | None = None
    last_gap_ms: float | None = None
    tokens_per_pass: float | None = None
    pending_bytes: int = 0


class RecentTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of the caller's key that ended `age_s` ago; `status` says how.

    `prefix` says where its prefix came from: `cold`, `warm`, `forked` or `restored`. Times are None
    where there is nothing to measure: a failed turn has none, one token has no gap.
    """

    response_id: str
    conversation_id: str | None = None
    status: str = ""
    prefix: str | None = None
    age_s: float = 0.0
    duration_ms: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    gap_p50_ms: float | None = None
    gap_p95_ms: float | None = None
    gap_max_ms: float | None = None
    tokens_per_pass: float | None = None

    @property
    def cached_share(self) -> float | None:
        """Which part of the prompt was there already; None without a prompt."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


class LiveFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The document: the server, the key's turns, and those of its turns that ended last.

    `turns` are in the order in which they came, `recent` in that in which they ended.
    """

    object: str = "chatrt.live"
    server: LiveServer = LiveServer()
    turns: tuple[LiveTurn, ...] = ()
    recent: tuple[RecentTurn, ...] = ()
