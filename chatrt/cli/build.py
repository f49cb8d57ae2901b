"""Puts the runtime together from settings: model, pages, scheduler, engine, service.

Knows: every part's constructor. Does not know: terminals, sockets.
Invariant: a warm runtime has run a whole turn, and forgotten it again.
"""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from chatrt.batch import BatchBuilder
from chatrt.cli.drafts import describe_drafts, find_draft, make_drafter
from chatrt.cli.executor import find_executor
from chatrt.cli.machine import memory_plan
from chatrt.cost_model import LinearCostModel
from chatrt.depth import DepthController, StepCosts
from chatrt.engine import Engine, EngineLimits, Target
from chatrt.engine.costs import measure_costs, measure_rows
from chatrt.engine.draft_costs import measure_drafts
from chatrt.errors import StoreError, UnsupportedModel
from chatrt.host import EngineHost
from chatrt.kvcache import KVCache, MemoryPlan, format_bytes
from chatrt.metrics import Metrics
from chatrt.models.decoder import Decoder
from chatrt.models.loader import Model, load_model
from chatrt.models.quantize import load_quantization
from chatrt.pages import PageAllocator
from chatrt.params import SamplingParams
from chatrt.prefix import PrefixTree
from chatrt.scheduler import Scheduler, SchedulerLimits
from chatrt.service import ChatService, ServiceSettings
from chatrt.session_manager import SessionManager
from chatrt.store import Store
from chatrt.text.tokenizer import Tokenizer
from chatrt.turn import FinishedEvent, TurnKind, TurnRequest
from chatrt_kernels.cpu.lower import MAX_HEAD_DIM

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch

    from chatrt.archive import Archive
    from chatrt.cli.executor import Executor
    from chatrt.cost_model import CostModel
    from chatrt.drafter import Drafter
    from chatrt.metrics import TurnObserver
    from chatrt.models.config import ModelConfig
    from chatrt.models.files import ModelFiles
    from chatrt.paths import Paths
    from chatrt.settings import Resolved, Settings
    from chatrt_kernels.compilations import Compilations
    from chatrt_kernels.ops import Ops
    from chatrt_kernels.page_moves import MakePageMoves

_log = logging.getLogger(__name__)

_WARM_UP_TOKENS = 32
_RESUME_WINDOW_S = 60.0
_SEED_BITS = 53  # a client in JavaScript can repeat the seed that it is told


@dataclass(frozen=True, slots=True)
class Runtime:
    """An engine with what describes it; `ops` executes the `target` that the engine runs.

    `step_costs` are what depth control started from; None without a drafter, or if not warm.
    `paired_kv` is the cache of what drafts, if its rows are written with the target's;
    `fingerprint` tells by which weights both are. `compilations` are those of the ops; whoever
    serves says when they are to be over. `page_moves` move pages on a GPU.
    """

    engine: Engine
    target: Target
    ops: Ops
    tokenizer: Tokenizer
    model_name: str
    max_context: int
    sampling: SamplingParams
    kv_bytes: Mapping[str, int]
    step_costs: StepCosts | None
    paired_kv: KVCache | None
    fingerprint: str
    compilations: Compilations
    page_moves: MakePageMoves | None


