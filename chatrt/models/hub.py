"""Hugging Face repositories, through `huggingface_hub` and its cache.

Knows: which files of a repository are wanted, the library's errors. Does not know: what is in them.
Invariant: pickles are never fetched. Cost: importing the library, about 0.3 s, on first use only.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chatrt.errors import ModelFileError, ModelNotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatrt.errors import ChatrtError
    from chatrt.models.files import Progress
    from chatrt.models.registry import HubRepo

_WANTED = ("*.safetensors", "*.json", "*.jinja")
# other exports of the same weights lie in subfolders, or are named so
_UNWANTED = ("*/*", "consolidated*")


def fetch_from_hub(repo: HubRepo, progress: Progress) -> Path:
    """The folder of the repository's files, or the one GGUF file, in the library's own cache.

    Raises:
        ModelNotFound: There is no such repository or file.
        ModelFileError: It cannot be fetched: no network, terms not accepted, disk full.
    """
    import huggingface_hub

    bar = _progress_bar(progress, repo.file_name or repo.repo_id)
    if repo.file_name is not None:
        return _translated(
            repo,
            lambda: huggingface_hub.hf_hub_download(repo.repo_id, repo.file_name, tqdm_class=bar),
        )
    return _translated(
        repo,
        lambda: huggingface_hub.snapshot_download(
            repo.repo_id,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
            tqdm_class=bar,
        ),
    )


def _translated(repo: HubRepo, download: Callable[[], Any]) -> Path:
    from huggingface_hub import errors

    try:
        return Path(download())
    except (errors.HTTPError, errors.HFValidationError, errors.EntryNotFoundError) as error:
        raise _translate(repo, error) from error
    except OSError as error:
        raise ModelFileError(f"{repo.repo_id} cannot be stored: {error}") from error


def _translate(repo: HubRepo, error: Exception) -> ChatrtError:
    from huggingface_hub import errors

    name = repo.repo_id
    if isinstance(error, errors.GatedRepoError):
        return ModelFileError(
            f"{name} is gated: accept its terms on its Hugging Face page, then `hf auth login`"
        )
    if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        return ModelNotFound(f"there is no Hugging Face repository '{name}', or it is private")
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return ModelNotFound(f"the Hugging Face repository '{name}' has no '{repo.file_name}'")
    if isinstance(error, errors.LocalEntryNotFoundError):
        return ModelFileError(f"{name} is not on this machine, and Hugging Face is out of reach")
    reason = str(error).strip().partition("\n")[0]
    return ModelFileError(f"{name} cannot be fetched: {reason}")


def _progress_bar(progress: Progress, what: str) -> type[Any]:
    """A tqdm class that reports bytes instead of drawing."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]

    furthest = 0

    class Bar(tqdm):  # type: ignore[type-arg, misc, unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO()})

        def display(self, *_args: Any, **_kwargs: Any) -> None:
            nonlocal furthest
            # the library keeps two bars of bytes (received, written); the further one counts
            if self.unit == "B" and self.n > furthest:
                furthest = int(self.n)
                progress(furthest, int(self.total) if self.total else None, what)

    return Bar
