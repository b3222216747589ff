"""Tests of the import layers: one direction, no cycles, and no method imports another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "scantling"
LAYERS = (
    ("checksums", "conv1d", "errors", "eval_mode", "files", "lazy_names", "numerics", "saved_models", "torchrun_env"),
    ("groups", "optimizer_state"),
    ("comm", "laws", "optim", "precision", "tensor"),
    ("distributed",),
    ("hf",),
    ("trainer", "trainer.hub", "trainer.models.presets", "trainer.recipe.schema", "trainer.reporting.format"),
    ("trainer.recipe",),
    ("trainer.data",),
    ("trainer.tasks",),
    ("trainer.models",),
    ("trainer.reporting",),
    ("trainer.planning",),
    ("trainer.training",),
    ("trainer.sweeping",),
    ("cli",),
    ("__init__", "__main__"),
)
METHODS = ("comm", "laws", "optim", "precision", "tensor")
FILES = sorted(SOURCE.rglob("*.py"))


def module_name(path: Path) -> str:
    return str(path.relative_to(SOURCE).with_suffix("")).replace("/", ".").removesuffix(".__init__")


MODULES = {module_name(path): path for path in FILES}


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def layer(module: str) -> int:
    """Return the layer of a module such as `models.build`; the most specific name decides."""
    found = [(len(name), number) for number, names in enumerate(LAYERS) for name in names if is_within(module, name)]
    assert found, f"{module} has no layer; add it to LAYERS"
    return max(found)[1]


def method(module: str) -> str | None:
    return next((name for name in METHODS if is_within(module, name)), None)


def imports(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports anywhere, inside functions too, but not for type checking alone."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("scantling"):
            package = node.module.removeprefix("scantling").removeprefix(".")
            for alias in node.names:
                full = f"{package}.{alias.name}".removeprefix(".")
                names.append(full if full in MODULES else package)
        elif isinstance(node, ast.Import):
            names = [
                alias.name.removeprefix("scantling.") for alias in node.names if alias.name.startswith("scantling.")
            ]
        yield from (name for name in names if name)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    module = module_name(path)
    for imported in imports(path):
        assert layer(imported) <= layer(module), f"{module} imports {imported}, which is in a higher layer"
        if method(module) and method(imported):
            assert method(imported) == method(module), f"{module} imports another method: {imported}"


@pytest.mark.parametrize("package", sorted({module.split(".")[0] for module in MODULES}))
def test_imports_form_no_cycle(package: str) -> None:
    graph = {
        module: {name for name in imports(path) if name != module}
        for module, path in MODULES.items()
        if path.name != "__init__.py" and is_within(module, package)
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' → '.join(error.args[1])}")
