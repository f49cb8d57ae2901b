"""Conversations of the target with itself, many side by side, with all that a draft head learns.

Knows: slots, pages that belong to a slot for good, sampling in batches, when an answer is over.
Does not know: what conversations are about (prompts), where their rows go, training.
Invariant: one row for each slot and step. A prompt's tokens are forced, one a step; a row holds
the target's own features and logits of exactly the tokens in front of it.
Cost: one forward of `num_slots` rows a step, and one wait for the sampled tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from chatrt.batch import Batch
from chatrt.kvcache import KVCache
from chatrt.models.decoder import Decoder
from chatrt_drafts.training.store import ANSWER, GREEDY, NUM_TOP, Rows, allocate_rows
from chatrt_kernels.ops import RowMeta

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from chatrt.models.loader import Model
    from chatrt_drafts.training.prompts import Prompts
    from chatrt_kernels.ops import Ops

_FREE = -1  # in a script: the token is the model's own
_USER_MIN_P = 0.05
_PAGE_SIZE = 16
_PAGES_STEP = 4  # page tables grow by so many pages, so that few shapes occur
_LEAST_ROOM = 24  # rows that an answer should have
# A loop: the last tokens repeat with a short period. People see loops too, so some of it is kept.
_LOOP_TOKENS = 64
_LONGEST_PERIOD = 32
_KEPT_OF_LOOP = 48
_LOOP_CHECK_STEPS = 16
_READY_PROMPTS = 8


@dataclass(frozen=True, slots=True)
class SynthesisLimits:
    """Sizes of the loop; lengths in tokens."""

    num_slots: int
    max_rows: int = 1024  # of a conversation
    answer_tokens: int = 256
    user_tokens: int = 128  # of a user turn that the model writes


class _Stage(Enum):
    USER = "user"
    ANSWER = "answer"


@dataclass(slots=True)
class _Slot:
    """What one slot is doing; from here on at most `room` tokens of this stage fit."""

    stage: _Stage = _Stage.ANSWER
    temperature: float = 0.0
    turns_left: int = 0
    room: int = 0
    looping: bool = False


class ConversationLoop:
    """Runs the target over slots; construct one for each synthesis.

    `sink` gets the rows of each finished conversation, views that are valid during the call, and
    the number of answer tokens in them. The generator lies on the device.
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        prompts: Prompts,
        limits: SynthesisLimits,
        *,
        feature_layers: tuple[int, ...],
        kv_dtype: torch.dtype,
        generator: torch.Generator,
        sink: Callable[[Rows, int], None],
    ) -> None:
        num_slots = limits.num_slots
        self._max_rows = min(limits.max_rows, model.config.max_context) // _PAGE_SIZE * _PAGE_SIZE
        self._limits = limits
        self._prompts = prompts
        self._generator = generator
        self._sink = sink
        self._end_ids = np.array(sorted(prompts.end_ids), dtype=np.int64)
        self._eps = model.config.rms_norm_eps
        self._device = device = model.weights.final_norm.device
        self._decoder = _decoder(model, ops, num_slots, self._max_rows, feature_layers)
        self._kv = _cache(model, ops, num_slots * self._max_rows // _PAGE_SIZE, kv_dtype)
        width = len(feature_layers) * model.config.hidden_size
        self._recorded = allocate_rows(num_slots * self._max_rows, width, device)
        self._slots = [_Slot() for _ in range(num_slots)]
        self._inputs = _Inputs(num_slots, self._max_rows, device)
        # what is known on the host: the script of forced tokens, and all tokens so far
        self._script = np.full((num_slots, self._max_rows + 1), _FREE, dtype=np.int64)
        self._tokens = np.zeros((num_slots, self._max_rows + 1), dtype=np.int64)
        self._flags = np.zeros((num_slots, self._max_rows), dtype=np.int32)
        self._stage_flags = np.zeros(num_slots, dtype=np.int32)
        self._written = np.zeros(num_slots, dtype=np.int64)
        self._limit = np.zeros(num_slots, dtype=np.int64)
        self._every = np.arange(num_slots)
        self._num_steps = 0
        for slot in range(num_slots):
            self._restart(slot)

    def step(self) -> int:
        """One row for each slot; returns how many rows that were."""
        inputs, every = self._inputs, self._every
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            chosen = self._forward()
        here = inputs.positions.copy()
        forced = self._script[every, here + 1]
        own = forced == _FREE
        following = np.where(own, chosen, forced)
        self._tokens[every, here + 1] = following
        self._flags[every, here] = np.where(own, self._stage_flags, 0)
        self._written += own
        ended = own & ((self._written >= self._limit) | np.isin(following, self._end_ids))
        inputs.positions += 1
        inputs.tokens[:] = following
        for slot in np.flatnonzero(ended).tolist():
            self._end_stage(slot)
        self._num_steps += 1
        if self._num_steps % _LOOP_CHECK_STEPS == 0:
            self._shorten_loops()
        return len(every)

    def finish(self) -> None:
        """Hand out the conversations that are still running, as far as they are."""
        for slot in range(len(self._slots)):
            self._hand_out(slot, int(self._inputs.positions[slot]))

    def _forward(self) -> NDArray[np.int64]:
        """Run and record the current rows; returns a token sampled for each slot."""
        batch = self._inputs.batch()
        output = self._decoder.forward(batch, self._kv)
        assert output.features is not None
        logits = output.values.float()
        features = output.features.float()
        scales = features.square().mean(-1, keepdim=True).add_(self._eps).rsqrt_()
        top = logits.topk(NUM_TOP, dim=-1)
        recorded, places = self._recorded, self._inputs.places
        log_sums = logits.logsumexp(-1, keepdim=True)
        for column, values in (
            (recorded.features, (features * scales).flatten(1)),
            (recorded.top_ids, top.indices),
            (recorded.top_logprobs, top.values - log_sums),
        ):
            column.index_copy_(0, places, values.to(column.dtype))
        sampled = self._sample(logits)
        self._prompts.prepare(_READY_PROMPTS)  # while the device works
        chosen: NDArray[np.int64] = sampled.cpu().numpy()
        return chosen

    def _sample(self, logits: Tensor) -> Tensor:
        temperature, log_min_p, noise_gain = self._inputs.sampling[:, :, None].unbind(0)
        scaled = logits / temperature
        floor = scaled.amax(-1, keepdim=True) + log_min_p
        # the largest of logit + Gumbel noise is a sample; a greedy slot's noise counts nothing
        waits = torch.empty_like(scaled).exponential_(generator=self._generator)
        noisy = scaled - waits.log_().clamp_min_(-60.0) * noise_gain
        return noisy.masked_fill_(scaled < floor, -math.inf).argmax(-1)

    def _end_stage(self, slot: int) -> None:
        state, here = self._slots[slot], int(self._inputs.positions[slot])
        last = int(self._inputs.tokens[slot])
        if state.stage is _Stage.USER:
            is_empty = self._written[slot] == 1 and last in self._end_ids
            closing = self._prompts.close_user_turn(last)
            if not is_empty and self._force(slot, here + 1, closing):
                self._begin_answer(slot)
                return
        elif state.turns_left > 0:
            follow_up = self._prompts.follow_up([last])
            if self._force(slot, here + 1, follow_up):
                state.turns_left -= 1
                self._begin_answer(slot)
                return
        if state.stage is _Stage.ANSWER:
            self._hand_out(slot, here)
        self._restart(slot)

    def _force(self, slot: int, start: int, token_ids: list[int]) -> bool:
        """Write what comes next into the script; False where no answer would fit behind it."""
        end = start + len(token_ids)
        if end + _LEAST_ROOM > self._max_rows:
            return False
        self._script[slot, start:end] = token_ids
        self._slots[slot].room = self._max_rows - end
        return True

    def _begin_answer(self, slot: int) -> None:
        state = self._slots[slot]
        state.stage, state.looping = _Stage.ANSWER, False
        greedy = state.temperature == 0
        self._begin(slot, self._limits.answer_tokens, state.temperature, min_p=0.0)
        self._stage_flags[slot] = ANSWER | (GREEDY if greedy else 0)

    def _begin(self, slot: int, limit: int, temperature: float, *, min_p: float) -> None:
        self._written[slot] = 0
        self._limit[slot] = min(limit, self._slots[slot].room)
        self._stage_flags[slot] = 0
        log_min_p = math.log(min_p) if min_p else -math.inf
        greedy = temperature == 0
        self._inputs.set_sampling(
            slot, 1.0 if greedy else temperature, log_min_p, 0.0 if greedy else 1.0
        )

    def _restart(self, slot: int) -> None:
        """Begin a new conversation that leaves room for an answer."""
        state = self._slots[slot]
        while True:
            opening = self._prompts.draw()
            self._script[slot] = _FREE
            if self._force(slot, 0, opening.token_ids):
                break
        state.temperature, state.turns_left = opening.temperature, opening.num_turns - 1
        if opening.self_written:
            state.stage = _Stage.USER
            self._begin(slot, self._limits.user_tokens, 1.0, min_p=_USER_MIN_P)
        else:
            self._begin_answer(slot)
        self._tokens[slot, 0] = self._inputs.tokens[slot] = opening.token_ids[0]
        self._inputs.positions[slot] = 0

    def _hand_out(self, slot: int, num_rows: int) -> None:
        flags = self._flags[slot, :num_rows]
        num_answer_tokens = int((flags & ANSWER).sum())
        if not num_answer_tokens:
            return
        ids = np.empty((num_rows, 4), dtype=np.int32)
        ids[:, 0] = self._tokens[slot, :num_rows]
        ids[:, 1] = self._tokens[slot, 1 : num_rows + 1]
        ids[:, 2] = np.arange(num_rows)
        ids[:, 3] = flags
        first = slot * self._max_rows
        recorded = self._recorded.part(first, first + num_rows)
        rows = Rows(
            torch.from_numpy(ids).to(self._device),
            recorded.top_ids,
            recorded.top_logprobs,
            recorded.features,
        )
        self._sink(rows, num_answer_tokens)

    def _shorten_loops(self) -> None:
        """End answers soon whose last tokens repeat one period."""
        needed = _LOOP_TOKENS + _LONGEST_PERIOD
        long_enough = np.flatnonzero((self._written >= needed) & (self._stage_flags != 0))
        if not len(long_enough):
            return
        ends = self._inputs.positions[long_enough, None] + 1
        recent = self._tokens[long_enough[:, None], ends + np.arange(-needed, 0)]
        last = recent[:, _LONGEST_PERIOD:]
        loops = np.zeros(len(long_enough), dtype=bool)
        for period in range(1, _LONGEST_PERIOD + 1):
            earlier = recent[:, _LONGEST_PERIOD - period : needed - period]
            loops |= (last == earlier).all(axis=1)
        for slot in long_enough[loops].tolist():
            if not self._slots[slot].looping:
                self._slots[slot].looping = True
                self._limit[slot] = min(self._limit[slot], self._written[slot] + _KEPT_OF_LOOP)


class _Inputs:
    """What changes from step to step: host arrays, and the device tensors that they become.

    On a CPU both are the same memory.
    """

    def __init__(self, num_slots: int, max_rows: int, device: torch.device) -> None:
        self._host = np.zeros((4, num_slots), dtype=np.int64)
        self._lengths = np.zeros(num_slots, dtype=np.int32)
        self._sampling = np.ones((3, num_slots), dtype=np.float32)
        self.tokens, self.positions, self._write_slots, self._places = self._host
        self._first_rows = np.arange(num_slots) * max_rows
        self._twins = tuple(
            (torch.from_numpy(array), torch.from_numpy(array).to(device))
            for array in (self._host, self._lengths, self._sampling)
        )
        self._pages = torch.arange(
            num_slots * max_rows // _PAGE_SIZE, dtype=torch.int32, device=device
        ).view(num_slots, -1)
        self._starts = torch.arange(num_slots + 1, dtype=torch.int32, device=device)
        self._logit_rows = torch.arange(num_slots, device=device)
        self._ranges = tuple(range(slot, slot + 1) for slot in range(num_slots))

    @property
    def places(self) -> Tensor:
        """int64 `[slots]`: where this step's rows are recorded."""
        return self._twins[0][1][3]

    @property
    def sampling(self) -> Tensor:
        """float32 `[3, slots]`: temperature, log of min-p, factor of the noise."""
        return self._twins[2][1]

    def set_sampling(self, slot: int, *values: float) -> None:
        """The three numbers of a slot, as in `sampling`."""
        self._sampling[:, slot] = values

    def batch(self) -> Batch:
        """The current tokens at their positions, one row for each slot."""
        # a slot's pages are one run, so a row is written and recorded at the same place
        np.add(self._first_rows, self.positions, out=self._places)
        self._write_slots[:] = self._places
        np.add(self.positions, 1, out=self._lengths, casting="same_kind")
        for host, twin in self._twins:
            if host.data_ptr() != twin.data_ptr():
                twin.copy_(host)
        rows, lengths = self._twins[0][1], self._twins[1][1]
        num_pages = -(-int(self._lengths.max()) // _PAGE_SIZE)
        num_pages = -(-num_pages // _PAGES_STEP) * _PAGES_STEP
        meta = RowMeta(
            token_ids=rows[0],
            positions=rows[1],
            write_slots=rows[2],
            page_table=self._pages[:, :num_pages],
            q_start=self._starts,
            kv_len=lengths,
        )
        return Batch(meta, self._logit_rows, self._ranges, int(self._lengths.max()))


def _decoder(
    model: Model, ops: Ops, num_slots: int, max_rows: int, feature_layers: tuple[int, ...]
) -> Decoder:
    norm = model.weights.final_norm
    return Decoder(
        model.config,
        model.weights,
        ops,
        max_rows=num_slots,
        max_positions=max_rows,
        device=norm.device,
        dtype=norm.dtype,
        feature_layers=feature_layers,
    )


def _cache(model: Model, ops: Ops, num_pages: int, dtype: torch.dtype) -> KVCache:
    """Pages for all slots; zeros, since what is masked out must still be a number."""
    config = model.config
    kv = KVCache.allocate(
        num_layers=config.num_layers,
        num_pages=num_pages,
        page_size=_PAGE_SIZE,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=model.weights.final_norm.device,
        layout=ops.kv_layout,
    )
    kv.data.zero_()
    return kv
