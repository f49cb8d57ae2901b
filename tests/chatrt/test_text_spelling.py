"""How vocabularies spell bytes."""

from __future__ import annotations

import pytest
from tokenizers import decoders

from chatrt.errors import UnsupportedModel
from chatrt.text.spelling import byte_alphabet, spelling_of


def test_the_byte_alphabet_is_one_visible_character_for_each_byte() -> None:
    alphabet = byte_alphabet()
    assert len(set(alphabet.values())) == 256
    assert (alphabet[0x20], alphabet[0x0A], alphabet[0x41]) == ("Ġ", "Ċ", "A")


def test_a_byte_level_token_is_its_bytes() -> None:
    spelling = spelling_of(decoders.ByteLevel().__getstate__())
    assert spelling.token_bytes("ĠðŁ") == b" \xf0\x9f"
    assert spelling.token_bytes("a b") == b"a b"
    assert not spelling.drops_leading_space


def test_a_sentencepiece_token_is_its_text_or_its_byte() -> None:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    spelling = spelling_of(decoders.Sequence(steps).__getstate__())
    assert spelling.token_bytes("▁née") == " née".encode()
    assert spelling.token_bytes("<0xE4>") == b"\xe4"
    assert not spelling.drops_leading_space


@pytest.mark.parametrize(
    ("decoder", "drops"),
    [
        (decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]), True),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 0, 1)]), False),
        (decoders.Metaspace(prepend_scheme="always"), True),
        (decoders.Metaspace(prepend_scheme="never"), False),
    ],
)
def test_the_decoder_says_whether_the_first_space_is_meant(
    decoder: decoders.Decoder, drops: bool
) -> None:
    assert spelling_of(decoder.__getstate__()).drops_leading_space is drops


@pytest.mark.parametrize("state", [None, decoders.WordPiece().__getstate__()])
def test_an_unknown_decoder_is_refused_by_name(state: bytes | None) -> None:
    name = "WordPiece" if state else "none"
    with pytest.raises(UnsupportedModel, match=f"decoder is {name}; ByteLevel"):
        spelling_of(state)
