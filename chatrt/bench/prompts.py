"""What people say, for measurements: chat prompts of eight kinds, or those of a person's own file.

Knows: the bundled prompts, and three forms of a prompt file: ours (JSON Lines), MT-Bench's (JSON
Lines) and ShareGPT's (one JSON list).
Does not know: models, templates, tokens, how an answer is measured.
Invariant: ids are unique within one load, and no prompt's text is empty. The order is fixed:
bundled prompts take turns between the kinds, those of a file stay as they lie in it.
A prompt is one message to be answered, a conversation all that its person says: both are read from
the same lines by the same code.
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


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a person says in one conversation, message by message, and the prompt made of it."""

    texts: tuple[str, ...]
    prompt: Prompt


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
    by_kind: defaultdict[str, list[Prompt]] = defaultdict(list)
    for conversation in _bundled():
        by_kind[conversation.prompt.kind].append(conversation.prompt)
    wanted = [by_kind[kind][:per_kind] for kind in KINDS if kinds is None or kind in kinds]
    rounds = itertools.zip_longest(*wanted)
    return tuple(prompt for each in rounds for prompt in each if prompt is not None)


def bundled_conversations() -> tuple[Conversation, ...]:
    """All bundled conversations; those of several turns come first, else in the file's order."""
    return tuple(sorted(_bundled(), key=lambda conversation: -len(conversation.texts)))


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
    return tuple(conversation.prompt for conversation in load_conversations(path))


def load_conversations(path: Path) -> tuple[Conversation, ...]:
    """The conversations of a file, in its order: forms, what is passed over and errors are those of
    `load_prompts`.

    All that the person says is taken, in order: of our form the `user` messages of the history and
    the text, of MT-Bench all turns, of ShareGPT all messages of the human. Blank ones are left out.
    """
    try:
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise InvalidValue(f"{path} cannot be read: {error.strerror}") from error
    is_list = data.lstrip().startswith(b"[")
    found = tuple(_share_gpt(data, str(path)) if is_list else _json_lines(data, str(path)))
    if not found:
        raise InvalidValue(f"{path} holds no prompt")
    [(commonest, count)] = Counter(each.prompt.id for each in found).most_common(1)
    if count > 1:
        raise InvalidValue(f"{path} has {count} prompts with the id {commonest!r}")
    return found


def _bundled() -> Iterator[Conversation]:
    data = (resources.files("chatrt.bench") / "data" / "prompts.jsonl").read_bytes()
    return _json_lines(data, "prompts.jsonl")


def _json_lines(data: bytes, name: str) -> Iterator[Conversation]:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield _of_line(line, f"{name}, line {number}")


def _of_line(line: bytes, where: str) -> Conversation:
    fields = _decode(line, dict[str, msgspec.Raw], where)
    if "question_id" in fields:
        question = _decode(line, _MtBench, where)
        first = question.turns[0] if question.turns else ""
        prompt = _prompt(str(question.question_id), question.category, first, where)
        return Conversation(_not_blank(question.turns), prompt)
    own = _decode(line, _Own, where)
    prompt = _prompt(own.id, own.kind, own.text, where, own.history)
    before = [said.text for said in own.history if said.role == "user"]
    return Conversation(_not_blank([*before, own.text]), prompt)


def _share_gpt(data: bytes, name: str) -> Iterator[Conversation]:
    taken: set[str] = set()
    for number, entry in enumerate(_decode(data, list[msgspec.Raw], name), start=1):
        where = f"{name}, entry {number}"
        conversation = _decode(bytes(entry), _ShareGpt, where)
        prompt_id = str(conversation.id)
        said = _not_blank(
            each.value for each in conversation.conversations if each.speaker in _HUMAN
        )
        if said and prompt_id not in taken:
            taken.add(prompt_id)
            yield Conversation(said, Prompt(prompt_id, _SHAREGPT_KIND, said[0]))


def _not_blank(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(text for text in texts if text.strip())


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
