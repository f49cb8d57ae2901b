from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from chatrt.bench.prompts import (
    KINDS,
    Prompt,
    bundled_conversations,
    bundled_prompts,
    load_conversations,
    load_prompts,
)
from chatrt.errors import InvalidValue
from chatrt.text.messages import Message

if TYPE_CHECKING:
    from pathlib import Path

_SHARE_GPT = [
    {
        "id": "a_0",
        "conversations": [
            {"from": "gpt", "value": "Welcome."},
            {"from": "human", "value": " \n"},
            {"from": "human", "value": "first"},
            {"from": "gpt", "value": "answer"},
            {"from": "human", "value": "second"},
        ],
    },
    {"id": "b_0", "conversations": [{"from": "gpt", "value": "alone"}]},
    {"id": "c_0", "conversations": [{"from": "user", "value": "third"}], "model": "unknown"},
    {"id": "a_0", "conversations": [{"from": "human", "value": "an id once more"}]},
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prompts"


def _refusal(file: Path, text: str | bytes) -> str:
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(InvalidValue) as caught:
        load_prompts(file)
    assert str(file) in caught.value.message
    return caught.value.message.removeprefix(str(file))


def test_sixteen_prompts_of_each_of_eight_kinds_come_with_the_package() -> None:
    counts = Counter(prompt.kind for prompt in bundled_prompts())
    assert counts == dict.fromkeys(KINDS, 16)
    assert len(KINDS) == 8


def test_bundled_ids_name_the_kind_and_no_id_or_text_comes_twice() -> None:
    prompts = bundled_prompts()
    assert {prompt.id for prompt in prompts} == {
        f"{kind}-{number:02d}" for kind in KINDS for number in range(1, 17)
    }
    assert len({prompt.text.casefold().strip() for prompt in prompts}) == len(prompts)


def test_bundled_prompts_are_of_the_lengths_that_people_type() -> None:
    lengths = sorted(len(prompt.text.split()) for prompt in bundled_prompts())
    assert lengths[-1] <= 150
    assert lengths[len(lengths) // 4] <= 15
    assert lengths[-len(lengths) // 8] >= 40
    assert all(prompt.text == prompt.text.strip() for prompt in bundled_prompts())


def test_a_quarter_of_the_bundled_prompts_are_later_turns_of_whole_exchanges() -> None:
    later = [prompt for prompt in bundled_prompts() if prompt.history]
    assert len(later) == 32
    for prompt in later:
        roles = [message.role for message in prompt.history]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(message.content.strip() for message in prompt.history)
    assert {prompt.kind for prompt in later} == set(KINDS)


def test_any_first_part_of_the_bundled_prompts_is_balanced() -> None:
    prompts = bundled_prompts()
    for end in range(1, len(prompts) + 1):
        counts = Counter(prompt.kind for prompt in prompts[:end])
        assert max(counts.values()) - min(counts[kind] for kind in KINDS) <= 1


def test_kinds_and_numbers_of_bundled_prompts_can_be_chosen() -> None:
    chosen = bundled_prompts(kinds=["maths", "code"], per_kind=2)
    assert [prompt.id for prompt in chosen] == ["code-01", "maths-01", "code-02", "maths-02"]
    assert len(bundled_prompts(per_kind=99)) == 128
    assert bundled_prompts(kinds=[]) == ()


def test_unknown_kinds_and_impossible_numbers_are_refused() -> None:
    with pytest.raises(InvalidValue, match="kind is 'poetry', it must be one of casual, facts"):
        bundled_prompts(kinds=["poetry"])
    with pytest.raises(InvalidValue, match="per_kind is 0, it must be at least 1"):
        bundled_prompts(per_kind=0)


def test_a_file_of_our_own_form_keeps_its_order_kinds_and_histories(file: Path) -> None:
    history = [{"role": "user", "text": "hei"}, {"role": "assistant", "text": "Hei på deg!"}]
    rows = [
        {"id": "b", "kind": "norsk", "history": history, "text": "og så?\nja"},
        {"id": "a", "kind": "other", "text": "a line\u2028in one"},
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    file.write_text("\ufeff" + "\r\n\r\n".join(lines) + "\n", encoding="utf-8")
    assert load_prompts(file) == (
        Prompt(
            *("b", "norsk", "og så?\nja"),
            (Message("user", "hei"), Message("assistant", "Hei på deg!")),
        ),
        Prompt("a", "other", "a line\u2028in one"),
    )


def test_of_an_mt_bench_file_the_first_turns_are_taken(file: Path) -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["one", "two"]},
        {"question_id": 82, "category": "math", "turns": ["three"], "reference": ["9"]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert load_prompts(file) == (Prompt("81", "writing", "one"), Prompt("82", "math", "three"))


def test_of_a_sharegpt_file_the_first_messages_of_the_human_are_taken(file: Path) -> None:
    file.write_text(json.dumps(_SHARE_GPT, indent=2), encoding="utf-8")
    expected = (Prompt("a_0", "sharegpt", "first"), Prompt("c_0", "sharegpt", "third"))
    assert load_prompts(file) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('\n{"id": "a", "kind": "b"}', ", line 2: Object missing required field `text`"),
        (
            '{"id": "a", "kind": 3, "text": "c"}',
            ", line 1: Expected `str`, got `int` - at `$.kind`",
        ),
        ('{"id": "a", "kind": "b", "text": "c"', ", line 1: Input data was truncated"),
        ('{"id": "a", "kind": "b", "text": " "}', ", line 1: the prompt's text is empty"),
        ('"a text"', ", line 1: Expected `object`, got `str`"),
        (
            '{"question_id": 1, "category": "b", "turns": []}',
            ", line 1: the prompt's text is empty",
        ),
        ('[{"id": "a", "conversations": []}, 3]', ", entry 2: Expected `object`, got `int`"),
        ("[", ": Input data was truncated"),
        ('[{"id": "a", "conversations": []}]', " holds no prompt"),
        ("\n \n", " holds no prompt"),
    ],
)
def test_what_is_wrong_is_said_with_the_file_and_the_line(
    file: Path, text: str, message: str
) -> None:
    assert _refusal(file, text) == message


def test_a_role_that_no_template_knows_is_refused_with_its_line(file: Path) -> None:
    history = [{"role": "narrator", "text": "b"}]
    line = json.dumps({"id": "a", "kind": "b", "text": "c", "history": history})
    assert _refusal(file, line).startswith(", line 1: role is 'narrator', it must be one of system")


def test_bytes_that_are_not_utf_8_are_refused_with_their_line(file: Path) -> None:
    message = _refusal(file, b'{"id": "a", "kind": "b", "text": "\xff\xfe"}')
    assert message.startswith(", line 1: ")


def test_an_id_that_comes_twice_is_refused_by_name(file: Path) -> None:
    line = '{"id": "a", "kind": "b", "text": "c"}\n'
    assert _refusal(file, line * 3) == " has 3 prompts with the id 'a'"


def test_a_file_that_is_not_there_is_refused_by_name(file: Path) -> None:
    with pytest.raises(InvalidValue, match="prompts cannot be read: No such file"):
        load_prompts(file)


def test_bundled_conversations_say_what_their_persons_say_those_of_several_turns_first() -> None:
    conversations = bundled_conversations()
    lengths = [len(conversation.texts) for conversation in conversations]
    assert lengths == sorted(lengths, reverse=True)
    assert sum(length > 1 for length in lengths) == 32
    assert {each.prompt for each in conversations} == set(bundled_prompts())
    for conversation in conversations:
        prompt = conversation.prompt
        before = [message.content for message in prompt.history if message.role == "user"]
        assert conversation.texts == (*before, prompt.text)


def test_conversations_of_our_own_form_are_the_persons_messages_in_order(file: Path) -> None:
    history = [
        {"role": "system", "text": "be brief"},
        {"role": "user", "text": "hei"},
        {"role": "assistant", "text": "Hei på deg!"},
    ]
    rows = [
        {"id": "a", "kind": "norsk", "history": history, "text": "og så?"},
        {"id": "b", "kind": "norsk", "text": "alene"},
    ]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert [each.texts for each in load_conversations(file)] == [("hei", "og så?"), ("alene",)]


def test_conversations_of_an_mt_bench_file_have_all_their_turns(file: Path) -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["one", "two"]},
        {"question_id": 82, "category": "math", "turns": ["three", " "]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert [each.texts for each in load_conversations(file)] == [("one", "two"), ("three",)]


def test_conversations_of_a_sharegpt_file_are_what_the_human_says(file: Path) -> None:
    file.write_text(json.dumps(_SHARE_GPT), encoding="utf-8")
    assert [each.texts for each in load_conversations(file)] == [("first", "second"), ("third",)]
    assert [each.prompt.id for each in load_conversations(file)] == ["a_0", "c_0"]


def test_a_bad_line_of_a_file_of_conversations_is_said_with_its_number(file: Path) -> None:
    good = json.dumps({"question_id": 81, "category": "writing", "turns": ["one", "two"]})
    file.write_text(f"{good}\n{good[:-3]}\n", encoding="utf-8")
    with pytest.raises(InvalidValue, match=r"prompts, line 2: "):
        load_conversations(file)


def test_prompts_are_read_without_torch() -> None:
    code = (
        "import sys; from chatrt.bench.prompts import bundled_prompts; bundled_prompts();"
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
