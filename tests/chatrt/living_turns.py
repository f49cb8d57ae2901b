"""Turns as a client knows them, and what they must be: fresh runs of their whole sequences.

Knows: frames of the wire, the template, an engine that never reuses anything. Does not know:
sockets, the server's inside.
Invariant: what a turn is compared with is made of what clients sent and of other fresh runs alone;
nothing of it comes from the server but seeds and how many tokens a cancelled answer had.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from chatrt.prefix import num_common_tokens
from chatrt.testing.engine import engine_over, run_outcome, turn_request
from chatrt.text.detokenizer import IncrementalDetokenizer
from chatrt.text.messages import Message
from chatrt.text.prompt import PromptBuilder
from chatrt.wire.events import logprob_entry
from chatrt.wire.log import DELTA
from chatrt.wire.messages import ResponseCreate, decode
from tests.chatrt.living_server import DEFAULTS, Size, native_target

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from chatrt.params import SamplingParams
    from chatrt.testing.engine import Outcome
    from chatrt.text.tokenizer import Tokenizer

TERMINAL = ("response.completed", "response.incomplete", "response.failed")
ANSWER, PREFILL, PARTIAL = "answer", "prefill", "partial"


@dataclass(eq=False)
class Conversation:
    """A conversation; `newest` are the turns of which one is its newest, None: it is empty."""

    key: str
    conversation_id: str
    newest: list[Turn | None] = field(default_factory=lambda: [None])
    gone: bool = False


@dataclass(eq=False)
class Reading:
    """What one connection got of one response, from behind `start_text` on."""

    start_text: str = ""
    after: int | None = None
    numbers: list[int] = field(default_factory=list)
    deltas: list[tuple[int, str]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None

    def take(self, event: dict[str, Any]) -> None:
        """One more frame; asserts that it may follow those before."""
        assert self.end is None, f"{event['type']} behind the last event of a response"
        number = event["sequence_number"]
        last = self.numbers[-1] if self.numbers else self.after
        assert number > (-1 if last is None else last), (number, last)
        self.numbers.append(number)
        if event["type"] == DELTA:
            self.deltas.append((number, event["delta"]))
            self.logprobs += event["logprobs"]
        elif event["type"] in TERMINAL:
            self.end = event["response"]
            assert self.text == text_of(event["response"])

    @property
    def text(self) -> str:
        """The answer's text as far as it is known here."""
        return self.start_text + "".join(delta for _, delta in self.deltas)

    def resumed(self, index: int) -> Reading:
        """A reading that goes on behind this one's event `index`."""
        after = self.numbers[index]
        shown = "".join(delta for number, delta in self.deltas if number <= after)
        return Reading(self.start_text + shown, after)


