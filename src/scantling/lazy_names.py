"""Lazy imports of the names of a package, on first use (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

EXTRAS = {"scantling.trainer": "train", "scantling.hf": "hf"}
"""Extra of the distribution that installs the requirements of a package."""


def lazy_names(
    package: str, homes: Mapping[str, str], modules: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package.

    Args:
        package: `__name__` of the package.
        homes: module of each name.
        modules: names that are whole modules.
    """
    modules = modules or {}

    def get(name: str) -> Any:
        if name in homes:
            return getattr(_import(homes[name]), name)
        if name in modules:
            return _import(modules[name])
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes, *modules})

    return get, names


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(".".join(module.split(".")[:2]))
        if extra is None:
            raise
        text = f'{module} needs {error.name}, which is not installed; run: pip install "scantling[{extra}]"'
        raise ModuleNotFoundError(text, name=error.name) from error
