"""The file of a benchmark's results: what was run, when, on what, and the raw numbers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def dated(script: str, **found: Any) -> dict[str, Any]:
    """Results under a head: the command, the date, versions and hardware.

    Args:
        script: `__file__` of the script that runs.
        found: what it has to say.
    """
    from scantling.training.rundir import environment

    command = ["python", f"benchmarks/{Path(script).name}", *sys.argv[1:]]
    return {"command": command, "date": time.strftime("%Y-%m-%d"), **environment(), **found}


def write(report: Mapping[str, Any], name: str, out: Path | None = None) -> Path:
    """Write a report from `dated`.

    Args:
        report: with its date.
        name: of the file in the folder of results, before the date.
        out: another file.

    Returns:
        Where it is.
    """
    path = out or RESULTS / f"{name}-{report['date']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return path
