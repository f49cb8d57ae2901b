from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from selenium.webdriver.common.keys import Keys

from tests.web.conftest import FOREIGN_HOST, KEY
from tests.web.live import LiveServer, Proxy, foreign_page, until

if TYPE_CHECKING:
    from tests.web.live import LoopThread
    from tests.web.page import Page

HOSTILE = """\
<img src=x onerror="window.harmed = 1"><script>window.harmed = 2</script>
</div></article><iframe src="javascript:window.harmed = 3"></iframe><svg onload="window.harmed = 4">

[one](javascript:window.harmed=5) [two](data:text/html,<script>1</script>) [three](vbscript:x)
[four]( javascript:window.harmed=6) [five](JaVaScRiPt:window.harmed=7) [six](java&#115;cript:x)
[seven](//evil.example/x) [eight](file:///etc/passwd) [nine](\tjavascript:x) <javascript:alert(1)>
![pixel](https://evil.example/pixel.png?secret) ![x](x" onerror="window.harmed=8)
[ten](https://evil.example/"onmouseover="window.harmed=9) [`code`](mailto:a@example.com)

# <b onclick="window.harmed = 10">heading</b>

- <style>* { display: none }</style>
- <form action="https://evil.example"><button>x</button></form>

| <td onclick="window.harmed=11"> | b |
|---|---|
| <base href="https://evil.example"> | <meta http-equiv="refresh" content="0;url=//evil.example"> |

\x1b[31mred\x1b[0m \x1b]0;title\x07 \u202egnp.exe\u202c \u2066hidden\u2069 null\x00bell\x07

```html"><script>window.harmed=12</script>
</code></pre><script>window.harmed = 13</script>
"""
ALLOWED_TAGS = (
    {"A", "BLOCKQUOTE", "BR", "BUTTON", "CODE", "DEL", "DIV", "EM", "H3", "H4", "H5", "H6", "HR"}
    | {"LI", "OL", "P", "PRE", "SPAN", "STRONG", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR", "UL"}
)  # fmt: skip
ALLOWED_ATTRIBUTES = {"class", "dir", "href", "rel", "start", "tabindex", "target", "title", "type"}


def test_hostile_text_of_a_model_stays_text(page: Page, server: LiveServer) -> None:
    server.script.answers["attack"] = [HOSTILE[at : at + 7] for at in range(0, len(HOSTILE), 7)]
    page.open(server.url)
    page.ask("attack")
    until(lambda: page.all(".foot summary"), "the end of the answer")
    for _ in range(2):
        assert_harmless(page, server)
        page.browser.refresh()  # and from the store
        until(lambda: page.all(".foot summary"), "the answer again")


def assert_harmless(page: Page, server: LiveServer) -> None:
    nodes: list[dict[str, Any]] = page.run(
        "return [...document.querySelectorAll('.markdown, .markdown *')].map(e => ("
        "{tag: e.tagName, attributes: e.getAttributeNames(), href: e.href ?? ''}))"
    )
    assert {node["tag"] for node in nodes} <= ALLOWED_TAGS
    assert {name for node in nodes for name in node["attributes"]} <= ALLOWED_ATTRIBUTES
    links = {node["href"] for node in nodes if node["tag"] == "A"}
    assert links == {
        "https://evil.example/pixel.png?secret",
        "https://evil.example/%22onmouseover=%22window.harmed=9",
        "mailto:a@example.com",
        "https://evil.example/",  # an address in the middle of the markup that stayed text
    }
    assert page.run("return window.harmed") is None
    text = page.run("return document.querySelector('.markdown').textContent")
    for shown in (
        '<img src=x onerror="window.harmed = 1"><script>window.harmed = 2</script>',
        "[one](javascript:window.harmed=5) [two](data:text/html,<script>1</script>)",
        "</code></pre><script>window.harmed = 13</script>",
        "red  gnp.exe hidden nullbell",
    ):
        assert shown in text
    assert not set(text) & set("\x00\x07\x1b\u202e\u202c\u2066\u2069")
    assert {url.split("/")[2] for url in requested(page)} == {f"127.0.0.1:{server.port}"}


def requested(page: Page) -> list[str]:
    """Every address that the tab asked for, sockets' too, since this was last called."""
    events = [json.loads(line)["message"] for line in page.log("performance")]
    urls = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    urls += [e["params"]["url"] for e in events if e["method"] == "Network.webSocketCreated"]
    assert urls
    return [url for url in urls if not url.startswith("data:")]


def test_links_open_apart_and_name_where_they_lead(page: Page, server: LiveServer) -> None:
    server.script.answers["link"] = ["[my bank](https://evil.example/login) www https://a.example."]
    page.open(server.url)
    page.ask("link")
    page.wait_answers("my bank www https://a.example.")
    first, second = page.all(".markdown a")
    assert first.get_attribute("title") == "https://evil.example/login"
    assert second.get_attribute("href") == "https://a.example/"
    for link in (first, second):
        assert link.get_attribute("target") == "_blank"
        assert link.get_attribute("rel") == "noopener noreferrer"


def test_a_hostile_question_and_title_stay_text(page: Page, server: LiveServer) -> None:
    attack = '<img src=x onerror="window.harmed = 1">\u202egnp'
    page.open(server.url)
    page.run("document.querySelector('#prompt').value = arguments[0]", attack)
    page.one("#prompt").send_keys(Keys.ENTER)
    page.wait_text(".bubble", '<img src=x onerror="window.harmed = 1">gnp')
    page.wait_text("#conversations .open", '<img src=x onerror="window.harmed = 1">gnp')
    assert page.all("img") == []
    assert page.run("return window.harmed") is None


def test_markup_cannot_be_made_from_text_even_by_mistake(page: Page, server: LiveServer) -> None:
    page.open(server.url)
    for attempt in (
        "document.body.innerHTML = '<b>x</b>'",
        "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')",
        "document.write('x')",
    ):
        with pytest.raises(Exception, match="TrustedHTML"):
            page.run(attempt)
    inline = "const s = document.createElement('script'); s.append('window.harmed = 1'); "
    with pytest.raises(Exception, match="TrustedScript"):
        page.run(inline + "s.text = 'window.harmed = 1'; document.body.append(s)")
    assert page.run("return window.harmed") is None
    page.log()  # the policy's complaints, which were asked for


def test_the_key_is_in_this_tab_alone(
    page: Page, keyed_server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    page.browser.get(keyed_server.url)
    sign_in(page, KEY)
    page.wait_usable()
    page.ask("hello")
    page.wait_answers("You said: hello")
    assert page.run("return JSON.stringify(sessionStorage)").count(KEY) == 1
    assert KEY not in page.run("return JSON.stringify(localStorage) + document.cookie")
    assert KEY not in page.run("return document.documentElement.outerHTML")
    assert page.run("return document.querySelector('#key').value") == ""
    urls = requested(page)
    assert any(url.startswith("ws:") for url in urls)
    assert not [url for url in urls if KEY in url]
    assert KEY not in page.browser.current_url
    assert KEY not in str(page.run("return history.state"))
    assert not [line for line in page.log() if KEY in line]
    told = [record.getMessage() for record in caplog.records if record.name.startswith("chatrt")]
    assert any("opened" in line for line in told)
    assert not [line for line in told if KEY in line]

    page.browser.refresh()
    page.wait_answers("You said: hello")
    page.browser.switch_to.new_window("tab")
    try:
        page.browser.get(keyed_server.url)
        until(lambda: page.one("#key").is_displayed(), "a tab that asks again")
    finally:
        page.browser.close()
        page.browser.switch_to.window(page.browser.window_handles[-1])


def sign_in(page: Page, key: str) -> None:
    until(lambda: page.one("#key").is_displayed(), "the question for a key")
    page.one("#key").send_keys(key + Keys.ENTER)


def test_a_wrong_key_is_said_so_and_forgotten(page: Page, keyed_server: LiveServer) -> None:
    page.browser.get(keyed_server.url)
    sign_in(page, "wrong")
    page.wait_text("#key-error", "does not take this key")
    assert page.run("return sessionStorage.length") == 0
    assert page.focused() == "key"
    sign_in(page, "not a key at all, ö")
    page.wait_text("#key-error", "does not take this key")
    sign_in(page, KEY)
    page.wait_usable()


def test_signing_out_forgets_everything(page: Page, keyed_server: LiveServer) -> None:
    page.browser.get(keyed_server.url)
    sign_in(page, KEY)
    page.wait_usable()
    page.ask("a secret")
    page.wait_answers("You said: a secret")
    until(lambda: page.all("#conversations li"), "the conversation in the list")
    page.click("#sign-out")
    until(lambda: page.one("#key").is_displayed(), "the question for a key")
    assert page.run("return sessionStorage.length") == 0
    assert "secret" not in page.run("return document.documentElement.outerHTML")
    assert page.browser.current_url == keyed_server.url
    until(lambda: keyed_server.server.num_connections == 0, "a closed connection")


def test_a_key_that_the_server_takes_back_is_asked_for_anew(
    page: Page, loop: LoopThread, keyed_server: LiveServer
) -> None:
    another = LiveServer(loop, api_keys=("another-key",))
    proxy = Proxy(loop, keyed_server.port)
    try:
        page.browser.get(proxy.url)
        sign_in(page, KEY)
        page.wait_usable()
        proxy.target_port = another.port
        proxy.cut()
        page.wait_text("#key-error", "does not take this key")
        assert page.run("return sessionStorage.length") == 0
    finally:
        proxy.stop()
        another.stop()


ATTEMPTS = """\
<!doctype html><title>trying</title><script type="module">
const tried = {};
const [host, key] = location.hash.slice(1).split(',');
const fetched = async (name, path, options) => {
  try { tried[name] = (await fetch(`http://${host}${path}`, options)).type; }
  catch (error) { tried[name] = error.name; }
};
tried.socket = await new Promise((resolve) => {
  const socket = new WebSocket(`ws://${host}/v1/responses`, [
    'realtime', `openai-insecure-api-key.${key}`]);
  socket.onopen = () => resolve('open');
  socket.onerror = () => resolve('refused');
});
await fetched('read', '/v1/models', {headers: {Authorization: `Bearer ${key}`}});
await fetched('plain', '/v1/conversations');
await fetched('page', '/index.html');
await fetched('remove', '/v1/conversations/x', {method: 'DELETE'});
document.title = JSON.stringify(tried);
</script>
"""


def test_a_page_of_another_origin_is_refused_even_with_the_key(
    page: Page, keyed_server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with foreign_page(ATTEMPTS.encode()) as port:
        target = f"127.0.0.1:{keyed_server.port}"
        page.browser.get(f"http://{FOREIGN_HOST}:{port}/#{target},{KEY}")
        tried = json.loads(until(lambda: page.browser.title.strip("trying"), "all attempts"))
        assert tried == {
            "socket": "refused",
            "read": "TypeError",
            "plain": "TypeError",
            "page": "TypeError",
            "remove": "TypeError",
        }
        assert "origin_not_allowed" in caplog.text
        assert keyed_server.server.num_connections == 0
        assert "opened" not in caplog.text
    page.log()  # what the browser says of all these refusals


def test_the_same_attempts_succeed_on_loopback(page: Page, keyed_server: LiveServer) -> None:
    """Or else the test before this one would prove nothing."""
    with foreign_page(ATTEMPTS.encode()) as port:
        page.browser.get(f"http://127.0.0.1:{port}/#127.0.0.1:{keyed_server.port},{KEY}")
        tried = json.loads(until(lambda: page.browser.title.strip("trying"), "all attempts"))
        assert tried["socket"] == "open"
        assert tried["read"] == "TypeError"  # no page of another origin reads an answer
    page.log()


def test_the_page_works_under_a_name_that_the_server_was_given(
    page: Page, loop: LoopThread
) -> None:
    server = LiveServer(loop, api_keys=(KEY,), allow_hosts=(FOREIGN_HOST,))
    try:
        page.browser.get(f"http://{FOREIGN_HOST}:{server.port}/")
        sign_in(page, KEY)
        page.wait_usable()
        page.ask("hello")
        page.wait_answers("You said: hello")
        page.click(".regenerate")
        page.wait_text(".switcher", "2/2")
        # Without TLS a browser has no use for one of the headers, and says so.
        lines = [line for line in page.log() if "Failed to load" not in line]
        assert all("Cross-Origin-Opener-Policy" in line for line in lines), lines
    finally:
        server.stop()


def test_a_rebound_name_gets_neither_page_nor_socket(page: Page, server: LiveServer) -> None:
    page.browser.get(f"http://{FOREIGN_HOST}:{server.port}/")
    assert "this Host is not allowed" in page.run("return document.body.textContent")


def test_the_page_cannot_be_framed(page: Page, server: LiveServer) -> None:
    frame = f'<!doctype html><iframe src="http://127.0.0.1:{server.port}/"></iframe>'
    with foreign_page(frame.encode()) as port:
        page.browser.get(f"http://127.0.0.1:{port}/")
        told = until(page.log, "a complaint")
        assert any("frame-ancestors" in line for line in told)


def test_what_is_copied_and_announced_is_what_is_shown(page: Page, server: LiveServer) -> None:
    raw = "ls \x1b[201~; rm -rf x\x07 \u202eabc"
    server.script.answers["attack"] = [raw]
    page.open(server.url)
    # A browser without a window has no clipboard that a test may read.
    page.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.ask("attack")
    page.wait_answers("ls ; rm -rf x abc")
    page.click(".foot .copy")
    assert until(lambda: page.run("return window.copied"), "a copy") == "ls ; rm -rf x abc"
    announced = "return document.querySelector('#announcer').textContent"
    until(lambda: page.run(announced) == "Answer: ls ; rm -rf x abc", "the answer told")
