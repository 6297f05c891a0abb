"""Checkpoints come back as they were, on any mesh; what is damaged is passed over; a full disk loses nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.checkpoints.states import array_file, assert_same, flip_bit, mesh_of, shardings, state_on, target_on

from capibara.checkpoints import Alert, Checkpoints, Keep, manifest
from capibara.errors import CheckpointError


def folders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


@pytest.mark.quick
def test_a_state_comes_back_bit_for_bit_on_other_meshes(tmp_path: Path) -> None:
    state = state_on(mesh_of(8))
    extra = {"data": {"position": 1234, "epoch": 1}, "config": {"train.seed": 3}, "layout": ["data", "model"]}
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.save(5, state, extra) == ()
        for count, model in ((4, 2), (8, 4), (32, 2), (1, 1)):
            mesh = mesh_of(count, model)
            restored = checkpoints.restore(target_on(mesh, state))
            assert_same(restored.state, state)
            assert (restored.step, restored.extra, restored.emergency) == (5, extra, False)
            for leaf, sharding in zip(
                jax.tree.leaves(restored.state), jax.tree.leaves(shardings(mesh, state)), strict=True
            ):
                assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


@pytest.mark.spread(1)
@pytest.mark.parametrize("counts", [(8, 4, 8), (32, 8, 32)])
def test_in_programs_of_other_device_counts(
    tmp_path: Path, as_a_reader: dict[str, str], counts: tuple[int, ...]
) -> None:
    """Each program restores what the one before it saved, on its own number of devices, adds one and saves."""
    code = """
        import sys
        import jax
        count, folder = int(sys.argv[1]), sys.argv[2]
        jax.config.update("jax_num_cpu_devices", count)
        from capibara.checkpoints import Checkpoints
        from tests.checkpoints.states import assert_same, mesh_of, state_on, target_on
        assert jax.device_count() == count
        mesh = mesh_of(count)
        state = state_on(mesh)
        with Checkpoints(folder) as checkpoints:
            step = checkpoints.latest() or 0
            if step:
                restored = checkpoints.restore(target_on(mesh, state))
                assert restored.extra == {"devices": [*map(int, sys.argv[3].split(","))]}, restored.extra
                assert_same(restored.state["keys"], state["keys"])
                assert float(restored.state["params"]["w"][0, 0] - state["params"]["w"][0, 0]) == step
                assert len(restored.state["params"]["w"].addressable_shards) == count
                state = restored.state
            state["params"]["w"] = jax.jit(lambda w: w.at[0, 0].add(1))(state["params"]["w"])
            so_far = [*map(int, sys.argv[3].split(","))] if step else []
            checkpoints.save(step + 1, state, {"devices": [*so_far, count]})
        print("saved", step + 1)
    """
    root = str(Path(__file__).parents[3])
    environment = {**as_a_reader, "PYTHONPATH": os.pathsep.join([as_a_reader["PYTHONPATH"], root])}
    for number, count in enumerate(counts):
        before = ",".join(map(str, counts[:number])) or "0"
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), str(count), str(tmp_path / "run"), before],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert result.stdout.strip() == f"saved {number + 1}", result.stderr[-3000:]


@pytest.mark.quick
def test_the_state_may_be_donated_as_soon_as_save_returns(tmp_path: Path) -> None:
    x = jax.device_put(jnp.arange(1 << 16, dtype=jnp.float32))
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    overwrite(x + 0).block_until_ready()
    with Checkpoints(tmp_path, emergency_folder=tmp_path / "local", emergency_every=1) as checkpoints:
        for step, keep in ((1, checkpoints.save), (2, checkpoints.emergency_copy)):
            state = {"x": x + step}
            keep(step, state)
            overwrite(state["x"]).block_until_ready()
            # Orbax keeps a hold of the CPU's own memory while it writes, which may be over by now; a copy of ours does
            # not.
            assert step == 1 or state["x"].is_deleted()
            restored = checkpoints.restore({"x": jax.ShapeDtypeStruct(x.shape, x.dtype)})
            assert restored.step == step
            np.testing.assert_array_equal(restored.state["x"], np.arange(1 << 16) + step)


def test_part_of_a_state(tmp_path: Path) -> None:
    mesh = mesh_of(4)
    state = state_on(mesh)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        target = {"params": target_on(mesh, state)["params"]}
        assert_same(checkpoints.restore(target, partial=True).state["params"], state["params"])
        with pytest.raises(ValueError, match=r"also has .*'opt/0/count' \(int32\[\]\).*partial=True"):
            checkpoints.restore(target)


@pytest.mark.quick
def test_a_target_of_other_leaves_names_them(tmp_path: Path) -> None:
    mesh = mesh_of(4)
    state = state_on(mesh)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        target = target_on(mesh, state)
        target["params"]["w"] = jax.ShapeDtypeStruct((64, 48), jnp.float32)
        with pytest.raises(ValueError, match=r"'params/w' is float32\[64,32\] in the checkpoint and float32\[64,48\]"):
            checkpoints.restore(target)
        target = target_on(mesh, state)
        target["step"] = jax.ShapeDtypeStruct((), jnp.float32)
        with pytest.raises(ValueError, match=r"'step' is int32\[\] in the checkpoint and float32\[\] here"):
            checkpoints.restore(target)
        target = target_on(mesh, state)
        target["key"] = jax.ShapeDtypeStruct((), jax.random.key(0, impl="rbg").dtype)
        with pytest.raises(ValueError, match=r"'key' is uint32\[2\] \(random keys of 'fry'\)|threefry"):
            checkpoints.restore(target)
        target = target_on(mesh, state)
        target["params"]["new"] = jax.ShapeDtypeStruct((7,), jnp.float32)
        with pytest.raises(ValueError, match=r"lacks 'params/new' \(float32\[7\]\)"):
            checkpoints.restore(target)


def _cut(folder: Path) -> str:
    path = array_file(folder)
    os.truncate(path, path.stat().st_size - 5)
    return r"has \d+ bytes and had \d+"


def _flip(folder: Path) -> str:
    flip_bit(array_file(folder))
    return "was changed: its checksum is"


def _lose_metadata(folder: Path) -> str:
    (folder / "_METADATA").unlink()
    return "_METADATA is missing"


def _lose_manifest(folder: Path) -> str:
    (folder / manifest.MANIFEST).unlink()
    return "manifest capibara.json is missing"


def _change_manifest(folder: Path) -> str:
    flip_bit(folder / manifest.MANIFEST)
    return "manifest capibara.json (is cut or was changed|cannot be read)"


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("damage", [_cut, _flip, _lose_metadata, _lose_manifest, _change_manifest])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    target = {"x": jax.ShapeDtypeStruct((4096,), jnp.float32)}
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": jnp.arange(4096.0) + step}, {"at": step})
        checkpoints.wait()
        what = damage(tmp_path / "step_00000002")
        with pytest.warns(RuntimeWarning, match=rf"step 1 is restored instead. step_00000002: .*{what}") as said:
            restored = checkpoints.restore(target)
        assert len(said) == 1
        assert (restored.step, restored.extra) == (1, {"at": 1})
        assert restored.state["x"][0] == 1
        assert checkpoints.latest() == 1  # so that a loop that comes to step 2 again saves it
        with pytest.raises(CheckpointError, match=rf"no checkpoint of step 2 .*{what}"):
            checkpoints.restore(target, step=2)
        damage(tmp_path / "step_00000001")
        with pytest.raises(CheckpointError, match="no checkpoint to restore") as none_good:
            checkpoints.restore(target)
        assert none_good.value.damaged.keys() == {"step_00000001", "step_00000002"}
        with pytest.raises(CheckpointError, match="no checkpoint to restore"):
            checkpoints.restore_latest(target)
        # Training goes on from the start, comes to step 2 again, and has a good one.
        checkpoints.save(2, {"x": jnp.arange(4096.0) + 7})
        assert checkpoints.restore(target).state["x"][0] == 7


def test_every_flipped_bit_of_a_checkpoint_is_seen(tmp_path: Path) -> None:
    """In each file, at its start, in the middle and at its end."""
    target = {"x": jax.ShapeDtypeStruct((64,), jnp.float32)}
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"x": jnp.arange(64.0)}, block=True)
        folder = tmp_path / "run" / "step_00000001"
        files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
        assert len(files) > 5
        for path in files:
            before = path.read_bytes()
            for position in (0, len(before) // 2, len(before) - 1):
                flip_bit(path, position)
                if path.name == manifest.MANIFEST and position == len(before) - 1:
                    path.write_bytes(before)  # the line's end, which says nothing
                    continue
                with pytest.raises(CheckpointError):
                    checkpoints.restore(target)
                path.write_bytes(before)
        assert checkpoints.restore(target).step == 1


@pytest.mark.quick
def test_without_verification_nothing_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpoints(tmp_path, verify=False) as checkpoints:
        checkpoints.save(1, {"x": jnp.arange(8.0)}, block=True)
        monkeypatch.setattr(manifest, "verify", lambda *_: pytest.fail("it was read"))
        assert checkpoints.restore({"x": jax.ShapeDtypeStruct((8,), jnp.float32)}).step == 1


@pytest.mark.quick
def test_policy(tmp_path: Path) -> None:
    losses = {10: 5.0, 20: 1.0, 30: 4.0, 40: 3.0, 50: 2.0, 60: float("nan")}
    with Checkpoints(tmp_path, keep=Keep(last=1, every=30, best=2)) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(step, {"x": jnp.ones(3) * step}, metrics={"loss": loss})
        assert checkpoints.steps() == [20, 30, 50, 60]
        assert checkpoints.restore({"x": jax.ShapeDtypeStruct((3,), jnp.float32)}, step=20).state["x"][0] == 20
    assert Keep(best=1, mode="max", last=1).kept([_Entry(1, 1, {"loss": 9.0}), _Entry(2, 2, {"loss": 1.0})]) == {1, 2}
    for wrong in ({"last": 0}, {"every": 0}, {"best": -1}, {"mode": "least"}, {"last": 2.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Keep(**wrong)


class _Entry:
    def __init__(self, step: int, serial: int, metrics: dict[str, float]) -> None:
        self.step, self.serial, self.metrics = step, serial, metrics


@pytest.mark.quick
def test_after_going_back_the_newest_is_what_was_saved_last(tmp_path: Path) -> None:
    target = {"x": jax.ShapeDtypeStruct((), jnp.float32)}
    with Checkpoints(tmp_path, keep=Keep(last=4)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"x": jnp.float32(step)})
        assert checkpoints.restore(target, step=1).step == 1
        checkpoints.save(2, {"x": jnp.float32(20)})
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(target)
        assert (restored.step, float(restored.state["x"])) == (2, 20)
        assert float(checkpoints.restore(target, step=2).state["x"]) == 20
        assert checkpoints.steps() == [1, 2, 3, 2]
    assert folders(tmp_path) == ["step_00000001", "step_00000002", "step_00000002.1", "step_00000003"]


def test_an_old_one_goes_only_when_a_newer_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    write = manifest.write

    def slow_write(folder: Any, made: manifest.Manifest, local: bool) -> None:
        seen.append(folders(tmp_path))
        write(folder, made, local)

    monkeypatch.setattr(manifest, "write", slow_write)
    with Checkpoints(tmp_path, keep=Keep(last=1)) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": jnp.ones(3)})
    assert seen[1] == ["step_00000001", "step_00000002"]
    assert folders(tmp_path) == ["step_00000002"]


@pytest.mark.quick
def test_a_full_disk_is_an_alert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each of the places where it can fill: the first folder, the arrays, the checksums, the manifest."""
    told: list[Alert] = []
    target = {"x": jax.ShapeDtypeStruct((8,), jnp.float32)}
    full = OSError(28, os.strerror(28))

    def fails(*_: Any, **__: Any) -> None:
        raise full

    with Checkpoints(tmp_path, on_alert=told.append) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(8)}, block=True)
        orbax = checkpoints._checkpointer()
        for number, (place, name) in enumerate(
            [(orbax, "save"), (orbax, "wait_until_finished"), (manifest, "checksums"), (manifest, "write")]
        ):
            with monkeypatch.context() as patch:
                checkpoints._orbax = orbax
                patch.setattr(place, name, fails)
                checkpoints.save(2, {"x": jnp.ones(8)})
                alerts = [*checkpoints.wait(), *told[number:]]
            assert alerts[-1].step == 2
            assert "No space left on device" in alerts[-1].text
            assert "step 2 could not be written" in alerts[-1].text
            assert folders(tmp_path) == ["step_00000001"]
            assert checkpoints.restore(target).step == 1
        assert len(told) == len(checkpoints.alerts) == 4
        checkpoints.save(3, {"x": jnp.ones(8) * 3})
        assert checkpoints.restore(target).step == 3


