"""`capibara serve` as people start it: a small model through a real socket, by the openai client and by curl."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import psutil
import pytest
from tests.serve.http.wire import call, post
from typer.testing import CliRunner

from capibara.cli.main import app
from capibara.models import step_hooks

TINY = """
[model]
hidden = 16
layers = 1
vocab = 259
max_length = 1024
[model.blocks.attention]
heads = 2
kv_heads = 1
[model.blocks.mlp]
ffn = 32
[train]
precision = "float32"
"""
# Few shapes: what costs time here is compiling.
SMALL = ("--max-sequences", "4", "--max-batch-tokens", "32", "--batch-invariant", "--no-warm-up", "--port", "0")


@dataclass
class Served:
    process: subprocess.Popen[str]
    address: str
    line: dict[str, Any]
    model: Path
    log: Path


def _start(model: str | Path, log: Path, *words: str) -> Served:
    environment = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu"}
    with log.open("w") as told:
        process = subprocess.Popen(
            [sys.executable, "-m", "capibara", "serve", str(model), *words, "--json"],
            env=environment, stdout=subprocess.PIPE, stderr=told, text=True,
        )  # fmt: skip
    assert process.stdout is not None
    text = process.stdout.readline()
    assert text, log.read_text()
    line = json.loads(text)
    return Served(process, line["address"], line, Path(model), log)


def _stop(served: Served) -> int:
    served.process.send_signal(signal.SIGTERM)
    return served.process.wait(60)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    model = folder / "tiny.toml"
    model.write_text(TINY)
    running = _start(model, folder / "log", *SMALL, "--name", "tiny", "--max-queue", "8")
    yield running
    if running.process.poll() is None:
        assert _stop(running) == 0, running.log.read_text()


def _client(served: Served) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0)


def test_one_line_says_that_it_is_ready(served: Served) -> None:
    assert served.line["model"] == "tiny"
    assert "random weights" in served.line["origin"]
    assert served.line["max_length"] == 1024
    assert served.address.startswith("http://127.0.0.1:")
    assert [call(served.address, "GET", path)[0] for path in ("/health", "/ready")] == [200, 200]


def test_answers_are_the_models_own(served: Served) -> None:
    """Greedy tokens through the socket, streamed or not, are those of the model's plain forward."""
    from capibara.models.restored import load_model

    model, _ = load_model(served.model)
    prompt = [256, 72, 101, 108, 108, 111]
    expected = model.generate(prompt, max_tokens=8, temperature=0)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    status, answer, _ = post(served.address, body, "/v1/completions")
    assert status == 200, answer
    text = model.tokenizer.decode(expected)
    assert answer["choices"][0]["text"] == text
    assert answer["usage"]["completion_tokens"] == 8
    assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 8
    _, events, _ = post(served.address, {**body, "stream": True}, "/v1/completions")
    pieces = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == text


def test_the_openai_client(served: Served) -> None:
    client = _client(served)
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 6, "seed": 5}
    whole = client.chat.completions.create(**asked)
    assert whole.usage.completion_tokens <= 6
    events = client.chat.completions.create(**asked, stream=True)
    joined = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert joined == whole.choices[0].message.content, "the same seed, the same answer"


def test_an_answer_is_of_its_schema(served: Served) -> None:
    """By random weights: what makes it one is the grammar alone."""
    client = _client(served)
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Wien", "Graz"]}, "warm": {"type": "boolean"}},
        "required": ["city", "warm"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema, "strict": True}}
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Well?"}]}
    answers = client.chat.completions.create(**asked, response_format=form, n=3, seed=1)
    for choice in answers.choices:
        document = json.loads(choice.message.content)
        assert document["city"] in ("Wien", "Graz")
        assert isinstance(document["warm"], bool)
        assert choice.finish_reason == "stop"
    again = client.chat.completions.create(**asked, extra_body={"regex": "(ja|nein){2}"}, seed=4)
    assert again.choices[0].message.content in ("jaja", "janein", "neinja", "neinnein")
    broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strnig"}}}
    for wrong in ({"response_format": broken}, {"regex": "(("}, {"grammar": "start: nowhere"}):
        status, answer, _ = post(served.address, {**asked, **wrong})
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), answer
        assert "llguidance" in answer["error"]["message"]
        assert (answer["error"]["param"], answer["error"]["code"]) == (next(iter(wrong)), "invalid_grammar")


