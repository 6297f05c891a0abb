"""A JobSet: its schema, what it says of a slice, its shell lines run for real, and what it does with exit codes."""

from __future__ import annotations

import re

import pytest
from tests.fleet.documents import SHOW, TRAIN, read_back, run_shell
from tests.fleet.schemas import JOBSET

from capibara.fleet import jobset_manifest


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
    with pytest.raises(ValueError, match="Unknown TPU slice 'w4-64'"):
        jobset_manifest(TRAIN, "w4-64", image="image")
    with pytest.raises(ValueError, match=r"use v4-32 .* or v4-64"):
        jobset_manifest(TRAIN, "v4-48", image="image")
    with pytest.raises(ValueError, match=r"hosts of 4 chips: 16 hosts .*--processes 16"):
        jobset_manifest(TRAIN, "v4-64", image="image", slices=2, processes=8)
    with pytest.raises(ValueError, match="TPUs that GKE has"):
        jobset_manifest(TRAIN, "v2-32", image="image")
    with pytest.raises(ValueError, match="several hosts each"):
        jobset_manifest(TRAIN, "v4-8", image="image", slices=2)
    for name in ("My_run", "a" * 60, "-a", ""):
        with pytest.raises(ValueError, match="small letters"):
            jobset_manifest(TRAIN, "v4-64", image="image", name=name)
