from __future__ import annotations

from chatrt.models.registry import KNOWN_MODELS, WheelFile, find_known
from chatrt.settings import DEFAULT_MODEL


def test_names_are_unique_and_lower_case() -> None:
    names = [known.name for known in KNOWN_MODELS]
    assert len(set(names)) == len(names)
    assert all(name == name.lower() for name in names)


def test_the_default_is_one_file_of_a_wheel_with_its_recommended_sampling() -> None:
    known = find_known(DEFAULT_MODEL)
    assert known is not None
    assert isinstance(known.origin, WheelFile)
    assert known.origin.file_name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert known.generation is not None
    assert (known.generation.temperature, known.generation.top_p) == (0.2, 0.9)


def test_a_name_is_found_in_any_case_and_an_unknown_one_is_not() -> None:
    assert find_known("SmolLM2-135M-Instruct") is find_known(DEFAULT_MODEL)
    assert find_known("smollm2-135m") is None
