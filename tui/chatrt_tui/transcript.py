"""The transcript: what was asked and answered, growing while one reads.

Knows: painting a streamed answer part by part, staying at the end only while the reader is there.
Does not know: the connection, conversations; it is told what to show.
Invariant: every text shown has been through `TextCleaner` first.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Markdown, Static

from chatrt_tui import figures
from chatrt_tui.clean import TextCleaner, clean_text
from chatrt_tui.code import CodeBlock
from chatrt_tui.segments import CodeClosed, CodeOpened, CodeText, Part, Prose, SegmentSplitter

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.widget import Widget
    from textual.widgets.markdown import MarkdownStream

    from chatrt.client import TurnResult

# One line that no Markdown changes: it looks the same as plain text.
_READS_AS_IT_IS = re.compile(r"(?!\s*(?:[-+]|\d+[.)]))[^*_`#>|~\[\]<\\\n&]*\w[^*_`#>|~\[\]<\\\n&]*")


class UserMessage(Static):
    """What the person said, as they wrote it."""

    DEFAULT_CSS = """
    UserMessage {
        margin: 1 1 1 1;
        padding: 0 1;
        border-left: outer $primary;
        background: $boost;
        height: auto;
    }
    """

    def __init__(self, text: str) -> None:
        super().__init__(clean_text(text), markup=False)

    def show(self, text: str) -> None:
        """Show `text` instead."""
        self.update(clean_text(text))


class Note(Static):
    """A remark of the program itself, in a quiet colour."""

    DEFAULT_CSS = """
    Note { padding: 0 2; height: auto; color: $text-muted; }
    Note.-warning { color: $text-warning; }
    Note.-answer { color: $foreground; }
    """

    def __init__(self, text: str, *, warning: bool = False) -> None:
        super().__init__(clean_text(text), markup=False, classes="-warning" if warning else "")


class AnswerView(Vertical):
    """One answer: its Markdown, how it ended, its figures, and on demand their details.

    The figures show once it is not the newest any more (`-earlier`): until then they stand in the
    status line, and twice would be once too often.
    """

    DEFAULT_CSS = """
    AnswerView {
        height: auto;
        & > Markdown { padding: 0 2; }
        & > Markdown.-goes-on > MarkdownBlock { margin-bottom: 0; }
        & > .figures { padding: 0 2; color: $text-disabled; height: auto; display: none; }
        &.-earlier > .figures { display: block; }
        & > .details { padding: 0 2 0 4; color: $text-muted; height: auto; display: none; }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self._cleaner = TextCleaner()
        self._splitter = SegmentSplitter()
        self._pieces: list[str] = []
        self._num_received = 0
        self._painted: str | None = None  # text in the placeholder's line, not among the parts yet
        self._shows = asyncio.Lock()
        self._last: Widget | None = None
        self._stream: MarkdownStream | None = None

    @property
    def text(self) -> str:
        """The answer so far, cleaned."""
        return "".join(self._pieces)

    @property
    def num_received(self) -> int:
        """How many characters have arrived, before cleaning."""
        return self._num_received

    def compose(self) -> ComposeResult:
        """A line that stands in for the answer until its first text."""
        yield Note("…")

    def tell(self, text: str) -> None:
        """Say what the answer waits for, while nothing of it has come."""
        if self._last is None:
            self.query_one(Note).update(clean_text(text))

    async def append(self, text: str) -> None:
        """Add text that has arrived; the first of it is on the screen with the next refresh."""
        self._num_received += len(text)
        cleaned = self._clean(text)
        async with self._shows:
            if self._painted is not None:
                self._painted += cleaned
            elif self._last is None and _READS_AS_IT_IS.fullmatch(cleaned):
                self._paint(cleaned)
            else:
                await self._show(cleaned)

    def _paint(self, text: str) -> None:
        """Put the first text where the placeholder stands: making Markdown of it takes longer."""
        self._painted = text
        note = self.query_one(Note)
        note.add_class("-answer")
        note.update(Content(text))
        self.call_after_refresh(self._show_painted)

    async def _show_painted(self) -> None:
        """Make Markdown of what was painted, and of what came since."""
        async with self._shows:
            text, self._painted = self._painted, None
            if text is not None:
                await self._show(text)

    async def finish_old(self, *, stopped: bool) -> None:
        """An old answer is there, of which no figures are known; `stopped` if it is not whole."""
        await self._finish_text()
        if stopped:
            await self.mount(Note("stopped"))

    async def finish(self, result: TurnResult) -> None:
        """The answer has ended."""
        await self._finish_text()
        ending = figures.ending(result)
        if ending:
            await self.mount(Note(ending, warning=result.error is not None))
        left_out = figures.left_out(result)
        if left_out:
            await self.mount(Note(left_out))
        summary, details = figures.summary(result), figures.details(result)
        if summary:
            await self.mount(Static(summary, markup=False, classes="figures"))
        if details:
            await self.mount(Static(clean_text(details), markup=False, classes="details"))

    def _clean(self, text: str) -> str:
        cleaned = self._cleaner.feed(text)
        self._pieces.append(cleaned)
        return cleaned

    async def _finish_text(self) -> None:
        rest = self._cleaner.finish()
        self._pieces.append(rest)
        async with self._shows:
            text, self._painted = self._painted or "", None
            await self._show(text + rest, ended=True)
            await self._end_stream()
            if self._last is None:
                await self.query(Note).remove()

    async def _show(self, text: str, *, ended: bool = False) -> None:
        parts = self._splitter.feed(text)
        if ended:
            parts += self._splitter.finish()
        for part in parts:
            await self._show_part(part)

    async def _show_part(self, part: Part) -> None:
        match part:
            case Prose(text, starts_new, continues_list):
                if continues_list and self._last is not None:
                    self._last.add_class("-goes-on")
                if starts_new or self._stream is None:
                    await self._end_stream()
                    if not text.strip():
                        return  # a blank line between two blocks needs no widget
                    markdown = Markdown(open_links=False)
                    await self._add(markdown)
                    self._stream = Markdown.get_stream(markdown)
                await self._stream.write(text)
            case CodeOpened(language):
                await self._end_stream()
                await self._add(CodeBlock(language))
            case CodeText(text):
                assert isinstance(self._last, CodeBlock)
                await self._last.append(text)
            case CodeClosed():
                assert isinstance(self._last, CodeBlock)
                await self._last.close()

    async def _add(self, widget: Widget) -> None:
        first = self._last is None
        self._last = widget
        await self.mount(widget)
        if first:
            await self.query(Note).remove()

    async def _end_stream(self) -> None:
        if self._stream is not None:
            stream, self._stream = self._stream, None
            await stream.stop()


class Transcript(VerticalScroll, can_focus=False):
    """All turns of the conversation shown; anchored to its end until the reader scrolls away."""

    DEFAULT_CSS = """
    Transcript {
        height: 1fr;
        scrollbar-size-vertical: 1;
        scrollbar-background: $background;
        scrollbar-color: $foreground 15%;
        padding-bottom: 1;
        &.-details .details { display: block; }
        & > .welcome { padding: 1 2; color: $text-muted; height: auto; }
    }
    """

    def on_mount(self) -> None:
        """Stay at the end."""
        self.anchor()

    async def add_question(self, text: str) -> UserMessage:
        """Show what a person asks, at the end; who reads further up stays there."""
        await self._make_room()
        question = UserMessage(text)
        await self.mount(question)
        return question

    async def add_turn(self, question: str, answer: AnswerView) -> None:
        """Show a question and its answer, empty so far, at the end: in one go, for both wait."""
        await self._make_room()
        await self.mount(UserMessage(question), answer)

    async def add_answer(self, answer: AnswerView) -> AnswerView:
        """Show an answer at the end, empty so far; returns it."""
        await self.mount(answer)
        return answer

    async def add_note(self, text: str) -> None:
        """A remark at the end."""
        await self.mount(Note(text))

    async def clear(self, welcome: str = "") -> None:
        """Remove all turns; show `welcome` until the first one."""
        await self.remove_children()
        if welcome:
            await self.mount(Static(welcome, markup=False, classes="welcome"))
        self.anchor()

    async def _make_room(self) -> None:
        await self.query(".welcome").remove()
        self.query(AnswerView).add_class("-earlier")

    def last_answer(self) -> str:
        """The text of the newest answer, empty if there is none."""
        answers = self.query(AnswerView)
        return answers.last().text if answers else ""

    def toggle_details(self) -> None:
        """Show or hide the details of every turn's figures."""
        self.toggle_class("-details")
