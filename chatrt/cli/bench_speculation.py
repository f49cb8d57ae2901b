"""`chatrt bench speculation`: the same answers without drafts and with them.

Knows: options, how a runtime is built for each drafter, where the results go.
Does not know: how anything is measured. Invariant: beside each runtime with a drafter lies one
that has none; what had been measured is shown, whatever ends the run.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatrt.cli import common
from chatrt.cli.bench_output import (
    EXIT_INTERRUPTED,
    CompareOption,
    JsonOption,
    PlotOption,
    SaveOption,
    changed_settings,
    counting_bar,
    device_of,
    draw,
    require_plots,
    show,
)
from chatrt.cli.bench_speculation_options import (
    AUTO,
    chosen_prompts,
    depth_of,
    drafters_of,
    temperatures_of,
)
from chatrt.errors import ChatrtError, InvalidValue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from chatrt.bench.prompts import Prompt
    from chatrt.bench.speculation import PairSample, Question, SpeculationOptions
    from chatrt.bench.speculation_ngram import NgramCost
    from chatrt.bench.speculation_report import FiguresByDrafter
    from chatrt.cli.build import Runtime
    from chatrt.depth import StepCosts
    from chatrt.models.files import ModelFiles
    from chatrt.paths import Paths
    from chatrt.settings import Resolved, Settings

_NUM_PAIRS = 15  # of random prompts, and of groups of conversations
_GPU_FRACTION = (
    0.9  # of free GPU memory, what both runtimes have for KV pages unless told otherwise
)


def speculation(
    drafter: Annotated[
        str, typer.Option(help="Who drafts: auto, head, ngram, model; several with commas.")
    ] = AUTO,
    kinds: Annotated[str | None, typer.Option(help="Kinds of prompts, with commas. [all]")] = None,
    per_kind: Annotated[
        int | None, typer.Option(min=1, help="So many prompts of each kind. [all]")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Other prompts: JSONL, MT-Bench or ShareGPT.", dir_okay=False),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 200,
    temperature: Annotated[str, typer.Option(help="Temperatures, with commas.")] = "0,0.8",
    depth: Annotated[
        str, typer.Option(help="Drafts of each step: auto, or a number from 1 to 8.")
    ] = AUTO,
    at_once: Annotated[int, typer.Option(min=1, help="Conversations at once.")] = 1,
    random: Annotated[
        bool, typer.Option("--random", help="Text that nobody can predict, at temperature 2.")
    ] = False,
    pairs: Annotated[
        int | None,
        typer.Option(min=1, help="Pairs of each prompt [1]; all, with --random or --at-once [15]."),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="Draft model, or folder of a trained head; default: the settings'."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model; default: the settings'.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads that compute; default: the settings'.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampling and of intervals.")] = 0,
    compare: CompareOption = None,
    plot: PlotOption = None,
    json: JsonOption = False,
    save: SaveOption = None,
) -> None:
    """Decoding without speculation and with it, in turns: speed, acceptance, whether tokens differ.

    Two runtimes take turns, one of them without a drafter; on a GPU they share the KV memory.
    The model runs in this process, with the settings of CHATRT_* variables and config.toml.
    """
    if compare is not None:
        _compare(*compare, as_json=json, save=save)
        return
    from chatrt.bench.speculation import RANDOM_TEMPERATURE, SpeculationOptions

    if random and (prompts is not None or kinds is not None or per_kind is not None):
        raise InvalidValue("--random makes its own prompts: no --prompts, --kinds or --per-kind")
    require_plots(plot)
    repeated = random or at_once > 1
    num_pairs = pairs or (_NUM_PAIRS if repeated else 1)
    one_each = random and at_once == 1  # as many prompts as pairs
    options = SpeculationOptions(
        num_tokens=tokens,
        temperatures=(RANDOM_TEMPERATURE,) if random else temperatures_of(temperature),
        depth=depth_of(depth),
        at_once=at_once,
        num_pairs=1 if one_each else num_pairs,
        ignore_eos=random,
    )
    asked = _Asked(
        drafters=drafters_of(drafter),
        prompts=() if random else chosen_prompts(prompts, kinds, per_kind),
        num_random=num_pairs * at_once if random else 0,
        prompts_name=prompts.name if prompts is not None else "random" if random else "bundled",
        options=options,
        seed=seed,
    )
    flags = {"model": model, "threads": threads, "draft": draft, "max_draft": options.depth}
    run = _SpeculationRun(asked, common.find_paths(), flags)
    run.play()
    document = run.document()
    show(run.report(), document, as_json=json, save=save)
    draw(plot, document)
    if run.failure is not None:
        raise run.failure
    if run.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be measured; `num_random` prompts are made where there are none."""

    drafters: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    num_random: int
    prompts_name: str
    options: SpeculationOptions
    seed: int


