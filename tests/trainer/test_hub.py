"""Tests of models and tokenizers by name, from a Hub cache without a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants as hub
import pytest
import torch
import transformers

from scantling.cli import run
from scantling.errors import UserError
from scantling.trainer.data.tokenizers import ByteTokenizer, load_tokenizer
from scantling.trainer.hub import hub_folder, is_hub_name
from scantling.trainer.models.build import build_model, default_task
from scantling.trainer.recipe import load_recipe
from scantling.trainer.recipe.schema import ModelSection
from scantling.trainer.tasks import get_task
from tests.runs import command, tiny_recipe, write_recipe

NAME = "tiny-org/tiny.llama-1"
SETTINGS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def fill(cache: Path, name: str, *, weights: bool = True) -> Path:
    """Put a model into a cache, as a download does."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    folder = repository / "snapshots" / commit
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SETTINGS, vocab_size=320)).save_pretrained(folder)
    ByteTokenizer().save_pretrained(folder)
    if not weights:
        (folder / "model.safetensors").unlink()
    (repository / "blobs").mkdir()
    for path in list(folder.iterdir()):  # files are links to blobs
        shutil.move(path, repository / "blobs" / path.name)
        path.symlink_to(Path("../../blobs") / path.name)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    hub_folder.cache_clear()
    yield tmp_path / "cache"
    hub_folder.cache_clear()


def build(section: ModelSection) -> transformers.PreTrainedModel:
    task = get_task(default_task(section))
    return build_model(section, task, vocab_size=261, seq_len=16, config_overrides={}, seed=0)


@pytest.mark.parametrize("name", [NAME, "tiny"])
def test_models_and_tokenizers_by_name(name: str, cache: Path) -> None:
    folder = fill(cache, name)
    model = build(ModelSection(hf=name))
    local = build(ModelSection(hf=str(folder)))
    assert all(map(torch.equal, model.parameters(), local.parameters()))
    assert model.config.name_or_path == name
    new = build(ModelSection(hf=name, pretrained=False))
    assert not torch.equal(new.get_input_embeddings().weight, local.get_input_embeddings().weight)
    tokenizer = load_tokenizer(name)
    assert tokenizer.fingerprint == load_tokenizer(str(folder)).fingerprint
    assert tokenizer.name == name


def test_hub_name_without_weights_raises(cache: Path) -> None:
    fill(cache, NAME, weights=False)
    with pytest.raises(UserError, match=r"tiny-org/tiny\.llama-1 has no model\.safetensors on the Hub or in its cache"):
        build(ModelSection(hf=NAME))
    build(ModelSection(hf=NAME, pretrained=False))


def test_unknown_names_are_said(cache: Path) -> None:
    with pytest.raises(UserError, match=r"model\.hf: there is no file or folder no/such here, and it is not available"):
        build(ModelSection(hf="no/such"))
    with pytest.raises(UserError, match=r"data\.tokenizer: there is no file or folder nosuch here"):
        load_tokenizer("nosuch")
    for path in ("./nosuch", "/no/such", "a/b/c", "~/x", "../x", "no.json", "a b"):
        assert not is_hub_name(path)
        with pytest.raises(UserError, match=r"no such file or folder|there is no"):
            load_tokenizer(path)


def test_local_folder_comes_before_the_hub(cache: Path, tmp_path: Path) -> None:
    fill(cache, "tiny")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SETTINGS, vocab_size=640)).save_pretrained("tiny")
    recipe = tiny_recipe(tmp_path) | {"model": {"hf": "tiny"}}
    assert load_recipe(write_recipe(tmp_path / "recipe.yaml", recipe)).model.hf == str(tmp_path / "tiny")
    assert build(ModelSection(hf="tiny")).config.vocab_size == 640


def test_damage_in_the_cache_is_said(cache: Path) -> None:
    folder = fill(cache, NAME)
    (folder / "tokenizer.json").resolve().write_text("{")
    with pytest.raises(UserError, match=r"data\.tokenizer: .*tokenizer\.json is not valid JSON"):
        load_tokenizer(NAME)
    weights = (folder / "model.safetensors").resolve()
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"cannot load .*model\.safetensors"):
        build(ModelSection(hf=NAME))


def test_plan_train_and_export_by_name(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(cache, NAME)
    recipe = tiny_recipe(tmp_path, data={"tokenizer": NAME}, train={"steps": 2}) | {"model": {"hf": NAME}}
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    assert run(["plan", str(path)]) == 0
    assert run(["train", str(path), "--run-dir", "run"]) == 0
    stored = load_recipe(tmp_path / "run" / "recipe.yaml")
    assert (stored.model.hf, stored.data.tokenizer) == (NAME, NAME)
    assert run(["train", str(path), "--run-dir", "run", "--resume", "--set", "train.steps=2"]) == 0
    assert run(["export", "run", "--to", "hf", "out"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 320


def test_separate_process_without_a_network(tmp_path: Path) -> None:
    fill(tmp_path / "cache", NAME)
    recipe = tiny_recipe(tmp_path, data={"tokenizer": NAME}) | {"model": {"hf": NAME}}
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    env = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}

    def plan(*options: str) -> subprocess.CompletedProcess[str]:
        words = command(["plan", path, *options])
        return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    done = plan()
    assert done.returncode == 0, done.stderr
    done = plan("--set", "model.hf=no/such")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "no file or folder no/such here" in " ".join(done.stderr.split())
