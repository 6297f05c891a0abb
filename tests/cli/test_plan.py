"""`capibara plan`: what it prints, and its exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capibara.cli.main import app
from capibara.plan.measured import measurements

runner = CliRunner()
ONE = ["--train", "--remat", "none", "--accumulate", "1"]  # one setting of the knobs: a short search

PROGRAM = """
import jax
import jax.numpy as jnp
from capibara.mesh import with_sharding_constraint

def loss(params, batch):
    def layer(x, w):
        y = with_sharding_constraint(jnp.tanh(x @ w["up"]), ("batch", "mlp"))
        return with_sharding_constraint(x + y @ w["down"], ("batch", None)), None
    x, _ = jax.lax.scan(layer, batch["x"], params)
    return jnp.mean((x - batch["y"]) ** 2)

def shapes(batch=512):
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    x = f32(batch, 256)
    return {"up": f32(4, 256, 1024), "down": f32(4, 1024, 256)}, {"x": x, "y": x}
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAPIBARA_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    return "program.py:loss"


@pytest.mark.quick
def test_a_loss_of_a_file_is_planned(target: str, tmp_path: Path) -> None:
    made = runner.invoke(app, ["plan", target, "--train", "--on", "v4-16", "--html", "plan.html", "--top", "2"])
    assert made.exit_code == 0, made.output
    for words in ("loss on v4-16 (8 chips, 2x2x2)", "analytic", "FITS:", "a step", "USD an hour", "Best layouts"):
        assert words.lower() in made.stdout.lower(), made.stdout
    assert (tmp_path / "plan.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_json_and_what_does_not_fit(target: str, tmp_path: Path) -> None:
    # What a program prints is not part of the document.
    (tmp_path / "program.py").write_text(f"{PROGRAM}\nprint('loaded')\n", encoding="utf-8")
    made = runner.invoke(app, ["plan", target, *ONE, "--on", "h200", "--memory-limit", "0.001", "--json"])
    assert made.exit_code == 3, made.output
    document = json.loads(made.stdout)
    assert document["fits"] is False
    assert (document["error"]["kind"], document["error"]["exit_code"]) == ("does_not_fit", 3)
    assert document["bytes_per_chip"] > 0.001 * 2**30
    assert document["limit_bytes"] == pytest.approx(0.001 * 2**30)
    assert document["largest_buffers"]
    assert document["bills"] == [], "what does not run has no price"


def test_a_time_limit_stops_it_and_progress_is_on_standard_error(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capibara.cli.plan._SILENCE", 1e-3)  # less than anything here takes
    made = runner.invoke(app, ["plan", target, "--train", "--on", "v4-32", "--time-limit", "1e-9", "--json"])
    assert made.exit_code == 0, made.output
    document = json.loads(made.stdout)  # nothing but the document
    assert document["search"] == {"complete": False, "layouts": 1, "time_limit_seconds": 1e-9}
    assert document["fits"]
    assert re.search(r"^capibara: \d+ s, reading the program$", made.stderr, re.MULTILINE), made.stderr
    whole = runner.invoke(app, ["plan", target, *ONE, "--on", "v4-8"])
    assert "STOPPED" not in whole.stdout
    assert re.search(r"^capibara: \d+ s, \d+ layouts looked at, best so far data", whole.stderr, re.MULTILINE)
    wrong = runner.invoke(app, ["plan", target, *ONE, "--time-limit", "0"])
    assert wrong.exit_code == 2
    assert "time_limit is a number of seconds above 0" in wrong.stderr


def test_what_only_the_compiler_can_tell_is_no_fit(target: str) -> None:
    """The limit inside of the least layout's range: exit code 3, as what does not fit, and a verdict of its own."""
    common = ["plan", target, *ONE, "--on", "v4-8", "--mesh", "data=4", "--target", "memory"]
    least = json.loads(runner.invoke(app, [*common, "--json"]).stdout)
    assert (least["verdict"], least["bytes_range"][0]) == ("fits", least["bytes_per_chip"])
    between = str(sum(least["bytes_range"]) / 2 / 2**30)
    made = runner.invoke(app, [*common, "--memory-limit", between, "--json"])
    assert made.exit_code == 3, made.output
    document = json.loads(made.stdout)
    assert (document["fits"], document["verdict"]) == (False, "may not fit")
    assert document["bytes_range"][0] < document["limit_bytes"] < document["bytes_range"][1]
    shown = runner.invoke(app, [*common, "--memory-limit", between])
    assert (shown.exit_code, "MAY NOT FIT: " in shown.stdout) == (3, True), shown.output


def test_an_axis_that_does_not_divide_is_named(target: str) -> None:
    made = runner.invoke(app, ["plan", target, "--train", "--on", "v4-8", "--batch", "2", "--mesh", "data=4"])
    assert made.exit_code == 2, made.output
    assert "data=4: 2 rows of the batch do not divide over 4 chips" in made.stderr
    assert "use data=" in made.stderr


def test_gpus_of_a_host(target: str) -> None:
    made = runner.invoke(app, ["plan", target, "--train", "--on", "h200x2", "--json"])
    assert made.exit_code == 0, made.output
    document = json.loads(made.stdout)
    assert (document["chip"], document["chips"], document["hosts"]) == ("h200", 2, 1)
    assert {use["link"] for one in document["layouts"] for use in one["estimate"]["links"]} <= {"NVLink"}


def test_a_fixed_mesh_prices_and_assumptions_are_used(target: str, tmp_path: Path) -> None:
    row = '[[price]]\nchip = "v4"\nregion = "lab"\non_demand = 1.0\nspot = 0.5\n'
    (tmp_path / "mine.toml").write_text(row, encoding="utf-8")
    common = ["plan", target, *ONE, "--on", "v4-8", "--mesh", "data=2,model=2", "--json", "--pricing", "mine.toml"]
    first, second = (
        json.loads(runner.invoke(app, [*common, *more]).stdout)
        for more in (
            ["--preemptions", "1", "--batch", "64"],
            ["--storage", "1", "--restart", "7", "--target", "memory"],
        )
    )
    for document in (first, second):
        assert {tuple(one["layout"]["mesh"].items()) for one in document["layouts"]} == {(("data", 2), ("model", 2))}
        assert document["bills"][0]["usd_per_hour"] == 4.0
        assert document["bills"][0]["price"]["region"] == "lab"
    assert first["bills"][1]["spot"]["mean_seconds_between"] == pytest.approx(3600.0)
    assumed = second["bills"][1]["spot"]["assumptions"]
    assert (assumed["storage_bytes_per_second"], assumed["restart_seconds"]) == (1e6, 7.0)
    assert first["examples"] * 8 == second["examples"], "the batch of 512 rows, and of 64"


def test_a_run_is_kept_and_calibrates_the_next_plan(target: str, tmp_path: Path) -> None:
    command = ["plan", target, *ONE, "--on", "v4-8", "--mesh", "data=4"]
    before = json.loads(runner.invoke(app, [*command, "--json"]).stdout)
    run = {"step_seconds": before["step_seconds"] * 1.5}
    (tmp_path / "run.json").write_text(json.dumps(run), encoding="utf-8")
    kept = runner.invoke(app, [*command, "--measured", "run.json"])
    assert kept.exit_code == 0, kept.output
    assert "-33.3 % off; kept" in kept.stdout
    shown = runner.invoke(app, ["plan", "--calibrate", "--on", "v4-8"])
    assert shown.exit_code == 0, shown.output
    assert "off by 33.3 % before" in shown.stdout
    assert runner.invoke(app, ["plan", "--calibrate", "--on", "h200"]).exit_code == 2, "no run was on that chip"
    after = json.loads(runner.invoke(app, [*command, "--json"]).stdout)
    stock = json.loads(runner.invoke(app, [*command, "--json", "--uncalibrated"]).stdout)
    # One run corrects most of the way.
    assert after["step_seconds"] == pytest.approx(run["step_seconds"], rel=0.2)
    assert after["step_seconds"] > 1.1 * before["step_seconds"]
    assert stock["step_seconds"] == before["step_seconds"]
    assert any("by 1 measured run on tpu_v4" in note and "as long as this step" in note for note in after["notes"])
    # The next run is kept beside what the uncorrected model says: a correction is never corrected again.
    runner.invoke(app, [*command, "--measured", "run.json"])
    assert [one.predicted_seconds for one in measurements()] == pytest.approx([before["step_seconds"]] * 2)


def test_a_layout_is_confirmed_by_xla(target: str) -> None:
    command = [
        "plan",
        target,
        *ONE,
        "--on",
        "v4-8",
        "--mesh",
        "data=2,model=2",
        "--top",
        "1",
        "--level",
        "xla",
        "--json",
    ]
    made = runner.invoke(app, command)
    assert made.exit_code == 0, made.output
    document = json.loads(made.stdout)
    assert document["level"] == "xla"
    compiled = document["layouts"][0]["compiled"]
    assert compiled["error"] is None
    # The compiler's arguments are the planned ones: the same bytes of the same arrays on every chip.
    assert compiled["arguments"] == pytest.approx(document["layouts"][0]["estimate"]["memory"]["arguments"], rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--on", "v4-33"], "use v4-32"),
        (["--mesh", "data=3,model=8"], "use data="),
        (["--level", "exact"], "'analytic', 'xla', 'tpu'"),
        (["--confirm", "2"], "add --level xla"),
        (["--region", "moon"], "us-central2"),
        (["--memory-limit", "64"], "at most the 32 GiB"),
        (["--shapes", "shaps"], "Did you mean 'shapes'"),
        (["--target", "speed"], "'throughput', 'latency', 'memory'"),
        (["--remat", "some"], "'none', 'dots', 'full'"),
        (["--measured", "gone.json"], "No such file"),
        (["--html", "no_such_folder/plan.html"], "make no_such_folder first"),
        (["--calibrate"], "train, target with it. Fix: leave them out"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(target: str, arguments: list[str], said: str) -> None:
    made = runner.invoke(app, ["plan", target, "--train", *arguments])
    assert made.exit_code == 2
    assert said in made.stderr
    assert made.stderr.count("\n") == 1


def test_targets_that_are_none() -> None:
    for arguments, said in (
        ([], "A plan is for a TARGET"),
        (["llama-8b"], "Did you mean 'llama-7b'"),
        (["llama-7b", "--train"], "leave it out"),
        (["gone.py:loss"], "which is not there"),
    ):
        made = runner.invoke(app, ["plan", *arguments])
        assert made.exit_code == 2
        assert said in made.stderr
