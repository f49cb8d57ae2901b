"""The settings of the next turns as a form.

Knows: which field holds what, saying at a field what is wrong with it.
Does not know: ranges (`settings` asks for them), the server. The result is the new settings.
Invariant: nothing is applied while any field is wrong; leaving changes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Checkbox, Input, Select, Static, TextArea

from chatrt.errors import InvalidValue
from chatrt_tui.clean_area import CleanTextArea
from chatrt_tui.settings import NUMBERS, TurnSettings, read_number
from chatrt_tui.sheet import Sheet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult

_HELP = "Ctrl+S applies, or Enter in a line · Tab moves · Esc leaves all as it was"


class SettingsScreen(Sheet[TurnSettings | None]):
    """Shows `settings` to be changed; `models` are those that one can choose from.

    `focus_on` is the name of the field that has the cursor first.
    """

    DEFAULT_CSS = """
    SettingsScreen {
        align: center middle;
        & > Vertical {
            width: 76; max-width: 100%; height: auto; max-height: 100%;
            padding: 0 2; background: $surface; border: round $border;
            border-title-color: $text; overflow-y: auto;
        }
        & Horizontal { height: 1; }
        & Horizontal.-tall { height: 5; margin: 1 0; }
        & .label { width: 15; color: $text-muted; }
        & .told { width: 1fr; padding-left: 1; color: $text-disabled; }
        & .told.-wrong { color: $text-error; }
        & Input { width: 18; background: $boost; }
        & Select { width: 40; }
        & TextArea { height: 5; border: none; padding: 0 1; background: $boost; }
        & Checkbox { border: none; padding: 0; background: transparent; }
        & .help { color: $text-muted; padding: 0; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Leave"),
        Binding("ctrl+s", "apply", "Apply", priority=True),
    ]

    def __init__(
        self, settings: TurnSettings, models: Sequence[str], *, focus_on: str = "temperature"
    ) -> None:
        super().__init__()
        self._settings = settings
        known = [*models, *([settings.model] if settings.model not in (None, *models) else [])]
        self._models = [name for name in known if name is not None]
        self._focus_on = focus_on

    def compose(self) -> ComposeResult:
        """A line for each setting."""
        now = self._settings
        with Vertical() as box:
            box.border_title = "Settings of the next turns"
            with Horizontal():
                yield Static("Model", classes="label")
                chosen = now.model or (self._models[0] if self._models else Select.NULL)
                yield Select(
                    [(name, name) for name in self._models],
                    value=chosen,
                    allow_blank=not self._models,
                    compact=True,
                    id="model",
                )
            for number in NUMBERS:
                value = getattr(now, number.name)
                with Horizontal():
                    yield Static(number.label, classes="label")
                    yield Input(
                        "" if value is None else f"{value}",
                        placeholder="the model's" if number.name != "seed" else "any",
                        compact=True,
                        id=number.name,
                    )
                    yield Static(number.hint, classes="told", id=f"told-{number.name}")
            with Horizontal(classes="-tall"):
                yield Static("System prompt", classes="label")
                yield CleanTextArea(now.system, id="system", tab_behavior="focus")
            yield Checkbox("Speculation: drafts that cannot change the text", now.speculation)
            yield Static(_HELP, classes="help", markup=False)

    def on_mount(self) -> None:
        """The cursor where it is wanted; in the system prompt one goes on writing."""
        system = self.query_one("#system", TextArea)
        system.move_cursor(system.document.end)
        self.query_one(f"#{self._focus_on}").focus()

    @on(Input.Changed)
    def _check(self, event: Input.Changed) -> None:
        self._read(str(event.input.id))

    def _read(self, name: str) -> tuple[bool, float | int | None]:
        """Whether a field is right, and its number; says so beside it."""
        field = next(one for one in NUMBERS if one.name == name)
        told = self.query_one(f"#told-{name}", Static)
        value, wrong = None, ""
        try:
            value = read_number(name, self.query_one(f"#{name}", Input).value)
        except InvalidValue as error:
            # The value stands in the field: the range is what has to be said of it.
            wrong = error.message.partition(", ")[2] or error.message
        told.update(wrong or field.hint)
        told.set_class(bool(wrong), "-wrong")
        return not wrong, value

    @on(Input.Submitted)
    def action_apply(self) -> None:
        """Take all of it, unless something is wrong: then the cursor goes there."""
        values: dict[str, Any] = {}
        for number in NUMBERS:
            is_right, values[number.name] = self._read(number.name)
            if not is_right:
                self.query_one(f"#{number.name}").focus()
                return
        chosen = self.query_one("#model", Select).value
        is_default = chosen is Select.NULL or (
            self._settings.model is None and chosen == self._models[0]
        )
        self.dismiss(
            replace(
                self._settings,
                **values,
                model=None if is_default else str(chosen),
                system=self.query_one("#system", TextArea).text.strip(),
                speculation=self.query_one(Checkbox).value,
            )
        )

    def action_leave(self) -> None:
        """Change nothing."""
        self.dismiss(None)
