"""What turns must give: fresh runs of their whole sequences.

Knows: the template, an engine that never reuses anything, ended turns. Does not know: sockets, the
server's inside.
Invariant: what a turn is compared with is made of what clients sent and of other fresh runs alone;
nothing of it comes from the server but seeds and how many tokens a cancelled answer had.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from chatrt.prefix import num_common_tokens
from chatrt.testing.engine import engine_over, run_outcome, turn_request
from chatrt.text.detokenizer import IncrementalDetokenizer
from chatrt.text.prompt import PromptBuilder
from chatrt.wire.events import logprob_entry
from chatrt.wire.messages import ResponseCreate, decode
from tests.chatrt.living_server import DEFAULTS, Size, native_target
from tests.chatrt.living_turns import ANSWER, PARTIAL, PREFILL, Turn, text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from chatrt.params import SamplingParams
    from chatrt.testing.engine import Outcome
    from chatrt.text.tokenizer import Tokenizer


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
        self._blind: set[str] = set()
        self.num_compared = 0

    def check(self, turns: Iterable[Turn]) -> None:
        """What became of these ended turns is what had to.

        Which turn one follows may only be seen by what it answered: those come first that follow
        what is known.
        """
        turns = list(turns)
        waiting = [turn for turn in turns if turn.end is not None]
        while waiting:
            late = [turn for turn in waiting if not self._is_explained(turn)]
            if len(late) == len(waiting):
                late = [turn for turn in waiting if not turn.follows_unheard]
                assert len(late) < len(waiting), [self._why(turn) for turn in late]
                for turn in waiting:
                    if turn.follows_unheard:
                        turn.checked = True
                        self._blind.add(turn.key)
            waiting = late
        for turn in turns:
            if turn.end is None:
                turn.checked = True
                if turn.error is not None:
                    self._check_refusal(turn, turn.error)
                else:  # nobody heard of it again, but its prompt may have been computed
                    known = self._known_ids.setdefault(turn.key, [])
                    known += [(turn, self._prompt(turn, parent)) for parent in turn.parents]

    def _is_explained(self, turn: Turn) -> bool:
        """Whether it follows one of its parents that are checked already."""
        assert turn.end is not None
        for parent, prompt_ids in self._plans(turn):
            if self._difference(turn, turn.end, prompt_ids) is None:
                turn.checked = True
                self._take(turn, parent, prompt_ids)
                self._check_end(turn, turn.end)
                return True
        return False

    def _plans(self, turn: Turn) -> list[tuple[Turn | None, list[int]]]:
        assert turn.end is not None
        num_input = turn.end["usage"]["input_tokens"]
        known = [p for p in turn.parents if p is None or (p.checked and p.end is not None)]
        plans = [(parent, self._prompt(turn, parent)) for parent in known]
        return [plan for plan in plans if len(plan[1]) == num_input]

    def _why(self, turn: Turn) -> object:
        """What speaks against each way in which a turn may have come about."""
        assert turn.end is not None
        differences = [self._difference(turn, turn.end, ids) for _, ids in self._plans(turn)]
        lengths = [len(self._prompt(turn, parent)) for parent in turn.parents]
        num_input = turn.end["usage"]["input_tokens"]
        return turn, num_input, lengths, differences, turn.parents

    def _check_refusal(self, turn: Turn, error: dict[str, Any]) -> None:
        code = error["code"]
        if code == "context_length_exceeded":
            limit = self._size.max_context
            found = [int(n) for n in re.findall(r" (\d+)\b", error["message"])]
            assert found[0] >= limit == found[1], error
            # Which one of several half-typed prompts was refused is not said.
            lengths = [len(self._prompt(turn, parent)) for parent in turn.parents]
            is_known = not (turn.kind == PARTIAL or turn.follows_unheard)
            assert found[0] in lengths or not is_known, (lengths, error, turn)
        elif code == "previous_response_not_found":
            assert "not_found" in turn.may or any(p and not p.goes_on() for p in turn.parents), (
                error
            )
        else:
            assert code in turn.may, (turn, error, turn.parents)

    def _check_end(self, turn: Turn, end: dict[str, Any]) -> None:
        if end["status"] == "cancelled":
            # Nobody waits for a half-typed prompt: it gives way to any answer.
            is_asked = turn.kind == PARTIAL or "cancelled" in turn.may
            assert is_asked, ("nobody cancelled it", turn, turn.parents)
        if end["status"] == "failed":
            allowed = {"kv_exhausted", *turn.may}
            assert end["error"]["code"] in allowed, end["error"]
        self._check_figures(turn, end)

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
            if turn.end is None or turn.kind == PARTIAL or turn.key in self._blind:
                continue
            known = self._known_ids[turn.key]
            most = max(
                (
                    num_common_tokens(ids, turn.prompt_ids)
                    for whose, ids in known
                    if whose is not turn
                ),
                default=0,
            )
            reused = turn.end["chatrt"]["kv"]["reused_tokens"]
            assert reused <= most, (reused, most, turn.frame)


def _is_prefilled(turn: Turn) -> bool:
    return turn.kind == PREFILL and turn.status == "completed"
