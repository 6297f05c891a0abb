"""jax's cache on disk, by real processes: shared, bounded, killed while writing, read-only, full, another version's."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import capibara
from capibara.compile.persistent import _Keeper, _place, persistent_cache

SOURCE = str(Path(capibara.__file__).parents[1])

COMPILE = """
    import json, os, sys, warnings
    import jax, jax.numpy as jnp, numpy as np
    from capibara.compile.events import count_compilations
    from capibara.compile.persistent import persistent_cache

    warnings.simplefilter("always")
    if len(sys.argv) > 4:  # with all that is imported on the way read before, for another user may not
        jax.config.update("jax_enable_compilation_cache", False)
        jax.jit(lambda x: x + 1)(np.float32(0))
        jax.config.update("jax_enable_compilation_cache", True)
        os.setuid(int(sys.argv[4]))
    cache = persistent_cache(sys.argv[1], max_entries=64)
    first, last = int(sys.argv[2]), int(sys.argv[3])
    with warnings.catch_warnings(record=True) as said, count_compilations() as counts:
        results = [float(jax.jit(lambda x, n=n: jnp.cos(x) * n)(np.float32(0))) for n in range(first, last)]
    assert results == [float(n) for n in range(first, last)], results
    print(json.dumps({"mode": cache.mode, "why": cache.why, "entries": cache.entries, "compiled": counts.compiled,
                      "from_disk": counts.from_disk, "warnings": [str(w.message) for w in said]}))
"""


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    return {**kept, "PYTHONPATH": SOURCE, "JAX_PLATFORMS": "cpu", **variables}


def start(program: str, *words: object, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, words)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def told(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1]), err


def compiled(folder: Path, first: int, last: int, *user: int) -> tuple[dict[str, Any], str]:
    return told(start(COMPILE, folder, first, last, *user))


def whole_entries(folder: Path) -> list[str]:
    """Names of the entries, each of which must be whole and have its stamp."""
    from capibara.compile.persistent import _stamp, _whole

    entries = list(folder.glob("*/*-cache"))
    assert all(_whole(entry) for entry in entries)
    assert all(_stamp(entry).exists() for entry in entries)
    return sorted(entry.name for entry in entries)


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    first, _ = compiled(tmp_path, 1, 4)
    assert (first["mode"], first["compiled"], first["from_disk"]) == ("used", 3, 0)
    second, _ = compiled(tmp_path, 1, 4)
    assert (second["compiled"], second["from_disk"]) == (0, 3)


# Kernels that XLA's partitioner splits: two of the same shapes, and one of somebody else's, scaled by a word.
SPLIT = """
    import hashlib, json, sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.experimental.custom_partitioning import custom_partitioning
    from jax.sharding import NamedSharding, PartitionSpec
    from capibara.compile.events import count_compilations
    from capibara.compile.persistent import persistent_cache, stable_key
    from capibara.kernels.core.op import lookup

    jax.config.update("jax_num_cpu_devices", 2)
    persistent_cache(sys.argv[1])
    factor, order = float(sys.argv[2]), sys.argv[3].split(",")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))

    @custom_partitioning
    def scaled(re, im):
        return re * factor, im * factor

    scaled.def_partition(
        partition=lambda mesh, args, out: (mesh, lambda re, im: (re * factor, im * factor), (rows, rows), (rows, rows)),
        sharding_rule="b n, b n -> b n, b n",
    )
    functions = {
        "fft": lambda re, im: lookup("fft").run((re, im), {}),
        "ifft": lambda re, im: lookup("fft").run((re, im), {"inverse": True}),
        "scaled": scaled,
        "both": lambda re, im: scaled(*lookup("fft").run((re, im), {})),
    }
    x = np.random.default_rng(0).standard_normal((2, 2, 4)).astype(np.float32)
    told = {}
    for name in order:
        re, im = (jax.device_put(part, rows) for part in x)
        lowered = jax.jit(functions[name], donate_argnums=(0, 1), out_shardings=(rows, rows)).lower(re, im)
        with count_compilations() as counts, stable_key(lowered):
            program = lowered.compile()
        results = [np.asarray(part) for part in program(re, im)]
        value = x[0] + 1j * x[1]
        expected = {"fft": np.fft.fft(value), "ifft": np.fft.ifft(value), "scaled": factor * value,
                    "both": factor * np.fft.fft(value)}[name]
        np.testing.assert_allclose(results[0] + 1j * results[1], expected, rtol=1e-4, atol=1e-5)
        told[name] = {"compiled": counts.compiled, "donated": [re.is_deleted(), im.is_deleted()],
                      "bits": hashlib.sha256(b"".join(part.tobytes() for part in results)).hexdigest()}
    print(json.dumps(told))
