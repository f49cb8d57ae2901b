"""Who drafts: what the settings mean, where a head or draft model comes from, how it is made.

Knows: the drafters, the shipped heads, draft models. Does not know: engines, depth control.
Invariant: a head drafts for the weights that it was trained on, a model for a target with the same
tokens; anything else is refused by name, except by `auto`, which goes on with n-grams.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from chatrt.batch import BatchBuilder
from chatrt.errors import ModelFileError, SettingsError
from chatrt.kvcache import KVCache
from chatrt.models.decoder import Decoder
from chatrt.models.files import fingerprint
from chatrt.models.loader import load_model, read_config
from chatrt.models.quantize import load_quantization
from chatrt.models.sources import fetch, resolve
from chatrt.text.tokenizer import Tokenizer
from chatrt_drafts.auto import AutoDrafter
from chatrt_drafts.draft_model import ModelDrafter
from chatrt_drafts.head import HeadDrafter
from chatrt_drafts.head_file import FILE_NAME, HeadFile
from chatrt_drafts.head_network import HeadNetwork, prepare_weights
from chatrt_drafts.native_chains import find_chains
from chatrt_drafts.ngram import NgramDrafter
from chatrt_drafts.vocabulary import require_same_vocabulary

if TYPE_CHECKING:
    from chatrt.cli.executor import Executor
    from chatrt.drafter import Drafter
    from chatrt.engine import Target
    from chatrt.models.config import ModelConfig
    from chatrt.models.files import ModelFiles
    from chatrt.settings import Settings

_WEIGHTS = "weights"  # of package chatrt_drafts
_NUM_SLOTS = 2048  # sessions whose last feature is remembered


@dataclass(frozen=True, slots=True)
class Draft:
    """What drafts besides n-grams: a trained head, the files of a draft model, or neither."""

    head: HeadFile | None = None
    model: ModelFiles | None = None

    @property
    def first_rows(self) -> torch.Tensor | None:
        """Rows of the target's head that are wanted together, int64, most frequent first."""
        return None if self.head is None else self.head.token_ids.to(torch.int64)

    @property
    def fingerprint(self) -> str:
        """What tells a head's keys and values from another's; empty without a head."""
        if self.head is None:
            return ""
        digest = hashlib.sha256()
        for _, tensor in sorted(self.head.tensors.items()):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:32]

    def configs(self, target: ModelConfig) -> tuple[ModelConfig, ...]:
        """Whose keys and values share the target's pages."""
        if self.model is not None:
            return (read_config(self.model),)
        return () if self.head is None else (replace(target, num_layers=1),)


def describe_drafts(settings: Settings, draft: Draft) -> str:
    """Who will draft, in words."""
    if settings.speculation == "off":
        return "none"
    if draft.head is not None:
        other = f"a head trained for {draft.head.target}"
    elif draft.model is not None:
        other = f"the draft model {draft.model.name}"
    else:
        return "n-grams"
    repeats = ", n-grams where text repeats itself" if settings.speculation == "auto" else ""
    return other + repeats


def find_draft(settings: Settings, files: ModelFiles, cache_dir: Path) -> Draft:
    """What the settings mean for a target's files; a draft model is fetched if need be.

    Raises:
        SettingsError: A head or a draft model is asked for, and there is none.
        ModelFileError: The head that `draft` names belongs to other weights, or cannot be read.
    """
    wanted = settings.speculation
    if wanted in ("off", "ngram"):
        return Draft()
    if settings.draft is not None:
        folder = Path(settings.draft).expanduser()
        if wanted != "model" and (folder / FILE_NAME).is_file():
            return Draft(head=_own_head(folder / FILE_NAME, files))
        if wanted == "head":
            raise SettingsError(
                f"speculation is head, and {folder} has no {FILE_NAME}; `chatrt train-draft` "
                "makes one",
                param="draft",
            )
        source = resolve(settings.draft, cache_dir=cache_dir)
        return Draft(model=fetch(source, cache_dir=cache_dir, progress=_no_progress))
    if wanted == "model":
        raise SettingsError("speculation is model, and draft names no draft model", param="draft")
    head = _shipped_head(files)
    if head is None and wanted == "head":
        raise SettingsError(
            f"speculation is head, and none is shipped for {files.name}; `chatrt train-draft "
            f"{files.name} --out DIR` makes one, to be named by draft",
            param="draft",
        )
    return Draft(head=head)


