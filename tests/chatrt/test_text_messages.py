"""Messages and their roles."""

from __future__ import annotations

import pytest

from chatrt.errors import InvalidValue
from chatrt.text.messages import ROLES, Message


@pytest.mark.parametrize("role", ROLES)
def test_every_role_but_developer_renders_as_itself(role: str) -> None:
    expected = "system" if role == "developer" else role
    assert Message(role, "x").template_role == expected


def test_an_unknown_role_is_named_with_the_known_ones() -> None:
    with pytest.raises(InvalidValue, match="role is 'tool', it must be one of system, user"):
        Message("tool", "x")
