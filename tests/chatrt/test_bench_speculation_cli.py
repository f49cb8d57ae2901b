"""`chatrt bench speculation` as a person runs it: tables, the last line, Ctrl+C, bad options."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from chatrt.bench.prompts import KINDS
from chatrt.bench.speculation import NUM_WARM_UP_PAIRS
from chatrt.cli.bench_speculation import KVShares, kv_shares
from chatrt.cli.bench_speculation_options import chosen_prompts
from chatrt.cli.main import app
from chatrt.errors import InvalidValue
from chatrt.settings import Settings
from chatrt.testing.models import tiny_config
from chatrt.testing.tokenizer import tiny_tokenizer
from tests.chatrt.models_support import random_state, write_safetensors
from tests.support import share_kernels, time_scale

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from typer.testing import Result

FEW = ("--tokens", "12", "--temperature", "0.8", "--threads", "1")
runner = CliRunner()


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a tokenizer, as files."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = tiny_config(vocab_size=tiny_tokenizer(folder).vocab_size, max_context=1024)
    write_safetensors(folder, config, random_state(config))
    return folder


@pytest.fixture
def small_pool(monkeypatch: pytest.MonkeyPatch, chatrt_home: Path) -> Iterator[None]:
    share_kernels(chatrt_home)
    monkeypatch.setenv("CHATRT_KV_MEMORY_BYTES", "8MiB")
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    """Three short prompts of two kinds, and one that no context of 1,024 tokens holds."""
    texts = {
        "a": "the sea, the sea, the sea",
        "b": "one",
        "c": "one two one two",
        "long": "z" * 1200,
    }
    file = tmp_path / "prompts.jsonl"
    lines = (
        json.dumps({"id": name, "kind": "sea" if name == "a" else "counting", "text": text})
        for name, text in texts.items()
    )
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def invoke(*arguments: str) -> Result:
    return runner.invoke(app, ["bench", "speculation", *arguments])


def last_line(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout.splitlines()[-1])
    assert isinstance(document, dict)
    return document


@pytest.mark.usefixtures("small_pool")
def test_the_command_prints_tables_and_one_line_of_json_last(
    tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    result = invoke(
        *("--drafter", "ngram,auto", "--per-kind", "1", "--tokens", "12", "--threads", "1"),
        *("--model", str(tiny_folder), "--seed", "3", "--save", str(file)),
    )
    document = last_line(result)
    assert "Speculation off against on" in result.stdout
    assert "pair of warm-up for each drafter is left out" in result.stdout
    assert document == json.loads(file.read_text(encoding="utf-8"))
    assert document["benchmark"] == "speculation"
    assert (document["model"], document["num_threads"], document["seed"]) == ("tiny", 1, 3)
    assert document["num_prompts"] == len(KINDS)
    assert "Costs that ngram started from: a draft of ngram takes 0.0" in result.stdout
    assert list(document["step_costs"]) == ["ngram", "auto"]
    assert set(document["step_costs"]["auto"]["drafts"]) == {"ngram"}
    assert document["settings"]["depth"] is None
    assert document["warm_up"] == {"excluded": True, "pairs": NUM_WARM_UP_PAIRS}
    assert list(document["drafters"]) == list(document["samples"]) == ["ngram", "auto"]
    for by_temperature in document["drafters"].values():
        assert list(by_temperature) == ["0", "0.8"]
        for figures in by_temperature.values():
            assert figures["num_pairs"] == len(KINDS)
            assert figures["speedup"]["tokens_per_s_ratio"]["value"] > 0
            assert figures["speedup"]["ms_per_token_ratio"]["num_units"] == len(KINDS)
            assert figures["identical"]["num_answers"] == len(KINDS)
            assert figures["mean_accepted_length"]["overall"]["value"] >= 1
            assert set(figures["mean_accepted_length"]["by_kind"]) == set(KINDS)
            assert set(figures["accepted_per_position"]) == {"of_rounds", "of_drafted"}
            assert sum(figures["k_histogram"].values()) > 0
            assert figures["cost_ms_per_token"]["verify"] > 0
            assert figures["cost_off_ms_per_token"]["draft"] == 0
            assert figures["identical"]["num_identical"] == len(KINDS)
    assert 0 < document["ngram_propose_us"] < document["ngram_propose"]["cold_propose_us"]
    sample = document["samples"]["ngram"][0]
    assert sample["off"]["answers"][0]["token_ids"]


@pytest.mark.usefixtures("small_pool")
def test_prompts_of_a_file_are_chosen_by_kind_and_by_what_the_context_holds(
    tiny_folder: Path, prompt_file: Path
) -> None:
    chosen = ("--prompts", str(prompt_file), "--kinds", "counting", "--drafter", "ngram")
    result = invoke(*FEW, *chosen, "--depth", "2", "-m", str(tiny_folder))
    document = last_line(result)
    assert document["num_prompts"] == 2
    assert document["left_out"] == ["long"]
    assert "longer than the context: long" in result.stdout
    assert document["settings"]["prompts"] == prompt_file.name
    assert document["settings"]["depth"] == 2
    figures = document["drafters"]["ngram"]["0.8"]
    assert set(figures["k_histogram"]) <= {"0", "1", "2"}
    assert set(figures["mean_accepted_length"]["by_kind"]) == {"counting"}
    assert document["ngram_propose_us"] is None  # less than 1,000 tokens in all


@pytest.fixture
def mt_bench_file(tmp_path: Path) -> Path:
    file = tmp_path / "question.jsonl"
    kinds = {81: "writing", 82: "writing", 101: "reasoning", 102: "reasoning", 111: "math"}
    lines = (
        json.dumps({"question_id": number, "category": kind, "turns": ["one two", "three"]})
        for number, kind in kinds.items()
    )
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def test_prompts_of_an_mt_bench_file_are_chosen_by_kind_and_number(mt_bench_file: Path) -> None:
    chosen = chosen_prompts(mt_bench_file, "reasoning,writing", 1)
    assert [prompt.id for prompt in chosen] == ["81", "101"]
    assert len(chosen_prompts(mt_bench_file, None, None)) == 5
    with pytest.raises(InvalidValue, match="no prompt of the kind sonnets, it has writing"):
        chosen_prompts(mt_bench_file, "writing,sonnets", None)


@pytest.mark.usefixtures("small_pool")
def test_prompts_of_a_sharegpt_file_are_answered_so_many_as_asked(
    tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "sharegpt.json"
    said = [{"from": "human", "value": "one two"}, {"from": "gpt", "value": "three"}]
    conversations = [{"id": name, "conversations": said} for name in ("x", "y", "z")]
    file.write_text(json.dumps(conversations), encoding="utf-8")
    chosen = ("--prompts", str(file), "--kinds", "sharegpt", "--per-kind", "2", "--json")
    document = last_line(invoke(*FEW, *chosen, "--drafter", "ngram", "-m", str(tiny_folder)))
    figures = document["drafters"]["ngram"]["0.8"]
    assert figures["num_pairs"] == document["num_prompts"] == 2
    assert set(figures["mean_accepted_length"]["by_kind"]) == {"sharegpt"}


def test_two_runtimes_on_a_gpu_have_the_memory_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where the settings would put it is all that is asked of the machine here.
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    gpu = Settings(device="cuda")
    for settings, fraction in ((gpu, 0.9), (replace(gpu, kv_memory_fraction=0.5), 0.5)):
        shares = kv_shares(settings)
        assert shares.on is not None
        assert shares.off is not None
        assert shares.on == (1 - shares.on) * shares.off == pytest.approx(fraction / 2)
    assert kv_shares(Settings(device="cpu", kv_memory_fraction=0.5)) == KVShares(None, None)


@pytest.mark.usefixtures("small_pool")
def test_conversations_at_once_are_held_to_those_alone(
    tiny_folder: Path, prompt_file: Path
) -> None:
    chosen = ("--prompts", str(prompt_file), "--drafter", "ngram", "--json")
    result = invoke(*FEW, *chosen, "--at-once", "3", "--pairs", "2", "-m", str(tiny_folder))
    assert result.stdout.count("\n") == 1
    figures = last_line(result)["drafters"]["ngram"]["0.8"]
    assert figures["num_pairs"] == 2
    assert figures["identical_to_alone"]["num_answers"] == 12
    assert figures["cost_ms_per_token"] is None


@pytest.mark.usefixtures("small_pool")
def test_random_text_has_a_prompt_for_each_pair(tiny_folder: Path) -> None:
    result = invoke(
        *("--random", "--pairs", "3", "--tokens", "12", "--drafter", "ngram", "--json"),
        *("--threads", "1", "-m", str(tiny_folder)),
    )
    document = last_line(result)
    assert document["num_prompts"] == 3
    figures = document["drafters"]["ngram"]["2"]
    assert figures["speedup"]["pair_ratio"]["num_units"] == 3
    for pair in document["samples"]["ngram"]:
        assert len(pair["off"]["answers"][0]["token_ids"]) == 12


@pytest.mark.usefixtures("small_pool")
def test_a_drafter_that_is_missing_is_one_sentence(tiny_folder: Path, prompt_file: Path) -> None:
    chosen = ("--prompts", str(prompt_file), "--drafter", "head", "-m", str(tiny_folder))
    result = invoke(*FEW, *chosen)
    assert result.exit_code != 0
    assert "tiny" in result.stderr.splitlines()[-1]
    assert result.stderr.splitlines()[-1].startswith("chatrt: ")
    assert result.stdout == ""


@pytest.mark.usefixtures("small_pool")
def test_what_was_measured_before_a_drafter_that_is_missing_is_shown(
    tiny_folder: Path, prompt_file: Path
) -> None:
    chosen = ("--prompts", str(prompt_file), "--drafter", "ngram,head", "--json")
    result = invoke(*FEW, *chosen, "-m", str(tiny_folder))
    assert result.exit_code != 0
    document = json.loads(result.stdout)
    assert list(document["drafters"]) == ["ngram"]
    assert document["drafters"]["ngram"]["0.8"]["num_pairs"] == 3
    assert result.stderr.splitlines()[-1] == f"chatrt: {document['failure']}"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--drafter", "auto,off"), "--drafter has 'off', it must be of auto, head, ngram, model"),
        (("--depth", "9"), "--depth is '9', it must be auto or a whole number from 1 to 8"),
        (("--depth", "deep"), "--depth is 'deep'"),
        (("--temperature", "0,hot"), "--temperature is '0,hot', it must be numbers from 0 to 2"),
        (("--temperature", "2.5"), "--temperature is '2.5'"),
        (("--kinds", "casual,sonnets"), "kind is 'sonnets'"),
        (("--random", "--kinds", "code"), "--random makes its own prompts"),
        (("--prompts", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--model", "nobody"), "nobody"),
        (("--compare", "nowhere.json", "nothing.json"), "nowhere.json"),
    ],
)
@pytest.mark.usefixtures("chatrt_home")
def test_arguments_that_make_no_sense_are_one_sentence(
    arguments: tuple[str, ...], sentence: str
) -> None:
    result = invoke(*arguments)
    assert result.exit_code != 0
    assert result.stderr.startswith("chatrt: ")
    assert sentence in result.stderr
    assert result.stdout == ""


def test_a_kind_that_a_file_does_not_have_is_one_sentence(prompt_file: Path) -> None:
    result = invoke("--prompts", str(prompt_file), "--kinds", "code")
    assert result.exit_code == 2
    assert "has no prompt of the kind code, it has sea, counting" in result.stderr


def test_two_saved_documents_are_held_side_by_side(tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, ratio in zip(files, (1.5, 1.8), strict=True):
        speedup = {"pair_ratio": {"value": ratio, "low": 1.0, "high": 2.0, "num_units": 9}}
        document = {"benchmark": "speculation", "drafters": {"auto": {"0": {"speedup": speedup}}}}
        file.write_text(json.dumps(document), encoding="utf-8")
    result = invoke("--compare", *map(str, files))
    (entry,) = last_line(result)["entries"]
    assert entry["speedup.pair_ratio.value"] == {"a": 1.5, "b": 1.8, "ratio": 1.2}
    assert "auto, temperature 0" in result.stdout
    files[1].write_text("no JSON", encoding="utf-8")
    refused = invoke("--compare", *map(str, files))
    assert refused.exit_code == 2
    assert "b.json is not the JSON document of a measurement" in refused.stderr


@pytest.mark.usefixtures("small_pool")
@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_ctrl_c_prints_what_was_measured(tiny_folder: Path) -> None:
    arguments = ("--pairs", "1000000", "--drafter", "ngram", "--json", "-m", str(tiny_folder))
    command = [sys.executable, "-m", "chatrt", "bench", "speculation", *FEW, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for _ in ("on", "off"):
            while b"warming up" not in process.stderr.readline():
                assert process.poll() is None
        time.sleep(3 * time_scale())
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate()
    assert process.returncode == 130, stderr
    document = json.loads(stdout)
    assert document["interrupted"] is True
    assert document["drafters"]["ngram"]["0.8"]["num_pairs"] > 0
