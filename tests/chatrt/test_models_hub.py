from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from chatrt.errors import ChatrtError, ModelFileError, ModelNotFound
from chatrt.models.hub import fetch_from_hub
from chatrt.models.registry import HubRepo

if TYPE_CHECKING:
    from collections.abc import Callable

REPO = HubRepo("org/name")
FILE = HubRepo("org/name", "q4.gguf")


def silent(done_bytes: int, total_bytes: int | None, what: str) -> None:
    del done_bytes, total_bytes, what


def http_error(kind: type[Any]) -> Any:
    response = SimpleNamespace(headers={}, request=None)
    return kind("first line\nsecond line", response=response)


def test_a_repository_is_fetched_without_pickles_and_other_exports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}

    def snapshot(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert fetch_from_hub(REPO, silent) == tmp_path
    names = ["model.safetensors", "pytorch_model.bin", "onnx/config.json", "tokenizer.json"]
    wanted = huggingface_hub.utils.filter_repo_objects(
        [*names, "consolidated.safetensors", "chat_template.jinja"],
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(wanted) == ["model.safetensors", "tokenizer.json", "chat_template.jinja"]


def test_progress_reports_the_bytes_of_the_librarys_bars(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[tuple[int, int | None, str]] = []

    def download(repo_id: str, filename: str, *, tqdm_class: Callable[..., Any]) -> str:
        with tqdm_class(total=1000, unit="B", unit_scale=True, mininterval=0) as bar:
            for _ in range(10):
                bar.update(100)
        with tqdm_class(total=5, unit="it", mininterval=0) as files:
            files.update(5)
        return f"/cache/{repo_id}/{filename}"

    def progress(done_bytes: int, total_bytes: int | None, what: str) -> None:
        heard.append((done_bytes, total_bytes, what))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert fetch_from_hub(FILE, progress) == Path("/cache/org/name/q4.gguf")
    assert heard[-1] == (1000, 1000, "q4.gguf")
    assert [done for done, _, _ in heard] == sorted({done for done, _, _ in heard})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (http_error(errors.GatedRepoError), ModelFileError, "org/name is gated: accept"),
        (http_error(errors.RepositoryNotFoundError), ModelNotFound, "no .* 'org/name'"),
        (http_error(errors.RemoteEntryNotFoundError), ModelNotFound, "has no 'q4.gguf'"),
        (errors.LocalEntryNotFoundError("offline"), ModelFileError, "out of reach"),
        (errors.HFValidationError("bad id"), ModelNotFound, "'org/name'"),
        (http_error(errors.HfHubHTTPError), ModelFileError, "fetched: first line$"),
        (errors.HTTPError("timed out"), ModelFileError, "fetched: timed out"),
        (OSError(28, "No space left on device"), ModelFileError, "stored: .*No space left"),
    ],
)
def test_each_failure_is_one_sentence_of_ours(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, kind: type[ChatrtError], said: str
) -> None:
    def fail(*_args: Any, **_options: Any) -> str:
        raise raised

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(kind, match=said):
        fetch_from_hub(FILE, silent)
