"""Checks and times the GPU path on one GPU: `python scripts/gpu_check.py`.

Nothing is downloaded: the models have the shapes of Llama 3.2 1B, Llama 3.1 8B and Qwen3 0.6B and
random weights, made on the device. It is meant for five minutes: no section begins after
`BUDGET_S`. Prints a table and, as its last line, one JSON document.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from chatrt_kernels.compilations import Compilations

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatrt.testing.gpu_models import RandomModel
    from chatrt_kernels.triton.ops import TritonOps

BUDGET_S = 280.0
SECTIONS = ("bandwidth", "kernels", "llama-3.2-1b", "qwen3-0.6b", "llama-3.1-8b")
_HISTORIES = (1024, 8192, 32_768)
_KV = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}
_CONTEXT = 1024


@dataclass(frozen=True)
class Line:
    """A figure, and whether it keeps its bar, if it has one."""

    section: str
    what: str
    value: float | str
    bar: str = ""
    within: bool = True


@dataclass
class Check:
    """What was found so far; sections that the time does not allow are named."""

    device: torch.device
    lines: list[Line] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)
    copy_gbs: float = 0.0
    compilations: Compilations = field(default_factory=Compilations)

    @property
    def has_time(self) -> bool:
        """Whether another section may begin."""
        return time.monotonic() - self.started_s < BUDGET_S

    def add(
        self,
        section: str,
        what: str,
        value: float | str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        """Note a figure and say it."""
        bar, within = "", True
        if at_least is not None:
            bar, within = f"≥ {at_least:g}", isinstance(value, float) and value >= at_least
        if at_most is not None:
            bar, within = f"≤ {at_most:g}", isinstance(value, float | int) and value <= at_most
        self.lines.append(Line(section, what, value, bar, within))
        shown = value if isinstance(value, str) else f"{value:.4g}"
        mark = "" if within else "  MISSED"
        print(f"{section:14} {what:58} {shown:>12} {bar:>8}{mark}", flush=True)


def bandwidth(check: Check) -> None:
    """What a copy inside the device moves: what passes are held against."""
    from chatrt.testing.gpu_times import copy_gbs

    check.copy_gbs = copy_gbs(check.device)
    check.add("bandwidth", "copy inside the device, GB/s", check.copy_gbs)


def kernels(check: Check) -> None:
    """Every kernel against the reference."""
    from chatrt.testing.gpu_pages import check_moves
    from chatrt.testing.gpu_parity import check_kernels
    from chatrt_kernels.triton.page_moves import TritonPageMoves

    results = list(check_kernels(check.device, torch.bfloat16, depth=1500))
    results += check_moves(check.device, TritonPageMoves)
    for one in results:
        if not one.within:
            check.add("kernels", one.name, one.error, at_most=one.tolerance)
    wrong = sum(not one.within for one in results)
    check.add(
        "kernels", f"of {len(results)} kernels that are not the reference's", wrong, at_most=0
    )


def model(check: Check, name: str) -> None:
    """A model's passes, turns and pages, beside transformers on the same weights."""
    from chatrt.testing.gpu_models import SHAPES, RandomModel

    made = RandomModel.make(SHAPES[name], check.device, torch.bfloat16)
    with torch.inference_mode():
        theirs_ms = _peer(check, name, made)
        _passes(check, name, made, theirs_ms)
        for kv in _KV if name != "qwen3-0.6b" else ():
            _other_pages(check, name, made, kv)
        for quantize in ("q8", "q4") if name == "llama-3.2-1b" else ():
            _quantised(check, name, made, quantize)


def _ops(check: Check) -> TritonOps:
    from chatrt_kernels.triton.ops import TritonOps
    from chatrt_kernels.triton.program import CudaGraphs
    from chatrt_kernels.triton.watch import counted

    capture = counted(CudaGraphs(), check.compilations)
    return TritonOps(torch.bfloat16, torch.device("cuda"), capture=capture)


def _target(check: Check, made: RandomModel, **fields: Any) -> Any:
    from chatrt.device_sampling import DeviceSampler
    from chatrt.testing.gpu_models import TargetOptions, target_of
    from chatrt.testing.tokenizer import tiny_tokenizer

    known: dict[str, Any] = {"kv_dtype": torch.bfloat16, "max_context": _HISTORIES[-1] + 512}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tiny_tokenizer(Path(folder))
    return target_of(
        made,
        fields.pop("ops", None) or _ops(check),
        tokenizer,
        TargetOptions(**known | fields),
        make_sampler=partial(DeviceSampler, device=check.device),
        sampling_device=check.device,
    )


def _passes(check: Check, name: str, made: RandomModel, theirs_ms: float) -> None:
    from chatrt.testing.gpu_times import forward_ms, step_bytes, uneven_rows, warm_turn

    target = _target(check, made)
    wrong = uneven_rows(target, 300, (1, 2, 5, 8))
    check.add(name, "numbers of rows (1, 2, 5, 8) whose bits differ", len(wrong), at_most=0)
    check.add(
        name, "logits: graph − op by op, largest", _graph_error(check, made, target), at_most=0
    )
    before = check.compilations.all
    decode_ms = forward_ms(target, 1, _CONTEXT)
    check.add(name, "decode at 1k, ms", decode_ms)
    bar = 0.75 if name == "llama-3.1-8b" else None
    share = step_bytes(target, _CONTEXT) / decode_ms / 1e6 / check.copy_gbs
    check.add(name, "decode at 1k, share of the copy bandwidth", share, at_least=bar)
    verify = forward_ms(target, 5, _CONTEXT) / decode_ms
    check.add(name, "verify of 5 rows ÷ decode", verify, at_most=1.15)
    check.add(name, "transformers' generate ÷ decode", theirs_ms / decode_ms, at_least=3.0)
    check.add(name, "prefill of 512 tokens, ms", forward_ms(target, 512, 0, 5))
    for history in _HISTORIES:
        decode = forward_ms(target, 1, history)
        turn = warm_turn(target, history)
        check.add(name, f"decode at {history}, ms", decode)
        check.add(name, f"TTFT of 20 new tokens at {history}, ms", turn.ttft_ms)
    after = check.compilations.all
    kernels, graphs = after.num_kernels - before.num_kernels, after.num_graphs - before.num_graphs
    check.add(name, "kernels compiled after ready", kernels, at_most=0)
    check.add(name, "passes captured after ready", graphs, at_most=0)
    _page_copies(check, name, target)


