"""Registration of LoRA for TT layers with peft, in any order of imports; nothing here imports peft."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.metadata
import logging
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

OLDEST = (0, 21)
"""First version of peft whose layers take a configuration, which `lora` relies on."""


def support_peft() -> None:
    """Let peft put adapters on TT layers, now or as soon as it is imported."""
    if "peft" in sys.modules:
        _register()
    elif not any(isinstance(finder, _PeftImportHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PeftImportHook())


def _register() -> None:
    """Patch peft to prepare TT layers before it adds adapters; `lora` is imported only then."""
    version = importlib.metadata.version("peft")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        logger.info("peft %s is too old to put adapters on TT layers; upgrade it to 0.21 or newer", version)
        return
    from peft.tuners.tuners_utils import BaseTuner

    init, inject = BaseTuner.__init__, BaseTuner.inject_adapter

    @functools.wraps(init)
    def init_with_tt(self: Any, model: Any, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        from scantling.tensor.lora import prepare_config

        prepare_config(self, model, peft_config[adapter_name] if isinstance(peft_config, dict) else peft_config)
        init(self, model, peft_config, adapter_name, *args, **kwargs)

    @functools.wraps(inject)
    def inject_with_tt(self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        from scantling.tensor.lora import prepare_config

        prepare_config(self, model, self.peft_config[adapter_name])
        inject(self, model, adapter_name, *args, **kwargs)

    BaseTuner.__init__, BaseTuner.inject_adapter = init_with_tt, inject_with_tt


class _PeftImportHook(importlib.abc.MetaPathFinder):
    """Import hook that imports peft as usual, then registers TT layers.

    It stays until peft is imported, since transformers asks for the spec of peft without importing it.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "peft":
            return None
        # `importlib.util.find_spec` would call this hook again.
        finders = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            exec_module = spec.loader.exec_module

            def exec_and_register(module: ModuleType) -> None:
                exec_module(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                _register()

            spec.loader.exec_module = exec_and_register  # type: ignore[method-assign]
        return spec