def build_runtime(
    files: ModelFiles,
    resolved: Resolved,
    paths: Paths,
    report: Callable[[str], None],
    *,
    warm: bool = True,
) -> Runtime:
    """Load the model and make everything ready; `report` hears each stage in a few words.

    A process that answers once and ends gains nothing from being `warm`.

    Raises:
        ModelError: The model's files cannot be used, or not one KV page fits.
    """
    settings = resolved.settings
    executor = find_executor(settings, paths.kernels, report)
    machine = executor.machine
    report(f"loading {files.name}")
    draft = find_draft(settings, files, paths.cache)
    model = load(files, settings, executor, first_rows=draft.first_rows)
    tokenizer = Tokenizer.load(files.tokenizer_dir, eos_token_ids=model.config.eos_token_ids)
    memory = memory_plan(settings, model.config, machine, draft.configs(model.config))
    weights = f"weights: {format_bytes(model.weights.num_bytes)}"
    threads = f"{executor.ops.name} kernels on {machine.num_threads} threads"
    drafts = f"drafts: {describe_drafts(settings, draft)}"
    for line in (threads, weights, drafts, *memory.describe()):
        _log.info("%s", line)
    # A conversation can hold no more than the pool: the last page must stay for the answer.
    max_context = min(memory.max_context, memory.num_tokens)
    target = _target(settings, model, executor, tokenizer, memory)
    drafter = make_drafter(settings, draft, target, executor)
    # A turn that runs alone has no stream beside it that a chunk could hold up, and nobody arrives.
    costs: CostModel = LinearCostModel(fixed_ms=0.0, decode_row_ms=0.0, prefill_row_ms=0.0)
    depth = None
    if warm:
        report("warming up")
        costs = _costs(target, settings, max_context)
        depth = _depth(target, drafter, settings, max_context)
    engine = _engine(settings, target, memory, max_context, costs, drafter, depth)
    if warm:
        _warm_up(engine, settings, max_context)
        executor.warm_up_sampling(target.vocab_size)
    return Runtime(
        engine=engine,
        target=target,
        ops=executor.ops,
        tokenizer=tokenizer,
        model_name=files.name,
        max_context=max_context,
        sampling=sampling_defaults(resolved, files.name, model),
        kv_bytes=memory.kv_bytes_by_owner,
        step_costs=depth.costs if depth is not None else None,
        paired_kv=drafter.kv if drafter is not None and drafter.paired else None,
        fingerprint=f"{model.fingerprint} {draft.fingerprint}",
        compilations=executor.compilations,
        page_moves=executor.page_moves,
    )


def load(
    files: ModelFiles,
    settings: Settings,
    executor: Executor,
    *,
    first_rows: torch.Tensor | None = None,
) -> Model:
    """The model's weights as the executor keeps them, in the format that the settings name.

    `first_rows` are the rows of its head that lie together, for a draft head to use.

    Raises:
        ModelError: The model's files cannot be used.
    """
    machine = executor.machine
    quantize = load_quantization(settings.quantize, native_kernels=machine.native)
    model = load_model(
        files,
        executor.ops,
        device=machine.device,
        dtype=machine.dtype,
        quantize=quantize,
        first_rows=first_rows,
    )
    head_dim = model.config.head_dim
    if machine.native and head_dim > MAX_HEAD_DIM:
        raise UnsupportedModel(
            f"attention heads have {head_dim} dimensions, native kernels take {MAX_HEAD_DIM} at "
            "most; --kernels reference serves the model"
        )
    return model


def sampling_defaults(resolved: Resolved, name: str, model: Model) -> SamplingParams:
    """What a request gets that names no sampling of its own."""
    sourced = resolved.sampling_defaults(name, asdict(model.generation_defaults))
    values = {key: one.value for key, one in sourced.items()}
    return SamplingParams(**values)  # type: ignore[arg-type]  # checked when they were read


def build_service(
    runtime: Runtime,
    host: EngineHost,
    settings: Settings,
    database: Path | None,
    archive: Archive | None = None,
    observers: Sequence[TurnObserver] = (),
) -> ChatService:
    """The service over a started host; `observers` watch its turns beside the metrics.

    Conversations are kept in `database`: in memory only if there is none, or it cannot be used.
    """
    return ChatService(
        host,
        runtime.tokenizer,
        _open_store(database) if database is not None else None,
        Metrics(runtime.model_name, runtime.kv_bytes, observers),
        ServiceSettings(
            model=runtime.model_name,
            max_context=runtime.max_context,
            sampling=runtime.sampling,
            max_output_tokens=settings.max_output_tokens,
            max_input_tokens=settings.max_input_tokens,
            share_prefixes=settings.share_prefixes == "global",
            resume_window_s=max(_RESUME_WINDOW_S, settings.disconnect_grace_s),
            model_aliases=frozenset({settings.model}),
        ),
        archive=archive,
    )


def _open_store(database: Path) -> Store | StoreError:
    """The conversation store, or why it cannot be used, which the log says too."""
    try:
        return Store.open(database)
    except StoreError as error:
        _log.warning("%s; conversations are kept in memory only", error.message)
        return error


