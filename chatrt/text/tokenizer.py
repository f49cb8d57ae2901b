"""A model's tokenizer: text to ids, ids to their exact bytes.

Knows: a folder in the Hugging Face layout, the `tokenizers` library. Does not know: messages,
streams, GGUF.
Invariant: `encode` lets other threads run (it releases the GIL); ids outside the vocabulary, which
a model with a padded output layer can produce, have no bytes.
Cost: loading takes what parsing `tokenizer.json` takes, 0.1 s for 50,000 tokens.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import tokenizers

from chatrt.errors import InvalidValue, ModelFileError, UnsupportedModel
from chatrt.text.spelling import spelling_of
from chatrt.text.template import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
# Ends of a turn that a template may write without the tokenizer naming them as its end of text.
_END_OF_TURN_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
# How much of a half-typed text's end is taken back: at least this many tokens, and the last word,
# but of scripts without spaces not a whole paragraph.
_MIN_UNSTABLE_TOKENS = 2
_MAX_UNSTABLE_TOKENS = 8


# Stands for text in front, where a tokenizer treats the start of a text differently.
_ANCHOR = "\n"


class Tokenizer:
    """A loaded tokenizer, safe to share between threads. Made by `Tokenizer.load`.

    Attributes: `special_ids` are the tokens that are never shown; `eos_token_ids` end an answer;
    `bos_id` is the first token of a text, where the model has one; `drops_leading_space` says that
    a text's first space is an artefact of the vocabulary.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        template_source: str | None,
        *,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self._backend = backend
        named = _named_tokens(config)
        # Named tokens are special even where `tokenizer.json` forgot to say so; but the vocabulary
        # must not grow past the model's.
        named_ids = {t: i for t in named.values() if (i := backend.token_to_id(t)) is not None}
        known = backend.get_added_tokens_decoder()
        backend.add_special_tokens(sorted(t for t, i in named_ids.items() if i not in known))
        added = backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        special_ids = (i for i, token in added.items() if token.special)
        self.special_ids = frozenset([*special_ids, *named_ids.values()])
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id = named_ids.get(named.get("bos_token", ""))
        ends = [end for end in _END_OF_TURN_TOKENS if end in (template_source or "")]
        own_ids = (backend.token_to_id(end) for end in [*ends, named.get("eos_token", "")])
        self.eos_token_ids = frozenset([*eos_token_ids, *(i for i in own_ids if i is not None)])
        decoder = backend.decoder
        self._spelling = spelling_of(decoder.__getstate__() if decoder is not None else None)
        self.drops_leading_space = self._spelling.drops_leading_space
        self._bytes_cache: dict[int, bytes] = {}
        start_ids = self.encode("x")
        self._prefixes_space = bool(start_ids) and self.token_bytes(start_ids[0])[:1] == b" "
        self._template = (
            None if template_source is None else ChatTemplate(template_source, special_tokens=named)
        )

    @classmethod
    def load(cls, folder: Path, *, eos_token_ids: Iterable[int] = ()) -> Tokenizer:
        """The tokenizer in `folder` (`tokenizer.json`, `tokenizer_config.json`, template).

        `eos_token_ids` are what the model's own configuration adds to the ends of an answer.

        Raises:
            ModelFileError: A file is missing or cannot be parsed.
            UnsupportedModel: The tokenizer is of a kind that is not served.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelFileError(f"there is no tokenizer.json in {folder}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for every fault of the file
            raise ModelFileError(f"{path} cannot be read: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        return cls(backend, config, _template_source(folder, config), eos_token_ids=eos_token_ids)

    @property
    def template(self) -> ChatTemplate:
        """The chat template.

        Raises:
            UnsupportedModel: The model has none.
        """
        if self._template is None:
            raise UnsupportedModel("the model has no chat template, so it cannot be chatted with")
        return self._template

    def encode(
        self, text: str, *, add_special_tokens: bool = False, behind: bool = False
    ) -> list[int]:
        """The ids of `text`; special tokens written in it become their ids.

        `behind` means that other text is in front of it: a tokenizer that puts a space before the
        start of a text does not do so then.
        """
        if behind and self._prefixes_space:
            ids, anchor_ids = self.encode(_ANCHOR + text), self.encode(_ANCHOR)
            if ids[: len(anchor_ids)] == anchor_ids:
                return ids[len(anchor_ids) :]
        return self._encode(text, add_special_tokens=add_special_tokens).ids

    def encode_stable(self, text: str, *, num_fixed_chars: int, behind: bool = False) -> list[int]:
        """The ids of `text` that stay as they are when more is typed behind it.

        The last word is taken back, since further letters may join it in other tokens; tokens that
        begin in the first `num_fixed_chars` characters are kept. `behind` as in `encode`.
        """
        if behind and self._prefixes_space:
            num_more = num_fixed_chars + len(_ANCHOR)
            ids = self.encode_stable(_ANCHOR + text, num_fixed_chars=num_more)
            anchor_ids = self.encode(_ANCHOR)
            if ids[: len(anchor_ids)] == anchor_ids:
                return ids[len(anchor_ids) :]
        # Asked token by token from the end: lists of all positions would hold the GIL for long.
        encoding = self._backend.encode_batch([_clean(text)], add_special_tokens=False)[0]
        num_tokens = len(encoding)
        num_unstable = 0
        while num_unstable < min(_MAX_UNSTABLE_TOKENS, num_tokens):
            index = num_tokens - 1 - num_unstable
            in_last_word = encoding.token_to_word(index) == encoding.token_to_word(num_tokens - 1)
            if num_unstable >= _MIN_UNSTABLE_TOKENS and not in_last_word:
                break
            span = encoding.token_to_chars(index)
            if span is None or span[0] < num_fixed_chars:
                break
            num_unstable += 1
        return encoding.ids[: num_tokens - num_unstable]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids` as one answer; broken UTF-8 becomes U+FFFD."""
        data = b"".join([self.token_bytes(i, skip_special=skip_special) for i in ids])
        text = data.decode(errors="replace")
        return text.removeprefix(" ") if self.drops_leading_space else text

    def token_bytes(self, token_id: int, *, skip_special: bool = False) -> bytes:
        """The exact bytes that a token contributes to a text; none for an unknown id.

        Added tokens, special ones included, contribute their own text; with `skip_special` a
        special token contributes nothing.
        """
        if skip_special and token_id in self.special_ids:
            return b""
        data = self._bytes_cache.get(token_id)
        if data is None:
            data = self._bytes_cache[token_id] = self._make_bytes(token_id)
        return data

    def token(self, token_id: int) -> str:
        """A token as the vocabulary spells it.

        Raises:
            InvalidValue: The vocabulary has no such id.
        """
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            raise InvalidValue(
                f"token id is {token_id}, the vocabulary has {self.vocab_size} tokens"
            )
        return token

    def id_of(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, if it has one."""
        return self._backend.token_to_id(token)

    def _encode(self, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
        # A batch of one: unlike `encode`, it does not hold the GIL while it works.
        batch = [_clean(text)]
        return self._backend.encode_batch_fast(batch, add_special_tokens=add_special_tokens)[0]

    def _make_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        return token.encode() if token_id in self._added_ids else self._spelling.token_bytes(token)


def _clean(text: str) -> str:
    """`text` without lone surrogates, which JSON can carry but UTF-8 and the tokenizer cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            named[name] = text
    return named


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return source if isinstance(source, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFileError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} holds a {type(value).__name__}, it must hold an object")
    return value
