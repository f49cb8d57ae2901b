"""The busy process: it never outlives what it was started for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from chatrt.bench.busy import busy_process
from tests.support import time_scale

if TYPE_CHECKING:
    from collections.abc import Callable


def gone(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20 * time_scale()
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_the_busy_process_ends_with_its_context_whatever_happens() -> None:
    process_ids = []

    def interrupted() -> None:
        with busy_process() as process_id:
            assert not gone(process_id)
            process_ids.append(process_id)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert gone(process_ids[0])


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_the_busy_process_ends_when_its_parent_is_killed() -> None:
    program = (
        "import sys, time\nfrom chatrt.bench.busy import busy_process\n"
        "with busy_process() as process_id:\n    print(process_id, flush=True)\n    time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        process_id = int(parent.stdout.readline())
        parent.kill()
    wait_until(lambda: gone(process_id))
