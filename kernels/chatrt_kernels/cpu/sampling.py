"""Choosing tokens natively: one foreign call for all rows of a verify.

Knows: the C interface of `source/sampling.h`, addresses of logits, token ids.
Does not know: tensors, turns, who drafted.
Invariant: the arrays that a record points to belong to its `SamplerState`; the scratch memory is
used only during a call, so one `NativeSampling` serves any number of states on one thread.
Cost: about 4 µs around the foreign call; nothing is allocated for a row.
Source: sample-match coupling with shared Gumbel noise, arXiv 2408.07978.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_TOP = 32
# Divided by less, float32 scores overflow; the choice is greedy long before.
_LEAST_TEMPERATURE = 1e-30


class _Record(ctypes.Structure):
    """`ChatrtSampler`, field by field."""

    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("top_p", ctypes.c_double),
        ("vocab_size", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("temperature", ctypes.c_float),
        ("log_min_p", ctypes.c_float),
        ("repetition_penalty", ctypes.c_float),
        ("presence_penalty", ctypes.c_float),
        ("frequency_penalty", ctypes.c_float),
        ("num_bias", ctypes.c_int32),
        ("num_seen", ctypes.c_int32),
        ("bias_ids", ctypes.c_void_p),
        ("bias_values", ctypes.c_void_p),
        ("seen_ids", ctypes.c_void_p),
        ("seen_counts", ctypes.c_void_p),
    )


class _SubsetRecord(ctypes.Structure):
    """`ChatrtSubset`, field by field."""

    _fields_ = (
        ("listed", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("num", ctypes.c_int32),
        ("num_ranks", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, and its softmax probability under the logits as they were."""

    token_id: int
    probability: float


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of one row: of the token asked for, and (id, value) of the likeliest."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class SamplerState:
    """What one turn asked for and what its penalties count, in the form that the kernel reads.

    Args:
        seed: 64-bit seed of the noise.
        vocab_size: Ids at or above it are never chosen.
        temperature: 0 is greedy.
        top_k: 0 is off, as is all that the vocabulary has.
        top_p: 1 is off.
        min_p: 0 is off.
        repetition_penalty: 1 is off; counts the prompt and the answer.
        presence_penalty: 0 is off; counts the answer.
        frequency_penalty: 0 is off; counts the answer.
        logit_bias: Added to the logits; ids outside the vocabulary are ignored.
        prompt_ids: Tokens before the answer, below `vocab_size`.

    Raises:
        ValueError: A prompt id is outside the vocabulary and would be penalised.
    """

    def __init__(
        self,
        *,
        seed: int,
        vocab_size: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float],
        prompt_ids: Sequence[int] = (),
    ) -> None:
        bias = {i: value for i, value in logit_bias.items() if 0 <= i < vocab_size}
        self._bias_ids = array("i", bias)
        self._bias_values = array("f", bias.values())
        self._counts_answer = bool(
            presence_penalty or frequency_penalty or repetition_penalty != 1.0
        )
        # Only the repetition penalty looks at the prompt.
        seen = tuple(dict.fromkeys(prompt_ids)) if repetition_penalty != 1.0 else ()
        if seen and not (min(seen) >= 0 and max(seen) < vocab_size):
            raise ValueError(
                f"prompt ids from {min(seen)} to {max(seen)}, the vocabulary has {vocab_size}"
            )
        self._seen_ids = array("i", seen)
        self._seen_counts = array("i", bytes(4 * len(seen)))
        self._index = {token_id: i for i, token_id in enumerate(seen)}
        self.record = _Record(
            seed=seed,
            top_p=top_p,
            vocab_size=vocab_size,
            top_k=min(top_k, vocab_size),
            temperature=max(temperature, _LEAST_TEMPERATURE) if temperature else 0.0,
            log_min_p=math.log(min_p) if min_p > 0.0 else -math.inf,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            num_bias=len(bias),
            bias_ids=self._bias_ids.buffer_info()[0],
            bias_values=self._bias_values.buffer_info()[0],
        )
        self.vocab_size = vocab_size
        self.address = ctypes.addressof(self.record)
        self._point()

    def accept(self, token_ids: Sequence[int]) -> None:
        """Count emitted tokens for the penalties, each once.

        Raises:
            ValueError: A token is outside the vocabulary; those before it count.
        """
        if not self._counts_answer:
            return
        for token_id in token_ids:
            index = self._index.get(token_id)
            if index is None:
                if not 0 <= token_id < self.vocab_size:
                    raise ValueError(f"token {token_id}, the vocabulary has {self.vocab_size}")
                index = self._index[token_id] = len(self._seen_ids)
                self._seen_ids.append(token_id)
                self._seen_counts.append(0)
                self._point()
            self._seen_counts[index] += 1

    def _point(self) -> None:
        """Arrays move when they grow."""
        self.record.num_seen = len(self._seen_ids)
        self.record.seen_ids = self._seen_ids.buffer_info()[0]
        self.record.seen_counts = self._seen_counts.buffer_info()[0]


