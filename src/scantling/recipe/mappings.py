"""Recipes, and records of runs, as nested mappings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def section_of(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The mapping under a name; an empty one where there is none, or something else."""
    section = content.get(name)
    return section if isinstance(section, Mapping) else {}


def flattened(content: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested mappings by their dotted keys; an empty mapping is a value."""
    if isinstance(content, Mapping) and content:
        for key, inner in content.items():
            yield from flattened(inner, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, content
