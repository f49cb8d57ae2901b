"""How a vocabulary spells bytes: GPT-2's byte alphabet, or sentencepiece's marks.

Knows: the decoders of `tokenizer.json`. Does not know: a vocabulary, special tokens.
Invariant: the bytes of a text are the bytes of its tokens, joined; only the first character of a
sentencepiece text may be a space that is not meant (`drops_leading_space`).
Source: GPT-2's encoder (byte alphabet); sentencepiece (U+2581 for a space, `<0x0A>` for a byte).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chatrt.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Spelling:
    """The bytes that a token contributes, and whether a text's first space is to be dropped."""

    token_bytes: Callable[[str], bytes]
    drops_leading_space: bool


def byte_alphabet() -> dict[int, str]:
    """The character with which byte-level vocabularies write each of the 256 bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {byte: chr(byte) for byte in printable}
    alphabet.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return alphabet


def spelling_of(decoder_json: bytes | str | None) -> Spelling:
    """The spelling that a `tokenizer.json` decoder describes.

    Raises:
        UnsupportedModel: The decoder is none of ByteLevel, Metaspace and a ByteFallback sequence.
    """
    decoder: dict[str, Any] = json.loads(decoder_json) if decoder_json else {"type": "none"}
    steps = list(_steps(decoder))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return Spelling(_byte_level(byte_alphabet()), drops_leading_space=False)
    if kinds & {"Metaspace", "ByteFallback"}:
        return Spelling(_sentencepiece, drops_leading_space=any(map(_drops_space, steps)))
    raise UnsupportedModel(
        f"the tokenizer's decoder is {decoder['type']}; ByteLevel, Metaspace and ByteFallback are"
        " supported"
    )


def _steps(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder


def _drops_space(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Strip":
        return bool(step["content"] == " " and step["start"] > 0)
    return bool(step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")


def _byte_level(alphabet: Mapping[int, str]) -> Callable[[str], bytes]:
    byte_of = {character: byte for byte, character in alphabet.items()}

    def token_bytes(token: str) -> bytes:
        # a token with any other character was added as plain text
        if all(character in byte_of for character in token):
            return bytes(byte_of[character] for character in token)
        return token.encode()

    return token_bytes


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte:
        return bytes.fromhex(byte[1])
    return token.replace(_SPACE_MARK, " ").encode()
