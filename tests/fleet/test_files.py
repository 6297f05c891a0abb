"""The files for SkyPilot and for GKE: their schemas, what they say of a slice, and their shell lines run for real."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import jsonschema
import pytest
import yaml
from tests.fleet.schemas import JOBSET, SKY

from capibara.fleet import jobset_manifest, sky_task
from capibara.fleet.yaml_text import yaml_text

TRAIN = ["capibara", "train", "llama-7b", "--set", "data.path=a b"]
SHOW = [
    sys.executable, "-S", "-c",
    "import os, sys; print(*(os.environ['CAPIBARA_' + n] for n in ('PROCESS_ID', 'PROCESS_COUNT', 'COORDINATOR')),"
    " *sys.argv[1:], sep='|')", "$HOME $(A) $$ 'q'",
]  # fmt: skip


def read_back(data: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    document = yaml.safe_load(yaml_text(data))
    assert document == data
    jsonschema.validate(document, schema)
    return document


def run_shell(shell: str, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [shell, "-c", script],
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        check=False,
    )


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
@pytest.mark.parametrize(
    ("on", "accelerator", "topology", "hosts", "chips"),
    [
        ("v4-64", "tpu-v4-podslice", "2x4x4", 8, 4),
        ("v4-8", "tpu-v4-podslice", "2x2x1", 1, 4),
        ("v5e-8", "tpu-v5-lite-podslice", "2x4", 1, 8),
        ("v5e-16", "tpu-v5-lite-podslice", "4x4", 4, 4),
        ("v5p-32", "tpu-v5p-slice", "2x2x4", 4, 4),
        ("v6e-256", "tpu-v6e-slice", "16x16", 64, 4),
        ("v4:4x4x16", "tpu-v4-podslice", "4x4x16", 64, 4),
    ],
)
def test_a_job_set_for_a_slice(on: str, accelerator: str, topology: str, hosts: int, chips: int) -> None:
    manifest = read_back(jobset_manifest(TRAIN, on, image="registry/image:1"), JOBSET)
    (workers,) = manifest["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    assert (workers["replicas"], job["completions"], job["parallelism"], job["backoffLimit"]) == (1, hosts, hosts, 0)
    pod = job["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["google.com/tpu"] == chips
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert variables["CAPIBARA_PROCESS_COUNT"] == str(hosts)
    assert variables["CAPIBARA_COORDINATOR"] == "capibara-workers-0-0.capibara:8476"
    assert manifest["spec"]["network"]["subdomain"] == "capibara"


@pytest.mark.quick
def test_the_options_of_a_job_set_and_its_processes() -> None:
    manifest = read_back(
        jobset_manifest(
            SHOW, "v4-16", image="image", name="mine", slices=3, processes=6, max_restarts=9, grace_seconds=77,
            spot=True, environment={"A": "$(B)"},
        ),
        JOBSET,
    )  # fmt: skip
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 9
    (workers,) = manifest["spec"]["replicatedJobs"]
    assert workers["replicas"] == 3
    pod = workers["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 77
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    (container,) = pod["containers"]
    assert (container["image"], container["command"][:2]) == ("image", ["/bin/sh", "-c"])

    def expanded(text: str) -> str:
        """As Kubernetes has it: $$ is $, and $(NAME) of a variable that it knows its value; others stay."""
        known = {"A": "wrong", "B": "wrong"}
        return re.sub(
            r"\$(\$|\(([^)]*)\))", lambda found: "$" if found[1] == "$" else known.get(found[2], found[0]), text
        )

    variables = {entry["name"]: expanded(entry["value"]) for entry in container["env"] if "value" in entry}
    assert variables["A"] == "$(B)"
    seen = set()
    for job_index in range(3):
        for index in range(2):
            own = {"SLICE_INDEX": str(job_index), "JOB_COMPLETION_INDEX": str(index)}
            ran = run_shell("/bin/sh", expanded(container["command"][2]), **variables, **own)
            process, rest = ran.stdout.split("|", 1)
            assert rest == f"6|mine-workers-0-0.mine:8476|{SHOW[-1]}\n", ran.stderr
            seen.add(int(process))
    assert seen == set(range(6))


@pytest.mark.quick
def test_a_bucket_is_a_folder_of_every_host() -> None:
    task = read_back(sky_task(TRAIN, "v4-64", bucket="gs://my-runs/", name="mine"), SKY)
    assert task["file_mounts"] == {"/bucket": {"source": "gs://my-runs", "mode": "MOUNT"}}
    assert task["name"] == "mine"
    manifest = read_back(jobset_manifest(TRAIN, "v4-64", image="image", bucket="gs://my-runs"), JOBSET)
    template = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert template["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"}
    (volume,) = template["spec"]["volumes"]
    assert volume["csi"]["volumeAttributes"]["bucketName"] == "my-runs"
    assert template["spec"]["containers"][0]["volumeMounts"] == [{"name": volume["name"], "mountPath": "/bucket"}]
    for bucket in ("my-runs", "gs://my-runs/folder", "gs://", "s3://my-runs"):
        with pytest.raises(ValueError, match=r"A bucket is gs://NAME\."):
            jobset_manifest(TRAIN, "v4-64", image="image", bucket=bucket)


@pytest.mark.quick
def test_how_a_job_set_takes_the_exit_codes() -> None:
    """The message is the Job controller's; its pod failure policy has to end the job for JobSet to see a code."""
    spec = jobset_manifest(TRAIN, "v4-64", image="image")["spec"]
    by_code, by_condition = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]

    def action(message: str) -> str:
        for rule in spec["failurePolicy"]["rules"]:
            if any(re.search(pattern, message) for pattern in rule["onJobFailureMessagePatterns"]):
                return str(rule["action"])
        return "RestartJobSet"

    ended = "Container capibara for pod default/mine-workers-0-3-abcde failed with exit code {} matching FailJob rule"
    taken = {code: action(ended.format(code)) for code in by_code["onExitCodes"]["values"]}
    assert taken == {2: "FailJobSet", 3: "FailJobSet", 4: "FailJobSet", 42: "RestartJobSetAndIgnoreMaxRestarts"}
    assert action(ended.format(1)) == action(ended.format(43)) == "RestartJobSet"
    assert by_condition["onPodConditions"][0]["type"] == "DisruptionTarget"
    drained = "Pod default/mine-workers-0-3-abcde has condition DisruptionTarget matching FailJob rule at index 1"
    assert action(drained) == "RestartJobSetAndIgnoreMaxRestarts"


