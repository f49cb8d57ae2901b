"""Writes a conversation to a file: the branch shown as Markdown, all branches as JSON.

Knows: both forms, how a file gets its name. Does not know: widgets, the server.
Invariant: no file is ever written over; what is written is whole or not there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from chatrt.errors import InvalidValue
from chatrt_tui.clean import clean_text
from chatrt_tui.reasoning import split_thought

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from chatrt_tui.branches import Turn

SUFFIXES = (".md", ".json")
_NAME_CHARS = 40
_MOST_NUMBERS = 10_000


def as_markdown(title: str, path: Sequence[Turn]) -> str:
    """The turns of one branch as a document, without what a terminal would obey."""
    parts = [f"# {title or 'Conversation'}"]
    for turn in path:
        if turn.system:
            parts.append(f"*System:* {turn.system}")
        parts.append(f"## You\n\n{turn.question}")
        said = split_thought(turn.answer)
        if said.thought:
            thought = said.thought.strip().replace("\n", "\n> ")
            parts.append(f"> *Thought:* {thought}")
        ending = "" if turn.status == "completed" else "\n\n*(stopped)*"
        parts.append(f"## Answer\n\n{said.answer.strip()}{ending}")
    return clean_text("\n\n".join(parts)) + "\n"


def as_json(conversation_id: str, title: str, turns: Sequence[Mapping[str, Any]]) -> str:
    """All turns as the server lists them, with what their conversation is called."""
    document = {"id": conversation_id, "title": title, "turns": list(turns)}
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def file_name(title: str) -> str:
    """A file's name that says what the conversation is about, without its suffix."""
    words = re.sub(r"[^\w]+", "-", title.lower()).strip("-_")
    return words[:_NAME_CHARS].strip("-_") or "conversation"


def write_new(path: Path, text: str) -> Path:
    """Write `text` to `path`, or to the next name with a number that is free; returns which.

    Raises:
        InvalidValue: It cannot be written; the sentence names the file and the reason.
    """
    for number in range(1, _MOST_NUMBERS):
        free = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        try:
            _write(free, text)
        except FileExistsError:
            continue
        except (OSError, ValueError) as error:  # a name with a zero byte in it is the latter
            reason = getattr(error, "strerror", None) or str(error)
            raise InvalidValue(f"{free} cannot be written: {reason}") from None
        return free
    raise InvalidValue(f"{path} and {_MOST_NUMBERS} names with a number are taken")


def _write(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            path.unlink()
            raise


def target_of(argument: str, title: str, folder: Path) -> Path:
    """The file that a person names: nothing, `md` or `json` for a name of ours in `folder`.

    Raises:
        InvalidValue: Its suffix is none of those that are known, or nobody has its home folder.
    """
    bare = argument.strip()
    if bare.lower() in ("", "md", "markdown", "json"):
        suffix = ".json" if bare.lower() == "json" else ".md"
        return folder / (file_name(title) + suffix)
    try:
        path = folder / Path(bare).expanduser()
    except RuntimeError:
        raise InvalidValue(f"{bare} names the home folder of nobody known here") from None
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidValue(f"{path.name} should end in .md or .json, it says how to write it")
    return path
