"""What executes the model: native kernels where they can be had, else PyTorch, which is said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pytest
import torch

from chatrt.cli.executor import Executor, find_executor
from chatrt.cli.machine import Machine
from chatrt.errors import ModelError
from chatrt.native_sampling import NativeSampler
from chatrt.sampling import Sampler
from chatrt.settings import Settings
from chatrt.testing.models import tiny_config
from chatrt_kernels.page_moves import TorchPageMoves
from chatrt_kernels.reference import ReferenceOps
from chatrt_kernels.triton.page_moves import TritonPageMoves
from tests.chatrt_kernels.cpu_support import NATIVE_PATH, compiled
from tests.support import KERNEL_CACHE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def find(folder: Path = KERNEL_CACHE, **settings: object) -> tuple[str, torch.dtype, object]:
    chosen = Settings(device="cpu", threads=1, **settings)  # type: ignore[arg-type]  # its own names
    executor = find_executor(chosen, folder, lambda _text: None)
    maker = executor.sampler_for(tiny_config())
    return executor.ops.name, executor.machine.kv_dtype, getattr(maker, "func", maker)


def test_native_kernels_execute_and_sample_where_they_can_be_compiled() -> None:
    compiled(NATIVE_PATH)
    assert find() == ("native", torch.float16, NativeSampler)
    assert find(kernels="reference") == ("reference", torch.float32, Sampler)


def test_without_a_compiler_pytorch_serves_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert find(tmp_path) == ("reference", torch.float32, Sampler)
    assert "no C++ compiler was found" in caplog.text
    assert "PyTorch's own operations serve, more slowly" in caplog.text
    with pytest.raises(ModelError, match="kernels is native, and they cannot be had: no C\\+\\+"):
        find(tmp_path, kernels="native")


def test_settings_that_native_kernels_cannot_do_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert find(page_size=8)[0] == "reference"
    assert "page_size is 8, no multiple of 16: PyTorch's own operations serve" in caplog.text


def test_pages_are_moved_by_a_kernel_on_a_gpu_only() -> None:
    def moves(device: str, kernels: Literal["native", "triton", "reference"]) -> object:
        half = torch.float16
        machine = Machine(torch.device(device), half, half, 1, kernels)
        return Executor(ReferenceOps(), machine).page_moves

    assert moves("cpu", "native") is moves("cpu", "reference") is None
    assert moves("cuda", "triton") is TritonPageMoves
    assert moves("cuda", "reference") is TorchPageMoves
