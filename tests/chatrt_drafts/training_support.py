"""Shared by the tests of training: a tiny target, a few user turns, a loop over slots."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from chatrt.testing.models import tiny_config, tiny_model
from chatrt.testing.tokenizer import tiny_tokenizer
from chatrt_drafts.training.conversations import ConversationLoop, SynthesisLimits
from chatrt_drafts.training.prompts import Prompts
from chatrt_drafts.training.slot_ops import SlotOps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from chatrt.models.loader import Model
    from chatrt.text.tokenizer import Tokenizer
    from chatrt_drafts.training.store import Rows

CPU = torch.device("cpu")
FEATURE_LAYERS = (0, 2, 3)


class FewTurns:
    """User turns that a byte tokenizer keeps short."""

    def draw(self, rng: random.Random) -> str:
        return rng.choice(["hello world", "the sum?", "why"])

    def draw_follow_up(self, rng: random.Random) -> str:
        return rng.choice(["and?", "shorter"])

    def draw_system(self, rng: random.Random) -> str:
        return rng.choice(["be kind", "be brief"])


def tiny_target(folder: Path) -> tuple[Model, Tokenizer, SlotOps]:
    """A random model of four layers with a byte tokenizer that has a chat template."""
    tokenizer = tiny_tokenizer(folder)
    ops = SlotOps()
    return tiny_model(ops, tiny_config(num_layers=4, max_context=256)), tokenizer, ops


def tiny_loop(
    folder: Path, sink: Callable[[Rows, int], None], *, num_slots: int = 6, answer_tokens: int = 24
) -> tuple[ConversationLoop, Model]:
    """A loop of short conversations, and its model."""
    model, tokenizer, ops = tiny_target(folder)
    limits = SynthesisLimits(
        num_slots=num_slots, max_rows=160, answer_tokens=answer_tokens, user_tokens=8
    )
    loop = ConversationLoop(
        model,
        ops,
        Prompts(tokenizer, FewTurns(), random.Random(3)),
        limits,
        feature_layers=FEATURE_LAYERS,
        kv_dtype=torch.float32,
        generator=torch.Generator().manual_seed(4),
        sink=sink,
    )
    return loop, model
