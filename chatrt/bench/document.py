"""The JSON document of a measurement: what was measured, on what, with which versions.

Knows: the document's common fields, git, package versions. Does not know: any one measurement.
Invariant: a document is one line of JSON, whatever the measurement; what is not known is null.
"""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

import chatrt

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA = 1
_PACKAGES = ("torch", "triton", "tokenizers", "websockets", "msgspec", "numpy")
_GIT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Device:
    """Where the model ran: `cpu` or a GPU's name, and the threads that computed."""

    name: str
    dtype: str
    num_threads: int


def new_document(benchmark: str, *, seed: int, device: Device | None) -> dict[str, Any]:
    """The fields that every measurement has; `device` None is one that cannot be known here."""
    return {
        "benchmark": benchmark,
        "schema": SCHEMA,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": git_revision(Path(chatrt.__file__)),
        "device": None if device is None else device.name,
        "dtype": None if device is None else device.dtype,
        "num_threads": None if device is None else device.num_threads,
        "machine": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "processor": processor_name(),
            "num_cores": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "versions": versions(),
        "seed": seed,
    }


def encode_line(document: Mapping[str, Any]) -> str:
    """The document as one line of JSON; floats are rounded to four digits behind the point."""
    plain = msgspec.to_builtins(document, enc_hook=str)
    return msgspec.json.encode(_rounded(plain)).decode()


def versions() -> dict[str, str | None]:
    """Versions of chatrt, Python and the packages that figures depend on; None if not installed."""
    found: dict[str, str | None] = {
        "chatrt": chatrt.__version__,
        "python": platform.python_version(),
    }
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def processor_name() -> str | None:
    """What the processor calls itself; None where nothing says it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or None


def git_revision(file: Path) -> dict[str, Any] | None:
    """The revision of the checkout that `file` belongs to, and whether tracked files differ.

    None without git, and for a file that is not tracked, as one of an installed package.
    """
    folder = file.parent
    if _git(folder, "ls-files", "--error-unmatch", file.name) is None:
        return None
    revision = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "changed": bool(changed)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=_GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return round(value, 4)
        case dict():
            return {name: _rounded(one) for name, one in value.items()}
        case list() | tuple():
            return [_rounded(one) for one in value]
    return value
