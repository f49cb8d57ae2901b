"""Whether two tokenizers mean the same by the same ids.

Knows: tokenizers. Does not know: models, drafters, files.
Invariant: tokens are compared by the bytes that they stand for, special tokens included; how many
rows a model has for them, or a vocabulary behind its last token, says nothing.
Cost: once at load, a few tenths of a second for 50,000 tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatrt.errors import InvalidValue, ModelError

if TYPE_CHECKING:
    from chatrt.text.tokenizer import Tokenizer


def require_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Make sure that a draft model's ids can be taken for the target's.

    Fillers behind the last token of either are no difference: ids without bytes, or tokens that
    llama.cpp's converter names after their ids (`[PAD151936]`).

    Raises:
        ModelError: They differ; the message has the first id that does, both spellings, where
            either has the other's token, and both sizes.
    """
    for token_id in range(max(target.vocab_size, draft.vocab_size)):
        if _bytes(target, token_id) != _bytes(draft, token_id):
            raise ModelError(
                "the draft model has another vocabulary than the target: "
                f"id {token_id} is {_describe(target, token_id, draft)} in the target's "
                f"({target.vocab_size:,} tokens) and {_describe(draft, token_id, target)} in the "
                f"draft's ({draft.vocab_size:,} tokens)"
            )


def _bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    data = tokenizer.token_bytes(token_id)
    return b"" if data == f"[PAD{token_id}]".encode() else data


def _describe(tokenizer: Tokenizer, token_id: int, other: Tokenizer) -> str:
    """`'the' (there 278)`: a token's spelling, and its id in the other vocabulary if it has one."""
    try:
        token = tokenizer.token(token_id)
    except InvalidValue:
        return "no token"
    there = other.id_of(token)
    return repr(token) if there is None else f"{token!r} (there {there})"
