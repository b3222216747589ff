"""Tests of `scantling fit` as a user types it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.synthetic_runs import kumar_grid, simulate
from scantling.cli import run
from scantling.laws import ChinchillaLaw, PostTrainingLaw, PrecisionLaw


def write(path: Path, columns: dict[str, Any]) -> str:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return str(path)


@pytest.fixture(scope="module")
def chinchilla(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a table of 40 runs with custom column names, in two kinds; the second kind has useless losses."""
    sizes = np.repeat([2e7, 6e7, 2e8, 6e8], 5)
    grid = {"N": sizes, "D": sizes * np.tile([5, 10, 20, 60, 200], 4)}
    runs = simulate(ChinchillaLaw.published(), grid, noise=0.002)
    twice = {name: np.tile(column, 2) for name, column in runs.items()}
    table = {"params": twice["N"], "flops": 6 * twice["N"] * twice["D"], "kind": ["good"] * 20 + ["bad"] * 20}
    return write(tmp_path_factory.mktemp("runs") / "runs.csv", {**table, "final": [*twice["loss"][:20], *range(20)]})


NAMES = ["--column", "N=params", "--column", "C=flops", "--column", "loss=final", "--where", "kind=good"]


def test_fit_prints_constants_intervals_and_errors(
    chinchilla: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fit", chinchilla, *NAMES, "--samples", "20", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for word in ("alpha", "95 % interval", " to ", "hold-out", "worst error", "nats × tokens^beta", "condition"):
        assert word in shown
    found = json.loads((tmp_path / "runs-chinchilla.json").read_text())
    assert found["runs"] == 20
    assert list(found["constants"]) == ["A", "B", "E", "alpha", "beta"]
    E = found["constants"]["E"]
    assert E["interval"][0] < E["value"] < E["interval"][1]
    assert len(found["hold_out"]["by_size"]) == 4
    plot = ElementTree.parse(tmp_path / "runs-chinchilla.svg").getroot()
    assert "20 runs" in str(plot.get("aria-label"))


def test_output_files_keep_the_full_table_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = np.repeat([2e7, 2.00001e7, 2e8, 6e8], 5)
    grid = {"N": sizes, "D": sizes * np.tile([5, 10, 20, 60, 200], 4)}
    table = write(tmp_path / "runs.v1.csv", simulate(ChinchillaLaw.published(), grid, noise=0.002))
    assert run(["fit", table, "--samples", "0", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "runs.v1-chinchilla.svg").exists()
    found = json.loads((tmp_path / "runs.v1-chinchilla.json").read_text())["hold_out"]
    assert list(found["by_size"]) == ["20000000", "20000100", "200000000", "600000000"]


def test_infinite_interval_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B is proportional to tokens^30.7, which exceeds the range of floats in some refits only."""
    N, D = np.repeat([5e7, 1e8, 2e8, 4e8], 5), np.tile([0.95e10, 1e10, 1.05e10, 1.1e10, 1.15e10], 4)
    noise = np.exp(0.001 * np.random.default_rng(0).standard_normal(20))
    loss = (2 + 0.5 * (N / 1e8) ** -0.3 + 0.5 * (D / 1e10) ** -30.7) * noise
    table = write(tmp_path / "runs.csv", {"N": N, "D": D, "loss": loss})
    given = ["fit", table, "--samples", "20", "--fix", "E=2", "--out", str(tmp_path)]
    assert run(given) == 0
    assert " to infinity" in capsys.readouterr().out
    low, high = json.loads((tmp_path / "runs-chinchilla.json").read_text())["constants"]["B"]["interval"]
    assert low > 1e290
    assert high is None


def test_json_output_equals_the_file(chinchilla: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["fit", chinchilla, *NAMES, "--tie", "beta=alpha", "--fix", "E=1.8172", "--samples", "0"]
    assert run([*given, "--json", "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "runs-chinchilla.json").read_text())
    assert found["held"] == {"E": 1.8172, "power": 1.0}
    assert found["constants"]["beta"]["value"] == found["constants"]["alpha"]["value"]
    assert found["constants"]["A"]["interval"] is None


def test_unidentifiable_constant_has_no_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write(tmp_path / "table.csv", simulate(PrecisionLaw.published(), kumar_grid(), noise=0.01))
    assert run(["fit", table, "--law", "kumar", "--samples", "0", "--tie", "beta=alpha", "--out", str(tmp_path)]) == 0
    assert "not identified: gamma_kv, the runs fit equally well with it" in capsys.readouterr().out
    found = json.loads((tmp_path / "table-kumar.json").read_text())["constants"]["gamma_kv"]
    assert found["value"] is found["interval"] is None
    assert "it moves with n_kv" in found["not_identified"]


def test_constant_without_data_has_no_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights trained at 16 bits lose nothing when quantized to 16, so their loss term is not identifiable."""
    sizes = np.repeat([2e7, 6e7, 2e8, 6e8], 5)
    runs = simulate(ChinchillaLaw.published(), {"N": sizes, "D": sizes * np.tile([5, 10, 20, 60, 200], 4)})
    table = write(tmp_path / "table.csv", {**runs, "post": ["int16"] * 20})
    assert run(["fit", table, "--law", "kumar", "--samples", "0", "--out", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["condition_number"] is None
    assert found["constants"]["C_T"]["not_identified"] == "it is not identifiable from these runs"
    assert found["constants"]["alpha"]["value"] == pytest.approx(0.3478, rel=1e-4)


def test_fit_of_post_training_columns_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chinchilla = ChinchillaLaw.published().constants()
    law = PostTrainingLaw.published().with_constants(chinchilla)
    sizes = np.repeat([2e7, 6e7, 2e8, 6e8], 5)
    grid = {"N": sizes, "D": sizes * np.tile([5, 10, 20, 60, 200], 4)}
    losses = {f"post.int{bits}": law.loss(**grid, post=bits) for bits in (3, 4, 6)}
    table = {"precision.weights": [""] * 20, **grid, "loss": law.loss(**grid), "state": ["done"] * 20, **losses}
    path = write(tmp_path / "runs.csv", table)
    given = [
        "fit",
        path,
        "--law",
        "ouyang",
        "--where",
        "state=done",
        "--samples",
        "0",
        "--json",
        "--out",
        str(tmp_path),
    ]
    assert run([*given, "--base", "fit", "--column", "post=post.*"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == 80
    for name in ("k", "gamma_D", "gamma_N", "gamma_post"):
        assert found["constants"][name]["value"] == pytest.approx(law.constants()[name], rel=1e-3)
    assert found["held"] == pytest.approx(chinchilla, rel=1e-3)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--column", "N"], "--column takes NAME=VALUE; given 'N'"),
        (["--where", "kind=good", "--where", "kind=bad"], "--where sets kind twice, to 'good' and 'bad'"),
        (["--column", "N=params", "--column", "N=n"], "--column sets N twice"),
        (["--fix", "E=1", "--fix", "E = 2"], "--fix sets E twice"),
        (["--tie", "beta=alpha", "--tie", "beta=A"], "--tie sets beta twice"),
        (["--fix", "E=low"], "--fix E takes a number; given 'low'"),
        (["--base", "hofmann"], "did you mean 'hoffmann'"),
        (["--law", "kumer"], "did you mean 'kumar'"),
        ([], "no column 'N'"),
    ],
)
def test_fit_refuses_bad_arguments(
    chinchilla: str, given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fit", chinchilla, *given]) == 2
    assert words in capsys.readouterr().err


def test_fit_does_not_import_torch(chinchilla: str, tmp_path: Path) -> None:
    arguments = ["fit", chinchilla, *NAMES, "--samples", "0", "--out", str(tmp_path)]
    code = f"import sys; from scantling.cli import run; run({arguments!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
