"""Compiles every Triton kernel ahead of time, for targets that are not here: run it as a program.

It calls the wrappers as an executor does, on tensors of real models' shapes in main memory, and
records what they would launch instead of launching it. Prints one JSON list: kernel, case, target,
bytes of shared memory, registers, bytes that were spilled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from chatrt_kernels.formats import QuantFormat, QuantizedTensor
from chatrt_kernels.kv_formats import KVFormat
from chatrt_kernels.ops import ForwardInputs, KVLayer, RowMeta
from chatrt_kernels.page_moves import PageRuns
from chatrt_kernels.triton.launch import stages_of_shared_loads
from chatrt_kernels.triton.linear import linear
from chatrt_kernels.triton.ops import EVEN_ROWS, TritonOps
from chatrt_kernels.triton.page_moves import TritonPageMoves
from chatrt_kernels.triton.sample import Rules, choose
from chatrt_kernels.triton.weights import prepare

if TYPE_CHECKING:
    from collections.abc import Iterator

TARGETS = {
    "cuda:80": GPUTarget("cuda", 80, 32),
    "cuda:90": GPUTarget("cuda", 90, 32),
    "hip:gfx942": GPUTarget("hip", "gfx942", 64),
}
CPU = torch.device("cpu")
# heads, KV heads, dimensions of a head: Llama 3.1 8B, Llama 3.2 1B, Qwen3 0.6B, SmolLM2 135M
SHAPES = {"8b": (32, 8, 128), "1b": (32, 8, 64), "0.6b": (16, 8, 128), "135m": (9, 3, 64)}
KV_DTYPES = {
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
}
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_PAGES, _PAGE_SIZE, _POSITIONS = 8, 16, 8192


@dataclass(frozen=True)
class Launch:
    """What a wrapper would have launched."""

    kernel: JITFunction[Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """What is launched inside is only written down."""
    launches: list[Launch] = []

    def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del grid, warmup
        launches.append(Launch(self, args, options))

    plain, JITFunction.run = JITFunction.run, run
    try:
        yield launches
    finally:
        JITFunction.run = plain


def layer(kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVLayer:
    """Unwritten pages."""
    kind = KVFormat.of(dtype)
    rows = (_PAGES, _PAGE_SIZE, kv_heads)
    keys, values = torch.empty(2, *rows, kind.stored_width(head_dim)).to(dtype)
    shape = kind.scale_shape(head_dim)
    if shape is None:
        return KVLayer(keys, values)
    return KVLayer(keys, values, *torch.empty(2, *rows, *shape, dtype=kind.scale_dtype))


def meta(num_rows: int) -> RowMeta:
    """Rows of one sequence."""
    return RowMeta(
        token_ids=torch.zeros(num_rows, dtype=torch.int64),
        positions=torch.zeros(num_rows, dtype=torch.int64),
        write_slots=torch.zeros(num_rows, dtype=torch.int64),
        page_table=torch.zeros(1, _POSITIONS // _PAGE_SIZE, dtype=torch.int32),
        q_start=torch.tensor([0, num_rows], dtype=torch.int32),
        kv_len=torch.tensor([num_rows], dtype=torch.int32),
    )


def attention(shape: str, kv: str) -> Iterator[tuple[str, list[Launch]]]:
    """Decode and prefill of one shape over pages of one format, with what writes them."""
    heads, kv_heads, head_dim = SHAPES[shape]
    ops = TritonOps(torch.bfloat16, CPU)
    pages = layer(kv_heads, head_dim, KV_DTYPES[kv])
    for name, num_rows in (("decode", EVEN_ROWS), ("prefill", 512)):
        q, k, v = (
            torch.empty(num_rows, count * head_dim, dtype=torch.bfloat16)
            for count in (heads, kv_heads, kv_heads)
        )
        rope = torch.empty(_POSITIONS, head_dim)
        with recorded() as launches:
            ops.rope_and_write_kv(q, k, v, rope, meta(num_rows), pages, out=q)
            ops.paged_attention(q, meta(num_rows), pages, 0.1, out=torch.empty_like(q))
        yield f"{name} {shape} {kv}", launches


def rows_and_weights() -> Iterator[tuple[str, list[Launch]]]:
    """Norms, products with grouped weights, what goes in and out of a step."""
    ops = TritonOps(torch.bfloat16, CPU)
    x = torch.empty(EVEN_ROWS, 4096, dtype=torch.bfloat16)
    with recorded() as launches:
        ops.rms_norm(x, torch.empty(4096), 1e-5, out=x)
        ops.swiglu(x, x, out=x)
    yield "decode rows", launches
    for name in (QuantFormat.Q8_0, QuantFormat.Q4_1):
        data = torch.zeros(4096, name.row_bytes(4096), dtype=torch.uint8)
        weight = prepare(
            QuantizedTensor(name, data, (4096, 4096)), dtype=torch.bfloat16, device=CPU
        )
        for phase in ("decode", "prefill"):
            with recorded() as launches:
                linear(x, weight, None, out=torch.empty_like(x), prefill=phase == "prefill")
            yield f"{phase} {name.value}", launches


def sampling() -> Iterator[tuple[str, list[Launch]]]:
    """Every way to choose."""
    logits = torch.zeros(5, 128_256, dtype=torch.bfloat16)
    drafts = torch.zeros(4, dtype=torch.int64)
    penalties = {
        "counts": torch.zeros(128_256, dtype=torch.int32),
        "in_prompt": torch.zeros(128_256, dtype=torch.int8),
        "bias": torch.zeros(128_256),
        "frequency_penalty": 0.5,
    }
    for name, fields in {
        "greedy": {"temperature": 0.0},
        "noisy": {},
        "filtered": {"top_k": 40, "top_p": 0.9, "min_p": 0.1, **penalties},
    }.items():
        with recorded() as launches:
            rules = Rules(seed=1, vocab_size=128_256, **fields)  # type: ignore[arg-type]
            choose(logits, drafts, rules, position=7)
        yield f"sample {name}", launches


def padding() -> Iterator[tuple[str, list[Launch]]]:
    """A step's inputs, padded to the bucket."""
    ops = TritonOps(torch.bfloat16, CPU)
    rows = torch.zeros(EVEN_ROWS, dtype=torch.int64)
    inputs = ForwardInputs(meta(EVEN_ROWS), rows, rows, _POSITIONS)
    with recorded() as launches:
        ops.compile(lambda *_: None, inputs, ()).run(inputs)
    yield "decode inputs", launches


