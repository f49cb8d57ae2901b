"""Prompts equal those of transformers, for the template styles of the common model families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from chatrt.testing.tokenizer import CHATML, tiny_sentencepiece_tokenizer, tiny_tokenizer
from chatrt.text.messages import Message
from chatrt.text.prompt import PromptBuilder

if TYPE_CHECKING:
    from pathlib import Path

    from chatrt.text.tokenizer import Tokenizer

_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# A default system message, reasoning left out of earlier answers, an empty think block at the end.
_QWEN = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=0) %}
{%- for message in messages if message.role == 'user' %}{% set ns.last_user = loop.index0 %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
"""

_MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system is defined %}
            {{- '[INST] ' + system + '\\n\\n' + message['content'] + ' [/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + ' [/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

_GEMMA = """\
{{ bos_token }}
{%- for message in messages %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    template: str
    specials: tuple[str, ...]
    end_of_turn: str
    sentencepiece: bool = False


_HEADERS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
_FAMILIES = (
    Family("chatml", CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    Family("llama3", _LLAMA3, (*_HEADERS, "<|eot_id|>"), "<|eot_id|>"),
    Family("qwen", _QWEN, ("<|endoftext|>", "<|im_end|>", "<|im_start|>"), "<|im_end|>"),
    Family("mistral", _MISTRAL, ("<s>", "</s>"), "</s>", sentencepiece=True),
    Family(
        "gemma", _GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"
    ),
)

_CHAT = [
    Message("user", "hello 日本 🎉"),
    Message("assistant", "hello the world\n\nand so on"),
    Message("user", "Why is\n\nthe world round?"),
]


@dataclass(frozen=True, slots=True)
class Pair:
    """Our tokenizer and transformers' one, from the same files."""

    family: Family
    ours: Tokenizer
    theirs: Any

    def their_text(self, messages: list[Message], *, add_generation_prompt: bool = True) -> str:
        text = self.theirs.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        assert isinstance(text, str)
        return text

    def their_ids(self, messages: list[Message]) -> list[int]:
        ids = self.theirs.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in messages],
            add_generation_prompt=True,
            return_dict=False,
        )
        return list(ids)


@pytest.fixture(scope="module", params=_FAMILIES, ids=lambda family: str(family.name))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    from transformers import PreTrainedTokenizerFast

    family: Family = request.param
    folder: Path = tmp_path_factory.mktemp(family.name)
    make = tiny_sentencepiece_tokenizer if family.sentencepiece else tiny_tokenizer
    ours = make(folder, template=family.template, specials=family.specials)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token=family.specials[0],
        eos_token=family.specials[1],
        chat_template=family.template,
    )
    return Pair(family, ours, theirs)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("with_system", [True, False])
def test_texts_are_equal(pair: Pair, with_system: bool, add_generation_prompt: bool) -> None:
    chat = [Message("system", "Be brief"), *_CHAT] if with_system else _CHAT
    ours = pair.ours.template.render(chat, add_generation_prompt=add_generation_prompt)
    assert ours == pair.their_text(chat, add_generation_prompt=add_generation_prompt)


def test_ids_are_equal(pair: Pair) -> None:
    assert PromptBuilder(pair.ours).first_prompt(_CHAT) == pair.their_ids(_CHAT)


def test_the_end_of_a_turn_ends_an_answer(pair: Pair) -> None:
    assert pair.ours.id_of(pair.family.end_of_turn) in pair.ours.eos_token_ids


@pytest.mark.parametrize("ended", [True, False])
def test_appended_turns_are_the_ids_of_the_whole_chat(pair: Pair, ended: bool) -> None:
    builder = PromptBuilder(pair.ours)
    whole = pair.their_ids(_CHAT)
    end = pair.ours.id_of(pair.family.end_of_turn)
    assert end is not None
    # The answer as the whole chat has it, so that only the glue and the new turn are compared.
    start = len(builder.first_prompt(_CHAT[:1], add_generation_prompt=False))
    stop = whole.index(end, start + 1)
    answer = whole[start : stop + ended]
    tip = whole[:start] + answer
    assert tip + builder.follow_up(_CHAT[2:], tip_ids=tip) == whole


def test_half_typed_messages_begin_the_final_prompt(pair: Pair) -> None:
    builder = PromptBuilder(pair.ours)
    typed = Message("user", "Why is\n\nthe wor")
    first = builder.open_first([*_CHAT[:2], typed])
    assert pair.their_ids(_CHAT)[: len(first)] == first
    assert first
    tip = [0]
    delta = builder.open_follow_up([typed], tip_ids=tip)
    assert builder.follow_up(_CHAT[2:], tip_ids=tip)[: len(delta)] == delta
