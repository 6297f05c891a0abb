"""A server that goes over to other devices while clients ask: nothing is lost, and answers stay what they are."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from tests.serve.engines import engine_of, model_of, prompts_of, wanted
from tests.serve.http.wire import ask, call, post
from tests.serve.stand_in import CARD, StandIn, wait_until_ready

from capibara.fleet import TpuAutoScaler
from capibara.mesh import MeshConfig
from capibara.models import ModularCapibaraModel, step_hooks
from capibara.serve import Engine, Request, SamplingParams
from capibara.serve.link import ModelCard, ServerSettings
from capibara.serve.request import QueueFull, RequestOutput
from capibara.serve.resizing import Move, Occupancy
from capibara.serve.server import Loaded, Server


class Held(StandIn):
    """One that begins two requests at a time, and is on devices."""

    def __init__(self, devices: Sequence[Any], *, full: bool = False, **more: Any) -> None:
        super().__init__(step_s=0.005, **more)
        self.devices = list(devices)
        self.limits = SimpleNamespace(max_sequences=2)
        self.full = full
        self.waiting: list[Request] = []
        self.closed = False

    def add(self, request: Request, *, taken: bool = False) -> None:
        if self.full and not taken:
            raise QueueFull("The queue is full. Got one more. Fix: come again later.")
        if len(self.running) < 2:
            super().add(request)
        else:
            self.waiting.append(request)

    def has_work(self) -> bool:
        return bool(self.running)  # behind a closed gate too: what has begun is not done

    def step(self) -> list[RequestOutput]:
        outputs = super().step()
        while self.waiting and len(self.running) < 2:
            super().add(self.waiting.pop(0))
        return outputs

    def hand_back(self) -> list[Request]:
        handed, self.waiting = self.waiting, []
        return handed

    def close(self) -> None:
        super().close()
        self.closed = True


@contextmanager
def _serving(
    load: Callable[[Sequence[Any]], Any],
    devices: Sequence[Any],
    card: ModelCard = CARD,
    around: Callable[[], AbstractContextManager[Any]] | None = None,
    **settings: Any,
) -> Iterator[Server]:
    server = Server("127.0.0.1", 0, ServerSettings(**{"log_level": "warning", **settings}))
    failures: list[BaseException] = []
    up = threading.Event()

    def run() -> None:
        try:
            with ExitStack() as stack:
                if around is not None:
                    stack.enter_context(around())

                def reload(others: Sequence[Any]) -> Loaded:
                    return Loaded(load(others), card)

                server.run(lambda: reload(devices), lambda card: up.set(), reload)
        except BaseException as error:  # noqa: BLE001  # shown by the test, not by the thread
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert up.wait(60), failures
        wait_until_ready(server.address)
        yield server
    finally:
        server.stop()
        thread.join(60)
        assert not thread.is_alive()
    assert not failures, failures


def _until(condition: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _asked(count: int, work: Callable[[int], Any]) -> tuple[list[threading.Thread], dict[int, Any]]:
    results: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda n=n: results.update({n: work(n)})) for n in range(count)]
    for thread in threads:
        thread.start()
    return threads, results


def _ready(server: Server) -> tuple[int, str | None]:
    status, body, _ = call(server.address, "GET", "/ready")
    return status, body["error"]["code"] if status != 200 else None


@pytest.mark.quick
def test_what_has_begun_ends_where_it_is_and_the_rest_is_answered_elsewhere() -> None:
    made: list[Held] = []

    def load(devices: Sequence[Any]) -> Held:
        made.append(Held(devices))
        return made[-1]

    with _serving(load, "ab") as server:
        first = made[0]
        first.gate.clear()
        threads, results = _asked(5, lambda n: post(server.address, ask(f"answer {n}")))
        _until(lambda: len(first.running) == 2 and len(first.waiting) == 3)
        server.resize("abcd")
        _until(lambda: _ready(server) == (503, "resizing"))
        assert call(server.address, "GET", "/health")[0] == 200
        late, late_results = _asked(2, lambda n: post(server.address, ask(f"late {n}")))
        time.sleep(0.1)
        assert not late_results, "they wait, and are not refused"
        first.gate.set()
        for thread in (*threads, *late):
            thread.join(30)
        _until(lambda: _ready(server) == (200, None))
        assert [results[n][1]["choices"][0]["message"]["content"] for n in range(5)] == [
            f"answer {n}" for n in range(5)
        ]
        assert [late_results[n][0] for n in range(2)] == [200, 200]
        assert [engine.devices for engine in made] == [list("ab"), list("abcd")]
        assert first.closed
        assert (len(first.seen), len(made[1].seen)) == (2, 5)
        with pytest.raises(ValueError, match="one device or more, each once"):
            server.resize("aa")
    with pytest.raises(ValueError, match="pass reload="):
        server.resize("ab")


def test_a_move_is_called_off_where_answers_take_too_long_and_where_the_engine_fails() -> None:
    made: list[Held] = []

    half: list[weakref.ref[Held]] = []

    def load(devices: Sequence[Any]) -> Held:
        if len(devices) == 3:
            tried = Held(devices)
            half.append(weakref.ref(tried))
            raise RuntimeError("no memory on three")
        assert all(one() is None for one in half), "what was half made has the memory that is needed here"
        made.append(Held(devices))
        return made[-1]

    with _serving(load, "a", drain_timeout_s=0.3) as server:
        made[0].gate.clear()
        threads, results = _asked(3, lambda n: post(server.address, ask(f"answer {n}")))
        _until(lambda: made[0].running and len(made[0].waiting) == 1)
        server.resize("ab")
        _until(lambda: _ready(server) == (503, "resizing"))
        _until(lambda: _ready(server) == (200, None))  # by the timeout, with nothing answered
        assert not results
        assert not made[0].closed
        made[0].gate.set()
        for thread in threads:
            thread.join(30)
        assert sorted(results[n][0] for n in range(3)) == [200] * 3
        server.resize("abc")
        _until(lambda: len(made) == 2)
        assert made[1].devices == ["a"], "as it was"
        assert post(server.address, ask("still there"))[1]["choices"][0]["message"]["content"] == "still there"


@pytest.mark.quick
def test_a_request_that_is_cancelled_while_it_is_kept() -> None:
    requests = [Request(name, (1, 2)) for name in "abc"]
    move = Move(["d"], 0.0, requests[:2], requests[2:])
    assert move.cancel("x") is None
    for name in "bc":
        output = move.cancel(name)
        assert output is not None
        assert (output.id, output.finish_reason, output.usage.prompt_tokens) == (name, "cancelled", 2)
    assert (move.taken, move.new) == (requests[:1], [])


def test_whoever_was_let_in_is_answered_however_full_it_is_there_and_who_left_is_not() -> None:
    made: list[Held] = []

    def load(devices: Sequence[Any]) -> Held:
        made.append(Held(devices, full=bool(made)))
        return made[-1]

    with _serving(load, "a") as server:
        first = made[0]
        first.gate.clear()
        threads, results = _asked(4, lambda n: post(server.address, ask(f"answer {n}")))
        _until(lambda: len(first.running) == 2 and len(first.waiting) == 2)
        server.resize("ab")
        _until(lambda: _ready(server) == (503, "resizing"))
        body = json.dumps(ask("gone")).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as leaves:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
            leaves.sendall(head.encode() + body)
            _until(lambda: "vllm:num_requests_waiting{" in call(server.address, "GET", "/metrics")[1])
            _until(lambda: 'waiting{model_name="stand-in"} 3.0' in call(server.address, "GET", "/metrics")[1])
        _until(lambda: 'waiting{model_name="stand-in"} 2.0' in call(server.address, "GET", "/metrics")[1])
        late, late_results = _asked(1, lambda n: post(server.address, ask("late")))
        _until(lambda: 'waiting{model_name="stand-in"} 3.0' in call(server.address, "GET", "/metrics")[1])
        first.gate.set()
        for thread in (*threads, *late):
            thread.join(30)
    assert [results[n][0] for n in range(4)] == [200] * 4
    assert late_results[0][0] == 429
    assert len(made[1].seen) == 2


def test_a_server_that_is_told_to_stop_while_its_engine_is_made() -> None:
    made: list[Held] = []
    goes_on = threading.Event()

    def load(devices: Sequence[Any]) -> Held:
        if made:
            assert goes_on.wait(60)
        made.append(Held(devices))
        return made[-1]

    with _serving(load, "a") as server:
        first = made[0]
        first.gate.clear()
        threads, results = _asked(3, lambda n: post(server.address, ask(f"answer {n}")))
        _until(lambda: len(first.running) == 2 and len(first.waiting) == 1)
        server.resize("ab")
        _until(lambda: not first.waiting)
        first.gate.set()
        _until(lambda: first.closed)
        server.stop()
        _until(lambda: _ready(server) == (503, "stopping"))  # and nothing new is taken, long before the engine is there
        assert len(made) == 1
        goes_on.set()
        for thread in threads:
            thread.join(30)
    assert [results[n][0] for n in range(3)] == [200] * 3


def test_a_scaler_is_told_of_its_own_moves_and_a_second_resize_comes_after_the_first() -> None:
    class Placer:
        def __init__(self) -> None:
            self.told: list[list[Any]] = []
            self.wants: list[Any] | None = None

        def place(self, devices: Sequence[Any], load: Any = None) -> list[Any] | None:
            wanted, self.wants = self.wants, None
            return wanted

        def called_off(self, devices: Sequence[Any]) -> None:
            self.told.append(list(devices))

    made: list[Held] = []
    placer = Placer()

    def load(devices: Sequence[Any]) -> Held:
        if len(devices) == 3:
            raise RuntimeError("no memory on three")
        made.append(Held(devices))
        return made[-1]

    with _serving(load, "a", around=lambda: step_hooks.placing(placer)) as server:
        made[0].gate.clear()
        threads, results = _asked(1, lambda n: post(server.address, ask("answer")))
        _until(lambda: made[0].running)
        server.resize("abc")
        _until(lambda: _ready(server) == (503, "resizing"))
        server.resize("cd")  # another, while the first is under way
        server.resize("bd")  # and the last one counts
        made[0].gate.set()
        _until(lambda: made[-1].devices == ["b", "d"])
        threads[0].join(30)
        assert placer.told == [], "it was by hand"
        placer.wants = list("abc")
        _until(lambda: placer.told == [["b", "d"]])
    assert [one.devices for one in made] == [["a"], ["a"], ["b", "d"], ["b", "d"]]
    assert results[0][0] == 200


@pytest.mark.quick
def test_what_an_engine_before_ended_says_nothing_of_this_one() -> None:
    clock = itertools.count(0.0, 60.0)
    occupancy = Occupancy(4, clock=lambda: next(clock))
    occupancy.saw(running=4, waiting=8, finished=1000)
    occupancy.places = 2  # a controller of latency lets fewer run
    occupancy.saw(running=2, waiting=8, finished=1004)
    told = occupancy()
    assert told["waiting_minutes"] == pytest.approx(8 * (4 * 60 / 4) / 2 / 60)
    occupancy.saw(running=1, waiting=8, finished=1006)
    assert occupancy()["utilization"] == 1.0


@pytest.mark.quick
def test_how_full_an_engine_was() -> None:
    clock = itertools.count(0.0, 30.0)
    occupancy = Occupancy(8, clock=lambda: next(clock))
    assert occupancy()["utilization"] is None, "nothing was seen"
    occupancy.saw(running=8, waiting=0, finished=0)
    occupancy.saw(running=2, waiting=4, finished=0)
    # Half a minute with 8 running and none that ended: an answer takes half a minute for each of the two at least.
    told = occupancy()
    assert told["utilization"] == 1.0
    assert told["waiting_minutes"] == pytest.approx(4 * 120 / 8 / 60)
    occupancy.saw(running=2, waiting=16, finished=4)
    told = occupancy()
    assert told["utilization"] == 0.25
    assert told["waiting_minutes"] == pytest.approx(16 * (60 / 4) / 8 / 60)


def test_an_engine_hands_back_what_has_not_begun(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model_of("attention"), programs)
    for number, prompt in enumerate(prompts_of(3, 5, 4, 6, 7, 8)):
        engine.add(Request(str(number), prompt, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)))
    engine.step()
    handed = engine.hand_back()
    assert [request.id for request in handed] == ["4", "5"], "four run at a time"
    ended = {}
    while engine.has_work():
        ended |= {output.id: output.finish_reason for output in engine.step() if output.finish_reason}
    assert ended == dict.fromkeys("0123", "length")
    assert engine.hand_back() == []
    engine.check()
    # What is still being read has not begun either; and who was let in before is queued however many wait.
    brought: Future[Any] = Future()
    monkeypatch.setattr(engine._grammars, "start", lambda sampling: brought)
    engine.scheduler.max_queue = 1
    engine.add(Request("a", (1, 2), SamplingParams(regex="[ab]")))
    assert engine.compiling("a")
    for name in "bcde":
        engine.add(Request(name, (1, 2)))
    with pytest.raises(QueueFull):
        engine.add(Request("f", (1, 2)))
    engine.add(Request("f", (1, 2)), taken=True)
    assert [request.id for request in engine.hand_back()] == list("abcdef")
    assert brought.cancelled()
    assert not engine.has_work()


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs 4 devices")
def test_the_scaler_resizes_a_server_under_load(programs: Path) -> None:
    """Real engines over 1 and 2 virtual devices, a real HTTP process, and a scaler that sees the load rise and fall."""
    model = model_of("attention")
    prompts = prompts_of(*[4 + n % 9 for n in range(24)])
    expected = [wanted("attention", prompt) for prompt in prompts]
    sizes: list[int] = []

    def load(devices: Sequence[Any]) -> Engine:
        sizes.append(len(devices))
        own = ModularCapibaraModel(model.config, params=model.params, precision="float32")
        mesh = None if len(devices) == 1 else MeshConfig((len(devices),), ("model",)).build(list(devices))
        return engine_of(own, programs, mesh=mesh, max_queue=64)

    card = ModelCard(
        name="tiny", origin="a test", created=1, tokenizer="bytes", max_length=64, max_prompt=63, vocab_size=259,
        prompt_bos=False, max_sequences=4, max_queue=64,
    )  # fmt: skip
    rented: list[int] = []
    clock = itertools.count(0, 60)  # a minute passes at each look
    scaler = TpuAutoScaler(
        1, 2, scaling_policy="utilization", cooldown_minutes=10, interval_minutes=1, on_change=rented.append,
        clock=lambda: next(clock),
    )  # fmt: skip

    def answer(number: int) -> Any:
        body = {"model": "tiny", "prompt": list(prompts[number]), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        if number % 3:
            return post(server.address, body, "/v1/completions")[:2]
        status, events, _ = post(server.address, {**body, "stream": True}, "/v1/completions")
        pieces = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
        return status, {"choices": [{"text": "".join(piece["choices"][0]["text"] for piece in pieces)}]}

    with _serving(load, jax.devices()[:1], card, scaler.managed_scaling, drain_timeout_s=600) as server:
        threads, results = _asked(len(prompts), answer)
        _until(lambda: 2 in sizes, 120)  # the places are taken, and requests wait
        for thread in threads:
            thread.join(120)
        _until(lambda: len(sizes) > 2 and sizes[-1] == 1 and scaler.steps == len(prompts), 120)  # nobody asks any more
        # Figures go on where the engine before ended.
        told = f'vllm:generation_tokens_total{{model_name="tiny"}} {8.0 * len(prompts)}'
        _until(lambda: told in call(server.address, "GET", "/metrics")[1])
    assert [results[n][0] for n in range(len(prompts))] == [200] * len(prompts), "no request is lost"
    decode = model.tokenizer.decode
    assert [results[n][1]["choices"][0]["text"] for n in range(len(prompts))] == [decode(one) for one in expected]
    assert [1, *rented] == sizes == [1, 2] * (len(sizes) // 2) + [1]
    assert [(one.before, one.after) for one in scaler.changes] == list(itertools.pairwise(sizes))