_FILLING = """
    import os, sys
    import jax, jax.numpy as jnp
    from capibara.checkpoints import Checkpoints
    folder = sys.argv[1]
    limit()
    alerts = []
    with Checkpoints(os.path.join(folder, "run")) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(8)})
        big = jax.random.normal(jax.random.key(0), (2_000_000,))
        alerts += checkpoints.save(2, {"x": big})
        alerts += checkpoints.wait()
        assert len(alerts) == 1, alerts
        print(alerts[0].text)
        print(sorted(os.listdir(os.path.join(folder, "run"))))
        alerts += checkpoints.save(3, {"x": jnp.ones(8) * 3})
        print(float(checkpoints.restore({"x": jax.ShapeDtypeStruct((8,), "float32")}).state["x"][0]))
"""


def _fills(code: str, command: list[str], tmp_path: Path, environment: dict[str, str]) -> None:
    script = tmp_path / "fills.py"
    script.write_text(textwrap.dedent(code) + textwrap.dedent(_FILLING), encoding="utf-8")
    folder = tmp_path / "small"
    folder.mkdir()
    result = subprocess.run(
        [*command, sys.executable, str(script), str(folder)],
        env={**environment, "SMALL": str(folder)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    told = result.stdout.splitlines()
    assert len(told) == 3, result.stderr[-3000:]
    assert "the checkpoint of step 2 could not be written" in told[0]
    assert told[1:] == ["['step_00000001']", "3.0"]


def test_a_file_system_that_is_really_full(tmp_path: Path, as_a_reader: dict[str, str]) -> None:
    mount = 'mount -t tmpfs -o size=4m none "$SMALL" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    (tmp_path / "try").mkdir()
    tried = shutil.which("unshare") and subprocess.run(
        [*command, "true"], env={**os.environ, "SMALL": str(tmp_path / "try")}, capture_output=True, check=False
    )
    if not tried or tried.returncode:
        pytest.skip("needs to mount a small tmpfs in a namespace of its own")
    _fills("def limit(): pass", command, tmp_path, as_a_reader)


def test_a_limit_on_the_size_of_files(tmp_path: Path, as_a_reader: dict[str, str]) -> None:
    code = """
        import resource, signal
        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    """
    _fills(code, [], tmp_path, as_a_reader)


@pytest.mark.quick
def test_an_error_that_is_not_the_storages_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(manifest, "checksums", fails)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": jnp.ones(3)})
    with pytest.raises(ZeroDivisionError, match="a bug"):
        checkpoints.save(2, {"x": jnp.ones(3)})
    checkpoints.save(2, {"x": jnp.ones(3)})
    with pytest.raises(ZeroDivisionError, match="a bug"):
        checkpoints.close()

    def fails_itself() -> None:
        with checkpoints:
            checkpoints.save(3, {"x": jnp.ones(3)})
            raise KeyError("the block's own")

    with pytest.raises(KeyError) as first:
        fails_itself()
    assert first.value.__notes__ == ["and a pending checkpoint failed: ZeroDivisionError('a bug')"]


def test_the_block_ends_when_the_save_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    checksums = manifest.checksums

    def waits(folder: Any, sync: bool = False) -> dict[str, tuple[int, int]]:
        assert go.wait(60)
        return checksums(folder, sync)

    monkeypatch.setattr(manifest, "checksums", waits)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(3)})
        assert checkpoints.pending()
        go.set()
    assert (tmp_path / "step_00000001" / manifest.MANIFEST).exists()


