"""Choosing the next token on the device: bias, penalties, temperature, filters, Gumbel noise.

    logits ──▶ scores ──▶ no filter: best of score + noise, block by block ──▶ token
                     └──▶ filters: the likeliest CANDIDATES, cut, best of score + noise ──▶ token

Knows: one turn's parameters, rows of logits. Does not know: turns, drafts' origin.
Invariant: a row's choice depends on its logits, the parameters, the seed, its position and the
tokens before it. Equal scores are decided for the smaller token id, as on the host. Where more
than CANDIDATES tokens pass the filters the choice is not made: `certain` is False.
Cost: logits are read once and scores written once; what goes to the host is two numbers a row.
Source: the pipeline and the noise of `chatrt.sampling` (sample-match coupling, arXiv 2408.07978;
SplitMix64's finaliser, Steele, Lea, Flood 2014).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from chatrt_kernels.triton.launch import OPTIONS, packed_rows, power_of_two, varying

if TYPE_CHECKING:
    from torch import Tensor

CANDIDATES = 256  # tokens that filters are decided among
_BLOCK = 2048
_LEAST_TEMPERATURE = 1e-30


@dataclass(frozen=True, slots=True)
class Choice:
    """Tokens int64 `[rows]`, and whether each is what the host would choose, bool `[rows]`."""

    tokens: Tensor
    certain: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What one turn asks for; tensors are on the device, None where nothing is asked.

    `bias` float32 `[vocab]`; `counts` int32 and `in_prompt` int8 `[vocab]`, together or not at all.
    """

    seed: int
    vocab_size: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Tensor | None = None
    counts: Tensor | None = None
    in_prompt: Tensor | None = None

    @property
    def filters(self) -> bool:
        """Whether not every token may be chosen."""
        return self.temperature > 0 and bool(self.top_k or self.top_p < 1 or self.min_p > 0)


def choose(logits: Tensor, drafts: Tensor, rules: Rules, *, position: int) -> Choice:
    """The token of each row of logits `[rows, at least vocab]`, which are left unchanged.

    Row i follows the history and `drafts[:i]` (int64, on the device) and has the absolute position
    `position + i`.
    """
    scores = _scored(logits, drafts, rules)
    if not rules.filters:
        return _unfiltered(scores, rules, position)
    num_rows = scores.shape[0]
    num = min(CANDIDATES, rules.vocab_size)
    top = torch.topk(scores, num, dim=-1)
    total = torch.logsumexp(scores, dim=-1)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    certain = torch.empty(num_rows, dtype=torch.int8, device=logits.device)
    _choose_filtered[(num_rows,)](
        *(top.values, top.indices, total, tokens, certain),
        *(rules.vocab_size, num, _signed(rules.seed), position),
        *(rules.top_k, float(rules.top_p), float(rules.min_p)),
        BLOCK=power_of_two(num),
        num_warps=4,
        **OPTIONS,
    )
    return Choice(tokens, certain.bool())


def _scored(logits: Tensor, drafts: Tensor, rules: Rules) -> Tensor:
    """Float32 `[rows, vocab]`: logits behind bias, penalties and temperature."""
    num_rows = logits.shape[0]
    scores = torch.empty(num_rows, rules.vocab_size, dtype=torch.float32, device=logits.device)
    greedy = rules.temperature == 0
    _score[(num_rows, triton.cdiv(rules.vocab_size, _BLOCK))](
        *(logits, scores if rules.bias is None else rules.bias),
        *(scores if rules.counts is None else rules.counts,),
        *(scores if rules.in_prompt is None else rules.in_prompt,),
        *(drafts, scores),
        *(rules.vocab_size, packed_rows(logits)),
        1.0 if greedy else max(rules.temperature, _LEAST_TEMPERATURE),
        *(float(rules.repetition_penalty), float(rules.presence_penalty)),
        float(rules.frequency_penalty),
        HAS_BIAS=rules.bias is not None,
        HAS_COUNTS=rules.counts is not None,
        BLOCK=_BLOCK,
        **OPTIONS,
    )
    return scores


