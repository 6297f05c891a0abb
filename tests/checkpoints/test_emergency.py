"""Emergency copies: newer than the checkpoint they win, damaged or of another layout they do not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from tests.checkpoints.states import assert_same, flip_bit, mesh_of, state_on, target_on

from capibara.checkpoints import Checkpoints
from capibara.checkpoints import emergency as copies
from capibara.checkpoints.emergency import EmergencyCopies

X = {"x": jax.ShapeDtypeStruct((512,), jnp.float32)}


def x(step: int) -> dict[str, jax.Array]:
    return {"x": jnp.arange(512.0) + step}


def both(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "run", emergency_folder=tmp_path / "local", emergency_every=1)


@pytest.mark.quick
def test_all_of_a_state_on_the_same_and_on_another_mesh(tmp_path: Path) -> None:
    """With one process its part is all there is, so that another mesh can have it too."""
    state = state_on(mesh_of(8))
    with both(tmp_path) as checkpoints:
        checkpoints.emergency_copy(3, state, {"position": 12})
        for count in (8, 4, 32):
            restored = checkpoints.restore(target_on(mesh_of(count), state))
            assert (restored.step, restored.extra, restored.emergency) == (3, {"position": 12}, True)
            assert_same(restored.state, state)


@pytest.mark.quick
def test_the_newer_one_is_restored(tmp_path: Path) -> None:
    with both(tmp_path) as checkpoints:
        checkpoints.emergency_copy(1, x(1))
        assert checkpoints.restore(X).step == 1
        checkpoints.save(2, x(2))
        restored = checkpoints.restore(X)
        assert (restored.step, restored.emergency) == (2, False)
        checkpoints.emergency_copy(3, x(3))
    with both(tmp_path) as checkpoints:
        restored = checkpoints.restore(X)
        assert (restored.step, restored.emergency) == (3, True)
        # Back to step 2 by name: what is saved then is newer than the copy of step 3, which did not happen.
        assert checkpoints.restore(X, step=2).emergency is False
        checkpoints.save(2, x(20))
        restored = checkpoints.restore(X)
        assert (restored.step, float(restored.state["x"][0])) == (2, 20)


@pytest.mark.quick
def test_two_generations_and_the_older_where_the_newer_is_damaged(tmp_path: Path) -> None:
    local = tmp_path / "local"
    with both(tmp_path) as checkpoints:
        checkpoints.save(1, x(1))
        for step in (2, 3, 4):
            checkpoints.emergency_copy(step, x(step))
        checkpoints.wait()
        names = [f"step_0000000{step}.process_0_of_1" for step in (3, 4)]
        assert sorted(os.listdir(local)) == names
        flip_bit(local / names[1], -3)
        assert checkpoints.restore(X).step == 3
        (local / names[0]).write_bytes((local / names[0]).read_bytes()[:40])
        restored = checkpoints.restore(X)
        assert (restored.step, restored.emergency) == (1, False)
        told = [alert.text for alert in checkpoints.alerts]
        assert any(names[1] in text and "x is cut or was changed" in text for text in told)
        assert any(names[0] in text and "header is cut or was changed" in text for text in told)


@pytest.mark.quick
def test_a_full_disk_is_an_alert_and_the_older_copy_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with both(tmp_path) as checkpoints:
        checkpoints.emergency_copy(1, x(1))
        checkpoints.wait()

        def full(*_: object) -> None:
            raise OSError(28, os.strerror(28))

        with monkeypatch.context() as patch:
            patch.setattr(copies.os, "replace", full)
            checkpoints.emergency_copy(2, x(2))
            alerts = checkpoints.wait()
        assert [alert.kind for alert in alerts] == ["emergency"]
        assert "step 2 could not be written" in alerts[0].text
        assert "No space left on device" in alerts[0].text
        assert os.listdir(tmp_path / "local") == ["step_00000001.process_0_of_1"]
        assert checkpoints.restore(X).step == 1


@pytest.mark.parametrize("between", [lambda c: c.latest(), lambda c: c.steps(), lambda c: c.restore(X), lambda c: None])
def test_the_alert_of_a_slow_copy_waits_for_who_asks(tmp_path: Path, between: Callable[[Checkpoints], object]) -> None:
    """Calls that wait for what is being written, and return no alerts, leave them to the next one that does."""
    with both(tmp_path) as checkpoints:
        checkpoints.save(1, x(1), block=True)
        (tmp_path / "local").write_text("a file, where the folder would be")
        assert checkpoints.emergency_copy(2, x(2)) == ()
        between(checkpoints)
        alerts = checkpoints.save(3, x(3), block=True)
        assert [alert.kind for alert in alerts] == ["emergency"]
        assert "step 2 could not be written" in alerts[0].text
        assert checkpoints.wait() == ()


def test_what_one_process_cannot_cover_it_does_not_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with half of the shards, as another mesh of several processes leaves it."""
    state = {"w": jax.device_put(jnp.ones((8, 8)), jax.sharding.NamedSharding(mesh_of(8), jax.P("data")))}
    whole = copies.host_shards
    monkeypatch.setattr(copies, "host_shards", lambda leaf: dict(list(whole(leaf).items())[:2]))
    with both(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.emergency_copy(2, state)
        target = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
        assert checkpoints.restore(target).step == 1
        assert "not all that this process needs of w" in checkpoints.alerts[-1].text


@pytest.mark.quick
def test_processes_take_the_newest_step_that_all_of_them_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process has steps 1 and 2, and finds its file of step 2 damaged."""
    answers = {"emergency/steps": [1, 2], "emergency/whole": False}
    with monkeypatch.context() as patch:
        patch.setattr(copies, "gather", lambda name, value, timeout: [value, answers[name]])
        local = EmergencyCopies(tmp_path)
        for step in (1, 2, 3):
            monkeypatch.setattr(copies, "GENERATIONS", 3)
            local.copy(step, x(step), {})
        wanted = {"x": copies.describe("x", X["x"])}

        def restored() -> int | None:
            copy = local.restore(X, wanted, (-1, -1))
            return copy.step if copy else None

        assert restored() is None
        answers["emergency/whole"] = True
        assert restored() == 2
        answers["emergency/steps"] = []
        assert restored() is None


@pytest.mark.quick
@pytest.mark.parametrize("emergency", [True, False])
def test_what_a_run_can_begin_anew_may_be_of_another_shape(tmp_path: Path, emergency: bool) -> None:
    """None stands in its place, whether its shape is another, it was not saved, or it is not asked for any more."""
    state = {"x": jnp.arange(4.0), "rest": {"a": jnp.ones((8, 2)), "b": jnp.ones(3)}, "gone": jnp.ones(2)}
    shape = jax.ShapeDtypeStruct
    target = {
        "x": shape((4,), jnp.float32),
        "rest": {"a": shape((4, 2), jnp.float32), "b": shape((3,), jnp.float32)},
        "new": shape((5,), jnp.float32),
    }
    with both(tmp_path) as checkpoints:
        (checkpoints.emergency_copy if emergency else checkpoints.save)(1, state)
        restored = checkpoints.restore(target, renewed=["rest", "new", "gone"])
        assert restored.emergency == emergency
        assert restored.state["x"].tolist() == [0, 1, 2, 3]
        assert restored.state["rest"]["a"] is None
        assert restored.state["rest"]["b"].tolist() == [1, 1, 1]
        assert restored.state["new"] is None
        with pytest.raises(ValueError, match="rest/a' is float32"):
            checkpoints.restore(target, renewed=["new", "gone", "res"])
