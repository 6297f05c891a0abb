"""The chat page in a browser: streaming, a phone's width, and answers that are markup."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.serve.http.wire import call
from tests.serve.stand_in import StandIn, served

PHONE = {"width": 360, "height": 640}


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport=PHONE)
    opened = context.new_page()
    opened.set_default_timeout(15_000)
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("dialog", lambda dialog: (wrong.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
    yield opened
    context.close()
    assert not wrong


# What the first answer was at each change of the page.
_WATCH = """() => {
  window.seen = [];
  new MutationObserver(() => {
    const answer = document.querySelector(".assistant");
    if (answer && window.seen.length < 100) window.seen.push(answer.textContent);
  }).observe(document.getElementById("log"), { childList: true, characterData: true, subtree: true });
}"""


def _ask(page: Any, text: str) -> None:
    page.fill("#text", f"say[{text}]yas")
    page.press("#text", "Enter")


def test_a_conversation_on_a_phone(page: Any) -> None:
    engine = StandIn(step_s=0.01)
    with served(engine) as (server, _):
        page.goto(server.address)
        page.locator("#model", has_text="stand-in").wait_for()
        page.evaluate(_WATCH)
        _ask(page, "Hello there, 世界")
        page.locator(".assistant", has_text="Hello there, 世界").wait_for()
        page.locator(".note", has_text="tokens in").wait_for()
        seen = page.evaluate("window.seen")
        assert len(set(seen)) > 3, "it comes in pieces"
        assert all("Hello there, 世界".startswith(text) for text in seen)
        _ask(page, "word " * 150)
        page.locator(".note >> nth=1").wait_for()
        assert page.locator(".turn").count() == 4
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0, "it scrolls sideways on a phone"
        assert page.locator("#send").bounding_box()["y"] < PHONE["height"], "the button is on the screen"
        # What was said goes along with the next question.
        prompt = bytes(token for token in engine.seen[-1].prompt if token < 256).decode()
        assert "assistant\nHello there, 世界" in prompt


def test_an_answer_of_markup_is_text(page: Any) -> None:
    hostile = "<img src=x onerror=alert(1)><script>alert(2)</script><b>bold</b> [x](javascript:alert(3))"
    with served() as (server, _):
        page.goto(server.address)
        page.locator("#model", has_text="stand-in").wait_for()
        _ask(page, hostile)
        page.locator(".note").wait_for()
        assert page.locator(".assistant").inner_text() == hostile
        assert page.locator(".assistant *").count() == 0
        policy = call(server.address, "GET", "/")[2]["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


def test_stopping_and_beginning_anew(page: Any) -> None:
    engine = StandIn(step_s=0.02)
    with served(engine) as (server, _):
        page.goto(server.address)
        page.locator("#model", has_text="stand-in").wait_for()
        _ask(page, "x" * 2000)
        page.locator(".assistant", has_text="xxxx").wait_for()
        page.click("#send")
        page.locator(".note", has_text="stopped").wait_for()
        page.click("#clear")
        assert page.locator(".turn").count() == 0
        _ask(page, "y")
        page.locator(".note", has_text="1 tokens in").wait_for()
        assert engine.cancelled
        assert b"x" * 10 not in bytes(token for token in engine.seen[-1].prompt if token < 256)


def test_a_key_is_asked_for_and_errors_are_shown(page: Any) -> None:
    with served(api_keys=("k",)) as (server, _):
        page.goto(server.address)
        page.locator(".error", has_text="API key").wait_for()
        page.fill("#key", "k")
        page.press("#key", "Tab")
        page.locator("#model", has_text="stand-in").wait_for()
        page.fill("#tokens", "100000")
        _ask(page, "a")
        page.locator(".error", has_text="context").wait_for()
        page.fill("#tokens", "5")
        _ask(page, "abc")
        page.locator(".note", has_text="3 tokens in").wait_for()
