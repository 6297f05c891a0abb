"""Grammars that take time to read: others are answered meanwhile, and a wrong one is a 400."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.serve.http.wire import ask, connect, post, raw_request
from tests.serve.stand_in import StandIn, served


def _until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


@pytest.mark.quick
def test_others_are_answered_while_a_grammar_is_read() -> None:
    engine = StandIn(step_s=0.001)
    with served(engine) as (server, _):
        answers: dict[str, Any] = {}

        def asked(name: str, **fields: Any) -> threading.Thread:
            thread = threading.Thread(
                target=lambda: answers.update({name: post(server.address, ask("abc", **fields))[:2]})
            )
            thread.start()
            return thread

        threads = [
            asked("slow", regex="slow"),
            asked("streamed", regex="slow", stream=True),
            asked("wrong", regex="slow and wrong"),
            asked("wrong, streamed", regex="slow and wrong", stream=True),
        ]
        _until(lambda: len(engine.running) == 4)
        assert post(server.address, ask("abc"))[0] == 200
        assert answers == {}
        engine.read.set()
        for thread in threads:
            thread.join(30)
        assert answers["slow"][0] == 200
        assert answers["slow"][1]["choices"][0]["message"]["content"] == "abc"
        assert answers["streamed"][0] == 200
        for name in ("wrong", "wrong, streamed"):
            status, body = answers[name]
            assert status == 400
            assert "one that llguidance takes" in body["error"]["message"]
            assert (body["error"]["param"], body["error"]["code"]) == ("regex", "invalid_grammar")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_while_its_grammar_is_read_is_not_waited_for(stream: bool) -> None:
    engine = StandIn(step_s=0.001)
    with served(engine) as (server, _):
        client = connect(server.address)
        client.sendall(raw_request(json.dumps(ask("abc", regex="slow", stream=stream)).encode()))
        _until(lambda: engine.running)
        client.close()
        _until(lambda: engine.cancelled and not engine.running)


def test_the_time_that_a_grammar_takes_to_be_read_is_part_of_the_answers() -> None:
    engine = StandIn(step_s=0.05)
    with served(engine, request_timeout_s=3.0) as (server, _):

        def read() -> None:
            _until(lambda: engine.running)  # the request's time has begun
            time.sleep(2.0)
            engine.read.set()

        threading.Thread(target=read).start()
        status, events, _ = post(server.address, ask("a" * 200, regex="slow", stream=True))
        assert status == 200
        events = str(events).split("data: ")
        assert json.loads(events[-1])["error"]["code"] == "timeout"
        # A second at most is left for it to write in: 20 steps, where the whole limit would be 60.
        assert len(events) < 40


def test_a_grammar_that_grows_too_large_is_the_requests_own_fault() -> None:
    with served() as (server, _):
        status, body, _ = post(server.address, ask("abc", regex="grows"))
        assert (status, body["error"]["param"], body["error"]["code"]) == (400, "regex", "invalid_grammar")
        assert post(server.address, ask("abc"))[0] == 200