@pytest.mark.quick
def test_bad_input(tmp_path: Path) -> None:
    x = {"x": jnp.ones(3)}
    checkpoints = Checkpoints(tmp_path)
    for step in (-1, 1.5, True, "3"):
        with pytest.raises(ValueError, match="A step is a whole number"):
            checkpoints.save(step, x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"JSON.*not JSON serializable"):
        checkpoints.save(1, x, {"array": jnp.ones(3)})
    with pytest.raises(ValueError, match="str at 'name'"):
        checkpoints.save(1, {"name": "text"})
    with pytest.raises(ValueError, match="an empty tree"):
        checkpoints.save(1, {})
    with pytest.raises(ValueError, match="two leaves called 'a/b'"):
        checkpoints.save(1, {"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}})
    with pytest.raises(ValueError, match="both or neither"):
        Checkpoints(tmp_path, emergency_every=3)
    with pytest.raises(ValueError, match="every is a whole number"):
        Checkpoints(tmp_path, every=0)
    with pytest.raises(CheckpointError, match="no checkpoint to restore"):
        checkpoints.restore(x)
    assert checkpoints.restore_latest(x) is None
    assert checkpoints.latest() is None
    assert folders(tmp_path) == []


@pytest.mark.quick
@pytest.mark.parametrize("address", ["s3://bucket/a run/checkpoints", "gs://bucket/run/checkpoints"])
def test_an_object_stores_address_reaches_orbax_as_it_is(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorded(Exception):
        pass

    class Checkpointer:
        def save(self, directory: Any, args: Any) -> None:
            raise Recorded(os.fspath(directory), type(args).__name__)

    checkpoints = Checkpoints(address)
    monkeypatch.setattr(type(checkpoints.folder), "mkdir", lambda *_, **__: None)
    monkeypatch.setattr(checkpoints._catalogue, "entries", list)
    monkeypatch.setattr(checkpoints, "_checkpointer", Checkpointer)
    with pytest.raises(Recorded) as call:
        checkpoints.save(12, {"x": jnp.ones(3)})
    assert call.value.args == (f"{address}/step_00000012", "PyTreeSaveArgs")
    with pytest.raises(ValueError, match="both of its slashes"):
        Checkpoints(Path(address))


def test_after_step_saves_when_it_is_due(tmp_path: Path) -> None:
    asked: list[int] = []
    with Checkpoints(
        tmp_path / "run", every=4, emergency_folder=tmp_path / "local", emergency_every=2, keep=Keep(last=9)
    ) as checkpoints:
        for step in range(1, 12):
            checkpoints.after_step(step, {"x": jnp.float32(step)}, lambda step=step: asked.append(step) or {"at": step})
        assert asked == [2, 4, 6, 8, 10]
        assert checkpoints.steps() == [4, 8]
        restored = checkpoints.restore({"x": jax.ShapeDtypeStruct((), jnp.float32)})
        assert (restored.step, restored.emergency, restored.extra) == (10, True, {"at": 10})


def test_a_run_killed_in_its_first_save_begins_anew(tmp_path: Path) -> None:
    target = {"x": jax.ShapeDtypeStruct((4,), "float32")}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, {"x": jnp.zeros(4)}, block=True)
    (tmp_path / "step_00000005" / "capibara.json").unlink()  # written last: the save did not come to it
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.warns(RuntimeWarning, match="the beginning of the run is restored instead"):
            assert checkpoints.restore_latest(target) is None
        checkpoints.save(5, {"x": jnp.ones(4)}, block=True)
        assert checkpoints.restore(target).state["x"].tolist() == [1, 1, 1, 1]
