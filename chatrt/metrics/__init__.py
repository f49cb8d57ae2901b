"""Prometheus metrics: cheap to count, and scraped without holding a stream up."""

from chatrt.metrics.metrics import Metrics
from chatrt.metrics.observer import EndedTurn, TurnObserver
from chatrt.metrics.state_metrics import EngineFigures

__all__ = ["EndedTurn", "EngineFigures", "Metrics", "TurnObserver"]
