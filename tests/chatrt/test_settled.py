"""How an answer reads once another turn follows: what is kept, what is made anew, what is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatrt.errors import InvalidValue
from chatrt.testing.tokenizer import tiny_sentencepiece_tokenizer
from chatrt.text.messages import Message
from chatrt.text.prompt import PromptBuilder
from chatrt.text.settled import Settled
from tests.chatrt.drift_support import (
    FAMILIES,
    THINKING,
    Family,
    byte_tokenizer,
    family_named,
    merging_tokenizer,
)

if TYPE_CHECKING:
    from pathlib import Path

    from chatrt.text.tokenizer import Tokenizer

ANSWERS = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "\n",
            "\n\n",
            " ",
            "a",
            "Hello",
            "<",
            "日本",
            "🎉",
            "\u3000",
            "\u00a0",
        ]
    ),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        family.name: merging_tokenizer(family, tmp_path_factory.mktemp(family.name))
        for family in FAMILIES
    }


@pytest.fixture(scope="module")
def merging_builders(merging: dict[str, Tokenizer]) -> dict[str, PromptBuilder]:
    return {name: PromptBuilder(tokenizer) for name, tokenizer in merging.items()}


BYTES = {family.name: byte_tokenizer(family) for family in FAMILIES}
BUILDERS = {name: PromptBuilder(tokenizer) for name, tokenizer in BYTES.items()}


def opened(builder: PromptBuilder) -> list[int]:
    return builder.first_prompt([Message("user", "x")])


def settled_text(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], settled: Settled | None
) -> str:
    """What stands behind the user's message."""
    ids = [*prompt, *output]
    if settled is not None:
        assert ids[settled.start : settled.start + 1] != list(settled.token_ids[:1])
        ids = [*ids[: settled.start], *settled.token_ids]
    data = b"".join(tokenizer.token_bytes(i) for i in ids)
    opening = tokenizer.template.render_opening()
    whole = b"".join(tokenizer.token_bytes(i) for i in prompt).decode()
    return data.decode(errors="surrogateescape")[whole.rindex(opening) :]


def later_text(tokenizer: Tokenizer, answer: str) -> str:
    template = tokenizer.template
    text = template.render_answered(answer)
    assert text.endswith(template.render_closing())
    return text.removesuffix(template.render_closing())


def assert_reads_as_later(
    tokenizer: Tokenizer, output: list[int], settled: Settled | None, prompt: list[int]
) -> None:
    data = b"".join(tokenizer.token_bytes(i, skip_special=True) for i in output)
    later = later_text(tokenizer, data.decode(errors="surrogateescape"))
    text = settled_text(tokenizer, prompt, output, settled)
    if settled is None:
        # White space where an answer begins or ends is no drift.
        opening = tokenizer.template.render_opening().rstrip()
        assert text.startswith(opening)
        assert later.startswith(opening)
        assert text[len(opening) :].strip() == later[len(opening) :].strip()
    else:
        assert text.rstrip() == later.rstrip()


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
@settings(max_examples=60)
@given(answer=ANSWERS)
def test_any_answer_reads_as_the_template_has_it(name: str, answer: str) -> None:
    tokenizer, builder = BYTES[name], BUILDERS[name]
    prompt = opened(builder)
    output = tokenizer.encode(answer)
    settled = builder.settle(prompt, output)
    assert_reads_as_later(tokenizer, output, settled, prompt)


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
@settings(max_examples=40)
@given(pieces=st.lists(st.sampled_from([*range(256), *range(256, 271)]), max_size=12))
def test_ids_that_are_no_text_do_no_harm(
    name: str,
    pieces: list[int],
    merging: dict[str, Tokenizer],
    merging_builders: dict[str, PromptBuilder],
) -> None:
    tokenizer, builder = merging[name], merging_builders[name]
    prompt = opened(builder)
    output = [*b"<think>a</think>", *pieces]
    settled = builder.settle(prompt, output)
    data = b"".join(tokenizer.token_bytes(i, skip_special=True) for i in output)
    if "�" not in data.decode(errors="replace"):
        assert_reads_as_later(tokenizer, output, settled, prompt)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.name))
def test_an_end_of_turn_stays_behind_what_is_settled(family: Family) -> None:
    tokenizer, builder = BYTES[family.name], BUILDERS[family.name]
    end = tokenizer.id_of(family.end_of_turn)
    assert end is not None
    output = tokenizer.encode(family.answers[0], behind=True)
    cut = builder.settle(opened(builder), output)
    ended = builder.settle(opened(builder), [*output, end])
    assert (cut is None, ended is None) == (not family.drifts, not family.drifts)
    if cut is not None and ended is not None:
        assert ended == Settled(cut.start, (*cut.token_ids, end))


@pytest.mark.parametrize("family", THINKING, ids=lambda family: str(family.name))
def test_where_nothing_of_an_answer_survives_its_end_still_does(family: Family) -> None:
    tokenizer, builder = BYTES[family.name], BUILDERS[family.name]
    end = tokenizer.id_of(family.end_of_turn)
    assert end is not None
    output = [*tokenizer.encode("<think>\na\n</think>"), end]
    settled = builder.settle(opened(builder), output)
    assert settled is not None
    assert settled.token_ids == (end,)


