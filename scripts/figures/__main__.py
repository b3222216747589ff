"""Write the figures into `docs/figures`."""

from __future__ import annotations

from pathlib import Path

from scripts.figures import methods, packages, savings

FOLDER = Path(__file__).parents[2] / "docs" / "figures"


def all_figures() -> dict[str, str]:
    return {**savings.draw_figures(), **methods.draw_figures(), **packages.draw_figures()}


if __name__ == "__main__":
    for name, text in all_figures().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"docs/figures/{name}")
