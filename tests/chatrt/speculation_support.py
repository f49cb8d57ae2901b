"""Tiny engines that draft for real, and what must hold of their drafters between two steps."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chatrt.cost_model import LinearCostModel
from chatrt.depth import DepthController
from chatrt.drafter import DraftRequest
from chatrt.engine import Engine, EngineLimits
from chatrt.pages import PageAllocator
from chatrt.prefix import PrefixTree
from chatrt.scheduler import Scheduler, SchedulerLimits
from chatrt.session_manager import SessionManager
from chatrt.testing.engine import PAGE_SIZE, tiny_target
from chatrt.testing.heads import head_drafter, tiny_head
from chatrt_drafts.auto import AutoDrafter
from chatrt_drafts.draft_model import ModelDrafter
from chatrt_drafts.ngram import NgramDrafter
from chatrt_kernels.cpu.ops import NativeOps
from tests.chatrt_drafts.head_oracle import HeadOracle

if TYPE_CHECKING:
    from chatrt.depth import StepCosts
    from chatrt.drafter import Drafter
    from chatrt.engine import Target
    from chatrt.engine.live import LiveTurn
    from chatrt.session import Session
    from chatrt.text.tokenizer import Tokenizer
    from chatrt_drafts.head import HeadDrafter
    from chatrt_drafts.head_file import HeadFile
    from chatrt_kernels.ops import Ops

LAYERS = (0, 1)
# What the head may draft, and the model that is not quite the target.
NUM_SHARED_IDS = 112
NUM_SLOTS = 100  # more than there are sessions: no feature is lost for want of room
DRAFTERS = ("ngram", "head", "self", "model", "auto", "auto with a model")
# Of float32 sums in another order; of the tiny head's rows.
TOLERANCE = 5e-4


@dataclass(frozen=True)
class Size:
    """How much of everything an engine has."""

    num_pages: int = 64
    max_context: int = 256
    max_rows: int = 64
    max_parked: int = 100


@dataclass
class Speculating:
    """An engine with one of `DRAFTERS`, its parts at hand.

    `self` drafts with a copy of the target, `model` with one that lacks some of its tokens. Depths
    are `num_drafts`, or those of a controller where there are `costs`.
    """

    tokenizer: Tokenizer
    name: str
    ops: Ops
    size: Size
    num_drafts: int
    costs: StepCosts | None = None

    def __post_init__(self) -> None:
        self.head: HeadFile | None = None
        self.head_rows: HeadDrafter | None = None
        self.model: ModelDrafter | None = None
        self.target = self._target()
        self.ngram = NgramDrafter()
        self.drafter = self._drafter()
        self.engine = self._engine()
        # Where turns began to compute: the row there may not know what was in front of it.
        self.starts: set[int] = set()
        self._oracle: HeadOracle | None = None

    @property
    def turns(self) -> list[LiveTurn]:
        """What runs now."""
        return list(self.engine._turns)

    def check(self) -> None:
        """Between two steps: pages belong to whom they should, rows are what they should be."""
        self.engine.sessions.check_invariants()
        self.starts.update(turn.kv.reused_tokens for turn in self.turns)
        for turn in self.turns:
            session = turn.entry.session
            assert not self._rows(self.target, session).isnan().any()
            if self.head_rows is not None:
                self._check_head(session)
            if self.model is not None:
                self._check_model(turn)

    def assert_forgotten(self) -> None:
        """Nothing is kept of sessions once all have ended."""
        assert self.engine.sessions.num_free == self.size.num_pages
        assert not self.ngram._indexes
        if self.model is not None:
            assert not self.model._seen
        if self.head_rows is not None:
            assert not self.head_rows._kept
            assert not self.head_rows._waiting
        assert not self.engine._drafting._sources
        assert not self.engine._drafting._floors

    def num_right(self, turn: LiveTurn) -> int:
        """Rows of the draft model that need not be computed again."""
        assert self.model is not None
        session = turn.entry.session
        ids, pages = session.token_ids, session.page_ids
        request = DraftRequest(session.session_id, ids, pages, 0, turn.sampler)
        return self.model.num_right(request)

    def _check_head(self, session: Session) -> None:
        """Each row is the oracle's; at starts it may be the one that knows nothing in front.

        Some of a page that nobody shares yet may wait to be written.
        """
        assert self.head_rows is not None
        waiting = self.head_rows._waiting.get(session.session_id)
        num_waiting = len(waiting.token_ids) if waiting else 0
        assert num_waiting <= session.num_computed % PAGE_SIZE
        kv, count = self.head_rows.kv.layer(0), session.num_computed - num_waiting
        rows = [data[session.page_ids].flatten(0, 1)[:count] for data in (kv.keys, kv.values)]
        assert not any(data.isnan().any() for data in rows)
        if isinstance(self.ops, NativeOps) or not count:
            return  # activations in 8 bits: other tests hold these rows to their tolerance
        ids = session.token_ids[:count]
        unknown = {start for start in self.starts if start < count}
        inputs = [self.oracle.inputs(ids), self.oracle.inputs(ids, unknown=unknown)]
        differences = []
        for expected in map(self.oracle.keys_and_values, inputs):
            pairs = zip(rows, expected, strict=True)
            parts = [(data.float() - one).abs().flatten(1).amax(1) for data, one in pairs]
            differences.append(torch.maximum(*parts))
        assert float(torch.minimum(*differences).max()) < TOLERANCE

    def _check_model(self, turn: LiveTurn) -> None:
        """What it remembers of a session is what its notes say, and its rows are the target's."""
        assert self.model is not None
        session = turn.entry.session
        num_pages = -(-len(session.token_ids) // PAGE_SIZE)
        notes = self.model._kv.notes
        fresh = notes.num_right(session.page_ids[:num_pages], session.token_ids, [])
        num_right = self.num_right(turn)
        assert num_right == min(fresh, len(session.token_ids) - 1)
        count = min(num_right, session.num_computed)
        own, true = (
            self._rows(which, session)[:, :, :count] for which in (self.model, self.target)
        )
        if isinstance(self.ops, NativeOps):
            assert torch.equal(own, true)
        else:
            torch.testing.assert_close(own, true, rtol=1e-3, atol=1e-3)

    def _rows(self, which: Target | ModelDrafter, session: Session) -> torch.Tensor:
        """Keys and values `[layers, 2, computed, …]` of a session's computed positions."""
        kv = which.kv
        layers = [kv.layer(index) for index in range(kv.num_layers)]
        parts = [[layer.keys, layer.values] for layer in layers]
        return torch.stack(
            [torch.stack([d[session.page_ids].flatten(0, 1) for d in pair]) for pair in parts]
        )[:, :, : session.num_computed]

    @property
    def oracle(self) -> HeadOracle:
        """The head by its definition."""
        if self._oracle is None:
            assert self.head is not None
            context = self.size.max_context
            twin = tiny_target(
                self.tokenizer, max_context=context, max_rows=context, feature_layers=LAYERS
            )
            self._oracle = HeadOracle(self.head, twin)
        return self._oracle

    def _target(self) -> Target:
        size = self.size
        return tiny_target(
            self.tokenizer,
            num_pages=size.num_pages,
            max_context=size.max_context,
            max_rows=size.max_rows,
            ops=self.ops,
        )

    def _drafter(self) -> Drafter:
        if self.name == "ngram":
            return self.ngram
        other: Drafter
        if self.name in ("head", "auto"):
            config = self.target.decoder.config
            self.head = tiny_head(config, feature_layers=LAYERS, token_ids=range(NUM_SHARED_IDS))
            other = self.head_rows = head_drafter(
                self.head, self.target, self.ops, num_slots=NUM_SLOTS
            )
        else:
            draft, whole = self._target(), self.tokenizer.vocab_size
            other = self.model = ModelDrafter(
                draft.decoder,
                draft.kv,
                draft.batches,
                vocab_size=whole if self.name == "self" else NUM_SHARED_IDS,
                max_context=self.size.max_context,
                max_catch_up_rows=24,
            )
        return AutoDrafter(self.ngram, other) if self.name.startswith("auto") else other

    def _engine(self) -> Engine:
        size, ticks, seeds = self.size, itertools.count(1), itertools.count(1000)
        allocator = PageAllocator(size.num_pages)
        tree = PrefixTree(allocator, PAGE_SIZE)
        sessions = SessionManager(allocator, tree, page_size=PAGE_SIZE)
        limits = SchedulerLimits(max_num_batched_tokens=size.max_rows)
        step_costs = LinearCostModel(fixed_ms=1.0, decode_row_ms=0.1, prefill_row_ms=0.1)
        depth = None
        if self.costs is not None:
            depth = DepthController(self.costs, max_tokens=self.num_drafts)
        return Engine(
            self.target,
            sessions=sessions,
            scheduler=Scheduler(sessions, limits, step_costs),
            drafter=self.drafter,
            depth=depth,
            limits=EngineLimits(
                max_context=size.max_context,
                num_drafts=self.num_drafts,
                max_parked=size.max_parked,
            ),
            clock=lambda: next(ticks),
            draw_seed=lambda: next(seeds),
        )
