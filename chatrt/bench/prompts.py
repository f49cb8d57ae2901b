"""What speculation is judged on: chat prompts of eight kinds, ours or those of a person's own file.

Knows: the bundled prompts, and three forms of a prompt file: ours (JSON Lines), MT-Bench's (JSON
Lines) and ShareGPT's (one JSON list).
Does not know: models, templates, tokens, how an answer is measured.
Invariant: ids are unique within one load, and no prompt's text is empty. The order is fixed:
bundled prompts take turns between the kinds, those of a file stay as they lie in it.
Cost: the file is read and decoded in one go.
Source: the bundled prompts were written by hand for this purpose. No draft may be trained on them.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, TypeVar

import msgspec

from chatrt.errors import InvalidValue
from chatrt.text.messages import Message

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

KINDS = (
    *("casual", "facts", "explain", "writing"),
    *("code", "maths", "extraction", "rewrite"),
)
_SHAREGPT_KIND = "sharegpt"  # its conversations are not sorted into kinds
_HUMAN = ("human", "user")  # both names are found in ShareGPT files

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One message of a person, and the messages before it where it is a later turn.

    `kind` is one of `KINDS` for a bundled prompt, the file's own word for others.
    """

    id: str
    kind: str
    text: str
    history: tuple[Message, ...] = ()


class _Said(msgspec.Struct):
    role: str
    text: str


class _Own(msgspec.Struct):
    id: str
    kind: str
    text: str
    history: list[_Said] = []


class _MtBench(msgspec.Struct):
    question_id: int | str
    category: str
    turns: list[str]


class _ShareGptMessage(msgspec.Struct):
    value: str
    speaker: str = msgspec.field(name="from")


class _ShareGpt(msgspec.Struct):
    id: int | str
    conversations: list[_ShareGptMessage]


def bundled_prompts(
    kinds: Collection[str] | None = None, per_kind: int | None = None
) -> tuple[Prompt, ...]:
    """The prompts that come with the package, 16 of each of `KINDS`.

    They take turns between the kinds, so any first part of them is balanced.

    Args:
        kinds: Only these; all if None.
        per_kind: At most so many of each kind, its first ones; all if None.

    Raises:
        InvalidValue: A kind is not one of `KINDS`, or `per_kind` is less than 1.
    """
    for kind in kinds or ():
        if kind not in KINDS:
            raise InvalidValue(f"kind is {kind!r}, it must be one of {', '.join(KINDS)}")
    if per_kind is not None and per_kind < 1:
        raise InvalidValue(f"per_kind is {per_kind}, it must be at least 1")
    data = (resources.files("chatrt.bench") / "data" / "prompts.jsonl").read_bytes()
    by_kind: defaultdict[str, list[Prompt]] = defaultdict(list)
    for prompt in _json_lines(data, "prompts.jsonl"):
        by_kind[prompt.kind].append(prompt)
    wanted = [by_kind[kind][:per_kind] for kind in KINDS if kinds is None or kind in kinds]
    rounds = itertools.zip_longest(*wanted)
    return tuple(prompt for each in rounds for prompt in each if prompt is not None)


def load_prompts(path: Path) -> tuple[Prompt, ...]:
    """The prompts of a file, in its order. The form is told from the file's contents.

    - Ours: a line each of `{"id", "kind", "text"}` and, for a later turn, `"history"`, a list of
      `{"role", "text"}`.
    - MT-Bench: a line each of `{"question_id", "category", "turns"}`; the first turn is taken.
    - ShareGPT: a list of `{"id", "conversations": [{"from", "value"}]}`; the first message of the
      human that is not blank is taken. A conversation without one, or with an id that an earlier
      one has, is passed over, since such collections may hold both.

    Raises:
        InvalidValue: The file cannot be read or holds no prompt, a line (of a ShareGPT file an
            entry) is in none of these forms, or two lines have one id. The message has the file,
            and the line or entry where it is one.
    """
    try:
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise InvalidValue(f"{path} cannot be read: {error.strerror}") from error
    is_list = data.lstrip().startswith(b"[")
    prompts = tuple(_share_gpt(data, str(path)) if is_list else _json_lines(data, str(path)))
    if not prompts:
        raise InvalidValue(f"{path} holds no prompt")
    [(commonest, count)] = Counter(prompt.id for prompt in prompts).most_common(1)
    if count > 1:
        raise InvalidValue(f"{path} has {count} prompts with the id {commonest!r}")
    return prompts


def _json_lines(data: bytes, name: str) -> Iterator[Prompt]:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield _line_prompt(line, f"{name}, line {number}")


def _line_prompt(line: bytes, where: str) -> Prompt:
    fields = _decode(line, dict[str, msgspec.Raw], where)
    if "question_id" in fields:
        question = _decode(line, _MtBench, where)
        first = question.turns[0] if question.turns else ""
        return _prompt(str(question.question_id), question.category, first, where)
    own = _decode(line, _Own, where)
    return _prompt(own.id, own.kind, own.text, where, own.history)


def _share_gpt(data: bytes, name: str) -> Iterator[Prompt]:
    taken: set[str] = set()
    for number, entry in enumerate(_decode(data, list[msgspec.Raw], name), start=1):
        where = f"{name}, entry {number}"
        conversation = _decode(bytes(entry), _ShareGpt, where)
        prompt_id = str(conversation.id)
        said = (each.value for each in conversation.conversations if each.speaker in _HUMAN)
        first = next(filter(str.strip, said), None)
        if first is not None and prompt_id not in taken:
            taken.add(prompt_id)
            yield Prompt(prompt_id, _SHAREGPT_KIND, first)


def _prompt(
    prompt_id: str, kind: str, text: str, where: str, history: Iterable[_Said] = ()
) -> Prompt:
    if not text.strip():
        raise InvalidValue(f"{where}: the prompt's text is empty")
    try:
        messages = tuple(Message(said.role, said.text) for said in history)
    except InvalidValue as error:
        raise InvalidValue(f"{where}: {error.message}") from error
    return Prompt(prompt_id, kind, text, messages)


def _decode(data: bytes, kind: type[_T], where: str) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{where}: {error}") from error
