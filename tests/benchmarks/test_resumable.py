"""Tests of the benchmarks' runs: identified by their specification, swept outwards, never repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
INFINITE = float("inf")


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([None, None, None, None], 2),
        ([None, None, 1.0, None], 1),
        ([None, 2.0, 1.0, None], 3),
        ([None, 2.0, 1.0, 1.5], None),
        ([None, 0.5, 1.0, None], 0),
        ([0.4, 0.5, 1.0, None], None),
        ([None, None, INFINITE, None], 1),
        ([None, INFINITE, INFINITE, None], 0),
        ([None, 1.0, 1.0, None], 0),
    ],
)
def test_sweep_extends_outward_from_the_best(results: list[float | None], expected: int | None) -> None:
    from resumable import Grid

    assert Grid([1e-3, 2e-3, 4e-3, 8e-3], start=2).next(results) == expected


@pytest.mark.parametrize("minimum", range(7))
@pytest.mark.parametrize("start", range(7))
def test_sweep_finds_the_minimum_of_a_bowl(minimum: int, start: int) -> None:
    from resumable import Grid

    grid = Grid([2.0**power for power in range(7)], start)
    results: list[float | None] = [None] * 7
    while (index := grid.next(results)) is not None:
        assert results[index] is None
        assert grid.best(results) is None
        results[index] = float((index - minimum) ** 2)
    assert grid.best(results) == grid.rates[minimum]


def test_best_rate_at_an_end_of_the_grid_is_marked() -> None:
    from resumable import Grid

    grid = Grid([1e-3, 2e-3, 4e-3, 8e-3], start=2)
    assert "at an end of the grid" in grid.row("adamw", [None, None, 1.0, 0.9])
    assert "at an end of the grid" not in grid.row("adamw", [None, 0.9, 0.8, 0.9])
    assert "at an end of the grid" not in grid.row("adamw", [None, None, 0.8, None]), "it has not ended"


@pytest.mark.parametrize(
    ("mean", "width", "expected"),
    [
        (-0.5, 0.2, "met, by the interval met"),
        (-0.5, 0.9, "met, by the interval open"),
        (-1.5, 0.9, "MISSED, by the interval open"),
        (-1.5, 0.2, "MISSED, by the interval MISSED"),
    ],
)
def test_verdict_uses_the_interval(mean: float, width: float, expected: str) -> None:
    from resumable import verdict_on

    assert verdict_on(mean, width, -1.0) == expected


def test_no_rate_is_best_where_every_run_failed() -> None:
    from resumable import Grid

    assert Grid([1.0, 2.0], start=0).best([INFINITE, INFINITE]) is None


@pytest.mark.parametrize(
    ("target", "expected"),
    [(3.0, 10.0), (5.0, 10.0), (2.5, 15.0), (2.0, 20.0), (1.5, 35.0), (1.0, 40.0), (0.9, None)],
)
def test_steps_to_reach_interpolates(target: float, expected: float | None) -> None:
    from resumable import steps_to_reach

    curve = [(10, 3.0), (20, 2.0), (30, 2.0), (40, 1.0)]
    assert steps_to_reach(curve, target) == expected


def test_steps_to_reach_takes_the_first_time() -> None:
    from resumable import steps_to_reach

    assert steps_to_reach([(10, 3.0), (20, 1.0), (30, 2.0), (40, 0.0)], 1.5) == 17.5


def test_interval_matches_students_t() -> None:
    from resumable import interval

    mean, width = interval([1.0, 2.0, 3.0])
    assert mean == pytest.approx(2.0)
    assert width == pytest.approx(4.3027 / 3**0.5, rel=1e-4)  # the 97.5 % quantile for two degrees of freedom
    assert interval([1.0]) == (1.0, INFINITE)


def test_finished_run_is_skipped_and_failed_run_repeated(tmp_path: Path) -> None:
    from resumable import Ledger, spec_key

    script = tmp_path / "script.py"
    script.write_text(
        f"import json, sys; sys.path.insert(0, {str(BENCHMARKS)!r}); from resumable import spec_key\n"
        "spec = json.loads(sys.argv[2])\n"
        "assert sys.argv[1] == 'one' and 'bad' not in spec\n"
        "print('noise'); print(json.dumps({'key': spec_key(spec), **spec, 'eval_loss': 2.0}))\n"
    )
    ledger = Ledger(tmp_path / "results" / "lines.jsonl", script)
    good, bad = {"lr": 1.0}, {"lr": 1.0, "bad": True}
    assert ledger.lines() == {}
    assert not ledger.run(bad)
    assert ledger.run(good)
    assert ledger.lines() == {spec_key(good): {"key": spec_key(good), "lr": 1.0, "eval_loss": 2.0}}
    script.unlink()  # a run that has its line is not repeated
    assert ledger.run(good)
    assert not ledger.run(bad)


def test_published_results_keep_their_keys() -> None:
    """A change of the keys in a specification would repeat every training run."""
    import optim_quality as quality
    from resumable import spec_key

    assert spec_key(quality.run_spec("python", "adamw", 4e-3, 0)) == "8caeb431f95bdd4b"
    assert spec_key(quality.run_spec("python", "came", 4e-3, 0)) == "429c80067e209835"


def test_every_small_recipe_is_valid() -> None:
    import optim_quality as quality
    import optim_tasks as tasks
    from peers import register

    from scantling.trainer.recipe import check_recipe

    register()
    specs = [tasks.run_spec(t, n, 1e-3, 0, data="python") for t, s in tasks.SETTINGS.items() for n in s.compared]
    for recipe in [tasks.build_recipe(spec) for spec in specs]:
        assert recipe["train"]["steps"] // recipe["train"]["eval_every"] >= tasks.POINTS
        check_recipe(recipe, "tasks")
    for name in quality.LONGER:
        check_recipe(quality.build_recipe(quality.longer_spec("python", name, 1e-3)), "longer")


def test_run_stopped_by_a_signal_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from small_models import train_line

    import scantling as sc
    from scantling.trainer.training.run import RunResult

    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setattr(sc, "train", lambda *_, **__: RunResult(folder, "stopped", 3, {}))
    with pytest.raises(SystemExit, match="after step 3"):
        train_line({"lr": 1.0}, {}, run_dir=folder)
    assert folder.exists()  # kept to resume from


def test_sweep_length() -> None:
    from resumable import Grid

    rates = [1e-3, 2e-3, 4e-3, 8e-3, 16e-3]
    around = [None, 1.0, 0.9, 1.0, None]
    assert Grid(rates, start=2).next(around) is None
    assert Grid(rates, start=2, least=4).next(around) == 0
    assert Grid(rates, start=2, least=4).next([1.1, *around[1:]]) is None
