"""Tests of the step from a sweep file to its runs, and of its error messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import scantling as sc
from scantling.errors import RecipeError, UserError
from scantling.trainer.planning.planned_model import planned_model
from scantling.trainer.planning.resolve import resolve_run
from scantling.trainer.recipe import load_recipe
from scantling.trainer.sweeping.grid import Case, expand_sweep, select_cases
from scantling.trainer.sweeping.schema import load_sweep
from scantling.trainer.sweeping.table import read_table
from tests.runs import tiny_recipe, write_recipe

ROOT = Path(__file__).parents[3]


def grid(folder: Path, content: dict[str, Any], overrides: tuple[str, ...] = ()) -> list[Case]:
    path = write_recipe(folder / "sweep.yaml", {"base": tiny_recipe(folder), **content})
    return expand_sweep(*load_sweep(path, overrides), str(path))


def faults(folder: Path, content: dict[str, Any]) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        grid(folder, content)
    return [str(fault) for fault in caught.value.faults]


SIZES = {
    "size": [
        {"model.overrides.hidden_size": 32, "optim.lr": 0.01},
        {"model.overrides.hidden_size": 64, "optim.lr": 0.005},
    ]
}


def test_expand_sweep_multiplies_axes_and_linked_settings(tmp_path: Path) -> None:
    found = grid(tmp_path, {"axes": {"train.steps": [4, 8], "train.seed": [0, 1]}, "linked": SIZES})
    assert [case.label for case in found[:3]] == [
        "steps=4 seed=0 hidden_size=32",
        "steps=4 seed=0 hidden_size=64",
        "steps=4 seed=1 hidden_size=32",
    ]
    assert len(found) == len({case.key for case in found}) == 8
    assert list(found[1].values.items()) == [
        ("train.steps", 4),
        ("train.seed", 0),
        ("model.overrides.hidden_size", 64),
        ("optim.lr", 0.005),
    ]
    recipe = found[-1].recipe
    assert (recipe.train.steps, recipe.train.seed, recipe.optim.lr) == (8, 1, 0.005)
    assert recipe.model.overrides["hidden_size"] == 64
    assert recipe.name == found[-1].label


def test_linked_settings_may_set_different_keys(tmp_path: Path) -> None:
    group = [{"tensor": None}, {"tensor.rank": 4}, {"tensor.rank": 4, "optim.lr": 0.01}]
    found = grid(tmp_path, {"linked": {"cores": group}})
    assert [case.label for case in found] == ["tensor=null", "rank=4", "rank=4 lr=0.01"]


def test_case_name_is_a_valid_file_name(tmp_path: Path) -> None:
    found = grid(tmp_path, {"axes": {"data.document_separator": ["<doc>", "\n\n"]}})
    assert [case.recipe.name for case in found] == ["document_separator=<doc>", "document_separator=__"]


def test_leave_out_removes_combinations(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    axes = {"train.steps": [4, 8], "train.seed": [0, 1, 2]}
    found = grid(tmp_path, {"axes": axes, "leave_out": [{"train.steps": 8, "train.seed": [1, 2]}]})
    assert [case.label for case in found] == ["steps=4 seed=0", "steps=4 seed=1", "steps=4 seed=2", "steps=8 seed=0"]
    assert not caplog.records
    grid(tmp_path, {"axes": axes, "leave_out": [{"train.steps": 9}]})
    assert "leave_out matches no combination: {'train.steps': 9}" in caplog.text
    with pytest.raises(UserError, match="leave_out removes all runs"):
        grid(tmp_path, {"axes": axes, "leave_out": [{"train.steps": [4, 8]}]})
    parts = {"linked": {"formats": [{"precision.weights": "int4"}, {"precision.weights": "int4", "train.steps": 5}]}}
    steps = tiny_recipe(tmp_path)["train"]["steps"]  # a combination leaves other settings to the base
    found = grid(tmp_path, {**parts, "leave_out": [{"precision.weights": "int4", "train.steps": steps}]})
    assert [case.label for case in found] == ["weights=int4 steps=5"]
    group = {"formats": [{"precision.weights": "int4"}, {"precision.activations": "int4"}]}
    found = grid(tmp_path, {"linked": group, "leave_out": [{"precision.weights": None}]})
    assert [case.label for case in found] == ["weights=int4"]


def test_case_key_depends_on_recipe_only(tmp_path: Path) -> None:
    axes = {"train.steps": [4, 8]}
    keys = [case.key for case in grid(tmp_path, {"axes": axes})]
    assert [case.key for case in grid(tmp_path, {"axes": {"train.steps": [2, 8, 4]}})][1:] == keys[::-1]
    same = ("optim.name=adamw", "train.eval_every=2", "train.checkpoint_every=1", "name=other")
    assert [case.key for case in grid(tmp_path, {"axes": axes}, same)] == keys, "written defaults and no effect"
    for change in ("optim.lr=0.002", "train.eval_samples=3", "data.text=other.txt"):
        assert not set(keys) & {case.key for case in grid(tmp_path, {"axes": axes}, (change,))}, change


def test_expand_sweep_merges_equal_recipes(tmp_path: Path) -> None:
    found = grid(
        tmp_path,
        {"linked": {"bits": [{"precision.weights": "int4"}, {"precision.weights": "int4"}, {"optim.lr": 1e-3}]}},
    )
    assert len(found) == 2
    assert found[1].values == {"precision.weights": None, "optim.lr": 0.001}


@pytest.mark.parametrize(("tensor", "steps"), [(None, [3, 5]), ({"rank": 4}, [3])])
def test_case_sizes_equal_the_plan(tmp_path: Path, tensor: dict[str, int] | None, steps: list[int]) -> None:
    for case in grid(tmp_path, {"axes": {"tensor": [tensor], "train.steps": steps}, "linked": SIZES}):
        plan = sc.plan(case.recipe)
        model = planned_model(resolve_run(case.recipe, world_size=1, device="cpu"), [])
        inner = (*model.model.layers.parameters(), *model.model.norm.parameters())
        assert case.num_parameters == plan.num_non_embedding == sum(each.numel() for each in inner)
        assert case.num_tokens == plan.total_tokens


def test_precision_sweep_has_each_part_alone_at_three_to_eight_bits() -> None:
    for name in ("parts", "tokens", "seeds"):
        sweep, _ = load_sweep(ROOT / "recipes" / f"sweep-precision-{name}.yaml")
        assert sweep.after.quantize is not None
        formats = [f"int{bits}" for bits in range(3, 9)]
        assert sweep.after.quantize.formats == [*formats, "int3.gptq", "int4.gptq"]
        if name == "parts":
            for bits in range(3, 9):
                by_tensor = {"format": f"int{bits}", "granularity": "tensor"}  # as in the paper
                for part, given in (("weights", f"int{bits}"), ("activations", by_tensor), ("kv_cache", by_tensor)):
                    assert {f"precision.{part}": given} in sweep.linked["formats"]


@pytest.mark.parametrize("name", ["parts", "tokens", "seeds"])
def test_precision_sweeps_find_their_committed_results(name: str) -> None:
    sweep, base = load_sweep(ROOT / "recipes" / f"sweep-precision-{name}.yaml")
    table = read_table(ROOT / "benchmarks" / "results" / f"precision-{name}.csv")
    assert set(table) == {case.key for case in expand_sweep(sweep, base)}


def test_expand_sweep_reports_all_faults_with_settings(tmp_path: Path) -> None:
    axes = {"train.steps": [4, 0], "data.seq_lne": [32, 64], "optim.lr": [0.1, -1.0]}
    found = faults(tmp_path, {"axes": axes, "base": tiny_recipe(tmp_path, train={"stepz": 1})})
    (step,), (data,), (rate,), (steps,) = (
        [fault for fault in found if fault.startswith(f"{key}: ")]
        for key in ("train.stepz", "data.seq_lne", "optim.lr", "train.steps")
    )
    assert step.endswith("(did you mean 'steps'?)"), "in every run, so that no setting is named"
    assert data.endswith("(did you mean 'seq_len'?)")
    assert rate.endswith("given -1.0 (where optim.lr = -1.0)")
    assert steps.endswith("given 0 (where train.steps = 0)")
    assert len(found) == 4


def test_expand_sweep_fault_of_several_settings_names_a_run(tmp_path: Path) -> None:
    axes = {"data.seq_len": [32, 48], "train.batch_tokens": [64, 96]}
    base = tiny_recipe(tmp_path)
    del base["train"]["batch_size"]
    (fault,) = faults(tmp_path, {"axes": axes, "base": base})
    assert "train.batch_tokens: must be a multiple of data.seq_len = 48; given 64" in fault
    assert fault.endswith("where data.seq_len = 48, train.batch_tokens = 64)")


def test_expand_sweep_reports_unbuildable_models(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, {"axes": {"model.overrides.hiden_size": [8, 32]}})
    assert "LlamaConfig has no such key; did you mean 'hidden_size'?" in fault


def test_expand_sweep_refuses_elastic_runs(tmp_path: Path) -> None:
    comm = {"name": "demo", "elastic": True}
    (fault,) = faults(tmp_path, {"base": tiny_recipe(tmp_path, comm=comm), "axes": {"optim.lr": [0.01, 0.02]}})
    assert "comm.elastic: the runs of a sweep would join each other" in fault


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "axes: missing; give axes, linked settings, or both"),
        ({"axis": {"train.steps": [1]}}, "axis: unknown key.*did you mean 'axes'"),
        ({"axes": {"train.steps": []}}, "axes.train.steps: list should have at least 1 item"),
        ({"axes": {"train.steps": 3}}, "axes.train.steps: .*valid list"),
        ({"axes": {"train..steps": [1]}}, "is not a recipe key"),
        ({"axes": {"name": ["a"]}}, "is not a recipe key"),
        ({"axes": {"model": [1], "model.preset": [2]}}, "axes.model.preset: overlaps with axes.model"),
        ({"axes": {"optim.lr": [1]}, "linked": SIZES}, "linked.size.optim.lr: overlaps with axes.optim.lr"),
        ({"axes": {"train.steps": [1]}, "leave_out": [{"train.step": 1}]}, "leave_out.0.train.step: .*'train.steps'"),
        ({"axes": {"train.steps": [1]}, "after": {"minimal_pair": "x"}}, "after.minimal_pair: .*'minimal_pairs'"),
    ],
)
def test_load_sweep_reports_faults(tmp_path: Path, content: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        grid(tmp_path, content)


def test_load_sweep_reports_missing_files(tmp_path: Path) -> None:
    write_recipe(tmp_path / "sweep.yaml", {"base": str(tmp_path / "bass.yaml"), "axes": {"train.steps": [1]}})
    write_recipe(tmp_path / "base.yaml", {})
    with pytest.raises(UserError, match=r"recipe not found: .*did you mean 'base.yaml'"):
        load_sweep(tmp_path / "sweep.yaml")
    with pytest.raises(UserError, match=r"sweep not found: .*did you mean 'sweep.yaml'"):
        load_sweep(tmp_path / "sweeep.yaml")


def test_load_sweep_refuses_a_recipe_and_load_recipe_a_sweep(tmp_path: Path) -> None:
    recipe, sweep = tmp_path / "one.yaml", tmp_path / "many.yaml"
    write_recipe(recipe, {"model": {"preset": "llama-1m"}})
    write_recipe(sweep, {"base": str(recipe), "axes": {"train.steps": [1]}})
    with pytest.raises(UserError, match=r"one\.yaml is a recipe, not a sweep; train it with: scantling train .*one"):
        load_sweep(recipe)
    with pytest.raises(UserError, match=r"many\.yaml is a sweep, not a recipe; run it with: scantling sweep .*many"):
        load_recipe(sweep)


def test_load_sweep_reads_base_from_a_file(tmp_path: Path) -> None:
    write_recipe(tmp_path / "base.yaml", tiny_recipe(tmp_path))
    (case,) = grid(tmp_path, {"base": str(tmp_path / "base.yaml"), "axes": {"train.steps": [3]}}, ("train.seed=7",))
    assert (case.recipe.train.steps, case.recipe.train.seed) == (3, 7)


def test_select_cases_filters_by_value(tmp_path: Path) -> None:
    found = grid(tmp_path, {"axes": {"train.steps": [4, 8], "optim.betas": [[0.9, 0.95], [0.9, 0.99]]}})
    chosen = select_cases(found, {"train.steps": "8", "optim.betas": "[0.9, 0.99]"})
    assert [case.label for case in chosen] == ["steps=8 betas=[0.9, 0.99]"]
    with pytest.raises(UserError, match=r"no run has train.steps = 9; the values are 4, 8"):
        select_cases(found, {"train.steps": "9"})
    with pytest.raises(UserError, match=r"did you mean 'train\.steps'"):
        select_cases(found, {"train.step": "8"})


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("sweep-*.yaml")), ids=lambda path: path.stem)
def test_shipped_sweeps_are_valid(path: Path) -> None:
    """Check keys, values and combinations, but not the data."""
    sweep, base = load_sweep(path)
    found = expand_sweep(sweep, base, str(path))
    assert len(found) == len({case.key for case in found}) > 1
    if "size" in sweep.linked:
        assert len({case.num_parameters for case in found}) == len(sweep.linked["size"])
