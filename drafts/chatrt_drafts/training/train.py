"""From a target to its draft head: synthesis, training, and a card of what came out.

Knows: the phases and what each leaves in the folder. Does not know: command lines, model files.
Invariant: a run that ends early can be resumed in the phase in which it ended; the folder of one
target is never continued for another.
Cost: the time that is given; a minute more on the default model for loading and evaluations.
"""

from __future__ import annotations

import json
import platform
import random
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from chatrt.errors import Conflict, InvalidValue
from chatrt.kvcache import KVCache
from chatrt.models.rope import rope_table
from chatrt_drafts.head_file import FILE_NAME, HeadFile, default_feature_layers
from chatrt_drafts.training.acceptance import measure_acceptance
from chatrt_drafts.training.conversations import ConversationLoop, SynthesisLimits
from chatrt_drafts.training.fit import ONE_STEP_SHARE, Fit, FitOptions
from chatrt_drafts.training.module import DraftHead
from chatrt_drafts.training.prompts import Prompts
from chatrt_drafts.training.store import ANSWER, Rows, RowStore, row_bytes
from chatrt_drafts.training.windows import KeptTokens, WindowReader, count_tokens, keep_tokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from chatrt.models.loader import Model
    from chatrt.text.tokenizer import Tokenizer
    from chatrt_drafts.training.prompts import UserTurns
    from chatrt_kernels.ops import Ops

CARD_NAME = "card.json"
_STATE_NAME = "state.json"
_HELD_OUT_EVERY = 50  # conversations
_CHECKPOINT_S = 60.0
_REPORT_S = 1.0
_ROWS_PER_ANSWER_TOKEN = 4  # with prompts, generously: what is not written takes no disk
_GPU_DATA_SHARE = 0.75  # of the memory that weights and the synthesis leave free
_MAX_CONTEXT = 1024
_SHARE_OF_SYNTHESIS = 0.4  # of a total time


@dataclass(frozen=True, slots=True)
class TrainingTarget:
    """The model that drafts are for, and how it runs here.

    `train_threads`: PyTorch's threads while the head is trained. `bf16`: whether the device
    multiplies bfloat16 fast.
    """

    name: str
    fingerprint: str
    model: Model
    ops: Ops
    tokenizer: Tokenizer
    kv_dtype: torch.dtype
    train_threads: int
    bf16: bool

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.model.weights.final_norm.device


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What to do, and for how long; the synthesis ends at `num_tokens` answer tokens or its time.

    `keep_data` keeps rows in the folder; without it a synthesis cannot be resumed. `start_from` is
    a head whose weights are trained further, on its own features and chains from the first step.
    """

    out: Path
    num_tokens: int
    synthesis_s: float
    training_s: float
    vocab: int = 8192
    seed: int = 0
    resume: bool = False
    keep_data: bool = True
    num_slots: int | None = None
    unroll: int = 4
    alive_weighting: bool = False
    learning_rate: float = 1e-3
    start_from: HeadFile | None = None
    max_drafts: int = 5
    max_steps: int | None = None


def split_minutes(minutes: float) -> tuple[float, float]:
    """Seconds of synthesis and of training out of a total."""
    return minutes * 60 * _SHARE_OF_SYNTHESIS, minutes * 60 * (1 - _SHARE_OF_SYNTHESIS)


def train_draft(
    target: TrainingTarget,
    plan: TrainingPlan,
    turns: UserTurns,
    *,
    report: Callable[[str, float, str], None],
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Do all phases; writes `head.safetensors` and `card.json`, and returns the card.

    `report` hears the phase, the share of it that is done, and a few words; `clock` gives seconds.

    Raises:
        Conflict: The folder holds a run, and `resume` is not set, or it is of another target.
        InvalidValue: The synthesis gave too little to train on.
        UnsupportedModel: The model has no chat template.
    """
    run = _Run(target, plan, report, clock)
    run.open_folder()
    with torch.no_grad():
        run.synthesise(turns)
        kept, coverage = run.choose_tokens()
    return run.fit(kept, coverage)


