"""Tests of the import layers: imports point in one direction, and the methods do not import each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "scantling"
LAYERS = (
    ("checksums", "errors", "files", "hub", "kinds", "launched", "lazy_names", "modes", "numerics", "saved_models"),
    ("groups", "loading", "models.presets", "recipe.schema", "reporting.format"),
    ("comm", "laws", "optim", "precision", "tensor"),
    ("recipe",),
    ("data",),
    ("tasks",),
    ("models",),
    ("reporting",),
    ("planning",),
    ("training",),
    ("sweeping", "integrations"),
    ("cli",),
    ("__init__", "__main__"),
)
METHODS = ("comm", "laws", "optim", "precision", "tensor")


def layer(module: str) -> int:
    """Return the layer of a module such as `models.build`; the most specific name decides."""
    found = [
        (len(name), number)
        for number, names in enumerate(LAYERS)
        for name in names
        if module == name or module.startswith(name + ".")
    ]
    assert found, f"{module} has no layer; add it to LAYERS"
    return max(found)[1]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("scantling."):
                yield name.removeprefix("scantling.")


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    module = str(path.relative_to(SOURCE).with_suffix("")).replace("/", ".").removesuffix(".__init__")
    for imported in imports(path):
        assert layer(imported) <= layer(module), f"{module} imports {imported}, which stands above it"
        for method in METHODS:
            others = [name for name in METHODS if name != method]
            if module.startswith(method):
                assert not imported.startswith(tuple(others)), f"{module} imports the method {imported}"
        if module.startswith("integrations"):
            below = layer(imported) < layer(module)
            assert below or imported.startswith("integrations"), f"{module} imports {imported}, which is no method"
