"""Register LoRA for TT layers with peft, in any order of imports; nothing here imports peft."""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

logger = logging.getLogger(__name__)

OLDEST = (0, 21)
"""The first version of peft whose layers take a configuration, as `lora` builds on."""


def support_peft() -> None:
    """Let peft put adapters on TT layers, now or as soon as it is imported."""
    if "peft" in sys.modules:
        _register()
    elif not any(isinstance(finder, _AfterPeft) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterPeft())


def _register() -> None:
    found = importlib.metadata.version("peft")
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        logger.info("peft %s is too old to put adapters on TT layers; upgrade it", found)
        return
    try:
        from scantling.tensor.lora import register
    except ImportError as error:  # of a name that a later peft no longer has: others must still be able to import peft
        logger.warning("adapters of peft %s do not work on TT layers: %s", found, error)
        return
    register()


class _AfterPeft(importlib.abc.MetaPathFinder):
    """Import peft as usual, then register what it needs for TT layers."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "peft":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                _register()

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