def _unfiltered(scores: Tensor, rules: Rules, position: int) -> Choice:
    num_rows, num_blocks = scores.shape[0], triton.cdiv(rules.vocab_size, _BLOCK)
    shape = (num_rows, num_blocks)
    best = torch.empty(shape, dtype=torch.float64, device=scores.device)
    ids = torch.empty(shape, dtype=torch.int64, device=scores.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    _best_of_block[shape](
        *(scores, best, ids),
        *(rules.vocab_size, num_blocks, _signed(rules.seed), position),
        NOISY=rules.temperature > 0,
        BLOCK=_BLOCK,
        **OPTIONS,
    )
    _best_of_blocks[(num_rows,)](
        *(best, ids, tokens, num_blocks), BLOCK=power_of_two(num_blocks), num_warps=1, **OPTIONS
    )
    return Choice(tokens, torch.ones_like(tokens, dtype=torch.bool))


def _signed(seed: int) -> int:
    """64 bits as the signed number that a kernel's argument is."""
    return seed - (1 << 64) if seed >> 63 else seed


@triton.jit
def _mixed(b_x):
    """SplitMix64's finaliser, on unsigned 64-bit numbers."""
    b_x = (b_x ^ (b_x >> 30)) * 0xBF58476D1CE4E5B9
    b_x = (b_x ^ (b_x >> 27)) * 0x94D049BB133111EB
    return b_x ^ (b_x >> 31)


@triton.jit
def _noise(seed, position, b_ids):
    """Standard Gumbel noise in float64, a function of (seed, position, token id) alone."""
    b_place = (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    b_key = _mixed(seed.to(tl.uint64) + b_place)
    b_bits = _mixed(b_ids.to(tl.uint64) * 0x9E3779B97F4A7C15 + b_key) >> 32
    # in the open interval: the logarithms are finite
    b_uniform = (b_bits.to(tl.int64).to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(b_uniform))


# rows may be cut out of a wider buffer: where they begin says nothing
@triton.jit(**varying("logits_ptr"))
def _score(
    logits_ptr,
    bias_ptr,
    counts_ptr,
    in_prompt_ptr,
    drafts_ptr,
    scores_ptr,
    vocab_size,
    stride_logits,
    temperature,
    repetition,
    presence,
    frequency,
    HAS_BIAS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_id = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_id = o_id < vocab_size
    b_x = tl.load(logits_ptr + i_row * stride_logits + o_id, mask=m_id, other=0.0).to(tl.float32)
    if HAS_BIAS:
        b_x += tl.load(bias_ptr + o_id, mask=m_id, other=0.0)
    if HAS_COUNTS:
        b_count = tl.load(counts_ptr + o_id, mask=m_id, other=0)
        for i_draft in range(i_row.to(tl.int32)):
            b_count += (tl.load(drafts_ptr + i_draft) == o_id).to(tl.int32)
        m_emitted = b_count > 0
        m_known = m_emitted | (tl.load(in_prompt_ptr + o_id, mask=m_id, other=0) > 0)
        b_repeated = tl.where(b_x > 0, tl.div_rn(b_x, repetition), b_x * repetition)
        b_x = tl.where(m_known, b_repeated, b_x)
        b_x = b_x - frequency * b_count.to(tl.float32) - presence * m_emitted.to(tl.float32)
    b_score = tl.div_rn(b_x, temperature)
    tl.store(scores_ptr + i_row * vocab_size + o_id, b_score, mask=m_id)


@triton.jit(**varying("seed", "position"))
def _best_of_block(
    scores_ptr,
    best_ptr,
    ids_ptr,
    vocab_size,
    num_blocks,
    seed: tl.int64,
    position: tl.int64,
    NOISY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_block = tl.program_id(1)
    o_id = i_block * BLOCK + tl.arange(0, BLOCK)
    m_id = o_id < vocab_size
    p_scores = scores_ptr + i_row * vocab_size + o_id
    b_value = tl.load(p_scores, mask=m_id, other=float("-inf")).to(tl.float64)
    if NOISY:
        b_value = tl.where(m_id, b_value + _noise(seed, position + i_row, o_id), float("-inf"))
    b_best = tl.max(b_value, axis=0)
    tl.store(best_ptr + i_row * num_blocks + i_block, b_best)
    b_id = tl.min(tl.where(b_value == b_best, o_id, 2147483647), axis=0)
    tl.store(ids_ptr + i_row * num_blocks + i_block, b_id.to(tl.int64))


@triton.jit
def _best_of_blocks(best_ptr, ids_ptr, tokens_ptr, num_blocks, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)
    m = o < num_blocks
    b_value = tl.load(best_ptr + i_row * num_blocks + o, mask=m, other=float("-inf"))
    b_ids = tl.load(ids_ptr + i_row * num_blocks + o, mask=m, other=2147483647)
    m_best = m & (b_value == tl.max(b_value, axis=0))
    tl.store(tokens_ptr + i_row, tl.min(tl.where(m_best, b_ids, 2147483647), axis=0))


@triton.jit(**varying("seed", "position", "top_k"))
def _choose_filtered(
    scores_ptr,
    ids_ptr,
    total_ptr,
    tokens_ptr,
    certain_ptr,
    vocab_size,
    num,
    seed: tl.int64,
    position: tl.int64,
    top_k: tl.int32,
    top_p,
    min_p,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)
    m = o < num
    b_score = tl.load(scores_ptr + i_row * num + o, mask=m, other=float("-inf"))
    b_ids = tl.load(ids_ptr + i_row * num + o, mask=m, other=0)
    b_most = tl.max(b_score, axis=0)
    b_total = tl.load(total_ptr + i_row)
    is_whole = num == vocab_size
    certain = is_whole
    if top_k > 0:
        certain = certain | (top_k <= num)
        m = m & (o < top_k)
        b_weight = tl.where(m, tl.exp(b_score - b_most), 0.0)
        b_total = b_most + tl.log(tl.sum(b_weight, axis=0))
    if top_p < 1.0:
        b_mass = tl.where(m, tl.exp(b_score.to(tl.float64) - b_total.to(tl.float64)), 0.0)
        b_before = tl.cumsum(b_mass, axis=0) - b_mass
        certain = certain | (tl.sum(b_mass, axis=0) >= top_p)
        m = m & ((o == 0) | (b_before < top_p))
    if min_p > 0.0:
        b_floor = b_most + tl.log(min_p)
        b_least = tl.min(tl.where(o < num, b_score, float("inf")), axis=0)
        certain = certain | (b_least < b_floor)
        m = m & (b_score >= b_floor)
    b_value = b_score.to(tl.float64) + _noise(seed, position + i_row, b_ids)
    b_value = tl.where(m, b_value, float("-inf"))
    m_best = m & (b_value == tl.max(b_value, axis=0))
    tl.store(tokens_ptr + i_row, tl.min(tl.where(m_best, b_ids, 9223372036854775807), axis=0))
    tl.store(certain_ptr + i_row, certain.to(tl.int8))
