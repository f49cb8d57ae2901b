"""The many spellings of a `response.create`, brought to one before it is typed.

Knows: the API's alternatives (text or items, text or parts, id or object, option or metadata).
Does not know: types and ranges of the fields it passes on; those are the structs'.
Invariant: the given fields are not changed; what is not served is refused by name, never dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from chatrt.errors import InvalidValue, UnsupportedParameter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_METADATA_PREFIX = "chatrt."
_TEXT_PARTS = ("input_text", "output_text", "text")
_TEXT_OPTIONS = ("timing", "stop")


def create_fields(fields: Mapping[str, Any], max_input_items: int) -> dict[str, Any]:
    """The fields of a `response.create` with one spelling each.

    Raises:
        InvalidValue: An input, a part or an option has the wrong shape.
        UnsupportedParameter: Non-empty tools, a text format, an item or part that is not text.
    """
    if fields.get("tools"):
        raise UnsupportedParameter("tools are not served, leave them out or empty", param="tools")
    _check_text_format(fields.get("text"))
    result = dict(fields)
    result["input"] = list(_messages(fields.get("input", []), max_input_items))
    conversation = fields.get("conversation")
    if isinstance(conversation, dict):
        if not isinstance(conversation.get("id"), str):
            raise InvalidValue("conversation.id must be a string", param="conversation")
        result["conversation"] = conversation["id"]
    result["chatrt"] = _options(fields.get("chatrt", {}), fields.get("metadata", {}))
    return result


def deeper_than(value: object, max_depth: int) -> bool:
    """Whether JSON containers are nested more than `max_depth` levels. Does not recurse."""
    level: list[Any] = [value]
    for _ in range(max_depth):
        level = [inner for outer in level for inner in _containers(outer)]
        if not level:
            return False
    return True


def _containers(value: Any) -> Iterable[Any]:
    inner: Iterable[Any] = value.values() if isinstance(value, dict) else value
    return (item for item in inner if isinstance(item, (dict, list)))


def _messages(value: object, max_input_items: int) -> Iterable[dict[str, Any]]:
    if isinstance(value, str):
        yield {"role": "user", "content": value}
        return
    if not isinstance(value, list):
        raise InvalidValue("input must be a string or a list of items", param="input")
    if len(value) > max_input_items:
        raise InvalidValue(
            f"input has {len(value)} items, at most {max_input_items} are allowed", param="input"
        )
    for index, item in enumerate(value):
        yield _message(item, f"input[{index}]")


def _message(item: object, param: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise InvalidValue(f"{param} must be an object", param=param)
    kind = item.get("type", "message")
    if kind != "message":
        raise UnsupportedParameter(
            f"{param}.type is {str(kind)[:64]!r}, only 'message' is served", param=f"{param}.type"
        )
    return {**item, "content": _content(item.get("content"), f"{param}.content")}


def _content(value: object, param: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidValue(f"{param} must be a string or a list of parts", param=param)
    return "".join(_part(part, f"{param}[{index}]") for index, part in enumerate(value))


def _part(part: object, param: str) -> str:
    if not isinstance(part, dict):
        raise InvalidValue(f"{param} must be an object", param=param)
    kind = part.get("type")
    if kind not in _TEXT_PARTS:
        raise UnsupportedParameter(
            f"{param}.type is {str(kind)[:64]!r}, only 'input_text' and 'output_text' are served",
            param=f"{param}.type",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidValue(f"{param}.text must be a string", param=f"{param}.text")
    return text


def _check_text_format(text: object) -> None:
    if text is None:
        return
    if not isinstance(text, dict):
        raise InvalidValue("text must be an object", param="text")
    kind = text.get("format") or {"type": "text"}
    if not isinstance(kind, dict) or kind.get("type") != "text":
        raise UnsupportedParameter("text.format must be of type 'text'", param="text.format")


def _options(chatrt: object, metadata: object) -> dict[str, Any]:
    if not isinstance(chatrt, dict):
        raise InvalidValue("chatrt must be an object", param="chatrt")
    if not isinstance(metadata, dict):
        raise InvalidValue("metadata must be an object", param="metadata")
    options = {
        key.removeprefix(_METADATA_PREFIX): _metadata_option(key, value)
        for key, value in metadata.items()
        if key.startswith(_METADATA_PREFIX)
    }
    options |= {key: value for key, value in chatrt.items() if value is not None}
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    return options


def _metadata_option(key: str, value: object) -> object:
    """The JSON in a metadata string; options that are text may be written without quotes."""
    param = f"metadata.{key}"
    if not isinstance(value, str):
        raise InvalidValue(f"{param} must be a string", param=param)
    is_text = key.removeprefix(_METADATA_PREFIX) in _TEXT_OPTIONS
    if is_text and not value.startswith(("[", '"')):
        return value
    try:
        option: object = msgspec.json.decode(value)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        if is_text:
            return value
        raise InvalidValue(f"{param} is not valid JSON", param=param) from None
    return option
