"""Tests of the commands as a user types them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch

from scantling import cli
from scantling.cli import commands, run
from tests.runs import TINY, popen, records, scantling, tiny_recipe, write_corpus, write_recipe
from tests.trainer.reporting.fake import make_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished tiny run."""
    folder = tmp_path_factory.mktemp("trained")
    path = write_recipe(
        folder / "recipe.yaml", tiny_recipe(folder, optim={"name": "came", "lr": 0.003}, train={"eval_every": 4})
    )
    assert run(["train", str(path), "--run-dir", str(folder / "run"), "--set", "train.steps=9"]) == 0
    return folder / "run"


def test_help_is_quick() -> None:
    """It takes under 0.5 s on an idle machine; the best of five counts, because the machine may be busy."""
    best = 10.0
    for _ in range(5):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "scantling", "--help"], capture_output=True, text=True, check=True)
        best = min(best, time.perf_counter() - began)
    assert "compare" in done.stdout
    assert best < 0.5


def test_shell_completion_of_commands_options_and_values() -> None:
    def complete(*words: str) -> set[str]:
        environment = {"_SCANTLING_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words)}
        environment["COMP_CWORD"] = str(len(words) - 1)
        done = subprocess.run(
            [sys.executable, "-m", "scantling"], capture_output=True, text=True, env={**os.environ, **environment}
        )
        assert done.returncode == 0, done.stderr
        return set(done.stdout.split())

    assert {"train", "plan", "eval", "sweep"} <= complete("scantling", "")
    assert complete("scantling", "train", "--dry") == {"--dry-run"}
    assert complete("scantling", "eval", "run", "--device", "c") == {"cpu", "cuda"}
    assert complete("scantling", "train", "rec") == set()  # the shell then completes file names
    for shell in ("bash", "zsh", "fish"):
        source = {**os.environ, "_SCANTLING_COMPLETE": f"source_{shell}"}
        done = subprocess.run([sys.executable, "-m", "scantling"], capture_output=True, text=True, env=source)
        assert f"_SCANTLING_COMPLETE=complete_{shell}" in done.stdout


def test_run_directory_has_the_documented_files(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    assert {
        "recipe.yaml",
        "environment.json",
        "plan.json",
        "metrics.jsonl",
        "result.json",
        "report.html",
        "checkpoints",
    } <= names
    environment = json.loads((trained / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__


def test_metrics_have_fixed_names_on_every_step(trained: Path) -> None:
    lines = records(trained)
    assert [line["step"] for line in lines] == list(range(1, 10))
    fixed = [
        "step",
        "tokens",
        "loss",
        "grad_norm",
        "lr",
        "step_s",
        "tokens_per_s",
        "peak_memory_bytes",
        "num_parameters",
        "optimizer_state_bytes",
        "wire_bytes",
        "energy_j",
        "energy_source",
    ]
    shares = []
    for line in lines:
        assert not [name for name in fixed if name not in line]
        phases = sum(line[f"{phase}_s"] for phase in ("data", "forward", "backward", "exchange", "optimizer"))
        shares.append(phases / line["step_s"])
        assert (line["energy_j"] is None) == (line["energy_source"] is None)
    assert max(shares) <= 1.001
    assert median(shares) > 0.8  # a step may be interrupted between two phases
    assert [line["step"] for line in lines if "eval_loss" in line] == [4, 8, 9]
    assert lines[-1]["tokens"] == 9 * 4 * 32
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_eval_matches_the_recorded_metrics(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", str(trained), "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    last = records(trained)[-1]
    assert metrics["step"] == 9
    assert metrics["eval_loss"] == pytest.approx(last["eval_loss"], rel=1e-6)
    assert metrics["bits_per_byte"] == pytest.approx(last["bits_per_byte"], rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(2.718281828459045 ** metrics["eval_loss"], rel=1e-6)
    assert run(["eval", str(trained), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == metrics
    assert run(["eval", str(trained), "--device", "tpu"]) == 2
    assert "one of auto, cpu, cuda; given 'tpu'" in capsys.readouterr().err
    assert run(["eval", str(trained)]) == 0
    assert "perplexity" in capsys.readouterr().out


def test_eval_scores_minimal_pairs(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("sentence_good,sentence_bad\nthe fox,xof eht\na lazy dog,god yzal a\n")
    assert run(["eval", str(trained), "--minimal-pairs", str(pairs)]) == 0
    shown = capsys.readouterr().out
    assert "95 % interval" in shown
    assert re.search(r"all .* % to .* % .* 2 ", shown)
    assert run(["eval", str(trained), "--minimal-pairs", str(pairs), "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["phenomena"]["pairs"]["count"] == metrics["count"] == 2
    assert run(["eval", str(trained), "--minimal-pairs", str(pairs), "--lm-eval", "blimp"]) == 2
    assert run(["eval", str(trained), "--minimal-pairs", str(tmp_path / "nothing.csv")]) == 2
    assert "file not found" in capsys.readouterr().err
    assert run(["eval", str(trained), "--limit", "3"]) == 2
    assert "--minimal-pairs" in capsys.readouterr().err
    assert run(["eval", str(trained), "--minimal-pairs", str(pairs), "--limit", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["count"] == 1


def test_export_loads_without_scantling(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    assert run(["export", str(trained), "--to", "hf", str(folder)]) == 0
    assert "largest logit difference" in capsys.readouterr().out
    code = (
        "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f"m = M.from_pretrained({str(folder)!r}); t = T.from_pretrained({str(folder)!r}); "
        "assert 'scantling' not in sys.modules; "
        "print(m.num_parameters(), m(**t('the fox', return_tensors='pt')).logits.shape[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(records(trained)[-1]["num_parameters"]), "7"]
    assert run(["export", str(trained), "--to", "hf", str(folder)]) == 2
    assert run(["export", str(trained), "--to", "gguf", str(tmp_path / "x")]) == 2


def test_report_writes_one_page(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert run(["report", str(trained), "--out", str(page)]) == 0
    assert "<svg" in page.read_text()
    assert run(["report", str(tmp_path)]) == 2


def test_schema_describes_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) >= {"model", "data", "train", "optim"}
    assert schema["additionalProperties"] is False


def test_plan_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_recipe(tmp_path / "recipe.yaml", tiny_recipe(tmp_path))
    assert run(["plan", str(path), "--json", "--world-size", "2"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["wire_bytes"] == made["gradient_bytes"] == made["num_trainable"] * 4
    assert run(["plan", str(path)]) == 0
    assert "parameters" in capsys.readouterr().out.lower()


def test_plan_of_a_run_uses_its_recipe_and_world_size(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned(*arguments: str | Path) -> dict[str, Any]:
        assert run(["plan", *map(str, arguments), "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        for measured in ("machine", "base_bytes", "peak_memory_bytes"):
            del found[measured]
        return found

    given = planned(trained)
    assert given == planned(trained / "recipe.yaml", "--device", "cpu")
    assert given["num_parameters"] == json.loads((trained / "plan.json").read_text())["num_parameters"]
    longer = planned(trained, "--set", "train.steps=90", "--world-size", "2")
    assert (longer["total_tokens"], longer["world_size"]) == (10 * given["total_tokens"], 2)

    copy = tmp_path / "run"
    copy.mkdir()
    assert run(["plan", str(copy)]) == 2
    assert f"{copy} holds no run" in capsys.readouterr().err
    (copy / "recipe.yaml").write_bytes((trained / "recipe.yaml").read_bytes())
    content: Any
    for content, expected in [
        ({"world_size": 4, "device": "cuda:0"}, (4, "cuda")),
        ({"world_size": 4.5, "device": ["x"]}, (1, "cpu")),
        ([1], (1, "cpu")),
    ]:
        (copy / "environment.json").write_text(json.dumps(content))
        made = planned(copy)  # the recipe of the copy says cpu
        assert (made["world_size"], made["device"]) == expected


def test_sweep_accepts_a_run_as_base(trained: Path, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.yaml"
    for base, code in ((trained, 0), (tmp_path, 2)):
        sweep.write_text(json.dumps({"base": str(base), "axes": {"train.steps": [2, 3]}}))
        assert run(["sweep", str(sweep), "--dry-run"]) == code


def test_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_recipe(tmp_path / "recipe.yaml", tiny_recipe(tmp_path))
    assert run(["train", str(path), "--dry-run", "--run-dir", str(tmp_path / "run")]) == 0
    assert "valid" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


MISSING: dict[str, dict[str, object]] = {
    "text": {"data": {"text": "nowhere.txt"}},
    "glob": {"data": {"text": "nowhere/*.txt"}},
    "one of several": {"data": {"text": ["corpus.txt", "nowhere.txt"]}},
    "held-out": {"data": {"text": "corpus.txt", "validation": "nowhere.txt"}},
    "jsonl": {"data": {"jsonl": "nowhere.jsonl"}},
    "csv": {"data": {"csv": "nowhere.csv"}},
    "parquet": {"data": {"parquet": "nowhere.parquet"}},
    "bin": {"data": {"bin": "nowhere.bin"}},
    "no rows": {"data": {"jsonl": "none.jsonl"}},
    "wrong column": {"data": {"jsonl": "rows.jsonl", "fields": {"text": "body"}}},
    "no text": {"data": {"text": "binary.txt"}},
    "datasets": {"data": {"hf": "./nowhere/at/all"}},
    "datasets, saved": {"data": {"hf": "saved", "hf_split": "tarin"}},
    "datasets, column": {"data": {"hf": "saved", "fields": {"text": "body"}}},
    "tokenizer": {"data": {"text": "corpus.txt", "document_separator": "<doc>", "tokenizer": "nowhere"}},
    "model": {"model": {"hf": "nowhere"}, "data": {"text": "corpus.txt"}},
    "images": {"model": {"preset": "vit-digits"}, "data": {"images": "nowhere", "image_size": 8}},
    "images, saved": {
        "model": {"preset": "vit-digits"},
        "data": {"hf": "saved", "image_size": 8, "fields": {"image": "text", "label": "body"}},
    },
    "clicks": {"model": {"preset": "dlrm"}, "data": {"criteo": "nowhere.tsv"}},
    "no clicks": {
        "model": {"preset": "dlrm"},
        "data": {"csv": "none.csv", "clicks": {"label": "label", "categorical": ["text", "site"]}},
    },
    "click columns": {
        "model": {"preset": "dlrm"},
        "data": {"csv": "rows.csv", "clicks": {"label": "label", "categorical": ["text", "site"]}},
    },
    "an empty text": {"data": {"text": "none.txt"}},
    "an empty held-out text": {"data": {"text": "corpus.txt", "validation": "none.txt"}},
    "blank documents": {"data": {"jsonl": "blank.jsonl"}},
}


@pytest.mark.parametrize("case", MISSING)
def test_dry_run_fails_like_the_run(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_corpus(tmp_path / "corpus.txt")
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "label": 1}\n' * 9)
    (tmp_path / "rows.csv").write_text("text,label\n" + "a,1\n" * 9)
    (tmp_path / "none.jsonl").touch()
    (tmp_path / "none.csv").write_text("text,site,label\n")
    (tmp_path / "none.txt").touch()
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n{"text": " "}\n')
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe" * 9)
    if "saved" in str(MISSING[case]):
        datasets.Dataset.from_dict({"text": ["a", "b"]}, split="train").save_to_disk(tmp_path / "saved")
    recipe = {"model": {"preset": "llama-1m", "overrides": TINY}, "train": {"steps": 1, "batch_size": 1}}
    path = str(write_recipe(tmp_path / "recipe.yaml", {**recipe, **MISSING[case]}))
    capsys.readouterr()
    assert run(["train", path, "--dry-run"]) == 2
    planned = capsys.readouterr()
    assert run(["train", path]) == 2
    assert planned.err == capsys.readouterr().err
    assert re.search("nowhere|body|tarin|site|binary.txt|none|blank", planned.err)
    assert "valid" not in planned.out


def test_dry_run_refuses_what_the_run_refuses(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_recipe(tmp_path / "recipe.yaml", tiny_recipe(tmp_path)))
    for arguments, words in (
        ([path, "--run-dir", str(trained)], "already holds a run"),
        ([path, "--run-dir", str(tmp_path / "new"), "--resume"], "no run to resume"),
        ([str(trained), "--resume", "--set", "optim.lr=1.0"], "optim.lr"),
        ([path, "--set", "train.graph=true"], "train.graph"),
    ):
        assert run(["train", *arguments, "--dry-run"]) == 2
        assert words in capsys.readouterr().err
    assert run(["train", str(trained), "--resume", "--dry-run"]) == 0


def test_recipe_faults_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny_recipe(tmp_path, train={"stepz": 3, "schedule": "cosinus"})
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    assert run(["train", str(path), "--dry-run"]) == 2
    message = capsys.readouterr().err
    assert "2 faults" in message
    assert "train.stepz" in message
    assert "train.schedule" in message


@pytest.mark.parametrize(
    "arguments",
    [
        ["trian"],
        ["train"],
        ["train", "missing.yaml"],
        ["train", "a", "--set"],
        ["plan", "x.yaml"],
        ["eval", "nowhere"],
        ["report", "nowhere"],
    ],
)
def test_bad_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_usage_errors_are_those_of_any_click(monkeypatch: pytest.MonkeyPatch) -> None:
    """A click may have more or fewer classes between a bad parameter and the base class."""

    class ClickException(Exception): ...

    class UsageError(ClickException): ...

    class ParameterError(UsageError): ...

    class BadParameter(ParameterError): ...

    monkeypatch.setattr("typer.BadParameter", BadParameter)
    # another test of this process may have sent a signal
    monkeypatch.setattr("scantling.trainer.training.signals.was_interrupted", lambda: False)
    assert [cli._exit_code(error()) for error in (ClickException, UsageError, BadParameter, Exception)] == [
        2,
        2,
        2,
        None,
    ]


@pytest.mark.dist
def test_compare_prints_and_writes_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs are forked. `test_compare_forwards_sigterm_to_its_run` covers the shared terminal."""
    for name, optim in (("dense", "adamw"), ("lean", "came")):
        recipe = tiny_recipe(tmp_path, optim={"name": optim}) | {"name": name}
        write_recipe(tmp_path / f"{name}.yaml", recipe)
    recipes = [str(tmp_path / f"{name}.yaml") for name in ("dense", "lean")]
    arguments = ["compare", *recipes, "--out", str(tmp_path / "out"), "--set", "train.steps=12"]
    with (tmp_path / "log").open("ab") as log:
        monkeypatch.setattr(commands, "subprocess", SimpleNamespace(Popen=partial(popen, stdout=log)))
    assert run(arguments) == 0, (tmp_path / "log").read_text()
    shown, log = capsys.readouterr().out, (tmp_path / "log").read_text()
    compared = json.loads((tmp_path / "out" / "compare.json").read_text())
    dense, lean = compared["runs"]
    assert (dense["name"], lean["name"]) == ("dense", "lean")
    keys = (
        "num_parameters weight_bytes optimizer_state_bytes wire_bytes tokens_per_s step_s peak_memory_bytes train_loss "
        "eval_loss bits_per_byte"
    )
    for own in (dense, lean):
        assert all(isinstance(own[key], int | float) for key in keys.split())
    assert lean["optimizer_state_bytes"] < 0.65 * dense["optimizer_state_bytes"]
    assert (tmp_path / "out" / "report.html").exists()
    assert "checkpoints" in shown
    assert "step 12/12" in log
    assert not re.search(r"\x1b\[", shown + log), "colors without a terminal"
    assert run(arguments) == 2
    assert "dense.yaml ended with exit code 2; see its message above" in capsys.readouterr().err
    assert "already holds a run" in (tmp_path / "log").read_text().removeprefix(log)
    runs = [str(tmp_path / "out" / name) for name in ("dense", "lean")]
    assert run(["compare", *runs, "--out", str(tmp_path / "again")]) == 0
    assert json.loads((tmp_path / "again" / "compare.json").read_text()) == compared


def test_compare_distinguishes_runs_with_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make_trained(command: list[str]) -> int:
        make_run(Path(command[command.index("--run-dir") + 1]), name="same", steps=4)
        return 0

    monkeypatch.setattr(commands, "_wait", make_trained)
    recipes = [tmp_path / folder / "recipe.yaml" for folder in ("a", "b")]
    for recipe in recipes:
        recipe.parent.mkdir()
        write_recipe(recipe, tiny_recipe(tmp_path) | {"name": "same"})
    earlier = make_run(tmp_path / "earlier", name="same", steps=4)
    assert run(["compare", *map(str, recipes), str(earlier), "--out", str(tmp_path / "out")]) == 0
    compared = json.loads((tmp_path / "out" / "compare.json").read_text())["runs"]
    assert [each["name"] for each in compared] == ["a-recipe", "b-recipe", "earlier"]
    assert "a-recipe vs b-recipe vs earlier" in (tmp_path / "out" / "report.html").read_text()
    capsys.readouterr()

    taken = make_run(tmp_path / "again" / "same", name="other", steps=4)
    assert run(["compare", str(taken), str(recipes[0]), "--out", str(tmp_path / "again"), "--force"]) == 2
    assert "one of the runs to compare; choose another --out" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["export", "run", "--to", "hf", "out"], ["quantize", "run", "--weights", "int4"]])
def test_single_process_commands_refuse_torchrun(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("os._exit", lambda code: None)
    assert run(command) == 2
    assert f"{command[0]} runs in one process; torchrun started 2" in capsys.readouterr().err


def test_compare_forwards_sigterm_to_its_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = """
import pathlib, signal, sys, time

def end(*_):
    print("told", file=sys.stderr)
    sys.exit(3)

signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""

    def tell() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    teller = threading.Thread(target=tell)
    teller.start()
    assert commands._wait([sys.executable, "-c", script, str(tmp_path / "ready")]) == 3
    assert capfd.readouterr().err == "told\n"
    teller.join()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_unreadable_path_is_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "x" * 300 + ".yaml"]) == 2
    assert "File name too long" in capsys.readouterr().err


def test_overrides_reach_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_recipe(tmp_path / "recipe.yaml", tiny_recipe(tmp_path))
    assert run(["plan", str(path), "--json"]) == 0
    small = json.loads(capsys.readouterr().out)["num_parameters"]
    assert run(["plan", str(path), "--json", "--set", f"model.overrides.hidden_size={2 * TINY['hidden_size']}"]) == 0
    assert json.loads(capsys.readouterr().out)["num_parameters"] > 2 * small


def test_doctor_reports_one_process() -> None:
    done = scantling("doctor", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "torch" in done.stdout
    assert "one process; to measure the network" in done.stdout


@pytest.mark.dist
def test_doctor_measures_the_network() -> None:
    done = scantling("doctor", "--device", "cpu", "--json", processes=3)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["processes"]) == 3
    assert sorted((pair["source"], pair["target"]) for pair in found["pairs"]) == [
        (a, b) for a in range(3) for b in range(3) if a != b
    ]
    assert all(0 < pair["latency_s"] < 5 and pair["bytes_a_s"] > 1e5 for pair in found["pairs"])
    assert found["allreduce_4mib_s"] > 0