@pytest.mark.quick
def test_bad_input() -> None:
    for write in (sky_task, lambda *words, **options: jobset_manifest(*words, image="image", **options)):
        with pytest.raises(ValueError, match="Unknown TPU slice 'w4-64'"):
            write(TRAIN, "w4-64")
        with pytest.raises(ValueError, match=r"use v4-32 .* or v4-64"):
            write(TRAIN, "v4-48")
        with pytest.raises(ValueError, match=r"hosts of 4 chips: 8 hosts .*--processes 8"):
            write(TRAIN, "v4-64", processes=32)
    with pytest.raises(ValueError, match="a GPU at least"):
        sky_task(TRAIN, "H100:0")
    with pytest.raises(ValueError, match="by the size in their name"):
        sky_task(TRAIN, "v4:4x4x16")
    with pytest.raises(ValueError, match="--engine jobset"):
        sky_task(TRAIN, "tpu7x-32")
    with pytest.raises(ValueError, match="TPUs that GKE has"):
        jobset_manifest(TRAIN, "v2-32", image="image")
    with pytest.raises(ValueError, match="several hosts each"):
        jobset_manifest(TRAIN, "v4-8", image="image", slices=2)
    for name in ("My_run", "a" * 60, "-a", ""):
        with pytest.raises(ValueError, match="small letters"):
            jobset_manifest(TRAIN, "v4-64", image="image", name=name)