class _SpeculationRun:
    """One run in this process, whose samples outlive an interruption and a drafter that is missing.

    Raises:
        SettingsError: A setting cannot be used.
    """

    def __init__(self, asked: _Asked, paths: Paths, flags: Mapping[str, object]) -> None:
        self.interrupted = False
        self.failure: ChatrtError | None = None
        self._asked = asked
        self._paths = paths
        self._pairs: dict[str, list[PairSample]] = {}
        self._ngram: NgramCost | None = None
        self._costs: dict[str, StepCosts] = {}
        self._flags = flags
        self._shares = kv_shares(common.load_settings(paths, flags).settings)
        self._resolved = {
            name: self._load_settings(speculation=name, kv_memory_fraction=self._shares.on)
            for name in asked.drafters
        }
        self._started_document = self._new_document()

    def play(self) -> None:
        """Take all samples, or those until Ctrl+C or an error.

        Raises:
            ChatrtError: Nothing had been measured before it.
        """
        try:
            for drafter, resolved in self._resolved.items():
                self._measure(drafter, resolved)
        except KeyboardInterrupt:
            if not self._pairs:
                raise
            self.interrupted = True
        except ChatrtError as error:
            if not any(self._pairs.values()):
                raise
            self.failure = error

    def document(self) -> dict[str, Any]:
        """What is printed as the last line."""
        return self._started_document | {
            "interrupted": self.interrupted,
            "failure": self.failure.message if self.failure else None,
            "step_costs": {name: dataclasses.asdict(one) for name, one in self._costs.items()},
            "ngram_propose_us": self._ngram.propose_us if self._ngram else None,
            "ngram_propose": dataclasses.asdict(self._ngram) if self._ngram else None,
            "drafters": {
                drafter: {f"{one:g}": dataclasses.asdict(each) for one, each in found.items()}
                for drafter, found in self._figures().items()
            },
            "samples": {
                drafter: [dataclasses.asdict(pair) for pair in pairs]
                for drafter, pairs in self._pairs.items()
            },
        }

    def report(self) -> RenderableType:
        """The tables."""
        from chatrt.bench.speculation_report import (
            ngram_sentence,
            speculation_report,
            step_costs_sentence,
        )

        document, options = self._started_document, self._asked.options
        depth = AUTO if options.depth is None else f"{options.depth} drafts"
        notes = [
            f"{document['model']} on {document['device']}, {document['num_threads']} threads, "
            f"executor {document['executor']}, seed {document['seed']}; "
            f"{document['num_prompts']} {self._asked.prompts_name} prompts, answers of up to "
            f"{options.num_tokens} tokens, depth {depth}, {options.at_once} at once.",
            f"{document['warm_up']['pairs']} pair of warm-up for each drafter is left out.",
        ]
        notes += [step_costs_sentence(name, one) for name, one in self._costs.items()]
        if self._ngram is not None:
            notes.append(ngram_sentence(self._ngram))
        if document["left_out"]:
            names = ", ".join(document["left_out"])
            notes.append(f"Left out, for they are longer than the context: {names}.")
        if self.interrupted:
            notes.insert(0, "Interrupted: these are the pairs that had been taken.")
        return speculation_report(self._figures(), notes)

    def _measure(self, drafter: str, resolved: Resolved) -> None:
        from chatrt.bench.speculation import SpeculationBench
        from chatrt.bench.speculation_ngram import measure_ngram, sessions_of

        files = _fetch(resolved, self._paths)
        runtime = _build(files, resolved, self._paths)
        # One context for both, or an answer that fills it would end sooner in one of them.
        without = self._load_settings(
            speculation="off",
            max_context=runtime.max_context,
            kv_memory_fraction=self._shares.off,
        )
        plain = _build(files, without, self._paths)
        if runtime.step_costs is not None:
            self._costs[drafter] = runtime.step_costs
        questions = self._questions(runtime)
        self._started_document |= {
            "model": runtime.model_name,
            "executor": runtime.ops.name,
            "num_prompts": len(questions),
        }
        bench = SpeculationBench(runtime.engine, plain.engine, questions, self._asked.options)
        self._pairs[drafter] = bench.pairs
        with counting_bar(f"pairs, {drafter}", bench.num_pairs) as advance:
            bench.run(advance)
        self._ngram = measure_ngram(sessions_of(questions, bench.pairs))

    def _load_settings(self, **flags: object) -> Resolved:
        return common.load_settings(self._paths, {**self._flags, **flags})

    def _questions(self, runtime: Runtime) -> list[Question]:
        """What fits the context with two tokens of an answer: the second is the first timed one."""
        from chatrt.bench.speculation import chat_questions, random_questions

        asked, tokenizer = self._asked, runtime.tokenizer
        longest = runtime.max_context - 2
        if asked.num_random:
            size = runtime.target.vocab_size
            ordinary = [one for one in range(size) if one not in tokenizer.special_ids]
            count, most = asked.num_random, max(1, longest // 2)
            return random_questions(ordinary, count, max_tokens=most, seed=asked.seed)
        questions = chat_questions(asked.prompts, tokenizer, seed=asked.seed)
        fitting = [one for one in questions if len(one.token_ids) <= longest]
        left_out = [one.prompt_id for one in questions if len(one.token_ids) > longest]
        if not fitting:
            raise InvalidValue(
                f"none of {len(questions)} prompts fits: a context holds {runtime.max_context} "
                f"tokens, the shortest has {min(len(one.token_ids) for one in questions)}"
            )
        self._started_document["left_out"] = left_out
        return fitting

    def _figures(self) -> FiguresByDrafter:
        from chatrt.bench.speculation_figures import figures_by_temperature

        return {
            drafter: figures_by_temperature(pairs, seed=self._asked.seed)
            for drafter, pairs in self._pairs.items()
        }

    def _new_document(self) -> dict[str, Any]:
        from chatrt.bench.document import new_document
        from chatrt.bench.speculation import NUM_WARM_UP_PAIRS

        asked, resolved = self._asked, next(iter(self._resolved.values()))
        changed = changed_settings(resolved)
        changed.pop("speculation", None)  # it is another one for each drafter
        return new_document("speculation", seed=asked.seed, device=device_of(resolved)) | {
            "model": None,
            "executor": None,
            "num_prompts": 0,
            "left_out": [],
            "settings": dataclasses.asdict(asked.options)
            | {"prompts": asked.prompts_name, "changed": changed},
            "warm_up": {"excluded": True, "pairs": NUM_WARM_UP_PAIRS},
        }


def _fetch(resolved: Resolved, paths: Paths) -> ModelFiles:
    """The model's files, fetched where they are missing."""
    from chatrt.models.sources import fetch, resolve

    with common.ProgressBar() as progress:
        source = resolve(resolved.settings.model, cache_dir=paths.cache)
        return fetch(source, cache_dir=paths.cache, progress=progress)


@dataclasses.dataclass(frozen=True, slots=True)
class KVShares:
    """`kv_memory_fraction` of the runtime with drafts, and of the one built behind it without."""

    on: float | None
    off: float | None


def kv_shares(settings: Settings) -> KVShares:
    """On a GPU half of what one runtime would take, and as much of the rest; else the settings'.

    On a CPU the fraction is one of all memory, and pages take none before they are written.
    """
    from chatrt.cli.machine import find_machine

    if find_machine(settings).device.type != "cuda":
        return KVShares(None, None)
    fraction = settings.kv_memory_fraction or _GPU_FRACTION
    return KVShares(fraction / 2, fraction / (2 - fraction))


def _build(files: ModelFiles, resolved: Resolved, paths: Paths) -> Runtime:
    from chatrt.cli.build import build_runtime

    with common.waiting() as report:
        return build_runtime(files, resolved, paths, report)


def _compare(a: Path, b: Path, *, as_json: bool, save: Path | None) -> None:
    from chatrt.bench.comparison import read_document
    from chatrt.bench.speculation_report import comparison, comparison_report

    entries = comparison(*(read_document(path, "speculation") for path in (a, b)))
    document = {
        "benchmark": "speculation comparison",
        "a": str(a),
        "b": str(b),
        "entries": entries,
    }
    notes = (f"a is {a}, b is {b}. Figures of different runs differ by the machine's noise too.",)
    show(comparison_report(entries, notes), document, as_json=as_json, save=save)


def register(group: typer.Typer) -> None:
    """Adds the command to the group `bench`."""
    group.command()(speculation)
