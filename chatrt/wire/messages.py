"""Client messages: from one JSON frame to typed, checked structs.

Knows: names, shapes and ranges of the Responses API's WebSocket messages and of ours.
Does not know: sockets, sessions, which ids exist, tokens.
Invariant: any bytes give a message or a `CallerError`; unknown fields are ignored; an option under
`chatrt` and the same one as a `metadata["chatrt.<key>"]` string give equal messages.
Cost: one generic JSON pass, then a conversion that shares the strings.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from chatrt.errors import CallerError, InvalidValue
from chatrt.params import MAX_TOP_LOGPROBS, SamplingParams
from chatrt.wire import normalize

if TYPE_CHECKING:
    from collections.abc import Mapping

LOGPROBS_INCLUDE = "message.output_text.logprobs"
_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")

Role: TypeAlias = Literal["user", "system", "developer", "assistant"]
Title: TypeAlias = Annotated[str, Meta(max_length=256)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]


@dataclasses.dataclass(frozen=True, slots=True)
class WireLimits:
    """What a frame may hold; its size in bytes is the transport's limit."""

    max_json_depth: int = 64
    max_input_items: int = 4096


class InputMessage(msgspec.Struct, frozen=True):
    """One message of the input; content parts are already joined."""

    role: Role
    content: str


class SpeculationOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """`enabled` False turns drafting off; `k` fixes its depth, None leaves it to the controller."""

    enabled: bool = True
    k: Annotated[int, Meta(ge=0, le=64)] | None = None


class ChatrtOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """The extension object. None means that the request left the field out.

    `new_branch` begins a new first turn in the conversation, beside what is there.
    """

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[TokenId, ...] | None = None
    logit_bias: dict[TokenId, float] | None = None
    ignore_eos: bool | None = None
    speculation: SpeculationOptions = SpeculationOptions()
    partial: bool = False
    new_branch: bool = False
    timing: Literal["response", "token"] = "response"
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    pin_s: Annotated[float, Meta(ge=0, le=86400)] = 0.0


class ResponseCreate(
    msgspec.Struct, frozen=True, tag_field="type", tag="response.create", omit_defaults=True
):
    """A turn. `input` is a tuple of messages, whatever form the client chose.

    `partial` (the person is still typing) implies `generate` False. None means left out.
    """

    input: tuple[InputMessage, ...] = ()
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | None = None
    generate: bool = True
    store: bool = True
    stream_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: tuple[str, ...] = ()
    metadata: dict[str, str] = {}
    truncation: Literal["auto", "disabled"] = "disabled"
    chatrt: ChatrtOptions = ChatrtOptions()

    @property
    def partial(self) -> bool:
        """Whether this is a typed-ahead prompt, without an answer of its own."""
        return self.chatrt.partial

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The turn's sampling: what the request says, else the model's `defaults`.

        Defaults are a set that was recommended together. A request for greedy decoding
        (`temperature` 0) is none of it: it gets the plain argmax, but for what it names itself.
        Log-probabilities are on exactly if `include` names them.

        Raises:
            InvalidValue: A number is out of its range.
        """
        asked: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_output_tokens": self.max_output_tokens,
        }
        asked |= {name: getattr(self.chatrt, name) for name in _SAMPLING_OPTIONS}
        given = {name: value for name, value in asked.items() if value is not None}
        given["top_logprobs"] = (
            (self.top_logprobs or 0) if LOGPROBS_INCLUDE in self.include else None
        )
        if self.temperature == 0:
            defaults = SamplingParams(max_output_tokens=defaults.max_output_tokens)
        return dataclasses.replace(defaults, **given)


_SAMPLING_OPTIONS = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "ignore_eos",
)


class ResponseCancel(
    msgspec.Struct, frozen=True, tag_field="type", tag="response.cancel", omit_defaults=True
):
    """Cancel `response_id`, or the response that runs on the lane `stream_id`."""

    response_id: str | None = None
    stream_id: str | None = None


class ResponseResume(
    msgspec.Struct, frozen=True, tag_field="type", tag="chatrt.resume", omit_defaults=True
):
    """Send a response's events behind number `after_sequence_number` here, and go on live.

    None sends all. Which numbers there are depends on the response, so its log checks them.
    """

    response_id: Annotated[str, Meta(min_length=1, max_length=256)]
    after_sequence_number: int | None = None
    stream_id: str | None = None


class ConversationCreate(
    msgspec.Struct,
    frozen=True,
    tag_field="type",
    tag="chatrt.conversation.create",
    omit_defaults=True,
):
    """Open a conversation; answered by `chatrt.conversation.created`."""

    title: Title | None = None
    stream_id: str | None = None


class ConversationUpdate(
    msgspec.Struct,
    frozen=True,
    tag_field="type",
    tag="chatrt.conversation.update",
    omit_defaults=True,
):
    """Rename a conversation; answered by `chatrt.conversation.updated`."""

    id: str
    title: Title
    stream_id: str | None = None


class ConversationSubscribe(
    msgspec.Struct,
    frozen=True,
    tag_field="type",
    tag="chatrt.conversation.subscribe",
    omit_defaults=True,
):
    """View a conversation's responses; answered by `chatrt.conversation.subscribed`."""

    id: str
    stream_id: str | None = None


