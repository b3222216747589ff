"""Tests of the search for changes of a recipe that fit into the memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scantling.cli import run as run_command
from scantling.trainer.planning import changes, fit
from scantling.trainer.planning.changes import Search, Suggestion, change_recipe, find_changes, format_settings
from scantling.trainer.planning.machine import MachineMemory
from scantling.trainer.planning.plan import plan_run
from scantling.trainer.planning.resolve import ResolvedRun, resolve_run
from scantling.trainer.recipe import load_recipe
from tests.runs import tiny_recipe, write_recipe

MIB = 2**20
LARGE = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 8192}
CAME = {"name": "came", "momentum": "int4"}


@pytest.fixture(autouse=True)
def unlimited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make results independent of the speed of the machine; the number of traces stays limited."""
    monkeypatch.setattr(changes, "LIMIT_S", 1000.0)
    monkeypatch.setattr(changes, "ENOUGH_S", 1000.0)


def gpu_run(folder: Path, *, world_size: int = 1, batch_size: int = 4, **sections: Any) -> ResolvedRun:
    """Return a run on GPUs whose weights need more memory than its activations."""
    train = {"batch_size": batch_size, **sections.pop("train", {})}
    model = {"overrides": LARGE, **sections.pop("model", {})}
    recipe = tiny_recipe(folder, model=model, train=train, **sections)
    # without the device of the tiny recipe
    recipe["train"].pop("device", None)
    return resolve_run(load_recipe(recipe), world_size=world_size, device="cuda")


def search_below(run: ResolvedRun, share: float) -> tuple[Search, int]:
    """Search with a share of the planned peak as the limit; return the result and the limit."""
    planned = plan_run(run)
    assert planned.peak_memory_bytes is not None
    limit = int(share * planned.peak_memory_bytes)
    return find_changes(run, planned, limit), limit


def replan(run: ResolvedRun, suggestion: Suggestion) -> int:
    """Return the peak of a suggestion, planned from scratch."""
    recipe, removed = change_recipe(run.recipe, suggestion.settings)
    assert removed == suggestion.removed
    changed = resolve_run(recipe, world_size=suggestion.world_size, device=run.device)
    peak = plan_run(changed).peak_memory_bytes
    assert peak is not None
    return peak


@pytest.mark.parametrize("share", [0.95, 0.4])
def test_suggestions_fit_by_a_plan_from_scratch(share: float, tmp_path: Path) -> None:
    run = gpu_run(tmp_path, optim={"betas": [0.9, 0.95]})
    found, limit = search_below(run, share)
    assert found.suggestions
    for each in found.suggestions:
        assert replan(run, each) == each.peak_memory_bytes <= limit
    assert run.cache.num_traces <= 1 + changes.MOST_TRACES


def test_changes_that_keep_the_result_come_first(tmp_path: Path) -> None:
    run = gpu_run(tmp_path, batch_size=64)
    found, _ = search_below(run, 0.9)
    first, *others = found.suggestions
    assert list(first.settings) == ["train.micro_batch_size"]
    assert found.largest_micro_batch_size == first.settings["train.micro_batch_size"]
    assert 1 < found.largest_micro_batch_size < 64
    assert {key for each in others for key in each.settings} & {"train.loss_chunk", "train.activation_checkpointing"}


def test_optimizer_with_less_state_names_the_options_to_remove(tmp_path: Path) -> None:
    run = gpu_run(tmp_path, batch_size=1, optim={"betas": [0.9, 0.95]})
    found, _ = search_below(run, 0.8)
    of_came = [each for each in found.suggestions if "optim.name" in each.settings]
    assert [each.settings for each in of_came] == [{"optim.name": "came", "optim.momentum": "int8"}]
    assert str(of_came[0]) == "optim: {name: came, momentum: int8}, without optim.betas"
    assert found.largest_micro_batch_size is None


def test_changes_add_up_if_none_fits_alone(tmp_path: Path) -> None:
    run = gpu_run(tmp_path)
    found, limit = search_below(run, 0.4)
    only = found.suggestions[0]
    assert {key.partition(".")[0] for key in only.settings} >= {"optim", "precision"}
    assert only.peak_memory_bytes <= limit
    # more GPUs are not needed
    assert only.world_size == 1


