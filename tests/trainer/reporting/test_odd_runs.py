"""Tests of run directories with damaged, hostile or very large files: a report or one clear error, no traceback."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from scantling.errors import ScantlingError, UserError
from scantling.trainer.reporting import charts, metrics
from scantling.trainer.reporting.compare import compare_table, write_compare
from scantling.trainer.reporting.html import write_report
from scantling.trainer.reporting.metrics import read_metrics
from scantling.trainer.reporting.runs import Run, read_run
from scantling.trainer.sweeping import evaluations
from tests.runs import NO_CHARTS
from tests.trainer.reporting.fake import make_run

ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    3,
    2**53,
    10**400,
    1e300,
    1e308,
    -1e308,
    5e-324,
    float("nan"),
    float("inf"),
    "high",
    "\ud800<b>",
    "a\x00b\nc",
    [],
    [1, "x", None],
    {},
    {"a": 1},
    {"\udfff": ["\ud800"]},
]


def show(*found: Run, folder: Path) -> str:
    """Write all output of report and compare, and return the page."""
    compare_table(found)
    json.loads(write_compare(found, folder).read_text())
    return write_report(found, folder / "report.html").read_text(encoding="utf-8")


def change_records(run: Path, **changes: Any) -> None:
    lines = [json.loads(line) | changes for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "result.json").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("time", 1e300),
        ("time", -1e300),
        ("loss", 1e308),
        ("loss", -1e308),
        ("eval_loss", 1e308),
        ("tokens", 1e308),
        ("tokens", -5),
        ("step_s", 1e308),
        ("forward_s", -1e308),
        ("grad_norm", 1e308),
        ("peak_memory_bytes", 1e308),
        ("base_memory_bytes", -1e308),
        ("ranks", {"layer": 5}),
        ("ranks", {"layer": ["a"], "\ud800": [1, 4, 1]}),
        ("ranks", [1, 2]),
        ("memory_source", {"a": 1}),
    ],
)
def test_report_shows_odd_records(tmp_path: Path, key: str, value: Any) -> None:
    odd, plain = make_run(tmp_path / "odd", steps=30), make_run(tmp_path / "plain", steps=30)
    change_records(odd, **{key: value})
    page = show(read_run(odd), read_run(plain), folder=tmp_path)
    assert page.count("<svg") >= 4


def test_report_survives_changing_rank_layers(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", steps=4, status=None)
    with open(path / "metrics.jsonl", "a") as file:
        for step, ranks in ((5, {"a": [1, 8, 1], "b": [1, 8, 1]}), (6, {"a": [1, 4, 1]}), (7, {"a": [1, 2, 1]})):
            file.write(json.dumps({"step": step, "loss": 1.0, "ranks": ranks}) + "\n")
    assert ">Ranks<" in show(read_run(path), folder=tmp_path)


@pytest.mark.parametrize("notes", [5, 1.5, True, "a note", {"a": 1}, [1, None, "kept", ["x"]]])
def test_report_ignores_non_text_plan_notes(tmp_path: Path, notes: Any) -> None:
    path = make_run(tmp_path / "run", steps=3)
    plan = json.loads((path / "plan.json").read_text()) | {"notes": notes}
    (path / "plan.json").write_text(json.dumps(plan))
    assert ("kept" in show(read_run(path), folder=tmp_path)) == isinstance(notes, list)


def test_read_run_accepts_byte_order_marks(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", steps=3)
    expected = read_run(path).plan
    (path / "plan.json").write_text("\ufeff" + (path / "plan.json").read_text())
    assert read_run(path).plan == expected


@pytest.mark.parametrize("step", ["1" + "0" * 400, "1" + "0" * 5000, "-3", "1e300", "1.0", "true", '"5"', str(2**53)])
def test_read_run_refuses_odd_steps(tmp_path: Path, step: str) -> None:
    path = make_run(tmp_path / "run", steps=2)
    with open(path / "metrics.jsonl", "a") as file:
        file.write(f'{{"step": {step}, "loss": 1.0}}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 3: not a record of a step"):
        read_run(path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "plan.json", "result.json", "environment.json", "recipe.yaml"])
@pytest.mark.parametrize("content", ["deep", "long number", "binary", "folder", "pipe"])
def test_read_run_refuses_damaged_files(tmp_path: Path, name: str, content: str) -> None:
    path = make_run(tmp_path / "run", steps=2)
    file = path / name
    file.unlink()
    if content == "deep":
        file.write_text('{"step": 1, "a": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    elif content == "long number":
        file.write_text('{"step": ' + "1" * 100_000 + "}\n")
    elif content == "binary":
        file.write_bytes(bytes(range(256)) * 4)
    elif content == "folder":
        file.mkdir()
    else:
        os.mkfifo(file)
    with pytest.raises(UserError) as caught:
        read_run(path)
    assert "run" in str(caught.value)
    assert len(str(caught.value)) < 600


def test_report_replaces_lone_surrogates(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", steps=3)
    result = json.loads((path / "result.json").read_text()) | {"name": "a\ud800b"}
    (path / "result.json").write_text(json.dumps(result))
    run = read_run(path)
    assert run.name == "a\ufffdb"
    assert "a\ufffdb" in show(run, read_run(make_run(tmp_path / "other", steps=3)), folder=tmp_path)


def test_read_metrics_refuses_a_very_long_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_MAX_LINE", 1 << 20)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "a": "' + b"x" * (2 << 20) + b'"}\n')
    with pytest.raises(UserError, match="line 2: longer than 1 MiB"):
        read_metrics(path)


def test_metrics_are_exact_over_blocks_and_resumes(tmp_path: Path) -> None:
    """There are more records than a block holds, keys that appear late, and resumes to earlier blocks."""
    generator = random.Random(0)
    by_step: dict[int, dict[str, Any]] = {}
    path = tmp_path / "metrics.jsonl"
    step = 0
    with open(path, "w") as file:
        for index in range(5000):
            step = step + 1 if generator.random() > 0.002 else generator.randint(1, step + 1)
            record: dict[str, Any] = {"step": step, "loss": generator.random(), "step_s": generator.random()}
            if index > 1500:
                record["grad_norm"] = generator.random()
            if step % 100 == 0:
                record["eval_loss"] = generator.random()
            by_step = {key: value for key, value in by_step.items() if key < step} | {step: record}
            file.write(json.dumps(record) + "\n")
    records = list(by_step.values())
    metrics = read_metrics(path)
    columns = metrics.columns()
    assert columns["step"].tolist() == list(by_step)
    for key in ("loss", "step_s", "grad_norm", "eval_loss"):
        expected = np.array([record.get(key, np.nan) for record in records])
        np.testing.assert_array_equal(columns[key], expected)
    summary = metrics.summarize()
    assert summary["step"] == step
    assert summary["eval_loss"] == next(r["eval_loss"] for r in reversed(records) if "eval_loss" in r)
    assert summary["train_loss"] == np.mean([r["loss"] for r in records[-10:]])
    assert summary["step_s"] == np.median([r["step_s"] for r in records[len(records) // 10 :]])


def test_sent_bytes_are_a_mean_over_the_steps(tmp_path: Path) -> None:
    """The last step, in which replicas always exchange, says little about local steps."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "wire_bytes": {0 if step % 4 else 100}}}\n' for step in range(1, 9)))
    assert read_metrics(path).summarize()["wire_bytes"] == 25
    path.write_text('{"step": 1}\n')
    assert read_metrics(path).summarize()["wire_bytes"] is None


