"""A document as its reader has it, and the shell lines of one run for real."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jsonschema
import yaml

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
