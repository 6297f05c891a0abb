"""The environment a process needs before it loads libtpu.

libtpu reads LIBTPU_INIT_ARGS once, when it is loaded, so all of this must stand before jax touches it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["DUMP_PASSES", "compiler_environment", "dump_dir_in", "dump_flags"]

DUMP_PASSES: tuple[str, ...] = (
    "schedule-analysis_final_bundles",
    "final_bundles",
    "final_hlo-static-per-bundle-utilization",
    "post-delay-converter",
)
"""Labels of the compiler passes that the parser reads: the schedule's length, its instructions, the issue
slots it uses, and the last listing that declares its memory."""


def dump_flags(dump_dir: Path | str, *, passes: Sequence[str] | None = DUMP_PASSES) -> tuple[str, ...]:
    """libtpu flags that write the schedule of every kernel under `dump_dir`.

    A kernel goes through about a hundred passes and each can write megabytes; `passes` keeps those that are
    read. None writes them all.
    """
    flags = (
        f"--xla_jf_dump_to={dump_dir}",
        "--xla_jf_dump_llo_text=true",
        "--xla_jf_emit_annotations=true",
    )
    if passes is None:
        return flags
    return (*flags, f"--xla_jf_dump_llo_pass_label_regex=^({'|'.join(passes)})$")


def compiler_environment(
    dump_dir: Path | str | None,
    base: Mapping[str, str] | None = None,
    *,
    passes: Sequence[str] | None = DUMP_PASSES,
) -> dict[str, str]:
    """`base` (this process's environment) with what compiling for absent TPUs needs added to it."""
    environment = dict(os.environ if base is None else base)
    environment["JAX_PLATFORMS"] = "cpu"  # never take a TPU or GPU that happens to be attached
    environment["TPU_SKIP_MDS_QUERY"] = "1"  # or libtpu waits for a Google Cloud metadata server
    environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # or the second process dies on the first one's lock file
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # a cached program leaves no dump
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    if dump_dir is not None:
        flags = [environment.get("LIBTPU_INIT_ARGS", ""), *dump_flags(dump_dir, passes=passes)]
        environment["LIBTPU_INIT_ARGS"] = " ".join(flag for flag in flags if flag)
    return environment


def dump_dir_in(environment: Mapping[str, str]) -> Path | None:
    """The dump directory that LIBTPU_INIT_ARGS names; the last flag wins, as in libtpu."""
    found = re.findall(r"--xla_jf_dump_to=(\S+)", environment.get("LIBTPU_INIT_ARGS", ""))
    return Path(found[-1]) if found else None
