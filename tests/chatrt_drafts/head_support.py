"""An engine that drafts with a tiny head, and the head's definition to compare its rows with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from chatrt.native_sampling import NativeSampler
from chatrt.testing.engine import engine_over, tiny_target
from chatrt.testing.heads import head_drafter, tiny_head
from chatrt_kernels.cpu.ops import NativeOps
from chatrt_kernels.cpu.sampling import NativeSampling
from tests.chatrt_drafts.head_oracle import PAGE_SIZE, HeadOracle

if TYPE_CHECKING:
    from torch import Tensor

    from chatrt.engine import Engine, Target
    from chatrt.session import Session
    from chatrt.text.tokenizer import Tokenizer
    from chatrt_drafts.head import HeadDrafter
    from chatrt_kernels.ops import Ops

LAYERS = (0, 1)
PROMPT = [
    *(7, 3, 200, 41, 41, 9, 118, 64, 3, 77, 5, 12, 90, 31, 200, 41, 8, 6, 101, 55),
    *(i * 37 % 251 for i in range(60)),
]  # two chunks
CONTEXT = 256
# Activations in 8 bits, pages in half precision.
NATIVE_TOLERANCE = 0.06


@dataclass(frozen=True)
class Bench:
    tokenizer: Tokenizer
    target: Target
    drafter: HeadDrafter
    engine: Engine
    oracle: HeadOracle
    tolerance: float

    def num_waiting(self, session: Session) -> int:
        """Rows of a session that are not written yet."""
        waiting = self.drafter._waiting.get(session.session_id)
        return len(waiting.token_ids) if waiting else 0

    def rows_of(self, session: Session) -> tuple[Tensor, Tensor]:
        """The head's keys and values of a session's computed positions that do not wait."""
        kv, count = self.drafter.kv.layer(0), session.num_computed - self.num_waiting(session)
        parts = [data[session.page_ids].flatten(0, 1) for data in (kv.keys, kv.values)]
        return parts[0][:count], parts[1][:count]

    def assert_rows(self, session: Session, *, unknown: tuple[int, ...] = ()) -> None:
        """Rows are the oracle's, and none waits whose page others may share."""
        assert self.num_waiting(session) <= session.num_computed % PAGE_SIZE
        rows = self.rows_of(session)
        inputs = self.oracle.inputs(session.token_ids[: len(rows[0])], unknown=unknown)
        for found, expected in zip(rows, self.oracle.keys_and_values(inputs), strict=True):
            torch.testing.assert_close(
                found.to(expected.dtype), expected, atol=self.tolerance, rtol=self.tolerance
            )


def make_bench(tokenizer: Tokenizer, ops: Ops, *, num_deferred: int = 512) -> Bench:
    target = tiny_target(tokenizer, max_context=CONTEXT, ops=ops)
    if isinstance(ops, NativeOps):
        kernel = NativeSampling(ops.kernels.functions, target.vocab_size)
        target = replace(target, make_sampler=partial(NativeSampler, kernel=kernel))
    head = tiny_head(target.decoder.config, feature_layers=LAYERS)
    drafter = head_drafter(head, target, ops, num_deferred=num_deferred)
    engine = engine_over(target, max_context=CONTEXT, drafter=drafter, num_drafts=3)
    twin = tiny_target(tokenizer, max_context=CONTEXT, feature_layers=LAYERS, max_rows=CONTEXT)
    tolerance = NATIVE_TOLERANCE if isinstance(ops, NativeOps) else 2e-4
    return Bench(tokenizer, target, drafter, engine, HeadOracle(head, twin), tolerance)


def running(engine: Engine) -> Session:
    """The session of the only turn that runs."""
    (turn,) = engine._turns
    return turn.entry.session
