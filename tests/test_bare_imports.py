"""Tests of the methods where only torch, numpy and safetensors are installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ("torch", "numpy", "safetensors")
BLOCK = """
import sys
from importlib.machinery import PathFinder

blocked = frozenset(BLOCKED)

class BareFinder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in blocked else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = BareFinder
"""
IMPORT_ALL = """
import importlib, json

missing = {}
for name in NAMES:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing[name] = error.name
print(json.dumps(missing))
"""
EXTRAS = """
import scantling as sc

for name in ("train", "load", "hf"):
    try:
        getattr(sc, name)
    except ModuleNotFoundError as error:
        print(str(error).rpartition("; ")[2])
"""


def modules_outside_core() -> list[str]:
    """Return the importable modules that `pip install scantling` alone does not bring."""
    names, queue = set(), list(CORE)
    while queue:
        name = queue.pop()
        if name in names:
            continue
        names.add(name)
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        queue += [canonical(text) for text in requirements if "extra ==" not in text]
    installed = metadata.packages_distributions()
    modules = (module for module, dists in installed.items() if not names & {canonical(dist) for dist in dists})
    return sorted(set(modules) - {"scantling"} - set(sys.stdlib_module_names))


def canonical(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def run_bare(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process that can import the standard library and the core packages alone."""
    blocked = modules_outside_core()
    assert {"transformers", "pydantic", "typer", "scipy", "datasets", "yaml", "rich", "opt_einsum"} <= set(blocked)
    block = BLOCK.replace("BLOCKED", repr(blocked))
    code = f"{block}exec(compile({code!r}, 'code', 'exec'), {{'__name__': '__main__'}})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_methods_take_a_step_with_core_packages_only() -> None:
    done = run_bare((ROOT / "scripts" / "smoke.py").read_text())
    assert done.stdout.split() == [
        "came",
        "demo",
        "tensorize",
        "quantize_training",
        "quantize_weights",
        "rank_adapter",
        "densify",
        "laws",
    ], done.stderr


def test_methods_import_with_core_packages_only() -> None:
    """Only Triton kernels and modules about transformers need more."""
    source = ROOT / "src" / "scantling"
    packages = ("comm", "laws", "numerics", "optim", "precision", "tensor")
    files = sorted(path for name in packages for path in (source / name).rglob("*.py"))
    names = [".".join(path.relative_to(source.parent).with_suffix("").parts) for path in files]
    done = run_bare(IMPORT_ALL.replace("NAMES", repr(names)))
    missing = json.loads(done.stdout)
    kernels = {name for name, package in missing.items() if package == "triton" and "kernels" in name}
    assert {name: package for name, package in missing.items() if name not in kernels} == {
        "scantling.tensor.lora": "peft",
        "scantling.tensor.pretrained": "transformers",
        "scantling.tensor.resize": "transformers",
    }


def test_name_of_an_extra_says_how_to_install_it() -> None:
    done = run_bare(EXTRAS)
    assert done.stdout.splitlines() == [f'run: pip install "scantling[{name}]"' for name in ("train", "train", "hf")]


@pytest.mark.parametrize("arguments", [["--help"], ["train", "recipe.yaml"]])
def test_command_without_the_trainer_names_the_extra_to_install(arguments: list[str]) -> None:
    done = run_bare(f"from scantling.cli import main\nmain({arguments})")
    assert done.returncode == 1
    assert 'pip install "scantling[train]"' in done.stderr
    assert len(done.stderr.splitlines()) == 1
