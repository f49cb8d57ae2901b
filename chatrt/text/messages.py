"""One message of a chat, as a template sees it.

Knows: the four roles. Does not know: how a template spells them.
Invariant: a message's role is one of `ROLES`.
"""

from __future__ import annotations

from dataclasses import dataclass

from chatrt.errors import InvalidValue

ROLES = ("system", "user", "assistant", "developer")


@dataclass(frozen=True, slots=True)
class Message:
    """Who says what. Templates know no developer, so that role renders as `system`.

    Raises:
        InvalidValue: The role is not one of `ROLES`.
    """

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InvalidValue(
                f"role is {self.role!r}, it must be one of {', '.join(ROLES)}", param="role"
            )

    @property
    def template_role(self) -> str:
        """The role under which a template sees this message."""
        return "system" if self.role == "developer" else self.role
