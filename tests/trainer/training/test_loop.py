"""Tests of the recipe's options for the loop: number formats, schedules, workers, compilation, tasks, sinks."""

from __future__ import annotations

import fcntl
import json
import math
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import torch

import scantling as sc
from scantling.cli import run as run_cli
from scantling.errors import RecipeError, RunError
from scantling.trainer.recipe import Recipe
from scantling.trainer.training.run import load_run_recipe
from scantling.trainer.training.run_dir import RunDir
from tests.runs import command, records, tiny_recipe, write_recipe

TINY_BERT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def losses(run_dir: Path) -> list[float]:
    return [record["loss"] for record in records(run_dir)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[float]]:
    """Return the recipe from which the others differ in one setting, and its losses."""
    folder = tmp_path_factory.mktemp("plain")
    recipe = tiny_recipe(folder)
    sc.train(recipe, run_dir=folder / "run")
    return recipe, losses(folder / "run")


def test_sections_override_the_recipe(tmp_path: Path) -> None:
    def resolved(**sections: dict[str, Any]) -> Recipe:
        return load_run_recipe(
            tiny_recipe(tmp_path), None, resume=False, settings=["train.steps=7"], overrides=sections
        )[0]

    text = str(tmp_path / "\U0001f600\x7f# 010.txt")
    recipe = resolved(data={"text": [Path("a.txt"), text]}, train={"warmup": 3e-5})
    assert recipe.data.text == [str(Path("a.txt").absolute()), text]
    assert (recipe.train.steps, recipe.train.warmup) == (7, 3e-5)
    with pytest.raises(RecipeError, match=r"train\.steps"):
        resolved(train={"steps": object()})


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("data", {"workers": 2}),
        ("train", {"activation_checkpointing": True}),
        ("train", {"eval_every": 2, "checkpoint_every": 3, "keep_checkpoints": 1}),
    ],
)
def test_settings_that_keep_the_losses(
    plain: tuple[dict[str, Any], list[float]], tmp_path: Path, section: str, keys: dict[str, Any]
) -> None:
    recipe, wanted = plain
    sc.train(recipe, run_dir=tmp_path / "run", **{section: keys})
    assert losses(tmp_path / "run") == wanted


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_low_precision_stays_near_fp32(plain: tuple[dict[str, Any], list[float]], tmp_path: Path, compute: str) -> None:
    """Both formats differ from fp32 by no more than their 8 and 11 bits of precision allow at a loss of 6."""
    recipe, wanted = plain
    sc.train(recipe, run_dir=tmp_path / "run", precision={"compute": compute})
    found = losses(tmp_path / "run")
    assert found != wanted
    assert found == pytest.approx(wanted, rel=0.01)
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["num_parameters"] > 0


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_model_has_the_same_losses(
    plain: tuple[dict[str, Any], list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Inductor is the default; the other backend captures and differentiates the same graphs, without codegen."""
    recipe, wanted = plain
    compile_model = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **keys: compile_model(*args, **{**keys, "backend": backend}))
    result = sc.train(recipe, run_dir=tmp_path / "run", train={"compile": True})
    assert losses(tmp_path / "run") == pytest.approx(wanted, rel=1e-5)
    assert result.status == "done"


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"schedule": "constant"}, [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [1 / 3, 2 / 3, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1]),
        ({"schedule": "wsd", "decay": 0.5}, [1 / 3, 2 / 3, 1, 1, 0.775, 0.55, 0.325, 0.1]),
    ],
)
def test_schedules_reach_the_optimizer(tmp_path: Path, schedule: dict[str, Any], expected: list[float]) -> None:
    recipe = tiny_recipe(tmp_path, optim={"lr": 0.004}, train={"warmup": 2, "min_lr_ratio": 0.1, **schedule})
    sc.train(recipe, run_dir=tmp_path / "run")
    assert [record["lr"] / 0.004 for record in records(tmp_path / "run")] == pytest.approx(expected)


def test_embeddings_have_their_own_learning_rate(tmp_path: Path) -> None:
    """Compare with a run at a quarter of the rate: after the first step, only the embeddings are equal."""
    ends = []
    for optim in ({"lr": 0.02}, {"lr": 0.02, "embedding_lr_scale": 0.25}, {"lr": 0.005}):
        recipe = tiny_recipe(tmp_path, optim={"weight_decay": 0.0, **optim}, train={"steps": 1, "warmup": 0})
        folder = tmp_path / str(len(ends))
        sc.train(recipe, run_dir=folder)
        assert run_cli(["export", str(folder), "--to", "hf", str(folder / "hf")]) == 0
        ends.append(dict(sc.load(folder / "hf").named_parameters()))
    plain, scaled, slow = ends
    for name, value in scaled.items():
        assert torch.equal(value, (slow if "embed" in name or "lm_head" in name else plain)[name]), name
        assert not torch.equal(plain[name], slow[name])


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), RuntimeError("can't allocate memory")],
)
def test_out_of_memory_error_says_what_to_do(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("scantling.trainer.training.step.Stepper.step", fail)
    with pytest.raises(RunError, match=r"^out of memory: .+\. Set train\.micro_batch_size lower"):
        sc.train(tiny_recipe(tmp_path), run_dir=tmp_path / "run")


def test_tensorboard_gets_the_records(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sc.train(tiny_recipe(tmp_path, train={"tensorboard": True}), run_dir=tmp_path / "run")
    board = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("loss")] == list(range(1, 9))
    assert [event.value for event in board.Scalars("loss")] == pytest.approx(losses(tmp_path / "run"))


def test_masked_lm_from_recipe_to_exported_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    came = {"name": "came", "momentum": "int4", "debias": True, "lr": 0.01}
    recipe = tiny_recipe(tmp_path, model={"preset": "bert-6-encoder", "overrides": TINY_BERT}, optim=came)
    result = sc.train(recipe, run_dir=tmp_path / "run")
    assert result.metrics["eval_loss"] < math.log(30522) - 0.5, "no better than guessing one of the ids"
    assert run_cli(["export", str(tmp_path / "run"), "--to", "hf", str(tmp_path / "hf")]) == 0
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "hf")
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "hf")("the quick brown fox")["input_ids"]])
    assert model(input_ids=ids).logits.shape[:2] == ids.shape
    assert run_cli(["eval", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.rpartition("\n{")[2].join(["{", ""]))["eval_loss"] == pytest.approx(
        result.metrics["eval_loss"], rel=1e-6
    )


@pytest.mark.charts
def test_classification_from_recipe_to_report(tmp_path: Path) -> None:
    rows = [
        {"a": word * 3, "b": other, "label": int(word == other)}
        for word in ("sun", "rain", "snow", "fog")
        for other in ("sun", "rain", "snow", "fog")
        for _ in range(12)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    recipe = {
        "name": "pairs",
        "model": {"preset": "bert-6-encoder", "task": "classification", "overrides": TINY_BERT},
        "data": {
            "jsonl": str(tmp_path / "pairs.jsonl"),
            "fields": {"text": "a", "pair": "b", "label": "label"},
            "labels": [0, 1],
            "seq_len": 32,
            "heldout": 0.25,
        },
        "train": {"steps": 6, "batch_size": 8, "device": "cpu"},
    }
    result = sc.train(recipe, run_dir=tmp_path / "run")
    assert 0 <= result.metrics["accuracy"] <= 1
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


@pytest.mark.charts
def test_moved_run_can_be_resumed(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, train={"checkpoint_every": 4})
    sc.train(recipe, run_dir=tmp_path / "run")
    wanted = losses(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.move(tmp_path / "run", tmp_path / "elsewhere" / "run")
    shutil.rmtree(moved / "checkpoints" / "step-8")
    assert sc.train(moved, resume=True).step == 8
    assert losses(moved) == wanted


@pytest.mark.charts
def test_default_run_directories_do_not_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that another run has reserved but not yet written to is not free either."""
    monkeypatch.chdir(tmp_path)
    other = RunDir(Path("runs") / "tiny")
    other.lock()
    first = sc.train(tiny_recipe(tmp_path, train={"steps": 1}))
    second = sc.train(tiny_recipe(tmp_path, train={"steps": 1}))
    other.unlock()
    assert [first.run_dir.name, second.run_dir.name] == ["tiny-2", "tiny-3"]


def on_a_terminal(arguments: list[str | Path]) -> tuple[int, str]:
    """Run the command line on a pseudo-terminal of 80 columns; return its exit code and all output."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "CI")}
    settings = {**kept, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command(arguments), stdin=child, stdout=child, stderr=child, env=settings)
    os.close(child)
    written = b""
    while True:
        try:
            part = os.read(parent, 65536)
        except OSError:  # EIO: the other end is closed
            break
        if not part:
            break
        written += part
    os.close(parent)
    return process.wait(timeout=60), written.decode()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a pseudo-terminal")
def test_live_line_on_a_terminal(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "recipe.yaml", tiny_recipe(tmp_path, train={"steps": 6}))
    code, written = on_a_terminal(["train", path, "--run-dir", tmp_path / "run"])
    assert code == 0, written
    assert "\x1b[?25l" in written, "no live display"
    assert "\x1b[?25h" in written, "the cursor must come back"
    assert "6/6" in written
    assert "tok/s" in written
    assert "\x1b[3" in written, "colors"
