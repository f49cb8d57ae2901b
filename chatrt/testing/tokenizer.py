"""Tiny tokenizers for tests: real files, no training, every text encodable.

Knows: the byte alphabet, sentencepiece's marks, a few merges, ChatML. Does not know: any model.
Invariant: ids 0 to 255 of the byte-level tokenizer are the bytes themselves, in order.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from chatrt.text.spelling import byte_alphabet
from chatrt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_SPACE_MARK = "\u2581"

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Each joins two tokens that exist: pairs of letters, words, line breaks, halves of characters.
_MERGES = (
    ("h", "e"),
    ("l", "l"),
    ("he", "ll"),
    ("hell", "o"),
    (" ", "w"),
    ("o", "r"),
    (" w", "or"),
    ("l", "d"),
    (" wor", "ld"),
    (" ", "t"),
    ("i", "n"),
    ("a", "n"),
    (" t", "he"),
    ("\n", "\n"),
)


def tiny_tokenizer(
    folder: Path, *, template: str = CHATML, specials: Sequence[str] = (IM_START, IM_END)
) -> Tokenizer:
    """Write a byte-level tokenizer into `folder` and load it.

    Its vocabulary: the 256 bytes, a few merges (`hello`, ` world`, ` the`, two line breaks, the
    first two bytes of most emoji), and `specials`, of which the first begins a text and the second
    ends it.
    """
    alphabet = byte_alphabet()

    def spell(text: bytes) -> str:
        return "".join(alphabet[byte] for byte in text)

    merges = [(spell(a.encode()), spell(b.encode())) for a, b in _MERGES]
    merges.append((spell(b"\xf0"), spell(b"\x9f")))
    vocab = {alphabet[byte]: byte for byte in range(256)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _save(backend, folder, template, specials)


def tiny_sentencepiece_tokenizer(
    folder: Path, *, template: str = CHATML, specials: Sequence[str] = ("<s>", "</s>")
) -> Tokenizer:
    """Write a tokenizer spelled like Llama 2's into `folder` and load it.

    Spaces are U+2581, one is put before each stretch of text, and characters outside the vocabulary
    fall back to byte tokens.
    """
    merges = [
        (a.replace(" ", _SPACE_MARK), b.replace(" ", _SPACE_MARK))
        for a, b in _MERGES
        if "\n" not in a
    ]
    tokens = ["<unk>", *specials, *(f"<0x{byte:02X}>" for byte in range(256)), _SPACE_MARK]
    tokens += [chr(code) for code in range(0x21, 0x7F)]
    tokens += [left + right for left, right in merges]
    vocab = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = Backend(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE_MARK), normalizers.Replace(" ", _SPACE_MARK)]
    )
    steps = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return _save(backend, folder, template, specials)


def _save(backend: Backend, folder: Path, template: str, specials: Sequence[str]) -> Tokenizer:
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": specials[0], "eos_token": specials[1], "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Tokenizer.load(folder)
