"""Tests that loading an exported folder detects every flipped bit."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from tensor.families import make_model

import scantling as sc
from scantling.checksums import CHECKSUMS, check_checksums, write_checksums
from scantling.cli import run
from scantling.errors import UserError
from scantling.trainer.training.quantize import quantize_run
from scantling.trainer.training.trained_run import export_hf
from tests.runs import tiny_recipe, write_recipe


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Export a run in every form, and save packed weights of a model."""
    found = {}
    root = tmp_path_factory.mktemp("exports")
    for name, sections in (("dense", {}), ("tt", {"tensor": {"rank": 4}})):
        run_dir = sc.train(tiny_recipe(root, **sections, train={"steps": 1}), run_dir=root / f"run-{name}").run_dir
        found[name] = root / name
        export_hf(run_dir, found[name])
        found[f"packed {name}"] = root / f"packed-{name}"
        quantize_run(run_dir, "int4", found[f"packed {name}"], embeddings=True)
    return found


NAMES = ("dense", "tt", "packed dense", "packed tt")


@pytest.mark.parametrize("name", NAMES)
def test_check_checksums_finds_every_flipped_bit(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    source = random.Random(0)
    folder = shutil.copytree(folders[name], tmp_path / "copy")
    sc.load(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {"config.json", "generation_config.json", "tokenizer.json", CHECKSUMS} <= {path.name for path in files}
    for path in files:
        whole = path.read_bytes()
        for _ in range(40):
            damaged = bytearray(whole)
            damaged[source.randrange(len(damaged))] ^= 1 << source.randrange(8)
            path.write_bytes(damaged)
            with pytest.raises(UserError, match=r"damaged|cannot be read|cannot read"):
                check_checksums(folder)
        with pytest.raises(UserError):
            sc.load(folder)
        path.write_bytes(whole)
    sc.load(folder)


def test_check_checksums_finds_flips_in_the_checksums(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["packed dense"], tmp_path / "copy")
    path = folder / CHECKSUMS
    whole = path.read_bytes()
    end = whole.index(b"\n") + 1
    for place in [*range(end), len(whole) - 1]:
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(UserError):
                check_checksums(folder)


def test_load_refuses_missing_and_changed_files(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["packed dense"], tmp_path / "copy")
    (folder / "generation_config.json").unlink()
    with pytest.raises(UserError, match=r"cannot read .*generation_config.json, which .* lists \(No such file"):
        sc.load(folder)
    folder = shutil.copytree(folders["dense"], tmp_path / "other")
    with open(folder / "model.safetensors", "ab") as file:
        file.write(b"\0")
    with pytest.raises(
        UserError, match=r"model.safetensors is damaged or was changed.*; write or copy the folder again"
    ):
        sc.load(folder)


@pytest.mark.parametrize("name", ["model.safetensors", CHECKSUMS])
def test_load_refuses_pipes(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["dense"], tmp_path / "copy")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(UserError, match=rf"{name}.*it is not a file"):
        sc.load(folder)


def test_load_without_checksums_reads_changed_files(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["packed dense"], tmp_path / "copy")
    (folder / "README.md").write_text("My model.\n")
    sc.load(folder)
    settings = folder / "generation_config.json"
    settings.write_text(settings.read_text().replace("{", '{"temperature": 0.5,', 1))
    with pytest.raises(UserError, match=f"if the change is yours, delete {CHECKSUMS}"):
        sc.load(folder)
    (folder / CHECKSUMS).unlink()
    assert sc.load(folder).generation_config.temperature == 0.5
    write_checksums(folder)
    sc.load(folder)


def test_sha256sum_accepts_the_checksums(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        done = subprocess.run(["sha256sum", "-c", CHECKSUMS], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", [f"{'0' * 64}  ../secret", f"{'0' * 64}  /etc/passwd", "", f"{'0' * 63}  a"])
def test_check_checksums_refuses_invalid_lines(line: str, tmp_path: Path) -> None:
    (tmp_path / CHECKSUMS).write_text(line + "\n")
    with pytest.raises(UserError, match=r"is damaged: .* is not a line of sha256sum"):
        check_checksums(tmp_path)


def test_train_refuses_a_damaged_export(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(folders["dense"], tmp_path / "copy")
    weights = folder / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-3] ^= 4
    weights.write_bytes(damaged)
    recipe = tiny_recipe(tmp_path, train={"steps": 1}) | {"model": {"hf": str(folder)}}
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    assert run(["train", str(path), "--run-dir", str(tmp_path / "run")]) == 2
    assert "differs from its checksum" in " ".join(capsys.readouterr().err.split())


def test_save_pretrained_folders_load_without_checksums(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    sc.load(tmp_path)
