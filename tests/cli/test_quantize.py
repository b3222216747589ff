"""Tests of `scantling quantize` on a run that takes seconds."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import scantling as sc
from scantling.cli import run
from scantling.cli.console import print_labeled
from scantling.cli.quantizing import _describe_prediction, _lines
from scantling.laws import PostTrainingLaw, PrecisionLaw
from scantling.precision import Quantizer
from scantling.trainer.training.quantize import predictions, quantize_run
from tests.runs import tiny_recipe, write_recipe

LABELS = {"loss", "predicted", "on disk", "in memory", "weights", "folder"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    recipe = write_recipe(folder / "tiny.yaml", tiny_recipe(folder))
    assert run(["train", str(recipe), "--run-dir", str(folder / "run")]) == 0
    return folder / "run"


def test_quantize_prints_and_writes_the_result(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["quantize", str(trained), "--weights", "int4", "--method", "gptq", "--group-size", "16"]
    assert run(given) == 0
    out = capsys.readouterr().out
    printed = " ".join(out.split())
    folder = trained / "quantized-int4-g16-gptq"
    assert out.startswith("loss        ")
    assert "down_proj" not in out
    for words in (
        "weights 14 in int4 by group of 16, gptq, step 8",
        "on held-out data",
        "by the kumar law, fitted on N 30.0M to 220M, D 1.50G to 26.0G; N and D of this run outside that range",
        "by the ouyang law",
        "in bf16",
        ": sc.load unpacks the weights to fp32; the model in memory is not smaller or faster",
        f"folder {folder} (load it with sc.load)",
    ):
        assert words in printed, printed
    model = sc.load(folder)
    assert len(model.model.layers[0].mlp.up_proj.weight[0, :16].unique()) <= 16
    assert AutoTokenizer.from_pretrained(folder)("fox")["input_ids"]
    assert run(given) == 2
    assert "exists and is not empty" in capsys.readouterr().err


def test_verbose_prints_a_table(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["quantize", str(trained), "--weights", "int8", "--out", str(tmp_path / "out"), "--verbose"]
    assert run(given) == 0
    out = capsys.readouterr().out
    assert out.index("on held-out data") < out.index("┃ model.layers.... ") < out.index("│ 1.mlp.down_proj ")


def test_one_warning_line_per_kind(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    given = ["--weights", "int4", "--method", "gptq", "--calibration", "1", "--out", str(tmp_path / "out"), "--json"]
    assert run(["quantize", str(trained), *given]) == 0
    warnings = " ".join(capsys.readouterr().err.split())
    assert warnings.count("WARNING") == 1
    assert "2 of 14 weights have more inputs than calibration tokens (" in warnings


def test_result_fits_80_columns(trained: Path, tmp_path: Path) -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=80, highlight=False, soft_wrap=True)
    done = quantize_run(trained, "int4", tmp_path / "out")
    for label, text in _lines(done, "sc.load"):
        print_labeled(console, label, text)
    lines = out.getvalue().splitlines()
    words = {word for line in lines for word in line.split()}
    assert all(len(line) <= 80 or str(tmp_path) in line for line in lines)
    assert all(line.startswith(" " * 12) or line[:12].strip() in LABELS for line in lines)
    assert all(word in words for _, text in _lines(done, "sc.load") for word in text.split())


def test_json_metrics(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = {}
    for bits in (2, 8):
        out = tmp_path / f"int{bits}"
        options = ["--weights", f"int{bits}", "--clip", "mse", "--calibration", "12", "--out", str(out), "--json"]
        assert run(["quantize", str(trained), *options]) == 0
        found[bits] = json.loads(capsys.readouterr().out)
        files = [out / name for name in ("quantized.safetensors", "quantized.json")]
        assert found[bits]["bytes"]["written"] == sum(file.stat().st_size for file in files)
    evaluated = json.loads((trained / "result.json").read_text())["eval_loss"]
    two, eight = found[2], found[8]
    assert two["before"] == eight["before"]
    assert two["before"]["eval_loss"] == pytest.approx(evaluated, abs=1e-6)
    assert two["degradation"] == pytest.approx(two["after"]["eval_loss"] - evaluated, abs=1e-6)
    assert abs(eight["degradation"]) < abs(two["degradation"])
    assert two["tokens"] == 8 * 4 * 32
    layer = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
    assert two["parameters_without_embeddings"] == 2 * layer + 32
    N, D = two["parameters_without_embeddings"], two["tokens"]
    for law, said in zip((PrecisionLaw.published(), PostTrainingLaw.published()), two["predicted"], strict=True):
        assert said["degradation"] == pytest.approx(law.loss(N, D, post=2) - law.loss(N, D))
        assert any("N = " in text and "below the fitted range" in text for text in said["outside"])
    assert len(two["layers"]) == 14
    for row in two["layers"].values():
        assert 0.1 < row["output_error"] < 1.0
        assert row["weight_error"] > 10 * eight["layers"]["model.layers.0.mlp.up_proj.weight"]["weight_error"]
    loaded = sc.load(tmp_path / "int8")
    before = AutoModelForCausalLM.from_config(loaded.config)
    assert two["bytes"]["bf16"] == 2 * sum(parameter.numel() for parameter in before.parameters())
    assert eight["bytes"]["in_memory"] == sum(parameter.nbytes for parameter in loaded.parameters())


def test_quantize_embeddings(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--weights", "int4", "--method", "gptq", "--embeddings", "--out", str(tmp_path / "out"), "--json"]
    assert run(["quantize", str(trained), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    methods = {name: row["method"] for name, row in found["layers"].items()}
    assert methods["model.embed_tokens.weight"] == "rtn"
    assert methods["lm_head.weight"] == "gptq"
    assert len(methods) == 16
    assert found["bytes"]["written"] < 0.25 * found["bytes"]["as_trained"]
    assert len(sc.load(tmp_path / "out").lm_head.weight[0].unique()) <= 16


def test_dequantized_folder_loads_with_transformers(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for out, more in (("plain", ["--dequantized"]), ("packed", [])):
        assert run(["quantize", str(trained), "--weights", "fp6_e3m2", "--out", str(tmp_path / out), *more]) == 0
    printed = capsys.readouterr().out
    assert "(load it with transformers)" in printed
    assert "the weights are stored in fp32" in printed
    plain, packed = AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), sc.load(tmp_path / "packed")
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), packed.parameters(), strict=True))


def test_quantize_tt_model(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny_recipe(tmp_path, tensor={"rank": 4})
    assert run(["train", str(write_recipe(tmp_path / "c.yaml", recipe)), "--run-dir", str(tmp_path / "run")]) == 0
    out = str(tmp_path / "out")
    assert run(["quantize", str(tmp_path / "run"), "--weights", "int8", "--method", "gptq", "--out", out]) == 0
    assert "weights     84 in int8 by channel, gptq, step 8, 84 of them rounded to nearest" in capsys.readouterr().out
    assert sc.load(out).model.layers[0].mlp.up_proj.ranks[1] > 1


def test_quantize_after_low_precision_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny_recipe(tmp_path, precision={"weights": "int4", "activations": "int8"})
    assert run(["train", str(write_recipe(tmp_path / "q.yaml", recipe)), "--run-dir", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    options = ["--weights", "int4", "--out", str(tmp_path / "out"), "--json"]
    assert run(["quantize", str(tmp_path / "run"), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["degradation"] == pytest.approx(0.0, abs=1e-5)
    assert type(sc.load(tmp_path / "out").model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert found["trained_bits"] == {"weights": 4, "activations": 8}
    size = {"N": found["parameters_without_embeddings"], "D": found["tokens"]}
    law, kumar, ouyang = PrecisionLaw.published(), *found["predicted"]
    trained = {**size, "weights": 4, "activations": 8}
    assert kumar["degradation"] == pytest.approx(law.loss(**trained, post=4) - law.loss(**trained))
    assert kumar["degradation"] < 0.7 * (law.loss(**size, post=4) - law.loss(**size))
    assert (kumar["unknown"], ouyang["unknown"]) == ([], ["weights", "activations"])


def test_law_predicts_divergence() -> None:
    kumar, _ = predictions(10**8, 10**10, Quantizer.from_spec("int3"), {"activations": 2, "queries": 8})
    assert (kumar.degradation, kumar.unknown) == (None, ("queries",))
    assert _describe_prediction(kumar).startswith("divergence by the kumar law")
    assert _describe_prediction(kumar).endswith(
        "activations of this run outside that range; it does not model low-precision training of queries"
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--weights", "int4", "--method", "qptq"], "method must be rtn or gptq; given 'qptq' (did you mean 'gptq'?)"),
        (["--weights", "int44"], "integer formats have 2 to"),
        (["--weights", "int4", "--clip", "msa"], "did you mean 'mse'"),
        (["--weights", "nvfp4", "--group-size", "8"], "nvfp4 fixes group_size=16; given 8"),
        (["--weights", "nvfp4", "--clip", "mse"], "need granularity='group' and clip='absmax'"),
    ],
)
def test_quantize_refuses_bad_arguments(
    given: list[str], words: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["quantize", str(trained), *given]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert run(["quantize", str(trained / "nothing"), "--weights", "int4"]) == 2
