"""Render small color images of ten shapes: a data set that needs no download.

    python benchmarks/shapes.py                  write build/shapes.npz, and a sheet of examples to build/shapes.png

Each image of 32 x 32 pixels has one shape at a random place, of random size, angle and color, on a background of
another color with a line across and noise. The images depend on the seed alone, not on the processor.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw
from small_models import ROOT

PATH = ROOT / "build" / "shapes.npz"
SIDE, SCALE = 32, 4
"""Pixels of a side, and times that many before they are averaged."""
COUNT = 16000
NOISE = 10
"""Largest change of a pixel by noise."""
Point = tuple[float, float]


def polygon(corners: int, inner: float = 1.0) -> list[Point]:
    """Return the corners of a regular polygon; with `inner`, every second one has this radius."""
    return [
        (radius * math.cos(angle), radius * math.sin(angle))
        for number in range(corners)
        for radius, angle in [(inner if number % 2 else 1.0, 2 * math.pi * number / corners)]
    ]


def arc(first: float, last: float, radius: float = 1.0, at: Point = (0.0, 0.0)) -> list[Point]:
    """Return points on an arc, by angles as fractions of a turn."""
    angles = [2 * math.pi * (first + (last - first) * number / 40) for number in range(41)]
    return [(at[0] + radius * math.cos(angle), at[1] + radius * math.sin(angle)) for angle in angles]


def cross(width: float) -> list[Point]:
    quarter = [(1.0, -width), (1.0, width), (width, width)]
    turned: list[Point] = []
    for _ in range(4):
        turned += quarter
        quarter = [(-y, x) for x, y in quarter]
    return turned


SHAPES: dict[str, list[Point]] = {
    "disc": arc(0, 1),
    "half": arc(0, 0.5),
    "crescent": [*arc(0.1, 0.9), *reversed(arc(0.16, 0.84, 0.75, (0.35, 0.0)))],
    "triangle": polygon(3),
    "square": polygon(4),
    "bar": [(1.0, 0.25), (-1.0, 0.25), (-1.0, -0.25), (1.0, -0.25)],
    "hexagon": polygon(6),
    "star": polygon(10, 0.45),
    "cross": cross(0.3),
    "arrow": [(1.0, 0.0), (0.1, 0.8), (0.1, 0.3), (-1.0, 0.3), (-1.0, -0.3), (0.1, -0.3), (0.1, -0.8)],
}


def render(points: list[Point], generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return an image of one shape: (SIDE, SIDE, 3)."""
    whole = SIDE * SCALE
    radius = whole * generator.uniform(0.28, 0.42)
    center = generator.uniform(radius, whole - radius, 2)
    angle, squeeze = generator.uniform(0, 2 * math.pi), generator.uniform(0.75, 1.0)
    background, color = generator.integers(0, 256, 3), generator.integers(0, 256, 3)
    while abs(int(color.sum()) - int(background.sum())) < 240:
        color = generator.integers(0, 256, 3)
    image = Image.new("RGB", (whole, whole), tuple(map(int, background)))
    draw = ImageDraw.Draw(image)
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    at = np.array(points) * (1.0, squeeze) @ turn.T * radius + center
    draw.polygon([tuple(map(float, point)) for point in at], fill=tuple(map(int, color)))
    line = [*map(int, generator.integers(0, whole, 4))]
    draw.line(line, fill=tuple(map(int, generator.integers(0, 256, 3))), width=SCALE)
    small = np.asarray(image, dtype=np.int32).reshape(SIDE, SCALE, SIDE, SCALE, 3).sum((1, 3)) // SCALE**2
    noise = generator.integers(-NOISE, NOISE + 1, small.shape)
    return np.clip(small + noise, 0, 255).astype(np.uint8)


def render_all(count: int, seed: int) -> dict[str, npt.NDArray[Any]]:
    """Return images (count, SIDE, SIDE, 3) and the names of their shapes (count,), equally many of each."""
    generator = np.random.default_rng(seed)
    names = [*SHAPES]
    labels = generator.permutation(np.arange(count) % len(names))
    images = np.stack([render(SHAPES[names[label]], generator) for label in labels])
    return {"images": images, "labels": np.array(names)[labels]}


def write(path: Path, count: int = COUNT) -> dict[str, npt.NDArray[Any]]:
    """Write images and labels, and return them."""
    made = render_all(count, seed=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **made)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--out", type=Path, default=PATH)
    options = parser.parse_args()
    made = write(options.out, options.count)
    rows = [np.concatenate(made["images"][made["labels"] == name][:16], axis=1) for name in SHAPES]
    sheet = Image.fromarray(np.concatenate(rows))
    sheet.resize((2 * sheet.width, 2 * sheet.height)).save(options.out.with_suffix(".png"))
    print(options.out, options.out.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
