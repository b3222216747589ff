"""Tests of runs whose replicas are sharded over several processes: the same results as unsharded, and exact resume."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scantling.comm.gradient_exchange import GradientExchange
from scantling.comm.sharded_exchange import ShardedExchange
from scantling.trainer.training.trained_run import evaluate_run, load_run
from tests.runs import WIDE, forget, records, saved_tensors, scantling, tiny_recipe, train_run, write_recipe
from tests.trainer.training import poisoned, small_memory

pytestmark = pytest.mark.dist

CAME = {"name": "came", "lr": 3e-3, "betas": [0.9, 0.95, 0.995], "debias": True}
DEMO = {"name": "demo", "topk": 4, "chunk": 16}
"""Blocks that no shard of a matrix cuts; other blocks would be divided differently."""
SECTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tensor": {"tensor": {"rank": 4}},
    "target": {"tensor": {"rank": 4, "size_target": 0.6, "truncate_every": 2, "adapt": 4}},
    "adamw": {"optim": {"name": "adamw"}},
    "came": {"optim": CAME},
    "int8": {"optim": {**CAME, "momentum": "int8"}},
    "int4": {"optim": {**CAME, "momentum": "int4"}},
    "sign": {"optim": {"name": "sign", "lr": 1e-3}},
    "allreduce": {},
    "demo": {"comm": DEMO},
    "fp32": {},
    "products": {"precision": {"weights": "int8", "activations": "int8", "compute": "int8"}},
    "released": {"optim": {**CAME, "release_gradients": True}, "train": {"clip": None}},
    "micro": {"train": {"micro_batch_size": 1}},
    "checkpointed": {"train": {"activation_checkpointing": True}},
    "bf16": {"optim": CAME, "precision": {"parameters": "bf16"}},
    "tied": {"model": {"overrides": {"tie_word_embeddings": True}}},
}
MATRIX = {
    # name: (replicas, shards)
    "dense came allreduce": (1, 2),
    "dense adamw allreduce": (2, 2),
    "dense sign demo": (2, 2),
    "dense int8 demo products": (2, 2),
    "dense int8 demo": (2, 2),
    "dense int4 allreduce products": (1, 2),
    "tensor adamw allreduce products": (1, 2),
    "tensor came demo": (2, 2),
    "tensor int8 allreduce": (2, 2),
    "target int4 demo": (2, 2),
    "target sign allreduce": (1, 2),
    "target adamw demo products": (2, 2),
    "released int8 allreduce": (1, 2),
    "released allreduce micro checkpointed": (2, 2),
    "dense adamw micro tied": (1, 2),
    "dense adamw": (1, 3),
    "bf16": (1, 2),
    "bf16 micro": (2, 2),
}
QUICK = (
    "dense came allreduce",
    "dense int8 demo products",
    "target int4 demo",
    "released allreduce micro checkpointed",
)
"""Cases that run by default; together they have most of the parts."""
TOLERANCES = {"bf16": 0.02, "products": 2e-4}
"""Largest difference of the loss per step.

