"""Tests of runs whose processes exchange momentum."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import scantling as sc
from scantling.comm.gradient_exchange import GradientExchange
from scantling.distributed.context import DistContext
from scantling.errors import NonFiniteError
from scantling.trainer.training.checkpoint import Checkpoint, load_tensors
from scantling.trainer.training.checkpoint_manifest import read_manifest
from scantling.trainer.training.checkpoint_state import load_exchange
from scantling.trainer.training.step import Stepper
from tests.runs import (
    WIDE,
    forget,
    kill_tree,
    records,
    scantling,
    start_scantling,
    tiny_recipe,
    wait_for_step,
    write_recipe,
)
from tests.trainer.training import poisoned


def demo_recipe(folder: Path, **sections: Any) -> dict[str, Any]:
    comm = {"name": "demo", "topk": 64, "dense": "sign", **sections.pop("comm", {})}
    model = {"overrides": {**tiny_recipe(folder)["model"]["overrides"], **WIDE}}
    return tiny_recipe(folder, model=model, comm=comm, optim={"name": "sign", "lr": 2e-3}, **sections)


@pytest.mark.parametrize(
    "optim",
    [
        {"name": "sign", "lr": 2e-3},
        {"name": "adamw", "lr": 2e-3},
        {"name": "came", "lr": 2e-3, "betas": [0.0, 0.95, 0.995], "debias": True},
    ],
    ids=lambda optim: optim["name"],
)
def test_demo_learns_on_one_process(tmp_path: Path, optim: dict[str, Any]) -> None:
    recipe = demo_recipe(tmp_path, train={"steps": 60, "batch_size": 16})
    result = sc.train({**recipe, "optim": optim}, run_dir=tmp_path / "run")
    losses = [record["loss"] for record in records(tmp_path / "run")]
    assert result.metrics["eval_loss"] < 0.75 * losses[0]
    assert all(record["wire_bytes"] == 0 for record in records(tmp_path / "run"))
    planned = json.loads((tmp_path / "run" / "plan.json").read_text())["residual_bytes"]
    assert {record["residual_bytes"] for record in records(tmp_path / "run")} == {planned}
    assert result.metrics["residual_bytes"] == planned > 0
    assert "exchange residuals" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.dist
@pytest.mark.charts
def test_two_processes_send_less_than_ddp(tmp_path: Path) -> None:
    dense, sparse = (
        write_recipe(tmp_path / f"{name}.yaml", {**demo_recipe(tmp_path, train={"steps": 6}), "comm": comm})
        for name, comm in (
            ("dense", {"name": "allreduce"}),
            ("sparse", {"name": "demo", "topk": 8, "dense": "sign"}),
        )
    )
    for path in (dense, sparse):
        done = scantling("train", path, "--run-dir", tmp_path / path.stem, processes=2)
        assert done.returncode == 0, done.stdout + done.stderr
    for record in records(tmp_path / "sparse"):
        phases = ("data_s", "forward_s", "backward_s", "exchange_s", "optimizer_s")
        assert min(record[phase] for phase in phases[1:]) > 0.0
        assert sum(record[phase] for phase in phases) <= record["step_s"]
    sent = {name: records(tmp_path / name)[-1]["wire_bytes"] for name in ("dense", "sparse")}
    assert 0 < 40 * sent["sparse"] < sent["dense"]
    plan = json.loads((tmp_path / "sparse" / "plan.json").read_text())
    assert plan["wire_bytes"] == sent["sparse"]
    stored = load_tensors(tmp_path / "sparse" / "checkpoints" / "step-6", "exchange/rank0/")
    assert plan["residual_bytes"] == sum(value.nbytes for value in stored.values())
    assert "<svg" in (tmp_path / "sparse" / "report.html").read_text()


@pytest.mark.dist
@pytest.mark.parametrize("delay", [0, 1])
def test_rank_with_nan_is_skipped_in_one_step(tmp_path: Path, delay: int) -> None:
    path = write_recipe(tmp_path / "recipe.yaml", demo_recipe(tmp_path, comm={"delay": delay}))
    done = scantling("train", path, "--run-dir", tmp_path / "run", processes=2, before=poisoned.patch)
    assert done.returncode == 0, done.stderr
    assert "step 3: ranks [1] have NaN or Inf gradients; left out" in done.stderr
    lines = records(tmp_path / "run")
    expected = {3 + delay: [1]}
    assert [line.get("nonfinite_ranks") for line in lines] == [expected.get(step) for step in range(1, 9)]
    assert all(line["loss"] > 0 for line in lines)


def test_run_stops_if_no_rank_is_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a step without an exchange, in which the exchange does not report it."""
    passes = Stepper._run_passes

    def poisoned_passes(stepper: Stepper, batches: Any, share: torch.Tensor, step: int) -> Any:
        if step == 3:
            stepper.model.get_parameter(poisoned.POISONED).register_hook(poisoned.poison)
        return passes(stepper, batches, share, step)

    monkeypatch.setattr(Stepper, "_run_passes", poisoned_passes)
    with pytest.raises(NonFiniteError, match="step 3, rank 0: the gradient norm is not finite"):
        sc.train(demo_recipe(tmp_path, comm={"sync_every": 2}), run_dir=tmp_path / "run")


