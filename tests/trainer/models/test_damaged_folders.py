"""Tests that a recipe on a damaged model or tokenizer folder is refused in one line that names the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from scantling.cli import run
from scantling.errors import UserError
from scantling.trainer.data.tokenizers import ByteTokenizer, load_tokenizer
from scantling.trainer.models.build import build_model, default_task, quiet
from scantling.trainer.recipe.schema import ModelSection
from scantling.trainer.tasks import get_task
from tests.damage import check_damage
from tests.runs import tiny_recipe, write_recipe

LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
VOCAB = 320


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small Llama with a byte tokenizer."""
    import transformers

    path = tmp_path_factory.mktemp("saved") / "llama"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, vocab_size=VOCAB)).save_pretrained(path)
    ByteTokenizer(wrap=True).save_pretrained(path)
    return path


def build(folder: Path, **keys: Any) -> Any:
    section = ModelSection(hf=str(folder), **keys)
    task = get_task(default_task(section))
    return build_model(section, task, vocab_size=261, seq_len=16, config_overrides={}, seed=0)


def read_tokenizer(folder: Path) -> None:
    with quiet():
        tokenizer = load_tokenizer(str(folder))
    ids = tokenizer.encode_batch(["hello"])[0]
    tokenizer.join(ids, ids, 12)
    tokenizer.fingerprint  # noqa: B018


MODEL_FILES = ["config.json", "generation_config.json", "model.safetensors"]
TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json"]


def test_damaged_models_name_the_file(folder: Path, tmp_path: Path) -> None:
    found = check_damage(folder, tmp_path, range(120), build, UserError, files=MODEL_FILES)
    assert not found, "\n".join(found)


def test_damaged_tokenizers_name_the_file(folder: Path, tmp_path: Path) -> None:
    found = check_damage(folder, tmp_path, range(200), read_tokenizer, UserError, files=TOKENIZER_FILES)
    assert not found, "\n".join(found)


def changed(folder: Path, copy: Path, name: str, **keys: Any) -> Path:
    shutil.copytree(folder, copy)
    content = json.loads((copy / name).read_text()) if (copy / name).exists() else {}
    (copy / name).write_text(json.dumps(content | keys))
    return copy


@pytest.mark.parametrize("pretrained", [None, False])
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("config.json", {"vocab_size": 2**31 - 1}),
        ("config.json", {"vocab_size": 2**40}),
        ("config.json", {"num_hidden_layers": 10**9}),
        ("config.json", {"layer_types": ["full_attention"] * 100_000}),
        ("config.json", {"eos_token_id": 2**31 - 1}),
        ("config.json", {"pad_token_id": 2**40}),
        ("generation_config.json", {"eos_token_id": [1, 2**31 - 1]}),
        ("generation_config.json", {"suppress_tokens": [2**63]}),
        ("generation_config.json", {"bos_token_id": -(2**31)}),
    ],
)
def test_huge_settings_of_models_are_refused(
    name: str, keys: dict[str, Any], pretrained: bool | None, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"vocabulary|layer_types|num_hidden_layers must be at most"):
        build(changed(folder, tmp_path / "copy", name, **keys), pretrained=pretrained)


def tokenizer_json(copy: Path, place: str, id_: int) -> None:
    path = copy / "tokenizer.json"
    content = json.loads(path.read_text())
    match place:
        case "vocab":
            content["model"]["vocab"]["zz"] = id_
        case "added":
            content["added_tokens"][-1]["id"] = id_
        case "template":
            content["post_processor"]["special_tokens"]["<|cls|>"]["ids"] = [id_]
        case "sequence":
            content["post_processor"] = {"type": "BertProcessing", "sep": ["<|sep|>", 260], "cls": ["<|cls|>", id_]}
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("id_", [2**31 - 1, 10**8, 2**32, 2**63])
@pytest.mark.parametrize("place", ["vocab", "added", "template", "sequence", "added_tokens.json", "decoder"])
def test_huge_ids_of_tokenizers_are_refused(place: str, id_: int, folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    if place == "added_tokens.json":
        changed(folder, copy, place, **{"<q>": id_})
    elif place == "decoder":
        changed(folder, copy, "tokenizer_config.json", added_tokens_decoder={str(id_): {"content": "<q>"}})
    else:
        shutil.copytree(folder, copy)
        tokenizer_json(copy, place, id_)
        with pytest.raises(UserError, match=rf"tokenizer\.json.*the id {id_}"):
            load_tokenizer(str(copy / "tokenizer.json"))
    with pytest.raises(UserError, match=rf"\.json.*the id {id_}"):
        load_tokenizer(str(copy))


def test_ids_with_holes_are_read(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    tokenizer_json(tmp_path / "copy", "vocab", 5000)
    assert load_tokenizer(str(tmp_path / "copy")).vocab_size == 5001


def test_byte_order_marks_are_left_out(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    for path in copy.glob("*.json"):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert all(map(torch.equal, build(copy).parameters(), build(folder).parameters()))
    for name in ("", "tokenizer.json"):
        assert load_tokenizer(str(copy / name)).fingerprint == load_tokenizer(str(folder / name)).fingerprint
    load_tokenizer(str(copy)).save_pretrained(tmp_path / "again")
    load_tokenizer(str(folder)).save_pretrained(tmp_path / "plain")
    for path in (tmp_path / "plain").iterdir():
        assert (tmp_path / "again" / path.name).read_text() == path.read_text()


@pytest.mark.parametrize("command", ["train", "plan"])
def test_command_line_reports_damage_in_one_line(
    command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "tokenizer.json"):
        copy = shutil.copytree(folder, tmp_path / f"without-{name}")
        (copy / name).write_bytes((copy / name).read_bytes()[:100])
        recipe = tiny_recipe(tmp_path, data={"tokenizer": str(copy)}, train={"steps": 1}) | {"model": {"hf": str(copy)}}
        path = write_recipe(tmp_path / "recipe.yaml", recipe)
        extra = ["--run-dir", str(tmp_path / "run")] if command == "train" else []
        assert run([command, str(path), *extra]) == 2
        error = capsys.readouterr().err
        assert "Traceback" not in error
        assert f"{copy / name} is not valid JSON" in " ".join(error.split())


@pytest.mark.parametrize("command", [["eval"], ["export", "--to", "hf", "out"], ["quantize", "--weights", "int4"]])
def test_commands_on_a_model_folder_ask_for_the_run(
    command: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command[0], str(folder), *command[1:]]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "holds no run: there is no recipe.yaml in it; it is a model folder, which sc.load reads" in error


@pytest.mark.parametrize(
    "name",
    ["quantized.safetensors", "quantized.json", "model-00001-of-00002.safetensors", "tf_model.h5", "pytorch_model.bin"],
)
def test_weights_in_other_formats_are_not_ignored(name: str, folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "model.safetensors").rename(copy / name)
    with pytest.raises(UserError, match=r"holds (packed )?weights.*model\.pretrained: false"):
        build(copy)
    build(copy, pretrained=False)
    (copy / "model.safetensors").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"cannot load .*model\.safetensors"):
        build(copy)
