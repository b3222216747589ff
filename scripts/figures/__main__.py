"""Write the figures into `docs/figures`."""

from __future__ import annotations

from pathlib import Path

from scripts.figures import accuracy, methods, packages, savings

FOLDER = Path(__file__).parents[2] / "docs" / "figures"


def all_figures() -> dict[str, str]:
    modules = (accuracy, savings, methods, packages)
    return {name: text for module in modules for name, text in module.draw_figures().items()}


if __name__ == "__main__":
    for name, text in all_figures().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"docs/figures/{name}")
