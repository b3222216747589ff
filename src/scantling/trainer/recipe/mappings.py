"""Helpers for recipes and run records as nested mappings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def section_of(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the mapping under a name, or an empty one if it is missing or not a mapping."""
    section = content.get(name)
    return section if isinstance(section, Mapping) else {}


def flattened(content: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested mappings by dotted key; an empty mapping counts as a value."""
    if isinstance(content, Mapping) and content:
        for key, inner in content.items():
            yield from flattened(inner, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, content
