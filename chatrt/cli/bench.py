"""`chatrt bench`: measurements, each with a table and one line of JSON.

Knows: which measurements there are, and the options of the one that needs no server. Does not
know: how anything is measured. Invariant: the last line of stdout is one JSON document, also after
Ctrl+C.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from chatrt.cli import (
    bench_all,
    bench_histories,
    bench_kv,
    bench_peers,
    bench_quality,
    bench_sessions,
    bench_speculation,
    bench_stall,
    bench_step,
    bench_terminal,
)
from chatrt.cli.bench_output import (
    CompareOption,
    JsonOption,
    SaveOption,
    show,
    show_comparison,
)

bench = typer.Typer(
    name="bench",
    help="Measure: a table for people, then one line of JSON.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench.command()
def bookkeeping(
    steps: Annotated[int, typer.Option(min=1, help="Steps to take the medians of.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampled tokens.")] = 0,
    compare: CompareOption = None,
    json: JsonOption = False,
    save: SaveOption = None,
) -> None:
    """Plan, batch and commit of one step with the model stubbed, for 1 and for 64 sessions.

    And what metrics add to a step of 8 streams.
    """
    if compare is not None:
        show_comparison("bookkeeping", *compare, as_json=json, save=save)
        return
    from chatrt.bench.bookkeeping import BARS_US, measure
    from chatrt.bench.document import new_document
    from chatrt.bench.metrics_cost import measure_metrics
    from chatrt.bench.report import bookkeeping_report

    metrics = measure_metrics(steps)
    figures = {number: measure(number, steps, seed=seed) for number in BARS_US}
    document = new_document("bookkeeping", seed=seed, device=None) | {
        "settings": {"steps": steps},
        "sessions": {
            str(number): dataclasses.asdict(one)
            | {"at_most_us": BARS_US[number], "within": one.total_us <= BARS_US[number]}
            for number, one in figures.items()
        },
        "metrics": dataclasses.asdict(metrics)
        | {"total_us": metrics.total_us, "within": metrics.within},
    }
    show(bookkeeping_report(figures, BARS_US, metrics), document, as_json=json, save=save)


def register(app: typer.Typer) -> None:
    """Adds the group of commands."""
    bench_sessions.register(bench)
    bench_step.register(bench)
    bench_speculation.register(bench)
    bench_quality.register(bench)
    bench_kv.register(bench)
    bench_histories.register(bench)
    bench_stall.register(bench)
    bench_terminal.register(bench)
    bench_all.register(bench)
    bench_peers.register(bench)
    app.add_typer(bench)
