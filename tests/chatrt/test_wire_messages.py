from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatrt.errors import CallerError, InvalidValue, UnsupportedParameter
from chatrt.params import SamplingParams
from chatrt.wire.encode import encode
from chatrt.wire.messages import (
    LOGPROBS_INCLUDE,
    ChatrtOptions,
    ConversationCreate,
    ConversationSubscribe,
    ConversationUnsubscribe,
    ConversationUpdate,
    InputMessage,
    ResponseCancel,
    ResponseCreate,
    ResponseResume,
    SpeculationOptions,
    WireLimits,
    decode,
    open_envelope,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
stream_ids = st.none() | st.from_regex(r"[A-Za-z0-9_.-]{1,20}", fullmatch=True)
floats = st.none() | st.floats(-10, 10)
token_ids = st.integers(0, 2**31 - 1)

options = st.builds(
    ChatrtOptions,
    top_k=st.none() | st.integers(-5, 100),
    min_p=floats,
    repetition_penalty=floats,
    presence_penalty=floats,
    frequency_penalty=floats,
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.none() | st.lists(texts, max_size=3).map(tuple),
    stop_token_ids=st.none() | st.lists(token_ids, max_size=3).map(tuple),
    logit_bias=st.none() | st.dictionaries(token_ids, st.floats(-100, 100), max_size=3),
    ignore_eos=st.none() | st.booleans(),
    speculation=st.builds(
        SpeculationOptions, enabled=st.booleans(), k=st.none() | st.integers(0, 64)
    ),
    partial=st.just(False),
    timing=st.sampled_from(["response", "token"]),
    priority=st.integers(-100, 100),
)
creates = st.builds(
    ResponseCreate,
    input=st.lists(
        st.builds(
            InputMessage,
            role=st.sampled_from(["user", "system", "developer", "assistant"]),
            content=texts,
        ),
        min_size=1,
        max_size=3,
    ).map(tuple),
    model=st.none() | texts,
    instructions=st.none() | texts,
    previous_response_id=st.none() | texts,
    generate=st.booleans(),
    store=st.booleans(),
    stream_id=stream_ids,
    max_output_tokens=st.none() | st.integers(),
    temperature=floats,
    top_p=floats,
    top_logprobs=st.none() | st.integers(0, 20),
    include=st.sampled_from([(), (LOGPROBS_INCLUDE,), ("other",)]),
    metadata=st.dictionaries(texts.filter(lambda key: not key.startswith("chatrt.")), texts),
    truncation=st.sampled_from(["auto", "disabled"]),
    chatrt=options,
)
messages = (
    creates.filter(lambda m: -(2**63) <= (m.max_output_tokens or 0) < 2**63)
    | st.builds(ResponseCancel, response_id=st.none() | texts, stream_id=stream_ids)
    | st.builds(
        ResponseResume,
        response_id=texts.filter(bool),
        after_sequence_number=st.none() | st.integers(-(2**63), 2**64 - 1),
        stream_id=stream_ids,
    )
    | st.builds(ConversationCreate, title=st.none() | texts, stream_id=stream_ids)
    | st.builds(ConversationUpdate, id=texts, title=texts, stream_id=stream_ids)
    | st.builds(ConversationSubscribe, id=texts, stream_id=stream_ids)
    | st.builds(ConversationUnsubscribe, id=texts, stream_id=stream_ids)
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
FIELD_NAMES = [*ResponseCreate.__struct_fields__, "text", "tools", "id", "title", "response_id"]
TYPES = ["response.create", "response.cancel", "chatrt.conversation.update"]


def create(**fields: Any) -> ResponseCreate:
    message = decode(json.dumps({"type": "response.create", "input": "hi", **fields}))
    assert isinstance(message, ResponseCreate)
    return message


@given(messages)
def test_decoding_undoes_encoding(message: msgspec.Struct) -> None:
    assert decode(encode(message)) == message


@given(st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_decode_or_raise_a_callers_error(frame: bytes) -> None:
    with pytest.raises(CallerError):
        decode(frame)


@given(st.sampled_from(TYPES), st.dictionaries(st.sampled_from(FIELD_NAMES), json_values))
def test_any_json_object_decodes_or_raises_a_callers_error(
    kind: str, fields: dict[str, Any]
) -> None:
    try:
        message = decode(json.dumps({**fields, "type": kind}))
        if isinstance(message, ResponseCreate):
            message.sampling(SamplingParams())
    except CallerError:
        return
    assert message == decode(encode(message))


@given(options)
def test_options_as_metadata_strings_give_the_same_as_the_object(given_options: Any) -> None:
    fields = json.loads(msgspec.json.encode(given_options))
    strings = {
        f"chatrt.{key}": value if key == "timing" else json.dumps(value)
        for key, value in fields.items()
    }
    assert create(metadata=strings).chatrt == create(chatrt=fields).chatrt == given_options


def test_the_object_wins_over_the_metadata_string() -> None:
    assert create(metadata={"chatrt.top_k": "5"}, chatrt={"top_k": 7}).chatrt.top_k == 7


@pytest.mark.parametrize("stop", ["END", "[not json", '"quoted'])
def test_one_stop_string_may_be_written_bare(stop: str) -> None:
    assert create(metadata={"chatrt.stop": stop}).chatrt.stop == (stop,)
    assert create(chatrt={"stop": stop}).chatrt.stop == (stop,)


def test_a_text_input_is_one_user_message() -> None:
    assert create(input="hello").input == (InputMessage("user", "hello"),)


def test_parts_are_joined_and_the_items_type_may_be_omitted() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    items = [
        {"role": "system", "content": "s"},
        {"type": "message", "role": "user"} | {"content": parts},
    ]
    assert create(input=items).input == (InputMessage("system", "s"), InputMessage("user", "ab"))


def test_unknown_fields_and_nulls_are_ignored() -> None:
    plain = create()
    assert create(reasoning={"effort": "low"}, user="x", temperature=None, chatrt={"x": 1}) == plain


def test_fields_left_out_take_the_models_defaults() -> None:
    defaults = SamplingParams(temperature=0.2, top_p=0.9, top_k=40, stop=("X",))
    sampling = create(temperature=1.5, chatrt={"top_k": 0, "logit_bias": {"7": -1}}).sampling(
        defaults
    )
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.5, 0.9, 0)
    assert sampling.stop == ("X",)
    assert sampling.logit_bias == {7: -1.0}


def test_temperature_zero_is_the_plain_argmax_whatever_the_model_recommends() -> None:
    recommended = SamplingParams(
        temperature=0.2, top_p=0.9, repetition_penalty=1.1, max_output_tokens=50
    )
    greedy = create(temperature=0).sampling(recommended)
    assert greedy == SamplingParams(temperature=0, max_output_tokens=50)
    named = create(temperature=0, chatrt={"repetition_penalty": 1.2}).sampling(recommended)
    assert named.repetition_penalty == 1.2
    assert create(temperature=0.5).sampling(recommended).repetition_penalty == 1.1


def test_logprobs_are_on_exactly_if_include_names_them() -> None:
    on = create(include=[LOGPROBS_INCLUDE]).sampling(SamplingParams())
    more = create(include=[LOGPROBS_INCLUDE], top_logprobs=3).sampling(SamplingParams())
    off = create(top_logprobs=3).sampling(SamplingParams(top_logprobs=2))
    assert (on.top_logprobs, more.top_logprobs, off.top_logprobs) == (0, 3, None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"chatrt": {"min_p": 1.5}}, "min_p"),
        ({"chatrt": {"seed": -1}}, "seed"),
    ],
)
def test_a_number_out_of_range_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidValue, match=param) as caught:
        create(**fields).sampling(SamplingParams())
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": []}, "input"),
        ({"chatrt": 5}, "chatrt"),
        ({"chatrt": {"speculation": {"k": 65}}}, "chatrt.speculation.k"),
        ({"chatrt": {"stop_token_ids": [-1]}}, "chatrt.stop_token_ids[0]"),
        ({"chatrt": {"partial": True}}, "chatrt.partial"),
        ({"metadata": {"chatrt.top_k": "many"}}, "metadata.chatrt.top_k"),
        ({"metadata": {"chatrt.top_k": 4}}, "metadata.chatrt.top_k"),
        ({"previous_response_id": "a", "conversation": "b"}, "conversation"),
        ({"conversation": {"name": "b"}}, "conversation"),
        ({"truncation": "some"}, "truncation"),
        ({"generate": "yes"}, "generate"),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        create(**fields)
    assert caught.value.param == param
    assert caught.value.code == "invalid_value"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"text": {"format": {"type": "json_schema"}}},
        {"input": [{"type": "function_call_output"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
    ],
)
def test_what_is_not_served_is_refused_and_not_dropped(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameter):
        create(**fields)


def test_a_continuation_needs_no_input() -> None:
    assert create(input=[], previous_response_id="resp_1").input == ()


@pytest.mark.parametrize("stream_id", ["", "a b", "ü", "x" * 257, 5, "a\n"])
def test_a_bad_stream_id_has_its_own_code(stream_id: object) -> None:
    with pytest.raises(InvalidValue) as caught:
        create(stream_id=stream_id)
    assert caught.value.code == "invalid_stream_id"


def test_the_lane_is_known_although_a_field_is_wrong() -> None:
    frame = b'{"type": "response.create", "stream_id": "a", "input": 5}'
    assert open_envelope(frame, WireLimits()).stream_id == "a"


@pytest.mark.parametrize("depth", [65, 2_000, 100_000])
def test_deep_json_is_an_input_error(depth: int) -> None:
    frame = '{"type":"response.create","x":' + "[" * depth + "]" * depth + "}"
    with pytest.raises(InvalidValue, match="nested too deeply"):
        decode(frame)


def test_json_at_the_depth_limit_is_fine() -> None:
    frame = '{"type":"response.cancel","x":' + "[" * 63 + "]" * 63 + "}"
    assert decode(frame) == ResponseCancel()


def test_too_many_items_are_refused_with_both_numbers() -> None:
    items = [{"role": "user", "content": "x"}] * 3
    frame = json.dumps({"type": "response.create", "input": items})
    with pytest.raises(InvalidValue, match="3 items, at most 2"):
        decode(frame, WireLimits(max_input_items=2))


@pytest.mark.parametrize(
    "frame", ["[]", "5", '{"input": "x"}', '{"type": "nothing"}', '{"type":1}']
)
def test_a_frame_without_a_known_type_is_refused(frame: str) -> None:
    with pytest.raises(InvalidValue):
        decode(frame)


def test_a_title_has_a_length_that_a_list_can_show() -> None:
    with pytest.raises(InvalidValue, match="256"):
        decode(encode({"type": "chatrt.conversation.create", "title": "x" * 257}))
