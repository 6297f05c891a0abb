"""The flight recorder: what was written is there after kill -9; what is no recording is refused."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from capibara.observe import Recorder, read_recording
from capibara.observe.recorder import KINDS, RECORD


@pytest.mark.quick
def test_events_in_their_order_and_a_ring(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, process=3, processes=4, capacity=8)
    for step in range(20):
        recorder.step(step, seconds=step / 10, loss=2.0)
    recorder.alert("ä" * 300, step=19)
    recording = read_recording(recorder.file)
    assert (recording.process, recording.processes, recording.capacity) == (3, 4, 8)
    assert [event.step for event in recording.events] == [13, 14, 15, 16, 17, 18, 19, 19]
    assert recording.events[0].seconds == pytest.approx(1.3)
    assert recording.events[-1].text.startswith("ääää")
    assert recording.events[-1].text.endswith("ä...")
    assert recording.last_step == 19
    assert not recording.ended
    recorder.close()
    recorder.step(21)  # after its end nothing is written, and nothing fails: a thread may still be at it
    assert read_recording(recorder.file).ended
    with pytest.raises(ValueError, match="kind of event"):
        recorder.event("nothing")
    with pytest.raises(ValueError, match="at least 2 events"):
        Recorder(tmp_path / "other", capacity=1)


@pytest.mark.quick
def test_what_was_written_survives_kill_9_and_the_next_process_goes_on(tmp_path: Path) -> None:
    code = f"""
        import os, signal
        from capibara.observe import Recorder
        recorder = Recorder({str(tmp_path)!r})
        recorder.phase("all-reduce of gradients")
        for step in range(1, 101):
            recorder.step(step, seconds=0.5, loss=1 / step)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    for times in (1, 2):
        killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
        assert killed.returncode == -signal.SIGKILL
        recording = read_recording(tmp_path / "process_0.recording")
        assert sum(event.kind == "step" for event in recording.events) == 100 * times
        assert recording.last_step == 100
        story = recording.story(last=2)
        assert "it was cut off" in story
        assert "the last phase that it entered is 'all-reduce of gradients'" in story
        assert "step 100 0.5 s loss 0.01" in story
        assert ("it was started 2 times" in story) == (times == 2)


@pytest.mark.quick
def test_a_record_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for step in range(3):
        recorder.step(step)
    recorder.close()
    data = bytearray(recorder.file.read_bytes())
    data[RECORD * 3 + 20] ^= 1  # the header, the start, and then step 1
    recorder.file.write_bytes(data)
    assert [event.step for event in read_recording(recorder.file).events if event.kind == "step"] == [0, 2]


@pytest.mark.quick
def test_stacks_name_every_thread(tmp_path: Path) -> None:
    there, go = threading.Event(), threading.Event()

    def waits_for_a_neighbour() -> None:
        there.set()
        go.wait(60)

    thread = threading.Thread(target=waits_for_a_neighbour, name="exchange")
    thread.start()
    assert there.wait(60)
    with Recorder(tmp_path) as recorder:
        text = recorder.dump_stacks("no progress for 3 s").read_text(encoding="utf-8")
        go.set()
    thread.join()
    assert "no progress for 3 s" in text
    assert "thread 'MainThread'" in text
    assert "test_stacks_name_every_thread" in text
    assert "thread 'exchange'" in text
    assert "waits_for_a_neighbour" in text
    assert "stacks in process_0.stacks.txt" in read_recording(recorder.file).story()


@pytest.mark.quick
def test_what_is_no_recording(tmp_path: Path) -> None:
    (tmp_path / "process_0.recording").write_bytes(b"something else")
    with pytest.raises(ValueError, match="which is none"):
        read_recording(tmp_path / "process_0.recording")
    with Recorder(tmp_path) as recorder:
        recorder.step(1)
    assert read_recording(recorder.file).last_step == 1
    assert (tmp_path / "process_0.damaged").read_bytes() == b"something else"


@pytest.mark.quick
def test_an_error_is_told(tmp_path: Path) -> None:
    def fails() -> None:
        with Recorder(tmp_path):
            raise KeyError("weights")

    with pytest.raises(KeyError):
        fails()
    assert "ended by KeyError: 'weights'" in read_recording(tmp_path / "process_0.recording").story()


