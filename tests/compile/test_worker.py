"""The worker by itself, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from capibara.compile import CompileReport
from capibara.compile.worker import job_name, run_job

MATMUL = "capibara.compile.selfcheck:xla_matmul"
TARGETS = """
import jax, jax.numpy as jnp, sys

def noisy():
    print("this must not reach the protocol")
    sys.stdout.write("nor this\\n")
    return (lambda x: x + 1), (jax.ShapeDtypeStruct((8,), jnp.float32),)

def not_a_pair():
    return 3

def raises():
    raise ValueError("no such case")

def sharded(mesh):
    from jax.sharding import NamedSharding, PartitionSpec
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return jnp.sum, (jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=sharding),)
"""


def run(*arguments, stdin="", path=None):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [*map(str, path or []), *sys.path])),
    }
    command = [sys.executable, "-m", "capibara.compile.worker", *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return [CompileReport.from_dict(json.loads(line)) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.quick
def test_one_job_on_the_command_line():
    job = {"target": "capibara.compile.selfcheck:stock_pallas_matmul", "kwargs": {"size": 512, "block": 256}}
    (report,), _ = run(json.dumps({**job, "slice": None}))
    assert report.ok, report.error
    assert report.name == "capibara.compile.selfcheck:stock_pallas_matmul(size=512, block=256)"
    assert report.evidence == "lowered only: no slice was named."
    assert report.custom_calls == ("tpu_custom_call",)


def test_many_jobs_on_standard_input(tmp_path):
    (tmp_path / "noisy_targets.py").write_text(TARGETS)
    jobs = [
        {"target": "noisy_targets:noisy", "name": "noise"},
        {"target": "noisy_targets:not_a_pair"},
        {"target": "noisy_targets:raises", "slice": "v4-32"},
        {"target": "noisy_targets:sharded", "mesh": {"data": 8}},
        {"target": MATMUL, "slice": "v4-32"},
    ]
    reports, stderr = run(stdin="\n\n".join(map(json.dumps, jobs)) + "\n", path=[tmp_path])
    assert [report.ok for report in reports] == [True, False, False, True, True]
    assert reports[0].name == "noise"
    assert "must return (fn, args)" in reports[1].error
    assert (reports[2].error_kind, reports[2].slice_name) == ("target", "v4-32")
    assert "no such case" in reports[2].error
    assert "this must not reach the protocol" in stderr


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"target": "capibara.no_such_module:f"}, "no_such_module"),
        ({"target": "capibara.compile.selfcheck:no_such_function"}, "no_such_function"),
        ({"target": "capibara.compile.selfcheck"}, "'module:function'"),
        ({}, "'module:function'"),
        ({"target": MATMUL, "kwargs": {"sides": 3}}, "sides"),
        ({"target": MATMUL, "slice": "v9-1"}, "v9-1"),
    ],
)
def test_a_target_that_cannot_be_built(job, words):
    report = run_job(job)
    assert (report.ok, report.error_kind) == (False, "target")
    assert words in report.error
    assert report.evidence.startswith("not lowered")


def test_names():
    assert job_name({"target": "m:f", "kwargs": {"a": 1}}) == "m:f(a=1)"
    assert job_name({"target": "m:f", "name": "case"}) == "case"


def test_static_vmem_is_passed_on():
    report = run_job({"target": MATMUL, "kwargs": {"size": 8}, "vmem_static_bytes": 77})
    assert (report.vmem_bytes, report.vmem_source) == (77, "caller")