@pytest.mark.dist
def test_all_methods_on_two_processes_resume_bitwise(tmp_path: Path) -> None:
    """Rebuilding the exchange after rank removal must not send the residuals and discard them.

    All methods together, bitwise equal after a resume; residuals have the shapes of the remaining ranks.
    """
    tensor = {"rank": 8, "size_target": 0.4, "truncate_every": 2, "adapt": 0.5}
    recipe = demo_recipe(tmp_path, tensor=tensor, train={"steps": 12, "checkpoint_every": 6})
    recipe["optim"] = {"name": "came", "lr": 2e-3, "momentum": "int8", "betas": [0.9, 0.999, 0.9999]}
    recipe["precision"] = {"weights": "int8", "activations": "int8", "kv_cache": "int6"}
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    straight, again = tmp_path / "straight", tmp_path / "again"
    done = scantling("train", path, "--run-dir", straight, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert records(straight)[-1]["tensor_size"] == pytest.approx(0.4, rel=0.02)
    stored = load_tensors(straight / "checkpoints" / "step-12")
    residuals = {key.split("/", 2)[2]: value for key, value in stored.items() if key.startswith("exchange/")}
    assert residuals
    for name, residual in residuals.items():  # they shrink with the ranks
        assert residual.shape == stored[f"model/{name}"].shape
        assert torch.isfinite(residual).all()
    for rank in ("0", "1"):
        assert read_manifest(straight / "checkpoints" / "step-12")["values"]["exchange"][rank]["step"] == 12
    assert "exchange by all_gather among 2 processes" in done.stdout
    assert (done.stdout + done.stderr).count("exchange by") == 1
    shutil.copytree(straight, again)
    shutil.rmtree(again / "checkpoints" / "step-12")
    done = scantling("train", again, "--resume", processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    wanted, found = (load_tensors(run / "checkpoints" / "step-12") for run in (straight, again))
    assert wanted.keys() == found.keys()
    assert all(torch.equal(tensor, found[key]) for key, tensor in wanted.items())
    ranks = [[record.get("ranks") for record in records(run)] for run in (straight, again)]
    assert ranks[0] == ranks[1]


@pytest.mark.dist
def test_residuals_start_from_their_mean_at_another_world_size(tmp_path: Path) -> None:
    """2 → 3 → 1: the mean over the processes is preserved."""
    train = {"steps": 12, "checkpoint_every": 4, "batch_size": 6}
    path = write_recipe(tmp_path / "recipe.yaml", demo_recipe(tmp_path, train=train))
    run = tmp_path / "run"
    process = start_scantling("train", path, "--run-dir", run, processes=2)
    wait_for_step(run / "metrics.jsonl", 6, process)
    kill_tree(process)
    forget(run, 4)
    saved = run / "checkpoints" / "step-4"
    ranks = [load_tensors(saved, f"exchange/rank{rank}/") for rank in range(2)]
    first, second = ({key.rpartition("/")[2]: v for key, v in each.items()} for each in ranks)
    assert first.keys() == second.keys()
    assert any(value.any() for value in first.values())

    class Recorder(GradientExchange):
        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.state = dict(state)

    for world in (3, 1):
        recorder = Recorder()
        load_exchange(recorder, torch.nn.Module(), Checkpoint.read(saved), DistContext(0, world, torch.device("cpu")))
        assert recorder.state["step"] == 4
        for name, value in first.items():
            torch.testing.assert_close(recorder.state[name], (value + second[name]) / 2)
    for before, last, processes in ((2, 8, 3), (3, 12, 1)):
        done = scantling("train", run, "--resume", processes=processes)
        assert done.returncode == 0, done.stdout + done.stderr
        shown = " ".join(done.stdout.split())
        assert f"saved by {before} processes, now {processes}: the random generators start again, and the" in shown
        assert f"exchange starts from the mean of the residuals of {before} replicas" in shown
        forget(run, last)
    assert [record["step"] for record in records(run)] == list(range(1, 13))


@pytest.mark.parametrize("ranks", [[0, 1], []])
def test_residual_missing_on_some_ranks_counts_as_zeros(
    ranks: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the file of any rank the run goes on with the values that are not tensors."""
    kept = {"exchange/rank0/": {"exchange/rank0/a": torch.ones(2)}, "exchange/rank1/": {}}
    values = {"exchange": {"0": {"step": 3}, "1": {"step": 3}}}
    saved: Any = SimpleNamespace(
        path=tmp_path,
        manifest={"world_size": 2},
        values=values,
        index=SimpleNamespace(ranks=lambda kind, absent=False: ranks),
        load_tensors=lambda prefix, _=None: kept[prefix],
    )
    found: dict[str, Any] = {}
    monkeypatch.setattr(GradientExchange, "load_state_dict", lambda _, state: found.update(state))
    load_exchange(GradientExchange(), torch.nn.Module(), saved, DistContext(0, 1, torch.device("cpu")))
    assert found["step"] == 3
    if ranks:
        torch.testing.assert_close(found["a"], torch.full((2,), 0.5))
