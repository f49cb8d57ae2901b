"""Whole chains of drafts in one foreign call: a step, the choice of a token, and the next step.

Knows: a recorded step, samplers' records, the tokens that its logits are of.
Does not know: sessions, what the step computes.
Invariant: drafts are those of a loop that runs the program for the rows still drafting, in their
order, and chooses with `NativeSampling.choose_among`, bit for bit.
Cost: about 8 µs around the foreign call for one chain, and 1 µs for every 50 pages; four times that
behind a pass that pushed Python itself out of the caches.
Source: `source/chains.cpp`.
"""

from __future__ import annotations

import ctypes
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatrt_kernels.cpu.structs import MAX_DRAFTS, ChainsStruct, ChainStruct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from chatrt_kernels.cpu.program import NativeProgram
    from chatrt_kernels.cpu.sampling import NativeSampling, SamplerState, TokenSubset


# Not frozen: that takes three times as long to make, and one is made for each chain of each step.
@dataclass(slots=True)
class ChainStart:
    """What one chain starts from, and how far it may go.

    Its first row is that of `token_id` at `position`, and starts from row `base_row`. `page_ids` is
    the page table from position 0 on, for `max_tokens` rows. The chain ends with `max_tokens`
    drafts, at most `MAX_DRAFTS`, or as soon as the product of their probabilities is below `floor`.
    """

    state: SamplerState
    token_id: int
    position: int
    page_ids: Sequence[int]
    base_row: int
    max_tokens: int
    floor: float


class ChainRunner:
    """Runs chains over one recorded step. Belongs to one thread at a time.

    Args:
        program: The step. A row's feature row is its base row, and there are no logit rows.
        logits: Where the step leaves its logits, float32 `[rows, subset.num]`.
        subset: The tokens that they are of.
        sampling: Lends its scratch memory.
        page_size: Positions of a page.
        max_chains: Chains of one call, at most.
        max_pages: Pages of one sequence, at most.
        first_following: The base row of the successor of a step's row 0; those of the others
            follow.

    Raises:
        ValueError: `sampling` was made for rows shorter than the subset.
    """

    def __init__(
        self,
        program: NativeProgram,
        logits: Tensor,
        subset: TokenSubset,
        sampling: NativeSampling,
        *,
        page_size: int,
        max_chains: int,
        max_pages: int,
        first_following: int,
    ) -> None:
        assert logits.shape[1] == subset.num
        max_chains = min(max_chains, logits.shape[0])
        self._kept = (logits, program, sampling)
        self._subset = subset
        self._page_size = page_size
        self._max_pages = max_pages
        self._page_table = array("i", bytes(4 * max_chains * max_pages))
        chains = (ChainStruct * max_chains)()
        self._chains = list(chains)  # the same memory
        self._chains_address = ctypes.addressof(chains)
        self._shared = ChainsStruct(
            program=program.handle,
            pool=program.pool.handle,
            subset=subset.address,
            logits=logits.data_ptr(),
            logits_stride=logits.stride(0),
            page_table=self._page_table.buffer_info()[0],
            page_table_stride=max_pages,
            memory=sampling.scratch_for(subset),
            page_size=page_size,
            first_following=first_following,
        )
        self._shared_address = ctypes.addressof(self._shared)
        self._run = program.pool.kernels.functions.chatrt_run_chains

    def run(self, starts: Sequence[ChainStart]) -> list[list[int]]:
        """The drafts of each chain; its keys and values are written as far as it went.

        More chains than there may be, or pages that do not cover a chain, are the caller's bug.

        Raises:
            ValueError: A token of the subset is outside a turn's vocabulary.
        """
        assert len(starts) <= len(self._chains), (len(starts), len(self._chains))
        chains = self._chains[: len(starts)]
        for index, start in enumerate(starts):
            self._fill(index, start)
        done = self._run(self._shared_address, self._chains_address, len(chains))
        assert done, "a step has more calls than the pool can hold"
        return [chain.drafts[: chain.num_drafts] for chain in chains]

    def _fill(self, index: int, start: ChainStart) -> None:
        """A chain's struct and, where it may draft, its page table.

        What older chains left behind a table is never read.
        """
        state, max_tokens = start.state, start.max_tokens
        self._subset.require_within(state)
        assert max_tokens <= MAX_DRAFTS, max_tokens
        chain = self._chains[index]
        chain.sampler, chain.position, chain.floor = state.address, start.position, start.floor
        chain.token_id, chain.base_row = start.token_id, start.base_row
        chain.max_tokens = max_tokens
        if max_tokens == 0:
            return
        num_pages = len(start.page_ids)
        assert start.position + max_tokens <= num_pages * self._page_size
        assert num_pages <= self._max_pages
        at = index * self._max_pages
        self._page_table[at : at + num_pages] = array("i", start.page_ids)
