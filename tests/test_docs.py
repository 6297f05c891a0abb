"""Every example in the documents runs and gives what it says; the blocks of one document share their names."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def _examples(name: str) -> str:
    text = (DOCS / name).read_text(encoding="utf-8")
    # What is not in a block becomes an empty line, so that a failure names the document's own line.
    blocks = [match.span(1) for match in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]
    return "".join(
        one if one == "\n" or any(start <= at < end for start, end in blocks) else "" for at, one in enumerate(text)
    )


DOCUMENTS = sorted(path.name for path in DOCS.glob("*.md") if "\n>>> " in path.read_text(encoding="utf-8"))


def test_there_are_documents_with_examples() -> None:
    assert "meshes.md" in DOCUMENTS


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_examples_of_a_document(name: str) -> None:
    examples = doctest.DocTestParser().get_doctest(_examples(name), {}, name, str(DOCS / name), 0)
    assert examples.examples
    said: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples, out=said.append)
    assert not failed, "".join(said)