def test_metrics_null_evaluation_keeps_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "eval_loss": 2.0}\n{"step": 2, "eval_loss": null}\n{"step": 3}\n')
    assert read_metrics(path).summarize()["eval_loss"] is None


def test_charts_keep_extremes_of_long_runs() -> None:
    values = np.ones(200_000)
    values[[777, 123_456]] = 50.0, -7.0
    shown = charts._extremes(values)
    assert len(shown) <= 1002
    assert {0, 777, 123_456, 199_999} <= set(shown.tolist())


def test_smooth_of_long_runs_is_a_moving_mean() -> None:
    values = np.sin(np.arange(100_000) / 9000) + np.random.default_rng(0).standard_normal(100_000)
    values[::7] = np.nan
    smoothed = charts.smooth(values)
    half = len(values) // 50
    for middle in (5000, 50_000, 95_000):
        window = values[middle - half : middle + half + 1]
        assert smoothed[middle] == pytest.approx(np.nanmean(window), abs=5e-3)


@pytest.mark.slow
def test_report_of_a_million_steps_is_small_and_fast(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", steps=200, status=None)
    lines = [line.split(",", 1)[1] for line in (path / "metrics.jsonl").read_text().splitlines()]
    with open(path / "metrics.jsonl", "w") as file:
        file.writelines(f'{{"step": {step},{lines[step % 200]}\n' for step in range(1, 1_000_001))
    code = (
        "import resource, sys; from scantling.cli import main; sys.argv[1:] = ['report', sys.argv[1]]\n"
        "try: main()\n"
        "finally: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, resource.getrusage(0).ru_utime)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    peak_kib, seconds = map(float, done.stdout.split()[-2:])
    assert peak_kib < 500 * 1024
    assert seconds < 30  # 7 s on an idle machine


def mutate(run: Path, generator: random.Random) -> None:
    """Damage one file of a run directory in one way."""
    name = generator.choice(["metrics.jsonl", "plan.json", "result.json", "environment.json", "recipe.yaml"])
    file = run / name
    content = file.read_bytes()
    if generator.random() < 0.3:  # bytes
        at = generator.randrange(len(content))
        cut = generator.choice([0, 1, 5, 200])
        content = content[:at] + generator.randbytes(generator.choice([0, 1, 3])) + content[at + cut :]
        file.write_bytes(content)
        return
    if name == "recipe.yaml":
        value = yaml.safe_load(content)
        replace(value, generator)
        file.write_text(json.dumps(value))  # JSON is YAML
        return
    values = [json.loads(line) for line in content.splitlines()] if name == "metrics.jsonl" else [json.loads(content)]
    for _ in range(generator.choice([1, 1, 5])):
        replace(generator.choice(values), generator)
    file.write_text("".join(json.dumps(value) + "\n" for value in values))


def replace(value: Any, generator: random.Random) -> None:
    """Replace a random value somewhere in nested dictionaries and lists."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = generator.choice(keys)
        if isinstance(value[key], dict | list) and value[key] and generator.random() < 0.7:
            value = value[key]
            continue
        value[key] = copy.deepcopy(generator.choice(ODD))
        return


def test_damaged_runs_raise_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`SCANTLING_FUZZ=N` tries N mutations instead of a few."""
    monkeypatch.delenv(NO_CHARTS, raising=False)
    generator = random.Random(7)
    plain = make_run(tmp_path / "plain", steps=6)
    ranks = [{"step": 6 + i, "loss": 1.0, "ranks": {"a": [1, 9 - i, 1], "b": [1, 8, 8 - i, 1]}} for i in (1, 2, 3)]
    with open(plain / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in ranks)
    files = {file.name: file.read_bytes() for file in plain.iterdir()}
    files["result.json"] = b'{"name": "odd", "status": "done", "step": 9, "loss": 1.0}'
    reference = read_run(plain)
    odd = tmp_path / "odd"
    odd.mkdir()
    errors: list[ScantlingError] = []
    trials = int(os.environ.get("SCANTLING_FUZZ", "25"))
    for trial in range(trials):
        for name, content in files.items():
            (odd / name).write_bytes(content)
        mutate(odd, generator)
        try:
            found = read_run(odd)
            show(*([found, reference] if trial % 2 else [found]), folder=tmp_path)
        except ScantlingError as error:
            errors.append(error)
    assert {error.exit_code for error in errors} <= {2}
    assert all(len(str(error)) < 600 for error in errors)
    assert len(errors) < trials


@pytest.mark.parametrize("problem", [PermissionError(13, "Permission denied"), OSError(36, "File name too long")])
def test_read_run_reports_unreadable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: OSError) -> None:
    """Root may read everything, so the test raises the error itself."""
    path = make_run(tmp_path / "run", steps=1)

    def refuse(self: Path) -> bool:
        raise problem

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(UserError, match=f"cannot read .*run: {problem.strerror}"):
        read_run(path)


@pytest.mark.parametrize(
    "stored", ["[1]", "{}", '{"minimal_pairs": 5}', '{"minimal_pairs": {"given": {}}}', "[" * 100_000]
)
def test_missing_evaluations_include_damaged_ones(tmp_path: Path, stored: str) -> None:
    path = make_run(tmp_path / "run", steps=1)
    (path / "after.json").write_text(stored)
    settings = {"minimal_pairs": {}}
    assert evaluations.missing_evaluations(path, settings) == settings
    assert evaluations.stored_metrics(path, settings) == {}
    figures = {"minimal_pairs": "high"}
    (path / "after.json").write_text(json.dumps({"minimal_pairs": {"given": {}, "metrics": figures}}))
    assert evaluations.missing_evaluations(path, settings) == settings
