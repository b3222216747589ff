"""Runs on a machine that seems to have hardly any memory."""

from __future__ import annotations

from scantling.trainer.planning.machine import MachineMemory
from scantling.trainer.training import build


def without_room() -> None:
    build.host_memory = lambda: MachineMemory("this machine", total=1000, available=500)