def test_more_gpus_are_the_last_resort(tmp_path: Path) -> None:
    released = {"optim": {**CAME, "release_gradients": True}, "precision": {"parameters": "bf16"}}
    train = {"clip": None, "activation_checkpointing": True, "loss_chunk": 64, "micro_batch_size": 1}
    run = gpu_run(tmp_path, **released, train=train)
    found, _ = search_below(run, 0.8)
    (only,) = found.suggestions
    assert only.settings["parallel.shard"] == only.world_size > 1
    assert str(only).endswith(f", on {only.world_size} GPUs")


def test_processes_of_the_run_share_a_replica(tmp_path: Path) -> None:
    run = gpu_run(tmp_path, world_size=2, batch_size=2, parallel={"replicate": 2})
    found, _ = search_below(run, 0.75)
    (sharded,) = [each for each in found.suggestions if "parallel.shard" in each.settings]
    assert (sharded.settings, sharded.world_size) == ({"parallel.shard": 2, "parallel.replicate": 1}, 2)
    assert "GPUs" not in str(sharded)


def test_changes_that_the_recipe_refuses_are_not_offered(tmp_path: Path) -> None:
    run = gpu_run(tmp_path, world_size=2, train={"graph": True, "device": "cuda"})
    found, _ = search_below(run, 0.05)
    assert not found.suggestions
    assert found.least is not None
    # CUDA graphs capture the step of one process, after a backward pass without steps
    assert found.least.settings.keys().isdisjoint({"parallel.shard", "optim.release_gradients"})


def test_search_without_time_plans_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "LIMIT_S", -1.0)
    run = gpu_run(tmp_path)
    found, _ = search_below(run, 0.5)
    assert found == Search()
    assert run.cache.num_traces == 1


def test_most_traces_bound_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MOST_TRACES", 1)
    run = gpu_run(tmp_path, batch_size=64)
    found, limit = search_below(run, 0.7)
    assert run.cache.num_traces == 2
    assert found.suggestions[0].settings == {"train.micro_batch_size": 1}
    assert all(each.peak_memory_bytes <= limit for each in found.suggestions)


def test_released_gradients_pass_a_large_batch_in_few_parts(tmp_path: Path) -> None:
    """The time of a trace grows with the parts, of which a micro-batch of one sequence would need 64."""
    train = {"activation_checkpointing": True, "clip": None}
    run = gpu_run(tmp_path, batch_size=64, optim={**CAME, "release_gradients": True}, train=train)
    found, _ = search_below(run, 0.9)
    assert all(each.settings.get("train.micro_batch_size", 64) >= 16 for each in found.suggestions)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"train.micro_batch_size": 8}, "train.micro_batch_size: 8"),
        (
            {"train.clip": None, "optim.name": "came", "train.loss_chunk": 512},
            "train: {clip: null, loss_chunk: 512}, optim.name: came",
        ),
        ({"optim.release_gradients": True}, "optim.release_gradients: true"),
    ],
)
def test_settings_are_written_as_yaml(settings: dict[str, Any], text: str) -> None:
    assert format_settings(settings) == text


CHANGE = Suggestion({"optim.name": "came", "optim.momentum": "int8"}, ("optim.betas",), 3 * MIB, 1)
FOUND = {
    "Each of these changes of the recipe fits, by its plan:": Search((CHANGE,), CHANGE),
    "No planned change of the recipe fits; the least is 3.00 MiB, with": Search((), CHANGE),
    "No change of the recipe was found that fits; take a smaller model": Search(),
}


@pytest.mark.parametrize("text", FOUND)
def test_plan_and_train_print_the_suggestions(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_recipe(tmp_path / "recipe.yaml", tiny_recipe(tmp_path)))
    monkeypatch.setattr(fit, "machine_memory", lambda device: MachineMemory("this machine", 1000, 1000))
    monkeypatch.setattr(fit, "rss_bytes", lambda: 0)
    monkeypatch.setattr(fit, "find_changes", lambda run, planned, limit: FOUND[text])
    assert run_command(["plan", path, "--json"]) == 0
    machine = json.loads(capsys.readouterr().out)["machine"]
    assert (machine["fits"], machine["largest_micro_batch_size"]) == (False, None)
    assert machine["suggestions"] == [each.to_dict() for each in FOUND[text].suggestions]
    assert run_command(["plan", path]) == 0
    assert text in " ".join(capsys.readouterr().out.split())
    assert run_command(["train", path, "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert ("optim: {name: came, momentum: int8}, without optim.betas" in error) == (FOUND[text] != Search())
    assert not (tmp_path / "run" / "recipe.yaml").exists()
