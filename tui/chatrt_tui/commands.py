"""What can be typed behind a slash, and found in the command palette.

Knows: names, arguments and one sentence for each command; which a half-typed text may become.
Does not know: widgets, what a command does: the app runs `action_<action>(argument)`.
Invariant: every command is in the palette too; no name is the start of a path, so that a message
like `/etc/hosts` is never taken for one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

MARK = "/"


@dataclass(frozen=True, slots=True)
class Command:
    """`/name argument`: `argument` is how its argument is shown, empty for none."""

    name: str
    title: str
    told: str
    argument: str = ""

    @property
    def usage(self) -> str:
        """How it is typed."""
        return f"{MARK}{self.name} {self.argument}".strip()


COMMANDS = (
    Command("help", "Help", "Show all keys and commands"),
    Command("new", "New chat", "Begin a new conversation"),
    Command("chats", "Conversations", "Search, open, rename, export or delete conversations"),
    Command("model", "Model", "Choose the model that answers next", "[NAME]"),
    Command("system", "System prompt", "Tell the model how to behave from now on", "[TEXT]"),
    Command("temp", "Temperature", "0 is the likeliest word, higher is more varied", "[0 to 2]"),
    Command("settings", "Settings", "Set sampling, system prompt and speculation"),
    Command("edit", "Edit message", "Write your last message anew, in a branch of its own"),
    Command("regen", "Regenerate", "Have the last message answered once more"),
    Command("fork", "Fork", "Go back to the selected turn and ask something else"),
    Command("branch", "Other branch", "Switch to another branch", "[next|previous|NUMBER]"),
    Command("undo", "Undo turn", "Go back one turn"),
    Command("redo", "Redo turn", "Go forward one turn again"),
    Command("title", "Rename conversation", "Give the conversation another title", "[TITLE]"),
    Command("export", "Export", "Write the conversation to a file", "[md|json|FILE]"),
    Command("copy", "Copy answer", "Copy the newest answer as Markdown"),
    Command("stats", "Details", "Show how the turn was answered: times, tokens, drafts"),
    Command("theme", "Theme", "Choose the colours", "[NAME]"),
    Command("typing", "Typing ahead", "Send what is typed before Enter, or not", "[on|off]"),
    Command("editor", "Editor", "Write the message in your own editor"),
    Command("quit", "Quit", "Leave chatrt"),
)
_BY_NAME = {command.name: command for command in COMMANDS}


def is_command(text: str) -> bool:
    """Whether a prompt is meant as a command; one that begins with two slashes is a message."""
    return text.startswith(MARK) and not text.startswith(2 * MARK)


def as_message(text: str) -> str:
    """A prompt as the message that it is: of two slashes in front one is taken away."""
    return text[1:] if text.startswith(2 * MARK) else text


def as_prompt(message: str) -> str:
    """A message as it is typed: one that begins with a slash gets a second one in front."""
    return MARK + message if message.startswith(MARK) else message


def parse(text: str) -> tuple[Command | None, str]:
    """The command that `text` names, None for an unknown one, and its argument."""
    name, *argument = re.split(r"\s", text[1:], maxsplit=1)
    return _BY_NAME.get(name.lower()), "".join(argument).strip()


def unknown(text: str) -> str:
    """The sentence for a command that there is not."""
    name = text.split()[0][:30]
    near = [command.usage for command in candidates(name)][:1]
    alike = get_close_matches(name[1:].lower(), _BY_NAME, n=1)
    near = near or [_BY_NAME[other].usage for other in alike]
    meant = f" Did you mean {near[0]}?" if near else ""
    return f"There is no command {name}.{meant} F1 lists them; //{name[1:]} sends it as a message."


def candidates(text: str) -> list[Command]:
    """The commands that a half-typed `text` may become, those that begin with it first."""
    if not is_command(text) or any(blank in text for blank in " \n"):
        return []
    typed = text[1:].lower()
    begin = [command for command in COMMANDS if command.name.startswith(typed)]
    contain = [command for command in COMMANDS if typed in command.name and command not in begin]
    return begin + contain


def completion(text: str) -> str | None:
    """`text` completed as far as it is certain, with a space where an argument follows."""
    begin = [command for command in candidates(text) if command.name.startswith(text[1:].lower())]
    if not begin:
        return None
    if len(begin) == 1:
        return f"{MARK}{begin[0].name}" + (" " if begin[0].argument else "")
    names = [command.name for command in begin]
    length = next(
        (n for n, letters in enumerate(zip(*names, strict=False)) if len(set(letters)) > 1),
        min(map(len, names)),
    )
    return MARK + names[0][:length]
