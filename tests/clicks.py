"""Small learnable click logs for tests."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

NAMES = ("clicked", "price", "age", "user", "shop")


def click_rows(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows whose label depends on user, shop and price; 10 % of prices and 5 % of shops are missing."""
    random = np.random.default_rng(seed)
    effects = np.random.default_rng(99).normal(0, 1.5, (2, 30))
    rows = []
    for _ in range(count):
        user, shop, price = int(random.integers(30)), int(random.integers(12)), float(random.gamma(2.0, 10.0))
        logit = effects[0, user] + effects[1, shop] + 0.05 * (price - 20)
        rows.append(
            {
                "clicked": int(random.random() < 1 / (1 + np.exp(-logit))),
                "price": None if random.random() < 0.1 else round(price, 2),
                "age": int(random.integers(18, 80)),
                "user": f"u{user}",
                "shop": None if random.random() < 0.05 else 100 + shop,
            }
        )
    return rows


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def clicks_recipe(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe as a mapping: a tiny DLRM on 4,000 rows, 8 steps; `sections` are merged in."""
    path = folder / "clicks.csv"
    if not path.exists():
        write_csv(path, click_rows(4000))
    recipe: dict[str, Any] = {
        "name": "clicks",
        "model": {"preset": "dlrm", "overrides": {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [16]}},
        "data": {
            "csv": str(path),
            "clicks": {
                "label": "clicked",
                "numeric": ["price", "age"],
                "categorical": ["user", "shop"],
                "table_size": {"user": 50},
            },
            "heldout": 0.2,
        },
        "optim": {"name": "adamw", "lr": 0.02, "weight_decay": 0.0},
        "train": {"steps": 8, "batch_size": 64, "device": "cpu"},
    }
    for name, keys in sections.items():
        recipe[name] = {**recipe.get(name, {}), **keys}
    return recipe
