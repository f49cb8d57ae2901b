"""From messages to the token ids of a prompt, whole or behind an answer.

Knows: the tokenizer and its template. Does not know: pages, sessions, earlier turns.
Invariant: ids that exist are never made again; a follow-up's ids are only ever appended.
Cost: a follow-up costs its own messages, whatever the history.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.text.messages import Message
    from chatrt.text.tokenizer import Tokenizer


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

    def first_prompt(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids of a whole chat."""
        text = self._template.render(messages, add_generation_prompt=add_generation_prompt)
        return self._tokenizer.encode(text)

    def follow_up(
        self,
        messages: Sequence[Message],
        *,
        tip_ids: Sequence[int],
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The ids to append to an answer: what closes it, `messages`, the next answer's opening.

        An end-of-turn token that the answer already ends with is not repeated.
        """
        delta = self._template.render_delta(messages, add_generation_prompt=add_generation_prompt)
        return self._without_doubled_end(self._tokenizer.encode(delta, behind=True), tip_ids)

    def open_first(self, messages: Sequence[Message]) -> list[int]:
        """The stable ids of a chat whose last message is still being typed."""
        text = self._template.render_open(messages)
        num_fixed = _num_glue_chars(text, messages)
        return self._tokenizer.encode_stable(text, num_fixed_chars=num_fixed)

    def open_follow_up(self, messages: Sequence[Message], *, tip_ids: Sequence[int]) -> list[int]:
        """The stable ids to append to an answer while the last of `messages` is being typed."""
        delta = self._template.render_open_delta(messages)
        num_fixed = _num_glue_chars(delta, messages)
        ids = self._tokenizer.encode_stable(delta, num_fixed_chars=num_fixed, behind=True)
        return self._without_doubled_end(ids, tip_ids)

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
