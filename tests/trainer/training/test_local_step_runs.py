"""Tests of recipes whose replicas take local steps: synchronization, resume between exchanges, shards within."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import scantling as sc
from scantling.errors import RecipeError, UserError
from scantling.trainer.recipe import load_recipe
from scantling.trainer.training.trained_run import evaluate_run
from tests.processes import torchrun_names
from tests.runs import WIDE, command, forget, records, saved_tensors, scantling, tiny_recipe, train_run, write_recipe
from tests.trainer.training import poisoned

pytestmark = pytest.mark.dist

LOCAL = {
    "name": "local_steps",
    "sync_every": 3,
    "topk": 4,
    "chunk": 16,
    "values": "sign",
    "dense": "sign",
    "outer_lr": 1.3,
}
CAME = {"name": "came", "lr": 3e-3, "betas": [0.9, 0.95, 0.995], "debias": True, "momentum": "int8"}
BF16 = {"parameters": "bf16", "rounding": "stochastic"}
TARGET = {"rank": 4, "size_target": 0.6, "truncate_every": 2, "adapt": 5}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "adamw": (2, {"optim": {"name": "adamw"}}),
    "muon": (2, {"optim": {"name": "muon", "lr": 3e-3}}),
    "diloco, came": (2, {"comm": {"name": "diloco", "sync_every": 3}, "optim": CAME}),
    "tensor, int8 products": (2, {"tensor": {"rank": 4}, "precision": {"weights": "int8", "activations": "int8"}}),
    "written in the background": (2, {"parallel": {"async_checkpoint": True}}),
    "size target": (2, {"tensor": TARGET}),
    "sharded size target": (4, {"tensor": {**TARGET, "rank": {"*mlp*": 4}}, "parallel": {"shard": 2}}),
    "sharded": (4, {"parallel": {"shard": 2}}),
    "sharded came": (4, {"parallel": {"shard": 2}, "optim": CAME}),
    "bf16 weights": (2, {"optim": CAME, "precision": BF16}),
    "diloco, bf16 weights": (2, {"comm": {"name": "diloco", "sync_every": 3}, "optim": CAME, "precision": BF16}),
    "sharded bf16 weights": (4, {"parallel": {"shard": 2}, "optim": CAME, "precision": BF16}),
}


def recipe_of(folder: Path, **sections: Any) -> dict[str, Any]:
    own = {
        "model": {"overrides": {**tiny_recipe(folder)["model"]["overrides"], **WIDE}},
        "comm": LOCAL,
        "train": {"checkpoint_every": 2, "keep_checkpoints": 9, "eval_every": 4},
    }
    return tiny_recipe(folder, **{**own, **sections, "train": {**own["train"], **sections.get("train", {})}})


def resume(straight: Path, name: str, step: int, processes: int, *settings: str) -> Path:
    """Copy a run, remove its checkpoints after a step, and resume it."""
    copy = straight.parent / name
    shutil.copytree(straight, copy)
    forget(copy, step)
    words = [word for setting in settings for word in ("--set", setting)]
    done = scantling("train", copy, "--resume", *words, processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    return copy


@pytest.mark.parametrize("name", CASES)
def test_resume_between_exchanges_is_bitwise(name: str, tmp_path: Path) -> None:
    """Exchanges come after steps 3, 6 and 8, the last; checkpoints after 2, 4, 6 and 8."""
    processes, sections = CASES[name]
    straight = train_run(recipe_of(tmp_path, **sections), tmp_path, "straight", processes)
    sent = [record["wire_bytes"] for record in records(straight)]
    if "sharded" not in name:
        assert [bool(each) for each in sent] == [False, False, True, False, False, True, False, True]
    expected = saved_tensors(straight)
    for step in (4, 6):
        resumed = saved_tensors(resume(straight, f"from-{step}", step, processes))
        assert resumed.keys() == expected.keys()
        assert [key for key, value in expected.items() if not torch.equal(value, resumed[key])] == []
    # between exchanges a checkpoint has the common weights, which are evaluated
    common, after = (saved_tensors(straight, step, "model/") for step in (4, 6))
    assert any(not torch.equal(value, after[key]) for key, value in common.items())
    own = {key for key in saved_tensors(straight, 4) if "/own/" in key}
    assert len({key.split("/")[1] for key in own}) == 2
    assert not any("/own/" in key for key in saved_tensors(straight, 6))
    for step in (8, 4):
        forget(straight, step)
        recorded = next(record["eval_loss"] for record in records(straight) if record["step"] == step)
        assert evaluate_run(straight)["eval_loss"] == pytest.approx(recorded, rel=1e-5)


def test_one_replica_takes_the_steps_of_its_own_optimizer(tmp_path: Path) -> None:
    """With outer_lr 1 and no outer momentum, the outer step p0 - (p0 - p) is the weights of the replica."""
    comm = {"name": "diloco", "sync_every": 3, "outer_lr": 1.0, "outer_momentum": 0.0}
    local = train_run(recipe_of(tmp_path, comm=comm), tmp_path, "local", 1)
    alone = train_run(recipe_of(tmp_path, comm={}), tmp_path, "alone", 1)
    for one, other in zip(records(alone), records(local), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("processes", [1, 2])
def test_ranks_are_removed_after_exchanges(processes: int, tmp_path: Path) -> None:
    """Due after steps 2, 4 and 5, they are removed after the exchanges of steps 3 and 6."""
    run_dir = train_run(recipe_of(tmp_path, tensor=TARGET), tmp_path, "run", processes)
    sizes = [record["tensor_parameters"] for record in records(run_dir)]
    assert len({*sizes[:2]}) == len({*sizes[3:5]}) == len({*sizes[5:]}) == 1
    assert sizes[0] > sizes[3] > sizes[5]
    assert sizes[-1] <= 0.6 * sizes[0] * 1.02


@pytest.mark.parametrize("name", ["local_steps", "diloco", "dense"])
def test_replicas_on_different_processors_stay_equal(name: str, tmp_path: Path) -> None:
    """Rank 1 has other instructions, products and threads; weights are compared before every exchange."""
    comm = {"name": "diloco"} if name == "diloco" else {**LOCAL, **({"exchange": "dense"} if name == "dense" else {})}
    comm["sync_every"] = 2
    path = write_recipe(tmp_path / "recipe.yaml", recipe_of(tmp_path, comm={**comm, "check_every": 1}))
    other = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "2"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = [
        subprocess.Popen(
            command(["train", path, "--run-dir", tmp_path / "run"]),
            env={**os.environ, "OMP_NUM_THREADS": "1", **(other if rank else {}), **torchrun_names(rank, 2, port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    outputs = [each.communicate(timeout=240)[0] for each in started]
    assert [each.returncode for each in started] == [0, 0], outputs
    # vector instructions draw other values than scalar ones
    assert "the first weights differ between replicas" in outputs[0]
    assert [bool(record["wire_bytes"]) for record in records(tmp_path / "run")] == 4 * [False, True]


def test_records_between_exchanges_are_of_the_first_replica(tmp_path: Path) -> None:
    run_dir = train_run(recipe_of(tmp_path, train={"eval_every": 8, "checkpoint_every": 8}), tmp_path, "run", 2)
    own = [record["loss"] for record in records(run_dir)]
    alone = train_run(recipe_of(tmp_path, comm={}, train={"batch_size": 4}), tmp_path, "alone", 1)
    # the first step's loss is that of half of the batch
    assert own[0] != pytest.approx(records(alone)[0]["loss"], rel=1e-6)
    assert [record["tokens"] for record in records(run_dir)] == [record["tokens"] for record in records(alone)]


def test_recorded_loss_of_shards_is_that_of_their_replica(tmp_path: Path) -> None:
    train = {"eval_every": 8, "checkpoint_every": 8}
    whole = train_run(recipe_of(tmp_path, train=train), tmp_path, "whole", 2)
    sharded = train_run(recipe_of(tmp_path, train=train, parallel={"shard": 2}), tmp_path, "sharded", 4)
    for one, other in zip(records(whole), records(sharded), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-3)


@pytest.mark.parametrize("sections", [{}, {"optim": CAME, "precision": BF16}], ids=["fp32", "bf16"])
def test_planned_bytes_are_those_sent(tmp_path: Path, sections: dict[str, Any]) -> None:
    recipe = recipe_of(tmp_path, comm={**LOCAL, "sync_every": 2, "check_every": None}, **sections)
    straight = train_run(recipe, tmp_path, "run", 2)
    sent = [record["wire_bytes"] for record in records(straight)]
    planned = json.loads((straight / "plan.json").read_text())
    assert sum(sent[2:]) / len(sent[2:]) == pytest.approx(planned["wire_bytes"], rel=0.02)
    assert records(straight)[-1]["residual_bytes"] == planned["residual_bytes"]


@pytest.mark.parametrize(
    ("processes", "later", "sections"),
    [
        (2, 3, {}),
        (2, 3, {"optim": CAME, "precision": BF16}),
        (4, 2, {"parallel": {"shard": 2}}),
    ],
    ids=["fp32", "bf16", "sharded"],
)
def test_resume_on_another_number_of_replicas(
    tmp_path: Path, processes: int, later: int, sections: dict[str, Any]
) -> None:
    """The weights between exchanges are averaged, and replica 2 has the optimizer state of replica 0."""
    straight = train_run(recipe_of(tmp_path, train={"batch_size": 12}, **sections), tmp_path, "straight", processes)
    wide = resume(straight, "wide", 4, later)
    one, other = records(straight), records(wide)
    assert [record["step"] for record in other] == list(range(1, 9))
    # of the common weights: among more replicas, each holds a smaller part of its residual in its own
    assert other[-1]["eval_loss"] == pytest.approx(one[-1]["eval_loss"], rel=0.01)
    own = [saved_tensors(straight, 4, f"exchange/rank{rank}/own/") for rank in (0, 1)]
    assert len(own[0]) == len(own[1]) > 0


def test_gradient_that_is_not_finite_is_left_out_on_its_replica(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "recipe.yaml", recipe_of(tmp_path))
    done = scantling("train", path, "--run-dir", tmp_path / "run", processes=2, before=poisoned.patch)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [record.get("nonfinite_ranks") for record in records(tmp_path / "run")] == [*2 * [None], [1], *5 * [None]]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"comm": {"name": "diloco", "topk": 4}}, "comm.topk: has no effect here"),
        ({"comm": {"name": "local_steps", "delay": 1}}, "comm.delay: has no effect here"),
        ({"comm": {"name": "demo", "outer_lr": 0.5}}, "comm.outer_lr: has an effect with comm.name: local_steps or"),
        ({"comm": {"outer_momentum": 0.5}}, "comm.outer_momentum: has an effect with comm.name: local_steps or"),
        (
            {"comm": LOCAL, "optim": CAME, "precision": {**BF16, "rounding": "compensated"}},
            "precision.rounding: keeps bits of weights that the exchange replaces",
        ),
        ({"comm": {**LOCAL, "budget": "2 kB/step"}}, "comm.sync_every: is chosen by comm.budget"),
        ({"comm": {"name": "demo", "topk": 4, "budget": "2 kB/step"}}, "comm.topk: is chosen by comm.budget"),
        ({"comm": {"name": "allreduce", "budget": "2 kB/step"}}, "comm.budget: has an effect with comm.name: demo"),
        ({"comm": {"name": "demo", "topk": 32, "budget": "2 kB/step"}}, "comm.topk: is chosen by comm.budget"),
        ({"comm": {"name": "diloco", "sync_every": 1, "budget": "2 kB/step"}}, "comm.sync_every: is chosen by"),
        ({"comm": {"name": "local_steps", "topk": None}}, "comm.topk: must be a number, such as 4096; null is for a"),
        ({"comm": {"name": ["demo"], "budget": "2 kB/step"}}, "comm.name: "),
        ({"comm": {"name": "local_steps", "chunk": 0}}, "recipe: 1 fault\n  - comm.chunk: "),
        (
            {"comm": {"elastic": True, "budget": "2 kB/step"}},
            "recipe: 2 faults\n  - comm.elastic: .*\n  - comm.budget: ",
        ),
        (
            {"comm": {"name": "local_steps", "exchange": "dense", "sync_every": 20, "budget": "2 kB/step"}},
            "comm.sync_every: is chosen by comm.budget",
        ),
        ({"comm": {"name": "demo", "sync_every": None, "budget": "2 kB/step"}}, "comm.sync_every: must be a number"),
        ({"comm": {"name": "demo", "budget": "2 MB"}}, "comm.budget: must be a number above 0 and its unit, B/step"),
        ({"comm": {"name": "demo", "budget": 2000}}, "comm.budget: must be a number above 0 and its unit, B/step"),
        ({"comm": {"name": "local_steps", "budget": "0 B/step"}}, "comm.budget: must be a number above 0"),
        ({"comm": {"name": "demo", "link": "0.0 Mbit/s"}}, "comm.link: must be a number above 0"),
        ({"comm": {**LOCAL, "outer_lr": float("inf")}}, "comm.outer_lr: input should be a finite number"),
        ({"comm": {**LOCAL, "link": "1 Mbit/s"}}, "comm.sync_every: is chosen by comm.link"),
        (
            {"comm": {"name": "demo", "exchange": "dense", "budget": "2 kB/step"}},
            "comm.budget: chooses topk, which exchange: dense does not have",
        ),
        ({"comm": {"name": "demo", "share": 0.2}}, "comm.share: has an effect with comm.link alone"),
        ({"comm": {"name": "demo", "link": "1 Mbit/s", "budget": "2 kB/step"}}, "comm.budget: is chosen by comm.link"),
        ({"comm": {"name": "allreduce", "link": "1 Mbit/s"}}, "comm.link: has an effect with comm.name: demo"),
        ({"comm": {"name": "demo", "link": "1 MB/s"}}, "comm.link"),
        ({"comm": LOCAL, "train": {"graph": True}}, "train.graph: cannot capture an exchange"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(tiny_recipe(tmp_path, **sections))


def test_stored_recipe_keeps_the_defaults_of_its_method(tmp_path: Path) -> None:
    budget = {"budget": "2 kB/step"}
    for given, topk, every in (
        ({"name": "local_steps"}, 4096, 15),
        ({"name": "local_steps", "chunk": 16}, 256, 15),
        ({"name": "local_steps", "chunk": "16"}, 256, 15),
        ({"name": "local_steps", "exchange": "dense", **budget}, 4096, None),
        ({"name": "diloco"}, 32, 250),
        ({"name": "diloco", **budget}, 32, None),
        ({"name": "demo", **budget}, None, 1),
        (budget, None, None),
    ):
        section = load_recipe(tiny_recipe(tmp_path, comm=given)).comm
        assert (section.sync_every, section.topk) == (every, topk)
        again = load_recipe(tiny_recipe(tmp_path, comm=section.model_dump(mode="json"))).comm
        assert again.local_options == section.local_options


def chosen(note: str, option: str) -> int:
    """Return the value of an option in a note on a budget."""
    found = re.search(rf"{option}: (\d+)", note)
    assert found, note
    return int(found[1])


def test_budget_chooses_the_most_that_it_allows(tmp_path: Path) -> None:
    def planned(budget: str, processes: int = 2, **comm: Any) -> tuple[int, str]:
        section = {"check_every": None, "dense": "sign", **comm, "budget": budget}
        plan = sc.plan(recipe_of(tmp_path, comm=section), world_size=processes)
        notes = [note for note in plan.notes if "comm.budget" in note]
        return plan.wire_bytes, "; ".join(notes)

    demo = {"name": "demo", "chunk": 16}
    sent, note = planned("8 kB/step", **demo)
    assert 7_500 < sent <= 8_000
    topk = chosen(note, "topk")
    for given, fits in ((topk, True), (topk + 1, False)):
        section = {"check_every": None, "dense": "sign", **demo, "topk": given}
        assert (sc.plan(recipe_of(tmp_path, comm=section), world_size=2).wire_bytes <= 8_000) is fits
    local = {key: value for key, value in LOCAL.items() if key != "sync_every"}
    with pytest.raises(UserError, match="local steps would have to share"):
        planned("1 B/step", **local)
    assert "still exchanges once, at its end, and sends more" in planned("100 B/step", **local)[1]
    assert "averaging all gradients sends" in planned("10 MB/step", **local)[1]
    for budget in (700, 2_000, 30_000):
        sent, note = planned(f"{budget} B/step", **local)
        every = chosen(note, "sync_every")
        assert sent <= budget
        assert "averaging" not in note
        assert every == 1 or sent * every > budget * (every - 1)
    # nothing is sent by one process
    assert "allows sync_every: 15 (" in planned("1 B/step", processes=1, **local)[1]
    with pytest.raises(UserError, match=r"one element per block sends .* per step already.* local_steps"):
        planned("100 B/step", **demo)


@pytest.mark.parametrize("processes", [2, 8])
def test_budget_alone_chooses_local_steps(tmp_path: Path, processes: int) -> None:
    """All elements are sent, after fewer steps with more bytes; fewer elements only with the smallest budgets."""

    def plan(**comm: Any) -> tuple[int, int, int]:
        section = {"check_every": None, "chunk": 32, **comm}
        recipe = recipe_of(tmp_path, comm=section, train={"batch_size": 8})
        planned = sc.plan(recipe, world_size=processes)
        (note,) = [note for note in planned.notes if "allows" in note]
        assert note.endswith("(comm.name: local_steps)")
        topk, every = (comm.get(key) or chosen(note, key) for key in ("topk", "sync_every"))
        return topk, every, planned.wire_bytes

    found = []
    for budget in (300, 1_000, 2_000, 4_000, 60_000):
        topk, every, sent = plan(budget=f"{budget} B/step")
        assert topk == 1024
        assert sent <= budget
        assert every == 1 or sent * every > budget * (every - 1)
        found.append(every)
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 5
    for given in ({"topk": 100}, {"sync_every": 7}):
        _, _, sent = plan(budget="2 kB/step", **given)
        assert 1_500 < sent <= 2_000
    with pytest.raises(UserError, match=r"one element per block sends .*; raise the budget, or raise comm.sync_every$"):
        plan(budget="100 B/step", sync_every=1)
    least, every, sent = plan(budget="8 B/step")
    assert least < 1024
    assert every == 1000
    assert sent <= 8
    with pytest.raises(UserError, match=r"one element per block sends .*; raise the budget$"):
        plan(budget="0.01 B/step")


def test_run_keeps_to_its_budget(tmp_path: Path) -> None:
    comm = {key: value for key, value in LOCAL.items() if key != "sync_every"}
    comm |= {"budget": "2 kB/step", "check_every": None}
    folder = train_run(recipe_of(tmp_path, comm=comm, train={"steps": 12, "eval_every": 12}), tmp_path, "run", 2)
    sent = [record["wire_bytes"] for record in records(folder)]
    assert records(folder)[-1]["wire_budget_bytes"] == 2_000
    assert sum(bool(each) for each in sent[:-1]) < 11
    assert 0 < sum(sent) / len(sent) < 2_400  # the first exchange compares the replicas
    resumed = resume(folder, "resumed", 6, 2)
    expected, found = (saved_tensors(each, 12) for each in (folder, resumed))
    assert all(torch.equal(value, found[key]) for key, value in expected.items())


@pytest.mark.dist
@pytest.mark.parametrize("parallel", [{}, {"shard": 2, "replicate": 2}])
def test_run_measures_what_its_link_allows(tmp_path: Path, parallel: dict[str, int]) -> None:
    """The budget is stored, so that the run resumes with the same, also from the recipe with the link."""
    comm = {key: value for key, value in LOCAL.items() if key != "sync_every"} | {"check_every": None}
    recipe = recipe_of(tmp_path, comm={**comm, "link": "2 Mbit/s", "share": 0.5}, train={"steps": 8}, parallel=parallel)
    processes = 4 if parallel else 2
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    done = scantling("train", path, "--run-dir", tmp_path / "run", processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    message = re.search(r"comm.link: forward and backward passes take (\S+) s per step", done.stdout)
    assert message, done.stdout
    seconds = float(message.group(1))
    stored = load_recipe(tmp_path / "run" / "recipe.yaml").comm
    assert (stored.link, stored.share) == (None, 0.1)
    assert stored.budget_bytes == pytest.approx(2e6 / 8 * 0.5 * seconds, rel=0.02)
    assert records(tmp_path / "run")[-1]["wire_budget_bytes"] == stored.budget_bytes
    wanted = saved_tensors(tmp_path / "run", 8)
    forget(tmp_path / "run", 4)
    done = scantling("train", path, "--run-dir", tmp_path / "run", "--resume", processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"comm.link: the run keeps its budget, {stored.budget}" in done.stdout
    assert load_recipe(tmp_path / "run" / "recipe.yaml").comm == stored
    found = saved_tensors(tmp_path / "run", 8)
    assert all(torch.equal(value, found[key]) for key, value in wanted.items())
