"""From messages to the token ids of a prompt, whole or behind an answer.

Knows: the tokenizer and its template. Does not know: pages, sessions, earlier turns.
Invariant: ids that exist are never made again; a follow-up's ids are only ever appended. Only the
template writes control tokens: a message that spells one (`<|im_end|>`) gets ordinary tokens.
Cost: a follow-up costs its own messages, whatever the history.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from chatrt.errors import InvalidValue
from chatrt.text.messages import Message
from chatrt.text.settled import Settler, num_same

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.text.settled import Settled
    from chatrt.text.tokenizer import Tokenizer

# Put into a control token that a message spells, so that it is tokenised in two parts. Plain
# letters: templates trim and split on other things.
_BREAK = "QzChatrtBreakZq"
# Beginnings of a message that a tokenizer may join, each in its own way, with what is before it.
_BEGINNINGS = (
    "",
    "x",
    " x",
    "  x",
    "\n",
    "\n\n",
    "\n\nx",
    "\r\n",
    "\t",
    "1",
    ".",
    "<",
    "é",
    "日",
    "🎉",
)


class PromptBuilder:
    """Builds the ids of first prompts and of follow-ups.

    `tip_ids` are the ids of the sequence that a follow-up continues; only the last is looked at.
    The `open_` methods serve a message that is still being typed: they return only ids that further
    typing leaves as they are.

    All methods raise `InvalidValue` when the model's template refuses the messages.

    Raises:
        UnsupportedModel: The model has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template = tokenizer.template
        controls = sorted(filter(None, map(tokenizer.token, tokenizer.special_ids)))
        self._controls = re.compile("|".join(map(re.escape, controls)) or r"(?!)")
        # Bounded: people's own system messages are among the keys.
        self._opening = lru_cache(maxsize=64)(self._template.render_opening)
        self._settler = Settler(tokenizer, self._encode_seam)
        self._glues: dict[int | None, tuple[int, ...]] = {}

    def first_prompt(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids of a whole chat."""
        text = self._template.render(
            self._disarmed(messages), add_generation_prompt=add_generation_prompt
        )
        return self._encode(text)

    def follow_up(
        self,
        messages: Sequence[Message],
        *,
        tip_ids: Sequence[int],
        add_generation_prompt: bool = True,
        front: tuple[Message, ...] = (),
    ) -> list[int]:
        """The ids to append to an answer: what closes it, `messages`, the next answer's opening.

        An end-of-turn token that the answer already ends with is not repeated. `front` are the
        system messages that the chat began with: they may decide how an answer is opened.
        """
        delta = self._template.render_delta(
            self._disarmed(messages), add_generation_prompt=add_generation_prompt
        )
        if front and add_generation_prompt:
            plain, own = self._opening(()), self._opening(front)
            if plain != own and delta.endswith(plain):
                delta = delta[: len(delta) - len(plain)] + own
        return self._without_doubled_end(self._encode(delta, behind=True), tip_ids)

    def open_first(self, messages: Sequence[Message]) -> list[int]:
        """The stable ids of a chat whose last message is still being typed."""
        messages = self._disarmed(messages)
        text = self._template.render_open(messages)
        return self._encode_stable(text, _num_glue_chars(text, messages))

    def open_follow_up(self, messages: Sequence[Message], *, tip_ids: Sequence[int]) -> list[int]:
        """The stable ids to append to an answer while the last of `messages` is being typed."""
        messages = self._disarmed(messages)
        delta = self._template.render_open_delta(messages)
        ids = self._encode_stable(delta, _num_glue_chars(delta, messages), behind=True)
        return self._without_doubled_end(ids, tip_ids)

    def settle(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Settled | None:
        """How an answered turn reads once another follows it, or None if it stays as it is.

        `prompt_ids` end with the answer's opening; how far in front of that they begin does not
        matter. A template that refuses the answer changes nothing.
        """
        return self._settler.settle(prompt_ids, output_ids)

    def glue(self, tip_ids: Sequence[int]) -> list[int]:
        """The ids with which every next user's turn begins behind a tip; none if none are certain.

        They begin whatever `follow_up` and `open_follow_up` return for one message of a user.
        """
        end = tip_ids[-1] if tip_ids and tip_ids[-1] in self._tokenizer.special_ids else None
        glue = self._glues.get(end)
        if glue is None:
            glue = self._glues[end] = self._common_glue(tip_ids[-1:])
        return list(glue)

    def _common_glue(self, tip_ids: Sequence[int]) -> tuple[int, ...]:
        common: list[int] | None = None
        for beginning in _BEGINNINGS:
            message = Message("user", beginning)
            try:
                half_typed = self.open_follow_up([message], tip_ids=tip_ids)
                sent = self.follow_up([message], tip_ids=tip_ids)
            except InvalidValue:
                return ()
            ids = half_typed[: num_same(half_typed, sent)]
            common = ids if common is None else common[: num_same(common, ids)]
        return tuple(common or ())

    def _encode_seam(self, text: str, answer: str) -> list[int]:
        """The ids of `text`, in which control tokens that the answer spells stay ordinary text."""
        spelled = set(self._controls.findall(answer))

        def broken(match: re.Match[str]) -> str:
            return match[0][0] + _BREAK + match[0][1:] if match[0] in spelled else match[0]

        return self._encode(self._controls.sub(broken, text), behind=True)

    def _disarmed(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with a break behind the first letter of every control token in them."""

        def broken(match: re.Match[str]) -> str:
            return match[0][0] + _BREAK + match[0][1:]

        return [replace(m, content=self._controls.sub(broken, m.content)) for m in messages]

    def _encode(self, text: str, *, behind: bool = False) -> list[int]:
        first, *others = text.split(_BREAK)
        ids = self._tokenizer.encode(first, behind=behind)
        for part in others:
            ids += self._tokenizer.encode(part, behind=True)
        return ids

    def _encode_stable(self, text: str, num_fixed_chars: int, *, behind: bool = False) -> list[int]:
        front, mark, last = text.rpartition(_BREAK)
        ids = self._encode(front, behind=behind) if mark else []
        num_fixed_chars = max(0, num_fixed_chars - len(front) - len(mark))
        return ids + self._tokenizer.encode_stable(
            last, num_fixed_chars=num_fixed_chars, behind=behind or bool(mark)
        )

    def _without_doubled_end(self, ids: list[int], tip_ids: Sequence[int]) -> list[int]:
        if not tip_ids or tip_ids[-1] not in self._tokenizer.special_ids:
            return ids
        for index, token_id in enumerate(ids):
            if token_id == tip_ids[-1]:
                return ids[index + 1 :]
            # some templates put a space before the end-of-turn token
            if self._tokenizer.token_bytes(token_id, skip_special=False).strip():
                break
        return ids


def _num_glue_chars(text: str, messages: Sequence[Message]) -> int:
    """Length of what the template wrote before the last message's content.

    A trailing space there is not counted: it may become part of the content's first token.
    """
    content = messages[-1].content.rstrip()
    if not text.endswith(content):
        content = content.lstrip()
    glue = text[: len(text) - len(content)] if text.endswith(content) else ""
    return len(glue.rstrip(" "))
