"""The documents: what they print runs, what they name is there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from capibara.cli.main import app

ROOT = Path(__file__).parents[1]
TEXT = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
}
WITH_PYTHON = [page for page, text in TEXT.items() if "\n```python\n" in text]
COMMANDS = typer.main.get_command(app)
# They measure, search for long, compile, keep something, go on until they are stopped, or run the reader's own program.
SLOW = (
    "train", "generate", "serve", "monitor", "doctor", "demo", "tour", "bench", "tune", "compile", "--train", "--serve",
    "--measured",
    "--calibrate", "examples/plan/small.toml", "my_package.train", "train.py",
)  # fmt: skip


def test_the_readme_takes_a_minute() -> None:
    assert len(TEXT["README.md"].split()) <= 450


@pytest.mark.quick
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_python_of_a_page_runs_as_it_is_printed(page: str, as_a_reader: dict[str, str], tmp_path: Path) -> None:
    """In a process of its own, top to bottom. What is printed is a CPU's."""
    ran = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "run_page.py"), str(ROOT / page)],
        env={**as_a_reader, "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert not ran.stdout.endswith(" 0 blocks\n")


def test_a_name_that_no_block_defines_is_found(as_a_reader: dict[str, str], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\ntext\n```python\nprint(x + y)\n```\n", encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "run_page.py"), str(page)], capture_output=True, text=True, check=False
    )
    assert ran.returncode
    assert 'page.md", line 6' in ran.stderr
    assert "'y' is not defined" in ran.stderr


def test_a_block_says_what_it_is() -> None:
    """Else nothing would look at it."""
    for page, text in TEXT.items():
        fences = re.findall(r"^ *```(.*)$", text, re.MULTILINE)
        assert not any(fences[1::2]), f"{page}: a block is not closed"
        for language in fences[::2]:
            assert language in ("python", "text", "bash", "console", "toml", "json"), f"{page}: {language!r}"
        for block in re.findall(r"^```json\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            json.loads(block)


def _shell_lines(text: str) -> Iterator[list[str]]:
    """The commands of a page's shell blocks, in words; of a console block, the lines that start with a dollar sign."""
    for language, block in re.findall(r"^```(bash|console)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            if language == "bash" or line.startswith("$ "):
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words:
                    yield words


def _command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that these words call, and its own words."""
    command: Any = COMMANDS
    while isinstance(command, TyperGroup) and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("page", TEXT)
def test_the_commands_of_a_page_are_taken(page: str) -> None:
    """Parsed by the command line itself; of programs and make, the file and its options, the target."""
    for words in _shell_lines(TEXT[page]):
        match words:
            case ["capibara", *rest]:
                command, own = _command(rest)
                assert not isinstance(command, TyperGroup), f"{words}: no such command"
                command.make_context(rest[0], list(own))
            case ["python", program, *rest] if program != "-m":
                source = (ROOT / program).read_text(encoding="utf-8")
                for option in (word for word in rest if word.startswith("--")):
                    assert f'"{option}"' in source, f"{words}: {program} has no {option}"
            case ["make", target, *_]:
                assert f"\n{target}:" in (ROOT / "Makefile").read_text(encoding="utf-8"), words


@pytest.mark.parametrize("page", TEXT)
def test_the_options_named_in_the_text_are_there(page: str) -> None:
    for span in re.findall(r"`(?:python -m )?capibara ([^`\n]+)`", TEXT[page]):
        words = span.replace(",", " ").replace("|", " ").split()
        command, own = _command(words)
        if isinstance(command, TyperGroup):
            strange = [word for word in own if not word.startswith("-") and word not in command.commands]
            assert not strange, f"`capibara {span}`: no command {strange}"
        known = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}
        for option in (word for word in own if word.startswith("-")):
            assert option in known, f"`capibara {span}`: no option {option}"


def test_the_quick_commands_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    quick = {tuple(words[1:]) for text in TEXT.values() for words in _shell_lines(text) if words[0] == "capibara"}
    quick = {words for words in quick if not any(word in SLOW for word in words)}
    assert {("kernels", "list"), ("plan", "llama-7b", "--on", "v4-64")} <= quick
    for words in sorted(quick):
        ran = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
        assert ran.exit_code == 0, f"capibara {shlex.join(words)}: {ran.output}"
        for said in _said_of(shlex.join(("capibara", *words))):
            _check_shortened(said, ran.output)


def _said_of(command: str) -> Iterator[str]:
    """What console blocks print under a command."""
    for text in TEXT.values():
        for block in re.findall(r"^```console\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                asked, _, said = part.partition("\n")
                if asked == command:
                    yield said


def _check_shortened(said: str, output: str) -> None:
    """Each line is a line of the output, in order; dots stand for what is left out."""
    lines = iter([" ".join(line.split()) for line in output.splitlines()])
    for line in (" ".join(line.split()) for line in said.splitlines()):
        wanted = ".*".join(map(re.escape, line.split("...")))
        assert any(re.fullmatch(wanted, one) for one in lines), f"The page says {line!r}. The command says:\n{output}"


def _numbers(found: Any) -> Iterator[float]:
    """Every number of a result, and of bytes also the MiB."""
    if isinstance(found, dict | list):
        for one in found.values() if isinstance(found, dict) else found:
            yield from _numbers(one)
    elif isinstance(found, int | float):
        yield from (float(found), found / 2**20)


def _stand_together(figures: list[str], file: Path) -> bool:
    """Whether one row of a result has all these figures, to the digits that are printed."""
    document = json.loads(file.read_text(encoding="utf-8"))
    rows = [*document["rows"], *document.get("rerun_of_32k", {}).get("rows", []), *document.get("windowed", [])]
    return any(
        all(any(f"{one:.{len(figure.partition('.')[2])}f}" == figure for one in _numbers(row)) for figure in figures)
        for row in rows
    )


def test_the_figures_of_the_readme_stand_in_the_results() -> None:
    rows = re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \| ([\d.]+)x \|$", TEXT["README.md"], re.MULTILINE)
    assert len(rows) >= 8
    file = ROOT
    for work, ours, peer, ratio in rows:
        linked = re.search(r"\((benchmarks/[^)]+)\)", work)
        file = ROOT / linked[1] if linked else file  # or the same as above
        figures = [re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", cell) for cell in (ours, peer)]
        assert _stand_together(figures[0] + figures[1], file), f"{work}: {figures}"
        first, second = (float(cell[0]) for cell in figures)
        times = second / first if re.search(" [mµ]s", ours) else first / second
        # Half of the last digit, and the figures' own rounding: 0.080 is half a percent off at most.
        allowed = 0.5 * 10.0 ** -len(ratio.partition(".")[2]) + 0.006 * times
        assert abs(times - float(ratio)) <= allowed, f"{work}: {times:.3f} is not {ratio}"


def test_the_figures_of_attention_stand_in_the_results() -> None:
    rows = re.findall(r"^\| \d+ x \d+k, .*$", TEXT["docs/attention.md"], re.MULTILINE)
    assert len(rows) == 13
    for row in rows:
        for cell in row.split("|")[3:7:2]:
            figures = [one for one in cell.strip().split(", ") if one != "-"]
            assert _stand_together(figures, ROOT / "benchmarks/results/2026-11-15-h200-attention.json"), row
    rows = re.findall(r"^\| \d+ x \d{4}, .*$", TEXT["docs/attention.md"], re.MULTILINE)
    assert len(rows) == 8
    for row in rows:
        for cell in row.split("|")[2:4]:
            figures = [one for one in cell.strip().split(", ") if one]
            assert _stand_together(figures, ROOT / "benchmarks/results/2026-11-16-h200-attention-head-sizes.json"), row


def _anchors(text: str) -> set[str]:
    """A heading's anchor, as pages are shown: lower case, words joined, signs dropped."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXT)
def test_the_links_of_a_page_lead_somewhere(page: str) -> None:
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", TEXT[page], flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        assert file.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in _anchors(file.read_text(encoding="utf-8")), f"{page}: {target}"


def test_every_guide_is_on_the_map() -> None:
    for page in TEXT:
        if page.startswith("docs/") and page != "docs/README.md":
            assert f"]({page.removeprefix('docs/')})" in TEXT["docs/README.md"], page
