"""Tests that damaged `save_pretrained` folders load or are refused in one line that names the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tensor.families import make_model

import scantling as sc
from scantling.errors import UserError
from scantling.precision import save_quantized
from scantling.trainer.models.build import quiet
from tests.damage import check_damage

CASES = int(os.environ.get("SCANTLING_TESTS_DAMAGE", "60"))
"""Number of damaged copies of each folder."""


def _dense(folder: Path) -> None:
    make_model("llama").save_pretrained(folder)


def _sharded(folder: Path) -> None:
    make_model("gpt2").save_pretrained(folder, max_shard_size="20KB")


def _tt(folder: Path) -> None:
    sc.tensorize(make_model("llama"), 4).save_pretrained(folder)


def _packed(folder: Path) -> None:
    save_quantized(sc.quantize_weights(make_model("llama"), "int4"), folder)


def _packed_tt(folder: Path) -> None:
    save_quantized(sc.quantize_weights(sc.tensorize(make_model("llama"), 4), "mxfp4_e2m1"), folder)


KINDS = {"dense": _dense, "sharded": _sharded, "tt": _tt, "packed": _packed, "packed-tt": _packed_tt}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Save models without checksums, which would detect all damage before anything else is read."""
    root = tmp_path_factory.mktemp("saved")

    def folder(kind: str) -> Path:
        if not (root / kind).exists():
            KINDS[kind](root / kind)
            (root / kind / "scantling.sha256").unlink(missing_ok=True)
        return root / kind

    return folder


def load(folder: Path) -> Any:
    with quiet():
        return sc.load(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_load_of_damaged_files_names_the_file(
    kind: str, folders: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = check_damage(folders(kind), tmp_path, range(CASES), load, UserError)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("vocab_size", 2**31 - 1),
        ("vocab_size", 2**40),
        ("hidden_size", 2**33),
        ("max_position_embeddings", 2**40),
    ],
)
def test_load_refuses_huge_configs_without_allocating(
    kind: str, key: str, value: int, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    names = {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "max_position_embeddings": "n_positions"}
    key = names.get(key, key) if kind == "sharded" else key
    source = folders(kind)
    for path in source.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | {key: value}))
    if key == "max_position_embeddings":  # rotary positions need no table
        load(tmp_path)
    else:
        with pytest.raises(UserError, match=r"cannot load .*config\.json"):
            load(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_load_ignores_byte_order_marks(kind: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    source = folders(kind)
    before = load(source)
    for path in source.iterdir():
        mark = b"\xef\xbb\xbf" if path.suffix == ".json" and path.name != "quantized.json" else b""
        if path.name == "generation_config.json":
            path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": 0.5}))
        (tmp_path / path.name).write_bytes(mark + path.read_bytes())
    model = load(tmp_path)
    assert model.generation_config.temperature == 0.5
    assert model.name_or_path == model.config.name_or_path == str(tmp_path)
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in before.state_dict().items())
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids).logits, before(ids).logits)


def test_load_of_huge_group_size_takes_no_memory(folders: Callable[[str], Path], tmp_path: Path) -> None:
    model = sc.quantize_weights(make_model("llama"), {"format": "int4", "group_size": 32})
    save_quantized(model, tmp_path / "out")
    (tmp_path / "out" / "scantling.sha256").unlink()
    index = tmp_path / "out" / "quantized.json"
    name = "model.layers.0.mlp.up_proj.weight"
    content = json.loads(index.read_text())
    content["tensors"][name]["group_size"] = 2**50
    index.write_text(json.dumps(content))
    assert torch.equal(load(tmp_path / "out").get_parameter(name), model.get_parameter(name))


@pytest.mark.parametrize("name", ["AutoModel", "BertTokenizer", "pipeline", "PreTrainedModel", "", "a.b"])
def test_load_refuses_unknown_architectures(name: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    content = json.loads((folders("dense") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"architectures": [name]}))
    with pytest.raises(UserError, match=r"config\.json: transformers .* has no model class"):
        load(tmp_path)


def test_load_names_weights_of_other_shapes(folders: Callable[[str], Path], tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(5)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"model\.safetensors holds model\.norm\.weight of shape \[5\], config\.json describes \[32\]"
    ):
        load(tmp_path)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5", "vit", "mixtral"])
def test_load_names_layers_missing_in_the_config(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    load(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    key = next(key for key in ("num_hidden_layers", "n_layer", "num_layers") if key in content)
    (tmp_path / "config.json").write_text(json.dumps(content | {key: 0}))
    with pytest.raises(
        UserError, match=r"model\.safetensors holds \d+ tensors of layers that config\.json does not have"
    ):
        load(tmp_path)


def test_load_ignores_tensors_without_a_layer(tmp_path: Path) -> None:
    make_model("bert").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["cls.seq_relationship.weight"] = torch.ones(2, 2)  # belongs to a head for another task
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load(tmp_path)
