from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support import time_scale

if TYPE_CHECKING:
    from tests.web.page import Page

# For the tests' scripts: a text as the page shows it, whole or in pieces.
HELPERS = """
    const {MarkdownView} = await import('/markdown.js');
    const whole = (text) => {
      const node = document.createElement('div');
      new MarkdownView(node).update(text);
      return node.innerHTML;
    };
"""
EMPHASIS = (
    "<p><em>a</em> <strong>b</strong> <em><strong>c</strong></em> <em>d</em> <del>e</del></p>"
)
TABLE = (
    '<div class="table"><table><thead><tr><th class="left">a</th><th class="right">b</th>'
    '</tr></thead><tbody><tr><td class="left">1</td><td class="right"></td></tr></tbody>'
    "</table></div><p>x | y</p>"
)
SAMPLE = """\
# Title #

A paragraph with *emphasis*, **strong *both***, `code`, ~~gone~~ and [a link](https://a.example/(b)).
Its second line.
- item
- another
  1. nested
  2. deeper

     a paragraph of the item
- last

1) first
2) second

> quote with **bold**
> > nested

```python
def f(x):
    return x  # **not bold**

```
~~~
an unclosed ``` fence
~~~
a | b
--|:-:
1 | `2`
3 \\| 4 | 5

---
***
Setext is not served
--- x
-x
https://a.example/x. <https://b.example> <b>raw</b>
"""