class ConversationUnsubscribe(
    msgspec.Struct,
    frozen=True,
    tag_field="type",
    tag="chatrt.conversation.unsubscribe",
    omit_defaults=True,
):
    """View a conversation no more; answered by `chatrt.conversation.unsubscribed`.

    Answers of it that are being sent go on to their end.
    """

    id: str
    stream_id: str | None = None


ConversationMessage: TypeAlias = (
    ConversationCreate | ConversationUpdate | ConversationSubscribe | ConversationUnsubscribe
)
ClientMessage: TypeAlias = ResponseCreate | ResponseCancel | ResponseResume | ConversationMessage

_TYPES: Mapping[str, type[ClientMessage]] = {
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
    "chatrt.resume": ResponseResume,
    "chatrt.conversation.create": ConversationCreate,
    "chatrt.conversation.update": ConversationUpdate,
    "chatrt.conversation.subscribe": ConversationSubscribe,
    "chatrt.conversation.unsubscribe": ConversationUnsubscribe,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Envelope:
    """A frame that is a JSON object with a known type; its other fields are not checked yet."""

    type: str
    stream_id: str | None
    fields: dict[str, Any]


def open_envelope(frame: str | bytes, limits: WireLimits) -> Envelope:
    """The first half of `decode`: all that an error event needs to name the lane.

    Raises:
        InvalidValue: Not JSON, too deep, not an object, an unknown `type`, a bad `stream_id`
            (code `invalid_stream_id`).
    """
    try:
        fields = msgspec.json.decode(frame)
    except RecursionError:
        raise _too_deep(limits) from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise InvalidValue(f"the frame is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidValue(f"the frame is a JSON {type(fields).__name__}, it must be an object")
    if normalize.deeper_than(fields, limits.max_json_depth):
        raise _too_deep(limits)
    stream_id = fields.get("stream_id")
    if stream_id is not None and not (
        isinstance(stream_id, str) and _STREAM_ID.fullmatch(stream_id)
    ):
        raise InvalidValue(
            "stream_id must be 1 to 256 letters, digits, '_', '.' or '-'",
            param="stream_id",
            code="invalid_stream_id",
        )
    return Envelope(type=_known_type(fields), stream_id=stream_id, fields=fields)


def read_message(envelope: Envelope, limits: WireLimits) -> ClientMessage:
    """The second half of `decode`: the fields, checked against the type.

    Raises:
        InvalidValue: A field is missing, of the wrong type or out of range.
        UnsupportedParameter: Tools, formats or inputs that are not served.
    """
    fields = {key: value for key, value in envelope.fields.items() if value is not None}
    if envelope.type == "response.create":
        fields = normalize.create_fields(fields, limits.max_input_items)
    try:
        message = msgspec.convert(fields, _TYPES[envelope.type], str_keys=True)
    except msgspec.ValidationError as error:
        raise _field_error(error) from None
    return _check_create(message) if isinstance(message, ResponseCreate) else message


def decode(frame: str | bytes, limits: WireLimits | None = None) -> ClientMessage:
    """The message in one frame.

    Raises:
        CallerError: As `open_envelope` and `read_message` do; nothing else, for any input.
    """
    limits = limits or WireLimits()
    return read_message(open_envelope(frame, limits), limits)


def _known_type(fields: Mapping[str, Any]) -> str:
    kind = fields.get("type")
    if not isinstance(kind, str):
        raise InvalidValue("type is missing or not a string", param="type")
    if kind not in _TYPES:
        known = ", ".join(_TYPES)
        raise InvalidValue(f"type is {kind[:64]!r}, it must be one of {known}", param="type")
    return kind


def _check_create(message: ResponseCreate) -> ResponseCreate:
    if message.previous_response_id is not None and message.conversation is not None:
        raise InvalidValue(
            "previous_response_id and conversation exclude each other", param="conversation"
        )
    parent = message.previous_response_id or message.conversation
    if not message.input and parent is None and message.instructions is None:
        raise InvalidValue("input is missing", param="input")
    if message.chatrt.new_branch and message.conversation is None:
        raise InvalidValue(
            "chatrt.new_branch needs a conversation to begin a branch in; previous_response_id "
            "forks behind that response without it",
            param="chatrt.new_branch",
        )
    if message.partial and message.generate:
        raise InvalidValue("chatrt.partial needs generate to be false", param="chatrt.partial")
    return message


def _too_deep(limits: WireLimits) -> CallerError:
    return InvalidValue(
        f"the JSON is nested too deeply, at most {limits.max_json_depth} levels are allowed"
    )


def _field_error(error: msgspec.ValidationError) -> CallerError:
    """msgspec's `Expected … - at `$.a.b`` as a sentence that names the parameter."""
    text, _, path = str(error).partition(" - at `$")
    param = path.rstrip("`").lstrip(".") or None
    sentence = text.replace("`", "").lower() if text.startswith("Expected") else text
    return InvalidValue(f"{param}: {sentence}" if param else sentence, param=param)
