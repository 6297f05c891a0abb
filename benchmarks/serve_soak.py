"""Thousands of requests to a server, many of them taken back, cut off or malformed: what it answers, and what it leaks.

    python benchmarks/serve_soak.py llama-1b --requests 10000 --at-a-time 200 [--out PATH] [-- OPTIONS OF serve]

Starts `capibara serve MODEL --batch-invariant` and asks it, by a seed, for answers whole and streamed, hangs up in the
middle of some and right after sending others, and sends what no client should. Fails where a status is none of the
documented ones, an error has not OpenAI's shape, the same greedy request got another answer than the first time,
requests or pages are left over at the end, the processes' memory grew by more than --growth-mib after the first
quarter, or the server does not end cleanly.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import psutil

PROMPTS, MOST_TOKENS = 16, 24
DOCUMENTED = {200, 400, 404, 413, 422, 429}
KINDS = {"whole": 50, "streamed": 22, "hung up": 12, "gone at once": 6, "malformed": 10}
SETTLE_S = 60.0


class Soak:
    def __init__(self, host: str, port: int, model: str, seed: int) -> None:
        self.host, self.port, self.model, self.random = host, port, model, random.Random(seed)
        letters = "abcdefghijklmnopqrstuvwxyz "
        self.prompts = ["".join(self.random.choices(letters, k=self.random.randint(1, 200))) for _ in range(PROMPTS)]
        self.first: dict[tuple[int, int], str] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []

    async def exchange(
        self, method: str, path: str, body: bytes = b"", events: int | None = None
    ) -> tuple[int, bytes] | None:
        """(status, body); after so many events of a stream, or none, the connection is dropped, and None returned."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 22)
        try:
            head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            if events == 0:
                return None
            status = int((await reader.readline()).split()[1])
            while (await reader.readline()).strip():
                pass
            if events is None or status != 200:
                return status, await reader.read()
            seen = 0
            while seen < events and (line := await reader.readline()):
                seen += line.startswith(b"data: ")
            return None
        finally:
            writer.close()

    def ask(self, **fields: Any) -> tuple[tuple[int, int], dict[str, Any]]:
        which, tokens = self.random.randrange(PROMPTS), self.random.choice((4, 8, MOST_TOKENS))
        body = {"model": self.model, "prompt": self.prompts[which], "max_tokens": tokens, "temperature": 0, **fields}
        return (which, tokens), body

    def malformed(self) -> bytes:
        _, good = self.ask()
        return self.random.choice(
            [
                b"{", b"\xff\xfe", b"[]", b"null", json.dumps({**good, "max_tokens": "many"}).encode(),
                json.dumps({**good, "model": "another"}).encode(), json.dumps({**good, "temperature": -1}).encode(),
                json.dumps({**good, "prompt": "x" * 3_000_000}).encode(), json.dumps({**good, "prompt": 3.5}).encode(),
                json.dumps({**good, "response_format": {"type": "json_schema", "json_schema": {"schema": 7}}}).encode(),
            ]
        )  # fmt: skip

    def same(self, asked: tuple[int, int], text: str) -> None:
        if self.first.setdefault(asked, text) != text:
            self.faults.append(f"request {asked} was answered {text!r}, at first {self.first[asked]!r}")

    async def one(self, kind: str) -> None:
        path = "/v1/completions"
        if kind == "malformed":
            status, answer = await self.exchange("POST", path, self.malformed()) or (0, b"")
            expected = 400 <= status < 500
            if not expected:
                self.faults.append(f"malformed: {status} {answer[:200]!r}")
        else:
            asked, body = self.ask(**({} if kind == "whole" else {"stream": True}))
            events = {"hung up": self.random.randint(1, 4), "gone at once": 0}.get(kind)
            got = await self.exchange("POST", path, json.dumps(body).encode(), events)
            if got is None:
                self.counts[kind] += 1
                return
            status, answer = got
        self.counts[f"{kind}, {status}"] += 1
        if status not in DOCUMENTED:
            self.faults.append(f"{kind}: {status} {answer[:200]!r}")
        elif status != 200:
            error = json.loads(answer).get("error", {})
            if not {"message", "type"} <= error.keys():
                self.faults.append(f"{kind}: not OpenAI's error shape: {answer[:200]!r}")
        elif kind == "whole":
            self.same(asked, json.loads(answer)["choices"][0]["text"])
        elif kind == "streamed":
            lines = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: ") and b"[DONE]" not in line]
            choices = [choice for line in lines for choice in json.loads(line).get("choices", [])]
            self.same(asked, "".join(choice.get("text") or "" for choice in choices))

    async def run(self, requests: int, at_a_time: int, rss: Any) -> dict[str, Any]:
        kinds = self.random.choices(list(KINDS), list(KINDS.values()), k=requests)
        queue = iter(enumerate(kinds))
        memory: dict[str, float] = {}
        begin = time.perf_counter()

        async def worker() -> None:
            for number, kind in queue:
                if number == requests // 4:
                    memory["after a quarter"] = rss()
                try:
                    await asyncio.wait_for(self.one(kind), 120)
                except (TimeoutError, OSError, ValueError, IndexError) as error:
                    self.faults.append(f"{kind}: {type(error).__name__}: {error}")
                if number and number % 1000 == 0:
                    print(f"{number} requests, {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)

        await asyncio.gather(*(worker() for _ in range(at_a_time)))
        seconds = time.perf_counter() - begin
        left = await self.settled()
        if left:
            self.faults.append(f"left over: {left}")
        memory["at the end"] = rss()
        status, _ = await self.exchange("GET", "/health") or (0, b"")
        if status != 200:
            self.faults.append(f"/health answers {status}")
        return {"seconds": round(seconds, 1), "answers": dict(self.counts.most_common()), "memory_mib": memory}

    async def settled(self) -> dict[str, float]:
        """What is left of requests and pages when nothing has been asked for a while; nothing, if all is well."""
        deadline = time.perf_counter() + SETTLE_S
        while True:
            _, text = await self.exchange("GET", "/metrics") or (0, b"")
            names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            lines = [line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#")]
            left = {n: float(v) for n, v in lines if n.split("{")[0].removeprefix("vllm:") in names and float(v)}
            if not left or time.perf_counter() > deadline:
                return left
            await asyncio.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-a-time", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--growth-mib", type=float, default=64.0)
    parser.add_argument("--out", type=Path)
    # What stands after -- is cut off here: argparse of Python 3.12 takes it for its own options.
    given = sys.argv[1:]
    own = given.index("--") if "--" in given else len(given)
    asked, serve = parser.parse_args(given[:own]), given[own + 1 :]
    command = [sys.executable, "-m", "capibara", "serve", asked.model, "--port", "0", "--json", "--batch-invariant"]
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process, after the server's end)
    server = subprocess.Popen([*command, *serve], stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert server.stdout is not None
        begin = time.perf_counter()
        ready = json.loads(server.stdout.readline() or "{}")
        if not ready:
            code = server.wait()
            log.seek(0)
            sys.exit(f"the server ended with {code} before it was ready; its log ends with\n{log.read()[-2000:]}")
        processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]

        def rss() -> float:
            return round(sum(p.memory_info().rss for p in processes if p.is_running()) / 2**20, 1)

        host, _, port = ready["address"].removeprefix("http://").rpartition(":")
        soak = Soak(host, int(port), ready["model"], asked.seed)
        row = {"ready_seconds": round(time.perf_counter() - begin, 1)}
        row |= asyncio.run(soak.run(asked.requests, asked.at_a_time, rss))
        grown = row["memory_mib"]["at the end"] - row["memory_mib"]["after a quarter"]
        if grown > asked.growth_mib:
            soak.faults.append(f"memory grew by {grown:.0f} MiB")
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
        if code != 0:
            soak.faults.append(f"the server ended with {code}")
    finally:
        server.kill()
    row |= {"different_requests": len(soak.first), "faults": len(soak.faults), "first_faults": soak.faults[:20]}
    import jax

    document = {
        "date": str(date.today()), "device": jax.devices()[0].device_kind, "versions": {"jax": jax.__version__},
        "command": "python benchmarks/serve_soak.py " + " ".join(sys.argv[1:]), "requests": asked.requests, **row,
    }  # fmt: skip
    print(json.dumps(document, indent=1))
    if asked.out is not None:
        asked.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(soak.faults))


if __name__ == "__main__":
    main()
