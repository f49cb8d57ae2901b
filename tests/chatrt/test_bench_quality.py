"""`chatrt bench quality`: figures that are known beforehand, the bundled text, the command."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from chatrt.bench import quality
from chatrt.bench.quality import (
    WindowSums,
    bundled_text,
    combine,
    measure,
    measure_windows,
    num_windows,
    sequence_logits,
)
from chatrt.cli.main import app
from chatrt.engine import Target
from chatrt.models.decoder import Decoder
from chatrt.testing.engine import tiny_target
from chatrt.testing.models import tiny_config
from chatrt.testing.tokenizer import tiny_tokenizer
from chatrt_kernels.reference import ReferenceOps
from tests.chatrt.models_support import CPU, random_state, write_safetensors
from tests.support import share_kernels

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from typer.testing import Result

    from chatrt.text.tokenizer import Tokenizer

CONTEXT = 64
TOKENS = [(i * i * 31 + 7 * i + 5) % 256 for i in range(50)]


@pytest.fixture
def head(tokenizer: Tokenizer) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(tokenizer.vocab_size, 64, generator=generator) / 3


def target(tokenizer: Tokenizer, head: torch.Tensor, *, max_rows: int = CONTEXT) -> Target:
    """The tiny random model with that head `[vocab, hidden]`; the rest is always the same."""
    tiny = tiny_target(tokenizer, max_context=CONTEXT, max_rows=max_rows)
    ops = ReferenceOps()
    decoder = Decoder(
        tiny.decoder.config,
        replace(tiny.decoder.weights, head=ops.prepare(head)),
        ops,
        max_rows=max_rows,
        max_positions=CONTEXT,
        device=CPU,
        dtype=torch.float32,
    )
    return Target(decoder, tiny.kv, tiny.batches, tokenizer)


def log_softmax(logits: Sequence[float]) -> list[float]:
    total = math.log(math.fsum(math.exp(one) for one in logits))
    return [one - total for one in logits]


def logprobs_of(one: Target) -> list[list[float]]:
    """Of every row of `TOKENS` but the last, in Python's own arithmetic."""
    return [log_softmax(row) for row in sequence_logits(one, TOKENS[:-1], 0).tolist()]


def test_targets_that_are_the_same_differ_in_nothing(
    tokenizer: Tokenizer, head: torch.Tensor
) -> None:
    figures = measure(target(tokenizer, head), target(tokenizer, head), TOKENS, CONTEXT)
    assert figures.perplexity_ratio == 1.0
    assert figures.perplexity.served == figures.perplexity.reference
    assert (figures.mean_kl, figures.max_logit_difference) == (0.0, 0.0)
    assert figures.top1_agreement == 1.0
    assert figures.within


def test_a_head_of_other_scale_has_the_divergence_that_arithmetic_gives(
    tokenizer: Tokenizer, head: torch.Tensor
) -> None:
    reference, served = target(tokenizer, head), target(tokenizer, head * 0.5)
    rows = logprobs_of(reference)
    softer = [log_softmax([0.5 * one for one in row]) for row in rows]
    kl = math.fsum(
        math.exp(p) * (p - q)
        for row, other in zip(rows, softer, strict=True)
        for p, q in zip(row, other, strict=True)
    ) / len(rows)
    loss = -math.fsum(row[token] for row, token in zip(softer, TOKENS[1:], strict=True))
    largest = sequence_logits(reference, TOKENS[:-1], 0).abs().max().item() / 2
    figures = measure(served, reference, TOKENS, CONTEXT)
    assert kl > 0.01
    assert figures.mean_kl == pytest.approx(kl, rel=1e-5)
    assert figures.perplexity.served == pytest.approx(math.exp(loss / len(rows)), rel=1e-5)
    assert figures.max_logit_difference == pytest.approx(largest, rel=1e-5)
    assert figures.top1_agreement == 1.0
    assert not figures.within


def test_a_head_of_zeros_is_as_perplexed_as_the_vocabulary_is_large(
    tokenizer: Tokenizer, head: torch.Tensor
) -> None:
    reference, served = target(tokenizer, head), target(tokenizer, torch.zeros_like(head))
    figures = measure(served, reference, TOKENS, CONTEXT)
    entropy = -math.fsum(math.exp(p) * p for row in logprobs_of(reference) for p in row)
    expected = math.log(tokenizer.vocab_size) - entropy / (len(TOKENS) - 1)
    assert figures.perplexity.served == pytest.approx(tokenizer.vocab_size)
    assert figures.mean_kl == pytest.approx(expected, rel=1e-5)
    assert figures.top1_agreement < 0.1
    ratio = figures.perplexity.served / figures.perplexity.reference
    assert figures.perplexity_ratio == pytest.approx(ratio)


def test_the_divergence_is_taken_from_the_side_of_the_reference(
    tokenizer: Tokenizer, head: torch.Tensor
) -> None:
    one, other = target(tokenizer, head), target(tokenizer, head * 0.5)
    there, back = (measure(*pair, TOKENS, CONTEXT) for pair in ((one, other), (other, one)))
    assert there.mean_kl != pytest.approx(back.mean_kl, rel=0.05)
    assert there.perplexity_ratio == pytest.approx(1 / back.perplexity_ratio)