def _page_copies(check: Check, name: str, target: Any) -> None:
    """Pages out and back as the server copies them, beside plain copies of pinned memory."""
    from chatrt.testing.gpu_pages import page_speeds, row_copies_ms, wrong_pages
    from chatrt_kernels.streams import cuda_streams
    from chatrt_kernels.triton.page_moves import TritonPageMoves

    streams = cuda_streams(check.device)
    wrong = wrong_pages(target.kv, streams, TritonPageMoves)
    check.add(name, "pages that differ once they were out and back", wrong, at_most=0)
    together_ms, apart_ms = row_copies_ms(target.kv, TritonPageMoves)
    check.add(name, "rows of 8 pages copied on write, ms", together_ms)
    check.add(name, "one by one ÷ together", apart_ms / together_ms)
    speeds = page_speeds(target.kv, streams, TritonPageMoves)
    check.add(name, "pinned copy to main memory, GB/s", speeds.plain_out)
    check.add(name, "pinned copy back, GB/s", speeds.plain_back)
    check.add(name, "pages to pinned memory, share of that", speeds.out / speeds.plain_out)
    check.add(name, "pages to the archive, GB/s", speeds.taken)
    check.add(name, "pages back from it, GB/s", speeds.back)
    check.add(name, "pages back from it, share of the copy", speeds.back / speeds.plain_back)


def _graph_error(check: Check, made: RandomModel, target: Any) -> float:
    """How far a replayed pass is from the same kernels launched one by one."""
    from chatrt.testing.gpu_times import logits_of
    from chatrt_kernels.triton.ops import TritonOps

    eager = _target(check, made, ops=TritonOps(torch.bfloat16, check.device), max_context=1024)
    for one in (target, eager):
        logits_of(one, 0, 200)
    ours, theirs = logits_of(target, 200, 5), logits_of(eager, 200, 5)
    return float((ours.float() - theirs.float()).abs().max())


def _other_pages(check: Check, name: str, made: RandomModel, kv: str) -> None:
    from chatrt.testing.gpu_times import forward_ms

    target = _target(check, made, kv_dtype=_KV[kv])
    check.add(name, f"decode at 8k over {kv} pages, ms", forward_ms(target, 1, 8192))
    per_token = target.kv.num_bytes / target.kv.num_pages / target.kv.page_size
    check.add(name, f"bytes of a token in {kv} pages", per_token)


def _quantised(check: Check, name: str, made: RandomModel, quantize: str) -> None:
    from chatrt.testing.gpu_times import forward_ms, step_bytes

    target = _target(check, made, quantize=quantize, max_context=2048)
    decode_ms = forward_ms(target, 1, _CONTEXT)
    check.add(name, f"decode at 1k with {quantize} weights, ms", decode_ms)
    share = step_bytes(target, _CONTEXT) / decode_ms / 1e6 / check.copy_gbs
    check.add(name, f"share of the copy bandwidth with {quantize} weights", share)


def _peer(check: Check, name: str, made: RandomModel) -> float:
    """Milliseconds a token of transformers' `generate`, its cache on."""
    ids = torch.arange(_CONTEXT, device=check.device)[None] % 997
    times = []
    for num_tokens in (1, 33, 1, 33):
        torch.cuda.synchronize()
        started = time.perf_counter()
        made.peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    theirs_ms = (times[3] - times[2]) / 32
    check.add(name, "transformers' generate, ms a token", theirs_ms)
    return theirs_ms


def main(arguments: list[str] | None = None) -> int:
    """Run the sections; 1 if a bar was missed, 2 without a device."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help=f"sections, with commas: {', '.join(SECTIONS)}")
    parser.add_argument("--save", type=Path, help="write the JSON document to this file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(f"no GPU was found: torch {torch.__version__} sees no CUDA or ROCm device here")
        return 2
    from chatrt.bench.document import Device, encode_line, new_document
    from chatrt_kernels.triton.watch import watch_compilations

    check = Check(torch.device("cuda"))
    watch_compilations(check.compilations)
    document = new_document(
        "gpu",
        seed=0,
        device=Device(torch.cuda.get_device_name(), "bfloat16", torch.get_num_threads()),
    )
    sections: dict[str, Callable[[], None]] = {
        "bandwidth": partial(bandwidth, check),
        "kernels": partial(kernels, check),
        **{name: partial(model, check, name) for name in SECTIONS[2:]},
    }
    chosen = SECTIONS if options.only is None else ("bandwidth", *options.only.split(","))
    for name in dict.fromkeys(chosen):
        if check.has_time:
            sections[name]()
            torch.cuda.empty_cache()
        else:
            check.left_out.append(name)
    document |= {
        "figures": [asdict(line) for line in check.lines],
        "left_out": check.left_out,
        "duration_s": time.monotonic() - check.started_s,
    }
    line = encode_line(document)
    print(line)
    if options.save is not None:
        options.save.write_text(line + "\n", encoding="utf-8")
    return 1 if any(not line.within for line in check.lines) else 0


if __name__ == "__main__":
    sys.exit(main())
