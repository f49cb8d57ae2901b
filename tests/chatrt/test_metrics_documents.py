"""What is written about metrics: the table of docs/metrics.md, and the dashboard's queries."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chatrt.archive import ArchiveFigures
from chatrt.metrics import EngineFigures, Metrics
from chatrt.turn import FinishReason, KVFigures, SpeculationFigures
from chatrt.wire.live import Sockets
from tests.chatrt.metrics_support import POOL, ended_turn, tell

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "examples" / "grafana" / "chatrt.json"
ROW = re.compile(r"\| `(\w+)` \| (\w+) \| ([^|]*) \| (\w[^|]*) \| ([^|]*) \|")


def full_registry() -> CollectorRegistry:
    """Every metric with a sample under every label that it may have."""
    metrics = Metrics("tiny", {"target": 5})
    kv = KVFigures(prefix="restored", restored_from="disk", restored_tokens=3)
    drafts = SpeculationFigures(
        drafter="head", drafted=1, accepted=1, accepted_per_position=(1,), depths=(0, 1)
    )
    tell(metrics, ended_turn(FinishReason.END_OF_TURN, kv=kv, speculation=drafts))
    values: dict[str, Any] = {one.name: 1 for one in fields(ArchiveFigures)}
    archive = ArchiveFigures(**values | {"failures": {"damaged": 1}})
    metrics.update(EngineFigures(POOL), Sockets(), archive)
    return metrics.registry


def rendered() -> dict[str, tuple[str, str, str]]:
    """Type, labels and meaning of each metric of chatrt's own, by name."""
    found = {}
    for family in full_registry().collect():
        if family.name.startswith("chatrt_"):
            labels = sorted({key for s in family.samples for key in s.labels} - {"le"})
            name = family.name + ("_total" if family.type == "counter" else "")
            shown = ", ".join(f"`{label}`" for label in labels) or "-"
            found[name] = (family.type, shown, family.documentation)
    return found


def panels() -> list[dict[str, Any]]:
    document = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = document["panels"]
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", [])]


def test_the_table_in_the_documentation_is_what_is_rendered() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    written = {row[1]: (row[2], row[3], row[5]) for row in ROW.finditer(text)}
    assert written == rendered()


def test_a_metrics_unit_is_in_its_name_or_it_counts_things() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    units = {row[1]: row[4] for row in ROW.finditer(text)}
    for name, unit in units.items():
        for word in ("seconds", "bytes"):
            assert (unit == word) == (word in name), (name, unit)


def test_every_query_of_the_dashboard_asks_for_metrics_and_labels_that_exist() -> None:
    known: dict[str, set[str]] = {}
    for family in full_registry().collect():
        for sample in family.samples:
            known.setdefault(sample.name, {"instance"}).update(sample.labels)
    queries = expressions()
    assert len(queries) > 40
    for query in queries:
        names = re.findall(r"\b(?:chatrt|process)_\w+", query)
        assert names
        asked = {key for group in re.findall(r"by \(([^)]*)\)", query) for key in group.split(", ")}
        asked |= set(re.findall(r'(\w+)=~?"', query))
        for name in names:
            assert name in known, query
            assert asked <= known[name], query


def test_every_metric_stands_somewhere_on_the_dashboard() -> None:
    queries = " ".join(expressions())
    assert [name for name in rendered() if name not in queries] == []


def test_the_dashboard_takes_any_data_source_and_its_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        xs = range(place["x"], place["x"] + place["w"])
        cells = {(x, y) for x in xs for y in range(place["y"], place["y"] + place["h"])}
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
