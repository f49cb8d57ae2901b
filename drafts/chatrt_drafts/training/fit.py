"""Training of a draft head within a given time: loss, schedule, averages, checkpoints.

Knows: windows, steps, elapsed time. Does not know: where rows come from, the file of a head.
Invariant: the learning rate follows the share of time that is gone, so a run always ends decayed;
a run that is resumed counts the time that it had used before.
Cost: a step is `unroll` passes of one layer, forward and backward, over `rows_per_step` rows, and
one wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from chatrt_drafts.training.acceptance import Acceptance
    from chatrt_drafts.training.module import DraftHead, Window
    from chatrt_drafts.training.windows import KeptTokens, Labels, WindowReader

ONE_STEP_SHARE = 0.25  # of the time, where a head begins at random
_STEP_DISCOUNT = 0.8  # a later draft is reached less often
_WARM_UP = 0.03
_WARM_UP_STEPS = 50  # at least: a slow machine makes few steps in its share of the time
_LAST_RATE = 0.02
_AVERAGE_DECAY = 0.999
_MAX_NORM = 1.0
_REPORT_STEPS = 20
_CHECKPOINT_SHARE = 0.05  # of the time
_SHORTEST_SHARE, _LONGEST_SHARE = 0.08, 0.25  # between evaluations


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How a head is trained; `one_step_share` of the time goes to single steps, which are cheap.

    `alive_weighting` weighs a step by the probability that its chain is still accepted.
    """

    seconds: float
    rows_per_step: int
    window_rows: int
    unroll: int = 4
    one_step_share: float = ONE_STEP_SHARE
    alive_weighting: bool = False
    learning_rate: float = 1e-3
    seed: int = 0
    compute_dtype: torch.dtype = torch.float32
    max_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One look at held-out conversations; `loss` is the mean over the steps since the last."""

    seconds: float
    step: int
    epochs: float
    loss: float
    averaged: bool
    score: float
    acceptance: dict[str, Any]


@dataclass(slots=True)
class _Progress:
    seconds: float = 0.0
    step: int = 0
    rows_seen: int = 0
    best_score: float = 0.0
    evaluations: list[dict[str, Any]] = field(default_factory=list)


class Fit:
    """Trains `head` on what `reader` has. `checkpoint` is continued where it exists.

    `measure` gives the acceptance of a head, `keep` gets each head that is the best so far;
    `clock` gives seconds.
    """

    def __init__(
        self,
        head: DraftHead,
        reader: WindowReader,
        options: FitOptions,
        *,
        measure: Callable[[DraftHead], Acceptance],
        keep: Callable[[DraftHead], None],
        checkpoint: Path,
        clock: Callable[[], float],
    ) -> None:
        self._head = head
        self._reader = reader
        self._options = options
        self._measure = measure
        self._keep = keep
        self._checkpoint = checkpoint
        self._clock = clock
        self._device = head.final_norm.weight.device
        averaging = get_ema_multi_avg_fn(_AVERAGE_DECAY)  # type: ignore[no-untyped-call]
        self._average = AveragedModel(head, multi_avg_fn=averaging)
        groups: list[dict[str, Any]] = [
            {"params": [one for one in head.parameters() if one.dim() == 2]},
            {"params": [one for one in head.parameters() if one.dim() == 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            groups,
            lr=options.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.01,
            fused=self._device.type == "cuda",
        )
        self._progress = _Progress()
        self._losses: list[Tensor] = []
        if checkpoint.is_file():
            self._restore()

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """All evaluations so far, oldest first."""
        return self._progress.evaluations

    @property
    def seconds(self) -> float:
        """Time spent so far, that of earlier runs included."""
        return self._progress.seconds

    @property
    def num_steps(self) -> int:
        """Steps so far."""
        return self._progress.step

    def run(self, report: Callable[[float, str], None]) -> None:
        """Train until the time is used up.

        `report` hears the share of time that is gone, and a few words.
        """
        progress, options = self._progress, self._options
        last_look = last_save = self._share()
        began = self._clock() - progress.seconds
        for starts, ends_epoch in self._batches():
            progress.seconds = self._clock() - began
            share = self._share()
            if share >= 1:
                break
            self._step(starts, share)
            if progress.step % _REPORT_STEPS == 0:
                report(share, f"step {progress.step}, loss {float(self._losses[-1]):.3f}")
            waited = share - last_look
            if waited >= _LONGEST_SHARE or (ends_epoch and waited >= _SHORTEST_SHARE):
                report(share, self._evaluate())
                last_look = share
            if share - last_save >= _CHECKPOINT_SHARE:
                self._save()
                last_save = share
            if options.max_steps is not None and progress.step >= options.max_steps:
                break
        stale = self._losses or not progress.evaluations
        report(1.0, self._evaluate() if stale else f"step {progress.step}")
        self._save()

    def _batches(self) -> Iterator[tuple[Tensor, bool]]:
        """Window starts without end, and whether an epoch ends with them.

        Each epoch cuts the rows at other places and in another order.
        """
        length = self._options.window_rows
        per_step = max(1, self._options.rows_per_step // length)
        generator = torch.Generator().manual_seed(self._options.seed + self._progress.step)
        num_rows = len(self._reader.rows)
        while True:
            offset = int(
                torch.randint(max(1, min(length, num_rows - length)), (), generator=generator)
            )
            count = max(1, (num_rows - offset) // length)
            order = torch.randperm(count, generator=generator) * length + offset
            for start in range(0, count, per_step):
                last = start + per_step >= count
                if not last or start == 0:
                    yield order[start : start + per_step], last

    def _step(self, starts: Tensor, share: float) -> None:
        progress, options = self._progress, self._options
        num_steps = 1 if share < options.one_step_share else options.unroll
        rate = options.learning_rate * min(_rate(share), (progress.step + 1) / _WARM_UP_STEPS)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        window, labels = self._reader.read(starts, options.window_rows)
        with self._autocast():
            loss = chain_loss(
                self._head,
                window,
                labels,
                self._reader.kept,
                num_steps=num_steps,
                alive_weighting=options.alive_weighting,
            )
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(self._head.parameters(), _MAX_NORM)
        self._optimizer.step()
        self._average.update_parameters(self._head)
        self._losses.append(loss.detach())
        progress.step += 1
        progress.rows_seen += len(starts) * options.window_rows

    def _evaluate(self) -> str:
        """Measure the current weights and their average, and keep the best ones so far."""
        progress = self._progress
        loss = float(torch.stack(self._losses).mean()) if self._losses else 0.0
        self._losses.clear()
        lengths = []
        average = cast("DraftHead", self._average.module)
        for averaged, head in ((False, self._head), (True, average)):
            with self._autocast():
                acceptance = self._measure(head)
            if acceptance.score >= progress.best_score:
                progress.best_score = acceptance.score
                self._keep(head)
            evaluation = Evaluation(
                seconds=round(progress.seconds, 1),
                step=progress.step,
                epochs=round(progress.rows_seen / max(1, len(self._reader.rows)), 3),
                loss=round(loss, 4),
                averaged=averaged,
                score=round(acceptance.score, 4),
                acceptance=acceptance.as_dict(),
            )
            progress.evaluations.append({k: getattr(evaluation, k) for k in evaluation.__slots__})
            lengths.append(f"{acceptance.greedy.mean_length[-1]:.3f}")
        return f"step {progress.step}, loss {loss:.3f}, accepted {' / '.join(lengths)}"

    def _share(self) -> float:
        return self._progress.seconds / max(1e-9, self._options.seconds)

    def _autocast(self) -> torch.autocast:
        dtype = self._options.compute_dtype
        return torch.autocast(
            self._device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16
        )

    def _save(self) -> None:
        progress = self._progress
        state = {
            "head": self._head.state_dict(),
            "average": self._average.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "progress": {name: getattr(progress, name) for name in progress.__slots__},
        }
        partial = self._checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._checkpoint)

    def _restore(self) -> None:
        state = torch.load(self._checkpoint, map_location=self._device, weights_only=True)
        self._head.load_state_dict(state["head"])
        self._average.load_state_dict(state["average"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._progress = _Progress(**state["progress"])


def chain_loss(
    head: DraftHead,
    window: Window,
    labels: Labels,
    kept: KeptTokens,
    *,
    num_steps: int,
    alive_weighting: bool,
) -> Tensor:
    """The soft cross-entropy of answer rows, averaged over steps with weights 0.8^(s - 1).

    Only rows count whose chain began in the same conversation; with `alive_weighting` each counts
    with the probability that the drafts in front of it are the target's likeliest tokens.
    """
    places, shape = labels.places, window.positions.shape
    taught = labels.probs.sum(-1)  # 1, or 0 where nothing of the label is kept
    likeliest = labels.probs[:, 0] > 0
    alive = torch.ones(shape, device=places.device).flatten()
    total = torch.zeros((), device=places.device)
    total_weight = 0.0
    for step, normed in enumerate(head.steps(window, num_steps), start=1):
        logits = functional.linear(
            normed.flatten(0, 1)[places].to(kept.head_rows.dtype), kept.head_rows
        )
        log_sums = logits.float().logsumexp(-1)
        picked = logits.gather(1, labels.indexes).float()
        losses = log_sums * taught - (labels.probs * picked).sum(-1)
        weights = taught * (labels.depth >= step - 1)
        if alive_weighting:
            weights = weights * alive[places]
            sure = torch.zeros_like(alive)
            sure[places] = ((picked[:, 0] - log_sums).exp() * likeliest).detach()
            # the next step's chain has one row more in front of it
            alive = (alive * sure).view(shape).roll(1, dims=1).flatten()
        mean = (losses * weights).sum() / weights.sum().clamp_min(1.0)
        total = total + _STEP_DISCOUNT ** (step - 1) * mean
        total_weight += _STEP_DISCOUNT ** (step - 1)
    return total / total_weight


def _rate(share: float) -> float:
    """The learning rate at a share of the time, as a part of the highest."""
    if share < _WARM_UP:
        return max(share / _WARM_UP, 0.01)
    return 1 - (1 - _LAST_RATE) * min(1.0, (share - _WARM_UP) / (1 - _WARM_UP))
