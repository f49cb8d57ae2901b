"""Where a model runs on this machine, and how much of its memory the KV pages get.

Knows: devices, dtypes, cores, how the settings choose among them. Does not know: weights, engines.
Invariant: all who ask with the same settings get the same answer: server, bench, `doctor`.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import psutil
import torch

from chatrt.errors import SettingsError
from chatrt.kvcache import KVCache, MemoryPlan, plan_memory
from chatrt_kernels.kv_formats import KVFormat, why_not

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.models.config import ModelConfig
    from chatrt.settings import Settings

_CPU_FRACTION = 0.25
_GPU_FRACTION = 0.9
_LANES = 16  # slots that a native kernel attends to at once
_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
KV_DTYPES = _DTYPES | {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
}
# What the native kernels read, by the name of the setting.
_NATIVE_KV = ("auto", "float16", "fp16", "float32", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the model runs: activations in `dtype`, KV pages in `kv_dtype`.

    `kernels`: native ones are those of `chatrt_kernels.cpu`, where they can be compiled.
    """

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_threads: int
    kernels: Literal["native", "triton", "reference"]

    @property
    def native(self) -> bool:
        """Whether kernels compiled for this CPU are to execute the model."""
        return self.kernels == "native"

    @property
    def draft_kv_dtype(self) -> torch.dtype:
        """Of pages that drafts are made from: with 4 bits they would be refused more often."""
        four_bits = KVFormat.of(self.kv_dtype) is KVFormat.INT4
        return torch.int8 if four_bits else self.kv_dtype


def find_machine(settings: Settings) -> Machine:
    """The device, types and threads that the settings mean on this machine.

    Raises:
        SettingsError: A GPU is asked for, and torch finds none; or kernels are, together with
            something that they cannot do.
    """
    cuda = settings.device != "cpu" and torch.cuda.is_available()
    if settings.device == "cuda" and not cuda:
        raise SettingsError(
            f"device is cuda, and torch {torch.__version__} finds no GPU on this machine",
            param="device",
        )
    device = torch.device("cuda" if cuda else "cpu")
    chosen = settings.dtype
    dtype = (torch.bfloat16 if cuda else torch.float32) if chosen == "auto" else _DTYPES[chosen]
    kernels: Literal["native", "triton", "reference"] = "reference"
    if _wants_native(settings, device, dtype):
        kernels = "native"
    elif _wants_triton(settings, device, dtype):
        kernels = "triton"
    kv_dtype = torch.float16 if kernels == "native" else dtype
    if settings.kv_dtype != "auto":
        kv_dtype = KV_DTYPES[settings.kv_dtype]
    return Machine(device, dtype, kv_dtype, settings.threads or _num_cores(), kernels)


def _wants_native(settings: Settings, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the native kernels are to execute the model; they must not be impossible."""
    if settings.kernels in ("reference", "triton"):
        return False
    reasons = native_obstacles(settings, device, dtype)
    if settings.kernels == "native" and reasons:
        raise SettingsError(
            f"kernels is native, but {' and '.join(reasons)}; native kernels compute on a CPU in "
            "float32, with pages of float16, float32, int8 or int4 and a multiple of "
            f"{_LANES} slots",
            param="kernels",
        )
    return not reasons


def _wants_triton(settings: Settings, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton's kernels are to execute the model; they must not be impossible."""
    if settings.kernels in ("reference", "native"):
        return False
    reasons = []
    if device.type != "cuda":
        reasons.append(f"device is {device.type}")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        reasons.append(f"dtype is {settings.dtype}")
    if importlib.util.find_spec("triton") is None:
        reasons.append("the package triton is not installed")
    if settings.kernels == "triton" and reasons:
        raise SettingsError(
            f"kernels is triton, but {' and '.join(reasons)}; Triton's kernels compute on a GPU in "
            "bfloat16, float16 or float32",
            param="kernels",
        )
    return not reasons


def native_obstacles(settings: Settings, device: torch.device, dtype: torch.dtype) -> list[str]:
    """What of the settings the native kernels cannot do, each in a few words."""
    reasons = []
    if device.type != "cpu":
        reasons.append(f"device is {device.type}")
    if dtype != torch.float32:
        reasons.append(f"dtype is {settings.dtype}")
    if settings.kv_dtype not in _NATIVE_KV:
        reasons.append(f"kv_dtype is {settings.kv_dtype}")
    if settings.page_size % _LANES:
        reasons.append(f"page_size is {settings.page_size}, no multiple of {_LANES}")
    return reasons


def _num_cores() -> int:
    """Physical cores that this process may use: two threads of one core share its units."""
    affinity = getattr(os, "sched_getaffinity", None)
    usable = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(usable, psutil.cpu_count(logical=False) or usable)


def memory_plan(
    settings: Settings,
    config: ModelConfig,
    machine: Machine,
    drafts: Sequence[ModelConfig] = (),
) -> MemoryPlan:
    """How many KV pages there will be; on a GPU, a share of what is free at this moment.

    `drafts` are the draft models or heads that keep KV under the same page ids.

    Raises:
        ModelError: Not even one page fits.
        SettingsError: `max_context` is more than the model or the pages hold, or its heads cannot
            be stored in this type of pages.
    """
    obstacle = why_not(config.head_dim, machine.kv_dtype)
    if obstacle is not None:
        raise SettingsError(f"kv_dtype is {settings.kv_dtype}, but {obstacle}", param="kv_dtype")
    target_bytes, *draft_bytes = (
        KVCache.bytes_per_page(
            num_layers=one.num_layers,
            page_size=settings.page_size,
            kv_heads=one.num_kv_heads,
            head_dim=one.head_dim,
            dtype=dtype,
        )
        for one, dtype in (
            (config, machine.kv_dtype),
            *((draft, machine.draft_kv_dtype) for draft in drafts),
        )
    )
    if machine.device.type == "cuda":
        available, name, fraction = torch.cuda.mem_get_info()[0], "free GPU memory", _GPU_FRACTION
    else:
        available, name, fraction = psutil.virtual_memory().total, "RAM", _CPU_FRACTION
    asked = settings.max_context
    if asked is not None and asked > config.max_context:
        raise SettingsError(
            f"max_context is {asked} tokens, the model's own is {config.max_context}",
            param="max_context",
        )
    plan = plan_memory(
        available_bytes=available,
        fraction_of=name,
        fraction=settings.kv_memory_fraction or fraction,
        explicit_bytes=settings.kv_memory_bytes,
        bytes_per_page=target_bytes,
        draft_bytes_per_page=sum(draft_bytes),
        page_size=settings.page_size,
        max_context=asked or config.max_context,
    )
    if asked is not None and asked > plan.num_tokens:
        raise SettingsError(
            f"max_context is {asked} tokens, the KV memory holds {plan.num_tokens}",
            param="max_context",
        )
    return plan
