"""The page's modules that are plain data in, plain data out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.web.page import Page

RESPONSE = {
    "status": "completed",
    "usage": {
        "input_tokens": 50,
        "input_tokens_details": {"cached_tokens": 48},
        "output_tokens": 7,
    },
    "chatrt": {
        "ttft_ms": 8.04,
        "decode_tps": 243.4,
        "stages": {"queue_ms": 0.01, "prefill_ms": 6.5, "first_sample_ms": 0.4},
        "gap_ms": {"p50": 4.0, "p95": 12.0, "max": 30.2},
        "kv": {"reused_tokens": 48, "typed_ahead_tokens": 9, "computed_tokens": 2},
        "speculation": {"drafter": "head", "drafted": 20, "accepted": 11},
    },
}


def figures(page: Page, call: str, *arguments: object) -> Any:
    return page.asynchronous(
        f"const figures = await import('/figures.js'); return figures.{call}(...given)", *arguments
    )


def test_figures_are_put_into_words(ready: Page) -> None:
    assert figures(ready, "summary", RESPONSE) == "TTFT 8.0 ms · 243 tok/s · 96 % cached"
    assert figures(ready, "summary", RESPONSE, 12.4) == "TTFT 12 ms · 243 tok/s · 96 % cached"
    assert figures(ready, "stages", RESPONSE) == [["prefill", 6.5], ["first sample", 0.4]]
    assert figures(ready, "lines", RESPONSE, 12.4) == [
        ["TTFT", "12 ms here, 8.0 ms of it in the server"],
        ["tokens", "48 cached, 9 of them typed ahead · 2 computed · 7 written"],
        ["gaps", "p50 4.0 ms · p95 12 ms · max 30 ms"],
        ["drafts", "11 of 20 accepted (head)"],
    ]


def test_what_is_not_known_is_left_out(ready: Page) -> None:
    bare = {"status": "completed", "usage": None}
    assert figures(ready, "summary", bare) == ""
    assert figures(ready, "lines", bare) == figures(ready, "stages", bare) == []


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ({"status": "completed"}, ""),
        ({"status": "cancelled", "incomplete_details": {"reason": "cancelled"}}, "stopped"),
        ({"status": "incomplete"}, "cut off at the longest answer allowed"),
        ({"status": "failed", "error": {"message": "no pages"}}, "no pages"),
        (
            {
                "status": "failed",
                "error": {"code": "context_length_exceeded", "message": "9 tokens, 8 fit."},
            },
            "9 tokens, 8 fit. Shorten the message, or begin a new chat.",
        ),
    ],
)
def test_why_an_answer_is_not_whole(ready: Page, response: object, expected: str) -> None:
    assert figures(ready, "ending", response) == expected


def test_a_time_is_told_in_one_short_word(ready: Page) -> None:
    script = """
        const {inFull, shortly} = await import('/when.js');
        const now = new Date(2026, 10, 12, 14, 3); // a Thursday
        const ago = (minutes) => new Date(now - 60_000 * minutes);
        return [
          ...[-5, 0.5, 59.9, 60, 23.9 * 60, 24 * 60, 5.9 * 1440].map((m) => shortly(ago(m), now)),
          shortly(new Date(2026, 10, 6), now), shortly(new Date(2025, 11, 31), now),
          inFull(now),
        ];
    """
    *told, full = ready.asynchronous(script)
    assert told == ["now", "now", "59 min", "1 h", "23 h", "Wed", "Fri", "6 Nov", "Dec 2025"]
    assert full == "12 Nov 2026, 14:03"


def turn(turn_id: str, parent: str | None, question: str = "q") -> dict[str, Any]:
    content = [{"type": "input_text", "text": question}]
    return {
        "id": turn_id,
        "previous_response_id": parent,
        "status": "completed",
        "input": [{"role": "user", "content": content}],
        "output": [{"role": "assistant", "content": [{"text": f"to {turn_id}"}]}],
    }


# a ─ b ─ c       two branches behind b, and a second first turn;
#       └ d       z follows a turn that was deleted
# e
TURNS = [turn("a", None), turn("b", "a"), turn("c", "b"), turn("d", "b"), turn("e", None)]
TREE = """
    const {Tree, Turn, inputOf} = await import('/tree.js');
    const tree = Tree.of(given[0]);
    const path = () => tree.path.map((one) => one.id).join('');
    const siblings = (id) => tree.siblings(tree.find(id)).map((one) => one.id).join('');
"""


def test_a_tree_shows_its_newest_branch_and_any_other(ready: Page) -> None:
    script = """
        const shown = [path()];
        for (const id of ['a', 'c', 'b', 'e']) { tree.show(tree.find(id)); shown.push(path()); }
        return [shown, siblings('a'), siblings('b'), siblings('c')];
    """
    told = ready.asynchronous(TREE + script, TURNS)
    assert told == [["e", "abd", "abc", "abd", "e"], "ae", "b", "cd"]


def test_a_turn_behind_a_deleted_one_is_a_first_turn(ready: Page) -> None:
    told = ready.asynchronous(TREE + "return [path(), siblings('z')]", [turn("z", "gone")])
    assert told == ["z", "z"]


def test_a_next_message_follows_the_last_turn_that_any_history_holds(ready: Page) -> None:
    script = """
        const parents = [tree.parentOfNext.id];
        for (const status of ['failed', 'in_progress', 'cancelled']) {
          const turn = new Turn({id: status, parent: tree.find('a'), status});
          tree.add(turn);
          parents.push(tree.parentOfNext.id);
        }
        tree.add(new Turn({parent: tree.find('a'), status: 'failed'}));
        parents.push(tree.parentOfNext.id, new Tree().parentOfNext);
        return parents;
    """
    told = ready.asynchronous(TREE + script, [turn("a", None)])
    assert told == ["a", "a", "a", "cancelled", "a", None]


def test_what_others_did_is_merged_and_moves_only_who_was_at_its_parent(ready: Page) -> None:
    script = """
        tree.show(tree.find('c'));
        const first = tree.merge([...given[0], given[1]]).map((one) => one.id);
        const after = path();
        const second = tree.merge([...given[0], given[1], given[2]]).map((one) => one.id);
        return [first, after, second, path(), siblings('f')];
    """
    told = ready.asynchronous(TREE + script, TURNS, turn("f", "b"), turn("g", "c"))
    assert told == [["f"], "abc", ["g"], "abcg", "cdf"]


def test_controls_and_sequences_are_taken_out_and_nothing_else(ready: Page) -> None:
    script = "const {cleanText} = await import('/clean.js'); return given.map(cleanText)"
    texts = [
        "a\x1b[1;31mb\x1b[0mc",
        "a\x1b]8;;http://x\x07b\x1b]8;;\x1b\\c",
        "a\x9b2Jb\x90q\x9cc",
        "tab\tline\r\nnext\x7f\x85",
        "\u202eabc\u2069 עברית \u200f العربية 👩‍👩‍👧",
        "half\x1b[3",
        "half\x1b",
    ]
    assert ready.asynchronous(script, *texts) == [
        "abc",
        "abc",
        "abc",
        "tab\tline\nnext",
        "abc עברית \u200f العربية 👩‍👩‍👧",
        "half",
        "half",
    ]
