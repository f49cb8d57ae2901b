from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from chatrt.batch import BatchRows
from chatrt.testing.models import tiny_config, tiny_model
from chatrt_kernels.reference import ReferenceOps
from tests.chatrt.models_support import Bench

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from chatrt.models.config import ModelConfig
    from chatrt_kernels.ops import Calls, Describe, DirectProgram, ForwardInputs

TOKENS = [(i * i * 7 + 3 * i) % 320 for i in range(70)]


def bench(
    config: ModelConfig | None = None,
    *,
    num_sequences: int = 1,
    feature_layers: tuple[int, ...] = (),
) -> Bench:
    ops = ReferenceOps(torch.float64)
    model = tiny_model(ops, config, dtype=torch.float64)
    return Bench(model, ops, num_sequences=num_sequences, feature_layers=feature_layers)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_give_the_logits_of_one_prefill(chunk: int) -> None:
    torch.testing.assert_close(bench().logits(TOKENS, chunk=chunk), bench().logits(TOKENS))


def test_a_sequence_has_the_same_logits_alone_and_beside_others() -> None:
    alone = bench().logits(TOKENS)
    together = bench(num_sequences=3)
    prefill = [together.rows(TOKENS[:30], 0, 0), together.rows(TOKENS[:69], 0, 2)]
    together.decoder.forward(together.builder.build(prefill), together.kv)
    mixed = [
        together.rows(TOKENS[30:35], 30, 0),  # a verify
        together.rows(TOKENS[:20], 0, 1),  # a prefill
        together.rows(TOKENS[69:], 69, 2),  # a decode
    ]
    batch = together.builder.build(mixed)
    values = together.decoder.forward(batch, together.kv).values
    for found, positions in zip(
        batch.logit_ranges, (slice(30, 35), slice(20), slice(69, 70)), strict=True
    ):
        torch.testing.assert_close(values[found.start : found.stop], alone[positions])


def test_only_the_rows_asked_for_get_logits() -> None:
    one = bench()
    everything = one.logits(TOKENS)
    rows = replace(one.rows(TOKENS, 0), sample_rows=range(50, 70, 10))
    values = one.decoder.forward(one.builder.build([rows]), one.kv).values
    torch.testing.assert_close(values, everything[50:70:10])


def test_a_chunk_that_samples_nothing_has_no_logits() -> None:
    one = bench()
    rows = BatchRows(TOKENS, 0, range(Bench.PAGES))
    values = one.decoder.forward(one.builder.build([rows]), one.kv).values
    assert values.shape == (0, 320)


def test_rejected_rows_are_overwritten_before_they_are_read() -> None:
    one = bench()
    expected = one.logits(TOKENS)
    for start, ids in ((0, TOKENS[:40]), (40, [1, 2, 3, 4]), (40, TOKENS[40:41])):
        one.decoder.forward(one.builder.build([one.rows(ids, start)]), one.kv)
    batch = one.builder.build([one.rows(TOKENS[41:], 41)])
    torch.testing.assert_close(one.decoder.forward(batch, one.kv).values, expected[41:])


def test_without_rotation_the_order_of_earlier_tokens_does_not_matter_to_one_layer() -> None:
    config = tiny_config(num_layers=1)
    shuffled = [*reversed(TOKENS[:-1]), TOKENS[-1]]
    still = bench(replace(config, no_rope_layers=frozenset({0})))
    torch.testing.assert_close(still.logits(shuffled)[-1], still.logits(TOKENS)[-1])
    turning = bench(config)
    difference = (turning.logits(shuffled)[-1] - turning.logits(TOKENS)[-1]).abs().max()
    assert difference > 0.01


def test_features_are_given_for_the_rows_and_layers_named_in_any_chunk() -> None:
    one = bench(feature_layers=(1, 0))
    batch = one.builder.build([one.rows(TOKENS, 0)])
    features = one.decoder.forward(batch, one.kv).features
    assert features is not None
    whole = features.clone()
    assert whole.shape == (70, 2, 64)
    assert not torch.equal(whole[:, 0], whole[:, 1])
    for start in (0, 35):
        batch = one.builder.build([BatchRows(TOKENS[start : start + 35], start, range(8))])
        wanted = torch.tensor([34, 3])
        part = one.decoder.forward(batch, one.kv, feature_rows=wanted).features
        torch.testing.assert_close(part, whole[[start + 34, start + 3]])


def test_a_decoder_without_feature_layers_gives_no_features() -> None:
    one = bench()
    assert one.decoder.forward(one.builder.build([one.rows(TOKENS, 0)]), one.kv).features is None


class Watcher:
    """A follower that notes the means of what it is shown, and what it is asked to compute."""

    layers = (1, 0)

    def __init__(self) -> None:
        self.shown = torch.zeros(2, 70, dtype=torch.float64)
        self.followed: list[list[int]] = []

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return (self.shown,)

    def follow_layer(self, ops: Calls, place: int, hidden: Tensor) -> None:
        self.shown[place, : len(hidden)] = hidden.mean(-1)

    def follow(self, ops: Calls, inputs: ForwardInputs) -> None:
        self.followed.append(inputs.feature_rows.tolist())


def test_a_follower_is_shown_all_passes_and_computes_in_those_with_feature_rows() -> None:
    plain = bench(feature_layers=(1, 0))
    features = plain.decoder.forward(plain.builder.build([plain.rows(TOKENS, 0)]), plain.kv)
    assert features.features is not None
    expected = features.features.mean(-1).T
    one, watcher = bench(), Watcher()
    one.decoder.follow_with(watcher)
    rows = torch.tensor([3, 1, 4])
    for feature_rows, followed in ((None, []), (rows, [[3, 1, 4]]), (None, [[3, 1, 4]])):
        watcher.shown.zero_()
        batch = one.builder.build([one.rows(TOKENS, 0)])
        found = one.decoder.forward(batch, one.kv, feature_rows=feature_rows)
        torch.testing.assert_close(found.values, features.values)
        torch.testing.assert_close(watcher.shown, expected)
        assert watcher.followed == followed
        assert found.features is None


class CountingOps(ReferenceOps):
    """Counts the programs that it makes."""

    def __init__(self) -> None:
        super().__init__(torch.float64)
        self.num_programs = 0

    def compile(
        self, describe: Describe, largest: ForwardInputs, outputs: Sequence[Tensor]
    ) -> DirectProgram:
        self.num_programs += 1
        return super().compile(describe, largest, outputs)


def test_one_program_serves_all_forwards_over_one_cache() -> None:
    expected = bench().logits(TOKENS)
    ops = CountingOps()
    one = Bench(tiny_model(ops, dtype=torch.float64), ops)
    for chunk in (20, 1, 70, 33):
        torch.testing.assert_close(one.logits(TOKENS, chunk=chunk), expected)
    assert ops.num_programs == 1


def test_passes_that_are_followed_have_a_program_of_their_own() -> None:
    ops = CountingOps()
    one = Bench(tiny_model(ops, dtype=torch.float64), ops)
    one.decoder.follow_with(Watcher())
    for _ in range(2):
        for feature_rows in (None, torch.tensor([0])):
            batch = one.builder.build([one.rows(TOKENS, 0)])
            one.decoder.forward(batch, one.kv, feature_rows=feature_rows)
    assert ops.num_programs == 2
