from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from chatrt.models.config import LinearScaling, Llama3Scaling
from chatrt.models.rope import identity_rope_table, rope_table
from chatrt.testing.models import tiny_config

if TYPE_CHECKING:
    from chatrt.models.config import ModelConfig, RopeScaling

HALF = 8  # of the tiny configuration's head dimension


def table(scaling: RopeScaling = None, divisors: torch.Tensor | None = None) -> torch.Tensor:
    config: ModelConfig = replace(tiny_config(), rope_scaling=scaling)
    return rope_table(
        config,
        num_positions=100,
        divisors=divisors,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )


def test_angles_are_position_times_a_power_of_theta() -> None:
    found = table()
    assert found.shape == (100, 2 * HALF)
    for position, i in ((0, 0), (1, 0), (7, 3), (99, 7)):
        angle = position * 10_000.0 ** (-2 * i / 16)
        assert math.isclose(found[position, i].item(), math.cos(angle), abs_tol=1e-12)
        assert math.isclose(found[position, HALF + i].item(), math.sin(angle), abs_tol=1e-12)


def test_linear_scaling_puts_every_fourth_position_where_one_was() -> None:
    assert torch.allclose(table(LinearScaling(4.0))[::4], table()[:25], atol=1e-12)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    scaled, plain = table(Llama3Scaling(8.0, 1.0, 4.0, 64)), table()
    # 64 / 4 = 16 positions: the first angle turns faster than that
    assert torch.equal(scaled[:, 0], plain[:, 0])
    # the last angle needs more than 64 positions for a turn: 8 times slower
    assert torch.allclose(scaled[8::8, -1], plain[1:13, -1], atol=1e-12)


def test_divisors_slow_each_angle_by_its_own() -> None:
    divisors = torch.ones(HALF)
    divisors[2] = 5.0
    found, plain = table(divisors=divisors), table()
    assert torch.allclose(found[::5, 2], plain[:20, 2], atol=1e-12)
    assert torch.equal(found[:, 3], plain[:, 3])


def test_the_identity_table_turns_nothing() -> None:
    identity = identity_rope_table(table())
    assert torch.equal(identity[:, :HALF], torch.ones(100, HALF, dtype=torch.float64))
    assert not identity[:, HALF:].any()
