"""Tests of chatrt.cli.machine: what the settings mean here, and what does not fit."""

from __future__ import annotations

from dataclasses import replace

import psutil
import pytest
import torch

from chatrt.cli.machine import Machine, find_machine, memory_plan
from chatrt.errors import SettingsError
from chatrt.settings import Settings
from chatrt.testing.models import tiny_config

CPU = Machine(torch.device("cpu"), torch.float32, torch.float32, num_threads=1, kernels="reference")
# 2 layers, keys and values, 16 slots, 2 heads of 16, 4 bytes
PAGE_BYTES = 2 * 2 * 16 * 2 * 16 * 4


def test_a_cpu_computes_in_float32_with_the_threads_asked_for() -> None:
    assert find_machine(Settings(device="cpu", threads=3)) == Machine(
        torch.device("cpu"), torch.float32, torch.float16, num_threads=3, kernels="native"
    )


def test_pages_are_float16_with_native_kernels_and_else_as_activations() -> None:
    assert find_machine(Settings(device="cpu", kv_dtype="float32")).kv_dtype == torch.float32
    reference = find_machine(Settings(device="cpu", kernels="reference"))
    assert (reference.native, reference.kv_dtype) == (False, torch.float32)
    in_doubles = find_machine(Settings(device="cpu", dtype="float64"))
    assert (in_doubles.native, in_doubles.kv_dtype) == (False, torch.float64)


def test_no_more_threads_than_physical_cores_without_being_asked() -> None:
    cores = psutil.cpu_count(logical=False)
    assert cores is None or find_machine(Settings(device="cpu")).num_threads <= cores


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (Settings(device="cpu", kernels="native", dtype="float16"), "dtype is float16"),
        (
            Settings(device="cpu", kernels="native", page_size=8),
            "page_size is 8, no multiple of 16",
        ),
        (Settings(device="cpu", kernels="native", kv_dtype="bfloat16"), "kv_dtype is bfloat16"),
    ],
)
def test_native_kernels_refuse_what_they_cannot_do_and_auto_does_without_them(
    settings: Settings, reason: str
) -> None:
    with pytest.raises(SettingsError, match=f"kernels is native, but {reason}"):
        find_machine(settings)
    assert not find_machine(replace(settings, kernels="auto")).native


def test_a_gpu_that_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match=r"device is cuda, and torch .* finds no GPU"):
        find_machine(Settings(device="cuda"))
    assert find_machine(Settings(device="auto")).device.type == "cpu"


def test_a_context_beyond_the_models_is_refused_with_both_numbers() -> None:
    config = tiny_config(max_context=512)
    assert memory_plan(Settings(max_context=512), config, CPU).max_context == 512
    with pytest.raises(SettingsError, match="max_context is 513 tokens, the model's own is 512"):
        memory_plan(Settings(max_context=513), config, CPU)


def test_a_context_beyond_the_kv_memory_is_refused_with_both_numbers() -> None:
    config = tiny_config(max_context=512)
    given = Settings(max_context=33, kv_memory_bytes=2 * PAGE_BYTES)
    with pytest.raises(SettingsError, match="max_context is 33 tokens, the KV memory holds 32"):
        memory_plan(given, config, CPU)


def test_a_context_that_nobody_asked_for_is_the_models_however_few_the_pages() -> None:
    plan = memory_plan(Settings(kv_memory_bytes=2 * PAGE_BYTES), tiny_config(max_context=512), CPU)
    assert (plan.max_context, plan.num_tokens) == (512, 32)