"""


def test_split_kernels_are_found_by_name_and_never_taken_for_another(tmp_path: Path) -> None:
    first, _ = told(start(SPLIT, tmp_path, 2, "fft,scaled,both"))
    assert [first[name]["compiled"] for name in first] == [1, 1, 1]
    second, _ = told(start(SPLIT, tmp_path, 3, "ifft,fft,scaled,both"))
    assert {name: row["compiled"] for name, row in second.items()} == {"ifft": 1, "fft": 0, "scaled": 1, "both": 1}
    assert second["fft"] == {**first["fft"], "compiled": 0}  # the same bits, and the same arrays donated


# Stops in the middle of a write, with the lock held, and waits to be killed.
KILLED = """
    import sys, time
    import jax, jax.numpy as jnp, numpy as np
    from jax._src import path as jax_path
    from capibara.compile.persistent import persistent_cache

    cache = persistent_cache(sys.argv[1])
    kind = type(jax_path.Path("x"))  # Python's, or etils' where that is installed
    write = kind.write_bytes

    def half(path, data):
        if not path.name.endswith("-cache"):
            return write(path, data)
        with open(path, "wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            print("writing", flush=True)
            time.sleep(300)

    kind.write_bytes = half
    jax.jit(lambda x: jnp.cos(x) * 1)(np.float32(0))
"""


def test_two_processes_share_it_and_one_is_killed_while_it_writes(tmp_path: Path) -> None:
    dying = start(KILLED.replace("* 1)", "* 2)"), tmp_path)
    assert dying.stdout is not None
    assert dying.stdout.readline() == "writing\n"
    (half,) = tmp_path.glob("*/*-cache")
    # Another process comes while the first holds the lock, and waits for it; then it is killed.
    living = start(COMPILE, tmp_path, 1, 5)
    time.sleep(0.5)
    dying.send_signal(signal.SIGKILL)
    dying.communicate()
    report, _ = told(living)
    # It went on, and kept its programs, where on jax 0.10.2 the half of one would have stopped all writing.
    assert report["compiled"] == 4
    assert report["warnings"] == []
    assert len(whole_entries(tmp_path)) == 4  # the half of one among them, made whole
    assert half.name in whole_entries(tmp_path)
    again, _ = compiled(tmp_path, 1, 5)
    assert (again["compiled"], again["from_disk"]) == (0, 4)


def test_processes_at_once_write_whole_entries(tmp_path: Path) -> None:
    both = [start(COMPILE, tmp_path, *span) for span in ((1, 7), (4, 10))]
    for process in both:
        report, _ = told(process)
        assert report["warnings"] == []
    assert len(whole_entries(tmp_path)) == 9


@pytest.mark.skipif(os.name != "posix", reason="limits and users are POSIX's")
def test_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    """A limit on what a file may hold stands in for a full disk: the write fails half-way, in jax's own code."""
    import resource

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    # Such a program is of 2 or 3 kB; with noise for a constant it is of more than 4.
    noisy = COMPILE.replace("jnp.cos(x) * n", "(jnp.cos(x) * n + 0 * jnp.sum(NOISE * x))").replace(
        "    cache =", "    NOISE = np.random.default_rng(0).standard_normal(4096).astype('float32')\n    cache ="
    )
    report, _ = told(start(noisy, tmp_path, 1, 3, preexec_fn=limited))
    assert report["compiled"] == 2  # the program went on, and jax said what it could not write
    assert any("Error writing persistent compilation cache" in text for text in report["warnings"])
    compiled(tmp_path, 1, 2)
    whole_entries(tmp_path)  # what was cut short is gone


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="to be another user takes root")
def test_a_folder_that_cannot_be_written_to_is_read() -> None:
    # Outside of pytest's own folder, which is the user's alone.
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        compiled(cache, 1, 3)
        for path in (cache, *cache.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        report, err = compiled(cache, 1, 4, 65534)
    assert report["mode"] == "read-only"
    assert (report["compiled"], report["from_disk"]) == (1, 2)
    assert report["warnings"] == []
    assert "cannot be written to" in err
    assert "what is there is read" in err


def test_a_folder_that_is_none_is_said_and_the_program_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    report, err = compiled(tmp_path / "file", 1, 2)
    assert (report["mode"], report["compiled"]) == ("off", 1)
    assert err.count("Compiled programs are not kept on disk") == 1


def test_a_folder_that_others_write_to_is_not_read_and_the_program_goes_on(tmp_path: Path) -> None:
    place = _place(tmp_path)
    place.mkdir()
    place.chmod(0o777)
    report, err = compiled(tmp_path, 1, 2)
    assert (report["mode"], report["compiled"], list(place.iterdir())) == ("off", 1, [])
    assert "which others may write to" in err


def test_another_version_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture, nothing_said_yet: None) -> None:
    entry(tmp_path, "a", used=1)
    (tmp_path / "versions.json").write_text('["jax 0.9.9, jaxlib 0.9.9"]', encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        _Keeper(tmp_path, 1 << 20, 100).begin()
        _Keeper(tmp_path, 1 << 20, 100).begin()
    (said,) = caplog.messages
    assert "has programs of jax 0.9.9, jaxlib 0.9.9, which jax" in said
    assert (tmp_path / "a-cache").exists()  # it is that version's still


# Putting a folder in order, without jax.


def entry(folder: Path, name: str, used: int | None, size: int = 100) -> None:
    import zlib

    body = zlib.compress(os.urandom(size))
    (folder / f"{name}-cache").write_bytes(body)
    if used is not None:
        (folder / f"{name}-atime").write_bytes(used.to_bytes(8, "little"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith((".", "versions")))


@pytest.mark.quick
def test_orphans_are_made_whole_or_go_and_the_oldest_go_first(tmp_path: Path) -> None:
    for number, name in enumerate("abc"):
        entry(tmp_path, name, used=number + 1)
    entry(tmp_path, "orphan", used=None)
    entry(tmp_path, "cut", used=None)
    (tmp_path / "cut-cache").write_bytes((tmp_path / "cut-cache").read_bytes()[:50])
    (tmp_path / "stamp-atime").write_bytes(b"\0" * 8)
    _Keeper(tmp_path, 1 << 20, 100).begin()
    assert names(tmp_path) == sorted(
        f"{name}-{part}" for name in ("a", "b", "c", "orphan") for part in ("atime", "cache")
    )
    _Keeper(tmp_path, 1 << 20, 2).begin()
    assert names(tmp_path) == ["c-atime", "c-cache", "orphan-atime", "orphan-cache"]
    _Keeper(tmp_path, 150, 2).begin()
    assert names(tmp_path) == ["orphan-atime", "orphan-cache"]  # written last


def test_a_disk_without_room_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil
    from types import SimpleNamespace

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 20))
    with pytest.raises(OSError, match="its disk is full: 5 MiB are free"):
        _Keeper(tmp_path, 1 << 20, 10).begin()


def test_limits_are_refused_and_none_is_set_up_where_jax_has_it_off() -> None:
    with pytest.raises(ValueError, match="max_entries of 1 or more"):
        persistent_cache(max_entries=0)
    off = persistent_cache()  # of this process: tests/conftest.py
    assert (off.mode, off.folder, off.entries, off.bytes) == ("off", None, 0, 0)
