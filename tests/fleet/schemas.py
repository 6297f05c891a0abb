"""The parts of two public schemas that our files use; a key that is not here is a mistake of ours.

SkyPilot: docs.skypilot.co, "SkyPilot YAML". JobSet: jobset.sigs.k8s.io, v1alpha2, with the Job and the Pod of
kubernetes.io inside.
"""

from __future__ import annotations

from typing import Any

TEXT = {"type": "string"}
NAME = {"type": "string", "pattern": "^[a-z]([a-z0-9-]*[a-z0-9])?$"}
COUNT = {"type": "integer", "minimum": 0}
VARIABLE = "^[a-zA-Z_][a-zA-Z0-9_]*$"


def table(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def rows(of: dict[str, Any], least: int = 1) -> dict[str, Any]:
    return {"type": "array", "items": of, "minItems": least}


SKY = table(
    {
        "num_nodes": {"type": "integer", "minimum": 1},
        "resources": table(
            {"accelerators": {"type": "string", "pattern": r"^(tpu-v[\w]+-\d+|[A-Za-z][\w.-]*:\d+)$"}},
            infra={"type": "string", "pattern": "^[a-z]+(/[^/]+){0,2}$"},
            use_spot={"type": "boolean"},
            job_recovery=table(
                {},
                strategy=TEXT,
                max_restarts_on_errors=COUNT,
                recover_on_exit_codes=rows({"type": "integer", "minimum": 0, "maximum": 255}, 0),
            ),
        ),
    },
    name=TEXT,
    workdir=TEXT,
    file_mounts={
        "type": "object",
        "additionalProperties": table(
            {
                "source": {"type": "string", "pattern": "^(gs|s3)://"},
                "mode": {"enum": ["MOUNT", "COPY", "MOUNT_CACHED"]},
            }
        ),
    },
    envs={"type": "object", "patternProperties": {VARIABLE: TEXT}, "additionalProperties": False},
    setup=TEXT,
    run=TEXT,
)

_ENV = {
    "oneOf": [
        table({"name": TEXT, "value": TEXT}),
        table({"name": TEXT, "valueFrom": table({"fieldRef": table({"fieldPath": TEXT})})}),
    ]
}
_CONTAINER = table(
    {"name": NAME, "image": TEXT},
    command=rows(TEXT),
    env=rows(_ENV),
    ports=rows(table({"containerPort": {"type": "integer", "minimum": 1, "maximum": 65535}})),
    volumeMounts=rows(table({"name": NAME, "mountPath": {"type": "string", "pattern": "^/"}})),
    resources=table({"limits": table({"google.com/tpu": {"type": "integer", "minimum": 1}})}),
)
_POD = table(
    {"containers": rows(_CONTAINER)},
    restartPolicy={"enum": ["Never"]},  # with a pod failure policy
    terminationGracePeriodSeconds=COUNT,
    nodeSelector={"type": "object", "additionalProperties": TEXT},
    volumes=rows(
        table(
            {
                "name": NAME,
                "csi": table(
                    {"driver": {"const": "gcsfuse.csi.storage.gke.io"}},
                    volumeAttributes=table({"bucketName": TEXT}, mountOptions=TEXT),
                ),
            }
        )
    ),
)
_POD_RULE = {
    "oneOf": [
        table(
            {
                "action": {"enum": ["FailJob", "FailIndex", "Ignore", "Count"]},
                "onExitCodes": table(
                    {
                        "operator": {"enum": ["In", "NotIn"]},
                        "values": {**rows({"type": "integer", "minimum": 1, "maximum": 255}), "uniqueItems": True},
                    },
                    containerName=NAME,
                ),
            }
        ),
        table(
            {
                "action": {"enum": ["FailJob", "FailIndex", "Ignore", "Count"]},
                "onPodConditions": rows(table({"type": TEXT, "status": {"enum": ["True", "False", "Unknown"]}})),
            }
        ),
    ]
}
_JOB = table(
    {
        "template": table(
            {"spec": _POD}, metadata=table({"annotations": {"type": "object", "additionalProperties": TEXT}})
        )
    },
    completionMode={"enum": ["Indexed"]},  # JobSet's own default, and what gives JOB_COMPLETION_INDEX
    completions={"type": "integer", "minimum": 1},
    parallelism={"type": "integer", "minimum": 1},
    backoffLimit=COUNT,
    podFailurePolicy=table({"rules": rows(_POD_RULE)}),
)
_SET_RULE = table(
    {
        "name": {"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
        "action": {"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
    },
    onJobFailureReasons=rows(
        {"enum": ["BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "PodFailurePolicy"]}
    ),
    onJobFailureMessagePatterns=rows(TEXT),
    targetReplicatedJobs=rows(NAME),
)
JOBSET = table(
    {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "kind": {"const": "JobSet"},
        "metadata": table({"name": NAME}, annotations={"type": "object", "additionalProperties": TEXT}),
        "spec": table(
            {
                "replicatedJobs": rows(
                    table({"name": NAME, "template": table({"spec": _JOB})}, replicas={"type": "integer", "minimum": 1})
                )
            },
            network=table(
                {}, enableDNSHostnames={"type": "boolean"}, subdomain=NAME, publishNotReadyAddresses={"type": "boolean"}
            ),
            failurePolicy=table(
                {},
                maxRestarts=COUNT,
                restartStrategy={"enum": ["Recreate", "BlockingRecreate", "InPlaceRestart"]},
                rules=rows(_SET_RULE),
            ),
        ),
    }
)
