"""Chat templates that treat an answer as those of well-known models do, and tokenizers for them.

Knows: what each family does to an answer once another turn follows. Does not know: the planner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from chatrt.testing.tokenizer import tiny_tokenizer
from chatrt.text.spelling import byte_alphabet
from chatrt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

THINK = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class Family:
    """A template with its special tokens (begin of text, end of turn, others).

    `answers` are two answers as the model generates them, `drifts` says whether they read in
    another way later.
    """

    name: str
    template: str
    specials: tuple[str, ...]
    answers: tuple[str, str] = ("Paris.", "Rome, of course.")
    drifts: bool = False

    @property
    def end_of_turn(self) -> str:
        """The token with which the model ends an answer."""
        return self.specials[1]


_LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
    {{- m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""

# The date of the day is in front; here one that changes with every rendering.
_LLAMA31 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{{- 'Today Date: ' + strftime_now('%d %b %Y %H:%M:%S.%f') + '\n\n' + system + '<|eot_id|>' }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
    {{- m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""

_QWEN25 = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

# Reasoning stays in answers behind the last question only; `OPENING` is the answer's.
_QWEN3 = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content %}
    {%- if m.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and reasoning %}
            {%- set content = '<think>\n' + reasoning + '\n</think>\n\n' + content %}
        {%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'OPENING' }}{% endif %}
"""

_MISTRAL = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('take turns') }}
    {%- endif %}
    {%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
    {%- else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}
{%- endfor %}
"""

_GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for m in messages %}
    {%- set role = 'model' if m.role == 'assistant' else m.role %}
    {{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""

_PHI = """\
{%- for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}
"""

# The system message says whether the model reasons; if not, answers keep the empty block.
_SMOLLM3 = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set block = '<think>\n\n</think>\n' if '/no_think' in system else '' %}
{{- '<|im_start|>system\nToday: ' + strftime_now('%H:%M:%S.%f') + '\n' + system + '<|im_end|>\n' }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{% endif %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + block + m.content.lstrip('\n') + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' + block }}{% endif %}
"""

# The opening begins the reasoning, which the answer therefore only ends.
_DEEPSEEK = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{ m.content }}{% endif %}
    {%- if m.role == 'user' %}{{ '<|User|>' + m.content }}{% endif %}
    {%- if m.role == 'assistant' %}
        {%- set content = m.content.split('</think>')[-1] %}
        {{- '<|Assistant|>' + content + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}
"""

_HEADERS = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
_IM = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
_THOUGHT = ("<think>\nFrance?\n</think>\n\nParis.", "<think>\nNow\n\nItaly.\n</think>\n\n罗马 🎉")

FAMILIES = (
    Family("llama3", _LLAMA3, _HEADERS),
    Family("llama31", _LLAMA31, _HEADERS),
    Family("qwen25", _QWEN25, _IM),
    Family(
        "qwen3",
        _QWEN3.replace("OPENING", "<|im_start|>assistant\\n"),
        _IM,
        answers=_THOUGHT,
        drifts=True,
    ),
    Family(
        "qwen3-empty",
        _QWEN3.replace("OPENING", "<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n"),
        _IM,
        drifts=True,
    ),
    Family("mistral", _MISTRAL, ("<s>", "</s>"), answers=(" Paris.", " Rome, of course.")),
    Family("gemma", _GEMMA, ("<bos>", "<end_of_turn>", "<start_of_turn>")),
    Family("phi", _PHI, ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")),
    Family("smollm2", _QWEN25.replace("a helpful assistant", "SmolLM"), _IM),
    Family("smollm3", _SMOLLM3, _IM, answers=_THOUGHT),
    Family(
        "deepseek",
        _DEEPSEEK,
        ("<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>"),
        answers=("France?\n</think>\n\nParis.", "Now\n\nItaly.\n</think>\n\n罗马 🎉"),
        drifts=True,
    ),
)
THINKING = tuple(family for family in FAMILIES if family.drifts)


def family_named(name: str) -> Family:
    """One of the families."""
    return next(family for family in FAMILIES if family.name == name)


def byte_tokenizer(family: Family, *, tags: bool = True) -> Tokenizer:
    """One token per byte, no merges; with `tags`, `<think>` and `</think>` are tokens too.

    The ids of a text are therefore the joined ids of its parts, wherever it is cut.
    """
    alphabet = byte_alphabet()
    backend = Backend(models.BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in family.specials]
    )
    if tags:
        backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in THINK])
    config = {"bos_token": family.specials[0], "eos_token": family.specials[1]}
    return Tokenizer(backend, config, family.template)


def merging_tokenizer(family: Family, folder: Path) -> Tokenizer:
    """Two line breaks, some words and the halves of emoji are one token each; tags are spelled."""
    return tiny_tokenizer(folder, template=family.template, specials=family.specials)