class TokenSubset:
    """Some tokens of a vocabulary, for rows that have logits of these only; made once for each set.

    Args:
        token_ids: Distinct, in the order of their logits; at least one.

    Raises:
        ValueError: There is none, or one comes twice or is negative.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        ascending = sorted(token_ids)
        if not ascending or ascending[0] < 0 or len(set(ascending)) < len(ascending):
            raise ValueError(f"{len(ascending)} token ids that are not distinct numbers from 0 on")
        self.num = len(ascending)
        self.max_id = ascending[-1]
        self._listed = array("i", token_ids)
        self._ids = array("i", ascending)
        self._places = array("i", sorted(range(self.num), key=token_ids.__getitem__))
        self._ranks = array("i", [-1]) * (self.max_id + 1)
        for rank, token_id in enumerate(ascending):
            self._ranks[token_id] = rank
        arrays = (self._listed, self._ids, self._places, self._ranks)
        addresses = (one.buffer_info()[0] for one in arrays)
        self._record = _SubsetRecord(*addresses, self.num, len(self._ranks))
        self.address = ctypes.addressof(self._record)

    def require_within(self, state: SamplerState) -> None:
        """Check that a turn may draw any of the tokens.

        Raises:
            ValueError: One is outside the vocabulary.
        """
        if self.max_id >= state.vocab_size:
            raise ValueError(f"token {self.max_id}, the vocabulary has {state.vocab_size}")


class NativeSampling:
    """The sampling functions of a loaded library, with their scratch memory. Not thread-safe.

    Args:
        library: The compiled kernels.
        vocab_size: The longest row that will come.
    """

    def __init__(self, library: ctypes.CDLL, vocab_size: int) -> None:
        address, integer = ctypes.c_void_p, ctypes.c_int32
        library.chatrt_sampling_scratch_bytes.argtypes = (integer,)
        library.chatrt_sampling_scratch_bytes.restype = ctypes.c_int64
        self._choose_rows = library.chatrt_choose_rows
        self._choose_rows.argtypes = (
            *(address, address, ctypes.c_int64, address, integer),
            *(ctypes.c_int64, address, address),
        )
        self._choose_rows.restype = integer
        self._choose_among = library.chatrt_choose_among
        self._choose_among.argtypes = (
            *(address, address, address, address, integer),
            *(ctypes.c_int64, address, address),
        )
        self._choose_among.restype = integer
        self._log_probs = library.chatrt_log_probs
        self._log_probs.argtypes = (address, *(integer,) * 3, *(address,) * 3)
        self._log_probs.restype = integer
        self.vocab_size = vocab_size
        self._scratch = (ctypes.c_char * library.chatrt_sampling_scratch_bytes(vocab_size))()
        self._scratch_address = ctypes.addressof(self._scratch)
        self._values = (ctypes.c_float * (MAX_TOP + 1))()
        self._values_address = ctypes.addressof(self._values)
        self._top_ids = (integer * MAX_TOP)()

    def scratch_for(self, subset: TokenSubset) -> int:
        """The address of the scratch memory, for native code that chooses among a subset.

        Raises:
            ValueError: There are more tokens in it than this was made for.
        """
        self._check(subset.num)
        return self._scratch_address

    def choose_rows(
        self,
        state: SamplerState,
        logits: int,
        *,
        row_stride: int,
        drafts: Sequence[int],
        position: int,
    ) -> list[int]:
        """The target's own tokens, up to and including the first that differs from its draft.

        Args:
            state: The turn's; its history is not changed here.
            logits: Address of float32 `[len(drafts) + 1, vocab]`; row i follows the history and
                `drafts[:i]`.
            row_stride: Numbers from one row to the next, at least the state's vocabulary.
            drafts: What was proposed, possibly nothing.
            position: Absolute position of the first token.

        Raises:
            ValueError: The vocabulary is larger than this was made for.
        """
        self._check(state.vocab_size)
        drafted = array("i", drafts)
        chosen = array("i", bytes(4 * len(drafted) + 4))
        num_chosen = self._choose_rows(
            state.address,
            logits,
            row_stride,
            drafted.buffer_info()[0],
            len(drafted),
            position,
            self._scratch_address,
            chosen.buffer_info()[0],
        )
        return chosen[:num_chosen].tolist()

    def choose_among(
        self,
        state: SamplerState,
        subset: TokenSubset,
        logits: int,
        *,
        drafts_before: Sequence[int],
        position: int,
    ) -> Choice:
        """The token that a row of the vocabulary would give in which all others had no chance.

        Args:
            state: The turn's; its history is not changed here.
            subset: Which tokens the logits are of.
            logits: Address of float32 `[subset.num]`; at least one of them finite. They follow the
                history and `drafts_before`.
            drafts_before: Drafted tokens, possibly none; penalties count them.
            position: Absolute position of the token.

        Raises:
            ValueError: A token of the subset is outside the vocabulary, or there are more of them
                than this was made for.
        """
        self._check(subset.num)
        subset.require_within(state)
        drafted = array("i", drafts_before)
        token_id = self._choose_among(
            state.address,
            subset.address,
            logits,
            drafted.buffer_info()[0],
            len(drafted),
            position,
            self._scratch_address,
            self._values_address,
        )
        return Choice(token_id, self._values[0])

    def log_probs(self, logits: int, vocab_size: int, token_id: int, num_top: int) -> RowLogprobs:
        """Log-softmax of one row at `token_id` and at its `num_top` likeliest ids.

        Args:
            logits: Address of float32 `[vocab_size]`.
            vocab_size: The row's length.
            token_id: Below `vocab_size`.
            num_top: At most `MAX_TOP`.

        Raises:
            ValueError: A number is too large for the row or for this.
        """
        self._check(vocab_size)
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"token {token_id}, the vocabulary has {vocab_size}")
        if num_top > min(MAX_TOP, vocab_size):
            raise ValueError(f"top {num_top} of a row, at most {min(MAX_TOP, vocab_size)}")
        values, top_ids = self._values, self._top_ids
        num = self._log_probs(
            *(logits, vocab_size, token_id, num_top, self._scratch_address),
            *(self._values_address, ctypes.addressof(top_ids)),
        )
        return RowLogprobs(values[0], tuple(zip(top_ids[:num], values[1 : num + 1], strict=True)))

    def _check(self, vocab_size: int) -> None:
        if vocab_size > self.vocab_size:
            raise ValueError(f"a row of {vocab_size} logits, scratch memory for {self.vocab_size}")