@dataclass(eq=False)
class Turn:
    """A turn that was asked for. `parents` are the turns of which it follows one (None: none).

    `may` holds what may become of it besides an answer: status or error codes. `link` is the turn
    that it cannot go on without, known once it was `checked`.
    """

    number: int
    key: str
    kind: str
    frame: dict[str, Any]
    messages: tuple[Message, ...]
    parents: list[Turn | None]
    conversation: Conversation | None
    may: set[str] = field(default_factory=set)
    response_id: str | None = None
    readings: list[Reading] = field(default_factory=list)
    error: dict[str, Any] | None = None
    end: dict[str, Any] | None = None
    dropped: bool = False
    gone: bool = False
    unsure: bool = False
    checked: bool = False
    parent: Turn | None = None
    link: Turn | None = None
    base: Turn | None = None
    carried: tuple[Message, ...] = ()
    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether its end is still to come."""
        return self.end is None and self.error is None and not self.dropped

    @property
    def status(self) -> str | None:
        """How its response ended."""
        return None if self.end is None else self.end["status"]

    @property
    def stored(self) -> bool:
        """Whether it is to be found after a restart."""
        return bool(self.frame.get("store", True))

    @property
    def is_parent(self) -> bool:
        """Whether it ended as something that can be continued."""
        usable = self.kind != PARTIAL and self.status not in (None, "failed")
        return usable and not self.gone

    @property
    def sequence_ids(self) -> list[int]:
        """All ids of its tip."""
        return [*self.prompt_ids, *self.output_ids]

    def goes_on(self) -> bool | None:
        """Whether it can be continued: all that it builds on is there; None if it is unsure."""
        turn: Turn | None = self
        unsure = False
        while turn is not None:
            if turn.gone or not turn.is_parent:
                return None if unsure else False
            unsure = unsure or turn.unsure
            turn = turn.link
        return None if unsure else True


class FreshRuns:
    """Runs whole sequences on an engine that never reuses anything and drafts nothing."""

    def __init__(self, tokenizer: Tokenizer, size: Size) -> None:
        target = native_target(tokenizer, replace(size, num_pages=64))
        self._engine = engine_over(target, max_context=size.max_context)
        self._names = itertools.count()
        self._known: dict[tuple[object, ...], Outcome] = {}

    def run(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Outcome:
        """What the turn gives by itself."""
        key = (tuple(prompt_ids), repr(sampling))
        if key not in self._known:
            name = f"fresh {next(self._names)}"
            request = turn_request(name, prompt_ids, sampling=sampling, salt=name)
            self._known[key] = run_outcome(self._engine, request)
            self._engine.forget([name])
        return self._known[key]


class Oracle:
    """Compares ended turns with fresh runs, and remembers what each key's pages may know."""

    def __init__(self, tokenizer: Tokenizer, size: Size) -> None:
        self._tokenizer = tokenizer
        self._size = size
        self._builder = PromptBuilder(tokenizer)
        self._fresh = FreshRuns(tokenizer, size)
        self._known_ids: dict[str, list[tuple[Turn, list[int]]]] = {}
        self.num_compared = 0

    def check(self, turn: Turn) -> None:
        """What became of an ended turn is what had to."""
        if turn.checked or turn.is_open:
            return
        turn.checked = True
        for parent in turn.parents:
            if parent is not None:
                self.check(parent)
        if turn.error is not None:
            self._check_refusal(turn, turn.error)
        elif turn.end is not None:
            self._check_end(turn, turn.end)
        else:  # nobody heard of it again, but its prompt may have been computed
            known = self._known_ids.setdefault(turn.key, [])
            known += [(turn, self._prompt(turn, parent)) for parent in turn.parents]

    def _check_refusal(self, turn: Turn, error: dict[str, Any]) -> None:
        code = error["code"]
        if code == "context_length_exceeded":
            limit = self._size.max_context
            lengths = [len(self._prompt(turn, parent)) for parent in turn.parents]
            assert any(
                n >= limit and f" {n} " in error["message"] and f" {limit}" in error["message"]
                for n in lengths
            ), (lengths, error)
        elif code == "previous_response_not_found":
            assert "not_found" in turn.may or any(p and not p.goes_on() for p in turn.parents), error
        else:
            assert code in turn.may, (turn.frame, error)

    def _check_end(self, turn: Turn, end: dict[str, Any]) -> None:
        if end["status"] == "cancelled":
            assert "cancelled" in turn.may, f"nobody cancelled turn {turn.number}"
        if end["status"] == "failed":
            allowed = {"kv_exhausted", *turn.may}
            assert end["error"]["code"] in allowed, end["error"]
        num_input = end["usage"]["input_tokens"]
        plans = [(parent, self._prompt(turn, parent)) for parent in turn.parents]
        plans = [plan for plan in plans if len(plan[1]) == num_input]
        assert plans, (turn.frame, num_input)
        differences = []
        for parent, prompt_ids in plans:
            difference = self._difference(turn, end, prompt_ids)
            if difference is None:
                self._take(turn, parent, prompt_ids)
                self._check_figures(turn, end)
                return
            differences.append(difference)
        raise AssertionError((turn.frame, differences))

    def _difference(
        self, turn: Turn, end: dict[str, Any], prompt_ids: list[int]
    ) -> tuple[object, ...] | None:
        """How the answer differs from a fresh run; None if it does not. Sets `output_ids`."""
        turn.output_ids = []
        text, num_generated = text_of(end), end["usage"]["output_tokens"]
        whole = end["status"] in ("completed", "incomplete")
        if turn.kind != ANSWER or not (whole or num_generated):
            return None if text == "" else ("text", text, "")
        fresh = self._fresh.run(prompt_ids, self._sampling(turn, end))
        expected = fresh.text if whole else fresh.text[: len(text)]
        if text != expected:
            return ("text", text, fresh.text)
        if whole:
            reason = "completed" if fresh.end.reason.value == "end_of_turn" else "incomplete"
            if end["status"] != reason:
                return ("status", end["status"], reason)
            turn.output_ids = list(fresh.end.output_ids)
            num_expected = fresh.end.num_generated
            if fresh.end.stop_string is not None:
                num_expected = len(fresh.end.output_ids)
            if num_generated != num_expected:
                return ("tokens", num_generated, num_expected)
        else:
            turn.output_ids = self._kept(fresh.token_ids[:num_generated], text)
        self.num_compared += 1
        return self._logprob_difference(turn, end, fresh)

    def _logprob_difference(
        self, turn: Turn, end: dict[str, Any], fresh: Outcome
    ) -> tuple[object, ...] | None:
        if "include" not in turn.frame or "logprobs" not in end["output"][0]["content"][0]:
            return None
        found = end["output"][0]["content"][0]["logprobs"]
        if not found and self._is_from_store(turn):
            return None
        bytes_of = self._tokenizer.token_bytes
        shown = fresh.logprobs[: fresh.end.num_shown]
        expected = [
            logprob_entry(
                bytes_of(one.token_id, skip_special=False),
                one.logprob,
                [(bytes_of(token_id, skip_special=False), value) for token_id, value in one.top],
            )
            for one in shown
        ]
        if end["status"] not in ("completed", "incomplete"):
            expected = expected[: len(found)]
        return None if found == expected else ("logprobs", found, expected)

    @staticmethod
    def _is_from_store(turn: Turn) -> bool:
        """Whether its end was not read off a socket: the store keeps no log-probabilities."""
        return all(reading.end is None for reading in turn.readings)

    def _sampling(self, turn: Turn, end: dict[str, Any]) -> SamplingParams:
        message = decode(json.dumps(turn.frame))
        assert isinstance(message, ResponseCreate)
        sampling = message.sampling(DEFAULTS)
        return replace(sampling, seed=0 if sampling.greedy else end["chatrt"]["seed"])

    def _kept(self, token_ids: Sequence[int], text: str) -> list[int]:
        """The ids that a cancelled answer keeps: those of the text that was sent."""
        detokenizer, ends, num_chars = IncrementalDetokenizer(self._tokenizer), [], 0
        for token_id in token_ids:
            num_chars += len(detokenizer.push((token_id,)))
            ends.append(num_chars)
        best = max((end for end in ends if end <= len(text)), default=0)
        num_kept = ends.index(best) + 1 if best else 0
        rest = self._tokenizer.encode(text[best:], behind=best > 0)
        return [*token_ids[:num_kept], *rest]

    def _prompt(self, turn: Turn, parent: Turn | None) -> list[int]:
        """The sequence that the turn asked with, behind a parent."""
        messages, base = turn.messages, parent
        if parent is not None and _is_prefilled(parent):
            messages, base = (*parent.carried, *messages), parent.base
        answers = turn.kind != PREFILL
        if turn.kind == PARTIAL and not messages[-1].content.strip():
            if base is None:
                return self._builder.open_first(messages)
            history = self._history(base)
            return history + self._builder.open_follow_up(messages, tip_ids=history)
        if base is None:
            return self._builder.first_prompt(messages, add_generation_prompt=answers)
        history = self._history(base)
        return history + self._builder.follow_up(
            messages, tip_ids=history, add_generation_prompt=answers
        )

    def _history(self, turn: Turn) -> list[int]:
        """What a turn reads as once another one follows."""
        if turn.kind != ANSWER:
            return turn.sequence_ids
        settled = self._builder.settle(turn.prompt_ids, turn.output_ids)
        if settled is None:
            return turn.sequence_ids
        return [*turn.sequence_ids[: settled.start], *settled.token_ids]

    def _take(self, turn: Turn, parent: Turn | None, prompt_ids: list[int]) -> None:
        """The turn is known now: what it follows, and what may follow it."""
        turn.parent, turn.prompt_ids = parent, prompt_ids
        turn.base, turn.carried = parent, turn.messages
        if parent is not None and _is_prefilled(parent):
            turn.base, turn.carried = parent.base, (*parent.carried, *turn.messages)
        # A turn that is stored while its parent is not is stored with all that was before.
        is_apart = turn.stored and turn.base is not None and not turn.base.stored
        turn.link = None if is_apart else turn.base
        known = self._known_ids.setdefault(turn.key, [])
        known.append((turn, turn.sequence_ids))
        if turn.kind == ANSWER and turn.status != "failed":
            history = self._history(turn)
            known.append((turn, [*history, *self._builder.glue(history)]))

    def _check_figures(self, turn: Turn, end: dict[str, Any]) -> None:
        usage, kv = end["usage"], end["chatrt"]["kv"]
        reused, computed = kv["reused_tokens"], kv["computed_tokens"]
        assert usage["input_tokens_details"]["cached_tokens"] == reused
        assert usage["input_tokens_details"]["cache_write_tokens"] == computed
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert 0 <= kv["restored_tokens"] <= reused, kv
        assert 0 <= kv["typed_ahead_tokens"] <= reused, kv
        assert (kv["restored_from"] is None) == (kv["restored_tokens"] == 0), kv
        if end["status"] in ("completed", "incomplete"):
            assert reused + computed == usage["input_tokens"], (usage, kv)
        else:
            assert reused + computed <= usage["input_tokens"], (usage, kv)

    def check_reuse(self, turns: Iterable[Turn]) -> None:
        """No turn found what others of its key had not computed; all ended ones are checked."""
        for turn in turns:
            if turn.end is None or turn.kind == PARTIAL:
                continue
            known = self._known_ids[turn.key]
            most = max(
                (num_common_tokens(ids, turn.prompt_ids) for whose, ids in known if whose is not turn),
                default=0,
            )
            reused = turn.end["chatrt"]["kv"]["reused_tokens"]
            assert reused <= most, (reused, most, turn.frame)


def _is_prefilled(turn: Turn) -> bool:
    return turn.kind == PREFILL and turn.status == "completed"


def text_of(response: dict[str, Any]) -> str:
    """The text of a response object."""
    return "".join(part["text"] for item in response["output"] for part in item["content"])