class _Run:
    """The phases of one training, in order."""

    def __init__(
        self,
        target: TrainingTarget,
        plan: TrainingPlan,
        report: Callable[[str, float, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._target, self._plan = target, plan
        self._report, self._clock = report, clock
        self._config = target.model.config
        self._layers = default_feature_layers(self._config.num_layers)
        self._on_gpu = target.device.type == "cuda"
        if plan.start_from is not None:
            plan.start_from.require_target(target.name, target.fingerprint)
        default_slots = 1024 if self._on_gpu else 32
        self._limits = SynthesisLimits(num_slots=plan.num_slots or default_slots)
        self._state: dict[str, Any] = {
            "target": target.name,
            "fingerprint": target.fingerprint,
            "seed": plan.seed,
            "synthesis_s": 0.0,
            "synthesis_done": False,
        }

    def open_folder(self) -> None:
        """Make the folder, or read what an earlier run left in it; open the stores."""
        out, state = self._plan.out, self._state
        out.mkdir(parents=True, exist_ok=True)
        path = out / _STATE_NAME
        if path.is_file():
            found = json.loads(path.read_text())
            if not self._plan.resume:
                raise Conflict(f"{out} holds a training of '{found['target']}'; --resume goes on")
            if found["fingerprint"] != state["fingerprint"]:
                raise Conflict(
                    f"{out} holds a training of '{found['target']}' ({found['fingerprint']}), "
                    f"not of '{state['target']}' ({state['fingerprint']})"
                )
            self._state = found
        self._train, self._held_out = self._open_stores()
        if not self._train.num_rows:
            self._state.update(synthesis_s=0.0, synthesis_done=False)
        self._write_state()

    def synthesise(self, turns: UserTurns) -> None:
        """Fill the stores, until there are tokens enough, or time or room are used up."""
        state, plan, train = self._state, self._plan, self._train
        if state["synthesis_done"]:
            return
        loop = self._loop(turns)
        began = self._clock() - state["synthesis_s"]
        last_report = last_checkpoint = self._clock()
        num_rows = 0
        fullest = self._limits.num_slots * self._limits.max_rows
        while True:
            num_rows += loop.step()
            now = self._clock()
            state["synthesis_s"] = now - began
            gone = max(
                train.num_answer_tokens / plan.num_tokens, state["synthesis_s"] / plan.synthesis_s
            )
            if now - last_report >= _REPORT_S:
                rate = num_rows / (now - began)
                words = f"{train.num_answer_tokens:,} answer tokens, {rate:,.0f} rows/s"
                self._report("synthesis", min(1.0, gone), words)
                last_report = now
            if gone >= 1 or not train.has_room(fullest):
                break
            if now - last_checkpoint >= _CHECKPOINT_S:
                self._checkpoint()
                last_checkpoint = now
        loop.finish()
        state["synthesis_done"] = True
        self._checkpoint()
        self._report("synthesis", 1.0, f"{train.num_answer_tokens:,} answer tokens")

    def choose_tokens(self) -> tuple[KeptTokens, float]:
        """The tokens that the head will draft, and their share of held-out answers."""
        target, vocab_size = self._target, self._config.vocab_size
        if not self._train.num_answer_tokens or not self._held_out.num_answer_tokens:
            raise InvalidValue(
                f"{self._train.num_answer_tokens} answer tokens to train on and "
                f"{self._held_out.num_answer_tokens} held out are too few; synthesise longer"
            )
        counts = count_tokens(self._train.rows, vocab_size)
        # rows of the model's head that stand for no token are never sampled either
        counts = counts[: target.tokenizer.vocab_size]
        order = counts.sort(descending=True, stable=True).indices
        ids = order[: self._plan.vocab].to(target.device)
        kept = keep_tokens(
            ids, target.model, target.ops, dtype=self._compute_dtype, device=target.device
        )
        held_out = self._held_out.rows.ids
        written = held_out[(held_out[:, 3] & ANSWER) != 0, 1].long().to(target.device)
        return kept, float((kept.index_of[written] >= 0).double().mean())

    def fit(self, kept: KeptTokens, coverage: float) -> dict[str, Any]:
        """Train, and write the head and its card."""
        target, plan = self._target, self._plan
        device, dtype = target.device, self._compute_dtype
        torch.manual_seed(plan.seed)
        if not self._on_gpu:
            torch.set_num_threads(target.train_threads)
        train, held_out = (
            WindowReader(store.rows, kept, device=device, dtype=dtype)
            for store in (self._train, self._held_out)
        )
        options = self._fit_options()
        fit = Fit(
            self._new_head(),
            train,
            options,
            measure=lambda head: measure_acceptance(
                head,
                held_out,
                max_drafts=plan.max_drafts,
                max_rows=60_000 if self._on_gpu else 12_000,
                rows_per_batch=32_768 if self._on_gpu else 4_096,
            ),
            keep=lambda head: self._write_head(head, kept),
            checkpoint=plan.out / "training.pt",
            clock=self._clock,
        )
        fit.run(lambda share, words: self._report("training", min(1.0, share), words))
        card = self._card(fit, options, coverage, num_kept=len(kept.ids))
        (plan.out / CARD_NAME).write_text(json.dumps(card, indent=2) + "\n")
        return card

    def _fit_options(self) -> FitOptions:
        plan = self._plan
        return FitOptions(
            seconds=plan.training_s,
            rows_per_step=16_384 if self._on_gpu else 3_072,
            window_rows=512 if self._on_gpu else 256,
            unroll=plan.unroll,
            alive_weighting=plan.alive_weighting,
            one_step_share=0.0 if plan.start_from else ONE_STEP_SHARE,
            learning_rate=plan.learning_rate,
            seed=plan.seed,
            compute_dtype=self._compute_dtype,
            max_steps=plan.max_steps,
        )

    @property
    def _compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self._target.bf16 else torch.float32

    @property
    def _kv_row_bytes(self) -> int:
        config = self._config
        return KVCache.bytes_per_page(
            num_layers=config.num_layers,
            page_size=1,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self._target.kv_dtype,
        )

    def _open_stores(self) -> tuple[RowStore, RowStore]:
        plan, device = self._plan, self._target.device
        width = len(self._layers) * self._config.hidden_size
        running = self._limits.num_slots * self._limits.max_rows
        capacity = plan.num_tokens * _ROWS_PER_ANSWER_TOKEN + 2 * running
        if self._on_gpu:
            free = torch.cuda.mem_get_info()[0] - running * (self._kv_row_bytes + row_bytes(width))
            most = int(free * _GPU_DATA_SHARE) // row_bytes(width)
            capacity = min(capacity, max(2 * running, most))
        folder = plan.out / "data" if plan.keep_data else None
        most_held_out = capacity // 20 + 4 * self._limits.max_rows
        names = (("train", capacity), ("held-out", most_held_out))
        train, held_out = (
            RowStore(None if folder is None else folder / name, rows, width, device)
            for name, rows in names
        )
        return train, held_out

    def _loop(self, turns: UserTurns) -> ConversationLoop:
        target, plan = self._target, self._plan
        # a resumed synthesis goes on with other conversations than it began with
        seed = plan.seed + self._train.num_conversations
        return ConversationLoop(
            target.model,
            target.ops,
            Prompts(target.tokenizer, turns, random.Random(seed)),
            self._limits,
            feature_layers=self._layers,
            kv_dtype=target.kv_dtype,
            generator=torch.Generator(target.device).manual_seed(seed),
            sink=self._keep,
        )

    def _keep(self, rows: Rows, num_answer_tokens: int) -> None:
        number = self._train.num_conversations + self._held_out.num_conversations
        store = self._held_out if number % _HELD_OUT_EVERY == 0 else self._train
        if store.has_room(len(rows)):
            store.append(rows)
            store.num_answer_tokens += num_answer_tokens

    def _checkpoint(self) -> None:
        self._train.checkpoint()
        self._held_out.checkpoint()
        self._write_state()

    def _write_state(self) -> None:
        partial = self._plan.out / f"{_STATE_NAME}.partial"
        partial.write_text(json.dumps(self._state, indent=2) + "\n")
        partial.replace(self._plan.out / _STATE_NAME)

    def _new_head(self) -> DraftHead:
        target = self._target
        weights = target.model.weights
        rope = rope_table(
            self._config,
            num_positions=min(_MAX_CONTEXT, self._config.max_context),
            divisors=weights.rope_divisors,
            dtype=torch.float32,
            device=target.device,
        )
        norm = weights.final_norm.float().cpu()
        head = DraftHead(self._config, len(self._layers), rope, norm).to(target.device)
        if self._plan.start_from is not None:
            head.load_state_dict(dict(self._plan.start_from.tensors))
        return head

    def _write_head(self, head: DraftHead, kept: KeptTokens) -> None:
        file = HeadFile(
            target=self._target.name,
            fingerprint=self._target.fingerprint,
            feature_layers=self._layers,
            token_ids=kept.ids.to("cpu", torch.int32),
            tensors=head.tensors(),
        )
        file.save(self._plan.out / FILE_NAME)

    def _card(
        self, fit: Fit, options: FitOptions, coverage: float, *, num_kept: int
    ) -> dict[str, Any]:
        target, plan = self._target, self._plan
        stores = {"train": self._train, "held_out": self._held_out}
        device = torch.cuda.get_device_name() if self._on_gpu else platform.processor() or "cpu"
        best = max(fit.evaluations, key=lambda evaluation: float(evaluation["score"]))
        settings = asdict(replace(options, compute_dtype=torch.float32))
        settings["compute_dtype"] = str(options.compute_dtype).removeprefix("torch.")
        return {
            "target": target.name,
            "fingerprint": target.fingerprint,
            "feature_layers": list(self._layers),
            "data": {
                name: {
                    "conversations": store.num_conversations,
                    "rows": store.num_rows,
                    "answer_tokens": store.num_answer_tokens,
                }
                for name, store in stores.items()
            },
            "seed": plan.seed,
            "trained_further": plan.start_from is not None,
            "synthesis_s": round(self._state["synthesis_s"], 1),
            "training_s": round(fit.seconds, 1),
            "training_steps": fit.num_steps,
            "training": settings,
            "kept_tokens": num_kept,
            "kept_coverage": round(coverage, 5),
            "acceptance": best["acceptance"],
            "evaluations": fit.evaluations,
            "device": device,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
