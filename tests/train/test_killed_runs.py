"""A small program that trains, killed with kill -9 at some step and started again: its numbers are those of a run that
was never interrupted, bit for bit."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from capibara.observe import Goodput, read_recording
from capibara.train.supervisor import Supervisor

PROGRAM = """
    import json, os, signal, sys, time
    import jax
    folder, steps, kills = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    devices = int(sys.argv[4])
    from capibara.processes import join_from_environment, process_count, process_index
    jax.config.update("jax_num_cpu_devices", devices // int(os.environ["CAPIBARA_PROCESS_COUNT"]))
    join_from_environment()
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from capibara.observe import Goodput, Recorder
    from capibara.checkpoints import Checkpoints, Keep
    from capibara.train.preemption import Preemption

    start, me = int(os.environ["CAPIBARA_RESTARTS"]), process_index()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    assert len(jax.devices()) == devices
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    shapes = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(lambda: {"w": jnp.ones((16, 8)), "key": jax.random.key(0), "loss": jnp.float32(0)}),
        {"w": rows, "key": whole, "loss": whole},
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)

    @jax.jit
    def begin():
        return {"w": jnp.ones((16, 8)), "key": jax.random.key(0), "loss": jnp.float32(0)}

    def step(state, position):
        key, noise = jax.random.split(state["key"])
        target = jnp.sin(position + jnp.arange(128.0).reshape(16, 8))
        error = state["w"] - target
        w = state["w"] - 0.1 * error + 0.01 * jax.random.normal(noise, error.shape)
        return {"w": w, "key": key, "loss": jnp.mean(error**2)}

    begin = jax.jit(begin, out_shardings=shardings)
    step = jax.jit(step, out_shardings=shardings, donate_argnums=0)
    with (
        Recorder(os.path.join(folder, "recorder"), me, process_count()) as recorder,
        Goodput(os.path.join(folder, f"goodput_{me}.jsonl"), flush_seconds=0) as goodput,
        Checkpoints(
            os.path.join(folder, "checkpoints"), every=6, keep=Keep(last=2),
            emergency_folder=os.path.join(folder, "local"), emergency_every=2,
        ) as checkpoints,
        Preemption() as preemption,
    ):
        state, done, position = begin(), 0, 0
        with goodput.phase("restart"):
            restored = checkpoints.restore_latest(shapes)
        if restored is not None:
            state, done, position = restored.state, restored.step, restored.extra["position"]
            print(f"process {me} goes on from step {done}", flush=True)
        while done < steps:
            with goodput.phase("step", step=done + 1):
                state = step(state, jnp.float32(position))
                loss = float(state["loss"])
            done, position = done + 1, position + 3
            recorder.step(done, loss=loss)
            if me == 0:
                with open(os.path.join(folder, "losses.jsonl"), "a") as file:
                    file.write(json.dumps([done, loss.hex()]) + "\\n")
            checkpoints.after_step(done, state, {"position": position})
            if kills[start : start + 1] == [[me, done]]:
                os.kill(os.getpid(), signal.SIGKILL)
            if preemption.should_stop(done):
                checkpoints.save(done, state, {"position": position}, block=True)
                print(f"process {me} saved step {done}", flush=True)
                preemption.exit()
            if len(sys.argv) > 5:
                time.sleep(float(sys.argv[5]))