def _target(
    settings: Settings,
    model: Model,
    executor: Executor,
    tokenizer: Tokenizer,
    memory: MemoryPlan,
) -> Target:
    """The decoder with its KV cache and batches, for conversations of up to `max_context`."""
    config, max_rows, machine = model.config, settings.max_num_batched_tokens, executor.machine
    max_positions = memory.max_context + settings.max_draft
    decoder = Decoder(
        config,
        model.weights,
        executor.ops,
        max_rows=max_rows,
        max_positions=max_positions,
        device=machine.device,
        dtype=machine.dtype,
    )
    batches = BatchBuilder(
        max_rows,
        settings.max_num_seqs,
        -(-max_positions // settings.page_size),
        settings.page_size,
        machine.device,
    )
    kv = kv_cache(config, memory.num_pages, settings.page_size, executor)
    return Target(
        decoder,
        kv,
        batches,
        tokenizer,
        executor.sampler_for(config),
        executor.sampling_device,
    )


def kv_cache(config: ModelConfig, num_pages: int, page_size: int, executor: Executor) -> KVCache:
    """Unwritten pages of one model, as its executor reads them."""
    kv = KVCache.allocate(
        num_layers=config.num_layers,
        num_pages=num_pages,
        page_size=page_size,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=executor.machine.kv_dtype,
        device=executor.machine.device,
        layout=executor.ops.kv_layout,
    )
    if executor.page_moves is not None:
        kv.move_pages_by(executor.page_moves)
    return kv


def _engine(
    settings: Settings,
    target: Target,
    memory: MemoryPlan,
    max_context: int,
    costs: CostModel,
    drafter: Drafter | None,
    depth: DepthController | None,
) -> Engine:
    allocator = PageAllocator(memory.num_pages)
    tree = PrefixTree(allocator, settings.page_size)
    sessions = SessionManager(allocator, tree, page_size=settings.page_size)
    limits = SchedulerLimits(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_gap_ms=settings.max_gap_ms,
    )
    return Engine(
        target,
        sessions=sessions,
        scheduler=Scheduler(sessions, limits, costs),
        drafter=drafter,
        depth=depth,
        limits=EngineLimits(
            max_context=max_context,
            max_num_seqs=settings.max_num_seqs,
            page_size=settings.page_size,
            num_drafts=settings.max_draft,
            max_pages_per_owner=settings.max_pages_per_key,
        ),
        clock=time.perf_counter_ns,
        draw_seed=lambda: secrets.randbits(_SEED_BITS),
    )


def _costs(target: Target, settings: Settings, max_context: int) -> CostModel:
    costs = measure_costs(
        target,
        page_size=settings.page_size,
        max_context=max_context,
        clock=time.perf_counter_ns,
    )
    _log.info("a step costs %s", costs.describe())
    return costs


def _depth(
    target: Target, drafter: Drafter | None, settings: Settings, max_context: int
) -> DepthController | None:
    """Depth control by what passes and drafts cost on this machine; None without a drafter."""
    if drafter is None:
        return None
    sizes = {"page_size": settings.page_size, "max_context": max_context}
    rows_ms = measure_rows(target, **sizes, clock=time.perf_counter_ns)
    drafts = measure_drafts(target, drafter, **sizes, clock=time.perf_counter_ns)
    _log.info("a verify pass takes %s", ", ".join(f"{n}: {ms:.1f} ms" for n, ms in rows_ms))
    return DepthController(StepCosts(rows_ms, drafts), max_tokens=settings.max_draft)


def _warm_up(engine: Engine, settings: Settings, max_context: int) -> None:
    """One turn of two chunks and a few decode steps, so that no person pays for first calls."""
    length = min(settings.max_num_batched_tokens + _WARM_UP_TOKENS, max_context - 4)
    request = TurnRequest(
        response_id="warm-up",
        kind=TurnKind.ANSWER,
        token_ids=[0] * max(length, 1),
        num_history=0,
        sampling=SamplingParams(max_output_tokens=3, ignore_eos=True),
        salt="warm-up",
    )
    engine.submit(request)
    while engine.step():
        pass
    for event in engine.take_events():
        if isinstance(event, FinishedEvent) and event.error is not None:
            raise event.error
    engine.forget(["warm-up"])
