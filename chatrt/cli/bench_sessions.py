"""`chatrt bench sessions`: whole conversations over the socket, several at once.

Knows: options, when the server is killed and started again, where the results go.
Does not know: how anything is measured, how texts and arrivals are drawn.
Invariant: what had been measured is shown, whatever ends the run, a second Ctrl+C too; a server
that is not the bench's own is never killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from chatrt.cli import bench_sessions_options as options
from chatrt.cli import common
from chatrt.cli.bench_output import (
    EXIT_INTERRUPTED,
    CompareOption,
    JsonOption,
    PlotOption,
    SaveOption,
    changed_settings,
    counting_bar,
    draw,
    require_plots,
    show,
    show_comparison,
)
from chatrt.cli.bench_server import (
    ApiKeyFileOption,
    ModelOption,
    UrlOption,
    choose_server,
    measured_server,
    model_of,
    where_text,
)
from chatrt.errors import ChatrtError, InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import RenderableType

    from chatrt.bench.figures import SessionFigures
    from chatrt.bench.goodput import Targets
    from chatrt.bench.player import TurnOptions
    from chatrt.bench.prompts import Conversation
    from chatrt.bench.sessions import SessionsBench
    from chatrt.bench.turn_sample import TurnSample
    from chatrt.bench.workload import Workload
    from chatrt.cli.bench_server import Measured


def sessions(
    sessions: options.SessionsOption = 8,
    turns: options.TurnsOption = "4",
    input_tokens: options.InputOption = None,
    system_tokens: options.SystemOption = "24",
    prefix_tokens: options.PrefixOption = 0,
    max_output_tokens: options.OutputOption = "32",
    think_ms: options.ThinkOption = "0",
    prompts: options.PromptsOption = None,
    fork: options.ForkOption = True,
    fork_rate: options.ForkRateOption = 0.0,
    cancel_rate: options.CancelRateOption = 0.0,
    abandon_rate: options.AbandonRateOption = 0.0,
    typed_ahead_rate: options.TypedAheadRateOption = 0.0,
    type_ms: options.TypeOption = 100,
    rate: options.ArrivalsOption = None,
    ttft_target_ms: options.TtftTargetOption = 200.0,
    tpot_target_ms: options.TpotTargetOption = 50.0,
    restart: options.RestartOption = False,
    settle_s: options.SettleOption = 2.0,
    seed: options.SeedOption = 0,
    warm_up: options.WarmUpOption = True,
    url: UrlOption = None,
    api_key_file: ApiKeyFileOption = None,
    model: ModelOption = None,
    per_session: options.PerSessionOption = False,
    compare: CompareOption = None,
    plot: PlotOption = None,
    json: JsonOption = False,
    save: SaveOption = None,
) -> None:
    """Time to first token and the stream's evenness, in conversations over the socket.

    A fresh server takes its settings from CHATRT_* variables and config.toml, as `chatrt serve`.
    How a follow-up depends on the length of its history: `chatrt bench histories`.
    """
    if compare is not None:
        show_comparison("sessions", *compare, as_json=json, save=save)
        return
    from chatrt.bench.goodput import Targets
    from chatrt.bench.lengths import Length
    from chatrt.bench.player import TurnOptions
    from chatrt.bench.workload import Workload

    choice = choose_server(url, api_key_file, model)
    require_plots(plot)
    if restart and not choice.is_own:
        raise InvalidValue("--url and --restart exclude each other: only an own server is killed")
    if prompts is not None and input_tokens is not None:
        raise InvalidValue("--prompts and --input-tokens exclude each other: texts have lengths")
    workload = Workload(
        num_sessions=sessions,
        num_turns=Length.parse(turns, param="--turns"),
        system_tokens=Length.parse(system_tokens, param="--system-tokens"),
        input_tokens=Length.parse(input_tokens or options.DEFAULT_INPUT, param="--input-tokens"),
        think_ms=Length.parse(think_ms, param="--think-ms", at_least=0),
        forks=fork,
        output_tokens=Length.parse(max_output_tokens, param="--max-output-tokens"),
        prefix_tokens=prefix_tokens,
        cancel_rate=cancel_rate,
        abandon_rate=abandon_rate,
        fork_rate=fork_rate,
        typed_ahead_rate=typed_ahead_rate,
        rate_per_s=rate,
        restarts=restart,
    )
    run = _SessionsRun(
        workload,
        TurnOptions(seed, type_ms, from_due=rate is not None),
        Targets(ttft_target_ms, tpot_target_ms),
        prompts,
        warm_up=warm_up,
        settle_s=settle_s,
    )
    server_settings = {"server": changed_settings(choice.resolved)} if choice.is_own else {}
    with measured_server(choice) as server:
        run.play(server)
        # Before the server is ended: that takes a while, and may be interrupted as well.
        with _undisturbed():
            document = run.document(server_settings)
            show(run.report(document, per_session=per_session), document, as_json=json, save=save)
    draw(plot, document)
    if run.failure is not None:
        raise run.failure
    if run.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if document["failed"]:  # they are in the tables; a script looks here
        raise typer.Exit(1)


class _SessionsRun:
    """One run, whose samples outlive an interruption and a failure."""

    def __init__(
        self,
        workload: Workload,
        turn_options: TurnOptions,
        targets: Targets,
        prompts: str | None,
        *,
        warm_up: bool,
        settle_s: float,
    ) -> None:
        from chatrt.bench.workload import generate, warm_up_session

        self.samples: list[TurnSample] = []
        self.interrupted = False
        self.failure: ChatrtError | None = None
        self._workload = workload
        self._options = turn_options
        self._targets = targets
        self._prompts = prompts
        self._settle_s = settle_s
        said = _conversations(prompts)
        self._planned = generate(workload, turn_options.seed, said)
        self._warm_up = warm_up_session(workload, turn_options.seed, said) if warm_up else None
        self._model: str | None = None
        self._document: dict[str, Any] = {}

    @property
    def num_planned(self) -> int:
        """Turns that are to be measured."""
        return sum(one.num_turns for one in self._planned)

    def play(self, server: Measured) -> None:
        """Run against a server; an interruption ends it early.

        Raises:
            ChatrtError: Nothing had been measured before it.
        """
        from chatrt.bench.document import new_document
        from chatrt.bench.sessions import SessionsBench

        seed = self._options.seed
        self._document = new_document("sessions", seed=seed, device=server.device)
        started = time.perf_counter()
        with counting_bar("turns", self.num_planned) as advance:
            bench = SessionsBench(self._planned, self._options, self._hearing(advance))
            try:
                asyncio.run(self._play(bench, server))
                if self._workload.restarts:
                    self._continue_after_a_crash(bench, server)
            except KeyboardInterrupt:
                self.interrupted = True
            except ChatrtError as error:
                if not self.samples:
                    raise
                self.failure = error
        self._document["duration_s"] = time.perf_counter() - started

    def document(self, server_settings: dict[str, Any]) -> dict[str, Any]:
        """The document; `server_settings` stand among its settings."""
        workload = self._workload
        settings = {
            **dataclasses.asdict(workload),
            "num_turns": workload.num_turns.most,
            "turns": dataclasses.asdict(workload.num_turns),
            "max_output_tokens": workload.output_tokens.most,
            "ignore_eos": True,
            "prompts": self._prompts,
            "type_ms": self._options.type_ms,
            "loop": "closed" if workload.rate_per_s is None else "open",
            "settle_s": self._settle_s,
            **server_settings,
        }
        return {
            **self._document,
            "model": self._model,
            "settings": settings,
            "warm_up": {"excluded": True, "turns": self._num_warm_up},
            "interrupted": self.interrupted,
            "failure": self.failure.message if self.failure else None,
            **dataclasses.asdict(self._figures()),
            "samples": [dataclasses.asdict(sample) for sample in self.samples],
        }

    def report(self, document: dict[str, Any], *, per_session: bool) -> RenderableType:
        """The tables."""
        from chatrt.bench.report import sessions_report

        workload = self._workload
        asked = workload.in_words(self._prompts)
        notes = [
            f"{where_text(document)}; {asked}, seed {self._options.seed}.",
            f"{self._num_warm_up} turns of warm-up are left out.",
        ]
        if workload.restarts:
            notes.append(f"The server was killed {self._settle_s:g} s after the last answer.")
        if self.interrupted:
            notes.insert(0, "Interrupted: these are the turns that had ended.")
        return sessions_report(self._figures(), self.samples, per_session=per_session, notes=notes)

    async def _play(self, bench: SessionsBench, server: Measured) -> None:
        self._model = (await model_of(server.endpoint)).get("id")
        try:
            await bench.run(server.endpoint, warm_up=self._warm_up)
        finally:
            if server.own is None:
                await bench.delete(server.endpoint)

    def _continue_after_a_crash(self, bench: SessionsBench, server: Measured) -> None:
        assert server.own is not None
        time.sleep(self._settle_s)
        with common.waiting():
            endpoint = server.own.restart()
        asyncio.run(bench.run_restored(endpoint))

    def _hearing(self, advance: Callable[[], None]) -> Callable[[TurnSample], None]:
        def on_sample(sample: TurnSample) -> None:
            self.samples.append(sample)
            advance()

        return on_sample

    @property
    def _num_warm_up(self) -> int:
        return self._warm_up.num_turns if self._warm_up else 0

    def _figures(self) -> SessionFigures:
        from chatrt.bench.figures import session_figures

        return session_figures(self.samples, num_planned=self.num_planned, targets=self._targets)


def _conversations(prompts: str | None) -> tuple[Conversation, ...]:
    """What is said, none for synthetic words.

    Raises:
        InvalidValue: The file cannot be used.
    """
    from chatrt.bench.prompts import bundled_conversations, load_conversations

    if prompts is None:
        return ()
    return (
        bundled_conversations() if prompts == options.BUNDLED else load_conversations(Path(prompts))
    )


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl+C is not heard inside, where a thread can decide that: what was measured is shown."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def register(group: typer.Typer) -> None:
    """Adds the command to the group `bench`."""
    group.command()(sessions)
