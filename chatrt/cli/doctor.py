"""`chatrt doctor`: what was found on this machine.

Knows: what is printed. Does not know: how any of it is used. Torch is imported only where it is
installed, to ask for devices. Invariant: what cannot be found out is said in a sentence, and the
rest is still shown.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import typer

import chatrt
from chatrt.cli import common
from chatrt.errors import ChatrtError
from chatrt.launch import find_server

if TYPE_CHECKING:
    from chatrt.paths import Paths
    from chatrt.settings import Settings

Findings: TypeAlias = dict[str, dict[str, Any]]

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "websockets", "textual", "msgspec")
_INSTRUCTION_SETS = (
    *("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx_vnni"),
    *("avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)


def doctor(as_json: common.JsonOption = False) -> None:
    """Show what was found on this machine.

    Device, memory plan, model, versions, folders and the running server.
    """
    paths = common.find_paths()
    findings = find(common.load_settings(paths).settings, paths)
    if as_json:
        common.show_json(findings)
        return
    for section, entries in findings.items():
        typer.echo(section)
        for name, value in entries.items():
            lines = value if isinstance(value, list) else [_text(name, value)]
            for index, line in enumerate(lines):
                label = "" if index else name.removesuffix("_bytes").replace("_", " ")
                typer.echo(f"  {label:15} {line}")


def find(settings: Settings, paths: Paths) -> Findings:
    """All findings, by section and name."""
    settings = _without_impossible_kernels(settings, paths)
    return {
        "machine": _machine(),
        "device": _device(settings),
        "kernels": _kernels(paths),
        "model": _model(settings, paths),
        "versions": _versions(),
        "folders": {
            **{name: str(getattr(paths, name)) for name in ("cache", "data", "state", "config")},
            "api key": str(settings.api_key_file or paths.api_key),
            "kv pages": _kv_pages(settings, paths),
        },
        "server": _server(paths),
    }


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name.endswith("_bytes"):
        return common.size_text(value)
    return "-" if value is None else str(value)


def _machine() -> dict[str, Any]:
    cores = os.cpu_count()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": f"{usable} usable of {cores}",
        "instructions": " ".join(_instruction_sets()) or None,
        "ram_bytes": _ram_bytes(),
    }


def _kv_pages(settings: Settings, paths: Paths) -> str:
    """Where KV pages are kept, and how much of their share is taken."""
    folder = settings.kv_dir or paths.kv_pages
    num_bytes = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # removed while this counts
                num_bytes += (Path(place) / name).stat().st_size
    most = common.size_text(settings.disk_kv_bytes)
    return f"{folder} ({common.size_text(num_bytes)} of at most {most})"


def _ram_bytes() -> int | None:
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        import psutil
    except ModuleNotFoundError:
        return None
    total: int = psutil.virtual_memory().total
    return total


def _instruction_sets() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    words = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    found = set(words.partition(":")[2].split())
    return [name for name in _INSTRUCTION_SETS if name in found]


def _device(settings: Settings) -> dict[str, Any]:
    try:
        import torch
    except ModuleNotFoundError:
        return {"state": "torch is not installed; chatting with a server elsewhere needs none"}
    from chatrt.cli.machine import find_machine

    try:
        machine = find_machine(settings)
    except ChatrtError as error:
        return {"state": error.message}
    found: dict[str, Any] = {
        "device": machine.device.type,
        "dtype": str(machine.dtype).removeprefix("torch."),
        "kv_dtype": str(machine.kv_dtype).removeprefix("torch."),
        "kernels": machine.kernels,
        "threads": machine.num_threads,
    }
    if torch.cuda.is_available():
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        found["gpu"] = torch.cuda.get_device_name()
        found |= {"free_memory_bytes": free_bytes, "memory_bytes": total_bytes}
    else:
        found["gpu"] = None
    return found


def _kernels(paths: Paths) -> dict[str, Any]:
    from chatrt_kernels.cpu import build

    compiler = build.find_compiler(os.environ)
    library = build.built_library(paths.kernels)
    if library is not None:
        state = str(library)
    elif compiler is not None and platform.system() != "Windows":
        state = "not compiled yet; the first start does it, or chatrt kernels"
    else:
        state = "cannot be compiled here; PyTorch's own operations serve"
    return {
        "compiler": None if compiler is None else str(compiler),
        "version": None if compiler is None else build.compiler_version(compiler),
        "flags": " ".join((*build.BASE_FLAGS, *build.NATIVE_FLAGS)),
        "library": state,
        "instructions": None if library is None else _instruction_path(library),
    }


def _without_impossible_kernels(settings: Settings, paths: Paths) -> Settings:
    """The settings as a start will take them: no native kernels where nothing can compile them."""
    from chatrt_kernels.cpu import build

    possible = build.find_compiler(os.environ) is not None and platform.system() != "Windows"
    if possible or settings.kernels != "auto" or build.built_library(paths.kernels) is not None:
        return settings
    return replace(settings, kernels="reference")


def _instruction_path(library: Path) -> str:
    """The instructions that the library was compiled for, or why it cannot be loaded."""
    from chatrt_kernels.cpu.binding import NativeLibrary

    try:
        return NativeLibrary(library).instruction_path
    except OSError as error:
        return str(error)


def _model(settings: Settings, paths: Paths) -> dict[str, Any]:
    found: dict[str, Any] = {"name": settings.model}
    try:
        path = common.present_path(settings.model, paths.cache)
        found["path"] = None if path is None else str(path)
        if path is None:
            found["state"] = "not fetched; chatrt pull does it"
        else:
            found["state"] = "present"
            found |= _plan(settings, path, paths)
    except (ChatrtError, OSError) as error:
        found["state"] = str(error)
    except ModuleNotFoundError as error:
        found["memory_plan"] = f"needs {error.name}"
    return found


def _plan(settings: Settings, path: Path, paths: Paths) -> dict[str, Any]:
    """Who drafts, and the memory plan of a CPU; a GPU's depends on what is free at the start."""
    from chatrt.cli.drafts import describe_drafts, find_draft
    from chatrt.cli.machine import find_machine, memory_plan
    from chatrt.models.files import ModelFiles
    from chatrt.models.loader import read_config

    machine = find_machine(settings)
    files = ModelFiles(settings.model, path, path)
    if settings.draft is not None and common.present_path(settings.draft, paths.cache) is None:
        return {"drafts": f"the draft model {settings.draft}, which is not fetched"}
    draft = find_draft(settings, files, paths.cache)
    found: dict[str, Any] = {"drafts": describe_drafts(settings, draft)}
    if machine.device.type != "cpu":
        return found | {"memory_plan": ["made at start, of the memory that is then free"]}
    config = read_config(files)
    plan = memory_plan(settings, config, machine, draft.configs(config))
    return found | {"memory_plan": plan.describe()}


def _versions() -> dict[str, Any]:
    found: dict[str, Any] = {"chatrt": chatrt.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["executable"] = sys.executable
    return found


def _server(paths: Paths) -> dict[str, Any]:
    record = find_server(paths)
    if record is None:
        return {"running": False, "log": str(paths.server_log)}
    return {
        "running": True,
        "url": record.url,
        "page": record.page,
        "model": record.model,
        "process": record.pid,
        "version": record.version,
        "log": str(paths.server_log),
    }


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(doctor)
