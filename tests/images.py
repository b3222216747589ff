"""Small labeled images for tests, with something to learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SIZE = 8
NAMES = ("left", "right", "top")


def image_arrays(count: int, *, seed: int = 0) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.str_]]:
    """Return gray noise images (count, 8, 8) with a brighter left, right or upper part, and its label (count,)."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 90, (count, SIZE, SIZE))
    classes = random.integers(0, len(NAMES), count)
    half = SIZE // 2
    images[classes == 0, :, :half] += 120
    images[classes == 1, :, half:] += 120
    images[classes == 2, :half, :] += 120
    return images.astype(np.uint8), np.array(NAMES)[classes]


def write_npz(path: Path, count: int, *, seed: int = 0) -> Path:
    images, labels = image_arrays(count, seed=seed)
    np.savez(path, images=images, labels=labels)
    return path


def images_recipe(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe as a mapping: a tiny ViT on 500 images, 8 steps; `sections` are merged in."""
    path = folder / "images.npz"
    if not path.exists():
        write_npz(path, 500)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    recipe: dict[str, Any] = {
        "name": "images",
        "model": {"preset": "vit-digits", "overrides": shape},
        "data": {"images": str(path), "image_size": SIZE, "image_channels": 1, "image_shift": 1, "heldout": 0.2},
        "optim": {"name": "adamw", "lr": 0.003},
        "train": {"steps": 8, "batch_size": 32, "device": "cpu"},
    }
    for name, keys in sections.items():
        recipe[name] = {**recipe.get(name, {}), **keys}
    return recipe