@pytest.mark.quick
def test_samples_in_a_ring_of_their_own(tmp_path: Path) -> None:
    """However many events there are, the sensors' last minutes stay; and the next process goes on with both."""
    recorder = Recorder(tmp_path, capacity=4, samples=3)
    for moment in range(5):
        recorder.sensors({("host", "utilization"): moment / 10, ("gpu:0", "power"): 300.0 + moment}, 100.0 + moment)
        for _ in range(10):
            recorder.phase("step")
    recorder.sensors({("host", "utilization"): 0.75}, 105.0)
    recorder.close()
    samples = read_recording(recorder.file).samples
    assert samples.times == (103.0, 104.0, 105.0)
    assert samples.series is not None
    assert samples.series["host", "utilization"] == pytest.approx((0.3, 0.4, 0.75))
    assert samples.series["gpu:0", "power"][:2] == (303.0, 304.0)
    assert math.isnan(samples.series["gpu:0", "power"][2])
    recorder.sensors({("host", "utilization"): 1.0}, 106.0)  # after its end nothing is written
    again = Recorder(tmp_path, capacity=100, samples=100)
    again.sensors({("gpu:1", "power"): 1.0, ("gpu:0", "power"): 2.0}, 107.0)
    recording = read_recording(again.file)
    assert (recording.capacity, recording.sample_capacity) == (4, 3)
    assert recording.samples.times == (104.0, 105.0, 107.0)
    since = recording.samples.since(106.0)
    assert (since.times, since.series) == ((107.0,), {("gpu:0", "power"): (2.0,), ("gpu:1", "power"): (1.0,)})
    with pytest.raises(ValueError, match="at least 1 sample"):
        Recorder(tmp_path / "other", samples=0)


@pytest.mark.quick
def test_a_recording_from_before_there_were_samples(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, capacity=4)
    recorder.step(7)
    recorder.close()
    recorder.file.write_bytes(recorder.file.read_bytes()[: RECORD * 5])
    old = read_recording(recorder.file)
    assert (old.last_step, old.samples.times, old.sample_capacity) == (7, (), None)
    with Recorder(tmp_path) as again:
        again.sensors({("host", "utilization"): 0.5}, 1.0)
        assert read_recording(again.file).samples.times == (1.0,)
    assert read_recording(again.file).last_step == 7


@pytest.mark.quick
def test_a_sample_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, capacity=2, samples=2)
    recorder.sensors({("host", "utilization"): 0.5}, 1.0)
    recorder.sensors({("host", "utilization"): 0.6}, 2.0)
    recorder.close()
    data = bytearray(recorder.file.read_bytes())
    data[-20] ^= 1  # in the last row
    recorder.file.write_bytes(data)
    assert read_recording(recorder.file).samples.times == (1.0,)


@pytest.mark.quick
def test_more_series_than_there_is_room_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, nothing_said_yet: None
) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.sensors({(f"gpu:{number}", "power"): float(number) for number in range(130)}, 1.0)
        samples = read_recording(recorder.file).samples
    assert samples.series is not None
    assert len(samples.series) == 128
    assert samples.series["gpu:127", "power"] == (127.0,)
    assert "power of gpu:129 is not recorded: a recording has 128 series" in caplog.text


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize("harm", ["cut in the names", "cut in the rows", "rows", "series", "capacity", "no capacity"])
def test_a_damaged_recording_is_read_and_gone_on_with(tmp_path: Path, harm: str) -> None:
    """A run that was killed is resumed whatever its recording is like, at once, and on as much disk as before."""
    recorder = Recorder(tmp_path, capacity=4, samples=3)
    recorder.step(7)
    recorder.sensors({("host", "utilization"): 0.5}, 1.0)
    recorder.close()
    whole = recorder.file.read_bytes()
    ring = RECORD * 5
    data = bytearray(whole)
    if harm.startswith("cut"):
        del data[ring + (100 if harm == "cut in the names" else 128 * 128 + 700) :]
    else:
        place = {"rows": ring + 8, "series": ring + 12}.get(harm, 8)
        data[place : place + 4] = bytes(4) if harm == "no capacity" else b"\xff\xff\xff\x7f"
    recorder.file.write_bytes(data)
    recording = read_recording(recorder.file)
    assert recording.last_step == (None if harm == "no capacity" else 7)
    with Recorder(tmp_path, capacity=4, samples=3) as again:
        again.sensors({("host", "power"): 2.0}, 2.0)
        recording = read_recording(again.file)
    assert recording.samples.times[-1] == 2.0
    assert recording.samples.since(2.0).series == {("host", "power"): (2.0,)}
    assert recording.events[-1].kind == "start"
    assert len(again.file.read_bytes()) == len(whole)
    assert (again.file.with_suffix(".damaged")).exists() == ("capacity" in harm)


@pytest.mark.quick
def test_an_event_of_a_later_version_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr("capibara.observe.recorder.KINDS", (*KINDS, "resize"))
        with Recorder(tmp_path) as recorder:
            recorder.event("resize")
    assert [event.kind for event in read_recording(recorder.file).events] == ["start", "end"]