def make_drafter(
    settings: Settings, draft: Draft, target: Target, executor: Executor
) -> Drafter | None:
    """The drafter of a loaded target; None with speculation off."""
    if settings.speculation == "off":
        return None
    other: Drafter
    if draft.head is not None:
        other = _head_drafter(settings, draft.head, target, executor)
    elif draft.model is not None:
        other = _model_drafter(settings, draft.model, target, executor)
    else:
        return _ngram_drafter(settings)
    return AutoDrafter(_ngram_drafter(settings), other) if settings.speculation == "auto" else other


def _ngram_drafter(settings: Settings) -> NgramDrafter:
    """It keeps indexes of those that decode at once, and of as many that may come back."""
    return NgramDrafter(max_sessions=2 * settings.max_num_seqs)


def _own_head(path: Path, files: ModelFiles) -> HeadFile:
    head = HeadFile.load(path)
    head.require_target(files.name, fingerprint(files.weight_files()))
    head.require_fit(files.name, read_config(files))
    return head


def _shipped_head(files: ModelFiles) -> HeadFile | None:
    found = fingerprint(files.weight_files())
    with resources.as_file(resources.files("chatrt_drafts") / _WEIGHTS) as folder:
        for path in sorted(folder.glob("*.safetensors")):
            head = HeadFile.load(path)
            if head.fingerprint == found:
                return head
    return None


def _head_drafter(
    settings: Settings, head: HeadFile, target: Target, executor: Executor
) -> HeadDrafter:
    decoder, machine = target.decoder, executor.machine
    config = decoder.config
    known = head.token_ids.to(torch.int64)
    largest, size = int(known.max()), target.vocab_size
    if largest >= size:
        raise ModelFileError(f"the draft head drafts token {largest}, the model has {size}")
    quantize = load_quantization(settings.quantize, native_kernels=machine.native)
    weights = prepare_weights(head, decoder, executor.ops, quantize.layers)
    kv = _pages_like(target, replace(config, num_layers=1), executor)
    network = HeadNetwork(
        weights, head.feature_layers, decoder, executor.ops, kv, num_slots=_NUM_SLOTS
    )
    chains = find_chains(network, kv, known, _batches_like(target, machine.device))
    return HeadDrafter(network, kv, chains)


def _model_drafter(
    settings: Settings, files: ModelFiles, target: Target, executor: Executor
) -> ModelDrafter:
    machine, ops = executor.machine, executor.ops
    quantize = load_quantization(settings.quantize, native_kernels=machine.native)
    model = load_model(files, ops, device=machine.device, dtype=machine.dtype, quantize=quantize)
    tokenizer = Tokenizer.load(files.tokenizer_dir, eos_token_ids=model.config.eos_token_ids)
    require_same_vocabulary(target.tokenizer, tokenizer)
    max_positions = target.decoder.rope.shape[0]
    decoder = Decoder(
        model.config,
        model.weights,
        ops,
        max_rows=target.batches.max_rows,
        max_positions=max_positions,
        device=machine.device,
        dtype=machine.dtype,
    )
    return ModelDrafter(
        decoder,
        _pages_like(target, model.config, executor),
        _batches_like(target, machine.device),
        vocab_size=min(target.vocab_size, model.config.vocab_size, tokenizer.vocab_size),
        max_context=min(model.config.max_context, max_positions),
    )


def _pages_like(target: Target, config: ModelConfig, executor: Executor) -> KVCache:
    """Pages under the target's ids, for keys and values of another shape."""
    kv = KVCache.allocate(
        num_layers=config.num_layers,
        num_pages=target.kv.num_pages,
        page_size=target.kv.page_size,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=executor.machine.draft_kv_dtype,
        device=executor.machine.device,
        layout=executor.ops.kv_layout,
    )
    if executor.page_moves is not None:
        kv.move_pages_by(executor.page_moves)
    return kv


def _no_progress(done_bytes: int, total_bytes: int | None, what: str) -> None:
    """A draft model's download is not shown."""


def _batches_like(target: Target, device: torch.device) -> BatchBuilder:
    """A builder for as many sequences as the target's, one row each and more."""
    batches = target.batches
    return BatchBuilder(
        batches.max_rows,
        batches.max_sequences,
        batches.max_pages_per_sequence,
        target.kv.page_size,
        device,
    )
