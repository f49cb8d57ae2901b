"""The tokenizer: loading, encoding, bytes, special and end-of-turn tokens."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatrt.errors import InvalidValue, ModelFileError, UnsupportedModel
from chatrt.testing.tokenizer import (
    CHATML,
    IM_END,
    IM_START,
    tiny_sentencepiece_tokenizer,
    tiny_tokenizer,
)
from chatrt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_sentencepiece_tokenizer(tmp_path_factory.mktemp("sentencepiece"))


def _edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: v for name, v in config.items() if v is not None}))


@given(text=st.text(max_size=30))
def test_any_text_comes_back_from_its_ids(tiny: Tokenizer, text: str) -> None:
    ids = tiny.encode(text)
    assert tiny.decode(ids) == text
    assert b"".join(map(tiny.token_bytes, ids)) == text.encode()


def test_special_tokens_in_a_text_become_their_ids_and_are_not_shown(tiny: Tokenizer) -> None:
    ids = tiny.encode(f"{IM_START}hello{IM_END}")
    assert [tiny.token(i) for i in ids] == [IM_START, "hello", IM_END]
    assert tiny.decode(ids) == "hello"
    assert tiny.decode(ids, skip_special=False) == f"{IM_START}hello{IM_END}"
    assert tiny.token_bytes(ids[0]) == IM_START.encode()
    assert tiny.token_bytes(ids[0], skip_special=True) == b""


def test_lone_surrogates_are_replaced_and_pairs_joined(tiny: Tokenizer) -> None:
    assert tiny.decode(tiny.encode("a\ud83c")) == "a\ufffd"
    assert tiny.decode(tiny.encode("\ud83c\udf89\udf89")) == "🎉\ufffd"


def test_ids_outside_the_vocabulary_have_no_bytes_and_no_name(tiny: Tokenizer) -> None:
    assert tiny.token_bytes(tiny.vocab_size) == b""
    with pytest.raises(InvalidValue, match=f"id is {tiny.vocab_size}, .* {tiny.vocab_size} tokens"):
        tiny.token(tiny.vocab_size)
    with pytest.raises(InvalidValue, match="id is -1"):
        tiny.token(-1)


def test_names_and_ids_agree(tiny: Tokenizer) -> None:
    assert all(tiny.id_of(tiny.token(i)) == i for i in range(tiny.vocab_size))
    assert tiny.id_of("no such token") is None
    assert tiny.bos_id == tiny.id_of(IM_START)


def test_the_ends_of_an_answer_are_the_given_the_own_and_those_of_the_template(
    tmp_path: Path,
) -> None:
    specials = ("<s>", "</s>", IM_START, IM_END, "<|eot_id|>")
    tokenizer = tiny_tokenizer(tmp_path, specials=specials)
    own = {tokenizer.id_of("</s>"), tokenizer.id_of(IM_END)}
    assert tokenizer.eos_token_ids == own
    assert Tokenizer.load(tmp_path, eos_token_ids=[7]).eos_token_ids == {*own, 7}


def test_encoding_a_large_text_lets_other_threads_run(tiny: Tokenizer) -> None:
    worker = threading.Thread(target=tiny.encode, args=["hello world 日本 " * 60_000])
    worker.start()
    num_ticks = 0
    while worker.is_alive():
        time.sleep(0.001)
        num_ticks += 1
    assert num_ticks > 20


@pytest.mark.parametrize(
    ("typed", "num_fixed_chars", "expected"),
    [
        ("hello world hel", 0, "hello world"),  # the last word goes
        ("hello world", 0, ""),  # at least two tokens go
        ("hello world", 5, "hello"),  # but not the fixed part
        ("", 0, ""),
        ("x" * 100, 0, "x" * 92),  # at most eight tokens go
    ],
)
def test_what_further_typing_may_change_is_taken_back(
    tiny: Tokenizer, typed: str, num_fixed_chars: int, expected: str
) -> None:
    assert tiny.decode(tiny.encode_stable(typed, num_fixed_chars=num_fixed_chars)) == expected


def test_sentencepiece_bytes_are_exact(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("hello 日")
    assert b"".join(map(sentencepiece.token_bytes, ids)) == " hello 日".encode()
    assert sentencepiece.decode(ids) == "hello 日"


def test_a_template_is_found_by_name_or_in_its_own_file(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    _edit_config(tmp_path, chat_template=named)
    assert Tokenizer.load(tmp_path).template.source == "yes"
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert Tokenizer.load(tmp_path).template.source == CHATML


def test_a_model_without_a_template_loads_but_cannot_be_chatted_with(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    _edit_config(tmp_path, chat_template=None)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    with pytest.raises(UnsupportedModel, match="no chat template"):
        _ = tokenizer.template


def test_named_tokens_are_special_but_never_enlarge_the_vocabulary(tmp_path: Path) -> None:
    vocab_size = tiny_tokenizer(tmp_path).vocab_size
    _edit_config(tmp_path, pad_token="hello", unk_token={"content": "<nowhere>"})
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == vocab_size
    assert tokenizer.id_of("hello") in tokenizer.special_ids


def test_a_folder_without_a_configuration_is_enough_to_encode(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.bos_id is None
    assert not tokenizer.eos_token_ids


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "there is no tokenizer.json"),
        ("tokenizer.json", "{", "cannot be read"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[]", "holds a list, it must hold an object"),
    ],
)
def test_missing_and_broken_files_are_named(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    tiny_tokenizer(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.load(tmp_path)


def test_the_text_layer_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, chatrt.text.prompt, chatrt.text.detokenizer, chatrt.text.stop;"
        "print({'torch', 'transformers', 'triton'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
