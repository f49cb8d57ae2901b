"""The same turns under OpenTelemetry's names for generative AI, sent to a collector by its SDK.

Knows: names, units and bucket advice of the GenAI conventions. Does not know: where figures go,
which the SDK reads from the `OTEL_*` variables.
Invariant: nothing is imported or sent unless the setting asks for it. Typing ahead is no request.
Cost: 20 µs for a turn at its end; a thread of the SDK sends every minute.
Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING

from chatrt.errors import SettingsError
from chatrt.turn import FinishReason, TurnKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.metrics import Histogram, MeterProvider

    from chatrt.metrics.observer import EndedTurn

_log = logging.getLogger(__name__)
_CLOSE_MS = 2000.0
_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_TPOT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_DURATION_S = tuple(0.01 * 2**i for i in range(14))


def require_otel() -> None:
    """Check that what `--otel` needs is installed.

    Raises:
        SettingsError: It is not; the sentence says what to install.
    """
    if not all(map(_is_installed, _NEEDED)):
        raise SettingsError(
            "otel needs OpenTelemetry's SDK and exporter: install chatrt with its extra [otel]",
            param="otel",
        )


class OtelTurns:
    """Implements `TurnObserver` by a provider of OpenTelemetry's API."""

    def __init__(self, model: str, provider: MeterProvider) -> None:
        meter = provider.get_meter("chatrt")

        def histogram(name: str, text: str, bounds_s: tuple[float, ...]) -> Histogram:
            return meter.create_histogram(
                f"gen_ai.server.{name}",
                unit="s",
                description=text,
                explicit_bucket_boundaries_advisory=bounds_s,
            )

        self._ttft = histogram(
            "time_to_first_token", "Request received to first text handed over.", _TTFT_S
        )
        self._tpot = histogram(
            "time_per_output_token", "Time between tokens behind the first.", _TPOT_S
        )
        self._duration = histogram(
            "request.duration", "Request received to its last event.", _DURATION_S
        )
        self._about: Mapping[str, str] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "chatrt",
            "gen_ai.request.model": model,
        }

    def ended(self, turn: EndedTurn) -> None:
        """Record a turn (`TurnObserver`)."""
        event, about = turn.event, self._about
        if turn.request.kind is TurnKind.TYPED_AHEAD:
            return
        if event.reason is FinishReason.FAILED:
            error = (
                "server_error" if event.error is None else getattr(event.error, "code", "_OTHER")
            )
            about = {**about, "error.type": error}
        elif event.num_generated > 1:
            seconds = (event.last_token_ns - event.first_token_ns) / 1e9
            self._tpot.record(seconds / (event.num_generated - 1), about)
        self._duration.record((turn.ended_ns - turn.request.stamps.received_ns) / 1e9, about)

    def first_sent(self, turn: EndedTurn, time_ns: int) -> None:
        """Record the time to the first token (`TurnObserver`)."""
        seconds = (time_ns - turn.request.stamps.received_ns) / 1e9
        self._ttft.record(seconds, self._about)


class OtelSender:
    """Sends turns of `model` by OTLP over HTTP until `close`; see `require_otel`."""

    def __init__(self, model: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        self._provider = MeterProvider([reader], shutdown_on_exit=False)
        self.turns = OtelTurns(model, self._provider)

    def close(self) -> None:
        """Send what is left, for two seconds at most; for any thread."""
        try:
            self._provider.shutdown(timeout_millis=_CLOSE_MS)
        except Exception as error:  # the edge of the SDK: a server's end is none of its business
            _log.warning("the last figures were not sent: %s", error)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a package in front of it is missing
        return False
