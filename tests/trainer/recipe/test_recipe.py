"""Tests of the recipe: reading, overrides, and reporting all errors at once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from scantling.errors import RecipeError, UserError
from scantling.trainer.data.files import expand
from scantling.trainer.recipe import Recipe, differences, dump_recipe, load_recipe
from scantling.trainer.recipe.loading import apply_override, read_yaml

MINIMAL: dict[str, Any] = {
    "model": {"preset": "llama-1m"},
    "data": {"corpus": "python-stdlib", "seq_len": 64},
    "train": {"steps": 10, "batch_size": 4},
}
RELEASE = {"name": "came", "release_gradients": True}


def changed(**sections: dict[str, Any]) -> dict[str, Any]:
    return {name: {**MINIMAL.get(name, {}), **sections.get(name, {})} for name in {**MINIMAL, **sections}}


def faults(content: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(content)
    return {fault.path: str(fault) for fault in caught.value.faults}


def test_defaults_are_plain_dense_training() -> None:
    recipe = load_recipe(MINIMAL)
    assert recipe.optim.name == "adamw"
    assert recipe.comm.name == "allreduce"
    assert recipe.precision.compute == "fp32"
    assert recipe.batch_size == 4


def test_batch_tokens_become_sequences() -> None:
    content = changed(train={"batch_size": None, "batch_tokens": 640})
    assert load_recipe(content).batch_size == 10


def test_all_faults_are_reported_at_once_with_path_and_suggestion() -> None:
    found = faults(
        {
            "model": {"preset": "llama-1n"},
            "data": {"corpus": "python-stdlib", "seqlen": 64},
            "optim": {"name": "adamww", "lr": -1},
            "train": {"steps": "many", "batch_size": 4, "schedule": "cosin"},
            "trian": {},
        }
    )
    assert "did you mean 'llama-1m'?" in found["model.preset"]
    assert "did you mean 'seq_len'?" in found["data.seqlen"]
    assert "did you mean 'adamw'?" in found["optim.name"]
    assert "given -1" in found["optim.lr"]
    assert "given 'many'" in found["train.steps"]
    assert "did you mean 'cosine'?" in found["train.schedule"]
    assert "did you mean 'train'?" in found["trian"]


def test_unknown_key_lists_the_allowed_ones() -> None:
    message = faults(changed(train={"step": 3}))["train.step"]
    assert "allowed here: steps, batch_tokens" in message
    assert "did you mean 'steps'?" in message


@pytest.mark.parametrize(
    ("sections", "path", "text"),
    [
        ({"model": {"hf": "somewhere"}}, "model", "exactly one of preset and hf"),
        ({"data": {"text": "a.txt"}}, "data", "exactly one source"),
        ({"data": {"corpus": None}}, "data", "exactly one source"),
        ({"train": {"batch_tokens": 128}}, "train", "exactly one of batch_tokens and batch_size"),
        ({"train": {"batch_size": None, "batch_tokens": 100}}, "train.batch_tokens", "multiple of data.seq_len = 64"),
        ({"train": {"warmup": 11}}, "train.warmup", "longer than the run of 10 steps"),
        ({"train": {"decay": 0.5}}, "train.decay", "belongs to wsd"),
        ({"train": {"schedule": "wsd", "warmup": 0.5, "decay": 0.9}}, "train.decay", "before the warm-up has ended"),
        ({"train": {"schedule": "wsd", "warmup": 9}}, "train.decay", "given 0.2 after a warm-up of 0.9 of the steps"),
        ({"data": {"heldout": 0}, "train": {"eval_every": 5}}, "train.eval_every", "without held-out data"),
        ({"data": {"heldout": 0.0}, "train": {"eval_samples": 3}}, "train.eval_samples", "raise data.heldout"),
        ({"optim": {"name": "adamw", "momentum": 0.9}}, "optim.momentum", ""),
        ({"optim": {"name": "lbfgs"}}, "optim.name", "closure"),
        ({"data": {"bin_dtype": "uint32"}}, "data.bin_dtype", "no meaning"),
        ({"data": {"tokenizer": {"bpe": 12}}}, "data.tokenizer.bpe", "greater than or equal to 261"),
        ({"data": {"tokenizer": {"bpee": 300}}}, "data.tokenizer.bpee", "did you mean 'bpe'?"),
        ({"model": {"task": "classification"}}, "data", "classification needs labels"),
        ({"data": {"mask_probability": 0.2}}, "data.mask_probability", "belongs to masked-lm"),
        ({"data": {"span_length": 2}}, "data.span_length", "belongs to seq2seq"),
        ({"data": {"target_len": 8}}, "data.target_len", "belongs to seq2seq"),
        ({"model": {"task": "masked-lm"}, "data": {"bucket": False}}, "data.bucket", "classification and seq2seq"),
        ({"model": {"task": "classification"}, "data": {"document_mask": True}}, "data.document_mask", "to causal-lm"),
        ({"train": {"steps": True}}, "train.steps", "not true or false"),
        ({"comm": {"name": "gossip"}}, "comm.name", "'allreduce'"),
        ({"comm": {"topk": 8}}, "comm.topk", "has an effect with comm.name: demo, local_steps or diloco alone"),
        ({"comm": {"name": "demo", "bucket_mb": 5.0}}, "comm.bucket_mb", "or with comm.overlap"),
        (
            {"comm": {"name": "demo", "find_unused_parameters": True}},
            "comm.find_unused_parameters",
            "comm.name: allreduce alone",
        ),
        ({"comm": {"name": "demo", "overlap": True}}, "comm.overlap", "set train.clip: null"),
        ({"comm": {"name": "demo", "topk": 17, "chunk": 4}}, "comm.topk", "at most chunk^2 = 16"),
        ({"comm": {"name": "demo"}, "precision": {"compute": "fp16"}}, "comm.name", "set precision.compute: bf16"),
        ({"comm": {"name": "demo"}, "train": {"steps": 3, "batch_size": 2, "graph": True}}, "train.graph", "exchange"),
        ({"parallel": {"tensor": 2}}, "parallel.tensor", "needs pretrained weights, works with neither TT layers nor"),
        ({"parallel": {"tensor": 2, "shard": 2}}, "parallel.tensor", "divides rows twice under parallel.shard"),
        ({"parallel": {"tensor": 0}}, "parallel.tensor", "greater than or equal to 1"),
        ({"precision": {"parameters": "bf16"}}, "precision.parameters", "rounds to the nearest; set optim.name: came"),
        ({"precision": {"parameters": "bf16"}}, "precision.parameters", "given optim.name: adamw, the default"),
        (
            {"optim": {"name": "adamw"}, "precision": {"parameters": "bf16", "rounding": "compensated"}},
            "precision.parameters",
            "steps smaller than half the last bit",
        ),
        ({"optim": RELEASE}, "optim.release_gradients", "set train.clip: null"),
        ({"optim": RELEASE}, "optim.release_gradients", "given train.clip: 1.0, the default"),
        ({"optim": RELEASE, "train": {"clip": 0.5}}, "optim.release_gradients", "given train.clip: 0.5"),
        ({"optim": {**RELEASE, "name": "adamw"}, "train": {"clip": None}}, "optim.release_gradients", "'adamw'"),
        ({"optim": {"release_gradients": True}, "train": {"clip": None}}, "optim.release_gradients", "name: came"),
        (
            {"optim": RELEASE, "train": {"clip": None}, "precision": {"compute": "fp16"}},
            "optim.release_gradients",
            "set precision.compute: bf16; given precision.compute: fp16",
        ),
    ],
)
def test_impossible_combinations(sections: dict[str, Any], path: str, text: str) -> None:
    found = faults(changed(**sections))
    assert path in found, found
    assert text in found[path]


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"schedule": "wsd", "warmup": 0.7, "decay": 0.3}},
        {"train": {"schedule": "wsd", "warmup": 0, "decay": 1.0}},
        {"data": {"corpus": None, "text": "a.txt", "validation": "b.txt", "heldout": 0}, "train": {"eval_every": 5}},
        {"parallel": {"tensor": 1, "shard": 2}},
    ],
)
def test_boundary_combinations_are_accepted(sections: dict[str, Any]) -> None:
    load_recipe(changed(**sections))


CLICKS: dict[str, Any] = {
    "model": {"preset": "dlrm"},
    "data": {"csv": "a.csv", "clicks": {"label": "y", "numeric": ["n"], "categorical": ["c", "d"]}},
    "train": {"steps": 10, "batch_size": 4},
}


@pytest.mark.parametrize(
    ("changes", "path", "text"),
    [
        ({"csv": None, "jsonl": "a.jsonl"}, "data", "reads criteo, csv, parquet; given 'jsonl'"),
        ({"clicks": None}, "data.clicks", "needs the names of the columns"),
        ({"fields": {"text": "a"}}, "data.fields", "in data.clicks"),
        ({"seq_len": 64}, "data.seq_len", "no meaning for the task 'clicks'"),
        ({"tokenizer": {"bpe": 300}}, "data.tokenizer", "no meaning for the task 'clicks'"),
        ({"bucket": False}, "data.bucket", "no meaning for the task 'clicks'"),
        ({"csv": None, "criteo": "a.txt"}, "data.clicks.label", "whose first column is the label"),
        ({"clicks": {"categorical": ["c"]}}, "data.clicks.label", "missing"),
        ({"clicks": {"label": "y"}}, "data.clicks.categorical", "missing"),
        ({"clicks": {"label": "y", "categorical": ["c", "y"]}}, "data.clicks.categorical", "'y' is given already"),
        ({"clicks": {"label": "y", "categorical": ["c", "c"]}}, "data.clicks.categorical", "'c' is given already"),
        (
            {"clicks": {"label": "y", "categorical": ["user"], "table_size": {"usr": 5}}},
            "data.clicks.table_size.usr",
            "did you mean 'user'?",
        ),
        (
            {"clicks": {"label": "y", "categorical": ["c"], "table_size": 0}},
            "data.clicks.table_size",
            "greater than or equal to 1",
        ),
        (
            {"clicks": {"label": "y", "categorical": ["c"], "table_size": 9, "min_count": 3}},
            "data.clicks.min_count",
            "all categories are hashed",
        ),
        ({"clicks": {"label": "y", "categorical": ["c"], "scaling": "log1p"}}, "data.clicks.scaling", "no effect"),
        ({"clicks": {"label": "y", "categorical": ["c"], "scaling": "log"}}, "data.clicks.scaling", "'log1p'"),
    ],
)
def test_faults_of_click_logs(changes: dict[str, Any], path: str, text: str) -> None:
    found = faults({**CLICKS, "data": {**CLICKS["data"], **changes}})
    assert path in found, found
    assert text in found[path]


IMAGES: dict[str, Any] = {
    "model": {"preset": "vit-base"},
    "data": {"images": "photos", "image_size": 224},
    "train": {"steps": 10, "batch_size": 4},
}


@pytest.mark.parametrize(
    ("changes", "path", "text"),
    [
        ({"images": None, "jsonl": "a.jsonl"}, "data", "reads images, hf; given 'jsonl'"),
        ({"image_size": None}, "data.image_size", "missing; images are resized"),
        ({"image_size": 0}, "data.image_size", "greater than or equal to 1"),
        ({"image_channels": 2}, "data.image_channels", "must be one of '1', '3'; given 2"),
        ({"image_shift": -1}, "data.image_shift", "greater than or equal to 0"),
        ({"images": "digits", "validation": "photos"}, "data.validation", "use data.heldout"),
        ({"fields": {"label": "l"}}, "data.fields", "has no columns"),
        ({"images": None, "hf": "cifar10"}, "data.fields.label", "needs the name of the label column"),
        ({"images": None, "hf": "c", "fields": {"text": "t", "label": "l"}}, "data.fields.text", "image and label"),
        ({"seq_len": 64}, "data.seq_len", "no meaning for the task 'image-classification', whose images"),
        ({"tokenizer": {"bpe": 300}}, "data.tokenizer", "no meaning for the task 'image-classification'"),
        ({"bucket": False}, "data.bucket", "no meaning for the task 'image-classification'"),
    ],
)
def test_faults_of_images(changes: dict[str, Any], path: str, text: str) -> None:
    found = faults({**IMAGES, "data": {**IMAGES["data"], **changes}})
    assert path in found, found
    assert text in found[path]


def test_images_belong_to_their_task(tmp_path: Path) -> None:
    found = faults({**IMAGES, "model": {"preset": "llama-1m"}})
    assert "belongs to image-classification" in found["data.images"]
    assert "belongs to image-classification" in found["data.image_size"]
    found = faults(changed(data={"corpus": None, "hf": "d", "fields": {"image": "img"}}))
    assert "no meaning for the task 'causal-lm'" in found["data.fields.image"]
    assert "batch_size" in faults({**IMAGES, "train": {"steps": 3, "batch_tokens": 256}})["train.batch_tokens"]
    assert load_recipe(IMAGES).data.images == os.path.abspath("photos")
    digits = load_recipe({**IMAGES, "data": {"images": "digits"}})
    assert digits.data.images == "digits"
    assert digits.data.image_shape == (1, 8, 8)
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_recipe(digits))
    assert load_recipe(path).data == digits.data


def test_click_logs_need_the_clicks_task(tmp_path: Path) -> None:
    found = faults({**CLICKS, "model": {"preset": "llama-1m"}})
    assert "belongs to clicks" in found["data.clicks"]
    assert "data.criteo" in faults(changed(data={"corpus": None, "criteo": "train.txt"}))
    assert "train.batch_tokens" in faults({**CLICKS, "train": {"steps": 3, "batch_tokens": 256}})
    by_size = {**CLICKS["data"]["clicks"], "table_size": {"c": 100}}
    for data in ({"criteo": "train.txt"}, {"csv": "a.csv", "clicks": by_size}):
        recipe = load_recipe({**CLICKS, "data": data})
        (tmp_path / "resolved.yaml").write_text(dump_recipe(recipe))
        again = load_recipe(tmp_path / "resolved.yaml")
        assert [line for line in differences(recipe, again) if not line.startswith("name")] == []


def test_released_gradients_without_a_clip() -> None:
    recipe = load_recipe(changed(optim=RELEASE, train={"clip": None}))
    assert recipe.optim.release_gradients
    assert recipe.optim.options == {}


def test_one_fault_is_reported_once() -> None:
    assert list(faults(changed(data={"tokenizer": {"bpe": 100}}))) == ["data.tokenizer.bpe"]
    assert list(faults({**MINIMAL, "name": "../up"})) == ["name"]


def test_glob_needs_no_quotes() -> None:
    recipe = load_recipe(MINIMAL, ["data.corpus=null", "data.text=*.txt"])
    assert str(recipe.data.text).endswith("/*.txt")


def test_missing_sections_are_named() -> None:
    found = faults({"model": {"preset": "llama-1m"}})
    assert {"data", "train"} <= set(found)


def test_overrides_are_yaml_values_and_create_sections() -> None:
    recipe = load_recipe(
        MINIMAL, ["optim.name=came", "optim.lr=1e-4", "train.clip=null", "optim.betas=[0.9, 0.95, 0.99]"]
    )
    assert recipe.optim.name == "came"
    assert recipe.optim.lr == 1e-4
    assert recipe.train.clip is None
    assert recipe.optim.options["betas"] == [0.9, 0.95, 0.99]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#", "#"),
        (" # ", "#"),
        ("010", "010"),
        ("12:30", "12:30"),
        ("-1:30.5", "-1:30.5"),
        ("[010, 8]", ["010", 8]),
        ("1_000", 1000),
        ("0x1f", 31),
        ("-0.5", -0.5),
        ("1e3", 1000.0),
        ("0 # or 6", 0),
        ("~", None),
    ],
)
def test_ambiguous_yaml_values_are_quoted(tmp_path: Path, text: str, value: Any) -> None:
    content: dict[str, Any] = {}
    apply_override(content, f"a={text}")
    assert content == {"a": value}
    if "#" not in text:
        (tmp_path / "a.yaml").write_text(f"a: {text}")
        assert read_yaml(tmp_path / "a.yaml") == content


@pytest.mark.parametrize("text", ["train.steps", "=3", "train..steps=3", "a.b={", "name=2024-02-30"])
def test_broken_override(text: str) -> None:
    with pytest.raises(UserError, match="--set"):
        load_recipe(MINIMAL, [text])


def test_file_errors(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(yaml.safe_dump(MINIMAL))
    assert load_recipe(tmp_path / "good.yaml").name == "good"
    with pytest.raises(UserError, match=r"not found.*did you mean 'good.yaml'"):
        load_recipe(tmp_path / "god.yaml")
    for text, message in [
        ("a: [", "not valid YAML"),
        ("a: 2023-13-01", "not valid YAML"),
        ("- 1", "mapping"),
        ("train: {steps: 1, steps: 2}", "twice"),
    ]:
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(UserError, match=message):
            load_recipe(tmp_path / "bad.yaml")
    (tmp_path / "bad.yaml").write_text("!!python/object/apply:os.system ['true']")
    with pytest.raises(UserError, match="not valid YAML"):
        load_recipe(tmp_path / "bad.yaml")


def test_dump_reads_back_to_an_equal_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(changed(optim={"name": "came", "betas": [0.9, 0.95, 0.995]}, data={"max_bytes": 1000}))
    (tmp_path / "resolved.yaml").write_text(dump_recipe(recipe))
    again = load_recipe(tmp_path / "resolved.yaml")
    assert [line for line in differences(recipe, again) if not line.startswith("name")] == []


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CORPUS", "books")
    recipe = load_recipe({**MINIMAL, "data": {"text": ["$CORPUS/*.txt", "b.txt"]}})
    assert recipe.data.text == [str(tmp_path / "books/*.txt"), str(tmp_path / "b.txt")]


def test_glob_in_a_folder_with_brackets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "[p]" / "data"
    folder.mkdir(parents=True)
    for name in ("a.txt", "b[1].txt"):
        (folder / name).write_text(name)
    monkeypatch.chdir(folder.parent)
    recipe = load_recipe({**MINIMAL, "data": {"text": ["data/b[1].txt", "data/*.txt"]}})
    assert load_recipe(recipe).data.text == recipe.data.text
    assert recipe.data.text is not None
    assert expand(recipe.data.text, "data.text") == [folder / "b[1].txt", folder / "a.txt"]


@pytest.mark.parametrize("text", ["1e-3", "010", "12:30", "null", "#"])
def test_texts_that_look_like_numbers_are_written_as_texts(text: str, tmp_path: Path) -> None:
    recipe = load_recipe({**MINIMAL, "data": {"text": "a.txt", "document_separator": text}, "name": text})
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path) == recipe


def test_differences_name_the_keys() -> None:
    lines = differences(load_recipe(MINIMAL), load_recipe(MINIMAL, ["train.steps=11", "optim.betas=[0.9,0.95]"]))
    assert lines == ["optim.betas: None -> [0.9, 0.95]", "train.steps: 10 -> 11"]


def test_every_field_has_a_description() -> None:
    schema = Recipe.model_json_schema()
    for name, definition in {"Recipe": schema, **schema["$defs"]}.items():
        for key, field in definition["properties"].items():
            assert field.get("description"), f"{name}.{key}"
    json.dumps(schema)
