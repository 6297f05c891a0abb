"""Two processes of one program: each loads the part of its own devices, and they write one folder together."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.models.weights import hf_models

from capibara.models.weights.folder import tensor_entries

PROGRAM = """
import os, sys
process, port, folder, to = int(sys.argv[1]), *sys.argv[2:]
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
from jax.sharding import Mesh
from capibara.models.weights import load_hf, save_hf
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("model", "expert"))
model, params = load_hf(folder, mesh=mesh)
up = params["layers"][0]["moe"]["up"]
assert not up.is_fully_addressable and len(up.addressable_shards) == 2
try:
    save_hf(to, model, params)
except Exception as error:
    print("failed:", type(error).__name__, error)
else:
    print("there:", sorted(os.listdir(to)))
"""


def _run(folder: Path, to: Path) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-c", PROGRAM]
    running = [
        subprocess.Popen(
            [*words, str(process), str(port), str(folder), str(to)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for process in range(2)
    ]  # fmt: skip
    said = []
    for one in running:
        out, error = one.communicate(timeout=120)
        assert one.returncode == 0, error
        said.append(next(line for line in out.splitlines() if line.startswith(("there:", "failed:"))))
    return said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = hf_models.CONFIGS["mixtral"]
    return hf_models.write_folder(tmp_path / "from", config, {"model.safetensors": hf_models.random_tensors(config)})


def test_two_processes_write_one_folder(folder: Path, tmp_path: Path) -> None:
    said = _run(folder, tmp_path / "to")
    # The folder is there for both when save_hf returns.
    assert said == ["there: ['config.json', 'model.safetensors']"] * 2
    before, after = tensor_entries(folder), tensor_entries(tmp_path / "to")
    assert before.keys() == after.keys()
    for name, entry in before.items():
        assert (entry.code, entry.view().tobytes()) == (after[name].code, after[name].view().tobytes()), name


def test_what_stops_the_first_stops_the_others(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "to").write_text("a file where the folder would be")
    first, second = _run(folder, tmp_path / "to")
    assert "which is a file" in first
    assert "The first process could not write" in second
