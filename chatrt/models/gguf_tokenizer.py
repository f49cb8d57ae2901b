"""Turns the tokenizer inside a GGUF file into `tokenizer.json` and `tokenizer_config.json`, once.

Knows: GGUF's tokenizer metadata, transformers' conversion and what it leaves out. Does not know:
weights (they are not read), where the result is kept.
Invariant: the folder appears whole or not at all; the vocabulary has the file's ids, no more.
Cost: several seconds, most of it importing transformers and rebuilding the vocabulary.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Regex, Tokenizer, pre_tokenizers

from chatrt.errors import ModelFileError, UnsupportedModel

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

_log = logging.getLogger(__name__)

_MODELS = ("gpt2", "llama")
_SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_FLAGS = {
    "add_bos_token": "tokenizer.ggml.add_bos_token",
    "add_eos_token": "tokenizer.ggml.add_eos_token",
}
# How words are cut before merging: part of the vocabulary's training, so these are facts, not
# choices. Llama 3 keeps up to three digits together, Qwen 2 each digit alone.
_WORDS_WITH_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def convert(gguf_path: Path, folder: Path) -> None:
    """Write the tokenizer of `gguf_path` into `folder`, atomically; what was there is replaced.

    Raises:
        ModelFileError: The file cannot be read, or holds no tokenizer.
        UnsupportedModel: The tokenizer is of a kind that is not served.
    """
    metadata = _read_metadata(gguf_path)
    backend = _convert_vocabulary(gguf_path)
    num_tokens = len(metadata["tokenizer.ggml.tokens"])
    if backend.get_vocab_size(with_added_tokens=True) > num_tokens:
        raise UnsupportedModel(
            f"the tokenizer of {gguf_path.name} converts to"
            f" {backend.get_vocab_size(with_added_tokens=True)} tokens, the file has {num_tokens}"
        )
    if metadata["tokenizer.ggml.model"] == "gpt2":
        _set_pre_tokenizer(backend, metadata.get("tokenizer.ggml.pre", "default"))
    _write(backend, _config(metadata), folder)


def _read_metadata(gguf_path: Path) -> dict[str, Any]:
    from gguf import GGUFReader  # slow to import, needed once

    if not gguf_path.is_file():
        raise ModelFileError(f"there is no file {gguf_path}")
    try:
        fields = GGUFReader(gguf_path).fields
        metadata = {
            name: field.contents()
            for name, field in fields.items()
            if name.startswith("tokenizer.") and not name.endswith((".scores", ".merges"))
        }
    except (ValueError, LookupError, OverflowError) as error:
        raise ModelFileError(f"{gguf_path} is not a readable GGUF file: {error}") from error
    model = metadata.get("tokenizer.ggml.model")
    if model is None or "tokenizer.ggml.tokens" not in metadata:
        raise ModelFileError(f"{gguf_path} holds no tokenizer")
    if model not in _MODELS:
        raise UnsupportedModel(
            f"the tokenizer of {gguf_path.name} is of the kind {model!r};"
            f" {' and '.join(_MODELS)} are supported"
        )
    return metadata


def _convert_vocabulary(gguf_path: Path) -> Tokenizer:
    # Seconds to import, needed once. Unlike AutoTokenizer it builds no model configuration.
    from transformers import PreTrainedTokenizerFast

    converted = PreTrainedTokenizerFast.from_pretrained(
        str(gguf_path.parent), gguf_file=gguf_path.name, local_files_only=True
    )
    backend = converted.backend_tokenizer
    assert isinstance(backend, Tokenizer)
    return backend


def _set_pre_tokenizer(backend: Tokenizer, name: str) -> None:
    known = _pre_tokenizer(name)
    if known is not None:
        backend.pre_tokenizer = known
    elif isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        # transformers set nothing more special than the default, so it does not know it either
        _log.warning("unknown pre-tokenizer %r: using the default, tokens may differ", name)


def _pre_tokenizer(name: str) -> PreTokenizer | None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in ("default", "gpt-2"):
        return byte_level
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    digit_runs = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}
    if name not in digit_runs:
        return None
    split = pre_tokenizers.Split(Regex(_WORDS_WITH_DIGITS % digit_runs[name]), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, bytes_only])


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in _SPECIAL_TOKENS.items():
        if key in metadata:
            config[name] = tokens[metadata[key]]
    config.update({name: metadata[key] for name, key in _FLAGS.items() if key in metadata})
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def _write(backend: Tokenizer, config: dict[str, Any], folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as workspace:
        fresh = Path(workspace) / "new"
        fresh.mkdir()
        backend.save(str(fresh / "tokenizer.json"))
        text = json.dumps(config, ensure_ascii=False, indent=2)
        (fresh / "tokenizer_config.json").write_text(text, encoding="utf-8")
        if folder.exists():
            os.replace(folder, Path(workspace) / "old")
        try:
            os.replace(fresh, folder)
        except OSError:
            # another process was quicker; it wrote the same
            if not (folder / "tokenizer.json").is_file():
                raise
