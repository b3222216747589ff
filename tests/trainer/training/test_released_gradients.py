"""Tests of recipes with `optim.release_gradients`: results equal those with kept gradients, in less memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import scantling as sc
from scantling.errors import NonFiniteError, UserError
from scantling.trainer.training.step import Stepper
from tests.runs import records, saved_tensors, tiny_recipe

POISONED = "model.layers.0.mlp.up_proj.weight"


def build_recipe(folder: Path, *, release: bool, **train: Any) -> dict[str, Any]:
    return tiny_recipe(
        folder,
        optim={"name": "came", "lr": 3e-3, "debias": True, "momentum": "int8", "release_gradients": release},
        train={"clip": None, **train},
    )


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[key]) for key, tensor in one.items())


@pytest.mark.parametrize(
    "train", [{}, {"micro_batch_size": 1}, {"activation_checkpointing": True}], ids=["whole", "cut", "checkpointing"]
)
def test_released_run_is_bitwise_equal(tmp_path: Path, train: dict[str, Any]) -> None:
    for release in (False, True):
        sc.train(build_recipe(tmp_path, release=release, **train), run_dir=tmp_path / str(release))
    kept, released = (records(tmp_path / str(release)) for release in (False, True))
    assert [record["loss"] for record in kept] == [record["loss"] for record in released]
    norms = [record["grad_norm"] for record in kept]
    assert [record["grad_norm"] for record in released] == pytest.approx(norms, rel=1e-6)
    assert same(saved_tensors(tmp_path / "False"), saved_tensors(tmp_path / "True"))
    one_gradient = train.get("micro_batch_size") is None
    assert (released[0]["gradient_bytes"] < kept[0]["gradient_bytes"] / 2) == one_gradient


def test_resume_is_bitwise(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path, release=True, batch_size=6, micro_batch_size=2, checkpoint_every=3)
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    sc.train(recipe, run_dir=straight)
    shutil.copytree(straight, broken)
    shutil.rmtree(broken / "checkpoints" / "step-8")
    sc.train(broken, resume=True)
    assert [record["loss"] for record in records(straight)] == [record["loss"] for record in records(broken)]
    assert same(saved_tensors(straight), saved_tensors(broken))


def test_nonfinite_loss_stops_before_the_update(tmp_path: Path) -> None:
    """A learning rate of 1e30 ruins the weights in the first step; the second step's loss is not finite."""
    recipe = build_recipe(tmp_path, release=True, warmup=0, checkpoint_every=1)
    recipe["optim"] |= {"lr": 1e30, "weight_decay": 0.0}
    with pytest.raises(NonFiniteError, match=r"step 2, rank 0: the loss is .*; stopped before the update"):
        sc.train(recipe, run_dir=tmp_path / "run")
    assert len(records(tmp_path / "run")) == 1


class Poisoned(Stepper):
    """Stepper with a NaN in one gradient of the third step, under a finite loss."""

    def step(self, step: int, *args: Any, **kwargs: Any) -> Any:
        parameter = self.model.get_parameter(POISONED)
        if step == 3:
            parameter.register_hook(lambda gradient: gradient * torch.nan)
            before = parameter.detach().clone()
        try:
            return super().step(step, *args, **kwargs)
        finally:
            assert step < 3 or torch.equal(before, parameter)


def test_nonfinite_gradient_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scantling.trainer.training.build.Stepper", Poisoned)
    recipe = build_recipe(tmp_path, release=True, checkpoint_every=1)
    with pytest.raises(NonFiniteError, match=f"step 3, rank 0: the gradient of {POISONED} is not finite"):
        sc.train(recipe, run_dir=tmp_path / "run")
    assert len(records(tmp_path / "run")) == 2
    assert all(
        tensor.isfinite().all() for tensor in saved_tensors(tmp_path / "run", 2).values() if tensor.is_floating_point()
    )


def test_several_processes_are_refused(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path, release=True)
    with pytest.raises(UserError, match=r"optim.release_gradients .*; given 2 processes[.] Run one"):
        sc.plan(recipe, world_size=2)