def test_every_token_but_the_first_is_scored_once_whatever_the_window(
    tokenizer: Tokenizer, head: torch.Tensor
) -> None:
    reference, served = target(tokenizer, head), target(tokenizer, head * 0.5)
    for window in (1, 7, 48, 49, 50, 64):
        found = list(measure_windows(served, reference, TOKENS, window))
        assert len(found) == num_windows(len(TOKENS), window)
        assert combine(found).num_tokens == len(TOKENS) - 1


def test_a_window_sees_nothing_of_the_one_before(tokenizer: Tokenizer, head: torch.Tensor) -> None:
    reference, served = target(tokenizer, head), target(tokenizer, head * 0.5)
    _, second, *_ = measure_windows(served, reference, TOKENS, 20)
    (alone,) = measure_windows(served, reference, TOKENS[20:41], 20)
    assert second == alone


def test_chunks_of_a_window_give_the_figures_of_the_whole(
    tokenizer: Tokenizer, head: torch.Tensor
) -> None:
    whole = measure(target(tokenizer, head * 0.5), target(tokenizer, head), TOKENS, CONTEXT)
    narrow = target(tokenizer, head, max_rows=8)
    chunked = measure(target(tokenizer, head * 0.5), narrow, TOKENS, CONTEXT)
    assert chunked.num_tokens == whole.num_tokens
    assert chunked.mean_kl == pytest.approx(whole.mean_kl, rel=1e-4)
    assert chunked.perplexity.reference == pytest.approx(whole.perplexity.reference, rel=1e-4)


def test_the_bundled_text_is_plain_english_with_a_line_for_each_paragraph() -> None:
    text = bundled_text()
    assert text.isascii()
    assert len(text.split()) > 4000
    assert text.startswith("CHAPTER I. Down the Rabbit-Hole\n\nAlice was beginning")
    assert "\n\n\n" not in text
    assert all(line == line.strip() for line in text.splitlines())


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    config = tiny_config(vocab_size=tiny_tokenizer(folder).vocab_size)
    write_safetensors(folder, config, random_state(config))
    return folder


@pytest.fixture(autouse=True)
def kernels_of_all_tests(chatrt_home: Path) -> None:
    share_kernels(chatrt_home)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "quality", *arguments])


def last_line(output: str) -> Any:
    return json.loads(output.splitlines()[-1])


def test_a_table_comes_first_and_one_line_of_json_last(model_folder: Path) -> None:
    result = invoke("-m", str(model_folder), "--context", "64", "--tokens", "100")
    assert result.exit_code == 0, result.stderr
    assert "Quality over 100 tokens" in result.stdout
    document = last_line(result.stdout)
    assert (document["benchmark"], document["model"]) == ("quality", "tiny")
    assert document["num_tokens"] == 100
    assert document["settings"]["context"] == 64
    assert document["perplexity"]["reference"] > 1
    assert set(document["perplexity"]) == {"served", "reference"}
    for name in ("perplexity_ratio", "mean_kl", "top1_agreement", "max_logit_difference"):
        assert isinstance(document[name], float), name
    assert document["within"] is True
    assert [one["num_tokens"] for one in document["samples"]] == [64, 36]


def test_another_executor_of_the_same_file_is_close_and_not_the_same(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHATRT_DTYPE", "bfloat16")
    result = invoke("-m", str(model_folder), "--context", "64", "--tokens", "100", "--json")
    assert result.stdout.count("\n") == 1
    document = last_line(result.stdout)
    assert document["dtype"] == "bfloat16"
    assert document["settings"]["server"]["dtype"] == "bfloat16"
    assert 0 < document["max_logit_difference"] < 0.5
    assert document["perplexity_ratio"] == pytest.approx(1, abs=0.05)


def test_ctrl_c_prints_the_windows_that_were_scored(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> Iterator[WindowSums]:
        yield from itertools.islice(measure_windows(*arguments), 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(quality, "measure_windows", interrupted)
    result = invoke("-m", str(model_folder), "--context", "64", "--tokens", "100")
    assert result.exit_code == 130
    assert "Interrupted: these are the windows that had been scored." in result.stdout
    document = last_line(result.stdout)
    assert document["interrupted"] is True
    assert document["num_tokens"] == 64


def test_a_text_of_ones_own_can_be_measured(model_folder: Path, tmp_path: Path) -> None:
    text, saved = tmp_path / "mine.txt", tmp_path / "out.json"
    text.write_text("hello world", encoding="utf-8")
    result = invoke("-m", str(model_folder), "--text", str(text), "--save", str(saved))
    document = last_line(result.stdout)
    assert document["settings"]["text"] == "mine.txt"
    assert document["num_tokens"] == 1  # the tiny tokenizer joins each of the two words
    assert json.loads(saved.read_text(encoding="utf-8")) == document


@pytest.mark.parametrize(
    ("content", "arguments", "sentence"),
    [
        (b"hello world", ("--context", "1000"), "--context is 1000, the model's own is 512"),
        (b"hello", (), "the text has 1 tokens, at least 2 are needed"),
        (b"\xff", (), "is not UTF-8 text"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    content: bytes, arguments: tuple[str, ...], sentence: str, model_folder: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    result = invoke("-m", str(model_folder), "--text", str(text), *arguments)
    assert result.exit_code == 2, result.output
    assert sentence in result.stderr
    assert result.stdout == ""
