"""Requests of the wire, read for one model: names, caps, token ids, what is reserved."""

from __future__ import annotations

from typing import Any

import pytest

from chatrt.errors import InvalidValue, ModelNotFound
from chatrt.params import SamplingParams
from chatrt.service import ServiceSettings
from chatrt.service.requests import RequestReader, num_drafts
from chatrt.turn import TurnKind
from chatrt.wire.messages import ChatrtOptions, InputMessage, ResponseCreate, SpeculationOptions


def reader(**settings: Any) -> RequestReader:
    values: dict[str, Any] = {
        "model": "tiny",
        "max_context": 400,
        "sampling": SamplingParams(top_k=5),
        **settings,
    }
    return RequestReader(ServiceSettings(**values), vocab_size=100)


def create(**fields: Any) -> ResponseCreate:
    return ResponseCreate(input=(InputMessage("user", "hi"),), **fields)


def test_only_the_served_model_and_its_other_names_are_known() -> None:
    requests = reader(model_aliases=frozenset({"file.gguf"}))
    for name in (None, "tiny", "file.gguf"):
        requests.check_model(name)
    with pytest.raises(ModelNotFound, match="model gpt is not served here, tiny is"):
        requests.check_model("gpt")


def test_an_answer_longer_than_the_cap_is_refused_and_the_cap_is_the_default() -> None:
    requests = reader(max_output_tokens=50)
    assert requests.sampling(create()).max_output_tokens == 50
    assert requests.sampling(create(max_output_tokens=7)).max_output_tokens == 7
    with pytest.raises(InvalidValue, match="is 51, this server allows at most 50"):
        requests.sampling(create(max_output_tokens=51))


@pytest.mark.parametrize("options", [{"logit_bias": {100: 1.0}}, {"stop_token_ids": (100,)}])
def test_token_ids_beyond_the_vocabulary_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match="has token id 100, the vocabulary has 100 ids"):
        reader().sampling(create(chatrt=ChatrtOptions(**options)))


def test_what_is_asked_follows_generate_partial_and_truncation() -> None:
    requests = reader()
    sampling = SamplingParams(max_output_tokens=300)
    answer = requests.ask(create(truncation="auto"), sampling)
    assert (answer.kind, answer.drop_oldest) == (TurnKind.ANSWER, True)
    assert answer.num_reserved == 100  # a quarter of the context at most
    assert requests.ask(create(), SamplingParams(max_output_tokens=9)).num_reserved == 9
    prefill = requests.ask(create(generate=False), sampling)
    typed = requests.ask(create(generate=False, chatrt=ChatrtOptions(partial=True)), sampling)
    assert (prefill.kind, typed.kind) == (TurnKind.PREFILL, TurnKind.TYPED_AHEAD)
    assert not prefill.drop_oldest


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (SpeculationOptions(), None),
        (SpeculationOptions(k=3), 3),
        (SpeculationOptions(enabled=False, k=3), 0),
    ],
)
def test_the_draft_length_is_fixed_left_open_or_off(
    options: SpeculationOptions, expected: int | None
) -> None:
    assert num_drafts(create(chatrt=ChatrtOptions(speculation=options))) == expected
