"""The unrolled network against its definition, row by row with lists of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from chatrt.models.rope import rope_table
from chatrt.testing.models import tiny_config
from chatrt_drafts.training.module import DraftHead, Window

CONFIG = tiny_config()
CPU = torch.device("cpu")
NUM_FEATURES = 3
LENGTHS = (9, 4, 8)  # conversations of the window


def random_head() -> DraftHead:
    torch.manual_seed(0)
    rope = rope_table(CONFIG, num_positions=64, divisors=None, dtype=torch.float32, device=CPU)
    head = DraftHead(CONFIG, NUM_FEATURES, rope, 1 + torch.randn(CONFIG.hidden_size) / 10)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.dim() == 2:  # large enough that every path shows
                weight.normal_(std=1.5 / weight.shape[1] ** 0.5)
    return head


def random_window(first_position: int = 0) -> Window:
    """One window; its first conversation begins `first_position` rows before it."""
    positions = [
        *range(first_position, first_position + LENGTHS[0]),
        *(row for length in LENGTHS[1:] for row in range(length)),
    ]
    generator = torch.Generator().manual_seed(1)
    shape = (1, len(positions))
    place = torch.tensor([positions])
    hidden = CONFIG.hidden_size
    return Window(
        features=torch.randn(*shape, NUM_FEATURES * hidden, generator=generator),
        known=place > 0,
        embedded=torch.randn(*shape, hidden, generator=generator),
        positions=place,
        conversations=(place == 0).cumsum(1),
    )


@dataclass
class OneRow:
    """The head for one row at a time, over a list of earlier keys and values."""

    weights: dict[str, Tensor]
    rope: Tensor

    def first(self, window: Window, row: int) -> Tensor:
        x = self.weights["embedding.weight"] @ window.embedded[0, row]
        if window.known[0, row]:
            x = x + self.weights["features.weight"] @ window.features[0, row]
        return x

    def later(self, window: Window, row: int, previous: Tensor) -> Tensor:
        embedded = self.weights["embedding.weight"] @ window.embedded[0, row]
        return embedded + self.weights["hidden.weight"] @ previous

    def keys_values(self, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        normed = self.norm(x, "attention_norm.weight")
        heads = (CONFIG.num_kv_heads, CONFIG.head_dim)
        key = self.turned((self.weights["key.weight"] @ normed).view(heads), position)
        return key, (self.weights["value.weight"] @ normed).view(heads)

    def hidden(self, x: Tensor, position: int, kv: list[tuple[Tensor, Tensor]]) -> Tensor:
        normed = self.norm(x, "attention_norm.weight")
        query = (self.weights["query.weight"] @ normed).view(CONFIG.num_heads, CONFIG.head_dim)
        query = self.turned(query, position)
        per_kv = CONFIG.num_heads // CONFIG.num_kv_heads
        attended = []
        for head in range(CONFIG.num_heads):
            keys = torch.stack([key[head // per_kv] for key, _ in kv])
            values = torch.stack([value[head // per_kv] for _, value in kv])
            scores = keys @ query[head] / CONFIG.head_dim**0.5
            attended.append(scores.softmax(0) @ values)
        x = x + self.weights["output.weight"] @ torch.cat(attended)
        normed = self.norm(x, "mlp_norm.weight")
        gate = functional.silu(self.weights["gate.weight"] @ normed)
        x = x + self.weights["down.weight"] @ (gate * (self.weights["up.weight"] @ normed))
        return self.norm(x, "final_norm.weight")

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + CONFIG.rms_norm_eps).sqrt() * self.weights[name]

    def turned(self, x: Tensor, position: int) -> Tensor:
        cos, sin = self.rope[position].chunk(2)
        first, second = x.chunk(2, dim=1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=1)


def drafted(rows: OneRow, window: Window, begin: int, num_steps: int) -> list[Tensor]:
    """The hidden states of a chain whose first row is `begin`, as the runtime would draft it."""
    positions = window.positions[0].tolist()
    conversation = window.conversations[0]
    kv = [
        rows.keys_values(rows.first(window, row), positions[row])
        for row in range(begin)
        if conversation[row] == conversation[begin]
    ]
    states: list[Tensor] = []
    for row in range(begin, begin + num_steps):
        x = rows.later(window, row, states[-1]) if states else rows.first(window, row)
        kv.append(rows.keys_values(x, positions[row]))
        states.append(rows.hidden(x, positions[row], kv))
    return states


@pytest.mark.parametrize("first_position", [0, 5])
def test_each_unrolled_step_equals_a_chain_drafted_row_by_row(first_position: int) -> None:
    head, window = random_head(), random_window(first_position)
    num_steps = 5
    with torch.no_grad():
        steps = [step[0] for step in head.steps(window, num_steps)]
        rows = OneRow(dict(head.tensors()), head.rope)
        begin = 0
        for length in LENGTHS:
            for row in range(begin, begin + length):
                count = min(num_steps, begin + length - row)
                for index, expected in enumerate(drafted(rows, window, row, count)):
                    torch.testing.assert_close(
                        steps[index][row + index], expected, rtol=1e-4, atol=1e-5
                    )
            begin += length


def test_the_weights_have_the_names_and_shapes_of_the_file() -> None:
    from chatrt_drafts.head_file import expected_shapes

    hidden, head_dim = CONFIG.hidden_size, CONFIG.head_dim
    shapes = expected_shapes(
        hidden=hidden,
        num_features=NUM_FEATURES,
        q_width=CONFIG.num_heads * head_dim,
        kv_width=CONFIG.num_kv_heads * head_dim,
        intermediate=CONFIG.intermediate_size,
    )
    found = {name: tuple(tensor.shape) for name, tensor in random_head().tensors().items()}
    assert found == shapes


def test_windows_do_not_see_each_other() -> None:
    head, window = random_head(), random_window()
    half = Window(
        *(
            getattr(window, name)[:, : LENGTHS[0]]
            for name in ("features", "known", "embedded", "positions", "conversations")
        )
    )
    with torch.no_grad():
        for whole, part in zip(head.steps(window, 3), head.steps(half, 3), strict=True):
            torch.testing.assert_close(whole[:, : LENGTHS[0]], part, rtol=1e-5, atol=1e-5)
