"""One answer as it grows: its Markdown and code part by part, its thought, how it ended.

Knows: painting a streamed answer part by part, the first text before all else.
Does not know: the connection, questions, other turns.
Invariant: every text shown has been through `TextCleaner` first.
Cost: the first text of an answer is painted as plain text in the placeholder's line; Markdown is
made of it behind that.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Collapsible, Markdown, Static

from chatrt_tui import figures
from chatrt_tui.clean import TextCleaner, clean_text
from chatrt_tui.code import CodeBlock
from chatrt_tui.containers import Blank, HighAsContent
from chatrt_tui.reasoning import ThoughtSplitter
from chatrt_tui.segments import CodeClosed, CodeOpened, CodeText, Part, Prose, SegmentSplitter

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.widget import Widget
    from textual.widgets.markdown import MarkdownStream

    from chatrt.client import TurnResult

# One line that no Markdown changes: it looks the same as plain text.
_READS_AS_IT_IS = re.compile(r"(?!\s*(?:[-+]|\d+[.)]))[^*_`#>|~\[\]<\\\n&]*\w[^*_`#>|~\[\]<\\\n&]*")
_THOUGHT_CHARS = (
    2000  # past this a thought goes on in a new widget, as an update lays out all of it
)


class ProsePart(Markdown, HighAsContent, Blank):
    """A part of an answer that is Markdown without code blocks of its own."""


class Note(Static):
    """A remark of the program itself, in a quiet colour."""

    DEFAULT_CSS = """
    Note { padding: 0 2; height: auto; color: $text-muted; }
    Note.-warning { color: $text-warning; }
    Note.-answer { color: $foreground; }
    """

    def __init__(self, text: str, *, warning: bool = False) -> None:
        super().__init__(clean_text(text), markup=False, classes="-warning" if warning else "")


class Thought(Collapsible):
    """What the model thought aloud: open while it comes, closed once it answers."""

    DEFAULT_CSS = """
    Thought {
        margin: 0 2; padding: 0; border: none; background: transparent;
        & > Contents { padding: 0 0 0 2; }
        & Static { color: $text-muted; height: auto; }
        & CollapsibleTitle { padding: 0; color: $text-muted; background: transparent; }
    }
    """

    def __init__(self) -> None:
        self._texts = [""]
        self._parts = [Static(markup=False)]
        self._is_whole = False
        super().__init__(self._parts[0], title="Thinking …", collapsed=False)

    def on_mount(self) -> None:
        """A click opens and closes it; the keyboard stays with the prompt."""
        for title in self.query("CollapsibleTitle"):
            title.can_focus = False

    async def append(self, text: str) -> None:
        """Add to the thought."""
        if len(self._texts[-1]) > _THOUGHT_CHARS and "\n" in text:
            before, _, text = text.partition("\n")
            self._texts[-1] += before
            self._parts[-1].update(self._texts[-1])
            self._texts.append("")
            self._parts.append(Static(markup=False))
            await self.query_one(Collapsible.Contents).mount(self._parts[-1])
        self._texts[-1] += text
        self._parts[-1].update(self._texts[-1])

    def close(self) -> None:
        """The thought is whole, from the first call on."""
        if self._is_whole:
            return
        self._is_whole = True
        num_words = sum(len(text.split()) for text in self._texts)
        self.title = f"Thought for {num_words} word{'s' if num_words != 1 else ''}"
        self.collapsed = True


class AnswerView(Vertical, HighAsContent, Blank):
    """One answer: its Markdown, how it ended, its figures.

    The figures show once it `is_earlier` than the newest: until then they stand in the status line,
    and twice would be once too often.
    """

    DEFAULT_CSS = """
    AnswerView {
        height: auto;
        & > Markdown { padding: 0 2; }
        & > Markdown.-goes-on > MarkdownBlock { margin-bottom: 0; }
        & > .figures { padding: 0 2; color: $text-disabled; height: auto; }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_earlier = False
        self._pieces: list[str] = []
        self._start_over()

    def _start_over(self) -> None:
        """Nothing of the answer is shown; its text is known as before."""
        self._cleaner = TextCleaner()
        self._thoughts = ThoughtSplitter()
        self._splitter = SegmentSplitter()
        self._num_received = 0
        self._painted: str | None = None  # text in the placeholder's line, not among the parts yet
        self._shows = asyncio.Lock()
        self._placeholder = Note("…")
        self._last: Widget | None = None
        self._thought: Thought | None = None
        self._stream: MarkdownStream | None = None
        self._figures: Static | None = None

    @property
    def is_earlier(self) -> bool:
        """Whether a newer answer is shown."""
        return self._is_earlier

    @is_earlier.setter
    def is_earlier(self, is_earlier: bool) -> None:
        # Not a class, which would have all that is inside styled anew while a first text waits.
        self._is_earlier = is_earlier
        if self._figures is not None and self._figures.display != is_earlier:
            self._figures.display = is_earlier

    @property
    def text(self) -> str:
        """The answer so far, cleaned."""
        return "".join(self._pieces)

    @property
    def num_received(self) -> int:
        """How many characters have arrived, before cleaning."""
        return self._num_received

    @property
    def code_blocks(self) -> list[str]:
        """The code in it, block by block."""
        return [block.code for block in self.query(CodeBlock)]

    def compose(self) -> ComposeResult:
        """A line that stands in for the answer until its first text; others may stand above it."""
        yield self._placeholder

    def tell(self, text: str) -> None:
        """Say what the answer waits for, while nothing of it has come."""
        if self._last is None:
            self._placeholder.update(clean_text(text))

    def toggle_thought(self) -> None:
        """Open or close what the model thought."""
        if self._thought is not None:
            self._thought.collapsed = not self._thought.collapsed

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
        self._placeholder.add_class("-answer")
        self._placeholder.update(Content(text))
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
        if stopped and self.is_attached:
            await self.mount(Note("stopped"))

    async def finish(self, result: TurnResult) -> None:
        """The answer has ended."""
        await self._finish_text()
        if not self.is_attached:
            return
        ending = figures.ending(result)
        if ending:
            await self.mount(Note(ending, warning=result.error is not None))
        left_out = figures.left_out(result)
        if left_out:
            await self.mount(Note(left_out))
        summary = figures.summary(result)
        if summary:
            self._figures = Static(summary, markup=False, classes="figures")
            self._figures.display = self._is_earlier
            await self.mount(self._figures)

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
                await self._placeholder.remove()

    async def _show(self, text: str, *, ended: bool = False) -> None:
        if not self.is_attached:
            return  # the screen is being taken down, or the turn is shown no more
        said = self._thoughts.feed(text)
        await self._show_said(said.thought, said.answer)
        if ended:
            rest = self._thoughts.finish()
            await self._show_said(rest.thought, rest.answer)
            for part in self._splitter.finish():
                await self._show_part(part)
        if self._thought is not None and (ended or not self._thoughts.is_thinking):
            self._thought.close()

    async def _show_said(self, thought: str, answer: str) -> None:
        if thought:
            if self._thought is None:
                self._thought = Thought()
                await self._add(self._thought)
            await self._thought.append(thought)
        for part in self._splitter.feed(answer) if answer else ():
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
                    markdown = ProsePart(open_links=False)
                    await self._add(markdown)
                    if not markdown.is_attached:
                        return  # the screen is being taken down
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
            await self._placeholder.remove()

    async def _end_stream(self) -> None:
        if self._stream is not None:
            stream, self._stream = self._stream, None
            await stream.stop()
