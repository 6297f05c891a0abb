"""What a process needs before it loads libtpu."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from capibara.compile.environment import compiler_environment, dump_dir_in, dump_flags


def test_flags_name_the_directory_and_the_passes():
    flags = dump_flags("/d")
    assert "--xla_jf_dump_to=/d" in flags
    assert flags[-1].startswith("--xla_jf_dump_llo_pass_label_regex=^(schedule-analysis_final_bundles|final_bundles|")
    assert not any(character in flag for flag in flags for character in " '\"\\")  # libtpu splits on blanks
    assert len(dump_flags("/d", passes=None)) == len(flags) - 1


def test_the_callers_flags_are_kept():
    environment = compiler_environment("/d", {"LIBTPU_INIT_ARGS": "--mine=1", "HOME": "/h"})
    assert environment["LIBTPU_INIT_ARGS"].startswith("--mine=1 --xla_jf_dump_to=/d ")
    assert environment["HOME"] == "/h"
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["TPU_SKIP_MDS_QUERY"] == "1"
    assert environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"


def test_without_a_dump_no_flags():
    assert "LIBTPU_INIT_ARGS" not in compiler_environment(None, {})


def test_the_directory_is_read_back():
    assert dump_dir_in({}) is None
    assert dump_dir_in({"LIBTPU_INIT_ARGS": "--xla_jf_dump_to=/old"}) == Path("/old")
    assert dump_dir_in(compiler_environment("/new", {"LIBTPU_INIT_ARGS": "--xla_jf_dump_to=/old"})) == Path("/new")


@pytest.mark.quick
def test_importing_the_room_does_not_import_jax():
    code = (
        "import sys, capibara.compile as c\n"
        "import capibara.compile.aot, capibara.compile.pool, capibara.compile.worker\n"
        "assert set(c.__all__) <= set(dir(c))\n"
        "[getattr(c, name) for name in c.__all__]\n"
        "assert 'jax' not in sys.modules and 'libtpu' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
