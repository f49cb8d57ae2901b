"""Ended turns as metrics are told of them, and the text of a scrape read back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from chatrt.metrics import EndedTurn, EngineFigures, Metrics
from chatrt.params import SamplingParams
from chatrt.reclaim import PoolFigures
from chatrt.turn import FinishedEvent, KVFigures, SpeculationFigures, Stamps, TurnKind, TurnRequest
from chatrt.wire.live import Sockets

if TYPE_CHECKING:
    from chatrt.turn import FinishReason

POOL = PoolFigures(free=3, held=5, cached=4, shared=1, total=8)
FIRST_SENT_NS = 3_000_000
STAMPS = {
    "received_ns": 1_000_000,
    "tokenized_ns": 1_100_000,
    "admitted_ns": 1_200_000,
    "matched_ns": 1_300_000,
    "restored_ns": 1_400_000,
    "prefilled_ns": 1_900_000,
    "sampled_ns": 2_000_000,
}


def ended_turn(
    reason: FinishReason,
    *,
    num_input: int = 20,
    reused: int = 0,
    generated: int = 5,
    kind: TurnKind = TurnKind.ANSWER,
    stamps: dict[str, int] | None = None,
    cancel_asked_ns: int | None = None,
    **event: Any,
) -> EndedTurn:
    """A turn of 2 ms to the first chosen token and 8 ms from there to the last."""
    request = TurnRequest(
        response_id="resp_secret",
        kind=kind,
        token_ids=[1] * num_input,
        num_history=0,
        sampling=SamplingParams(),
        stamps=Stamps(**(STAMPS if stamps is None else stamps)),
    )
    values: dict[str, Any] = {
        "response_id": request.response_id,
        "reason": reason,
        "output_ids": tuple(range(generated)),
        "num_generated": generated,
        "text": "",
        "seed": 0,
        "kv": KVFigures(prefix="warm" if reused else "cold", reused_tokens=reused),
        "speculation": SpeculationFigures(),
        "first_token_ns": 2_000_000,
        "last_token_ns": 10_000_000,
        "time_ns": 10_000_000,
    }
    ended = FinishedEvent(**values | event)
    return EndedTurn(request, ended, ended_ns=11_000_000, cancel_asked_ns=cancel_asked_ns)


def tell(metrics: Metrics, turn: EndedTurn, *, first_sent_ns: int | None = FIRST_SENT_NS) -> None:
    """All that a service tells of a turn."""
    for observer in metrics.observers:
        observer.ended(turn)
        if first_sent_ns is not None:
            observer.first_sent(turn, first_sent_ns)


async def scrape(
    metrics: Metrics, engine: EngineFigures | None = None, sockets: Sockets | None = None
) -> dict[str, float]:
    """The samples by name with labels, as a scrape finds them."""
    metrics.update(engine or EngineFigures(POOL), sockets or Sockets())
    return samples_of((await metrics.render()).decode())


def samples_of(text: str) -> dict[str, float]:
    """The samples of Prometheus' text: `name` or `name{label="value",…}`, labels in order."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found
