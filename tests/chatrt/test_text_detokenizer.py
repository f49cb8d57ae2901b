"""Token ids to text in pieces: nothing lost, nothing broken, nothing held too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from chatrt.testing.tokenizer import IM_END, tiny_sentencepiece_tokenizer, tiny_tokenizer
from chatrt.text.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from chatrt.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("byte_level")


@pytest.fixture(scope="module")
def byte_level(byte_level_folder: Path) -> Tokenizer:
    return tiny_tokenizer(byte_level_folder)


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sentencepiece")


@pytest.fixture(scope="module")
def sentencepiece(sentencepiece_folder: Path) -> Tokenizer:
    return tiny_sentencepiece_tokenizer(sentencepiece_folder)


def _stream(tokenizer: Tokenizer, ids: list[int], chunk: int = 1) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push(ids[i : i + chunk]) for i in range(0, len(ids), chunk)]
    return [*pieces, detokenizer.flush()]


@given(data=st.binary(max_size=40), chunk=st.integers(1, 5))
def test_any_bytes_in_any_split_give_the_text_of_all_bytes_at_once(
    byte_level: Tokenizer, data: bytes, chunk: int
) -> None:
    # ids 0 to 255 are the bytes themselves
    assert "".join(_stream(byte_level, list(data), chunk)) == data.decode(errors="replace")


@given(ids=st.lists(st.integers(0, 400), max_size=40), chunk=st.integers(1, 5))
def test_any_ids_in_any_split_give_the_decoded_text(
    byte_level: Tokenizer, sentencepiece: Tokenizer, ids: list[int], chunk: int
) -> None:
    for tokenizer in (byte_level, sentencepiece):
        assert "".join(_stream(tokenizer, ids, chunk)) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 272), max_size=40))
def test_byte_level_text_equals_the_librarys_own_decoding(
    byte_level: Tokenizer, byte_level_folder: Path, ids: list[int]
) -> None:
    backend = tokenizers.Tokenizer.from_file(str(byte_level_folder / "tokenizer.json"))
    assert "".join(_stream(byte_level, ids)) == backend.decode(ids)


@given(text=st.text(max_size=20))
def test_only_the_beginning_of_one_character_is_held(byte_level: Tokenizer, text: str) -> None:
    pieces = _stream(byte_level, list(text.encode()))
    shown = 0
    for num_bytes, piece in enumerate(pieces[:-1], start=1):
        shown += len(piece.encode())
        complete = text.encode()[:num_bytes].decode(errors="ignore")
        assert shown == len(complete.encode())
    assert pieces[-1] == ""


@pytest.mark.parametrize("text", ["日本語のテキスト", "👩‍👩‍👧 and 🎉", "naïve"])
def test_characters_cut_across_tokens_arrive_whole(byte_level: Tokenizer, text: str) -> None:
    pieces = _stream(byte_level, byte_level.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_special_tokens_contribute_nothing_even_inside_a_character(byte_level: Tokenizer) -> None:
    end = byte_level.id_of(IM_END)
    assert end is not None
    first, *rest = "é".encode()
    assert "".join(_stream(byte_level, [end, first, end, *rest, end])) == "é"


def test_a_cut_off_character_becomes_one_replacement_at_the_end(byte_level: Tokenizer) -> None:
    assert _stream(byte_level, [0x61, 0xF0, 0x9F, 0x8E]) == ["a", "", "", "", "\ufffd"]


@given(text=st.text(alphabet=" hello world日🎉\n", min_size=1, max_size=20))
def test_sentencepiece_text_equals_the_librarys_own_decoding(
    sentencepiece: Tokenizer, sentencepiece_folder: Path, text: str
) -> None:
    backend = tokenizers.Tokenizer.from_file(str(sentencepiece_folder / "tokenizer.json"))
    ids = sentencepiece.encode(text)
    assert "".join(_stream(sentencepiece, ids)) == backend.decode(ids) == text


def test_only_the_first_space_of_a_sentencepiece_text_is_dropped(sentencepiece: Tokenizer) -> None:
    space = sentencepiece.id_of("▁")
    end = sentencepiece.id_of("</s>")
    assert space is not None
    assert end is not None
    assert _stream(sentencepiece, [end, space, space, space]) == ["", "", " ", " ", ""]