def asynchronous(page: Page, body: str, *arguments: object) -> Any:
    """What a script returns that has `HELPERS`."""
    return page.asynchronous(HELPERS + body, *arguments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# One\n### Three ##", "<h3>One</h3><h5>Three</h5>"),
        ("#no\n\na # b", "<p>#no</p><p>a # b</p>"),
        ("a\nb\n\nc", "<p>a<br>b</p><p>c</p>"),
        ("*a* **b** ***c*** _d_ ~~e~~", EMPHASIS),
        ("snake_case_name 2 * 3 * 4", "<p>snake_case_name 2 * 3 * 4</p>"),
        ("**open", "<p>**open</p>"),
        (r"\*a\* \<b\> \\", r"<p>*a* &lt;b&gt; \</p>"),
        ("`a`` b` `` c ` d ``", "<p><code>a`` b</code> <code>c ` d</code></p>"),
        ("`*a*` `<b>`", "<p><code>*a*</code> <code>&lt;b&gt;</code></p>"),
        ("- a\n- b\n  - c\n\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("1. a\n- b", "<ol><li>a</li></ol><ul><li>b</li></ul>"),
        ("- a\n\n  b\n\nc", "<ul><li>a<p>b</p></li></ul><p>c</p>"),
        ("- a\nlazy\n\nb", "<ul><li>a<br>lazy</li></ul><p>b</p>"),
        ("> a\n> - b\n\nc", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote><p>c</p>"),
        ("---\n* * *\n- - -", "<hr><hr><hr>"),
        ("<b>x</b> &amp; &#60;", "<p>&lt;b&gt;x&lt;/b&gt; &amp;amp; &amp;#60;</p>"),
        ("[a](ftp://x) [b](/x) [c]( )", "<p>[a](ftp://x) [b](/x) [c]( )</p>"),
        ("[a] [b](c [d", "<p>[a] [b](c [d</p>"),
        ("| a | b |\n|:--|--:|\n| 1 |\n\nx | y", TABLE),
        ("", ""),
    ],
)
def test_markdown_becomes_these_nodes(ready: Page, text: str, expected: str) -> None:
    assert asynchronous(ready, "return whole(given[0])", text) == expected


def test_a_link_is_one_whatever_stands_in_its_text(ready: Page) -> None:
    link = '<a href="{0}" title="{0}" target="_blank" rel="noopener noreferrer">{1}</a>'
    for text, address, shown in (
        ("[*a* `b`](https://a.example)", "https://a.example/", "<em>a</em> <code>b</code>"),
        ('[a](https://a.example/b "title")', "https://a.example/b", "a"),
        ("[](https://a.example/)", "https://a.example/", "https://a.example/"),
        ("![alt](https://a.example/p.png)", "https://a.example/p.png", "alt"),
        ("[a [b] c](https://a.example/)", "https://a.example/", "a [b] c"),
        ("[x](https://a.example/(y))", "https://a.example/(y)", "x"),
    ):
        assert asynchronous(ready, "return whole(given[0])", text) == (
            f"<p>{link.format(address, shown)}</p>"
        )


def test_a_growing_text_shows_at_every_letter_what_the_whole_would(ready: Page) -> None:
    script = """
        const node = document.createElement('div');
        const view = new MarkdownView(node);
        for (let end = 0; end <= given[0].length; end += 1) {
          view.update(given[0].slice(0, end));
          const expected = whole(given[0].slice(0, end));
          if (node.innerHTML !== expected) {
            return [given[0].slice(0, end).slice(-80), node.innerHTML, expected];
          }
        }
        return [];
    """
    assert asynchronous(ready, script, SAMPLE) == []


def test_any_text_in_any_pieces_shows_what_the_whole_would(ready: Page) -> None:
    """Random texts of what matters to Markdown; `seed` makes them the same each time."""
    script = """
        const bits = ['a', 'b c', '\\n', '\\n\\n', '\\n', '- ', '1. ', '> ', '# ', '```', '~~~',
          '  ', '    ', '*', '**', '_', '`', '[x](', 'https://a.example', ')', '|', '--|--',
          '---', '~~', '\\\\'];
        let seed = 7;
        const below = (n) => (seed = (seed * 1103515245 + 12345) % 2147483648) % n;
        for (let run = 0; run < 400; run += 1) {
          const node = document.createElement('div');
          const view = new MarkdownView(node);
          let text = '';
          for (let piece = 0; piece < 60; piece += 1) {
            for (let n = below(3); n >= 0; n -= 1) text += bits[below(bits.length)];
            view.update(text);
          }
          if (node.innerHTML !== whole(text)) return [text, node.innerHTML, whole(text)];
        }
        return [];
    """
    assert asynchronous(ready, script) == []


def test_a_text_of_too_many_elements_ends_as_it_was_written(ready: Page) -> None:
    script = """
        const node = document.createElement('div');
        new MarkdownView(node, {mostElements: 4}).update(given[0]);
        return node.innerHTML;
    """
    told = asynchronous(ready, script, "# one\n\n- two\n- **three**\n\n*four*\nfive\n")
    assert told == '<h3>one</h3><p class="plain">- two\n- **three**\n\n*four*\nfive\n</p>'


def test_a_list_of_2000_items_with_marks_is_shown_whole(ready: Page) -> None:
    text = "".join(f"- item {index} with **bold**, `code` and *more*\n" for index in range(2000))
    script = """
        const node = document.createElement('div');
        new MarkdownView(node).update(given[0]);
        return node.querySelectorAll('strong').length;
    """
    assert asynchronous(ready, script, text) == 2000


def test_any_text_in_any_pieces_ends_plain_at_the_same_place(ready: Page) -> None:
    script = """
        const bits = ['a', '\\n', '\\n\\n', '- ', '> ', '# ', '```', '*', '`', 'a|b', '|-|-', '|',
          '---'];
        const shown = (node) => node.innerHTML;
        let seed = 11;
        const below = (n) => (seed = (seed * 1103515245 + 12345) % 2147483648) % n;
        for (let run = 0; run < 300; run += 1) {
          const [node, other] = [0, 0].map(() => document.createElement('div'));
          const view = new MarkdownView(node, {mostElements: 12});
          let text = '';
          for (let piece = 0; piece < 40; piece += 1) {
            for (let n = below(3); n >= 0; n -= 1) text += bits[below(bits.length)];
            view.update(text);
          }
          new MarkdownView(other, {mostElements: 12}).update(text);
          if (shown(node) !== shown(other)) return [text, shown(node), shown(other)];
          const made = [...node.querySelectorAll('*')].filter((one) => one.className !== 'plain');
          if (made.length > 12) return [text, made.length];
        }
        return [];
    """
    assert asynchronous(ready, script) == []


def test_a_table_of_700_columns_and_700_short_rows_hangs_the_page(ready: Page) -> None:
    text = "a|" * 700 + "\n" + "-|" * 700 + "\n" + "|\n" * 700
    script = """
        const node = document.createElement('div');
        new MarkdownView(node, {mostElements: Infinity}).update(given[0]);
        return [node.querySelectorAll('th').length, node.querySelectorAll('tr').length,
          node.querySelectorAll('*').length];
    """
    columns, rows, elements = asynchronous(ready, script, text)
    assert (columns, rows) == (700, 701)
    assert elements < 2 * len(text)  # every row filled would make 491,493


def test_an_address_that_is_none_leaves_the_next_one_a_link(ready: Page) -> None:
    told = asynchronous(ready, "return whole(given[0])", "http://[ and http://[https://a.example/b")
    assert 'href="https://a.example/b"' in told


def test_another_text_takes_the_place_of_the_first(ready: Page) -> None:
    script = """
        const node = document.createElement('div');
        const view = new MarkdownView(node);
        view.update('a\\n\\nb\\n\\nc\\n\\nd');
        view.update('- x\\n- y', {grows: false});
        return node.innerHTML;
    """
    assert asynchronous(ready, script) == "<ul><li>x</li><li>y</li></ul>"


def test_nodes_that_are_done_are_left_alone_and_a_fence_grows_as_text(ready: Page) -> None:
    script = """
        const node = document.createElement('div');
        const view = new MarkdownView(node);
        view.update('one\\n\\n- a\\n- b\\n\\n```js\\nfirst');
        const [paragraph, list, code] = node.children;
        const letters = code.querySelector('code').firstChild;
        const item = list.firstChild;
        view.update('one\\n\\n- a\\n- b\\n\\n```js\\nfirst\\nsecond\\n');
        view.update('one\\n\\n- a\\n- b\\n\\n```js\\nfirst\\nsecond\\n```\\n\\nend');
        return [node.children[0] === paragraph, node.children[1] === list,
          list.firstChild === item, node.children[2].querySelector('code').firstChild === letters,
          letters.data, node.children[3].textContent];
    """
    assert asynchronous(ready, script) == [True, True, True, True, "first\nsecond", "end"]


UNITS = (
    "*a ", "**a", "_a _", "[", "[a](", "![[](", "](", "`", "`a``", "~~", "> ", "- ", "1. a\n",
    "<", "http://a", "|", "a|b\n", "\\", "#", "# #", "```\n", "- a\n\n", "(", "[x](https://a ",
    "http://[", "http://%", "ahttp://a", "[a](http://[)", "https://.", "a)", "* ", "~~~\n````\n",
)  # fmt: skip
# A beginning, what is repeated behind it, and an end that may make it all mean something else.
AROUND = (
    ("http://a", ")", ""), ("http://a", "()", ".)"), ("", "~", "`"), ("```", " ", "`"),
    ("~~~", " ", "`"), ("", "`", "\na"), ("[a](http://b", " ", ")"), ("[a](http://b '", "c", ")"),
    ("[a]", "(", ")"), ("<http://", "a", ""), ("# a", "#", "x"), ("", "* ", "x"), ("-", "\t", "a"),
)  # fmt: skip


@pytest.mark.parametrize(("start", "unit", "end"), [*(("", unit, "") for unit in UNITS), *AROUND])
def test_no_text_takes_long_however_hostile(ready: Page, start: str, unit: str, end: str) -> None:
    script = """
        const {parseInline} = await import('/inline.js');
        const [start, unit, end] = given;
        const text = start + unit.repeat(Math.ceil(100000 / unit.length)) + end;
        const startMs = performance.now();
        whole(text);
        const shownMs = performance.now();
        parseInline(text); // the page may show so much as it was written
        return Math.max(shownMs - startMs, performance.now() - shownMs);
    """
    took_ms = asynchronous(ready, script, start, unit, end)
    assert took_ms < 1500 * time_scale()  # quadratic work would take a minute
