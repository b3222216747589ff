"""The packages of Scantling and their imports, read from the source files."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from scripts.figures.drawing import Drawing

SOURCE = Path(__file__).parents[2] / "src" / "scantling"
ROWS = (("cli",), ("trainer", "hf"), ("distributed",), ("laws", "precision", "comm", "tensor", "optim"), ("numerics",))
"""The packages from top to bottom; each imports only those of lower rows."""
GRID = (
    ("", "sweeping", ""),
    ("", "training", ""),
    ("", "planning", ""),
    ("reporting", "models", ""),
    ("", "", "tasks"),
    ("", "recipe", "data"),
)
"""The packages of the trainer, likewise."""
TABLES = ("trainer.models.presets", "trainer.recipe.schema", "trainer.reporting.format")
"""Modules that the packages below their own may read (`tests/test_layout.py`); not drawn."""

Graph = dict[str, set[str]]
Box = tuple[float, float, float, float]


def package(module: str, depth: int) -> str:
    return ".".join(module.split(".")[:depth])


def imported_modules(path: Path) -> set[str]:
    """Return the modules of Scantling that a file imports, except for type checking."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(child)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for child in ast.walk(block)
    }
    found = set()
    for statement in ast.walk(tree):
        if isinstance(statement, ast.ImportFrom) and statement.module and id(statement) not in typing_only:
            found |= {f"{statement.module}.{alias.name}" for alias in statement.names}  # a package or a name in it
    names = {name.removeprefix("scantling.") for name in found if name.startswith("scantling.")}
    return {name for name in names if not name.startswith(TABLES)}


def imports(folder: str, names: set[str]) -> Graph:
    """Return which of the named packages import which, without those that they reach through another one.

    Args:
        folder: "" for the packages of Scantling, "trainer" for those of the trainer.
        names: The packages that are drawn.
    """
    depth = 2 if folder else 1
    direct: Graph = {name: set() for name in names}
    for path in sorted((SOURCE / folder).rglob("*.py")):
        importer = package(".".join(path.relative_to(SOURCE).with_suffix("").parts), depth)
        if importer in names:
            direct[importer] |= {package(module, depth) for module in imported_modules(path)} & names - {importer}
    reached: Graph = {}
    for name in TopologicalSorter(direct).static_order():
        reached[name] = set().union(*({target} | reached[target] for target in direct[name]))
    return {
        name: {target for target in targets if not any(target in reached[other] for other in targets)}
        for name, targets in direct.items()
    }


def connect(drawing: Drawing, graph: Graph, boxes: dict[str, Box], sideways: bool = False) -> None:
    """Draw the boxes `(x, y, width, height)` and an arrow for each import, from border to border."""
    for name in sorted(graph):
        x, y, width, height = boxes[name]
        for target in sorted(graph[name]):
            to_x, to_y, to_width, _ = boxes[target]
            if to_y < y + height:
                raise ValueError(f"{name} imports {target}, which is drawn above it; move it in ROWS")
            if sideways and to_x + to_width < x:  # past the boxes below
                drawing.arrow((x, y + height / 2), (to_x + to_width - 12, to_y - 2))
            elif sideways and x + width < to_x:
                drawing.arrow((x + width, y + height / 2), (to_x + 12, to_y - 2))
            else:
                start = min(max(to_x + to_width / 2, x + 12), x + width - 12)  # as near to the target as possible
                end = min(max(start, to_x + 12), to_x + to_width - 12)
                drawing.arrow((start, y + height), (end, to_y - 2))
    for name, box in boxes.items():
        kind = "plain" if name == "cli" or name.startswith("trainer.") else "soft"
        if name != "trainer":
            drawing.box(*box, [name.removeprefix("trainer.")], kind)


def packages() -> str:
    trainer = {f"trainer.{name}" for names in GRID for name in names if name}
    folders = {f"trainer.{path.parent.name}" for path in (SOURCE / "trainer").glob("*/__init__.py")}
    if trainer != folders:
        raise ValueError(f"GRID lacks {folders - trainer or 'nothing'} and has {trainer - folders or 'nothing else'}")
    trainer_height = 54 * len(GRID) + 24
    drawing = Drawing(540, 306 + trainer_height, "Packages of Scantling; an arrow leads to an imported package")
    boxes: dict[str, Box] = {}
    y = 10.0
    for names in ROWS:
        for i, name in enumerate(names):
            boxes[name] = (9 + 106 * i, y, 98, 34) if len(names) > 2 else (221, y, 98, 34)
        y += 36 + (trainer_height if "trainer" in names else 34)
    top = boxes["trainer"][1]
    boxes["trainer"] = (30, top, 360, trainer_height)
    boxes["hf"] = (420, top + trainer_height - 34, 98, 34)
    drawing.rect(*boxes["trainer"])
    drawing.text(42, top + 22, "trainer", "bold")
    connect(drawing, imports("", set(boxes)), boxes)
    grid: dict[str, Box] = {
        f"trainer.{name}": (41 + 120 * column, top + 14 + 54 * row, 98, 32)
        for row, names in enumerate(GRID)
        for column, name in enumerate(names)
        if name
    }
    connect(drawing, imports("trainer", trainer), grid, sideways=True)
    return drawing.svg()


def draw_figures() -> dict[str, str]:
    return {"packages.svg": packages()}
