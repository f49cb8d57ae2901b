"""Chat templates: whole chats, deltas, half-typed messages, refusals."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from chatrt.errors import InvalidValue, ModelFileError
from chatrt.testing.tokenizer import CHATML
from chatrt.text.messages import Message
from chatrt.text.template import ChatTemplate

_USER = Message("user", "Hi")
_ANSWER = Message("assistant", "Hello")

_ALTERNATING = (
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.role }}]{{ m.content | trim }}{{ eos_token }}{% endfor %}"
)
# Keeps a system message for the front, as templates of the Llama 2 kind do.
_HOISTING = (
    "{% for m in messages if m.role == 'system' %}<{{ m.content }}>{% endfor %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.content }}]{% endfor %}"
)
_STRIPS_REASONING = (
    "{% for m in messages %}"
    "[{{ m.role }}]{{ m.content.split('</think>')[-1].lstrip('\\n') }}|{% endfor %}"
)


def _chatml() -> ChatTemplate:
    return ChatTemplate(CHATML)


def test_a_whole_chat_ends_with_the_opening_of_an_answer_if_asked() -> None:
    text = _chatml().render([_USER], add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert _chatml().render([_USER], add_generation_prompt=False).endswith("<|im_end|>\n")


def test_a_developer_renders_as_system() -> None:
    text = _chatml().render([Message("developer", "Be brief")], add_generation_prompt=False)
    assert text == "<|im_start|>system\nBe brief<|im_end|>\n"


def test_a_delta_is_what_a_whole_rendering_has_behind_the_answer() -> None:
    template = _chatml()
    new = [Message("system", "Be brief"), Message("user", "Why?")]
    whole = template.render([_USER, _ANSWER, *new], add_generation_prompt=True)
    history = template.render([_USER, _ANSWER], add_generation_prompt=False)
    history = history.removesuffix("<|im_end|>\n")
    assert history + template.render_delta(new) == whole


def test_a_delta_survives_templates_that_trim_and_strip_reasoning() -> None:
    template = ChatTemplate(_ALTERNATING, special_tokens={"eos_token": "</s>"})
    assert template.render_delta([Message("user", " Why? ")]) == "</s>[user]Why?</s>"
    assert ChatTemplate(_STRIPS_REASONING).render_delta([_USER]) == "|[user]Hi|"


def test_a_refusal_is_an_error_with_the_templates_own_words() -> None:
    template = ChatTemplate(_ALTERNATING, special_tokens={"eos_token": "</s>"})
    with pytest.raises(InvalidValue, match="refuses these messages: roles must alternate"):
        template.render_delta([_USER, _USER])


def test_a_template_that_fails_is_an_error_of_the_same_kind() -> None:
    broken = ChatTemplate("{{ messages[0].content + 1 }}")
    with pytest.raises(InvalidValue, match="refuses these messages"):
        broken.render([_USER], add_generation_prompt=False)


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    escaping = ChatTemplate("{{ messages.__class__.__mro__ }}")
    with pytest.raises(InvalidValue, match="unsafe"):
        escaping.render([_USER], add_generation_prompt=False)


def test_a_system_message_that_would_move_to_the_front_is_refused() -> None:
    template = ChatTemplate(_HOISTING)
    with pytest.raises(InvalidValue, match="only at the start"):
        template.render_delta([Message("system", "Be brief"), _USER])
    assert template.render_delta([_USER]) == "][Hi]"


def test_no_messages_are_refused() -> None:
    for render in (_chatml().render_open, _chatml().render_open_delta):
        with pytest.raises(InvalidValue, match="no messages"):
            render([])
    with pytest.raises(InvalidValue, match="no messages"):
        _chatml().render([], add_generation_prompt=True)


def test_an_open_message_ends_where_the_person_is_typing() -> None:
    template = _chatml()
    assert template.render_open([Message("user", "What is ")]) == "<|im_start|>user\nWhat is"
    delta = template.render_open_delta([Message("user", "And")])
    assert delta == "<|im_end|>\n<|im_start|>user\nAnd"


@pytest.mark.parametrize("source", [CHATML, _ALTERNATING])
def test_an_open_rendering_is_the_beginning_of_the_final_one(source: str) -> None:
    template = ChatTemplate(source, special_tokens={"eos_token": "</s>"})
    final = [_USER, _ANSWER, Message("user", "  What is the capital of France?")]
    typed = [*final[:2], Message("user", "  What is the cap")]
    whole = template.render(final, add_generation_prompt=True)
    assert whole.startswith(template.render_open(typed))
    assert template.render_delta(final[2:]).startswith(template.render_open_delta(typed[2:]))


def test_templates_have_the_names_that_they_expect() -> None:
    source = (
        "{% generation %}{{ messages | tojson }}{% endgeneration %}"
        "{% for n in [1, 2, 3] %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}"
        "{{ strftime_now('%Y') }}{{ bos_token }}"
    )
    template = ChatTemplate(
        source,
        special_tokens={"bos_token": "<s>"},
        now=lambda: datetime(2031, 1, 1, tzinfo=UTC),
    )
    text = template.render([Message("user", "<é>")], add_generation_prompt=False)
    assert text == '[{"role": "user", "content": "<é>"}]12031<s>'


def test_a_broken_template_is_named_with_its_line() -> None:
    with pytest.raises(ModelFileError, match="broken at line 2"):
        ChatTemplate("\n{% for %}")