def test_a_tool_that_must_be_called_is_called(served: Served) -> None:
    client = _client(served)
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Wien", "Graz"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tools = [
        {"type": "function", "function": {"name": "forecast", "parameters": parameters}},
    ]
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Will it rain?"}],
        "tools": tools,
        "tool_choice": {"type": "function", "function": {"name": "forecast"}},
        "seed": 2,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call_made,) = whole.message.tool_calls
    assert call_made.function.name == "forecast"
    arguments = json.loads(call_made.function.arguments)
    assert arguments["city"] in ("Wien", "Graz")
    assert 1 <= arguments["days"] <= 9
    pieces = [
        piece
        for event in client.chat.completions.create(**asked, stream=True)
        for piece in event.choices[0].delta.tool_calls or ()
    ]
    assert pieces[0].function.name == "forecast"
    assert len(pieces) > 2, "arguments come in pieces"
    assert "".join(piece.function.arguments for piece in pieces) == call_made.function.arguments


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(served: Served) -> None:
    body = '{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}'
    command = [
        "curl",
        "-sS",
        f"{served.address}/v1/chat/completions",
        "-H",
        "Content-Type: application/json",
        "-d",
        body,
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout)["object"] == "chat.completion"


@pytest.mark.parametrize(
    "count", [pytest.param(300, id="300"), pytest.param(10_000, id="10000", marks=pytest.mark.slow)]
)
def test_cancelled_vanished_and_malformed_requests_leave_nothing_behind(served: Served, count: int) -> None:
    """No answer but a documented one, no page kept, memory flat, and the same answers before, meanwhile and after."""
    rng = random.Random(count)
    prompts = [[256, *(rng.randrange(32, 127) for _ in range(rng.randrange(1, 60)))] for _ in range(6)]
    asked = [
        {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True} for prompt in prompts
    ]
    before = [_text(served, body) for body in asked]
    processes = [psutil.Process(served.process.pid), *psutil.Process(served.process.pid).children()]
    sizes: list[int] = []
    bodies = [json.dumps(body).encode() for body in asked]
    for part in range(4):
        statuses = asyncio.run(_storm(served.address, bodies, before, count // 4, rng.randrange(2**31)))
        # Four in ten were sound and had the patience: all of them were answered, if not at the first time.
        assert statuses.count(200) > 0.3 * count // 4, statuses
        assert set(statuses) <= {0, 200, 400}, set(statuses)
        if part:  # the first brings caches and buffers to their size
            sizes.append(sum(process.memory_info().rss for process in processes))
    assert [_text(served, body) for body in asked] == before
    _check_idle(served.address)
    assert sizes[-1] - sizes[0] < 32 << 20, sizes


def _text(served: Served, body: dict[str, Any]) -> str:
    deadline = time.monotonic() + 60
    while True:
        status, answer, _ = post(served.address, body, "/v1/completions")
        if status == 200:
            return str(answer["choices"][0]["text"])
        assert status == 429, answer
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _check_idle(address: str) -> None:
    deadline = time.monotonic() + 30
    wanted = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while True:
        figures = call(address, "GET", "/metrics")[1]
        values = {name: _value(figures, name) for name in wanted}
        if not any(values.values()):
            return
        assert time.monotonic() < deadline, values
        time.sleep(0.1)


def _value(figures: str, name: str) -> float:
    return next(float(line.split()[-1]) for line in figures.splitlines() if line.startswith(f"vllm:{name}{{"))


async def _storm(address: str, bodies: list[bytes], answers: list[str], count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    room = asyncio.Semaphore(16)  # more than run and wait: some are told to come again
    host, _, port = address.removeprefix("http://").rpartition(":")

    async def one(kind: float, which: int, cut: float) -> int:
        async with room:
            while True:
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    status = await exchange(reader, writer, kind, which, cut)
                except ConnectionError:
                    return 0
                finally:
                    writer.close()
                if status != 429:
                    return status
                await asyncio.sleep(0.02)  # its header says a second, which a test does not have

    async def exchange(reader: Any, writer: Any, kind: float, which: int, cut: float) -> int:
        body = bodies[which]
        if kind < 0.2:  # malformed, in one way or another
            body = rng.choice(
                [body[: int(cut * len(body))], b"\xff" + body, body.replace(b"max_tokens", b"max_tocens"), b"[]"]
            )
        stream = kind > 0.8
        if stream:
            body = body[:-1] + b', "stream": true}'
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        data = f"{head}\r\nConnection: close\r\n\r\n".encode() + body
        if 0.2 <= kind < 0.3:  # gone in the middle of its request
            writer.write(data[: int(cut * len(data))])
            await writer.drain()
            return 0
        writer.write(data)
        await writer.drain()
        if 0.3 <= kind < 0.5 or kind > 0.9:  # gone before its answer, or in the middle of it
            with_patience = asyncio.timeout(cut * 0.05)
            try:
                async with with_patience:
                    await reader.read()
            except TimeoutError:
                return 0
            return 0
        answer = await asyncio.wait_for(reader.read(), 60)
        head_text, _, text = answer.partition(b"\r\n\r\n")
        status = int(head_text.split()[1])
        if status == 200 and not stream and kind >= 0.2:
            assert json.loads(text)["choices"][0]["text"] == answers[which]
        return status

    work = [one(rng.random(), rng.randrange(len(bodies)), rng.random()) for _ in range(count)]
    return list(await asyncio.gather(*work))


def test_sigterm_ends_it_in_good_order(served: Served) -> None:
    """Last, for the fixture's server is gone after it."""
    body = {"model": "tiny", "prompt": [256], "max_tokens": 250, "temperature": 0, "ignore_eos": True, "stream": True}

    async def finish() -> bytes:
        host, _, port = served.address.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + data)
        first = await reader.read(100)
        served.process.send_signal(signal.SIGTERM)
        rest = await reader.read()
        writer.close()
        return first + rest

    answer = asyncio.run(finish())
    assert b'"finish_reason":"length"' in answer
    assert b"data: [DONE]" in answer
    assert served.process.wait(60) == 0, served.log.read_text()
    lines = [json.loads(line) for line in served.log.read_text().splitlines() if line.startswith("{")]
    assert lines[-1]["event"] == "stopped"
    assert lines[-1]["unfinished"] == 0


# What is refused before anything is served.


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nowhere"], "preset"),
        (["dev", "--host", "203.0.113.7"], "A server listens on an address of this machine"),
        (["dev", "--port", "0", "--tool-parser", "herms"], "Did you mean 'hermes'"),
        (["dev", "--port", "0", "--log-level", "loud"], "Unknown log level"),
        (["dev", "--port", "0", "--target-latency-ms", "0"], "target_latency_ms is a number above 0"),
        (["dev", "--port", "0", "--adapter", "x"], "An adapter is NAME=FOLDER"),
        (["dev", "--port", "0", "--adapter", "dev=x"], "An adapter has a name of its own"),
        (["dev", "--port", "0", "--adapter", "a=x", "--adapter", "a=y"], "An adapter has a name of its own"),
        (["dev", "--port", "0", "--max-sequences", "8", "--max-batch-tokens", "4"], "max_batch_tokens has room"),
    ],
)
def test_bad_options(words: list[str], text: str) -> None:
    ran = CliRunner().invoke(app, ["serve", *words])
    assert ran.exit_code == 2, ran.output
    assert text in ran.output


