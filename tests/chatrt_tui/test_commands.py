from __future__ import annotations

import pytest

from chatrt_tui.commands import (
    COMMANDS,
    as_message,
    candidates,
    completion,
    is_command,
    parse,
    unknown,
)


@pytest.mark.parametrize(
    ("text", "is_one", "message"),
    [
        ("/help", True, "/help"),
        ("//etc/hosts is what?", False, "/etc/hosts is what?"),
        ("hello /help", False, "hello /help"),
        (" /help", False, " /help"),
        ("/", True, "/"),
        ("//", False, "/"),
    ],
)
def test_one_slash_is_a_command_and_two_are_a_message(
    text: str, is_one: bool, message: str
) -> None:
    assert is_command(text) is is_one
    assert as_message(text) == message


@pytest.mark.parametrize(
    ("text", "name", "argument"),
    [
        ("/temp 0.2", "temp", "0.2"),
        ("/TEMP  0.2 ", "temp", "0.2"),
        ("/undo", "undo", ""),
        ("/system You are kind.\nAnd brief.", "system", "You are kind.\nAnd brief."),
        ("/system\nYou are  kind.", "system", "You are  kind."),
    ],
)
def test_a_command_is_its_name_and_all_that_follows(text: str, name: str, argument: str) -> None:
    command, given = parse(text)
    assert command is not None
    assert (command.name, given) == (name, argument)


def test_an_unknown_command_is_told_with_what_may_have_been_meant() -> None:
    assert parse("/reg")[0] is None
    assert unknown("/reg it") == (
        "There is no command /reg. Did you mean /regen? F1 lists them; //reg sends it as a message."
    )
    assert "Did you mean" not in unknown("/etc/hosts")
    assert "Did you mean /temp [0 to 2]?" in unknown("/tmp 1")
    assert "Did you mean /settings?" in unknown("/setings")


def test_candidates_begin_with_what_is_typed_and_then_contain_it() -> None:
    assert [command.name for command in candidates("/t")][:3] == ["temp", "title", "theme"]
    assert [command.name for command in candidates("/do")] == ["undo", "redo"]
    assert candidates("/temp 0.2") == []
    assert candidates("temp") == []
    assert len(candidates("/")) == len(COMMANDS)


@pytest.mark.parametrize(
    ("text", "completed"),
    [
        ("/reg", "/regen"),
        ("/sys", "/system "),
        ("/the", "/theme "),
        ("/ed", "/edit"),
        ("/t", "/t"),
        ("/s", "/s"),
        ("/xyz", None),
        ("hello", None),
    ],
)
def test_a_command_is_completed_as_far_as_it_is_certain(text: str, completed: str | None) -> None:
    assert completion(text) == completed


def test_every_command_has_a_name_of_its_own_and_a_sentence() -> None:
    names = [command.name for command in COMMANDS]
    assert len(set(names)) == len(names)
    wanted = "help new model system temp fork edit regen undo branch title export stats theme"
    assert {*wanted.split(), "typing", "editor", "quit"} <= set(names)
    assert all(command.told and command.title for command in COMMANDS)
