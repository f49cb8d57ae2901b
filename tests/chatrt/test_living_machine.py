"""Any order of what people do to a running server: texts are those of fresh runs, pages return.

The real server, sockets, store and archive around a tiny model on native kernels, with a draft head
and few pages. The engine is held and let go on for a few steps, so that what is done meets turns in
the queue, in the middle of a prompt, of an answer, or at its end. `CHATRT_LONG=1` plays 6,000
operations; `CHATRT_SHRINK=1` also looks for the shortest play that fails, which takes minutes.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from tests.chatrt.living_draws import MAX_CONTEXT
from tests.chatrt.living_play import OPERATIONS, Life
from tests.chatrt.living_server import Size

LONG, SHRINKS = (os.environ.get(f"CHATRT_{name}") == "1" for name in ("LONG", "SHRINK"))
NUM_EXAMPLES, NUM_STEPS = (100, 60) if LONG else (6, 40)

pytestmark = pytest.mark.timeout(1800 if LONG or SHRINKS else 120)

sizes = st.builds(
    Size,
    num_pages=st.sampled_from([28, 16, 20, 40]),
    max_context=st.just(MAX_CONTEXT),
    grace_s=st.sampled_from([30.0, 30.0, 0.05]),
    max_parked=st.sampled_from([64, 64, 3]),
    host_bytes=st.sampled_from([0, 2**16]),
    disk_bytes=st.sampled_from([2**24, 2**24, 2**18]),
    copies_beside=st.booleans(),
)


@st.composite
def plays(draw: st.DrawFn) -> list[tuple[str, dict[str, Any]]]:
    """What happens in a life: some kinds of operations only, so that each comes often enough."""
    kinds = draw(st.lists(st.sampled_from([*OPERATIONS]), min_size=5, max_size=10, unique=True))
    names = st.sampled_from(["nothing", "follow_up", "interrupt", "converse", *kinds])
    several = draw(st.lists(names, min_size=NUM_STEPS, max_size=NUM_STEPS))
    return [(name, draw(OPERATIONS[name])) for name in several]


@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if SHRINKS else [])],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(size=sizes, play=plays())
def test_in_any_order_of_operations_texts_are_those_of_fresh_runs_and_all_pages_return(
    size: Size, play: list[tuple[str, dict[str, Any]]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        life = Life(Path(folder), size)
        try:
            for name, arguments in play:
                if name != "nothing":
                    note(f"{name} {arguments}")
                getattr(life, name)(**arguments)
            life.w.finish()
        finally:
            life.w.close()
