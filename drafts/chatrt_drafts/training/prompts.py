"""What the conversations of the training data are about: openings and follow-ups, as token ids.

Knows: the chat template, user turns that are handed in, how often each kind is drawn.
Does not know: the model, slots, sampling. Invariant: generated ids are never made again.
Cost: some hundred microseconds for each opening, the tokenizer's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from chatrt.text.messages import Message
from chatrt.text.prompt import PromptBuilder

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from chatrt.text.tokenizer import Tokenizer

_SELF_WRITTEN_SHARE = 0.35
_SYSTEM_SHARE = 0.2
_SECOND_TURN_SHARE = 0.35
_FOLLOW_UP_SHARE = 0.7  # of second turns; the others change the topic
# Plain letters, which no template trims or splits.
_MARK = "QzChatrtMarkZq"


class UserTurns(Protocol):
    """Where user turns and system messages come from."""

    def draw(self, rng: random.Random) -> str:
        """A user turn that opens a conversation."""
        ...

    def draw_follow_up(self, rng: random.Random) -> str:
        """A user turn that makes sense behind most answers."""
        ...

    def draw_system(self, rng: random.Random) -> str:
        """A system message."""
        ...


@dataclass(frozen=True, slots=True)
class Opening:
    """How a conversation begins.

    `self_written` says that `token_ids` end where the user's turn begins, and the model writes it.
    `num_turns` counts answers; an answer's `temperature` 0 means greedy.
    """

    token_ids: list[int]
    self_written: bool
    num_turns: int
    temperature: float


class Prompts:
    """Draws conversations; `end_ids` are the tokens that end a turn.

    Raises:
        UnsupportedModel: The model has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer, turns: UserTurns, rng: random.Random) -> None:
        self._builder = PromptBuilder(tokenizer)
        self._turns = turns
        self._rng = rng
        text = tokenizer.template.render([Message("user", _MARK)], add_generation_prompt=True)
        closing = tokenizer.encode(text.rpartition(_MARK)[2], behind=True)
        self._closing = closing
        self.end_ids = tokenizer.eos_token_ids
        self._ready: deque[Opening] = deque()

    def draw(self) -> Opening:
        """The next conversation."""
        return self._ready.popleft() if self._ready else self._make()

    def prepare(self, count: int) -> None:
        """Make so many conversations ready, while there is nothing better to do."""
        while len(self._ready) < count:
            self._ready.append(self._make())

    def _make(self) -> Opening:
        rng = self._rng
        messages = []
        if rng.random() < _SYSTEM_SHARE:
            messages.append(Message("system", self._turns.draw_system(rng)))
        self_written = rng.random() < _SELF_WRITTEN_SHARE
        if self_written:
            token_ids = self._builder.open_first([*messages, Message("user", "")])
        else:
            user = Message("user", self._turns.draw(rng))
            token_ids = self._builder.first_prompt([*messages, user])
        num_turns = 2 if rng.random() < _SECOND_TURN_SHARE else 1
        return Opening(token_ids, self_written, num_turns, self._draw_temperature())

    def follow_up(self, tip_ids: Sequence[int]) -> list[int]:
        """The ids behind an answer that ends with `tip_ids`: its end, a user turn, an opening."""
        rng = self._rng
        on_topic = rng.random() < _FOLLOW_UP_SHARE
        text = self._turns.draw_follow_up(rng) if on_topic else self._turns.draw(rng)
        return self._builder.follow_up([Message("user", text)], tip_ids=tip_ids)

    def close_user_turn(self, last_id: int) -> list[int]:
        """The ids behind a user turn that the model wrote; its end is not repeated."""
        closing = self._closing
        return closing[1:] if closing[:1] == [last_id] else list(closing)

    def _draw_temperature(self) -> float:
        kind = self._rng.random()
        if kind < 0.5:
            return 0.0
        return self._rng.uniform(0.7, 0.8) if kind < 0.75 else 1.0
