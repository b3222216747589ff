"""Tests of the comparison of runs, for people and for programs."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from scantling.errors import RunError
from scantling.files import write_atomic
from scantling.trainer.reporting.compare import compare_rows, compare_table, write_compare
from scantling.trainer.reporting.runs import Run, distinct_names, read_run, rename_duplicates
from tests.trainer.reporting.fake import PARAMETERS, make_run


def printed(runs: list[Run], width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    console.print(compare_table(runs))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def pair(tmp_path: Path) -> list[Run]:
    dense = make_run(tmp_path / "dense", name="dense", steps=40)
    lean = make_run(tmp_path / "lean", name="lean", steps=40, optim="came", speed=0.8, floor=2.0)
    return [read_run(dense), read_run(lean)]


def test_compare_rows_are_relative_to_first_run(pair: list[Run]) -> None:
    rows = {row.label: row for row in compare_rows(pair)}
    state = rows["optimizer state"]
    assert state.values == ("9.02 MiB", "4.62 MiB")
    assert (state.changes, state.better) == (("×0.513",), (True,))
    assert rows["parameters"].changes == ("same",)
    assert rows["parameters"].better == (None,)
    speed = rows["tokens per second"]
    assert speed.changes == ("×0.800",)
    assert speed.better == (False,)
    loss = rows["held-out loss (nats)"]
    difference = pair[1].metric("eval_loss") - pair[0].metric("eval_loss")  # type: ignore[operator]
    assert loss.changes == (f"{difference:+.4f}",)
    assert loss.better == (difference < 0,)
    assert "accuracy" not in rows
    assert "energy, first process (J)" not in rows


def test_compare_table_of_two_runs_has_change_column(pair: list[Run]) -> None:
    lines = printed(pair).splitlines()
    assert lines[0].split() == ["dense", "lean", "change"]
    assert any(line.split() == ["optimizer", "state", "9.02", "MiB", "4.62", "MiB", "×0.513"] for line in lines)


def test_compare_table_of_three_runs_has_changes_in_cells(pair: list[Run], tmp_path: Path) -> None:
    third = read_run(make_run(tmp_path / "third", name="[bold]third[/bold]", steps=10, evaluated=False))
    text = printed([*pair, third], width=140)
    assert "4.62 MiB (×0.513)" in text
    assert "change" not in text
    assert "[bold]third[/bold]" in text, "names are text, not markup"
    held_out = next(line for line in text.splitlines() if line.startswith("held-out loss"))
    assert held_out.rstrip().endswith("–")


def test_compare_table_of_one_run_has_no_changes(pair: list[Run]) -> None:
    assert printed(pair[:1]).splitlines()[0].split() == ["dense"]


def test_write_compare_contents(pair: list[Run], tmp_path: Path) -> None:
    path = write_compare(pair, tmp_path / "out" / "deep")
    assert path == tmp_path / "out" / "deep" / "compare.json"
    dense, lean = json.loads(path.read_text(), parse_constant=pytest.fail)["runs"]
    assert (dense["name"], lean["name"]) == ("dense", "lean")
    assert dense["num_parameters"] == PARAMETERS
    assert isinstance(dense["num_parameters"], int)
    assert isinstance(dense["weight_bytes"], int)
    assert isinstance(dense["train_loss"], float)
    names = (
        "gradient_bytes optimizer_state_bytes wire_bytes tokens_per_s step_s peak_memory_bytes eval_loss bits_per_byte"
    )
    assert all(isinstance(lean[name], int | float) for name in names.split())
    assert lean["added_memory_bytes"] == lean["peak_memory_bytes"] - lean["base_memory_bytes"]
    assert dense["accuracy"] is None
    assert [entry.name for entry in path.parent.iterdir()] == ["compare.json"]


def test_write_compare_writes_nan_as_null(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", steps=3)
    result = json.loads((path / "result.json").read_text())
    (path / "result.json").write_text(json.dumps(result | {"eval_loss": float("nan"), "extra": {"a": [float("inf")]}}))
    written = write_compare([read_run(path)], tmp_path).read_text()
    entry = json.loads(written, parse_constant=pytest.fail)["runs"][0]
    assert entry["eval_loss"] is None
    assert entry["extra"] == {"a": [None]}


def test_write_compare_keeps_old_file_on_error(
    pair: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_compare(pair, tmp_path)
    before = path.read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scantling.files.os.fsync", full)
    with pytest.raises(RunError, match="No space left on device"):
        write_compare(pair[:1], tmp_path)
    assert path.read_text() == before
    assert not list(tmp_path.glob("*.tmp"))


def test_read_run_refuses_unusable_paths(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot write"):
        write_atomic(tmp_path / "file" / "x.html", "text")
    write_atomic(tmp_path / f"{'x' * 250}.txt", "a run in \udcff")
    assert (tmp_path / f"{'x' * 250}.txt").read_text() == "a run in \\udcff"


def test_rename_duplicates_names_runs_of_one_recipe_after_their_folders(tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "first", tmp_path / "b" / "first", tmp_path / "second"]
    runs = [read_run(make_run(folder, name="recipe", steps=4)) for folder in folders]
    other = read_run(make_run(tmp_path / "other", name="another", steps=4))
    assert [run.name for run in rename_duplicates([*runs, other])] == ["a/first", "b/first", "second", "another"]
    assert [run.name for run in rename_duplicates([runs[0], runs[2]])] == ["first", "second"]
    assert [run.name for run in rename_duplicates([runs[0], other])] == ["recipe", "another"]


@pytest.mark.parametrize(
    ("names", "paths", "expected"),
    [
        (["x", "x"], ["r/x", "r/x"], ["x", "x-2"]),
        (["x", "x", "x-2"], ["r/x", "r/x", "r/y"], ["x", "x-3", "x-2"]),
        (["b", "x", "x"], ["r/a", "s/b", "t/c"], ["r/a", "s/b", "c"]),
        (["x", "x"], ["a/b/c", "d/b/c"], ["a/b/c", "d/b/c"]),
    ],
)
def test_distinct_names(names: list[str], paths: list[str], expected: list[str]) -> None:
    assert distinct_names(names, [Path(path) for path in paths]) == expected


@pytest.mark.parametrize(
    ("steps", "label"),
    [
        ((40, 40), "train loss (last 10 steps)"),
        ((40, 4), "train loss (last 4 to 10 steps)"),
        ((3, 3), "train loss (last 3 steps)"),
        ((1, 1), "train loss (last step)"),
    ],
)
def test_compare_rows_label_counts_averaged_steps(tmp_path: Path, steps: tuple[int, int], label: str) -> None:
    runs = [read_run(make_run(tmp_path / str(i), steps=count, status=None)) for i, count in enumerate(steps)]
    row = next(row for row in compare_rows(runs) if row.label.startswith("train loss"))
    assert row.label == label
    losses = runs[0].column("loss")
    assert row.values[0] == f"{losses[-10:].mean():.4f}"
    assert runs[0].metric("last_step_loss") == losses[-1]
