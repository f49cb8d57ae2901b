"""Vocabularies: the same bytes under the same ids, whatever the sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from chatrt.errors import ModelError
from chatrt.testing.tokenizer import IM_END, IM_START, tiny_tokenizer
from chatrt.text.tokenizer import Tokenizer
from chatrt_drafts.vocabulary import require_same_vocabulary

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def spelled(tokens: Sequence[str], *, as_pieces: bool = False) -> Tokenizer:
    """A tokenizer of exactly these tokens, ids in order, spelled like GPT-2's or Llama 2's."""
    backend = Backend(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.Metaspace() if as_pieces else decoders.ByteLevel()
    return Tokenizer(backend, {}, None)


def test_a_tokenizer_agrees_with_itself_and_with_a_copy(tmp_path: Path) -> None:
    one, other = tiny_tokenizer(tmp_path / "one"), tiny_tokenizer(tmp_path / "other")
    require_same_vocabulary(one, one)
    require_same_vocabulary(one, other)


def test_a_special_token_under_another_id_is_named_with_both_ids(tmp_path: Path) -> None:
    one = tiny_tokenizer(tmp_path / "one")
    other = tiny_tokenizer(tmp_path / "other", specials=(IM_END, IM_START))
    first = min(one.special_ids)
    with pytest.raises(ModelError) as caught:
        require_same_vocabulary(one, other)
    message = str(caught.value)
    assert f"id {first} is '{IM_START}' (there {first + 1})" in message
    assert f"and '{IM_END}' (there {first + 1})" in message


def test_a_token_that_the_draft_lacks_at_its_end_is_a_mismatch_with_both_sizes(
    tmp_path: Path,
) -> None:
    target = tiny_tokenizer(tmp_path / "one", specials=(IM_START, IM_END, "<|tool|>"))
    draft = tiny_tokenizer(tmp_path / "other")
    for one, other in ((target, draft), (draft, target)):
        with pytest.raises(ModelError, match=f"id {draft.vocab_size} is .*no token") as caught:
            require_same_vocabulary(one, other)
        message = str(caught.value)
        assert f"target's ({one.vocab_size} tokens)" in message
        assert f"draft's ({other.vocab_size} tokens)" in message


def test_the_first_differing_token_of_many_is_named() -> None:
    with pytest.raises(ModelError, match=r"id 1 is 'b' in .* and 'x' in "):
        require_same_vocabulary(spelled("abc"), spelled("axy"))


def test_fillers_behind_the_end_of_either_are_no_difference() -> None:
    plain, padded = spelled("ab"), spelled(["a", "b", "[PAD2]", "[PAD3]"])
    require_same_vocabulary(plain, padded)
    require_same_vocabulary(padded, plain)
    with pytest.raises(ModelError, match=r"id 2 is no token .* and '\[PAD3\]'"):
        require_same_vocabulary(plain, spelled(["a", "b", "[PAD3]"]))


def test_other_spellings_of_the_same_bytes_are_the_same_token() -> None:
    by_bytes = spelled(["a", "\u0120the"])
    require_same_vocabulary(by_bytes, spelled(["a", "\u2581the"], as_pieces=True))
    with pytest.raises(ModelError, match="id 1 is"):
        require_same_vocabulary(by_bytes, spelled(["a", "\u0120the"], as_pieces=True))