By default fp32 rounding. Int8 products round activations and gradients to 256 values, so a difference of fp32 rounding
becomes one of 1 / 256, and other elements of an embedding's gradient are its largest.
"""


def recipe_of(name: str, folder: Path, **parallel: Any) -> dict[str, Any]:
    """Return a recipe with the sections of several methods, merged."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"overrides": {**tiny_recipe(folder)["model"]["overrides"], **WIDE}}
    }
    for word in name.split():
        for section, keys in SECTIONS[word].items():
            if section == "model":
                keys = {"overrides": {**sections["model"]["overrides"], **keys["overrides"]}}
            sections[section] = {**sections.get(section, {}), **keys}
    sections["train"] = {"batch_size": 12, "checkpoint_every": 4, "keep_checkpoints": 3, **sections.get("train", {})}
    return tiny_recipe(folder, **sections, parallel=parallel)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MATRIX]
)
def test_sharded_run_equals_unsharded_and_resumes_bitwise(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The properties are written into benchmarks/results by benchmarks/endurance.py."""
    replicas, shards = MATRIX[name]
    whole = train_run(recipe_of(name, tmp_path), tmp_path, "whole", replicas if "demo" in name else 1)
    sharded = train_run(recipe_of(name, tmp_path, shard=shards), tmp_path, "sharded", replicas * shards)
    pairs = list(zip(records(whole), records(sharded), strict=True))
    for key in ("loss", "grad_norm"):
        record_property(key, max(abs(other[key] / one[key] - 1) for one, other in pairs))
    record_property("mesh", f"{replicas} x {shards}")
    tolerance = max(TOLERANCES.get(word, 2e-5) for word in name.split())
    for one, other in pairs:
        assert other["loss"] == pytest.approx(one["loss"], abs=tolerance * one["step"])
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.05)
        if "tensor" not in name and "target" not in name:  # TT layers stay whole
            assert other["weight_bytes"] < 0.9 * one["weight_bytes"]
            assert other["optimizer_state_bytes"] < 0.9 * one["optimizer_state_bytes"]
    saved = saved_tensors(sharded, prefix="model/")
    ended = saved_tensors(whole, prefix="model/")
    assert {key: value.shape for key, value in saved.items()} == {key: value.shape for key, value in ended.items()}
    record_property(
        "weights", max(float((value.float() - ended[key].float()).abs().max()) for key, value in saved.items())
    )
    # a run that stopped in the middle ends with the same bits
    broken = tmp_path / "broken"
    shutil.copytree(sharded, broken)
    shutil.rmtree(broken / "checkpoints" / "step-8")
    done = scantling("train", broken, "--resume", processes=replicas * shards)
    assert done.returncode == 0, done.stdout + done.stderr
    straight, resumed = saved_tensors(sharded), saved_tensors(broken)
    assert straight.keys() == resumed.keys()
    changed = [key for key, value in straight.items() if not torch.equal(value, resumed[key])]
    record_property("tensors changed by resume", len(changed))
    assert changed == []
    # the shards are read by one process
    assert evaluate_run(sharded)["eval_loss"] == pytest.approx(records(sharded)[-1]["eval_loss"], rel=1e-4)
    assert load_run(sharded).step == 8


def test_resume_on_another_mesh_keeps_model_and_optimizer(tmp_path: Path) -> None:
    """Four processes as 2 x 2, then 1 x 2, then 2 without shards, then one: each state is that of the one before."""
    recipe = recipe_of("tensor int8 demo", tmp_path, shard=2)
    recipe["tensor"] = {"rank": {"*mlp*": 4}}  # attention and the embedding are dense
    recipe["train"] |= {"steps": 10, "checkpoint_every": 2, "keep_checkpoints": 9, "schedule": "constant"}
    first = train_run(recipe, tmp_path, "first", 4)
    for name, processes, shard in (("narrow", 2, 2), ("replicas", 2, 1), ("one", 1, 1), ("wide", 3, 3)):
        shutil.copytree(first, tmp_path / name)
        forget(tmp_path / name, 4)
        settings = ["--set", f"parallel.shard={shard}"]
        done = scantling("train", tmp_path / name, "--resume", *settings, processes=processes)
        assert done.returncode == 0, done.stdout + done.stderr
        one, other = records(first), records(tmp_path / name)
        assert [record["step"] for record in other] == list(range(1, 11))
        # the model is the same, so is the loss before the next update
        assert other[4]["loss"] == pytest.approx(one[4]["loss"], rel=1e-5)
        replicas = processes // shard
        averaged = "the exchange starts from the mean of the residuals of 2 replicas" in done.stdout
        assert averaged == (replicas != 2)
        # the optimizer, too: its momentum makes the next updates
        tolerance = 2e-3 if replicas == 2 else 2e-2
        assert other[7]["loss"] == pytest.approx(one[7]["loss"], rel=tolerance)


def test_several_processes_evaluate_shards(tmp_path: Path) -> None:
    """Also with fewer samples than processes, when some have no batch of their own."""
    recipe = recipe_of("target adamw", tmp_path, shard=2)
    recipe["train"] |= {"eval_samples": 5, "micro_batch_size": 1}
    folder = train_run(recipe, tmp_path, "run", 2)
    expected = evaluate_run(folder)["eval_loss"]
    assert records(folder)[-1]["eval_loss"] == pytest.approx(expected, rel=1e-5)
    for processes in (2, 3):
        done = scantling("eval", folder, "--json", processes=processes)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["eval_loss"] == pytest.approx(expected, rel=1e-5)
    done = scantling("export", folder, "--to", "hf", tmp_path / "exported")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("sections", "processes", "message"),
    [
        ({"parallel": {"shard": 3}}, 2, "parallel.shard: 3 do not fit 2 processes"),
        ({"parallel": {"shard": 2, "replicate": 2}}, 2, "parallel.replicate: 2 do not fit 2 processes"),
        (
            {"parallel": {"shard": 2}, "optim": {"name": "muon"}},
            1,
            "cannot shard an optimizer whose update needs whole",
        ),
        ({"parallel": {"shard": 2}, "precision": {"compute": "fp16"}}, 1, "set precision.compute: bf16"),
        ({"parallel": {"shard": 2}, "train": {"compile": True}}, 1, "cannot compile a model that gathers"),
        ({"parallel": {"shard": 2}, "comm": {"name": "demo", "overlap": True}}, 1, "leave it out"),
        ({"parallel": {"reshard": "never"}}, 1, "has an effect with parallel.shard alone"),
        ({"parallel": {"shard": 0}}, 1, "parallel.shard"),
        ({"parallel": {"shard": 2, "offload": True}}, 1, "moves tensors from a GPU to the CPU"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, sections: dict[str, Any], processes: int, message: str
) -> None:
    path = write_recipe(tmp_path / "recipe.yaml", tiny_recipe(tmp_path, **sections))
    done = scantling("train", path, "--run-dir", tmp_path / "run", processes=processes)
    assert done.returncode == (2 if processes == 1 else 1)  # of several processes, whether one failed
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_sharded_exchange_passes_every_method_on() -> None:
    """A method of `GradientExchange` that is not passed on would act as if there were one process."""
    calls = [name for name, each in vars(GradientExchange).items() if callable(each) or isinstance(each, property)]
    assert [name for name in calls if not name.startswith("_") and name not in vars(ShardedExchange)] == []


def test_rank_and_tensor_of_a_nan_are_named(tmp_path: Path) -> None:
    """The loss is finite: the NaN is in a gradient of rank 1, and in the part of it that rank 0 keeps."""
    path = write_recipe(tmp_path / "recipe.yaml", recipe_of("dense adamw", tmp_path, shard=2))
    done = scantling("train", path, "--run-dir", tmp_path / "run", processes=2, before=poisoned.patch_sharded)
    assert done.returncode == 1
    assert "step 3, rank 0: the gradient of model.layers.1.mlp.up_proj.weight (1 of" in done.stderr
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2]


def test_model_without_blocks_is_refused(tmp_path: Path) -> None:
    rows = tmp_path / "clicks.csv"
    rows.write_text("y,a,b\n" + "".join(f"{i % 2},{i % 5},{i % 3}\n" for i in range(200)))
    recipe = {
        "model": {"preset": "dlrm"},
        "data": {"csv": str(rows), "clicks": {"label": "y", "categorical": ["a", "b"]}},
        "parallel": {"shard": 2},
        "train": {"steps": 2, "batch_size": 8, "device": "cpu"},
    }
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    done = scantling("train", path, "--run-dir", tmp_path / "run", processes=2)
    assert done.returncode == 1
    assert "parallel.shard: DLRM does not name its blocks" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "processes"), [("dense adamw", 2), pytest.param("tensor came demo tied", 4, marks=pytest.mark.slow)]
)
def test_stored_weights_are_those_of_an_unsharded_run(name: str, processes: int, tmp_path: Path) -> None:
    """A dense model is read tensor by tensor, and one with TT layers converted as a whole."""
    recipe = recipe_of(name, tmp_path, shard=2)
    config = LlamaConfig(**recipe["model"]["overrides"], vocab_size=320)
    torch.manual_seed(5)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    recipe["model"] = {"hf": str(tmp_path / "model")}
    sharded = train_run(recipe, tmp_path, "sharded", processes)
    whole = train_run({**recipe, "parallel": {}}, tmp_path, "whole", processes // 2)
    for one, other in zip(records(whole), records(sharded), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=2e-5 * one["step"])


@pytest.mark.parametrize("processes", [1, 2])
def test_model_larger_than_memory_is_drawn_weight_by_weight(processes: int, tmp_path: Path) -> None:
    """The same for any number of shards, but other weights than those of a model that is built as a whole."""
    recipe = recipe_of("dense adamw", tmp_path, shard=processes)
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    found = []
    for count in {1, processes}:
        where = tmp_path / f"of-{count}"
        settings = ["--set", f"parallel.shard={count}", "--run-dir", where]
        done = scantling("train", path, *settings, processes=count, before=small_memory.without_room)
        assert done.returncode == 0, done.stdout + done.stderr
        assert " ".join(done.stderr.split()).count("each weight is drawn with a seed of its own") == 1
        found.append(records(where))
    for one, other in zip(found[0], found[-1], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=2e-5 * one["step"])
    if processes == 1:
        whole = train_run(recipe, tmp_path, "whole", 1)
        assert abs(records(whole)[0]["loss"] - found[0][0]["loss"]) > 1e-4


def test_model_larger_than_memory_that_must_be_built_as_a_whole_is_refused(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "recipe.yaml", recipe_of("tensor adamw", tmp_path, shard=2))
    done = scantling("train", path, "--run-dir", tmp_path / "run", processes=2, before=small_memory.without_room)
    assert done.returncode == 1
    assert "to be built, and this machine has 1000 B; its weights cannot be read one by one, because" in done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()
