"""Write the result file of a benchmark: command, date, machine and raw results."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def dated(script: str, **found: Any) -> dict[str, Any]:
    """Return results with a header: command, date, versions and hardware.

    Args:
        script: `__file__` of the running script.
        found: the results.
    """
    from scantling.trainer.training.run_dir import environment

    command = ["python", f"benchmarks/{Path(script).name}", *sys.argv[1:]]
    return {"command": command, "date": time.strftime("%Y-%m-%d"), **environment(), **found}


def write(report: Mapping[str, Any], name: str, out: Path | None = None) -> Path:
    """Write a report made by `dated` and return its path.

    Args:
        report: the report, with its date.
        name: name of the file in the folder of results, before the date.
        out: another file to write instead.

    Returns:
        The path of the report.
    """
    path = out or RESULTS / f"{name}-{report['date']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return path
