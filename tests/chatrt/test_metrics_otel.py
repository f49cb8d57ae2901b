"""OpenTelemetry: the names and attributes of the GenAI conventions, by the SDK's own reader."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from chatrt.errors import OutOfPages, SettingsError
from chatrt.metrics import Metrics
from chatrt.metrics.otel import OtelTurns, require_otel
from chatrt.turn import FinishReason, TurnKind
from tests.chatrt.metrics_support import ended_turn, tell

ABOUT = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "chatrt",
    "gen_ai.request.model": "tiny",
}


class Otel:
    """Metrics with an observer that sends to memory."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        provider = MeterProvider([self._reader], shutdown_on_exit=False)
        self.metrics = Metrics("tiny", others=[OtelTurns("tiny", provider)])

    def points(self) -> dict[str, list[Any]]:
        """The points of each metric that has any."""
        data = self._reader.get_metrics_data()
        if data is None:
            return {}
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics]
        return {one.name: list(one.data.data_points) for scope in scopes for one in scope.metrics}


def test_a_turn_is_recorded_in_seconds_under_the_names_of_the_conventions() -> None:
    otel = Otel()
    tell(otel.metrics, ended_turn(FinishReason.END_OF_TURN))
    points = otel.points()
    sums = {name: one[0].sum for name, one in points.items()}
    assert sums == pytest.approx(
        {
            "gen_ai.server.time_to_first_token": 0.002,
            "gen_ai.server.time_per_output_token": 0.002,
            "gen_ai.server.request.duration": 0.01,
        }
    )
    assert all(dict(point.attributes) == ABOUT for one in points.values() for point in one)


def test_the_buckets_are_those_that_the_conventions_advise() -> None:
    otel = Otel()
    tell(otel.metrics, ended_turn(FinishReason.END_OF_TURN))
    bounds = {name: one[0].explicit_bounds for name, one in otel.points().items()}
    ends = {name: (len(one), one[0], one[-1]) for name, one in bounds.items()}
    assert ends == {
        "gen_ai.server.time_to_first_token": (16, 0.001, 10.0),
        "gen_ai.server.time_per_output_token": (13, 0.01, 2.5),
        "gen_ai.server.request.duration": (14, 0.01, 81.92),
    }


def test_a_failed_turn_has_a_duration_with_the_errors_code_and_nothing_else() -> None:
    otel = Otel()
    turn = ended_turn(FinishReason.FAILED, error=OutOfPages(1, 0, 0, 4))
    tell(otel.metrics, turn, first_sent_ns=None)
    (name,) = points = otel.points()
    assert name == "gen_ai.server.request.duration"
    assert dict(points[name][0].attributes) == {**ABOUT, "error.type": "kv_exhausted"}


def test_typing_ahead_is_no_request() -> None:
    otel = Otel()
    turn = ended_turn(FinishReason.PREFILLED, kind=TurnKind.TYPED_AHEAD, generated=0)
    tell(otel.metrics, turn, first_sent_ns=None)
    assert otel.points() == {}


def test_without_the_packages_the_setting_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(SettingsError, match=r"its extra \[otel\]") as refused:
        require_otel()
    assert refused.value.param == "otel"
