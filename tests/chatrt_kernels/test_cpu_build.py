from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chatrt_kernels.cpu import build
from chatrt_kernels.cpu.build import (
    LOG_NAME,
    BuildError,
    built_library,
    compiler_version,
    cpu_identity,
    discard,
    ensure_library,
    find_compiler,
    library_name,
)
from tests.chatrt_kernels.cpu_support import cannot_run

GOOD = """#include "answer.h"
extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }
"""
NO_FLAGS: tuple[str, ...] = ()


@pytest.fixture
def compiler() -> Path:
    found = find_compiler(os.environ)
    if found is None:
        cannot_run("there is no C++ compiler")
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "answer.h").write_text("#define ANSWER 42\n", encoding="utf-8")
    (folder / "answer.cpp").write_text(GOOD, encoding="utf-8")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kernels"


def answer(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).answer())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def executable(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


# Compiling, once


def test_a_library_is_compiled_once_and_found_from_then_on(
    compiler: Path, source: Path, cache: Path
) -> None:
    reports: list[str] = []
    assert built_library(cache, source=source) is None
    library = ensure_library(cache, source=source, report=reports.append)
    assert answer(library) == 42
    assert built_library(cache, source=source) == library
    assert ensure_library(cache, source=source, report=reports.append) == library
    assert reports == ["compiling the CPU kernels"]
    assert names(cache) == [library.name]


def test_a_library_that_is_there_starts_no_process(
    compiler: Path, source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = ensure_library(cache, source=source)

    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert ensure_library(cache, source=source) == library


def test_several_sources_become_one_library(compiler: Path, source: Path, cache: Path) -> None:
    (source / "answer.cpp").write_text(
        GOOD.replace("ANSWER;", "other() + ANSWER;").replace("extern", "int other();\nextern", 1),
        encoding="utf-8",
    )
    (source / "other.cpp").write_text("int other() { return 1; }\n", encoding="utf-8")
    assert answer(ensure_library(cache, source=source)) == 43


def test_flags_reach_the_compiler(compiler: Path, source: Path, cache: Path) -> None:
    (source / "answer.h").write_text("", encoding="utf-8")
    assert answer(ensure_library(cache, source=source, flags=("-DANSWER=7",))) == 7


def test_the_cache_folder_is_created_for_its_user_only(
    compiler: Path, source: Path, cache: Path
) -> None:
    ensure_library(cache, source=source)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert cache.parent.stat().st_mode & 0o777 == 0o700


# The key


def test_the_name_changes_with_every_source_and_header(source: Path, compiler: Path) -> None:
    seen = {library_name(source, NO_FLAGS, "cpu", compiler)}
    (source / "answer.h").write_text("#define ANSWER 43\n", encoding="utf-8")
    seen.add(library_name(source, NO_FLAGS, "cpu", compiler))
    (source / "answer.cpp").write_text(GOOD + "\n", encoding="utf-8")
    seen.add(library_name(source, NO_FLAGS, "cpu", compiler))
    (source / "more.cpp").write_text("", encoding="utf-8")
    seen.add(library_name(source, NO_FLAGS, "cpu", compiler))
    assert len(seen) == 4


def test_the_name_changes_with_flags_and_cpu(source: Path, compiler: Path) -> None:
    inputs = [(("-O1",), "cpu"), (("-O1", "-g"), "cpu"), (("-O1-g",), "cpu"), (("-O1",), "cpu 2")]
    assert len({library_name(source, flags, cpu, compiler) for flags, cpu in inputs}) == 4


def test_the_name_changes_when_the_compiler_is_replaced(source: Path, tmp_path: Path) -> None:
    tool = executable(tmp_path / "c++", "one")
    seen = {library_name(source, NO_FLAGS, "cpu", tool)}
    os.utime(tool, (0, 0))
    seen.add(library_name(source, NO_FLAGS, "cpu", tool))
    executable(tool, "one more")
    seen.add(library_name(source, NO_FLAGS, "cpu", tool))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = elsewhere / "c++"
    link.symlink_to(tool)
    seen.add(library_name(source, NO_FLAGS, "cpu", link))
    assert len(seen) == 4


def test_the_name_stays_while_nothing_changes(source: Path, compiler: Path) -> None:
    first, second = (library_name(source, NO_FLAGS, cpu_identity(), compiler) for _ in range(2))
    assert first == second


# Compilers


def test_cxx_wins_over_the_compilers_on_the_path(tmp_path: Path) -> None:
    tools = {name: executable(tmp_path / name, "") for name in ("mine", "c++", "g++", "clang++")}
    environ = {"PATH": str(tmp_path)}
    assert find_compiler(environ) == tools["c++"]
    assert find_compiler({**environ, "CXX": "mine"}) == tools["mine"]
    assert find_compiler({**environ, "CXX": str(tools["mine"])}) == tools["mine"]
    assert find_compiler({**environ, "CXX": "not there"}) == tools["c++"]
    tools["c++"].unlink()
    assert find_compiler(environ) == tools["g++"]
    tools["g++"].unlink()
    assert find_compiler(environ) == tools["clang++"]
    tools["clang++"].unlink()
    assert find_compiler(environ) is None


def test_the_version_is_the_compilers_own_first_line(compiler: Path, tmp_path: Path) -> None:
    version = compiler_version(compiler)
    assert version is not None
    assert any(character.isdigit() for character in version)
    assert compiler_version(tmp_path / "none") is None


def test_without_a_compiler_the_sentence_says_what_to_install(source: Path, cache: Path) -> None:
    with pytest.raises(BuildError, match=r"no C\+\+ compiler .* install g\+\+ or clang\+\+"):
        ensure_library(cache, environ={"PATH": ""}, source=source)
    assert not cache.exists()


def test_a_library_outlives_the_compiler_that_built_it(
    compiler: Path, source: Path, cache: Path
) -> None:
    library = ensure_library(cache, source=source)
    assert built_library(cache, environ={"PATH": ""}, source=source) == library
    assert ensure_library(cache, environ={"PATH": ""}, source=source) == library
    (source / "answer.h").write_text("#define ANSWER 43\n", encoding="utf-8")
    assert built_library(cache, environ={"PATH": ""}, source=source) is None


def test_windows_is_told_so(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    with pytest.raises(BuildError, match="not supported on Windows"):
        ensure_library(cache, source=source)


# Failures


def test_an_error_in_a_source_is_said_with_its_line_and_leaves_only_the_log(
    compiler: Path, source: Path, cache: Path
) -> None:
    (source / "broken.cpp").write_text("int good;\nint bad = nonsense;\n", encoding="utf-8")
    with pytest.raises(BuildError, match=r"broken\.cpp:2:.*nonsense") as raised:
        ensure_library(cache, source=source)
    assert names(cache) == [LOG_NAME]
    log = cache / LOG_NAME
    assert str(log) in str(raised.value)
    assert "-std=c++17" in log.read_text(encoding="utf-8")
    (source / "broken.cpp").unlink()
    assert names(cache) == [LOG_NAME]
    library = ensure_library(cache, source=source)
    assert names(cache) == [library.name]


def test_a_missing_function_is_said_too(compiler: Path, source: Path, cache: Path) -> None:
    (source / "other.cpp").write_text(
        "int nowhere();\nint other() { return nowhere(); }\n", encoding="utf-8"
    )
    with pytest.raises(BuildError, match="nowhere"):
        ensure_library(cache, source=source, flags=("-Wl,-z,defs",))
    assert names(cache) == [LOG_NAME]


def test_a_compiler_that_only_exits_is_said_with_its_status(
    source: Path, cache: Path, tmp_path: Path
) -> None:
    silent = executable(tmp_path / "silent", "#!/bin/sh\nexit 3\n")
    with pytest.raises(BuildError, match="exit status 3"):
        ensure_library(cache, environ={"PATH": os.defpath, "CXX": str(silent)}, source=source)


def test_a_file_in_the_way_of_the_cache_is_a_sentence(
    compiler: Path, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(BuildError, match=r"cannot be compiled into .*file.kernels: "):
        ensure_library(tmp_path / "file" / "kernels", source=source)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write")
def test_a_read_only_cache_is_a_sentence_and_serves_what_it_has(
    compiler: Path, source: Path, cache: Path
) -> None:
    library = ensure_library(cache, source=source)
    cache.chmod(0o500)
    try:
        assert ensure_library(cache, source=source) == library
        with pytest.raises(BuildError, match="Permission denied"):
            ensure_library(cache, source=source, flags=("-O1",))
    finally:
        cache.chmod(0o700)


def test_a_truncated_library_is_discarded_and_built_again(
    compiler: Path, source: Path, cache: Path
) -> None:
    library = ensure_library(cache, source=source)
    whole = library.stat().st_size
    os.truncate(library, whole - 1)  # loading half of one ends the process
    assert built_library(cache, source=source) is None
    os.truncate(library, 100)
    with pytest.raises(OSError, match=r"too short|truncated|file"):
        ctypes.CDLL(str(library))
    discard(library)
    discard(library)
    assert built_library(cache, source=source) is None
    assert ensure_library(cache, source=source) == library
    assert answer(library) == 42


# Others at work in the same folder


def test_builds_at_the_same_time_leave_one_whole_library(
    compiler: Path, source: Path, cache: Path
) -> None:
    with ThreadPoolExecutor(3) as pool:
        builds = [pool.submit(ensure_library, cache, source=source) for _ in range(3)]
    (library,) = {one.result() for one in builds}
    assert names(cache) == [library.name]
    assert answer(library) == 42


def test_two_processes_that_build_at_the_same_time_get_the_same_library(
    compiler: Path, source: Path, cache: Path
) -> None:
    program = (
        "import sys; from pathlib import Path; from chatrt_kernels.cpu.build import ensure_library;"
        "print(ensure_library(Path(sys.argv[1]), source=Path(sys.argv[2])))"
    )
    folder = Path(build.__file__).parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(cache), str(source)],
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs == {str(cache / names(cache)[0])}
    assert len(names(cache)) == 1


def test_compiling_removes_what_nobody_used_for_a_week(
    compiler: Path, source: Path, cache: Path
) -> None:
    unused = ensure_library(cache, source=source, flags=("-DUNUSED",))
    used = ensure_library(cache, source=source, flags=("-DUSED",))
    killed = cache / "building-killed"
    killed.mkdir()
    (killed / "answer.o").write_bytes(b"")
    week_ago = time.time() - 7 * 24 * 3600 - 60
    for path in (unused, used, killed):
        os.utime(path, (week_ago, week_ago))
    ensure_library(cache, source=source, flags=("-DUSED",))
    new = ensure_library(cache, source=source)
    assert names(cache) == sorted([used.name, new.name])


def test_the_build_module_needs_only_the_standard_library() -> None:
    program = (
        "import sys; import chatrt_kernels.cpu.build;"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'numpy'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_sources_are_where_the_package_is() -> None:
    assert build.SOURCE.is_dir()
    assert list(build.SOURCE.glob("*.h"))
