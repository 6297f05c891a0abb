"""Device errors are recovered from, told in full when they cannot be, and never mistaken for the program's own."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from jax.sharding import NamedSharding, PartitionSpec
from tests.checkpoints.states import mesh_of

from capibara.errors import TPUError
from capibara.models import step_hooks
from capibara.models.config import ModularModelConfig
from capibara.models.modular import ModularCapibaraModel
from capibara.observe import Recorder, read_recording
from capibara.train import devices_left, recovery
from capibara.train.device_errors import TpuError, device_status
from capibara.train.recovery import TpuRecoveryManager, current_manager

T = TypeVar("T")
LOST = JaxRuntimeError("UNAVAILABLE: connection to TPU:3 was lost\nand more lines")


class Model:
    """Weights that grow by the batch; the state is donated to each step, as trainers do."""

    def __init__(self, sharding: Any = None) -> None:
        self.state = {"w": jax.device_put(jnp.zeros(8), sharding), "key": jax.random.key(1), "steps": jnp.int32(0)}
        self.failures: list[Exception] = []
        self._step = jax.jit(
            lambda state, batch: {**state, "w": state["w"] + batch}, donate_argnums=0
        )  # fmt: skip

    @property
    def steps_done(self) -> int:
        return int(self.state["steps"])

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state

    def run(self, step: Callable[[], T]) -> T:
        """As `ModularCapibaraModel.train_step` runs its own."""

        def counted() -> T:
            result = step()
            self.state["steps"] += 1
            step_hooks.report(self.steps_done, self.state)
            return result

        return step_hooks.guarded(self, counted)

    def _train_step(self, batch: float) -> dict[str, float]:
        old = self.state
        self.state = self._step(old, batch)
        if self.failures:
            failure = self.failures.pop(0)
            self.state = old  # as a step that raises leaves it: donated, and nothing in its place
            raise failure
        return {"loss": float(self.state["w"][0])}

    def train_step(self, batch: float) -> dict[str, float]:
        return self.run(lambda: self._train_step(batch))


def quick_manager(**options: Any) -> TpuRecoveryManager:
    return TpuRecoveryManager(backoff_seconds=0, **{"checkpoint_frequency": 2, **options})


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("UNAVAILABLE: TPU backend setup/compile error (Unavailable)", "UNAVAILABLE"),
        ("INTERNAL: Core halted unexpectedly", "INTERNAL"),
        ("ABORTED: the slice was preempted", "ABORTED"),
        ("DATA_LOSS: uncorrectable ECC error", "DATA_LOSS"),
        ("DEADLINE_EXCEEDED: collective timed out", "DEADLINE_EXCEEDED"),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.", None),
        ("INVALID_ARGUMENT: shapes differ", None),
        ("INTERNAL: CpuCallback error calling callback: Traceback", None),
        ("INTERNAL: Mosaic failed to compile TPU kernel: bad layout", None),
        ("no status at all", None),
    ],
)
def test_what_is_a_devices_error(text: str, status: str | None) -> None:
    assert device_status(JaxRuntimeError(text)) == status
    assert device_status(ValueError(text)) == status  # of a jitted function that has run before
    assert device_status(RuntimeError(text)) is None


@pytest.mark.quick
def test_errors_of_the_program_as_jax_really_raises_them() -> None:
    def raises(_: Any) -> Any:
        raise RuntimeError("the callback's own")

    def callback(x: Any) -> Any:
        return jax.pure_callback(raises, jax.ShapeDtypeStruct((3,), jnp.float32), x)

    manager = quick_manager()
    with pytest.raises(JaxRuntimeError, match="the callback's own"):
        manager.run(jax.jit(callback), jnp.ones(3))
    with pytest.raises(JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        manager.run(lambda: jnp.ones((1 << 45,)))
    with pytest.raises(ZeroDivisionError), manager.recovery_context():
        1 / 0  # noqa: B018
    assert not manager.errors


@pytest.mark.quick
def test_a_step_is_done_again_and_a_donated_state_comes_from_the_copy(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        back: list[int] = []
        manager = quick_manager(on_restore=back.append, recorder=recorder)
        model = Model()
        with manager.recovery_context():
            assert current_manager() is manager
            losses = [model.train_step(1.0)["loss"] for _ in range(3)]
            model.failures = [LOST]
            losses.append(model.train_step(10.0)["loss"])
        assert current_manager() is None
        # After step 3 the state was donated to the failing step: the copy is of step 2, and the batch is done on it.
        assert losses == [1, 2, 3, 12]
        assert (back, manager.steps) == ([2], 3)
        attempt = manager.errors[0]
        assert (attempt.status, attempt.device, attempt.step) == ("UNAVAILABLE", "TPU:3", 3)
        assert attempt.restored == "the copy of step 2 in host memory"
        assert attempt.text == "UNAVAILABLE: connection to TPU:3 was lost"
        np.testing.assert_array_equal(jax.random.key_data(model.state["key"]), jax.random.key_data(jax.random.key(1)))
    assert "the copy of step 2" in read_recording(recorder.file).story()


@pytest.mark.quick
def test_a_state_that_is_whole_is_used_as_it_is_unless_data_was_lost() -> None:
    model = Model()
    failing: list[Exception] = []

    def step(batch: float) -> float:
        if failing:
            raise failing.pop()
        model.state = {**model.state, "w": model.state["w"] + batch}
        return float(model.state["w"][0])

    manager = quick_manager(checkpoint_frequency=1000)
    with manager.recovery_context():
        for expected in (1, 2, 3):
            assert model.run(lambda: step(1.0)) == expected
        failing.append(LOST)
        assert model.run(lambda: step(1.0)) == 4
        assert manager.errors[-1].restored == "nothing, the state is whole"
        failing.append(JaxRuntimeError("DATA_LOSS: uncorrectable ECC error"))
        assert model.run(lambda: step(1.0)) == 1
        assert manager.errors[-1].restored == "the copy of step 0 in host memory"


@pytest.mark.quick
def test_a_functional_steps_donated_state_is_replaced() -> None:
    manager = quick_manager(checkpoint_frequency=1)
    grow = jax.jit(lambda state, batch: {"w": state["w"] + batch}, donate_argnums=0)
    failing = [LOST, LOST]

    def step(state: Any, batch: Any) -> Any:
        new = grow(state, batch)
        if failing:
            raise failing.pop()
        return new

    state = {"w": jnp.arange(4.0)}
    manager.step_done(state)
    state = manager.run(step, state, jnp.float32(1))
    np.testing.assert_array_equal(state["w"], [1, 2, 3, 4])
    assert len(manager.errors) == 2
    # Without a copy the story says what is missing.
    failing += [LOST]
    with pytest.raises(TpuError, match="Argument 0 of the step was donated"):
        quick_manager().run(step, {"w": jnp.arange(4.0)}, jnp.float32(1))


@pytest.mark.quick
def test_out_of_retries_the_error_tells_the_whole_story() -> None:
    model = Model()
    manager = quick_manager(max_retries=2)
    with manager.recovery_context():
        model.train_step(1.0)
        model.failures = [LOST, JaxRuntimeError("INTERNAL: core halted"), LOST, LOST]
        with pytest.raises(TpuError, match="failed 3 times in a row, and max_retries is 2") as failed:
            model.train_step(1.0)
        assert len(model.failures) == 1
        # The next step starts counting anew.
        assert model.train_step(5.0)["loss"] == 5
    error = failed.value
    assert isinstance(error, TPUError)
    assert isinstance(error.__cause__, JaxRuntimeError)
    assert [attempt.status for attempt in error.attempts] == ["UNAVAILABLE", "INTERNAL", "UNAVAILABLE"]
    assert (error.status, error.device) == ("UNAVAILABLE", "TPU:3")
    assert error.attempts[0].restored == "the copy of step 0 in host memory"
    assert "2. INTERNAL after step 0: INTERNAL: core halted" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.quick
def test_without_auto_recovery_nothing_is_retried_or_swallowed() -> None:
    model = Model()
    manager = quick_manager(auto_recovery=False)
    model.failures = [LOST]
    with manager.recovery_context(), pytest.raises(TpuError, match="auto_recovery is off"):
        model.train_step(1.0)
    with pytest.raises(TpuError, match="auto_recovery is off"), manager.recovery_context():
        raise LOST
    assert len(manager.errors) == 2


@pytest.mark.quick
def test_the_context_swallows_a_recorded_error_and_restores_the_state() -> None:
    model = Model()
    manager = quick_manager(max_retries=2)
    with manager.recovery_context():
        for _ in range(3):
            model.train_step(1.0)
        raise LOST
    assert float(model.state["w"][0]) == 2
    assert (manager.steps, len(manager.errors)) == (2, 1)
    with manager.recovery_context():
        model.train_step(1.0)
    assert float(model.state["w"][0]) == 3

    def fails_for_ever() -> None:
        while True:
            with manager.recovery_context():
                raise LOST

    with pytest.raises(TpuError, match="3 times in a row"):
        fails_for_ever()


@pytest.mark.quick
def test_steps_count_towards_the_frequency_and_go_to_checkpoints(tmp_path: Path) -> None:
    model = Model()
    manager = quick_manager(checkpoint_frequency=3, checkpoints=tmp_path)
    assert manager.checkpoints is not None
    with manager.recovery_context(), manager.checkpoints:
        for _ in range(7):
            model.train_step(1.0)
        assert manager.checkpoints.steps() == [0, 3, 6]
        model.failures = [LOST]
        assert model.train_step(1.0)["loss"] == 7
        assert manager.errors[-1].restored == f"the checkpoint of step 6, {tmp_path / 'step_00000006'}"
        assert manager.steps == 7
        # With every checkpoint damaged there is nothing to go on from, and the error says so.
        for folder in tmp_path.iterdir():
            (folder / "_METADATA").unlink()
        model.failures = [LOST]
        with pytest.raises(TpuError, match="The state is lost, and none was kept"):
            model.train_step(1.0)


def test_a_model_as_the_documents_write_it() -> None:
    """`model.train_step(batch)` inside of the context: a failed step changes nothing of what the model learns."""
    config = ModularModelConfig.from_toml("dev", hidden=32, layers=1, vocab=64)
    batch = np.arange(2 * 17, dtype=np.int32).reshape(2, 17) % 64
    plain, model = ModularCapibaraModel(config), ModularCapibaraModel(config)
    expected = [plain.train_step(batch)["loss"] for _ in range(4)]
    fails = [False, True, False, True]
    really = model._train_step

    def train_step(given: Any) -> dict[str, float]:
        result = really(given) if not fails.pop(0) else None
        if result is None:
            raise LOST
        return result

    model._train_step = train_step  # type: ignore[method-assign]
    losses = []
    manager = quick_manager()
    with manager.recovery_context():
        for _ in range(4):
            fails += [False]
            losses.append(model.train_step(batch)["loss"])
    assert losses == expected
    assert (manager.steps, model.steps_done, len(manager.errors)) == (4, 4, 2)
    # A step that took the state with it goes back to the last one kept, of step 4 here.
    fails[:] = [False, True]

    def takes_the_state(given: Any) -> dict[str, float]:
        result = really(given)
        if fails.pop():
            for leaf in jax.tree.leaves(model.get_state()):
                leaf.delete()
            raise LOST
        return result

    model._train_step = takes_the_state  # type: ignore[method-assign]
    with manager.recovery_context():
        assert model.train_step(batch)["loss"] == plain.train_step(batch)["loss"]
    assert manager.errors[-1].restored == "the copy of step 4 in host memory"
    # One that reports that it is done and fails then, each time, is given up too.
    fails[:] = [True] * 9
    with manager.recovery_context(), pytest.raises(TpuError, match="4 times in a row"):
        model.train_step(batch)


@pytest.mark.quick
def test_what_is_left_of_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight devices one is gone: a mesh of the same axes on four of the others."""
    gone = jax.devices()[2]
    ask = devices_left.answering
    monkeypatch.setattr(
        devices_left, "answering", lambda devices, timeout: ask([d for d in devices if d is not gone], timeout)
    )
    changed: list[int] = []
    model = Model(NamedSharding(mesh_of(8), PartitionSpec(("data", "model"))))
    manager = quick_manager(on_devices_changed=lambda devices: changed.append(len(devices)))
    with manager.recovery_context():
        model.train_step(1.0)
        model.failures = [LOST]
        assert model.train_step(1.0)["loss"] == 1
        assert model.train_step(1.0)["loss"] == 2
    w = model.state["w"]
    assert changed == [7]
    assert len(w.sharding.device_set) == 4
    assert gone not in w.sharding.device_set
    assert w.sharding.spec == PartitionSpec(("data", "model"))
    assert manager.errors[0].device == "TPU:3"  # as the error has it


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "platform"),
    [
        ({"fallback_to_gpu": True, "fallback_to_cpu": True}, "gpu"),
        ({"fallback_to_gpu": False, "fallback_to_cpu": True}, "cpu"),
        ({"fallback_to_gpu": False, "fallback_to_cpu": False}, None),
    ],
)
def test_fallback(options: dict[str, bool], platform: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first device stands for a TPU that is gone, the ninth for a GPU, the tenth for a CPU."""
    tpu, gpu, cpu = jax.devices()[0], jax.devices()[8], jax.devices()[9]

    class Gone:
        platform, id = "tpu", 0

    places = {"gpu": [gpu], "cpu": [cpu]}
    monkeypatch.setattr(devices_left, "platform_devices", places.__getitem__)
    ask = devices_left.answering
    monkeypatch.setattr(
        devices_left, "answering", lambda devices, timeout: [] if isinstance(devices[0], Gone) else ask(devices)
    )
    monkeypatch.setattr(recovery, "_devices_of", lambda _: [Gone()])
    model = Model(tpu)
    manager = quick_manager(**options)
    with manager.recovery_context():
        model.train_step(1.0)
        model.failures = [LOST]
        if platform is None:
            with pytest.raises(TpuError, match=r"No device answers, and there is no fallback \(none allowed\)"):
                model.train_step(1.0)
        else:
            assert model.train_step(1.0)["loss"] == 1
            assert model.state["w"].devices() == {places[platform][0]}


@pytest.mark.quick
def test_a_device_that_does_not_answer_in_time_is_lost() -> None:
    class Hangs:
        """Waits for ever when something is put on it."""

    left = devices_left.answering([*jax.devices()[:2]], timeout=30)
    assert left == jax.devices()[:2]
    put = jax.device_put
    import threading

    never = threading.Event()

    def device_put(value: Any, device: Any) -> Any:
        if isinstance(device, Hangs):
            never.wait(20)
            raise JaxRuntimeError("UNAVAILABLE: too late")
        return put(value, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_put", device_put)
        assert devices_left.answering([Hangs(), jax.devices()[0]], timeout=2.0) == [jax.devices()[0]]
    never.set()


@pytest.mark.quick
def test_with_several_processes_there_is_no_retry_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "process_count", lambda: 4)

    def fails() -> None:
        raise LOST

    with pytest.raises(TpuError, match="one of 4 processes"):
        quick_manager().run(fails)


@pytest.mark.quick
def test_each_task_has_its_own_manager() -> None:
    async def inside(manager: TpuRecoveryManager) -> bool:
        with manager.recovery_context():
            await asyncio.sleep(0.01)
            return current_manager() is manager

    async def both() -> list[bool]:
        return await asyncio.gather(inside(quick_manager()), inside(quick_manager()))

    assert asyncio.run(both()) == [True, True]


@pytest.mark.quick
def test_bad_input() -> None:
    for wrong in ({"checkpoint_frequency": 0}, {"checkpoint_frequency": 2.5}, {"max_retries": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            TpuRecoveryManager(**wrong)
    with pytest.raises(ValueError, match="backoff_seconds"):
        TpuRecoveryManager(backoff_seconds=-1)
    with pytest.raises(ValueError, match="pass the state, or attach"):
        quick_manager(checkpoint_frequency=1).step_done()
