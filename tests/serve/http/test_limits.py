"""What a server does when there is too much, too slow, or nobody there any more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from tests.serve.http.wire import CHAT, ask, call, connect, post, raw_request
from tests.serve.stand_in import CARD, StandIn, served

from capibara.serve.http.engine_client import EngineClient
from capibara.serve.http.errors import ApiError
from capibara.serve.http.metrics import Metrics, Timeline
from capibara.serve.http.state import Serving
from capibara.serve.link import FromEngine, ServerSettings, write_frame
from capibara.serve.request import Request, RequestOutput, Usage

_FAILING = {"role": "user", "content": "fail["}


def _until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


def _in_threads(count: int, work: Callable[[], Any]) -> tuple[list[threading.Thread], list[Any]]:
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(work())) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads, results


@pytest.mark.quick
def test_one_too_many_is_told_when_to_come_again() -> None:
    engine = StandIn()
    with served(engine, card=replace(CARD, max_sequences=1, max_queue=1)) as (server, _):
        engine.gate.clear()
        threads, results = _in_threads(2, lambda: post(server.address, ask("abc")))
        _until(lambda: len(engine.running) == 2)
        status, body, headers = post(server.address, ask("abc"))
        assert (status, body["error"]["type"], body["error"]["code"]) == (
            429,
            "rate_limit_error",
            "rate_limit_exceeded",
        )
        assert 1 <= int(headers["retry-after"]) <= 60
        assert post(server.address, ask("abc", n=3))[0] == 400, "it never had room for so many"
        engine.gate.set()
        for thread in threads:
            thread.join()
        assert [result[0] for result in results] == [200, 200]
        assert post(server.address, ask("abc"))[0] == 200


def test_more_prompts_than_may_run_are_refused_before_any_is_read() -> None:
    with served() as (server, _):
        started = time.monotonic()
        body = {"model": "stand-in", "prompt": ["a"] * 100_000, "n": 8}  # twenty seconds of work, if they were read
        status, answer, _ = post(server.address, body, "/v1/completions")
        assert (status, answer["error"]["param"]) == (400, "n")
        assert time.monotonic() - started < 10


def test_the_engines_own_full_queue_is_a_429_too() -> None:
    engine = StandIn(most=1)
    with served(engine) as (server, _):
        engine.gate.clear()
        threads, results = _in_threads(1, lambda: post(server.address, ask("abc")))
        _until(lambda: engine.running)
        status, _, headers = post(server.address, ask("abc", n=2, stream=True))
        assert status == 429
        assert "retry-after" in headers
        engine.gate.set()
        threads[0].join()
        assert results[0][0] == 200


@pytest.mark.quick
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_cancels_its_request(stream: bool) -> None:
    engine = StandIn(step_s=0.005)
    with served(engine) as (server, _):
        body = json.dumps(ask("x" * 2000, stream=stream)).encode()
        with connect(server.address) as client:
            client.sendall(raw_request(body))
            _until(lambda: engine.running)
            if stream:
                assert client.recv(100)
        _until(lambda: engine.cancelled and not engine.running)
        assert post(server.address, ask("abc"))[1]["choices"][0]["message"]["content"] == "abc"


def test_a_client_that_does_not_read_is_hung_up_on() -> None:
    engine = StandIn(tokens_a_step=200)
    with served(engine, client_timeout_s=0.5) as (server, _):
        # More than the sockets on both sides keep: each token of these events is told with 20 others.
        asked = ask("x" * 1800, stream=True, n=4, logprobs=True, top_logprobs=20)
        with connect(server.address, receive_bytes=4096) as client:
            client.sendall(raw_request(json.dumps(asked).encode()))
            client.recv(10)
            # The engine has long finished; the server lets go of the rest.
            _until(lambda: "capibara:http_requests_open 1.0" in call(server.address, "GET", "/metrics")[1])
        assert post(server.address, ask("abc"))[0] == 200


def test_a_whole_answer_that_is_not_read_is_dropped() -> None:
    engine = StandIn(tokens_a_step=2000)
    with served(engine, client_timeout_s=0.5) as (server, _):
        asked = ask("x" * 1800, n=4, logprobs=True, top_logprobs=20)
        with connect(server.address, receive_bytes=4096) as client:
            client.sendall(raw_request(json.dumps(asked).encode()))
            head = client.recv(1000, socket.MSG_WAITALL).partition(b"\r\n\r\n")
            whole = int(head[0].lower().partition(b"content-length: ")[2].split()[0])
            hung_up = select.poll()
            hung_up.register(client, 0)
            hung_up.poll(10_000)
            read = len(head[2])
            with contextlib.suppress(ConnectionError):
                while part := client.recv(1 << 20):
                    read += len(part)
        assert read < whole, "it was kept for a client that did not read"


def test_a_head_or_a_body_that_trickles_is_not_waited_for() -> None:
    with served(client_timeout_s=1.0) as (server, _):  # long enough for this client to say the rest of what it says
        with connect(server.address) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost:")
            assert client.recv(100) == b""
        with connect(server.address) as client:
            client.sendall(raw_request(b'{"model":', "Content-Length: 500"))
            assert client.recv(4096).startswith(b"HTTP/1.1 408")
        assert post(server.address, ask("abc"))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long(stream: bool) -> None:
    engine = StandIn(step_s=0.02)
    with served(engine, request_timeout_s=1.5) as (server, _):  # of ten seconds; the first of it comes in time
        status, body, _ = post(server.address, ask("x" * 500, stream=stream))
        if stream:
            events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: ")]
            assert status == 200
            assert events[-1]["error"]["type"] == "timeout_error"
            assert "choices" in events[0]
        else:
            assert status == 504
            assert body["error"]["code"] == "timeout"
        _until(lambda: not engine.running)


def test_a_request_that_the_engine_fails_at() -> None:
    with served() as (server, _):
        for stream in (False, True):
            status, body, _ = post(server.address, {**ask(""), "stream": stream, "messages": [_FAILING]})
            if stream:
                assert '"code":"engine_error"' in body
                assert status == 200
            else:
                assert (status, body["error"]["type"], body["error"]["code"]) == (500, "server_error", "engine_error")
        assert post(server.address, ask("abc"))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_engine_cannot_even_add(stream: bool) -> None:
    with served() as (server, _):
        status, answer, _ = post(server.address, ask("x", regex="a fault", stream=stream))
        assert (status, answer["error"]["code"]) == (500, "engine_error")
        assert post(server.address, ask("still here"))[0] == 200


def test_two_requests_may_have_one_id() -> None:
    """It is the client's, for its logs, and nothing is told apart by it."""
    engine = StandIn()
    with served(engine) as (server, _):
        engine.gate.clear()
        same = {"X-Request-Id": "same"}
        threads, results = _in_threads(2, lambda: post(server.address, ask("abc"), headers=same))
        _until(lambda: len(engine.running) == 2)
        engine.gate.set()
        for thread in threads:
            thread.join()
        assert [(result[0], result[2]["x-request-id"]) for result in results] == [(200, "same")] * 2
        assert post(server.address, ask("a"), headers={"X-Request-Id": "a b c"})[2]["x-request-id"].startswith("req-")


