"""What an exchange has to endure, by the tests of it: how each of them ended.

    python benchmarks/comm_endurance.py

200 steps over a distributed checkpoint to the same bits, plain and in shards of FSDP2; 2,000 steps with equal hashes,
by each way to exchange; kills at 20 random steps, resumed to the same bits; replicas that are killed, stopped and come.
About half an hour on two cores; the tests are marked slow, and this is how their outcome is written down.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from dated import dated, write

ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/comm/test_processes.py::test_steps_across_a_distributed_checkpoint",
    "tests/comm/test_processes.py::test_replicas_are_alike_for_two_thousand_steps",
    "tests/training/test_restarts.py::test_killed_at_random_steps_it_ends_with_the_same_bits",
    "tests/training/test_resume.py::test_kill_and_resume_is_bitwise",
    "tests/comm/test_faults.py",
    "tests/comm/test_managed.py",
)


def outcomes(test: str) -> list[dict[str, str | None]]:
    """Run the cases of one test, and say of each how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", test, f"--junitxml={report}"]
        subprocess.run(command, cwd=ROOT, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    found: list[dict[str, str | None]] = []
    for case in cases:
        bad = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        words = {} if bad is None else {"message": bad.get("message")}
        name = f"{case.get('classname')}::{case.get('name')}"
        found.append({"test": name, "outcome": "passed" if bad is None else bad.tag, **words})
    return found


def main() -> int:
    found: list[dict[str, str | None]] = []
    for test in TESTS:
        found += outcomes(test)
        print(write(dated(__file__, tests=found, left=TESTS[TESTS.index(test) + 1 :]), "comm-endurance"))
    return int(any(each["outcome"] in ("failure", "error") for each in found))


if __name__ == "__main__":
    sys.exit(main())
