"""Who drafts for a model: what the settings find, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from chatrt.cli.build import build_runtime
from chatrt.cli.drafts import describe_drafts, find_draft
from chatrt.errors import ModelError, ModelFileError, ModelNotFound, SettingsError
from chatrt.models.files import ModelFiles, fingerprint
from chatrt.paths import Paths
from chatrt.settings import Resolved, Settings, describe
from chatrt.testing.engine import run_turn, turn_request
from chatrt.testing.heads import tiny_head
from chatrt.testing.models import tiny_config
from chatrt.testing.tokenizer import tiny_tokenizer
from chatrt_drafts.head_file import FILE_NAME
from tests.chatrt.models_support import random_state, write_safetensors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from chatrt.models.config import ModelConfig

CONFIG = tiny_config(max_context=256)
LAYERS = (0, 1)


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths.find({"CHATRT_HOME": str(tmp_path / "home")})


@pytest.fixture
def target(tmp_path: Path) -> ModelFiles:
    return model_folder(tmp_path / "target", seed=0)


def model_folder(folder: Path, *, seed: int) -> ModelFiles:
    write_safetensors(folder, CONFIG, random_state(CONFIG, seed))
    tiny_tokenizer(folder)
    return ModelFiles(folder.name, folder, folder)


def head_folder(folder: Path, files: ModelFiles, *, num_tokens: int = 256) -> Path:
    folder.mkdir()
    head = tiny_head(
        CONFIG,
        feature_layers=LAYERS,
        token_ids=range(num_tokens),
        fingerprint=fingerprint(files.weight_files()),
    )
    head.save(folder / FILE_NAME)
    return folder


def settings(**chosen: object) -> Settings:
    return Settings(device="cpu", kernels="reference", threads=1, **chosen)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("speculation", "words"), [("off", "none"), ("ngram", "n-grams"), ("auto", "n-grams")]
)
def test_without_a_head_n_grams_draft(
    target: ModelFiles, paths: Paths, speculation: str, words: str
) -> None:
    chosen = settings(speculation=speculation)
    draft = find_draft(chosen, target, paths.cache)
    assert (draft.head, draft.model) == (None, None)
    assert describe_drafts(chosen, draft) == words


def test_a_head_of_ones_own_drafts_for_its_target(
    target: ModelFiles, paths: Paths, tmp_path: Path
) -> None:
    chosen = settings(draft=str(head_folder(tmp_path / "head", target)))
    draft = find_draft(chosen, target, paths.cache)
    assert draft.head is not None
    assert [config.num_layers for config in draft.configs(CONFIG)] == [1]
    words = "a head trained for tiny, n-grams where text repeats itself"
    assert describe_drafts(chosen, draft) == words


def test_a_head_of_other_weights_is_refused_with_both_names(
    target: ModelFiles, paths: Paths, tmp_path: Path
) -> None:
    other = model_folder(tmp_path / "other", seed=1)
    chosen = settings(draft=str(head_folder(tmp_path / "head", target)))
    with pytest.raises(ModelFileError) as caught:
        find_draft(chosen, other, paths.cache)
    for part in (
        "trained for tiny",
        "model is other",
        *(fingerprint(files.weight_files()) for files in (target, other)),
    ):
        assert part in caught.value.message


@pytest.mark.parametrize(
    ("chosen", "error", "part"),
    [
        ({"speculation": "head"}, SettingsError, "none is shipped for target"),
        ({"speculation": "head", "draft": "."}, SettingsError, f"has no {FILE_NAME}"),
        ({"speculation": "model"}, SettingsError, "names no draft model"),
        ({"draft": "no such model"}, ModelNotFound, "no model 'no such model'"),
    ],
)
def test_what_is_not_there_is_said(
    target: ModelFiles, paths: Paths, chosen: dict[str, str], error: type[Exception], part: str
) -> None:
    with pytest.raises(error, match=part):
        find_draft(settings(**chosen), target, paths.cache)


@pytest.mark.parametrize("drafter", ["head", "model"])
def test_a_runtime_drafts_with_it_and_plans_memory_for_both(
    target: ModelFiles,
    paths: Paths,
    tmp_path: Path,
    drafter: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    folder = target.path if drafter == "model" else head_folder(tmp_path / "head", target)
    chosen = settings(
        speculation=drafter, draft=str(folder), kv_memory_bytes=1 << 20, max_num_seqs=8
    )
    resolved = Resolved(chosen, dict.fromkeys(describe(), "default"))
    runtime = build_runtime(target, resolved, paths, lambda _text: None)
    request = turn_request("a", [5, 9, 5, 9, 5, 9, 5])
    request.speculation_tokens = 3
    finished = run_turn(runtime.engine, request)
    assert finished.speculation.drafter == drafter
    if drafter == "model":  # the target itself: all its drafts are right
        assert finished.speculation.accepted == finished.speculation.drafted
    assert "of it for drafts" in caplog.text
    of_drafts, of_target = runtime.kv_bytes["drafts"], runtime.kv_bytes["target"]
    assert of_drafts * (1 if drafter == "model" else CONFIG.num_layers) == of_target
    assert "drafts: " in caplog.text


def test_a_draft_model_of_another_vocabulary_is_refused(
    target: ModelFiles, paths: Paths, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    write_safetensors(folder, CONFIG, random_state(CONFIG))
    tiny_tokenizer(folder, specials=("<|im_end|>", "<|im_start|>"))
    chosen = settings(speculation="model", draft=str(folder), kv_memory_bytes=1 << 20)
    resolved = Resolved(chosen, dict.fromkeys(describe(), "default"))
    with pytest.raises(ModelError, match="another vocabulary"):
        build_runtime(target, resolved, paths, lambda _text: None)


def test_a_head_that_drafts_tokens_the_tokenizer_lacks_is_refused_with_both_numbers(
    target: ModelFiles, paths: Paths, tmp_path: Path
) -> None:
    folder = head_folder(tmp_path / "head", target, num_tokens=300)
    chosen = settings(speculation="head", draft=str(folder), kv_memory_bytes=1 << 20)
    resolved = Resolved(chosen, dict.fromkeys(describe(), "default"))
    with pytest.raises(ModelFileError, match="drafts token 299, the model has 273"):
        build_runtime(target, resolved, paths, lambda _text: None)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (replace(CONFIG, intermediate_size=4 * CONFIG.intermediate_size), "'gate.weight'"),
        (replace(CONFIG, num_kv_heads=CONFIG.num_heads), "'key.weight'"),
        (replace(CONFIG, hidden_size=2 * CONFIG.hidden_size), "'features.weight'"),
    ],
)
def test_a_head_of_other_sizes_is_refused_though_its_fingerprint_is_right(
    target: ModelFiles, paths: Paths, tmp_path: Path, config: ModelConfig, part: str
) -> None:
    found = fingerprint(target.weight_files())
    head = tiny_head(config, feature_layers=LAYERS, token_ids=range(256), fingerprint=found)
    head.save(tmp_path / FILE_NAME)
    with pytest.raises(ModelFileError, match=part):
        find_draft(settings(draft=str(tmp_path)), target, paths.cache)


def test_a_head_of_a_layer_that_the_target_lacks_is_refused(
    target: ModelFiles, paths: Paths, tmp_path: Path
) -> None:
    found = fingerprint(target.weight_files())
    head = tiny_head(CONFIG, feature_layers=(0, 77), token_ids=range(256), fingerprint=found)
    head.save(tmp_path / FILE_NAME)
    with pytest.raises(ModelFileError, match="layer 77, target has layers 0 to 1"):
        find_draft(settings(draft=str(tmp_path)), target, paths.cache)


@pytest.mark.parametrize("drafter", ["head", "model"])
@pytest.mark.parametrize(("max_num_seqs", "max_rows"), [(1, 512), (1, 1), (5, 5), (8, 40)])
def test_drafts_are_priced_before_service_however_small_a_step_is(
    target: ModelFiles,
    paths: Paths,
    tmp_path: Path,
    drafter: str,
    max_num_seqs: int,
    max_rows: int,
) -> None:
    folder = target.path if drafter == "model" else head_folder(tmp_path / "head", target)
    chosen = settings(
        speculation=drafter,
        draft=str(folder),
        kv_memory_bytes=1 << 20,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_rows,
    )
    resolved = Resolved(chosen, dict.fromkeys(describe(), "default"))
    runtime = build_runtime(target, resolved, paths, lambda _text: None, warm=True)
    assert runtime.step_costs is not None
    assert runtime.step_costs.drafts[drafter].fixed_ms >= 0
