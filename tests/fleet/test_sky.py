"""A SkyPilot task: its schema, what it says of a slice, and its shell lines run for real."""

from __future__ import annotations

import pytest
from tests.fleet.documents import SHOW, TRAIN, read_back, run_shell
from tests.fleet.schemas import SKY

from capibara.fleet import sky_task


@pytest.mark.quick
@pytest.mark.parametrize(
    ("on", "accelerators", "hosts"),
    [("v4-64", "tpu-v4-64", 8), ("v4-8", "tpu-v4-8", 1), ("v5e-16", "tpu-v5litepod-16", 4), ("v6e-8", "tpu-v6e-8", 1)],
)
def test_a_task_for_a_slice(on: str, accelerators: str, hosts: int) -> None:
    task = read_back(sky_task(TRAIN, on), SKY)
    # One node of SkyPilot's: it runs the task on all hosts of it.
    assert task["num_nodes"] == 1
    assert task["resources"]["accelerators"] == accelerators
    assert task["resources"]["infra"] == "gcp"
    assert f'"$SKYPILOT_NUM_NODES" -ne {hosts} ' in task["run"]
    assert task["run"].endswith("exec capibara train llama-7b --set 'data.path=a b' --resume\n")
    assert task["setup"] == "pip install '.[train,tpu]'\n"


@pytest.mark.quick
def test_a_task_for_gpus_and_its_options() -> None:
    task = read_back(
        sky_task(
            SHOW, "H100:8", name="mine", processes=4, max_restarts=7, spot=True, setup="true", environment={"A": "1"}
        ),
        SKY,
    )
    assert (task["name"], task["num_nodes"], task["setup"], task["envs"]) == ("mine", 4, "true\n", {"A": "1"})
    assert task["resources"] == {
        "accelerators": "H100:8",
        "use_spot": True,
        "job_recovery": {"max_restarts_on_errors": 7, "recover_on_exit_codes": [42]},
    }
    assert sky_task(TRAIN, "H100:8")["setup"] == "pip install '.[train,cuda]'\n"
    hosts = {"SKYPILOT_NODE_RANK": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4"}
    ran = run_shell("bash", task["run"], SKYPILOT_NUM_NODES="4", **hosts)
    assert ran.stdout == f"2|4|10.0.0.1:8476|{SHOW[-1]}\n", ran.stderr
    alone = run_shell("bash", task["run"], SKYPILOT_NUM_NODES="1", **hosts)
    assert alone.returncode == 2
    assert "is for 4 hosts" in alone.stderr


@pytest.mark.quick
def test_a_bucket_is_a_folder_of_every_host() -> None:
    for bucket in ("gs://my-runs/", "s3://my-runs"):
        task = read_back(sky_task(TRAIN, "v4-64", bucket=bucket), SKY)
        assert task["file_mounts"] == {"/bucket": {"source": bucket.rstrip("/"), "mode": "MOUNT"}}
    for bucket in ("my-runs", "gs://my-runs/folder", "gs://", "az://my-runs"):
        with pytest.raises(ValueError, match=r"A bucket is gs://NAME or s3://NAME\."):
            sky_task(TRAIN, "v4-64", bucket=bucket)


@pytest.mark.quick
def test_bad_input() -> None:
    with pytest.raises(ValueError, match="Unknown TPU slice 'w4-64'"):
        sky_task(TRAIN, "w4-64")
    with pytest.raises(ValueError, match=r"use v4-32 .* or v4-64"):
        sky_task(TRAIN, "v4-48")
    with pytest.raises(ValueError, match=r"hosts of 4 chips: 8 hosts .*--processes 8"):
        sky_task(TRAIN, "v4-64", processes=32)
    with pytest.raises(ValueError, match="a GPU at least"):
        sky_task(TRAIN, "H100:0")
    with pytest.raises(ValueError, match="by the size in their name"):
        sky_task(TRAIN, "v4:4x4x16")
    with pytest.raises(ValueError, match="--engine jobset"):
        sky_task(TRAIN, "tpu7x-32")
