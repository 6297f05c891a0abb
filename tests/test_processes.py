"""Processes of one program, for real: what they tell each other, who is missing, and checkpoints over all of them."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from capibara.processes import COORDINATOR, PROCESS_COUNT, PROCESS_ID, barrier, gather, join_from_environment

PROGRAM = """
    import os, sys, time
    import jax
    jax.config.update("jax_num_cpu_devices", 2)
    from capibara.processes import MissingProcess, barrier, gather, join_from_environment
    assert join_from_environment()
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from capibara.checkpoints import Checkpoints

    me, count, folder = jax.process_index(), jax.process_count(), sys.argv[1]
    for number in range(4):
        assert gather("numbers", {"me": me, "number": number}) == [
            {"me": process, "number": number} for process in range(count)
        ]
    sharding = NamedSharding(Mesh(np.array(jax.devices()).reshape(count, 2), ("data", "model")), P("data", "model"))
    make = jax.jit(lambda step: jnp.arange(64.0).reshape(8, 8) + step, out_shardings=sharding)
    target = {"w": jax.ShapeDtypeStruct((8, 8), "float32", sharding=sharding)}

    def values(restored):
        return [float(shard.data[0, 0]) for shard in restored.state["w"].addressable_shards]

    def as_made(step):
        return [float(shard.data[0, 0]) for shard in make(step).addressable_shards]

    local = os.path.join(folder, "local")
    with Checkpoints(
        os.path.join(folder, "run"), emergency_folder=local, emergency_every=1, timeout=30
    ) as checkpoints:
        assert checkpoints.restore_latest(target) is None
        checkpoints.save(1, {"w": make(1)}, {"at": 1})
        checkpoints.save(2, {"w": make(2)}, {"at": 2})
        assert checkpoints.steps() == [1, 2]
        restored = checkpoints.restore(target)
        assert (restored.step, restored.emergency, restored.extra) == (2, False, {"at": 2})
        assert values(restored) == as_made(2)
        for step in (3, 4):
            checkpoints.emergency_copy(step, {"w": make(step)}, {"at": step, "process": me})
        restored = checkpoints.restore(target)
        assert (restored.step, restored.emergency, restored.extra) == (4, True, {"at": 4, "process": me})
        assert values(restored) == as_made(4)
        # Process 1 finds its newest copy damaged: all take the one before.
        if me == 1:
            file = os.path.join(local, f"step_00000004.process_1_of_{count}")
            with open(file, "r+b") as opened:
                opened.seek(-2, os.SEEK_END)
                opened.write(b"\\xff\\xff")
        barrier("damaged")
        restored = checkpoints.restore(target)
        assert (restored.step, restored.emergency) == (3, True)
        assert values(restored) == as_made(3)
    print(f"process {me} is well", flush=True)
    given_up = [os.path.join(folder, f"given_up_{process}") for process in range(count)]

    def wait_for(path):
        while not os.path.exists(path):
            time.sleep(0.02)

    if me == 1:
        wait_for(given_up[0])
    try:
        barrier("the last", timeout=1.0)
    except MissingProcess as error:
        print(error, error.missing, flush=True)
    open(given_up[me], "w").close()
    if me == 0:
        wait_for(given_up[1])  # it keeps the store that process 1 comes to
    os._exit(0)
"""


def test_several_processes(tmp_path: Path, as_a_reader: dict[str, str]) -> None:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port = opened.getsockname()[1]
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path)],
            env={**as_a_reader, PROCESS_ID: str(me), PROCESS_COUNT: "2", COORDINATOR: f"127.0.0.1:{port}"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for me in range(2)
    ]  # fmt: skip
    outputs = [program.communicate(timeout=300) for program in programs]
    for me, (told, errors) in enumerate(outputs):
        assert f"process {me} is well" in told, errors[-3000:]
    assert "process 0 waited 1 s at 'barrier/the last' (call 0) and process 1 of 2 did not come" in outputs[0][0]
    assert "(1,)" in outputs[0][0]


@pytest.mark.quick
def test_one_process_has_nobody_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier("alone", timeout=0.001)
    assert gather("alone", {"a": 1}) == [{"a": 1}]
    for name in (PROCESS_ID, PROCESS_COUNT, COORDINATOR):
        monkeypatch.delenv(name, raising=False)
    assert not join_from_environment()
    monkeypatch.setenv(PROCESS_COUNT, "4")
    with pytest.raises(ValueError, match="CAPIBARA_PROCESS_ID=None, CAPIBARA_PROCESS_COUNT=4"):
        join_from_environment()
    monkeypatch.setenv(PROCESS_ID, "4")
    monkeypatch.setenv(COORDINATOR, "127.0.0.1:1")
    with pytest.raises(ValueError, match="is a number below"):
        join_from_environment()
