"""The C++ sources of the CPU kernels, compiled once on this machine into a cache folder.

Knows: how to find a C++ compiler, the flags, what a library is keyed by.
Does not know: what the sources do, how a library is loaded, where the cache folder is.
Invariant: a name in the cache stands for one set of sources, flags, CPU and compiler, and the file
appears there whole or not at all; whoever builds at the same time builds the same file.
Cost: one pass over the sources (1 ms) while the library is there, else several seconds; no process
is started unless something is compiled or `compiler_version` is asked.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SOURCE = Path(__file__).parent / "source"
# Contraction is off because it would let the compiler choose which products are rounded.
BASE_FLAGS = (
    *("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-pthread"),
    *("-fvisibility=hidden", "-Wall", "-Wextra"),
)
_NATIVE_FLAGS = {
    "x86_64": ("-march=native",),
    "AMD64": ("-march=native",),
    "aarch64": ("-mcpu=native",),
    "arm64": ("-mcpu=native",),
}
NATIVE_FLAGS: tuple[str, ...] = _NATIVE_FLAGS.get(platform.machine(), ())

LIBRARY_PREFIX = "chatrt-kernels-"
LOG_NAME = "compile.log"
_LIBRARY_SUFFIX = ".so"
_ANY_SIZE = f"-*{_LIBRARY_SUFFIX}"
_BUILDING_PREFIX = "building-"
_COMPILERS = ("c++", "g++", "clang++")
_KEPT_S = 7 * 24 * 3600.0
_MAX_PROCESSES = 4  # a compiler takes some hundred MB
_FOLDER_MODE = 0o700
_ERROR_LINE = re.compile(r"\berror:|undefined reference|undefined symbol|cannot find ")
# What two machines that share a cache folder may differ in, by /proc/cpuinfo's names.
_CPU_FIELDS = {
    *("vendor_id", "model name", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
}


class BuildError(Exception):
    """The kernels cannot be compiled; the message is one sentence for a person."""


@dataclass(frozen=True, slots=True)
class _Toolchain:
    compiler: Path
    flags: tuple[str, ...]
    environ: Mapping[str, str]


def _say_nothing(_text: str) -> None:
    """Reports to nobody."""


def find_compiler(environ: Mapping[str, str]) -> Path | None:
    """The C++ compiler that `environ` leads to, None without one.

    `CXX` wins where it names a program; otherwise the first of c++, g++ and clang++ on `PATH`.
    """
    search = environ.get("PATH", os.defpath)
    for name in (environ.get("CXX", ""), *_COMPILERS):
        found = shutil.which(name, path=search) if name else None
        if found is not None:
            return Path(found).absolute()
    return None


def compiler_version(compiler: Path) -> str | None:
    """The first line of what the compiler says about itself, None if it cannot be run."""
    try:
        done = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, errors="replace", check=False
        )
    except OSError:
        return None
    return next((line for line in done.stdout.splitlines() if line.strip()), None)


def cpu_identity() -> str:
    """What tells this CPU from others for which `-march=native` may mean something else."""
    lines = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if not line.strip():
                break  # the other cores look the same
            if line.partition(":")[0].strip() in _CPU_FIELDS:
                lines.append(line.strip())
    return "\n".join(lines)


def library_name(source: Path, flags: Sequence[str], cpu: str, compiler: Path | None) -> str:
    """File name of the library of these inputs, a glob: its last part is the file's own size.

    Over all compilers if `compiler` is None. A compiler is told apart by path, size and time of
    change: asking for its version would start a process at each call.
    """
    inputs = hashlib.blake2b(digest_size=10)
    for part in (*BASE_FLAGS, "", *flags, "", cpu):
        inputs.update(part.encode() + b"\0")
    for path in _source_files(source, "*.cpp", "*.h"):
        content = path.read_bytes()
        inputs.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return f"{LIBRARY_PREFIX}{inputs.hexdigest()}-{_compiler_key(compiler)}{_ANY_SIZE}"


def _source_files(source: Path, *patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in source.glob(pattern))


def _compiler_key(compiler: Path | None) -> str:
    if compiler is None:
        return "*"
    status = compiler.stat()  # of the program itself, also where the path is a link to it
    identity = f"{compiler}\0{compiler.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    return hashlib.blake2b(identity.encode(), digest_size=4).hexdigest()


def built_library(
    cache: Path,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Sequence[str] = NATIVE_FLAGS,
    source: Path = SOURCE,
) -> Path | None:
    """The library in `cache` that fits, None if there is none yet; compiles nothing.

    On a machine without a compiler one that some compiler built earlier, of the same sources, with
    the same flags, on the same CPU, fits as well.
    """
    compiler = find_compiler(os.environ if environ is None else environ)
    name = library_name(source, flags, cpu_identity(), compiler)
    return next((path for path in sorted(cache.glob(name)) if _is_whole(path)), None)


def _is_whole(library: Path) -> bool:
    """Whether a file has the size that its name says: loading a part of one ends the process."""
    return library.is_file() and library.stem.endswith(f"-{library.stat().st_size}")


def ensure_library(
    cache: Path,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Sequence[str] = NATIVE_FLAGS,
    source: Path = SOURCE,
    report: Callable[[str], None] = _say_nothing,
) -> Path:
    """The shared library of `source`, compiled into `cache` if it is not there yet.

    `flags` come behind `BASE_FLAGS`, for compiling and linking alike. `cache` is created if
    missing (0700). `report` is called once, and only if something is compiled. Libraries of other
    keys that were not used for 7 days are removed after compiling.

    Raises:
        BuildError: There is no compiler, it finds an error, or `cache` cannot be written.
    """
    environ = os.environ if environ is None else environ
    found = built_library(cache, environ=environ, flags=flags, source=source)
    if found is not None:
        with contextlib.suppress(OSError):  # a cache that cannot be written serves as well
            os.utime(found)
        return found
    if platform.system() == "Windows":
        raise BuildError("the CPU kernels are not supported on Windows yet")
    compiler = find_compiler(environ)
    if compiler is None:
        raise BuildError(
            "no C++ compiler was found for the CPU kernels: install g++ or clang++ "
            "(on macOS: xcode-select --install), or set CXX to one"
        )
    report("compiling the CPU kernels")
    toolchain = _Toolchain(compiler, (*BASE_FLAGS, *flags), environ)
    try:
        _ensure_folder(cache)
        name = library_name(source, flags, cpu_identity(), compiler)
        library = _build(toolchain, _source_files(source, "*.cpp"), cache, name)
    except OSError as error:
        reason = error.strerror or error
        raise BuildError(f"the CPU kernels cannot be compiled into {cache}: {reason}") from error
    _remove_stale(cache)
    return library


def discard(library: Path) -> None:
    """Removes a library that cannot be loaded, so that the next `ensure_library` builds it anew.

    Raises:
        OSError: It is there and cannot be removed.
    """
    library.unlink(missing_ok=True)


def _ensure_folder(folder: Path) -> None:
    if not folder.is_dir():
        _ensure_folder(folder.parent)
        folder.mkdir(mode=_FOLDER_MODE, exist_ok=True)


def _build(toolchain: _Toolchain, sources: Sequence[Path], cache: Path, name: str) -> Path:
    """Compiles each source, links them, and puts the library in place in one step."""
    with tempfile.TemporaryDirectory(prefix=_BUILDING_PREFIX, dir=cache) as building:
        folder = Path(building)
        objects = [folder / f"{source.stem}.o" for source in sources]
        compiles = [
            ["-c", str(source), "-o", str(target)]
            for source, target in zip(sources, objects, strict=True)
        ]
        num_processes = max(1, min(_MAX_PROCESSES, os.cpu_count() or 1))
        with ThreadPoolExecutor(num_processes) as pool:
            outputs = list(pool.map(lambda arguments: _run(toolchain, arguments), compiles))
        _check(outputs, cache)
        linked = folder / "linked.so"
        _check([_run(toolchain, ["-shared", *map(str, objects), "-o", str(linked)])], cache)
        with open(linked, "rb") as file:
            os.fsync(file.fileno())  # the name must not survive a power cut that the bytes do not
        size = f"-{linked.stat().st_size}{_LIBRARY_SUFFIX}"
        library = cache / name.replace(_ANY_SIZE, size)
        os.replace(linked, library)
    (cache / LOG_NAME).unlink(missing_ok=True)  # it tells of an earlier failure
    return library


def _run(toolchain: _Toolchain, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(toolchain.compiler), *toolchain.flags, *arguments],
        env={**toolchain.environ, "LC_ALL": "C"},  # error lines are looked for in English
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )


def _check(outputs: Sequence[subprocess.CompletedProcess[str]], cache: Path) -> None:
    """Raises BuildError with the first complaint of those that failed, and keeps all of them."""
    failed = [one for one in outputs if one.returncode != 0]
    if not failed:
        return
    if any(one.returncode == -signal.SIGINT for one in failed):
        raise KeyboardInterrupt  # Ctrl+C reaches the compiler as well: nothing is wrong with it
    log = cache / LOG_NAME
    log.write_text(
        "".join(f"{' '.join(map(str, one.args))}\n{one.stdout}\n" for one in failed),
        encoding="utf-8",
    )
    lines = [line.strip() for line in failed[0].stdout.splitlines() if line.strip()]
    first = next((line for line in lines if _ERROR_LINE.search(line)), None)
    reason = first or (lines[0] if lines else f"exit status {failed[0].returncode}")
    raise BuildError(f"compiling the CPU kernels failed: {reason} (all of it is in {log})")


def _remove_stale(cache: Path) -> None:
    """Removes what nobody used for a week: older libraries, and what killed builds left."""
    oldest_s = time.time() - _KEPT_S
    for path in (*cache.glob(f"{LIBRARY_PREFIX}*"), *cache.glob(f"{_BUILDING_PREFIX}*")):
        with contextlib.suppress(OSError):  # another process may be removing it too
            if path.stat().st_mtime >= oldest_s:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
