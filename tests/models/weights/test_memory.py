"""Loading and saving hold the model once: the peak of a process of its own, against the model's bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.models.weights import hf_models

CONFIG = {
    **hf_models.CONFIGS["llama"],
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
# The kernel's own figure of the most that was resident, counted anew from a point.
MEASURED = """
import sys
import jax, numpy as np
from jax.sharding import Mesh
from capibara.models.weights import load_hf, save_hf
from capibara.models.weights import load, save
folder, model_axis = sys.argv[1], int(sys.argv[2])

def resident(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

def from_here():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return resident("VmRSS:")

mesh = Mesh(np.array(jax.devices()[:model_axis]), ("model",)) if model_axis > 1 else None
jax.block_until_ready(jax.numpy.ones(8) + 1)
before = from_here()
model, params = load_hf(folder, mesh=mesh)
loaded = resident("VmHWM:") - before
held = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)
before = from_here()
save_hf(folder + "/again", model, params)
print(held, loaded, resident("VmHWM:") - before)
"""


@pytest.mark.spread(1)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize("devices", [1, 4])
def test_the_model_is_in_memory_once(devices: int, tmp_path: Path) -> None:
    tensors = hf_models.random_tensors(CONFIG)
    hf_models.write_folder(tmp_path, CONFIG, hf_models.in_parts(tensors, 3))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert total > 200e6
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path), str(devices)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    held, loading, saving = map(int, done.stdout.split())
    # Norms are whole on each device; they are small.
    assert total <= held < 1.01 * total
    # The devices' memory is the host's here: once the model, and the buffer of one leaf (the largest is a quarter of
    # this model). Two copies would be 2.0.
    assert loading < 1.3 * total + 16e6
    # What is written is there already; beside it one layer, or the embedding's table.
    assert saving < 0.3 * total + 16e6
