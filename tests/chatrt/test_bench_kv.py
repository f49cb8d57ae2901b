"""`chatrt bench kv`: each type of pages is measured by itself, and held beside the first."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from chatrt.bench.kv_report import KVFigures, kv_report
from chatrt.cli.main import app

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import ModelCache

runner = CliRunner()
QUALITY = {"perplexity": {"served": 20.0, "reference": 19.0}, "mean_kl": 0.01}
SPECULATION = {"drafters": {"auto": {"0": {"mean_accepted_length": {"overall": {"value": 2.5}}}}}}


def test_figures_are_found_and_what_was_not_measured_is_none() -> None:
    one = KVFigures.of(100, QUALITY, SPECULATION)
    assert (one.perplexity, one.reference_perplexity, one.mean_kl) == (20.0, 19.0, 0.01)
    assert one.tokens_per_pass == {"0": 2.5, "0.8": None}
    assert KVFigures.of(100, QUALITY, None).tokens_per_pass == {"0": None, "0.8": None}


def test_types_are_held_against_the_first_one() -> None:
    worse = {"perplexity": {"served": 21.0}}
    figures = {"fp16": KVFigures.of(100, QUALITY, None), "int8": KVFigures.of(53, worse, None)}
    console = Console(width=120)
    with console.capture() as capture:
        console.print(kv_report(figures))
    (row,) = [line.split() for line in capture.get().splitlines() if line.strip()[:4] == "int8"]
    assert row == ["int8", "53", "0.53", "21.00", "+5.00%", "-", "-", "-"]


def test_a_type_that_does_not_exist_is_one_sentence() -> None:
    result = runner.invoke(app, ["bench", "kv", "--dtypes", "fp16,int2"])
    assert result.exit_code == 2
    assert "--dtypes names 'int2', it must be one of float32" in result.stderr


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_each_type_scores_the_same_text(model_cache: ModelCache, chatrt_home: Path) -> None:
    model_cache.share_with(chatrt_home)
    arguments = ["bench", "kv", "--dtypes", "fp16,int8,int4", "--tokens", "200", "--no-acceptance"]
    result = await asyncio.to_thread(runner.invoke, app, arguments)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])["by_dtype"]
    sizes = [found[name]["bytes_per_token"] for name in ("fp16", "int8", "int4")]
    # 30 layers, keys and values, three heads of 64 numbers
    assert sizes == [180 * 128, 180 * (64 + 4), 180 * (32 + 16)]
    first = found["fp16"]["perplexity"]
    assert abs(found["int8"]["perplexity"] / first - 1) < 0.01
    assert abs(found["int4"]["perplexity"] / first - 1) < 0.1
