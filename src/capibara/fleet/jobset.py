"""A JobSet for GKE: the program on TPU slices, a job a slice and a pod a host, as a manifest for `kubectl apply`.

Fields by jobset.sigs.k8s.io (v1alpha2), kubernetes.io (jobs, pod failure policy) and cloud.google.com/kubernetes-engine
(TPU node pools). GKE gives each pod what libtpu asks for (TPU_WORKER_ID and its kin); ours are the three variables of
`capibara.processes`, and how often the set was restarted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from capibara.errors import rule_error
from capibara.fleet.bucket import MOUNT, check_bucket
from capibara.fleet.tpu_hosts import COORDINATOR_PORT, slice_of_hosts
from capibara.processes import COORDINATOR, PROCESS_COUNT, PROCESS_ID
from capibara.train.exit_codes import DONE, FINAL, PREEMPTED
from capibara.train.supervisor import RESTARTS

__all__ = ["jobset_manifest"]

# What GKE calls the chips of its TPU node pools, by our names.
_ACCELERATORS = {
    "tpu_v4": "tpu-v4-podslice",
    "tpu_v5e": "tpu-v5-lite-podslice",
    "tpu_v5p": "tpu-v5p-slice",
    "tpu_v6e": "tpu-v6e-slice",
    "tpu_7x": "tpu7x",
}
_WORKERS = "workers"
_CONTAINER = "capibara"
_LONGEST_HOST_NAME = 63
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_MISTAKES = sorted(FINAL - {DONE, PREEMPTED})  # codes of a mistake: another start gives the same


def jobset_manifest(
    command: Sequence[str],
    on: str,
    *,
    image: str,
    name: str = "capibara",
    slices: int = 1,
    processes: int | None = None,
    max_restarts: int = 3,
    grace_seconds: int = 300,
    spot: bool = False,
    bucket: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The manifest as data.

    Args:
      command: of each process, in words.
      on: the TPU slice: "v4-64".
      image: of the container, with what the command needs.
      slices: how many of them; more than one need several hosts each.
      processes: hosts of all slices together; it may be left out.
      max_restarts: of the whole set. Preemptions (exit code 42, a node that is drained) do not count, and exit codes
        that would come again (2, 3, 4) end it at once.
      grace_seconds: between SIGTERM and the end of a pod: time to save.
      spot: on spot nodes.
      bucket: "gs://name", which every pod has as /bucket, by the Cloud Storage FUSE driver of the cluster.
      environment: variables for every process.
    """
    wanted = slice_of_hosts(on, processes, slices)
    accelerator = _ACCELERATORS.get(wanted.chip.name)
    if accelerator is None:
        raise rule_error(
            f"A JobSet is for the TPUs that GKE has: {', '.join(_ACCELERATORS)}", str(wanted), "name a slice of those"
        )
    if slices > 1 and wanted.hosts == 1:
        raise rule_error("Several slices have several hosts each", f"{slices} x {wanted}", "name one larger slice")
    hosts = wanted.hosts
    longest = f"{name}-{_WORKERS}-{slices - 1}-{hosts - 1}"
    if not _NAME.fullmatch(name) or len(longest) > _LONGEST_HOST_NAME:
        raise rule_error(
            f"A name is of small letters, digits and dashes, and of {_LONGEST_HOST_NAME} at most with what is added",
            f"{name!r} ({longest})",
            "write --name my-run",
        )
    variables = {
        **(environment or {}),
        PROCESS_COUNT: str(hosts * slices),
        COORDINATOR: f"{name}-{_WORKERS}-0-0.{name}:{COORDINATOR_PORT}",
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_seconds,
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": accelerator,
            "cloud.google.com/gke-tpu-topology": "x".join(map(str, wanted.grid)),
            **({"cloud.google.com/gke-spot": "true"} if spot else {}),
        },
        "containers": [
            {
                "name": _CONTAINER,
                "image": image,
                "command": ["/bin/sh", "-c", _script(command, hosts)],
                "env": [
                    *({"name": key, "value": _unexpanded(value)} for key, value in variables.items()),
                    _annotation("SLICE_INDEX", "job-index"),
                    _annotation(RESTARTS, "restart-attempt"),
                ],
                "ports": [{"containerPort": COORDINATOR_PORT}],
                "resources": {"limits": {"google.com/tpu": wanted.chips // hosts}},
            }
        ],
    }
    template: dict[str, Any] = {"spec": pod}
    if bucket is not None:
        attributes = {"bucketName": check_bucket(bucket, ("gs",)), "mountOptions": "implicit-dirs"}
        driver = {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}
        pod["volumes"] = [{"name": "bucket", "csi": driver}]
        pod["containers"][0]["volumeMounts"] = [{"name": "bucket", "mountPath": MOUNT}]
        template = {"metadata": {"annotations": {"gke-gcsfuse/volumes": "true"}}, "spec": pod}
    codes = {"containerName": _CONTAINER, "operator": "In", "values": [*_MISTAKES, PREEMPTED]}
    job = {
        "completionMode": "Indexed",
        "completions": hosts,
        "parallelism": hosts,
        "backoffLimit": 0,  # a host cannot be replaced alone: the job fails, and the set is restarted
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": codes},
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": template,
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": name,
            # All pods of a job on one node pool, which is one slice, and no other job there.
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            # The headless service by which the coordinator has a name, also before its pod is ready.
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": max_restarts,
                # A process that is started again must not meet a coordinator that is about to end.
                "restartStrategy": "BlockingRecreate",
                "rules": [
                    _rule(
                        "preempted",
                        "RestartJobSetAndIgnoreMaxRestarts",
                        f"exit code {PREEMPTED} ",
                        "condition DisruptionTarget ",
                    ),
                    _rule("mistake", "FailJobSet", f"exit code ({'|'.join(map(str, _MISTAKES))}) "),
                ],
            },
            "replicatedJobs": [{"name": _WORKERS, "replicas": slices, "template": {"spec": job}}],
        },
    }


def _rule(name: str, action: str, *patterns: str) -> dict[str, Any]:
    """By the message of a job that its pod failure policy ended: "... failed with exit code 42 matching ..."."""
    return {
        "name": name,
        "action": action,
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": list(patterns),
    }


def _annotation(variable: str, key: str) -> dict[str, Any]:
    return {
        "name": variable,
        "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['jobset.sigs.k8s.io/{key}']"}},
    }


def _script(command: Sequence[str], hosts: int) -> str:
    return (
        f"export {PROCESS_ID}=$((SLICE_INDEX * {hosts} + JOB_COMPLETION_INDEX))\n"
        f"exec {_unexpanded(shlex.join(command))}\n"  # exec: SIGTERM goes to the command itself
    )


def _unexpanded(text: str) -> str:
    """Kubernetes puts variables in where a text has `$(NAME)`; a doubled dollar sign is one."""
    return text.replace("$", "$$")
