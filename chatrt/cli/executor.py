"""What executes the model: native kernels on a CPU, Triton's on a GPU, else PyTorch.

Knows: how each executor is made, how a turn's sampler is. Does not know: models, engines.
Invariant: without native kernels chatrt still serves, and says once why it is slower.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from chatrt.cli.machine import Machine, find_machine, native_obstacles
from chatrt.errors import ModelError
from chatrt.native_sampling import NativeSampler
from chatrt.sampling import Sampler
from chatrt_kernels.compilations import Compilations
from chatrt_kernels.cpu.binding import NativeLibrary
from chatrt_kernels.cpu.build import BuildError, discard, ensure_library
from chatrt_kernels.cpu.ops import NativeOps
from chatrt_kernels.cpu.sampling import NativeSampling
from chatrt_kernels.page_moves import TorchPageMoves
from chatrt_kernels.reference import ReferenceOps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from chatrt.models.config import ModelConfig
    from chatrt.sampling import MakeSampler
    from chatrt.settings import Settings
    from chatrt_kernels.ops import Ops
    from chatrt_kernels.page_moves import MakePageMoves

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Executor:
    """The ops, and the machine as they use it; `compilations` are theirs."""

    ops: Ops
    machine: Machine
    compilations: Compilations = field(default_factory=Compilations)

    @property
    def page_moves(self) -> MakePageMoves | None:
        """What moves pages on a GPU; None on a CPU, where they lie in main memory."""
        if self.machine.device.type == "cpu":
            return None
        if self.machine.kernels != "triton":
            return TorchPageMoves
        from chatrt_kernels.triton.page_moves import TritonPageMoves

        return TritonPageMoves

    @property
    def sampling_device(self) -> torch.device:
        """Where those samplers want their logits."""
        return self.machine.device if self.machine.kernels == "triton" else torch.device("cpu")

    def warm_up_sampling(self, vocab_size: int) -> None:
        """Compile what choosing tokens needs, where that is compiled at its first call."""
        if self.machine.kernels == "triton":
            from chatrt.device_sampling import warm_up_sampling

            warm_up_sampling(vocab_size, self.machine.dtype, self.machine.device)

    def sampler_for(self, config: ModelConfig) -> MakeSampler:
        """What makes the sampler of a turn, for logits of this model."""
        if self.machine.kernels == "triton":
            from chatrt.device_sampling import DeviceSampler

            return partial(DeviceSampler, device=self.machine.device)
        if not isinstance(self.ops, NativeOps):
            return Sampler
        kernel = NativeSampling(self.ops.kernels.functions, config.vocab_size)
        return partial(NativeSampler, kernel=kernel)


def find_executor(settings: Settings, kernels: Path, report: Callable[[str], None]) -> Executor:
    """The executor that the settings mean on this machine; its threads are started.

    `kernels` is the folder of compiled libraries; `report` hears of a compilation.

    Raises:
        SettingsError: A device or kernels are asked for that this machine does not have.
        ModelError: Native kernels are asked for, and they cannot be had.
    """
    machine = find_machine(settings)
    if machine.native:
        try:
            ops = NativeOps(_load_library(kernels, report), machine.num_threads)
        except (BuildError, OSError) as error:
            if settings.kernels == "native":
                raise ModelError(f"kernels is native, and they cannot be had: {error}") from error
            _log.warning("%s; PyTorch's own operations serve, more slowly", error)
        else:
            # What PyTorch still does is small: threads that wait for it would take cores away.
            torch.set_num_threads(1)
            return Executor(ops, machine)
        machine = find_machine(replace(settings, kernels="reference"))
    elif settings.kernels == "auto" and machine.device.type == "cpu":
        reasons = native_obstacles(settings, machine.device, machine.dtype)
        _log.warning("%s: PyTorch's own operations serve, more slowly", " and ".join(reasons))
    torch.set_num_threads(machine.num_threads)
    if machine.kernels == "triton":
        compilations = Compilations()
        return Executor(_triton_ops(machine, compilations), machine, compilations)
    return Executor(ReferenceOps(machine.dtype, machine.device), machine)


def _triton_ops(machine: Machine, compilations: Compilations) -> Ops:
    """Triton's kernels, whose passes of few rows become CUDA graphs."""
    # Only here: Triton is slow to import, and there is none for every platform.
    from chatrt_kernels.triton.ops import TritonOps
    from chatrt_kernels.triton.program import CudaGraphs
    from chatrt_kernels.triton.watch import counted, watch_compilations

    watch_compilations(compilations)
    capture = counted(CudaGraphs(), compilations)
    return TritonOps(machine.dtype, machine.device, capture=capture)


def _load_library(kernels: Path, report: Callable[[str], None]) -> NativeLibrary:
    """The compiled kernels; a damaged file is compiled anew, once."""
    path = ensure_library(kernels, report=report)
    try:
        return NativeLibrary(path)
    except OSError:
        discard(path)
        return NativeLibrary(ensure_library(kernels, report=report))
