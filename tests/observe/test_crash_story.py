"""What happened to a run is told from its recordings: the last step, who was where, who was missing."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from capibara.observe import Recorder, read_crash_story
from capibara.observe.crash_story import keep_crash


def _program(folder: Path, places: list[tuple[int, list[str]]], ended: tuple[int, ...] = ()) -> list[Recorder]:
    recorders = []
    for process, (steps, phases) in enumerate(places):
        recorder = Recorder(folder, process, len(places))
        for step in range(1, steps + 1):
            recorder.phase("step")
            recorder.step(step, seconds=0.1, loss=2.0)
        for phase in phases:
            recorder.phase(phase)
        if process in ended:
            recorder.close()
        recorders.append(recorder)
    return recorders


@pytest.mark.quick
def test_the_one_that_was_behind_is_named(tmp_path: Path) -> None:
    recorders = _program(tmp_path / "recordings", [(12, ["step"]), (12, ["step"]), (11, ["data_wait"])])
    recorders[0].dump_stacks("process 0 made no progress for 30.0 s")
    recorders[0].alert("a device failed: core 3")
    story = read_crash_story(tmp_path)
    assert story.last_step == 12
    assert story.count == 3
    [missing] = story.missing
    assert missing.startswith("process 2 (pid ")
    assert missing.endswith("after step 11 in 'data_wait' was behind the others")
    first = story.processes[0]
    assert first.reason == "process 0 made no progress for 30.0 s"
    assert first.alerts == ("a device failed: core 3",)
    assert "dump_stacks" not in first.stack[0]
    assert any("test_crash_story.py" in frame for frame in first.stack), "where its main thread was"
    text = str(story)
    assert "the last finished step is 12" in text
    assert "its stacks were written down: process 0 made no progress for 30.0 s" in text
    assert "missing: process 2" in text
    assert not story.ended_in_order


@pytest.mark.quick
def test_further_inside_of_one_step(tmp_path: Path) -> None:
    """At the same step, whoever entered fewer phases is behind."""
    _program(tmp_path, [(3, ["step", "checkpoint"]), (3, ["step"])])
    [missing] = read_crash_story(tmp_path).missing
    assert missing.startswith("process 1 ")
    assert "after step 3 in 'step'" in missing


@pytest.mark.quick
def test_one_without_a_recording_and_one_that_ended_before_the_others(tmp_path: Path) -> None:
    _program(tmp_path, [(2, ["step"]), (2, []), (2, ["step"])], ended=(1,))
    (tmp_path / "process_2.recording").unlink()
    absent, early = read_crash_story(tmp_path / "process_0.recording").missing
    assert absent == "process 2 left no recording here"
    assert "had ended in order while others went on" in early


@pytest.mark.quick
def test_all_at_one_place_blames_the_network_and_all_ended_blames_nobody(tmp_path: Path) -> None:
    recorders = _program(tmp_path, [(5, ["step"]), (5, ["step"])])
    story = read_crash_story(tmp_path)
    assert story.missing == ()
    assert "the devices or the network between them hung" in str(story)
    for recorder in recorders:
        recorder.close()
    story = read_crash_story(tmp_path)
    assert story.ended_in_order
    assert str(story).endswith("all ended in order")


@pytest.mark.quick
def test_files_of_an_earlier_start_with_more_processes_are_not_waited_for(tmp_path: Path) -> None:
    _program(tmp_path, [(1, []), (1, []), (1, [])])
    _program(tmp_path, [(4, ["step"]), (4, ["step"])])
    story = read_crash_story(tmp_path)
    assert [one.process for one in story.processes] == [0, 1]
    assert story.processes[0].starts == 2
    assert story.missing == ()


@pytest.mark.quick
def test_the_stack_is_the_main_threads_also_from_another_thread(tmp_path: Path) -> None:
    """As the watchdog writes it, while the loop hangs."""
    [recorder] = _program(tmp_path, [(1, ["step"])])
    waiting, written, let_go = threading.Event(), threading.Event(), threading.Event()

    def watchdog() -> None:
        waiting.wait(60)
        recorder.dump_stacks("first\nreason")
        recorder.dump_stacks("no progress; Missing: process 1 is behind")
        written.set()
        let_go.wait(60)

    thread = threading.Thread(target=watchdog)
    thread.start()
    _wait_here(waiting, written)
    let_go.set()
    thread.join()
    [one] = read_crash_story(tmp_path).processes
    assert one.reason == "no progress; Missing: process 1 is behind"
    assert "watchdog" in one.all_stacks, "every thread's"
    assert any(frame.endswith("in _wait_here") for frame in one.stack), one.stack


@pytest.mark.quick
def test_stacks_of_an_earlier_start_are_not_told(tmp_path: Path) -> None:
    _program(tmp_path, [(1, ["step"])])
    (tmp_path / "process_0.stacks.txt").write_text(
        "== 2026-01-02 03:04:05 process 0, pid 1: it hung\n"
        "thread 'MainThread' (1):\n  File \"old.py\", line 3, in wait\n"
    )
    [one] = read_crash_story(tmp_path).processes
    assert (one.reason, one.stack, one.stacks_file) == (None, (), None)


def _wait_here(waiting: threading.Event, written: threading.Event) -> None:
    waiting.set()
    assert written.wait(60)


@pytest.mark.quick
def test_what_pythons_own_timeout_wrote(tmp_path: Path) -> None:
    _program(tmp_path, [(1, ["step"])])
    (tmp_path / "process_0.stacks.txt").write_text(
        'Timeout (0:00:10)!\nThread 0x00007f01 (most recent call first):\n  File "inner.py", line 3 in wait\n'
        '  File "outer.py", line 9 in loop\n'
    )
    [one] = read_crash_story(tmp_path).processes
    assert one.reason == "Python's own timeout"
    assert one.stack == ("outer.py:9 in loop", "inner.py:3 in wait")


@pytest.mark.quick
def test_what_is_no_recording(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"process_0\.recording"):
        read_crash_story(tmp_path)
    with pytest.raises(ValueError, match=r"process_0\.recording"):
        read_crash_story(tmp_path / "gone")
    (tmp_path / "notes.txt").write_text("no recording" * 100)
    with pytest.raises(ValueError, match="A recording is a file that a Recorder wrote"):
        read_crash_story(tmp_path / "notes.txt")


def _hot_and_full(folder: Path) -> Recorder:
    recorder = Recorder(folder / "recordings")
    began = time.time()
    for number in range(1, 8):
        figures = {"memory_usage": 0.5 + number / 15, "temperature": 60.0 + 4 * number, "utilization": 0.9}
        told = {(source, name): value for source in ("gpu:0", "all") for name, value in figures.items()}
        recorder.sensors(told | {("host", "memory_usage"): 0.99}, began + number)
        recorder.step(number, seconds=0.25, loss=2.0 / number)
    return recorder


@pytest.mark.quick
def test_sensors_lie_beside_the_steps(tmp_path: Path) -> None:
    _hot_and_full(tmp_path)
    [one] = read_crash_story(tmp_path).processes
    assert [step.step for step in one.steps] == list(range(1, 8))
    assert one.sensors["gpu:0"]["temperature"] == pytest.approx([64, 68, 72, 76, 80, 84, 88])
    assert one.sensors_at(one.sample_times[2] + 0.5)["temperature"] == pytest.approx(72)
    assert one.sensors_at(one.sample_times[0] - 1) == {}
    assert [text.partition(";")[0] for text in one.likely] == [
        "gpu:0's memory was 97% full",
        "gpu:0 was at 88 degrees",
        "host's memory was 99% full",
    ]
    text = str(read_crash_story(tmp_path))
    assert "sensors over its last 6 s, 7 samples" in text
    assert "gpu:0: utilization 0.9 (0.9 to 0.9), memory_usage 0.967 (0.567 to 0.967), temperature 88 (64 to 88)" in text
    assert "0.25 s, loss 0.285714" in text


@pytest.mark.quick
def test_sensors_of_an_earlier_start_are_not_told(tmp_path: Path) -> None:
    _hot_and_full(tmp_path)
    data = (tmp_path / "recordings" / "process_0.recording").read_bytes()
    later = Recorder(tmp_path / "recordings")
    assert len(later.file.read_bytes()) == len(data)
    later.sensors({("host", "memory_usage"): 0.25}, time.time() + 100)
    [one] = read_crash_story(tmp_path).processes
    assert one.steps == ()
    assert one.sensors["host"]["memory_usage"][-1] == 0.25
    assert one.likely == ()


@pytest.mark.quick
def test_one_file_tells_it_again(tmp_path: Path) -> None:
    recorder = _hot_and_full(tmp_path)
    recorder.dump_stacks("no progress for 3 s")
    (tmp_path / "autopsy.json").write_text('{"error": "RESOURCE_EXHAUSTED: 4096 bytes", "nearest_change": "batch 2"}')
    story = read_crash_story(tmp_path)
    assert "out of memory: RESOURCE_EXHAUSTED: 4096 bytes" in str(story)
    assert "nearest change that fits: batch 2" in str(story)
    kept = keep_crash(tmp_path / "recordings")
    assert kept == tmp_path / "recordings" / "crash.json"
    moved = tmp_path / "elsewhere.json"
    kept.rename(moved)
    recorder.file.unlink()
    recorder.stacks_file.unlink()
    again = read_crash_story(moved)
    assert again == story
    assert str(again) == str(story)
    assert keep_crash(tmp_path / "recordings") is None, "nothing is there"
    for wrong in ("{}", "[1]", "no json"):
        moved.write_text(wrong)
        with pytest.raises(ValueError, match="A crash file is what capibara wrote"):
            read_crash_story(moved)


@pytest.mark.quick
def test_a_run_that_ended_in_order_leaves_no_crash_and_names_an_earlier_one(tmp_path: Path) -> None:
    _hot_and_full(tmp_path)
    kept = keep_crash(tmp_path / "recordings")
    with Recorder(tmp_path / "recordings") as recorder:
        recorder.step(8)
    assert keep_crash(tmp_path / "recordings") is None
    story = read_crash_story(tmp_path)
    assert story.ended_in_order
    assert f"an earlier crash of it is told by {kept}" in str(story)


@pytest.mark.quick
def test_a_start_that_came_to_no_step_leaves_the_story_of_the_one_that_did(tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    _hot_and_full(tmp_path)
    kept = keep_crash(folder)
    assert kept is not None
    told = kept.read_bytes()
    again = Recorder(folder)
    again.alert("ended by ValueError: no such data")
    again.close(in_order=False)
    assert keep_crash(folder) is None
    assert kept.read_bytes() == told
    assert read_crash_story(folder).processes[0].alerts == ("ended by ValueError: no such data",), "it lies there"
    kept.write_text("{}")
    assert keep_crash(folder) == kept, "one that cannot be read is no story"
    assert not read_crash_story(kept).has_steps
    later = Recorder(folder)
    later.step(9)
    assert keep_crash(folder) == kept
    assert read_crash_story(kept).last_step == 9


@pytest.mark.quick
def test_a_damaged_recording_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    _program(tmp_path, [(5, []), (5, []), (5, [])])
    (tmp_path / "process_1.recording").write_bytes(bytes(4096))
    story = read_crash_story(tmp_path)
    assert story.last_step == 5
    assert story.missing == ("process 1 left no recording here",)
    assert sorted(file.name for file in tmp_path.glob("*.draft")) == []
