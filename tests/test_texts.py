"""Tests of texts: the public docstrings of the package, and the text that tests train on."""

from __future__ import annotations

import ast
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from tests.texts import english_like

SOURCE = Path(__file__).parents[1] / "src" / "scantling"
OPENINGS = (
    "All that|As|By|Each of|From|How|If|In place|In which|It|Its|Of|Once|That|Their|There|These|They|This|Those|To|"
    "What|When|Where|Whether|Which|Who|Whose|With"
)
NO_OPENING = re.compile(rf"({OPENINGS})\b")
"""Words that begin neither an imperative nor a noun phrase."""


def public_docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield name and docstring of a module and of its public classes, functions and methods."""
    pending: list[tuple[str, ast.AST]] = [(path.stem, ast.parse(path.read_text(encoding="utf-8")))]
    while pending:
        name, node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield name, text
            if isinstance(node, ast.Module | ast.ClassDef):
                pending += [
                    (f"{name}.{child.name}", child)
                    for child in node.body
                    if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                    and not child.name.startswith("_")
                ]


def test_public_docstrings_open_with_a_verb_or_a_noun_phrase() -> None:
    found = [
        f"{path.relative_to(SOURCE)}: {name}: {text.splitlines()[0]}"
        for path in sorted(SOURCE.rglob("*.py"))
        for name, text in public_docstrings(path)
        if NO_OPENING.match(text)
    ]
    assert found == [], "open with an imperative (Return, Decode, Raise if) or with a noun phrase"


def test_english_like_is_reproducible() -> None:
    text = english_like(10_000)
    assert len(text) == 10_000
    assert zlib.crc32(text.encode("ascii")) == 1894843130
    assert english_like(100, seed=1) != text[:100]
