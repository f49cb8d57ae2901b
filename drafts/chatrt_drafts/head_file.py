"""The file of a draft head: `head.safetensors`, and what must be true of one.

Knows: tensor names, shapes that depend on each other, dtypes, the facts in the file's metadata.
Does not know: how a head is run or trained, which target is loaded.
Invariant: a `HeadFile` that exists is whole: all tensors, in shapes that fit, distinct token ids.
Cost: the file is read once; 12 MB for the default model.
Source: safetensors; heads of the EAGLE line (arXiv 2401.15077, 2406.16858, 2503.01840).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from chatrt.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from chatrt.models.config import ModelConfig

FILE_NAME = "head.safetensors"
NORMS = ("attention_norm.weight", "mlp_norm.weight", "final_norm.weight")
_METADATA_KEY = "chatrt_head"
_VERSION = 1
_TOKEN_IDS = "token_ids"
# The tensors whose first size is one of the widths: hidden, query, key/value, intermediate.
_WIDTHS = ("final_norm.weight", "query.weight", "key.weight", "gate.weight")


@dataclass(frozen=True, slots=True)
class HeadFile:
    """A draft head as it is stored.

    `target` and `fingerprint` name the weights it was trained for. `feature_layers` are the 0-based
    layers behind which its features are taken. `token_ids` int32 `[n]` are the tokens it can
    draft, most frequent first. `tensors` are bfloat16 matrices and float32 norms by name:
    `features.weight` `[hidden, feature_layers * hidden]`, `embedding.weight` and `hidden.weight`
    `[hidden, hidden]`, one Llama layer, `final_norm.weight`.
    """

    target: str
    fingerprint: str
    feature_layers: tuple[int, ...]
    token_ids: Tensor
    tensors: Mapping[str, Tensor]

    @property
    def hidden_size(self) -> int:
        """Width of the target's residual stream."""
        return self.tensors["final_norm.weight"].shape[0]

    @classmethod
    def load(cls, path: Path) -> HeadFile:
        """Read a head from a file, onto the CPU.

        Raises:
            ModelFileError: The file is missing, truncated, no draft head, of another version, or
                its tensors do not fit together; the message has both shapes.
        """
        metadata, tensors = _read(path)
        facts = _facts(path, metadata)
        token_ids = tensors.pop(_TOKEN_IDS, None)
        if token_ids is None:
            raise ModelFileError(f"{path} is no draft head: tensor '{_TOKEN_IDS}' is missing")
        head = cls(
            target=str(facts["target"]),
            fingerprint=str(facts["fingerprint"]),
            feature_layers=tuple(int(layer) for layer in facts["feature_layers"]),
            token_ids=token_ids,
            tensors=tensors,
        )
        _check(str(path), head)
        return head

    def require_target(self, name: str, fingerprint: str) -> None:
        """Make sure that the head was trained for these weights.

        Raises:
            ModelFileError: It was not; the message has both names and both fingerprints.
        """
        if self.fingerprint != fingerprint:
            raise ModelFileError(
                f"the draft head was trained for {self.target} (weights {self.fingerprint}), "
                f"the model is {name} (weights {fingerprint}); `chatrt train-draft` makes one"
            )

    def require_fit(self, name: str, config: ModelConfig) -> None:
        """Make sure that every tensor has the size that the target `name` gives it.

        Executors do not look: a matrix that is too wide would write behind its buffer.

        Raises:
            ModelFileError: One has another; the message has both.
        """
        largest, last = int(self.token_ids.max()), self.feature_layers[-1]
        if largest >= config.vocab_size:
            raise ModelFileError(
                f"the draft head drafts token {largest}, {name} has {config.vocab_size}"
            )
        if last >= config.num_layers:
            raise ModelFileError(
                f"the draft head wants the features of layer {last}, "
                f"{name} has layers 0 to {config.num_layers - 1}"
            )
        shapes = expected_shapes(
            hidden=config.hidden_size,
            num_features=len(self.feature_layers),
            q_width=config.num_heads * config.head_dim,
            kv_width=config.num_kv_heads * config.head_dim,
            intermediate=config.intermediate_size,
        )
        for tensor, shape in shapes.items():
            found = tuple(self.tensors[tensor].shape)
            if found != shape:
                raise ModelFileError(
                    f"the draft head's tensor '{tensor}' is {list(found)}, "
                    f"{name} needs {list(shape)}"
                )

    def save(self, path: Path) -> None:
        """Write the head, whole or not at all; matrices become bfloat16 and norms float32.

        Raises:
            ModelFileError: The tensors do not fit together.
        """
        _check("the draft head", self)
        facts = {
            "version": _VERSION,
            "target": self.target,
            "fingerprint": self.fingerprint,
            "feature_layers": list(self.feature_layers),
        }
        tensors = {
            name: tensor.detach().to("cpu", _stored_dtype(name)).contiguous()
            for name, tensor in self.tensors.items()
        }
        tensors[_TOKEN_IDS] = self.token_ids.to("cpu", torch.int32).contiguous()
        partial = path.with_name(f"{path.name}.partial")
        save_file(tensors, partial, metadata={_METADATA_KEY: json.dumps(facts)})
        partial.replace(path)


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """Low, middle, high and last layer of a target, 0-based: (2, 14, 26, 29) of 30 layers.

    Fewer where a target has fewer than four layers; always ascending and distinct.
    """
    last = num_layers - 1
    low, middle, high = round(last * 0.07), last // 2, last - max(1, round(last * 0.1))
    return tuple(sorted({min(max(layer, 0), last) for layer in (low, middle, high, last)}))