@pytest.mark.quick
def test_keys() -> None:
    with served(api_keys=("one", "zwei€")) as (server, _):
        for path in (CHAT, "/v1/completions", "/v1/models"):
            for header in (
                {},
                {"Authorization": "Bearer two"},
                {"Authorization": "Basic one"},
                {"Authorization": "one"},
            ):
                method = "GET" if path.endswith("models") else "POST"
                status, body, headers = call(server.address, method, path, b"{}", header)
                assert status == 401
                assert body["error"]["code"] == "invalid_api_key"
                assert headers["www-authenticate"] == "Bearer"
                assert "two" not in json.dumps(body)
        assert post(server.address, ask("a"), headers={"Authorization": "Bearer one"})[0] == 200
        for key in ("bearer  one", "Bearer zwei€".encode().decode("latin-1")):
            assert call(server.address, "GET", "/v1/models", headers={"Authorization": key})[0] == 200
        assert [call(server.address, "GET", path)[0] for path in ("/health", "/ready", "/metrics", "/")] == [200] * 4


def test_pages_of_other_origins() -> None:
    elsewhere = {"Origin": "https://example.com"}
    with served() as (server, _):
        status, body, headers = post(server.address, ask("a"), headers=elsewhere)
        assert (status, body["error"]["type"]) == (403, "permission_error")
        assert "access-control-allow-origin" not in headers
        assert "access-control-allow-origin" not in call(server.address, "GET", "/v1/models", headers=elsewhere)[2]
        own = {"Origin": server.address}
        assert post(server.address, ask("a"), headers=own)[0] == 200
        # A name that somebody has made to lead here: of the same origin to a browser.
        port = server.address.rpartition(":")[2]
        for name, status in (("rebound.example", 403), ("localhost", 200), ("[::1]", 200), ("", 403)):
            lead = {"Origin": f"http://{name}:{port}", "Host": f"{name}:{port}"}
            assert post(server.address, ask("a"), headers=lead)[0] == status, name
    with served(cors_origins=("https://example.com",)) as (server, _):
        status, _, headers = post(server.address, ask("a"), headers=elsewhere)
        assert (status, headers["access-control-allow-origin"]) == (200, "https://example.com")
        asked = {
            **elsewhere,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        status, _, headers = call(server.address, "OPTIONS", CHAT, headers=asked)
        assert (status, headers["access-control-allow-origin"]) == (200, "https://example.com")
        assert post(server.address, ask("a"), headers={"Origin": "https://example.org"})[0] == 403


def test_a_page_may_be_left_out() -> None:
    with served(page=False) as (server, _):
        assert call(server.address, "GET", "/")[0] == 404


@pytest.mark.quick
def test_told_to_stop_it_finishes_what_runs_and_takes_nothing_new() -> None:
    engine = StandIn()
    with served(engine) as (server, _):
        engine.gate.clear()
        threads, results = _in_threads(3, lambda: post(server.address, ask("abc")))
        _until(lambda: len(engine.running) == 3)
        server.stop()
        _until(lambda: call(server.address, "GET", "/ready")[0] == 503)
        assert call(server.address, "GET", "/health")[0] == 200
        status, body, headers = post(server.address, ask("abc"))
        assert (status, body["error"]["code"]) == (503, "stopping")
        assert "retry-after" in headers
        engine.gate.set()
        for thread in threads:
            thread.join()
        assert [result[1]["choices"][0]["message"]["content"] for result in results] == ["abc"] * 3
        assert server.process.wait(60) == 0


def test_what_runs_too_long_at_the_end_is_cut_off() -> None:
    engine = StandIn()
    with served(engine, drain_timeout_s=0.2) as (server, _):
        engine.gate.clear()
        threads, results = _in_threads(1, lambda: post(server.address, ask("abc")))
        _until(lambda: engine.running)
        server.stop()
        threads[0].join(60)
        assert results[0][0] == 503
        assert results[0][1]["error"]["code"] == "stopping"


def test_an_engine_that_dies_ends_the_server() -> None:
    class Broken(StandIn):
        def step(self) -> list[Any]:
            raise RuntimeError("the device is gone")

    def ask_it() -> None:
        with served(Broken()) as (server, _):
            assert post(server.address, ask("abc"))[1]["error"]["code"] == "engine_gone"
            assert server.process.wait(60) == 1

    with pytest.raises(AssertionError, match="the device is gone"):
        ask_it()


@pytest.mark.quick
def test_figures_by_the_names_that_dashboards_read() -> None:
    with served(StandIn(step_s=0.001)) as (server, _):
        post(server.address, ask("abcdef"))
        post(server.address, b"{")
        text = call(server.address, "GET", "/metrics")[1]
    assert 'vllm:time_to_first_token_seconds_count{model_name="stand-in"} 1.0' in text
    assert 'vllm:inter_token_latency_seconds_count{model_name="stand-in"} 5.0' in text
    assert 'vllm:request_generation_tokens_sum{model_name="stand-in"} 6.0' in text
    assert 'vllm:request_success_total{finished_reason="stop",model_name="stand-in"} 1.0' in text
    assert 'vllm:kv_cache_usage_perc{model_name="stand-in"} 0.25' in text
    assert 'capibara:http_responses_total{path="/v1/chat/completions",status="400"} 1.0' in text
    for name in (
        "num_requests_running", "num_requests_waiting", "prefix_cache_queries_total", "prefix_cache_hits_total",
        "prompt_tokens_total", "generation_tokens_total", "e2e_request_latency_seconds_sum",
    ):  # fmt: skip
        assert f'vllm:{name}{{model_name="stand-in"}}' in text, name
    for part in ("queue", "prefill", "decode", "inference"):
        assert f'vllm:request_{part}_time_seconds_count{{model_name="stand-in"}} 1.0' in text, part


def test_a_requests_time_is_told_by_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, clock = Metrics("m"), iter((103.0, 104.0, 105.0, 106.0))
    monkeypatch.setattr("capibara.serve.http.metrics.time", SimpleNamespace(monotonic=lambda: next(clock)))
    timeline = Timeline(started=100.0)
    for waited, end in ((1.0, None), (1.0, None), (None, "stop")):  # the last by the server
        metrics.output(timeline, RequestOutput("a", (1,), "a", Usage(1, 1, 0), None, end, waited_s=waited))
    never = Timeline(started=100.0)  # cancelled while it waited
    metrics.output(never, RequestOutput("b", (), "", Usage(1, 0, 0), None, "cancelled"))
    sums = {
        part: metrics.registry.get_sample_value(f"vllm:request_{part}_time_seconds_sum", {"model_name": "m"})
        for part in ("queue", "prefill", "decode", "inference")
    }
    assert sums == {"queue": 1.0, "prefill": 2.0, "decode": 2.0, "inference": 4.0}


def test_when_to_come_again_does_not_count_the_time_without_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that had nothing to do for an hour is not slow."""
    now = 0.0
    monkeypatch.setattr("capibara.serve.http.engine_client.time", SimpleNamespace(monotonic=lambda: now))

    async def answered(client: EngineClient, seconds: float, count: int) -> None:
        nonlocal now
        client.submit([Request(f"{now}-{n}", (1,)) for n in range(count)])
        asked, now = now, now + seconds
        reader = asyncio.StreamReader()
        ends = [RequestOutput(f"{asked}-{n}", (), "", Usage(1, 0, 0), None, "stop") for n in range(count)]
        reader.feed_data(write_frame(FromEngine(outputs=tuple(ends))))
        reader.feed_eof()
        await client.read(reader)
        client.gone.clear()

    async def check() -> None:
        nonlocal now
        writer: Any = SimpleNamespace(write=lambda data: None)
        client = EngineClient(writer, lambda message: None, lambda timeline, output: None)
        for _ in range(8):
            await answered(client, 2.0, 4)  # two a second
        now += 3600.0
        client.submit([Request(str(n), (1,)) for n in range(16)])
        assert client.retry_after_s() == 4

    asyncio.run(check())


def test_logs_are_json_and_have_nothing_that_people_wrote(capfd: pytest.CaptureFixture[str]) -> None:
    with served(log_level="info", api_keys=("geheim",)) as (server, _):
        key = {"Authorization": "Bearer geheim", "X-Request-Id": "mine-1"}
        post(server.address, ask("my diary"), headers=key)
        post(server.address, ask("my diary", temprature=1), headers=key)
        failing = {"role": "user", "content": "fail[ my diary"}
        post(server.address, {"model": "stand-in", "messages": [failing]}, headers=key)
        call(server.address, "GET", "/v1/models?my diary".replace(" ", "%20"))
    lines = capfd.readouterr().err.splitlines()
    entries = [json.loads(line) for line in lines]
    asked = [entry for entry in entries if entry["event"] == "request" and entry["path"] == CHAT]
    assert [entry["status"] for entry in asked] == [200, 400, 500]
    assert asked[0]["request_id"] == "mine-1"
    assert asked[0]["completion_tokens"] == len("my diary")
    assert asked[0]["first_token_ms"] <= asked[0]["duration_ms"]
    assert not any("diary" in line or "geheim" in line for line in lines)


def test_what_a_request_leaves_out_is_the_models_own_default() -> None:
    engine = StandIn()
    own = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    with served(engine, card=replace(CARD, sampling_defaults=own)) as (server, _):
        assert post(server.address, ask("a", temperature=0))[0] == 200
        body = {"model": "stand-in", "prompt": "a", "top_k": 0}
        assert post(server.address, body, "/v1/completions")[0] == 200
    chat, completion = (request.sampling for request in engine.seen)
    assert (chat.temperature, chat.top_k, chat.top_p, chat.repetition_penalty) == (0, 20, 1.0, 1.05)
    assert (completion.temperature, completion.top_k, completion.repetition_penalty) == (0.6, 0, 1.05)


def test_prompts_that_are_being_tokenized_count_and_wait_for_few_threads() -> None:
    """The server's state by itself: a prompt takes as long as the test wants."""

    async def check() -> None:
        serving = Serving(ServerSettings(), SimpleNamespace(write=lambda data: None))  # type: ignore[arg-type]
        serving.told(FromEngine(model=replace(CARD, max_sequences=4, max_queue=6)))
        go, at_once, most = threading.Event(), 0, 0
        lock = threading.Lock()

        def work() -> str:
            nonlocal at_once, most
            with lock:
                at_once += 1
                most = max(most, at_once)
            assert go.wait(30)
            with lock:
                at_once -= 1
            return "done"

        waiting = [asyncio.create_task(serving.prepare(1, work)) for _ in range(10)]
        await asyncio.sleep(0.05)
        assert serving.preparing == 10
        with pytest.raises(ApiError) as full:
            await serving.prepare(1, work)
        assert full.value.status == 429
        go.set()
        assert await asyncio.gather(*waiting) == ["done"] * 10
        assert 1 <= most <= 4
        assert serving.preparing == 0

    asyncio.run(check())


def test_an_answer_that_has_all_its_calls_counts_as_done() -> None:
    """With parallel_tool_calls=false the engine is stopped after the first call; the answer was a success."""
    written = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with served(StandIn(step_s=0.001)) as (server, engine):
        for stream in (False, True):
            asked = ask(
                f"{written}{written} and more" + "." * 400, tools=[tool], parallel_tool_calls=False, stream=stream
            )
            assert post(server.address, asked)[0] == 200
        _until(lambda: len(engine.cancelled) == 2)
        metrics = call_metrics(server.address)
        assert metrics['vllm:request_success_total{finished_reason="stop",model_name="stand-in"}'] == 2
        assert metrics['vllm:e2e_request_latency_seconds_count{model_name="stand-in"}'] == 2
        assert post(server.address, ask("abc"))[0] == 200
        metrics = call_metrics(server.address)
        assert metrics['vllm:request_success_total{finished_reason="stop",model_name="stand-in"}'] == 3


def test_where_the_servers_time_went_is_in_its_figures() -> None:
    with served(StandIn(step_s=0.3), card=replace(CARD, dollars_per_hour=3600.0)) as (server, _):
        started = time.monotonic()
        assert post(server.address, ask("a" * 8))[0] == 200  # a token a step
        _until(lambda: call_metrics(server.address)['capibara:goodput_seconds_total{phase="serving"}'] >= 2)
        metrics = call_metrics(server.address)
        assert metrics['capibara:goodput_dollars_total{phase="serving"}'] == pytest.approx(
            metrics['capibara:goodput_seconds_total{phase="serving"}']
        )
        report = server.books.report()
        assert 8 * 0.3 <= report.seconds["serving"] <= time.monotonic() - started
        assert report.seconds["compile"] == 0
        assert report.seconds["idle"] > 0
    with served() as (server, _):
        assert not [name for name in call_metrics(server.address) if "dollars" in name]


def call_metrics(address: str) -> dict[str, float]:
    lines = call(address, "GET", "/metrics")[1].splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}
