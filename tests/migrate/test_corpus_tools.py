"""The tools that the checker's evidence is made with: what a program asks of jax, and whether an error is borne out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).parents[2] / "tools"


def test_the_probe_writes_down_what_is_missing_and_goes_on(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import jax\nfrom jax.config import config\nfrom jax import numpy as jnp\n"
        "assert jax.tree_map(abs, [-1]) == [1]\n"
        "assert jnp.product(jnp.arange(1, 4)) == 6 and config.jax_enable_x64 is False\n"
        "jax.no_such_name\n"
    )
    command = [sys.executable, "-W", "ignore", str(TOOLS / "jax_probe.py"), str(tmp_path), str(program)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 1
    assert "no_such_name" in ran.stderr
    assert ran.stdout.splitlines() == [
        "program.py:2 jax.config",
        "program.py:4 jax.tree_map",
        "program.py:5 jax.numpy.product",
        "program.py:6 jax.no_such_name",
    ]


def test_errors_are_held_against_the_installed_jax(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import jax\nimport jax.numpy as jnp\nfrom jax.config import config\n"
        "jax.tree_map\njnp.clip(x, a_min=1)\njax.linear_util.wrap_init\njax.numpy.ndarray.no_member\n"
        "jnp.sum(x, no_keyword=1)\n"
    )
    code = (
        "import sys, pathlib, migration_corpus as tool\n"
        "from dataclasses import replace\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "found = tool.findings_of(root, 'CAP2')\n"
        "print([one.line for one in found], [tool.is_false(one) for one in found])\n"
        # what is there, or taken, is no error
        "print([tool.is_false(replace(one, message=text)) for one, text in zip(found, [\n"
        "  'jax.jit is gone', 'jax.jit is gone', 'jax.numpy.clip takes no min since'])])\n"
        "print(tool.unreported(root, found))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)],
        cwd=TOOLS, capture_output=True, text=True, check=True,
    )  # fmt: skip
    errors, turned, missed = ran.stdout.splitlines()
    assert errors == "[3, 4, 5, 6] [False, False, False, False]"
    assert turned.count("True") == 3
    assert missed == "['program.py:7 jax.numpy.ndarray.no_member', 'program.py:8 jax.numpy.sum(no_keyword=)']"
