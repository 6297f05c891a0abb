"""A chat template that would never end, or that writes without end, is a 4xx; the server goes on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.serve.http.wire import ask, post
from tests.serve.stand_in import served

from capibara.errors import CapibaraError
from capibara.models.tokenizer import ByteTokenizer
from capibara.serve.http.prompts import check_template
from capibara.serve.http.templates import TemplateProcesses

HOSTILE = (
    "{% set said = messages[-1].content %}"
    "{% if 'forever' in said %}"
    "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    "{% elif 'far' in said %}{% for i in range(10**9) %}.{% endfor %}"
    "{% elif 'doubles' in said %}{% set ns = namespace(x='abcdefgh') %}"
    "{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
    "{% elif 'long' in said %}{{ 'a' * 100000 }}"
    "{% elif 'huge' in said %}{{ 'a' * (10**11) }}"
    "{% else %}{{ said }}{{ mood }}{% endif %}"
)


@pytest.fixture
def processes() -> Iterator[TemplateProcesses]:
    made = TemplateProcesses(HOSTILE, seconds=2.0, characters=50_000)
    yield made
    made.close()


def _turns(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_what_takes_too_long_or_grows_too_large_is_ended(processes: TemplateProcesses) -> None:
    assert processes.render(_turns("hello"), True, {"mood": "!"}) == "hello!"
    for text, why in (
        ("forever", "rendered within 2 s"),
        ("far", "Range too big"),
        ("doubles", "MiB|rendered within"),
        ("long", "50000 characters at the most"),
        ("huge", "MiB|rendered within"),
    ):
        with pytest.raises(ValueError, match=why):
            processes.render(_turns(text), True, {})
        assert processes.render(_turns(f"after {len(text)}"), True, {}) == f"after {len(text)}"
    assert len(processes._alive) <= 2


def test_a_process_that_dies_is_started_anew_and_many_ask_at_once(processes: TemplateProcesses) -> None:
    def rendered(number: int) -> str:
        return processes.render(_turns(f"turn {number}"), True, {})

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(rendered, range(24))) == [f"turn {number}" for number in range(24)]
    assert len(processes._alive) <= 2
    for process in list(processes._alive):
        process.kill()
        process.wait()
    assert rendered(1) == "turn 1"


def test_a_process_that_cannot_start_is_the_servers_fault_and_leaves_none_behind(
    processes: TemplateProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    for _ in range(3):
        with pytest.raises(CapibaraError, match="ends before it is asked anything") as caught:
            processes.render(_turns("hello"), True, {})
        assert not isinstance(caught.value, ValueError)  # no 400
    assert not processes._alive


def test_the_server_goes_on_after_a_template_that_does_not_end() -> None:
    with served(chat_template=HOSTILE) as (server, engine):
        assert post(server.address, ask("a", chat_template_kwargs={"mood": "!"}))[0] == 200
        assert bytes(engine.seen[-1].prompt) == b"say[a]yas!"
        for text in ("far", "doubles", "forever"):
            status, body, _ = post(server.address, ask(text))
            assert (status, body["error"]["code"]) == (400, "chat_template"), body
        assert post(server.address, ask("a"))[0] == 200


def test_a_template_that_never_ends_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capibara.serve.http.prompts.TEMPLATE_SECONDS", 0.5)
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match="renders a short conversation in no time"):
        check_template(ByteTokenizer(), endless)