def moved_pages() -> Iterator[tuple[str, list[Launch]]]:
    """Pages copied, and out and back, in words of eight bytes and of one."""
    for name, width in (("words", 64), ("bytes", 65)):
        pages = torch.empty(2, _PAGES, _PAGE_SIZE, width, dtype=torch.uint8)
        with recorded() as launches:
            TritonPageMoves([PageRuns.of(pages, page_dim=1, by_rows=True)])
        yield f"pages in {name}", launches


def cases() -> Iterator[tuple[str, list[Launch]]]:
    """Everything that an executor launches."""
    for shape in SHAPES:
        yield from attention(shape, "bf16")
    for kv in ("fp8", "int8", "int4"):
        yield from attention("8b", kv)
    yield from rows_and_weights()
    yield from sampling()
    yield from padding()
    yield from moved_pages()


def source_of(launch: Launch) -> tuple[ASTSource, dict[str, Any]]:
    """The kernel with the types of its arguments, as the launcher would specialise it."""
    parameters = launch.kernel.params
    names = [parameter.name for parameter in parameters]
    known = dict(zip(names, launch.arguments, strict=False))
    options = {name: value for name, value in launch.options.items() if name not in names}
    known |= {name: value for name, value in launch.options.items() if name in names}
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(parameters):
        value = known[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes), options


def compiled(launch: Launch, target: str) -> dict[str, Any]:
    """What the target's compiler says of a kernel."""
    source, options = source_of(launch)
    if launch.kernel.fn.__name__ == "_linear":
        amd = target.startswith("hip")
        options["num_stages"] = stages_of_shared_loads(options["num_stages"], amd=amd)
    made = triton.compile(source, target=TARGETS[target], options=options)
    if "cubin" in made.asm:
        registers, spilled = _of_cubin(made.asm["cubin"])
    else:
        text = made.asm["amdgcn"]
        registers = int(re.findall(r"\.vgpr_count:\s+(\d+)", text)[0])
        # scalars that do not fit go into lanes of vector registers there: no memory is touched
        spilled = sum(
            int(count) for count in re.findall(r"(?:\.vgpr_spill_count|ScratchSize):\s+(\d+)", text)
        )
    return {
        "kernel": launch.kernel.fn.__name__.lstrip("_"),
        "target": target,
        "shared": made.metadata.shared,
        "registers": registers,
        "spilled": spilled,
    }


def _of_cubin(cubin: bytes) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        told = subprocess.run(
            [tool, "-res-usage", str(file)], capture_output=True, text=True, check=True
        ).stdout
    usage = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", told)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def main(targets: list[str]) -> None:
    """Compile for these targets, all of them if none is named."""
    found, seen = [], set()
    for case, launches in cases():
        for launch in launches:
            source, options = source_of(launch)
            key = (source.hash(), json.dumps(options, default=str))
            if key in seen:
                continue
            seen.add(key)
            found += [{"case": case, **compiled(launch, one)} for one in targets or TARGETS]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
