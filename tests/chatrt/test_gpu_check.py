"""What the GPU check is made of, run under Triton's interpreter on models of a few numbers."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from chatrt.testing.gpu_models import SHAPES, RandomModel, TargetOptions, target_of
from chatrt.testing.gpu_pages import check_moves, page_speeds, row_copies_ms, wrong_pages
from chatrt.testing.gpu_parity import KV_DTYPES, check_kernels
from chatrt.testing.gpu_times import (
    copy_gbs,
    forward_ms,
    logits_of,
    step_bytes,
    uneven_rows,
    warm_turn,
)
from chatrt.testing.streams import LateStream
from chatrt.testing.tokenizer import tiny_tokenizer
from chatrt_kernels.page_moves import TorchPageMoves
from chatrt_kernels.streams import Streams
from chatrt_kernels.triton.ops import TritonOps
from chatrt_kernels.triton.page_moves import TritonPageMoves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.engine import Target
    from chatrt_kernels.page_moves import RowCopy

CPU = torch.device("cpu")
SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"
TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}


def tiny(name: str) -> RandomModel:
    return RandomModel.make(SHAPES[name] | TINY, CPU, torch.float32)


def target(made: RandomModel, folder: Path, **fields: Any) -> Target:
    known: dict[str, Any] = {"kv_dtype": torch.float32, "max_context": 640, "max_rows": 64}
    ops = TritonOps(torch.float32, CPU, even_rows=16)
    return target_of(made, ops, tiny_tokenizer(folder), TargetOptions(**known | fields))


def test_without_a_gpu_the_script_says_so_and_ends() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False, timeout=110
    )
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the script runs in full")
    assert done.returncode == 2
    assert done.stdout.startswith("no GPU was found: torch ")
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_kernel_is_the_references_at_the_shapes_of_models() -> None:
    results = list(check_kernels(CPU, torch.float32, depth=70, shapes=("0.6b", "135m")))
    assert [one for one in results if not one.within] == []
    assert len(results) > 2 * 3 * len(KV_DTYPES)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b", "qwen3-0.6b"])
def test_logits_of_random_weights_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    made = tiny(name)
    ours = logits_of(target(made, tmp_path), 0, 30)
    token_ids = torch.tensor([[(31 * i) % 251 for i in range(30)]])
    with torch.inference_mode():
        theirs = made.peer(token_ids).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kv", ["bf16", "int8", "int4"])
def test_rows_are_even_over_pages_of_every_format(kv: str, tmp_path: Path) -> None:
    made = tiny("llama-3.1-8b")
    assert uneven_rows(target(made, tmp_path, kv_dtype=KV_DTYPES[kv]), 20, (1, 2, 5, 8)) == []


def test_a_warm_turn_reuses_its_history(tmp_path: Path) -> None:
    turn = warm_turn(target(tiny("llama-3.2-1b"), tmp_path), 64, new_tokens=6)
    assert turn.cached_tokens >= 64
    assert turn.ttft_ms > 0


def test_bytes_of_a_step_are_weights_and_the_pages_of_its_context(tmp_path: Path) -> None:
    made = tiny("llama-3.1-8b")
    one = target(made, tmp_path)
    page = one.kv.num_bytes // one.kv.num_pages
    weights = one.decoder.weights
    read = weights.num_bytes - weights.embedding.num_bytes
    assert step_bytes(one, 33) == read + 3 * page


def test_times_and_speeds_are_above_zero(tmp_path: Path) -> None:
    one = target(tiny("llama-3.2-1b"), tmp_path)
    assert copy_gbs(CPU, 1 << 20) > 0
    assert forward_ms(one, 1, 4, repetitions=1) > 0


def prompt_streams() -> Streams:
    compute, out, back = (LateStream(prompt=True) for _ in range(3))
    return Streams(compute, out, back, pinned=False)


@pytest.mark.parametrize("num_pages", [1, 40])
def test_pages_that_went_out_and_back_to_be_timed_are_as_they_were(
    num_pages: int, tmp_path: Path
) -> None:
    kv = target(tiny("llama-3.2-1b"), tmp_path).kv
    kv.data.copy_(torch.arange(kv.data.numel()).view(kv.data.shape))
    before = kv.data.clone()
    streams = prompt_streams()
    speeds = page_speeds(kv, streams, TritonPageMoves, num_pages=num_pages)
    assert min(astuple(speeds)) > 0
    assert torch.equal(kv.data, before)
    assert wrong_pages(kv, streams, TritonPageMoves, num_pages=num_pages) == 0
    assert min(row_copies_ms(kv, TritonPageMoves, num_copies=2)) > 0
    assert torch.equal(kv.data, before)


def test_pages_that_do_not_come_back_are_found(tmp_path: Path) -> None:
    class Forgetful(TorchPageMoves):
        """Puts nothing back."""

        def scatter(self, page_ids: Sequence[int], source: torch.Tensor) -> None:
            del page_ids, source

    kv = target(tiny("llama-3.2-1b"), tmp_path).kv
    streams = prompt_streams()
    assert wrong_pages(kv, streams, Forgetful, num_pages=4) == 4


def test_pages_of_every_format_are_moved_as_the_oracle_moves_them() -> None:
    results = list(check_moves(CPU, TritonPageMoves))
    assert [one.error for one in results] == [0.0] * len(KV_DTYPES)

    class Forgetful(TorchPageMoves):
        """Copies no rows."""

        def copy_rows(self, copies: Sequence[RowCopy]) -> None:
            del copies

    assert all(not one.within for one in check_moves(CPU, Forgetful))


@pytest.mark.parametrize("quantize", ["q8", "q4"])
def test_weights_are_quantised_on_the_way_to_the_executor(quantize: str, tmp_path: Path) -> None:
    made = tiny("llama-3.1-8b")
    dense, grouped = target(made, tmp_path), target(made, tmp_path, quantize=quantize)
    assert grouped.decoder.weights.num_bytes < dense.decoder.weights.num_bytes / 3
    ours, exact = logits_of(grouped, 0, 8), logits_of(dense, 0, 8)
    assert (ours - exact).norm() < 0.2 * exact.norm()
