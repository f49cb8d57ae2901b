from __future__ import annotations

import itertools

import pytest

from chatrt_tui.pace import LONGEST_PAUSE_S, SHARE, SHORTEST_PAUSE_S, PaintPace


def pauses_s(frame_s: float, count: int = 30) -> list[float]:
    worked_s = itertools.count()
    pace = PaintPace(lambda: next(worked_s) * frame_s)
    return [pace.pause_s() for _ in range(count)]


@pytest.mark.parametrize("frame_s", [0.005, 0.0075, 0.01, 0.015, 0.018])
def test_painting_takes_its_share_of_a_core_however_long_a_frame_takes(frame_s: float) -> None:
    assert frame_s / pauses_s(frame_s)[-1] == pytest.approx(SHARE, rel=0.01)


def test_cheap_frames_come_often_and_dear_ones_are_not_put_off_for_ever() -> None:
    assert set(pauses_s(0.001)) == {SHORTEST_PAUSE_S}
    assert pauses_s(0.5)[-1] == LONGEST_PAUSE_S


def test_one_long_frame_does_not_make_a_stream_halt() -> None:
    worked_s = iter([0.0, 0.005, 0.010, 0.055, 0.060])
    pace = PaintPace(lambda: next(worked_s))
    assert max(pace.pause_s() for _ in range(5)) < LONGEST_PAUSE_S
