"""Test of the how-to for two machines, followed literally in two network namespaces."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import WIDE, records, tiny_recipe, write_recipe

ROOT = Path(__file__).resolve().parents[2]
RATE_MBIT = 100

pytestmark = pytest.mark.dist


def commands() -> list[str]:
    """Return the commands of the how-to for the first and the second machine."""
    text = (ROOT / "docs" / "guides" / "several-machines.md").read_text(encoding="utf-8")
    how_to = text[text.index("## Two machines over the internet") :]
    return [line.strip() for line in how_to.splitlines() if line.strip().startswith("torchrun --nnodes 2 ")]


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import network

    reason = network.why_not()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(network, "NETWORK", re.search(r"--master-addr (\S+)\.1 ", commands()[0])[1])
    with network.namespaces(2, f"{RATE_MBIT}mbit") as names:
        yield names


def on_both(machines: list[str], lines: list[str], folder: Path) -> list[str]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    started = []
    for machine, line in zip(machines, lines, strict=True):
        words = [sys.executable, "-m", "torch.distributed.run", *shlex.split(line)[1:]]
        started.append(
            subprocess.Popen(
                ["ip", "netns", "exec", machine, *words],
                env=environment,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        found = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, text in zip(started, found, strict=True):
        assert process.returncode == 0, text
    return found


def test_doctor_and_a_run_between_two_machines(machines: list[str], tmp_path: Path) -> None:
    lines = commands()
    assert len(lines) == 2
    first, _ = on_both(machines, lines, tmp_path)
    measured = re.search(r"^\W*0\W+1\W+[\d.]+ ms\W+([\d,]+) Mbit/s", first, re.MULTILINE)
    assert measured is not None, first
    assert 0.5 * RATE_MBIT < float(measured[1]) < 1.05 * RATE_MBIT
    recipe = {**tiny_recipe(tmp_path, comm={"name": "demo"}), "optim": {"name": "sign", "lr": 1e-3}}
    recipe["model"]["overrides"] |= WIDE
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    train = f"scantling train {path} --run-dir {tmp_path / 'run'}"
    on_both(machines, [line.replace("scantling doctor", train) for line in lines], tmp_path)
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, 9))
    assert records(tmp_path / "run")[-1]["wire_bytes"] > 0