def expected_shapes(
    *,
    hidden: int,
    num_features: int,
    q_width: int,
    kv_width: int,
    intermediate: int,
) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a head but `token_ids`, by name; `q_width` is all heads' width.

    `num_features` counts feature layers, `kv_width` is the width of all key/value heads.
    """
    return {
        "features.weight": (hidden, num_features * hidden),
        "embedding.weight": (hidden, hidden),
        "hidden.weight": (hidden, hidden),
        "attention_norm.weight": (hidden,),
        "query.weight": (q_width, hidden),
        "key.weight": (kv_width, hidden),
        "value.weight": (kv_width, hidden),
        "output.weight": (hidden, q_width),
        "mlp_norm.weight": (hidden,),
        "gate.weight": (intermediate, hidden),
        "up.weight": (intermediate, hidden),
        "down.weight": (hidden, intermediate),
        "final_norm.weight": (hidden,),
    }


def _read(path: Path) -> tuple[Mapping[str, str], dict[str, Tensor]]:
    if not path.is_file():
        raise ModelFileError(f"{path} does not exist; a draft head is one {FILE_NAME}")
    try:
        with safe_open(path, framework="pt") as file:
            names: list[str] = list(file.keys())
            return file.metadata() or {}, {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{path} cannot be read as safetensors: {error}") from error


def _facts(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        facts = json.loads(metadata[_METADATA_KEY])
    except KeyError:
        raise ModelFileError(
            f"{path} is no draft head: its metadata has no '{_METADATA_KEY}'"
        ) from None
    except ValueError as error:
        raise ModelFileError(f"{path} is damaged: '{_METADATA_KEY}' is no JSON: {error}") from error
    if not isinstance(facts, dict) or facts.get("version") != _VERSION:
        found = facts.get("version") if isinstance(facts, dict) else facts
        raise ModelFileError(f"{path} is a draft head of version {found}, expected {_VERSION}")
    missing = {"target", "fingerprint", "feature_layers"} - facts.keys()
    if missing or not isinstance(facts["feature_layers"], list):
        raise ModelFileError(
            f"{path} is damaged: '{_METADATA_KEY}' lacks {', '.join(sorted(missing)) or 'a list'}"
        )
    return facts


def _check(what: str, head: HeadFile) -> None:
    """Every tensor is there, and all shapes follow from five widths."""
    tensors, layers = head.tensors, head.feature_layers
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0:
        raise ModelFileError(f"{what}: feature layers are {list(layers)}, not ascending layers")
    first_sizes = [tensors[name].shape[0] for name in _WIDTHS if name in tensors]
    if len(first_sizes) < len(_WIDTHS):
        missing = next(name for name in _WIDTHS if name not in tensors)
        raise ModelFileError(f"{what}: tensor '{missing}' is missing")
    hidden, q_width, kv_width, intermediate = first_sizes
    shapes = expected_shapes(
        hidden=hidden,
        num_features=len(layers),
        q_width=q_width,
        kv_width=kv_width,
        intermediate=intermediate,
    )
    for name, shape in shapes.items():
        if name not in tensors:
            raise ModelFileError(f"{what}: tensor '{name}' is missing")
        if tuple(tensors[name].shape) != shape:
            found = list(tensors[name].shape)
            raise ModelFileError(f"{what}: tensor '{name}' is {found}, expected {list(shape)}")
        if not bool(torch.isfinite(tensors[name]).all()):
            raise ModelFileError(f"{what}: tensor '{name}' has values that are no finite numbers")
    unknown = sorted(tensors.keys() - shapes.keys())
    if unknown:
        raise ModelFileError(f"{what}: tensor '{unknown[0]}' is none of a draft head's")
    ids = head.token_ids
    distinct = set(ids.flatten().tolist())
    if ids.dim() != 1 or not distinct or len(distinct) != ids.numel() or min(distinct) < 0:
        raise ModelFileError(
            f"{what}: '{_TOKEN_IDS}' is {list(ids.shape)}, expected distinct ids in one row"
        )


def _stored_dtype(name: str) -> torch.dtype:
    return torch.float32 if name in NORMS else torch.bfloat16
