"""Chat templates: messages to text, and the text that a turn adds behind an answer.

Knows: the jinja dialect of Hugging Face chat templates, in a sandbox. Does not know: token ids.
Invariant: `render_delta` and `render_open_delta` depend on the new messages only, so their cost
does not grow with the history.
Source: transformers' `apply_chat_template` (the names, filters and tags that templates may use).
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chatrt.errors import InvalidValue, ModelFileError
from chatrt.text.messages import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jinja2.parser import Parser

# Plain letters, so that templates which trim, strip or split content leave them alone.
_SENTINEL = "QzChatrtBoundaryZq"
_ANSWER_SENTINEL = "QzChatrtAnswerZq"
_PLACEHOLDER = Message("user", "x")
_MARKED = Message("user", _SENTINEL)


class ChatTemplate:
    """A model's chat template.

    `special_tokens` are the names that templates use, such as `bos_token`, with their text. `now`
    is the clock behind `strftime_now`.

    Raises:
        ModelFileError: The source is not a valid template.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._variables = dict(special_tokens or {})
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelFileError(
                f"the chat template is broken at line {error.lineno}: {error.message}"
            ) from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The whole text of `messages`, with the opening of an answer behind it if asked.

        Raises:
            InvalidValue: The template refuses these messages; its own words are in the message.
        """
        _check_some(messages)
        try:
            return self._template.render(
                self._variables,
                messages=[{"role": m.template_role, "content": m.content} for m in messages],
                add_generation_prompt=add_generation_prompt,
            )
        # A template is a program: beside jinja's own errors it can raise what its expressions do.
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise InvalidValue(
                f"the model's chat template refuses these messages: {error}", param="input"
            ) from error

    def render_delta(self, new: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text that follows an assistant's answer: its closing glue, `new`, and the opening.

        Raises:
            InvalidValue: The template refuses `new` behind an answer, or would put a system message
                in front of the history instead of behind it.
        """
        answered = [_PLACEHOLDER, Message("assistant", _SENTINEL), *new]
        text = self.render(answered, add_generation_prompt=add_generation_prompt)
        _, found, delta = text.partition(_SENTINEL)
        _check_kept(found, "the answer")
        for message in new:
            if message.template_role == "system" and message.content.strip() not in delta:
                raise InvalidValue(
                    "the model's chat template takes a system message only at the start of a chat",
                    param="input",
                )
        return delta

    def render_open(self, messages: Sequence[Message]) -> str:
        """The text up to and including the last message's content, for a message still typed.

        White space at the end of that content is left out: it belongs to the next word.

        Raises:
            InvalidValue: The template refuses these messages.
        """
        _check_some(messages)
        text, found, _ = self._render_marked(messages).rpartition(_SENTINEL)
        _check_kept(found, "the last message")
        return text

    def render_open_delta(self, new: Sequence[Message]) -> str:
        """Like `render_open`, for messages that follow an assistant's answer.

        Raises:
            InvalidValue: The template refuses `new` behind an answer.
        """
        _check_some(new)
        text = self._render_marked([_PLACEHOLDER, Message("assistant", _SENTINEL), *new])
        _, found_first, behind = text.partition(_SENTINEL)
        delta, found_last, _ = behind.rpartition(_SENTINEL)
        _check_kept(found_first and found_last, "the last message")
        return delta

    def render_opening(self, front: Sequence[Message] = ()) -> str:
        """The text between a user's message and the first character of its answer.

        `front` are system messages, which may switch reasoning off.

        Raises:
            InvalidValue: The template refuses so short a chat, or leaves the user's message out.
        """
        text = self.render([*front, _MARKED], add_generation_prompt=True)
        _, found, opening = text.rpartition(_SENTINEL)
        _check_kept(found, "the last message")
        return opening

    def render_answered(self, answer: str) -> str:
        """The text between a user's message and the next one, with an answer in the middle.

        Raises:
            InvalidValue: The template refuses the chat, or leaves one of the two messages out.
        """
        chat = [_MARKED, Message("assistant", answer), _MARKED]
        text = self.render(chat, add_generation_prompt=False)
        _, found_first, behind = text.partition(_SENTINEL)
        between, found_last, _ = behind.rpartition(_SENTINEL)
        _check_kept(found_first and found_last, "a user's message")
        return between

    def render_closing(self) -> str:
        """The text between the last character of an answer and the user's next message.

        Raises:
            InvalidValue: As `render_answered`, or the template leaves the answer out.
        """
        _, found, closing = self.render_answered(_ANSWER_SENTINEL).partition(_ANSWER_SENTINEL)
        _check_kept(found, "the answer")
        return closing

    def _render_marked(self, messages: Sequence[Message]) -> str:
        *earlier, last = messages
        marked = replace(last, content=last.content.rstrip() + _SENTINEL)
        return self.render([*earlier, marked], add_generation_prompt=False)


def _check_some(messages: Sequence[Message]) -> None:
    if not messages:
        raise InvalidValue("there are no messages to render", param="input")


def _check_kept(found: str, what: str) -> None:
    if not found:
        raise InvalidValue(f"the model's chat template does not render {what}", param="input")


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body's own nodes, in place of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return now().strftime(pattern)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML, which would change what the model reads
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
