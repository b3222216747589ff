"""Run the long tests of exchange and resume, and record the outcome of each.

    python benchmarks/endurance.py exchange      # about half an hour on two cores
    python benchmarks/endurance.py kills         # about an hour on two cores
    python benchmarks/endurance.py local-steps   # about six minutes on two cores
    python benchmarks/endurance.py shards        # about a quarter of an hour on two cores

`exchange`: 200 steps over a distributed checkpoint to the same bits, plain and with FSDP2 shards; 2,000 steps with
equal hashes for each exchange strategy; kills at 20 random steps, resumed to the same bits; replicas that are killed,
stopped and join again. `kills`: two SIGKILLs at random moments in each of the 32 combinations of dense or TT layers
with a size target, AdamW or CAME, all-reduce or DeMo, fp32 or int8, and one or two processes; 20 SIGKILLs of sharded
replicas that exchange momentum; each run resumes and ends with the same bits. `local-steps`: the same after 20 SIGKILLs
of two and four replicas in local steps, and of two replicas of two processes each.

`shards`: runs of all methods with and without shards, on 2 to 4 processes, and resumed from the middle. `loss` and
`grad_norm` are the largest relative differences over 8 steps, `weights` the largest absolute difference of a weight
after them; a step changes a weight by about its learning rate, 1e-3 or 3e-3.

The tests are marked slow; this script runs them and records how each one ended.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from dated import dated, write

ROOT = Path(__file__).parents[1]
KILLS = "tests/trainer/training/test_kill_matrix.py"
SUITES: dict[str, tuple[str, ...]] = {
    "exchange": (
        "tests/comm/test_processes.py::test_rank_tensors_resume_bitwise_from_distributed_checkpoint",
        "tests/comm/test_processes.py::test_replicas_stay_equal_for_two_thousand_steps",
        "tests/trainer/training/test_restarts.py::test_run_killed_at_random_steps_ends_with_the_same_bits",
        "tests/trainer/training/test_resume.py::test_kill_and_resume_is_bitwise",
        "tests/comm/transport/test_failures.py",
        "tests/comm/transport/test_torchft.py",
    ),
    "kills": (
        f"{KILLS}::test_two_kills_at_random_moments_end_with_the_same_bits",
        f"{KILLS}::test_twenty_kills_of_sharded_replicas_end_with_the_same_bits",
    ),
    "local-steps": (f"{KILLS}::test_twenty_kills_in_local_steps_end_with_the_same_bits",),
    "shards": ("tests/trainer/training/test_sharded_runs.py::test_sharded_run_equals_unsharded_and_resumes_bitwise",),
}


def run_tests(path: str) -> list[dict[str, str | None]]:
    """Run the tests of one path and return the name, the outcome and the recorded properties of each."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", path, f"--junitxml={report}", "-o", "junit_family=xunit1"]
        subprocess.run(command, cwd=ROOT, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    outcomes: list[dict[str, str | None]] = []
    for case in cases:
        bad = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        words = {} if bad is None else {"message": bad.get("message")}
        name = f"{case.get('classname')}::{case.get('name')}"
        outcomes.append({"test": name, "outcome": "passed" if bad is None else bad.tag, **words})
        outcomes[-1] |= {each.get("name", ""): each.get("value") for each in case.iter("property")}
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    suite = parser.parse_args().suite
    outcomes: list[dict[str, str | None]] = []
    paths = SUITES[suite]
    for number, path in enumerate(paths, start=1):
        outcomes += run_tests(path)
        print(write(dated(__file__, tests=outcomes, left=paths[number:]), f"endurance-{suite}"))
    return int(any(each["outcome"] in ("failure", "error") for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