"""


def command(tmp_path: Path, folder: str, steps: int, kills: list[tuple[int, int]], *more: object) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    (tmp_path / folder).mkdir(exist_ok=True)
    return [sys.executable, str(script), str(tmp_path / folder), str(steps), json.dumps(kills), *map(str, more)]


def losses(folder: Path) -> dict[int, str]:
    """By step; a step that was done again must have the same."""
    seen: dict[int, str] = {}
    for line in (folder / "losses.jsonl").read_text(encoding="utf-8").splitlines():
        step, loss = json.loads(line)
        assert seen.setdefault(step, loss) == loss, f"step {step} came out otherwise the second time"
    return seen


def supervised(
    tmp_path: Path, environment: dict[str, str], folder: str, kills: list[tuple[int, int]], processes: int, steps: int
) -> tuple[dict[int, str], str]:
    output = io.StringIO()
    supervisor = Supervisor(
        command(tmp_path, folder, steps, kills, 4), processes, max_restarts=len(kills), backoff_seconds=0,
        stop_seconds=1.0, environment=environment, output=output,
    )  # fmt: skip
    assert supervisor.run() == 0, output.getvalue()[-3000:]
    assert len({end.start for end in supervisor.exits}) == len(kills) + 1
    return losses(tmp_path / folder), output.getvalue()


def environment(reader: dict[str, str]) -> dict[str, str]:
    return {name: reader[name] for name in ("PYTHONPATH", "XLA_FLAGS")}


@pytest.mark.spread(1)
@pytest.mark.quick
@pytest.mark.parametrize("times", [3, 1])
def test_killed_the_losses_are_the_same(tmp_path: Path, as_a_reader: dict[str, str], times: int) -> None:
    steps, where = 10 * times, random.Random(7)
    kills = [(0, 10 * number + where.randrange(3, 11)) for number in range(times)]
    alone = {**as_a_reader, "CAPIBARA_PROCESS_COUNT": "1", "CAPIBARA_RESTARTS": "0"}
    uninterrupted = subprocess.Popen(command(tmp_path, "whole", steps, [], 4), env=alone)
    killed, output = supervised(tmp_path, environment(as_a_reader), "killed", kills, 1, steps)
    assert uninterrupted.wait() == 0
    whole = losses(tmp_path / "whole")
    assert len(whole) == steps
    assert killed == whole
    for _, step in kills:
        # A copy every second step: it goes on from the last whole one, and loses no more than two intervals.
        resumed = [int(line.rpartition(" ")[2]) for line in output.splitlines() if "goes on from step" in line]
        assert any(step - 4 <= back <= step for back in resumed), (step, resumed)
    recording = read_recording(tmp_path / "killed" / "recorder" / "process_0.recording")
    assert f"it was started {times + 1} times" in recording.story()
    report = Goodput(tmp_path / "killed" / "goodput_0.jsonl").report()
    assert report.steps == steps
    assert report.restarts == times + 1  # and this look at the books
    assert 0 < report.seconds["restart"] < report.total


@pytest.mark.slow
def test_one_of_two_processes_is_killed(tmp_path: Path, as_a_reader: dict[str, str]) -> None:
    """Two processes of two devices each; each of them is killed once."""
    whole, _ = supervised(tmp_path, environment(as_a_reader), "whole", [], 2, 20)
    killed, output = supervised(tmp_path, environment(as_a_reader), "killed", [(1, 9), (0, 15)], 2, 20)
    assert killed == whole
    assert "[0] process 0 goes on from step" in output
    assert "[1] process 1 goes on from step" in output


def test_sigterm_saves_and_ends_with_42_and_the_next_start_goes_on(tmp_path: Path, as_a_reader: dict[str, str]) -> None:
    whole, _ = supervised(tmp_path, environment(as_a_reader), "whole", [], 1, 24)
    call = command(tmp_path, "stopped", 24, [], 4, 0.15)
    program = f"""
        import sys
        from capibara.train.supervisor import Supervisor
        sys.exit(Supervisor({call!r}, 2).run())
    """
    running = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], env=as_a_reader, stdout=subprocess.PIPE, text=True
    )
    file = tmp_path / "stopped" / "losses.jsonl"
    deadline = time.monotonic() + 60
    while (not file.exists() or len(losses(tmp_path / "stopped")) < 5) and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    output = running.communicate(timeout=300)[0]
    assert running.returncode == 42, output[-3000:]
    last = max(losses(tmp_path / "stopped"))
    assert f"[0] process 0 saved step {last}" in output
    assert f"[1] process 1 saved step {last}" in output
    assert last < 24
    # It goes on where it was, as one process now: started again by hand, so that its restarts count from 1.
    again = subprocess.run(
        command(tmp_path, "stopped", 24, [], 4),
        env={**as_a_reader, "CAPIBARA_PROCESS_COUNT": "1", "CAPIBARA_RESTARTS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr[-3000:]
    assert f"process 0 goes on from step {last}" in again.stdout
    stopped = losses(tmp_path / "stopped")
    assert stopped.keys() == whole.keys()
    for step, loss in whole.items():
        # The mean over devices of two processes is summed in another order: a few units in the last place.
        assert float.fromhex(stopped[step]) == pytest.approx(float.fromhex(loss), rel=8 * 2**-24)


@pytest.mark.slow
def test_killed_twenty_times(tmp_path: Path, as_a_reader: dict[str, str]) -> None:
    where = random.Random(11)
    kills = [(0, 6 * number + where.randrange(1, 7)) for number in range(20)]
    whole, _ = supervised(tmp_path, environment(as_a_reader), "whole", [], 1, 130)
    killed, _ = supervised(tmp_path, environment(as_a_reader), "killed", kills, 1, 130)
    assert killed == whole


def test_kill_at_any_moment_leaves_a_checkpoint_that_is_whole(tmp_path: Path, as_a_reader: dict[str, str]) -> None:
    """Saving as fast as it can, killed from outside at random moments: what is restored is always of one step."""
    code = """
        import sys
        import jax, jax.numpy as jnp
        from capibara.checkpoints import Checkpoints, Keep
        target = {"a": jax.ShapeDtypeStruct((20000,), "float32"), "b": jax.ShapeDtypeStruct((3, 700), "float32")}
        with Checkpoints(sys.argv[1], keep=Keep(last=2)) as checkpoints:
            step = checkpoints.latest() or 0
            if step:
                restored = checkpoints.restore(target)
                step = restored.step
                for leaf in restored.state.values():
                    assert (leaf == step).all(), step
                assert restored.extra == {"at": step}
            print("from", step, flush=True)
            while True:
                step += 1
                checkpoints.save(step, jax.tree.map(lambda s: jnp.full(s.shape, float(step)), target), {"at": step})
                print("saving", step, flush=True)
    """
    where = random.Random(3)
    reached = 0
    for _ in range(4):
        running = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "run")],
            env=as_a_reader, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert running.stdout is not None
        first = running.stdout.readline().split()
        assert first[:1] == ["from"], running.communicate()[1][-2000:]
        assert int(first[1]) >= reached - 1  # what was announced last may have been cut off; the one before it is there
        for _ in range(3):
            running.stdout.readline()
        time.sleep(where.random() / 4)
        os.kill(running.pid, signal.SIGKILL)
        text = running.communicate()[0]
        # Killed while it wrote: a last line without its end is half a line ("saving ", "saving 1" of 12).
        whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        announced = [int(line.split()[1]) for line in whole if line.startswith("saving ")]
        reached = max(announced, default=int(first[1]) + 3)
