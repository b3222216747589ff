"""Tests of continued runs: from step 0 if no checkpoint exists, and with more steps if the past steps are unchanged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import scantling as sc
from scantling.distributed.context import SINGLE_PROCESS, DistContext
from scantling.errors import UserError
from scantling.trainer.training.checkpoint import Checkpointer, load_tensors
from scantling.trainer.training.checkpoint_manifest import read_manifest
from scantling.trainer.training.resume import check_never_saved
from scantling.trainer.training.run_dir import RunDir
from scantling.trainer.training.sinks import Sink
from scantling.trainer.training.trained_run import evaluate_run
from tests.runs import records, scantling, tiny_recipe, write_corpus, write_recipe


class Messages(Sink):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


def same_runs(run: Path, other: Path, step: int) -> None:
    """Compare two runs bitwise: tensors, values and losses."""
    first, second = (each / "checkpoints" / f"step-{step}" for each in (run, other))
    tensors, others = load_tensors(first), load_tensors(second)
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensor, others[key]) for key, tensor in tensors.items())
    wanted, found = (read_manifest(path)["values"] for path in (first, second))
    assert {**wanted, "recipe": None, "joules": None} == {**found, "recipe": None, "joules": None}
    for want, got in zip(records(run), records(other), strict=True):
        assert (want["step"], want["loss"], want["lr"]) == (got["step"], got["loss"], got["lr"])


def die_at(step: int) -> Sink:
    class Dying(Sink):
        def record(self, record: dict[str, Any]) -> None:
            if record["step"] == step:
                raise KeyboardInterrupt

    return Dying()


@pytest.mark.parametrize("step", [1, 3])
def test_resume_starts_a_run_that_never_saved(tmp_path: Path, step: int) -> None:
    recipe = tiny_recipe(tmp_path, train={"checkpoint_every": 3})
    sc.train(recipe, run_dir=tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        sc.train(recipe, run_dir=tmp_path / "run", sinks=[die_at(step)])
    torn = tmp_path / "run" / "checkpoints" / "step-3.tmp"
    torn.mkdir(parents=True)
    (torn / "__0_0.distcp").write_bytes(b"half")
    messages = Messages()
    assert sc.train(tmp_path / "run", resume=True, sinks=[messages]).status == "done"
    assert any("no checkpoint yet: the run starts from step 0" in text for text in messages.texts)
    same_runs(tmp_path / "straight", tmp_path / "run", 8)


def test_resume_starts_a_run_that_ended_before_its_first_step(tmp_path: Path) -> None:
    recipe, run = tiny_recipe(tmp_path, train={"steps": 2}), tmp_path / "run"
    with pytest.raises(UserError, match="not found"):
        sc.train(recipe, run_dir=run, data={"text": str(tmp_path / "missing.txt")})
    with pytest.raises(UserError, match="ended before its first step: start it with its recipe"):
        sc.train(run, resume=True)
    assert sc.train(recipe, run_dir=run, resume=True).step == 2


def test_resume_never_starts_over_a_run_that_has_saved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    sc.train(tiny_recipe(tmp_path, train={"checkpoint_every": 2}), run_dir=run)
    kept = (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoints")
    for _ in range(2):
        with pytest.raises(UserError, match="records up to step 8 and no checkpoint"):
            sc.train(run, resume=True)
        assert (run / "metrics.jsonl").read_bytes() == kept
        (run / "result.json").unlink(missing_ok=True)


def test_resume_of_another_folder_changes_nothing(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    before = path.read_bytes()
    with pytest.raises(UserError, match="no run has been started there"):
        sc.train(path.parent, resume=True)
    assert path.read_bytes() == before
    with pytest.raises(UserError, match="holds no run to resume"):
        sc.train(recipe, run_dir=tmp_path / "other", resume=True)


LENGTHS = [
    {"schedule": "constant", "warmup": 2},
    {"schedule": "constant", "warmup": 0},
    {"schedule": "wsd", "warmup": 2, "decay": 0.25},
]


@pytest.mark.parametrize("train", LENGTHS, ids=lambda train: f"{train['schedule']}-{train['warmup']}")
def test_resume_with_more_steps_equals_the_longer_run(tmp_path: Path, train: dict[str, Any]) -> None:
    """Also in a second epoch, and from the last checkpoint of a finished run with a constant rate."""
    write_corpus(tmp_path / "corpus.txt", documents=6)
    first = 8 if train["schedule"] == "constant" else 6
    recipe = tiny_recipe(tmp_path, optim={"name": "came", "lr": 0.003}, train={**train, "checkpoint_every": 3})
    sc.train(recipe, run_dir=tmp_path / "straight", train={"steps": 16})
    run = tmp_path / "run"
    sc.train(recipe, run_dir=run, train={"steps": 8})
    if first == 6:
        shutil.rmtree(run / "checkpoints" / "step-8")
    assert sc.train(run, resume=True, train={"steps": 16}).step == 16
    same_runs(tmp_path / "straight", run, 16)
    assert RunDir(run).read_recipe().train.steps == 16
    assert evaluate_run(run)["step"] == 16
    shutil.rmtree(run / "checkpoints" / "step-16")
    assert sc.train(run, resume=True).step == 16
    same_runs(tmp_path / "straight", run, 16)


@pytest.mark.parametrize(
    ("train", "given", "message"),
    [
        ({"schedule": "cosine"}, 16, r"'cosine' the learning rate of each step depends on train\.steps.*export"),
        ({"schedule": "linear"}, 16, r"'linear' the learning rate of each step depends on train\.steps.*export"),
        ({"schedule": "wsd", "warmup": 2}, 16, r"at step 8, and its decay begins after step 6.*export"),
        ({"schedule": "wsd", "warmup": 2}, 9, r"at step 8, and its decay begins after step 6.*export"),
        ({"schedule": "constant", "warmup": 0.25}, 16, r"shares of all steps.*add --set train\.warmup=2$"),
        ({"schedule": "constant", "warmup": 0}, 7, r"is at step 8 already; given train\.steps: 7"),
    ],
)
def test_refused_resume_with_more_steps_says_what_to_do(
    tmp_path: Path, train: dict[str, Any], given: int, message: str
) -> None:
    run = tmp_path / "run"
    sc.train(tiny_recipe(tmp_path, train=train), run_dir=run)
    before = (run / "recipe.yaml").read_bytes(), (run / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=message):
        sc.train(run, resume=True, train={"steps": given})
    assert before == ((run / "recipe.yaml").read_bytes(), (run / "metrics.jsonl").read_bytes())


def test_resume_with_more_steps_and_shares_given_as_steps(tmp_path: Path) -> None:
    tensor = {"rank": 4, "size_target": 0.5, "adapt": 0.75, "truncate_every": 2}
    recipe = tiny_recipe(tmp_path, tensor=tensor, train={"schedule": "constant", "warmup": 0.25})
    run = tmp_path / "run"
    sc.train(recipe, run_dir=run)
    with pytest.raises(UserError, match=r"add --set train\.warmup=2 --set tensor\.adapt=6$"):
        sc.train(run, resume=True, train={"steps": 12})
    longer = {"steps": 12, "warmup": 2}
    sc.train(run, resume=True, train=longer, tensor={"adapt": 6})
    sc.train(recipe, run_dir=tmp_path / "straight", train=longer, tensor={"adapt": 6})
    same_runs(tmp_path / "straight", run, 12)


def test_command_line_resumes_with_more_steps(tmp_path: Path) -> None:
    train = {"schedule": "constant", "warmup": 0, "steps": 2}
    path = write_recipe(tmp_path / "recipe.yaml", tiny_recipe(tmp_path, train=train))
    run = tmp_path / "run"
    sc.train(path, run_dir=run)
    done = scantling("train", run, "--resume", "--set", "train.steps=3")
    assert done.returncode == 0, done.stderr
    assert "done at step 3" in done.stdout
    done = scantling("plan", run, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {**json.loads(done.stdout), "total_tokens": 3 * 4 * 32}
    refused = scantling("plan", tmp_path)
    assert refused.returncode == 0, "the folder of a recipe.yaml"
    (tmp_path / "empty").mkdir()
    refused = scantling("plan", tmp_path / "empty")
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)
    assert "recipe.yaml" in refused.stderr


@pytest.mark.parametrize("key", ["optim.weight_decay", "train.clip", "data.seq_len"])
def test_stored_recipe_edited_by_hand_is_refused(tmp_path: Path, key: str) -> None:
    run = tmp_path / "run"
    sc.train(tiny_recipe(tmp_path, train={"checkpoint_every": 2}), run_dir=run)
    section, name = key.split(".")
    stored = RunDir(run).recipe
    lines = stored.read_text().splitlines()
    start = lines.index(f"{section}:")
    (number,) = [n for n, line in enumerate(lines) if n > start and line.startswith(f"  {name}: ")][:1]
    lines[number] = f"  {name}: 16"
    stored.write_text("\n".join(lines) + "\n")
    for action in (lambda: sc.train(run, resume=True), lambda: evaluate_run(run)):
        with pytest.raises(UserError, match=rf"{key}: .* -> 16"):
            action()


def test_moved_data_can_be_resumed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    recipe = tiny_recipe(tmp_path, train={"checkpoint_every": 4})
    sc.train(recipe, run_dir=run)
    shutil.move(tmp_path / "corpus.txt", tmp_path / "moved.txt")
    stored = RunDir(run).recipe
    stored.write_text(stored.read_text().replace("corpus.txt", "moved.txt"))
    shutil.rmtree(run / "checkpoints" / "step-8")
    assert sc.train(run, resume=True).step == 8


def test_restart_from_step_0_is_checked_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank receives the error, so that none waits for another."""
    run = tmp_path / "run"
    sc.train(tiny_recipe(tmp_path, train={"steps": 1}), run_dir=run)
    shutil.rmtree(run / "checkpoints")
    gathered: list[Any] = []

    class TwoRanks(DistContext):
        def all_gather_object(self, value: Any) -> list[Any]:
            gathered.append(value)
            return [value, None]

    checkpointer = Checkpointer(run / "checkpoints", SINGLE_PROCESS)
    with pytest.raises(UserError, match="no checkpoint, although one was saved"):
        check_never_saved(RunDir(run), checkpointer, TwoRanks(0, 2, torch.device("cpu")))
    assert gathered[0] is not None
