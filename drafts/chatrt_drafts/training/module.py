"""The draft head as a network to train: unrolled on its own hidden states, tokens forced.

Knows: one Llama layer, features, chains of drafts inside a window of rows.
Does not know: data files, losses over time, pages, the runtime's executors.
Invariant: step s at row j is the s-th row of a draft chain that began at row j - s + 1. It attends
to rows up to that one as made from true features, and to the chain's own rows behind it.
Cost: `num_steps` times one layer over the window; scores are `[windows, heads, rows, rows]`.
Source: EAGLE and EAGLE-3 (arXiv 2401.15077, 2503.01840), for the features and the unrolling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from chatrt.models.config import ModelConfig

_INIT_STD = 0.02
# A state that knows nothing yet should not be sure: logits of the target's own scale would be.
_FINAL_NORM_GAIN = 0.33


@dataclass(frozen=True, slots=True)
class Window:
    """Rows that lie behind each other, `[windows, rows]`, and what is known in front of them.

    `features` `[windows, rows, features]` are those of the row *before* each row, 0 where there is
    none; `known` says where there is one. `embedded` `[windows, rows, hidden]` are normalised
    embeddings of the rows' tokens. `positions` int64, `conversations` int64: rows of one
    conversation have the same number.
    """

    features: Tensor
    known: Tensor
    embedded: Tensor
    positions: Tensor
    conversations: Tensor


class DraftHead(nn.Module):
    """One Llama layer of the target's shape over features and embeddings.

    `rope` is `[max_positions, head_dim]`, cosines then sines; `final_norm` `[hidden]`, the target's
    own, is where the head's begins.
    """

    def __init__(
        self, config: ModelConfig, num_features: int, rope: Tensor, final_norm: Tensor
    ) -> None:
        super().__init__()
        hidden, intermediate = config.hidden_size, config.intermediate_size
        q_width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self._config = config
        self._scale = config.head_dim**-0.5
        self.rope: Tensor
        self.register_buffer("rope", rope, persistent=False)
        self.features = nn.Linear(num_features * hidden, hidden, bias=False)
        self.embedding = nn.Linear(hidden, hidden, bias=False)
        self.hidden = nn.Linear(hidden, hidden, bias=False)
        self.attention_norm = _Norm(hidden, config.rms_norm_eps)
        self.query = nn.Linear(hidden, q_width, bias=False)
        self.key = nn.Linear(hidden, kv_width, bias=False)
        self.value = nn.Linear(hidden, kv_width, bias=False)
        self.output = nn.Linear(q_width, hidden, bias=False)
        self.mlp_norm = _Norm(hidden, config.rms_norm_eps)
        self.gate = nn.Linear(hidden, intermediate, bias=False)
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)
        self.final_norm = _Norm(hidden, config.rms_norm_eps)
        self._reset(final_norm)

    def tensors(self) -> Mapping[str, Tensor]:
        """The weights by their names in the file of a head."""
        return self.state_dict()

    def steps(self, window: Window, num_steps: int) -> Iterator[Tensor]:
        """The normalised hidden states of steps 1 to `num_steps`, each `[windows, rows, hidden]`.

        Row j of step s means something only where row j - s + 1 is of the same conversation.
        """
        embedded = self.embedding(window.embedded)
        x = self.features(window.features) * window.known[..., None] + embedded
        angles = self.rope[window.positions]
        visible = _visible(window.conversations)
        attention = _ChainAttention(visible, self._scale)
        for step in range(1, num_steps + 1):
            normed = self._layer(x, angles, attention)
            yield normed
            if step < num_steps:
                x = self.hidden(_later(normed, 1, dim=1)) + embedded

    def _layer(self, x: Tensor, angles: Tensor, attention: _ChainAttention) -> Tensor:
        normed = self.attention_norm(x)
        kv_heads, head_dim = self._config.num_kv_heads, self._config.head_dim
        shape = (*x.shape[:2], -1, head_dim)
        q = _rotated(self.query(normed).view(shape), angles)
        k = _rotated(self.key(normed).view(shape), angles)
        v = self.value(normed).view(shape)
        # [windows, kv heads, heads of each, rows, head_dim]
        q = q.transpose(1, 2)
        q = q.reshape(q.shape[0], kv_heads, -1, *q.shape[2:])
        attended = attention.attend(q, k.transpose(1, 2), v.transpose(1, 2))
        x = x + self.output(attended.flatten(1, 2).transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        x = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        result: Tensor = self.final_norm(x)
        return result

    @torch.no_grad()
    def _reset(self, final_norm: Tensor) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=_INIT_STD)
            if name in ("output.weight", "down.weight"):
                weight.mul_(0.5**0.5)  # two of them add up in the residual stream
        # the sum of all feature layers should weigh no more than one embedding
        self.features.weight.mul_((self.features.out_features / self.features.in_features) ** 0.5)
        self.final_norm.weight.copy_(final_norm * _FINAL_NORM_GAIN)


class _ChainAttention:
    """Attention of one step after the other; the first step's keys are those of true features.

    `visible` bool `[windows, rows, rows]`: which rows a row may see at the first step.
    """

    def __init__(self, visible: Tensor, scale: float) -> None:
        self._visible = visible
        self._scale = scale
        self._true: tuple[Tensor, Tensor] | None = None
        self._chain: list[tuple[Tensor, Tensor]] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The next step: q `[windows, kv heads, n, rows, head_dim]`, k and v without n."""
        if self._true is None:
            self._true = k, v
        else:
            self._chain.append((k, v))
        keys, values = self._true
        num_back = len(self._chain)
        windows, kv_heads, per_kv, num_rows, head_dim = q.shape
        flat = q.reshape(windows, kv_heads, per_kv * num_rows, head_dim)
        scores = (flat @ keys.transpose(2, 3)).view(windows, kv_heads, per_kv, num_rows, num_rows)
        # row j sees what row j - num_back saw: the rows that had true features when it began
        mask = _later(self._visible, num_back, dim=1)[:, None, None]
        scores = (scores.float() * self._scale).masked_fill(~mask, _NEVER)
        own = [
            (q * _later(key, num_back - 1 - i, dim=2)[:, :, None]).float().sum(-1) * self._scale
            for i, (key, _) in enumerate(self._chain)
        ]
        weights = torch.cat([scores, *(one[..., None] for one in own)], dim=-1).softmax(-1)
        weights = weights.to(v.dtype)
        on_true = weights[..., :num_rows].reshape(windows, kv_heads, -1, num_rows)
        attended = (on_true @ values).view(q.shape)
        for i, (_, value) in enumerate(self._chain):
            later = _later(value, num_back - 1 - i, dim=2)[:, :, None]
            attended = attended + weights[..., num_rows + i, None] * later
        return attended


class _Norm(nn.Module):
    """x / rms(x) * weight, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return normalise(x, self._eps) * self.weight


# Low enough that no weight is left, and finite, so that a row that sees nothing has no NaN.
_NEVER = -1e30


def normalise(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, without a weight, in float32."""
    wide = x.float()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()


def _visible(conversations: Tensor) -> Tensor:
    """bool `[windows, rows, rows]`: row i sees row j of its own conversation where j <= i."""
    same = conversations[:, :, None] == conversations[:, None]
    return same.tril()


def _later(x: Tensor, num_rows: int, *, dim: int) -> Tensor:
    """x with its rows moved `num_rows` towards the end; the first ones are 0."""
    if not num_rows:
        return x
    front = torch.zeros_like(x.narrow(dim, 0, num_rows))
    return torch.cat((front, x.narrow(dim, 0, x.shape[dim] - num_rows)), dim=dim)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """x `[windows, rows, heads, head_dim]` turned by `[windows, rows, head_dim]` angles."""
    cos, sin = angles[:, :, None].chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
