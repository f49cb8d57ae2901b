"""Where a model runs on this machine, and how much of its memory the KV pages get.

Knows: devices, dtypes, cores, how the settings choose among them. Does not know: weights, engines.
Invariant: all who ask with the same settings get the same answer: server, bench, `doctor`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import torch

from chatrt.errors import SettingsError
from chatrt.kvcache import KVCache, MemoryPlan, plan_memory

if TYPE_CHECKING:
    from chatrt.models.config import ModelConfig
    from chatrt.settings import Settings

_CPU_FRACTION = 0.25
_GPU_FRACTION = 0.9
_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the model runs."""

    device: torch.device
    dtype: torch.dtype
    num_threads: int


def find_machine(settings: Settings) -> Machine:
    """The device, dtype and threads that the settings mean on this machine.

    Raises:
        SettingsError: A GPU is asked for, and torch finds none.
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
    affinity = getattr(os, "sched_getaffinity", None)
    num_cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return Machine(device, dtype, settings.threads or num_cores)


def memory_plan(settings: Settings, config: ModelConfig, machine: Machine) -> MemoryPlan:
    """How many KV pages there will be; on a GPU, a share of what is free at this moment.

    Raises:
        ModelError: Not even one page fits.
        SettingsError: `max_context` is more than the model or the pages hold.
    """
    bytes_per_page = KVCache.bytes_per_page(
        num_layers=config.num_layers,
        page_size=settings.page_size,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=machine.dtype,
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
        bytes_per_page=bytes_per_page,
        page_size=settings.page_size,
        max_context=asked or config.max_context,
    )
    if asked is not None and asked > plan.num_tokens:
        raise SettingsError(
            f"max_context is {asked} tokens, the KV memory holds {plan.num_tokens}",
            param="max_context",
        )
    return plan
