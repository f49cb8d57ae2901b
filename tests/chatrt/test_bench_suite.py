"""README's figures: each lies where the suite looks for it, bars are told, pages are kept."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from typer.testing import CliRunner

from chatrt.bench.readme import BEGIN, END, Page, check_documents, figures_markdown
from chatrt.bench.suite import ROWS, RUNS, Document, Figure
from chatrt.cli.main import app
from chatrt.errors import InvalidValue
from tests.support import time_scale

if TYPE_CHECKING:
    from pathlib import Path

MACHINE = {
    "started_at": "2026-01-02T03:04:05+00:00",
    "git": {"revision": "0123456789abcdef", "changed": True},
    "machine": {"system": "Linux 6 x86_64", "processor": "A CPU", "num_cores": 2},
    "versions": {"torch": "2.12.0"},
    "model": "tiny",
}
PAGE = f"# Title\n\nbefore\n\n{BEGIN}\nold\n{END}\n\nafter\n"
runner = CliRunner()


def document(*, value: float) -> Document:
    """A document that has `value` wherever one of the rows looks."""
    made: dict[str, Any] = dict(MACHINE)
    for path in {path for row in ROWS for figure in row.figures for path in figure.paths}:
        inner = made
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = value
    return made


def test_every_row_is_of_a_run_and_every_run_has_a_row_or_a_plot() -> None:
    names = [run.name for run in RUNS]
    assert len(set(names)) == len(names)
    told = {row.run for row in ROWS}
    assert told <= set(names)
    shown = {run.name for run in RUNS if run.plots}
    assert set(names) == told | shown


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_every_command_of_the_suite_takes_its_arguments(run: Any) -> None:
    result = runner.invoke(app, ["bench", *run.command_line(llama=True), "--help"])
    assert result.exit_code == 0
    options = {one for one in run.command_line(llama=True) if one.startswith("--")}
    assert options <= set(result.stdout.replace(",", " ").split())


@pytest.mark.parametrize(
    ("figure", "values", "within", "bar"),
    [
        (Figure("{}", (("a",),), at_least=2.0), [2.0], True, "≥ 2"),
        (Figure("{}", (("a",),), at_least=2.0), [1.9], False, "≥ 2"),
        (Figure("{}", (("a",),), at_most=0.005), [0.005], True, "≤ 0.005"),
        (Figure("{}", (("a",),), at_most=0.005), [0.0051], False, "≤ 0.005"),
        (Figure("{} {}", (("a",), ("b",)), whole=True), [3.0, 3.0], True, "all"),
        (Figure("{} {}", (("a",), ("b",)), whole=True), [2.0, 3.0], False, "all"),
        (Figure("{}", (("a",),)), [9.0], True, ""),
    ],
)
def test_a_figure_is_held_to_its_bar(
    figure: Figure, values: list[float], within: bool, bar: str
) -> None:
    assert figure.is_within(values) is within
    assert figure.bar == bar


def test_a_figure_that_a_document_lacks_is_not_told() -> None:
    figure = Figure("{} of {}", (("a", "b"), ("c",)))
    assert figure.told({"a": {"b": 1.0}, "c": 2.0}) is not None
    for lacking in ({"a": {"b": 1.0}}, {"a": 3.0, "c": 2.0}, {"a": {"b": None}, "c": 2.0}):
        assert figure.told(lacking) is None


def test_what_misses_its_bar_is_bold_and_each_line_names_its_command() -> None:
    block = figures_markdown({"step": document(value=0.5)}, {})
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in block.splitlines()}
    roofline = lines["decode, 1 row: share of the read bandwidth over the weights"]
    told = "| **0.50**; 0.5 ms at 0 GB/s | ≥ 0.8; – | `chatrt bench step --contention` |"
    assert told in roofline
    assert "| 0.50 | ≥ 0.4 |" in lines["beside a busy process, share of quiet speed"]
    assert "A CPU, 2 cores, Linux, torch 2.12.0, tiny; 2026-01-02, 0123456+. A plus:" in block
    assert "quality" not in block  # it was not measured


def test_pictures_have_a_version_for_dark_pages() -> None:
    block = figures_markdown({}, {"step decode by rows": "docs/plots/step-decode-by-rows"})
    assert 'srcset="docs/plots/step-decode-by-rows-dark.png"' in block
    assert 'src="docs/plots/step-decode-by-rows-light.png"' in block


def test_only_what_is_between_the_markers_is_rewritten(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    link = tmp_path / "link.md"
    link.symlink_to(page)
    for text in (PAGE, PAGE.replace("\n", "\r\n")):
        page.write_bytes(text.encode())
        page.chmod(0o640)
        Page.read(link).rewrite("new")
        assert page.read_bytes().decode() == text.replace("old", "new")
        assert page.stat().st_mode & 0o777 == 0o640
        assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "link.md"]


@pytest.mark.parametrize(
    "text", ["no markers", f"{BEGIN}\n", f"{END}\n{BEGIN}\n", PAGE + PAGE], ids=str
)
def test_a_page_without_its_markers_is_left_alone(text: str, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidValue, match="needs the lines"):
        Page.read(page)
    assert page.read_text(encoding="utf-8") == text


def test_a_measurement_without_its_figure_says_so_beside_its_bar() -> None:
    block = figures_markdown({"peers": MACHINE}, {})
    assert "**not measured** | ≥ 2.5; – | `chatrt bench peers` |" in block


def test_documents_of_two_machines_make_no_page(tmp_path: Path) -> None:
    other = MACHINE | {"machine": {"processor": "Another CPU", "num_cores": 8}}
    check_documents({"step": MACHINE, "quality": MACHINE}, tmp_path)
    with pytest.raises(InvalidValue, match="step on A CPU, 2 cores; quality on Another CPU, 8"):
        check_documents({"step": MACHINE, "quality": other}, tmp_path)


@pytest.mark.parametrize("content", ['{"benchmark": "step", "gi', "[]", "{}", "\xff"])
def test_a_damaged_document_is_told_by_its_name_before_anything_is_measured(
    content: str, tmp_path: Path
) -> None:
    (tmp_path / "step.json").write_bytes(content.encode("latin-1"))
    result = runner.invoke(app, ["bench", "all", str(tmp_path), "--only", "bookkeeping"])
    assert result.exit_code == 2
    assert f"{tmp_path / 'step.json'} is not the" in result.stderr
    assert not (tmp_path / "bookkeeping.json").exists()


def test_figures_of_a_page_that_were_not_measured_are_not_taken_off_it(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(PAGE.replace("old", "| x | 1 | `chatrt bench quality` |"), encoding="utf-8")
    before = page.read_text(encoding="utf-8")
    arguments = [str(tmp_path / "documents"), "--only", "bookkeeping", "--readme", str(page)]
    result = runner.invoke(app, ["bench", "all", *arguments, "--json"])
    assert result.exit_code == 0
    assert "README.md is left as it was, not measured here: quality" in result.stderr
    assert page.read_text(encoding="utf-8") == before


def test_the_projects_own_page_has_the_markers() -> None:
    from pathlib import Path

    page = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1
    assert page.index(BEGIN) < page.index(END)


def test_a_run_leaves_its_document_and_a_rewritten_page(tmp_path: Path) -> None:
    page, folder = tmp_path / "README.md", tmp_path / "documents"
    page.write_text(PAGE, encoding="utf-8")
    arguments = ["bench", "all", str(folder), "--only", "bookkeeping"]
    result = runner.invoke(app, [*arguments, "--readme", str(page)])
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    rows = [row for row in ROWS if row.run == "bookkeeping"]
    assert [row["what"] for row in told["figures"]] == [row.what for row in rows]
    assert [len(row["told"]) for row in told["figures"]] == [len(row.figures) for row in rows]
    assert set(told["duration_s"]) == {"bookkeeping"}
    measured = json.loads((folder / "bookkeeping.json").read_text(encoding="utf-8"))
    micros = measured["sessions"]["1"]["total_us"]
    assert f"{micros:.0f} µs" in page.read_text(encoding="utf-8")
    assert "`chatrt bench bookkeeping`" in page.read_text(encoding="utf-8")
    kept = runner.invoke(app, [*arguments, "--keep", "--json"])
    assert json.loads(kept.stdout)["duration_s"] == {}
    assert json.loads(kept.stdout)["figures"] == told["figures"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--readme", "none.md"), "none.md cannot be read: No such file or directory"),
        (("--readme", "bare.md"), "bare.md needs the lines"),
        (("--plots", "plots"), "--plots is where the plots of a page go, it needs --readme"),
        (("--save", "no/where.json"), "where.json cannot be written"),
    ],
)
def test_a_page_that_could_not_be_written_is_told_before_anything_is_measured(
    arguments: tuple[str, str], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "bare.md").write_text("# No figures here\n", encoding="utf-8")
    option, name = arguments
    folder = tmp_path / "documents"
    result = runner.invoke(app, ["bench", "all", str(folder), option, str(tmp_path / name)])
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert not folder.exists()


def test_a_page_of_files_that_no_revision_has_is_warned_of_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "README.md"
    page.write_text(PAGE, encoding="utf-8")
    git = {"revision": "0123456789", "changed": True}
    monkeypatch.setattr("chatrt.bench.document.git_revision", lambda _: git)
    arguments = ["bench", "all", str(tmp_path / "documents"), "--only", "bookkeeping"]
    result = runner.invoke(app, [*arguments, "--readme", str(page), "--json"])
    assert "files differ from revision 0123456: the page will say so" in result.stderr


def test_a_measurement_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    result = runner.invoke(app, ["bench", "all", str(tmp_path), "--only", "step,speed"])
    assert result.exit_code == 2
    assert "--only names 'speed', it must be one of step, quality" in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_the_measurement_that_runs_and_leaves_no_half_document(
    name: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "chatrt", "bench", "all", str(tmp_path), "--json"]
    with subprocess.Popen(
        [*command, "--only", "bookkeeping"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        while b"1 of 1: chatrt bench bookkeeping" not in process.stderr.readline():
            assert process.poll() is None
        time.sleep(0.2 * time_scale())
        process.send_signal(getattr(signal, name))
        stdout, stderr = process.communicate()
    assert process.returncode == 130, stderr
    assert json.loads(stdout)["interrupted"] is True
    assert not _running(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def _running(word: str) -> list[int]:
    """Processes that have it in their command line."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(word in part for part in process.info["cmdline"] or ())
    ]
