"""Chains of a head's drafts on the native kernels: one foreign call for all of a proposal.

Knows: draft requests, native samplers, the network's recorded step. Does not know: how a chain is
run, whose rows start where.
Invariant: the drafts are those of `SteppedChains`, which serves wherever a turn's sampler or the
executor is another.
Cost: beside the network's passes and 6 to 10 µs for each draft's choice, 15 µs for one session, and
55 µs behind a pass of the target that pushed Python itself out of the caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatrt.native_sampling import NativeSampler
from chatrt_drafts.head import SteppedChains
from chatrt_kernels.cpu.chain import ChainRunner, ChainStart
from chatrt_kernels.cpu.program import NativeProgram
from chatrt_kernels.cpu.sampling import NativeSampling, TokenSubset
from chatrt_kernels.cpu.structs import MAX_DRAFTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from chatrt.batch import BatchBuilder
    from chatrt.drafter import DraftRequest
    from chatrt.kvcache import KVCache
    from chatrt_drafts.head import Chains
    from chatrt_drafts.head_network import HeadNetwork


def find_chains(
    network: HeadNetwork, kv: KVCache, token_ids: Tensor, batches: BatchBuilder
) -> Chains:
    """What runs a network's chains on its executor.

    `kv` are the network's pages, `token_ids`, int64 `[n]` in main memory, the tokens that its
    logits are of, `batches` a builder that nobody else uses.
    """
    stepped = SteppedChains(network, token_ids, batches)
    program = network.step_program
    if not isinstance(program, NativeProgram):
        return stepped
    subset = TokenSubset(token_ids.tolist())
    runner = ChainRunner(
        program,
        network.logits,
        subset,
        NativeSampling(program.pool.kernels.functions, subset.num),
        page_size=kv.page_size,
        max_chains=batches.max_sequences,
        max_pages=batches.max_pages_per_sequence,
        first_following=network.num_slots,
    )
    return NativeChains(runner, stepped)


class NativeChains:
    """Implements `Chains` over a `ChainRunner`; `other` serves samplers that are not native."""

    def __init__(self, runner: ChainRunner, other: Chains) -> None:
        self._runner = runner
        self._other = other

    def run(self, requests: Sequence[DraftRequest], base_rows: Sequence[int]) -> list[list[int]]:
        """The drafts of each request."""
        starts: list[ChainStart] = []
        for request, base_row in zip(requests, base_rows, strict=True):
            sampler = request.sampler
            if not isinstance(sampler, NativeSampler):
                return self._other.run(requests, base_rows)
            starts.append(
                ChainStart(
                    sampler.state,
                    token_id=request.token_ids[-1],
                    position=len(request.token_ids) - 1,
                    page_ids=request.page_ids,
                    base_row=base_row,
                    max_tokens=min(request.max_tokens, MAX_DRAFTS),
                    floor=request.floor,
                )
            )
        return self._runner.run(starts)