def test_a_template_that_reaches_out_of_its_sandbox_is_not_served(tmp_path: Path) -> None:
    file = tmp_path / "escape.jinja"
    file.write_text("{{ messages.__class__.__base__.__subclasses__() }}")
    ran = CliRunner().invoke(app, ["serve", "dev", "--port", "0", "--chat-template", str(file)])
    assert ran.exit_code == 2
    assert "A chat template works on its messages alone" in ran.output


def test_a_key_from_the_environment_and_a_target_that_is_impossible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target is said to be so, and what is possible is served."""
    model = tmp_path / "tiny.toml"
    model.write_text(TINY)
    monkeypatch.setenv("CAPIBARA_API_KEY", "from-outside")
    running = _start(model, tmp_path / "log", *SMALL, "--target-latency-ms", "0.001")
    key = {"Authorization": "Bearer from-outside"}
    body = {"model": "tiny", "prompt": [256, 72], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    try:
        assert call(running.address, "GET", "/v1/models")[0] == 401
        status, answer, _ = post(running.address, body, "/v1/completions", headers=key)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 6)
    finally:
        assert _stop(running) == 0
    assert "0.001 ms a token is impossible here" in running.log.read_text()


def test_every_option_reaches_the_server_or_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from capibara.cli import serve as command
    from capibara.serve import server as servers

    made: dict[str, Any] = {}

    class Recorded:
        exposed = True
        address = "http://example:1"

        def __init__(self, host: str, port: int, settings: Any, books: Any) -> None:
            made.update(host=host, port=port, settings=settings, books=books)

        @contextlib.contextmanager
        def stopped_by_signals(self) -> Iterator[None]:
            yield

        def run(self, load: Any, ready: Any, reload: Any) -> None:
            made["placed"] = step_hooks.is_placed()
            reload(jax.devices()[:4])
            made["resized"] = made["config"].mesh.size
            load()

    def load_engine(
        model: str, name: str, template: str, config: Any, max_prompt: int, warm_up: bool, defaults: bool, books: Any,
        read: Any, target_latency_ms: float | None,
    ) -> Any:  # fmt: skip
        made.update(model=model, name=name, template=template, config=config, max_prompt=max_prompt, warm_up=warm_up)
        made.update(defaults=defaults, loaded=read()[0], target=target_latency_ms)
        return None, None

    monkeypatch.setattr(servers, "Server", Recorded)
    monkeypatch.setattr(command, "load_engine", load_engine)
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    words = (
        "dev --host 0.0.0.0 --port 7 --name n --max-sequences 3 --max-queue 5 --max-batch-tokens 77 --max-length 99 "
        "--max-prompt 44 --max-body-bytes 2048 --request-timeout-s 1.5 --client-timeout-s 2.5 --drain-timeout-s 3.5 "
        f"--cors-origin https://a.example --chat-template {template} --tool-parser llama3 --cache-dtype int8 "
        "--weights int8 --speculative-tokens 2 --batch-invariant --adapter a=folder --seed 9 --no-warm-up --no-page "
        "--memory-share 0.5 --precision bfloat16 "
        f"--log-level error --no-generation-defaults --goodput-file {tmp_path / 'time.jsonl'} "
        "--chips 2 --scale 1:4 --scaling-policy utilization --cost-limit-per-hour 50"
    )
    ran = CliRunner().invoke(app, ["serve", *words.split()])
    assert ran.exit_code == 0, ran.output
    assert "open to other machines" in ran.output
    settings, config = made["settings"], made["config"]
    assert (made["host"], made["port"], made["model"], made["name"]) == ("0.0.0.0", 7, "dev", "n")
    assert (made["max_prompt"], made["warm_up"], made["template"]) == (44, False, template.read_text())
    assert settings == type(settings)(
        cors_origins=("https://a.example",), max_body_bytes=2048, request_timeout_s=1.5, client_timeout_s=2.5,
        drain_timeout_s=3.5, tool_parser="llama3", chat_template=template.read_text(), page=False, log_level="error",
    )  # fmt: skip
    assert (config.max_sequences, config.max_queue, config.max_batch_tokens, config.max_length) == (3, 5, 77, 99)
    assert (config.cache_dtype, config.weights, config.memory_share) == ("int8", "int8", 0.5)
    assert config.speculative_tokens == 2
    assert (config.batch_invariant, dict(config.adapters), config.seed) == (True, {"a": "folder"}, 9)
    assert config.cache_folder is not None
    assert made["defaults"] is False
    assert made["loaded"]._dtype == "bfloat16"
    assert made["books"].file == tmp_path / "time.jsonl"
    assert (made["placed"], made["resized"], config.mesh.size) == (True, 4, 2)
    assert "capibara: goodput" in ran.output
    keys = CliRunner().invoke(app, ["serve", "dev", "--api-key", "one", "--api-key", "two"])
    assert keys.exit_code == 0
    assert made["settings"].api_keys == ("one", "two")
    assert made["defaults"] is True
    assert made["loaded"]._dtype == "float32", "the preset's"


def test_without_the_extra_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "starlette" else real(name))
    for words in (["serve", "dev"], ["bench", "serve", "http://127.0.0.1:9"]):
        ran = CliRunner().invoke(app, words)
        assert ran.exit_code == 2
        assert "pip install 'capibara-jax[serve]'" in ran.output


@pytest.mark.quick
def test_how_a_server_is_scaled_is_told() -> None:
    from capibara.cli import serve as command

    scaler = command._scaler("2:8", "utilization", 50.0)
    assert scaler is not None
    assert (scaler.min_chips, scaler.max_chips) == (2, 8)
    assert (scaler.scaling_policy, scaler.cost_limit_per_hour) == ("utilization", 50.0)
    for words, text in (
        (["--scale", "8"], "--scale has the fewest and the most chips"),
        (["--scale", "²:8"], "--scale has the fewest and the most chips"),
        (["--scaling-policy", "fixed"], "--scaling-policy is for a server that is scaled"),
        (["--cost-limit-per-hour", "50"], "--cost-limit-per-hour is for a server that is scaled"),
        (["--scale", "8:2"], "min_chips is at most max_chips"),
        (["--scale", "1:2", "--scaling-policy", "cheap"], "Unknown scaling_policy 'cheap'"),
        (["--scale", "1:2", "--cost-limit-per-hour", "1"], "cost_limit_per_hour pays for the fewest chips"),
    ):
        ran = CliRunner().invoke(app, ["serve", "dev", "--port", "0", *words])
        assert ran.exit_code == 2, ran.output
        assert text in " ".join(ran.output.split()), ran.output