def test_white_space_at_the_edges_of_an_answer_is_no_drift() -> None:
    for name in ("llama3", "gemma", "qwen25", "mistral"):
        builder = BUILDERS[name]
        for answer in (b"Hello", b" Hello", b"\nHello \n", b"", b"\n"):
            assert builder.settle(opened(builder), list(answer)) is None


def test_white_space_behind_an_answer_stays_where_its_reasoning_goes() -> None:
    family = family_named("deepseek")
    tokenizer, builder = BYTES[family.name], BUILDERS[family.name]
    output = tokenizer.encode("a</think>Hello \n")
    settled = builder.settle(opened(builder), output)
    assert settled is not None
    assert bytes(settled.token_ids) == b"Hello \n"


def test_how_much_history_stands_in_front_does_not_matter() -> None:
    family = family_named("qwen3")
    tokenizer, builder = BYTES[family.name], BUILDERS[family.name]
    output = tokenizer.encode("<think>\na\n</think>\n\nHello")
    delta = builder.follow_up([Message("user", "x")], tip_ids=[])
    alone = builder.settle(delta, output)
    long = builder.settle([0x61] * 10_000 + delta, output)
    assert alone is not None
    assert long == Settled(10_000 + alone.start, alone.token_ids)


def test_a_prompt_that_does_not_end_in_the_opening_of_an_answer_is_left_alone() -> None:
    family = family_named("qwen3-empty")
    tokenizer, builder = BYTES[family.name], BUILDERS[family.name]
    assert builder.settle(tokenizer.encode("something else"), tokenizer.encode("Hello")) is None


def test_a_control_token_that_an_answer_spells_stays_ordinary_text() -> None:
    template = "{% for m in messages %}{{ m.content | replace('1', '2') }}<e>{% endfor %}"
    family = Family("replaces", template, ("<s>", "<e>"))
    tokenizer = byte_tokenizer(family)
    builder = PromptBuilder(tokenizer)
    settled = builder.settle(opened(builder), list(b"1<e>1"))
    assert settled is not None
    assert bytes(settled.token_ids) == b"2<e>2"


@pytest.mark.parametrize(
    "template",
    [
        # refuses, closes in another way, leaves out: nothing can be said of what follows
        "{% for m in messages %}{{ m.content }}"
        "{% if m.role == 'assistant' %}{{ raise_exception('no') }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.content + ('!' if m.content == 'ab' else '|') }}{% endfor %}",
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
    ],
)
def test_a_template_that_cannot_say_changes_nothing(template: str) -> None:
    tokenizer = byte_tokenizer(Family("odd", template, ("<s>", "<e>")))
    builder = PromptBuilder(tokenizer)
    assert builder.settle(list(b"x"), list(b"ab")) is None


def test_a_sentencepiece_answer_keeps_the_space_that_its_vocabulary_puts_in_front(
    tmp_path: Path,
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content.split('|')[-1].strip() + eos_token }}{% endif %}{% endfor %}"
    )
    tokenizer = tiny_sentencepiece_tokenizer(tmp_path, template=template)
    builder = PromptBuilder(tokenizer)
    prompt = opened(builder)
    assert builder.settle(prompt, tokenizer.encode("hello world")) is None
    world = tokenizer.encode(" world", behind=True)
    settled = builder.settle(prompt, [*tokenizer.encode("hello|", behind=True), *world])
    assert settled == Settled(len(prompt), tuple(world))


@pytest.mark.parametrize("kind", ["bytes", "merging"])
@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
@settings(max_examples=40)
@given(text=st.text(alphabet=st.one_of(st.characters(), st.sampled_from("\n\r\t <|'\u0301"))))
def test_the_glue_begins_every_next_turn(
    kind: str,
    name: str,
    text: str,
    merging: dict[str, Tokenizer],
    merging_builders: dict[str, PromptBuilder],
) -> None:
    tokenizer = BYTES[name] if kind == "bytes" else merging[name]
    builder = BUILDERS[name] if kind == "bytes" else merging_builders[name]
    end = tokenizer.id_of(family_named(name).end_of_turn)
    assert end is not None
    for tip_ids in ([0x61], [0x61, end], []):
        glue = builder.glue(tip_ids)
        message = Message("user", text)
        assert builder.follow_up([message], tip_ids=tip_ids)[: len(glue)] == glue
        assert builder.open_follow_up([message], tip_ids=tip_ids)[: len(glue)] == glue


def test_the_glue_is_all_but_what_the_message_may_join(
    merging: dict[str, Tokenizer], merging_builders: dict[str, PromptBuilder]
) -> None:
    glue = merging_builders["qwen25"].glue([0x61])
    # Two line breaks are one token here, and a message may begin with one.
    assert merging["qwen25"].decode(glue, skip_special=False) == "<|im_end|>\n<|im_start|>user"
    glue = BUILDERS["qwen25"].glue([0x61])
    assert BYTES["qwen25"].decode(glue, skip_special=False) == "<|im_end|>\n<|im_start|>user\n"


def test_there_is_no_glue_where_an_empty_message_is_refused() -> None:
    template = (
        "{% for m in messages %}{% if not m.content %}{{ raise_exception('empty') }}{% endif %}"
        "{{ m.content }}|{% endfor %}"
    )
    builder = PromptBuilder(byte_tokenizer(Family("strict", template, ("<s>", "<e>"))))
    assert builder.glue([]) == []
    with pytest.raises(InvalidValue, match="empty"):
        builder.follow_up([Message("user", "")], tip_ids=[])
