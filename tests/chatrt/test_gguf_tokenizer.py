"""The tokenizer inside a GGUF file: converted once, right to the token."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from gguf import GGUFWriter, TokenType

from chatrt.errors import ModelFileError, UnsupportedModel
from chatrt.models.gguf_tokenizer import convert
from chatrt.testing.tokenizer import CHATML
from chatrt.text.messages import Message
from chatrt.text.prompt import PromptBuilder
from chatrt.text.spelling import byte_alphabet
from chatrt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from chatrt.models.files import ModelFiles

_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_MERGES = ["Ġ Ġ", "Ġ 1", "1 2", "12 3", "123 4", "h i"]


def _write_gguf(path: Path, *, pre: str | None = "smollm", model: str = "gpt2") -> Path:
    tokens = [*_SPECIALS, *byte_alphabet().values(), *(m.replace(" ", "") for m in _MERGES)]
    writer = GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    plain = [TokenType.NORMAL] * (len(tokens) - len(_SPECIALS))
    writer.add_token_types([TokenType.CONTROL] * len(_SPECIALS) + plain)
    writer.add_token_merges(_MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token(i) for i in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["ĠĠ", "1", "2", "3", "4"]),
        ("qwen2", ["Ġ", "Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", ["Ġ", "Ġ", "123", "4"]),
        ("gpt-2", ["Ġ", "Ġ1", "2", "3", "4"]),
        (None, ["Ġ", "Ġ1", "2", "3", "4"]),
    ],
)
def test_words_are_cut_as_the_vocabulary_was_trained(
    tmp_path: Path, pre: str | None, expected: list[str]
) -> None:
    convert(_write_gguf(tmp_path / "m.gguf", pre=pre), tmp_path / "out")
    assert _pieces(Tokenizer.load(tmp_path / "out"), "  1234") == expected


def test_template_and_special_tokens_come_along(tmp_path: Path) -> None:
    convert(_write_gguf(tmp_path / "m.gguf"), tmp_path / "deep" / "out")
    tokenizer = Tokenizer.load(tmp_path / "deep" / "out")
    assert tokenizer.template.source == CHATML
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.bos_id == 1
    assert _pieces(tokenizer, "<|im_end|>hi") == ["<|im_end|>", "hi"]
    assert tokenizer.vocab_size == 256 + len(_SPECIALS) + len(_MERGES)


def test_a_sentencepiece_vocabulary_is_converted_as_it_is(tmp_path: Path) -> None:
    letters = ["▁", "h", "i", "▁h", "▁hi"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    writer = GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    writer.add_token_types(kinds + [TokenType.NORMAL] * len(letters))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.load(tmp_path / "out")
    assert _pieces(tokenizer, "hi hi\n</s>") == ["▁hi", "▁hi", "<0x0A>", "</s>"]
    assert tokenizer.decode(tokenizer.encode("hi hi\n</s>")) == "hi hi\n"
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.special_ids == {0, 1, 2}


def test_an_unknown_pre_tokenizer_is_warned_about_and_cut_by_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="chatrt"):
        convert(_write_gguf(tmp_path / "m.gguf", pre="novel"), tmp_path / "out")
    assert "unknown pre-tokenizer 'novel'" in caplog.text
    assert _pieces(Tokenizer.load(tmp_path / "out"), " 12") == ["Ġ1", "2"]


def test_converting_again_replaces_the_folder_and_leaves_nothing_else(tmp_path: Path) -> None:
    source = _write_gguf(tmp_path / "m.gguf")
    convert(source, tmp_path / "cache" / "out")
    (tmp_path / "cache" / "out" / "tokenizer.json").write_text("broken")
    convert(source, tmp_path / "cache" / "out")
    assert Tokenizer.load(tmp_path / "cache" / "out").vocab_size
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["out"]


def test_a_failed_conversion_leaves_nothing_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> str:
        raise OSError(28, "No space left on device")

    source = _write_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr(json, "dumps", refuse)
    with pytest.raises(OSError, match="No space left"):
        convert(source, tmp_path / "cache" / "out")
    assert list((tmp_path / "cache").iterdir()) == []


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no file"):
        convert(tmp_path / "missing.gguf", tmp_path / "out")
    (tmp_path / "text.gguf").write_text("not a model at all, but long enough to be read")
    with pytest.raises(ModelFileError, match=r"text\.gguf is not a readable GGUF file"):
        convert(tmp_path / "text.gguf", tmp_path / "out")
    whole = _write_gguf(tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFileError, match=r"cut\.gguf is not a readable GGUF file"):
        convert(tmp_path / "cut.gguf", tmp_path / "out")
    with pytest.raises(UnsupportedModel, match="kind 'bert'; gpt2 and llama are supported"):
        convert(_write_gguf(tmp_path / "bert.gguf", model="bert"), tmp_path / "out")


@pytest.fixture
def default_folder(default_model_files: ModelFiles) -> Path:
    """Converted once for all tests, by the same call."""
    return default_model_files.tokenizer_dir


@pytest.mark.model
@pytest.mark.slow
def test_the_default_models_tokenizer_loads_quickly(default_folder: Path) -> None:
    scale = float(os.environ.get("CHATRT_TEST_TIME_SCALE", "1"))
    times_s = []
    for _ in range(3):
        start = time.perf_counter()
        Tokenizer.load(default_folder)
        times_s.append(time.perf_counter() - start)
    assert min(times_s) < 0.3 * scale


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello world", ["Hello", "Ġworld"]),
        (" 1234", ["Ġ", "1", "2", "3", "4"]),
        ("  1", ["ĠĠ", "1"]),
    ],
)
def test_the_default_models_words_are_cut_at_each_digit(
    default_folder: Path, text: str, expected: list[str]
) -> None:
    assert _pieces(Tokenizer.load(default_folder), text) == expected


@pytest.mark.model
@pytest.mark.slow
def test_the_default_models_prompts_equal_those_of_transformers(
    default_gguf: Path, default_folder: Path
) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(
        str(default_gguf.parent), gguf_file=default_gguf.name, local_files_only=True
    )
    ours = Tokenizer.load(default_folder)
    chat = [
        Message("user", "What is the capital of France? 日本 🎉"),
        Message("assistant", "Paris.\n\n```py\n    print('x')\n```"),
        Message("user", "And of the 2 others, in 1789?"),
    ]
    messages: list[dict[str, str]] = [{"role": m.role, "content": m.content} for m in chat]
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    builder = PromptBuilder(ours)
    assert builder.first_prompt(chat) == ids
    assert ours.eos_token_ids == {theirs.eos_token_id}
    tip = builder.first_prompt(chat[:1]) + ours.encode(chat[1].content + "<|im_end|>")
    assert tip + builder.follow_up(chat[2:], tip_ids=tip) == ids
    answer = ours.encode(chat[1].content)
    assert ours.decode(answer) == theirs.decode(answer) == chat[1].content
