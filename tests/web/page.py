"""The page as a person uses it: what is on it, and keys and clicks.

Knows: the page's elements, Selenium. Does not know: servers.
Invariant: waits for states, never for a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.web.live import until

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from selenium.webdriver.remote.webelement import WebElement


class Page:
    """One tab with the page in it."""

    def __init__(self, browser: Chrome) -> None:
        self.browser = browser

    def log(self, kind: str = "browser") -> list[str]:
        """The messages in one of the browser's logs since this was last called."""
        entries: list[dict[str, Any]] = self.browser.get_log(kind)  # type: ignore[no-untyped-call]
        return [str(entry["message"]) for entry in entries]

    def open(self, url: str) -> Page:
        """Go to the page, and wait until a message can be sent."""
        self.browser.get(url)
        self.wait_usable()
        return self

    def wait_usable(self) -> None:
        """Wait until a message can be sent."""
        usable = "return document.querySelector('#send')?.checkVisibility()"
        enabled = f"{usable} && !document.querySelector('#send').disabled"
        until(lambda: self.run(enabled), "a usable prompt")

    def run(self, script: str, *arguments: object) -> Any:
        """What a piece of JavaScript returns."""
        return self.browser.execute_script(script, *arguments)

    def asynchronous(self, body: str, *arguments: object) -> Any:
        """What an asynchronous piece of JavaScript returns; `given` are the arguments."""
        script = (
            "const given = [...arguments]; const done = given.pop();"
            f"(async () => {{ {body} }})()"
            ".then(done, (error) => done('FAILED ' + error.stack))"
        )
        result = self.browser.execute_async_script(script, *arguments)
        assert not str(result).startswith("FAILED"), result
        return result

    def one(self, selector: str) -> WebElement:
        """The first element, once it is there."""
        return until(lambda: next(iter(self.all(selector)), None), selector)

    def all(self, selector: str) -> list[WebElement]:
        """All such elements, right now."""
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def click(self, selector: str) -> None:
        """Click the first such element that can be seen, once there is one."""

        def clicked() -> bool:
            try:
                for element in self.all(selector):
                    if element.is_displayed() and element.is_enabled():
                        element.click()
                        return True
            except StaleElementReferenceException:
                pass  # it was painted anew: look again
            return False

        until(clicked, f"{selector} to click")

    def ask(self, text: str) -> None:
        """Type a message, and Enter."""
        self.one("#prompt").send_keys(text + Keys.ENTER)

    def keys(self, *keys: str) -> None:
        """Press keys, wherever the focus is."""
        ActionChains(self.browser).send_keys(*keys).perform()

    def shifted(self, key: str) -> None:
        """Press a key with Shift."""
        chain = ActionChains(self.browser)
        chain.key_down(Keys.SHIFT).send_keys(key).key_up(Keys.SHIFT).perform()

    def focused(self, what: str = "id") -> str:
        """A property of the element that has the focus."""
        return str(self.run(f"return document.activeElement.{what}"))

    def answers(self) -> list[str]:
        """The texts of all answers that are shown, scrolled out of sight or not."""
        script = """
            return [...document.querySelectorAll('.answer .markdown')].map((answer) => {
              const copy = answer.cloneNode(true);
              for (const end of copy.querySelectorAll('br')) end.replaceWith('\\n');
              return [...copy.children].map((block) => block.textContent).join('\\n\\n');
            });
        """
        return [str(text).strip() for text in self.run(script)]

    def questions(self) -> list[str]:
        """The texts of all questions that are shown."""
        script = "return [...document.querySelectorAll('.bubble')].map(e => e.textContent)"
        return [str(text) for text in self.run(script)]

    def is_running(self) -> bool:
        """Whether an answer of ours is being written."""
        return bool(self.run("return !document.querySelector('#stop').hidden"))

    def wait_answers(self, *texts: str) -> None:
        """Wait until exactly these answers are shown, and the last one has ended."""

        def ended() -> bool:
            shown = self.answers() == list(texts)
            return shown and not self.all(".answer.running")

        try:
            until(ended, "the answers")
        except AssertionError:
            told = [f"{text[:20]}…{text[-20:]} ({len(text)})" for text in self.answers()]
            running = len(self.all(".answer.running"))
            raise AssertionError(
                f"{running} of {told} run, behind {self.questions()}; expected {texts!r}"
            ) from None

    def wait_text(self, selector: str, text: str) -> None:
        """Wait until the first such element holds a text."""
        held = "return document.querySelector(arguments[0])?.textContent.includes(arguments[1])"
        until(lambda: self.run(held, selector, text), f"{text!r} in {selector}")
