"""Compare sharded with unsharded runs for all methods, and write the worst differences.

    python benchmarks/sharded_matrix.py

Each case of `MATRIX` in tests/trainer/training/test_sharded_runs.py trains 8 steps on one mesh of processes and without
shards, resumes from its middle, and fails if the results differ by more than its tolerance. `loss` and `grad_norm` are
the largest relative differences over all steps, `weights` the largest absolute difference of a weight after the last
step. Each step changes a weight by about the learning rate, 1e-3 or 3e-3.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from dated import dated, write

ROOT = Path(__file__).parents[1]
TEST = "tests/trainer/training/test_sharded_runs.py"
NAME = "test_sharded_run_equals_unsharded_and_resumes_bitwise"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"{TEST}::{NAME}", f"--junitxml={path}"]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        cases = [read_case(case) for case in ET.parse(path).iter("testcase")]
    for case in cases:
        values = (f"{key} {case[key]:.1e}" for key in ("loss", "grad_norm", "weights") if key in case)
        print(f"{case['name']:40} {case.get('mesh', ''):6} {'passed' if case['passed'] else 'FAILED'} ", *values)
    print("written:", write(dated(__file__, results=cases), "sharded-matrix"))
    return status


def read_case(case: ET.Element) -> dict[str, Any]:
    """Return the name of a test's case, whether it passed, and its recorded properties."""
    found: dict[str, Any] = {
        "name": case.get("name", "").partition("[")[2].rstrip("]"),
        "passed": case.find("failure") is None and case.find("error") is None,
    }
    for each in case.iter("property"):
        name, value = each.get("name", ""), each.get("value", "")
        found[name] = value if name == "mesh" else float(value)
    return found


if __name__ == "__main__":
    sys.exit(main())
