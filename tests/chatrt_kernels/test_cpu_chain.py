"""Whole chains in one call: the drafts of a loop that steps and chooses one row after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatrt_kernels.cpu.binding import NativeLibrary
from chatrt_kernels.cpu.chain import ChainRunner, ChainStart
from chatrt_kernels.cpu.ops import NativeOps
from chatrt_kernels.cpu.program import NativeProgram
from chatrt_kernels.cpu.sampling import NativeSampling, SamplerState, TokenSubset
from chatrt_kernels.cpu.structs import MAX_DRAFTS
from chatrt_kernels.formats import QuantFormat
from chatrt_kernels.ops import ForwardInputs
from tests.chatrt_kernels.miniature import MAX_POSITIONS, SHAPE, VOCAB
from tests.chatrt_kernels.ragged import page_tables, row_meta
from tests.chatrt_kernels.test_cpu_draft import NO_ROWS, NUM_KEPT, NUM_SLOTS, native_head, recorded
from tests.chatrt_kernels.test_cpu_sampling import SHARED
from tests.chatrt_kernels.weights_support import assert_same_bits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

MAX_CHAINS = 4
FLOORS = [0.0, 0.0, 1e-3, 0.2, 1.0, 1.5]
PAGE_SIZE = SHAPE.page_size


class Rig:
    """A head whose pages hold random rows, so that chains may start anywhere."""

    def __init__(self, library: NativeLibrary) -> None:
        generator = torch.Generator().manual_seed(8)
        ops = NativeOps(library, 2)
        self.head = native_head(ops, QuantFormat.Q8_0, torch.float16)
        self.head.norm *= 0.1  # it would be sure of every token
        for pages in (self.head.kv.keys, self.head.kv.values):
            pages.copy_(torch.randn(pages.shape, generator=generator))
        self.page_ids = page_tables([(0, MAX_POSITIONS - 16)] * MAX_CHAINS, SHAPE, generator)
        program = recorded(ops, self.head.step, [self.head.bases, self.head.logits])
        assert isinstance(program, NativeProgram)
        self.program = program
        self.subset = TokenSubset(self.head.kept_ids.tolist())
        self.sampling = NativeSampling(library.functions, VOCAB)
        self.runner = ChainRunner(
            self.program,
            self.head.logits,
            self.subset,
            self.sampling,
            page_size=PAGE_SIZE,
            max_chains=MAX_CHAINS,
            max_pages=MAX_POSITIONS // PAGE_SIZE,
            first_following=NUM_SLOTS,
        )
        self._memory = [self.head.kv.keys, self.head.kv.values, self.head.bases]
        self._untouched = [part.clone() for part in self._memory]

    def reset(self) -> None:
        for part, untouched in zip(self._memory, self._untouched, strict=True):
            part.copy_(untouched)

    def memory(self) -> list[Tensor]:
        """Keys, values and bases as they are now."""
        return [part.clone() for part in self._memory]

    def loop(self, starts: Sequence[ChainStart]) -> list[list[int]]:
        """What the runner does, said once more."""
        drafts: list[list[int]] = [[] for _ in starts]
        likelihoods = [1.0] * len(starts)
        base_rows = [start.base_row for start in starts]
        while True:
            going = [
                index
                for index, start in enumerate(starts)
                if len(drafts[index]) < start.max_tokens and likelihoods[index] >= start.floor
            ]
            if not going:
                return drafts
            self._step([starts[i] for i in going], [drafts[i] for i in going], base_rows, going)
            for row, index in enumerate(going):
                choice = self.sampling.choose_among(
                    *(starts[index].state, self.subset, self.head.logits[row].data_ptr()),
                    drafts_before=drafts[index],
                    position=starts[index].position + 1 + len(drafts[index]),
                )
                drafts[index].append(choice.token_id)
                likelihoods[index] *= choice.probability
                base_rows[index] = NUM_SLOTS + row

    def _step(
        self,
        starts: list[ChainStart],
        drafts: list[list[int]],
        base_rows: list[int],
        going: list[int],
    ) -> None:
        lengths = [(1, s.position + 1 + len(d)) for s, d in zip(starts, drafts, strict=True)]
        meta = row_meta(lengths, [start.page_ids for start in starts], PAGE_SIZE)
        tokens = [[s.token_id, *d][-1] for s, d in zip(starts, drafts, strict=True)]
        meta.token_ids.copy_(torch.tensor(tokens))
        feature_rows = torch.tensor([base_rows[index] for index in going])
        self.program.run(ForwardInputs(meta, NO_ROWS, feature_rows))


@pytest.fixture(scope="module")
def rig(native_library: Path) -> Rig:
    return Rig(NativeLibrary(native_library))


def state_of(seed: int, *, temperature: float = 0.0, penalty: float = 0.0) -> SamplerState:
    state = SamplerState(
        seed=seed,
        vocab_size=VOCAB,
        temperature=temperature,
        frequency_penalty=penalty,
        logit_bias={},
    )
    state.accept([seed % VOCAB] * 3)
    return state


def start_at(rig: Rig, chain: int, position: int, max_tokens: int) -> ChainStart:
    num_pages = -(-(position + max_tokens) // PAGE_SIZE)
    return ChainStart(
        state_of(chain),
        token_id=(7 * position + chain) % VOCAB,
        position=position,
        page_ids=rig.page_ids[chain][:num_pages],
        base_row=position % NUM_SLOTS,
        max_tokens=max_tokens,
        floor=0.0,
    )


def assert_as_in_a_loop(rig: Rig, starts: list[ChainStart]) -> list[list[int]]:
    rig.reset()
    expected = rig.loop(starts)
    memory = rig.memory()
    rig.reset()
    found = rig.runner.run(starts)
    assert found == expected
    assert_same_bits(rig.memory(), memory)
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=SHARED)
@given(data=st.data())
def test_drafts_and_rows_are_those_of_single_steps(rig: Rig, data: st.DataObject) -> None:
    starts = []
    for chain in range(data.draw(st.integers(0, MAX_CHAINS))):
        max_tokens = data.draw(st.sampled_from([0, 1, 2, 4, 7, 20]))
        position = data.draw(st.integers(0, MAX_POSITIONS - 16 - max_tokens))
        state = state_of(
            data.draw(st.integers(0, 1000)),
            temperature=data.draw(st.sampled_from([0.0, 0.8, 3.0])),
            penalty=data.draw(st.sampled_from([0.0, 2.0])),
        )
        floor = data.draw(st.sampled_from(FLOORS))
        starts.append(replace(start_at(rig, chain, position, max_tokens), state=state, floor=floor))
    assert_as_in_a_loop(rig, starts)


def test_a_chain_crosses_pages_and_is_what_it_is_alone(rig: Rig) -> None:
    starts = [start_at(rig, 0, 13, 8), start_at(rig, 1, 0, MAX_DRAFTS), start_at(rig, 3, 250, 3)]
    together = assert_as_in_a_loop(rig, starts)
    assert [len(drafts) for drafts in together] == [8, MAX_DRAFTS, 3]
    for start, drafts in zip(starts, together, strict=True):
        rig.reset()
        assert rig.runner.run([start]) == [drafts]


def test_a_chain_ends_where_it_is_less_likely_than_its_floor(rig: Rig) -> None:
    certain, unsure = start_at(rig, 0, 40, 6), replace(start_at(rig, 1, 40, 6), floor=1.0)
    never = replace(start_at(rig, 2, 40, 6), floor=1.5)
    found = assert_as_in_a_loop(rig, [never, certain, unsure])
    assert [len(drafts) for drafts in found] == [0, 6, 1]


def test_a_sequence_that_may_not_draft_needs_no_pages(rig: Rig) -> None:
    waiting = replace(start_at(rig, 0, 250, 0), page_ids=[])
    found = assert_as_in_a_loop(rig, [waiting, start_at(rig, 1, 9, 2)])
    assert [len(drafts) for drafts in found] == [0, 2]


def test_tokens_outside_a_turns_vocabulary_are_refused(rig: Rig) -> None:
    small = SamplerState(seed=0, vocab_size=3, logit_bias={})
    largest = max(rig.head.kept_ids.tolist())
    with pytest.raises(ValueError, match=f"token {largest}, the vocabulary has 3"):
        rig.runner.run([replace(start_at(rig, 0, 0, 1), state=small)])


def test_scratch_memory_for_fewer_tokens_is_refused(rig: Rig, native_library: Path) -> None:
    sampling = NativeSampling(NativeLibrary(native_library).functions, NUM_KEPT - 1)
    with pytest.raises(ValueError, match=f"{NUM_KEPT} logits, scratch memory for {NUM_KEPT - 1}"):
        ChainRunner(
            *(rig.program, rig.head.logits, rig.subset, sampling),
            page_size=PAGE_SIZE,
            max_chains=1,
            max_pages=1,
            first_following=NUM_SLOTS,
        )
