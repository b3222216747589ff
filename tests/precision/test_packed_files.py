"""Tests of packed weights and their folders: bitwise equal after loading, or an error message."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tensor.families import make_model
from torch import nn

import scantling as sc
from scantling.checksums import CHECKSUMS
from scantling.errors import RunError, UserError
from scantling.numerics.formats import parse_format
from scantling.precision import Quantizer, quantized_weights, save_quantized
from scantling.precision.packed_files import read_quantized
from scantling.precision.packing import PackedMatrix, format_values, to_patterns
from tests import processes

INTEGERS = [f"int{bits}" for bits in range(2, 9)]
FLOATS = ["fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp5_e3m1", "fp4_e2m1", "fp3_e1m1", "fp4_e3m0"]


@pytest.mark.parametrize("name", [*INTEGERS, *FLOATS, "int16", "fp16"])
def test_to_patterns_inverts_format_values(name: str) -> None:
    format = parse_format(name)
    values = format_values(format)
    assert len(values) == 2**format.bits
    numbers = values[~values.isnan()]
    assert numbers.abs().max() <= format.largest + name.startswith("int")
    assert torch.equal(format.round(numbers), numbers)
    assert torch.equal(values[to_patterns(numbers, format)], numbers)


@pytest.mark.parametrize(("name", "dtype"), [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_fp8_patterns_match_torch(name: str, dtype: torch.dtype) -> None:
    theirs, ours = torch.arange(256, dtype=torch.uint8).view(dtype).float(), format_values(parse_format(name))
    assert torch.equal(ours.isnan(), ~theirs.isfinite())
    assert torch.equal(ours.nan_to_num(0.0), theirs.where(theirs.isfinite(), 0.0))


WAYS: tuple[dict[str, Any], ...] = ({}, {"granularity": "tensor"}, {"group_size": 5}, {"clip": "mse"})


@pytest.mark.parametrize(
    "given",
    [{"format": name, **way} for name in [*INTEGERS, *FLOATS] for way in WAYS] + ["mxfp4_e2m1", "mxfp6_e3m2", "nvfp4"],
    ids=str,
)
def test_packed_matrix_roundtrip_is_bitwise(given: Any) -> None:
    torch.manual_seed(0)
    quantizer = Quantizer.from_spec(given, "channel")
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(7, 37, dtype=dtype)
        encoded = quantizer.encode(x)
        packed = PackedMatrix.from_encoded(encoded, quantizer)
        back = packed.decode()
        assert back.dtype == dtype
        assert torch.equal(back, encoded.decode())
        if dtype == torch.float32:
            scales = {"tensor": 1, "channel": 7, "group": 7 * -(-37 // (quantizer.group_size or 37))}
            bits = quantizer.format.bits * 7 * 37
            assert packed.nbytes == -(-bits // 8) + 4 * scales[quantizer.granularity]


@pytest.mark.parametrize(
    "family", ["llama", "llama-tied", "gpt2", "gpt-neox", "qwen2-moe", "mixtral", "bert", "t5", "vit"]
)
@pytest.mark.parametrize("format", ["int3", {"format": "int4", "group_size": 12}])
def test_save_quantized_roundtrip_is_bitwise(family: str, format: Any, tmp_path: Path) -> None:
    model = make_model(family).to(torch.bfloat16 if family == "gpt2" else torch.float32)
    sc.quantize_weights(model, format, filter_fn=(lambda *_: True) if family == "llama-tied" else None)
    saved = save_quantized(model, tmp_path / "out")
    assert_same(sc.load(tmp_path / "out"), model)
    files = [tmp_path / "out" / name for name in ("quantized.safetensors", "quantized.json")]
    assert saved.written == sum(file.stat().st_size for file in files)
    assert files[0].stat().st_size < saved.plain
    packed = json.loads(files[1].read_text())["tensors"]
    assert len(packed) == len(quantized_weights(model))
    assert saved.num_elements == sum(parameter.numel() for parameter in model.parameters())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def assert_same(loaded: Any, model: Any) -> None:
    state, other = model.state_dict(), loaded.state_dict()
    assert state.keys() == other.keys()
    assert all(torch.equal(state[name], other[name]) and state[name].dtype == other[name].dtype for name in state)
    assert type(loaded) is type(model)
    assert not loaded.training


def test_save_quantized_roundtrip_of_tt_model(tmp_path: Path) -> None:
    model = make_model("llama-tied")
    sc.tensorize(model, rank=5)
    sc.quantize_weights(model, "int4", filter_fn=lambda *_: True)
    save_quantized(model, tmp_path / "out")
    loaded = sc.load(tmp_path / "out")
    assert_same(loaded, model)
    assert loaded.model.layers[0].mlp.up_proj.ranks == model.model.layers[0].mlp.up_proj.ranks
    index = json.loads((tmp_path / "out" / "quantized.json").read_text())["tensors"]
    assert "model.layers.0.mlp.up_proj.cores.2" in index


def test_save_quantized_packs_equal_weights_separately(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("vit")
    zeroed = [layer for name, layer in model.named_modules() if name.endswith(("q_proj", "k_proj", "v_proj"))]
    assert len(zeroed) == 3
    for layer in zeroed:
        nn.init.zeros_(layer.weight)
    sc.quantize_weights(model, "int4")
    save_quantized(model, tmp_path / "out")
    packed = json.loads((tmp_path / "out" / "quantized.json").read_text())["tensors"]
    assert len(packed) == len(quantized_weights(model))
    assert "vit.encoder.layer.0.attention.attention.query.weight" in packed
    assert "another shape in files" not in caplog.text
    assert_same(sc.load(tmp_path / "out"), model)


def test_save_quantized_keeps_fp16_finite(tmp_path: Path) -> None:
    model = make_model("llama").half()
    largest = torch.finfo(torch.float16).max
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, :2] = torch.tensor([largest, -largest])
    sc.quantize_weights(model, "bf16")  # rounds 65504 to 65536
    assert model.model.layers[0].mlp.up_proj.weight[0, :2].tolist() == [largest, -largest]
    save_quantized(model, tmp_path / "out")
    assert_same(sc.load(tmp_path / "out"), model)


class WritesTies(nn.Module):
    """A layer with two names that saves both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(4, 4, bias=False)

    def save_pretrained(self, folder: Path) -> None:
        save_file({name: value.clone() for name, value in self.state_dict().items()}, folder / "model.safetensors")


def test_save_quantized_packs_both_names_of_a_tie(tmp_path: Path) -> None:
    model = sc.quantize_weights(WritesTies(), "int4")
    save_quantized(model, tmp_path / "out")
    packed = json.loads((tmp_path / "out" / "quantized.json").read_text())["tensors"]
    assert packed.keys() == {"first.weight", "second.weight"}
    assert all(torch.equal(value, model.first.weight) for value in read_quantized(tmp_path / "out").values())


def test_save_quantized_takes_numpy_group_size(tmp_path: Path) -> None:
    model = sc.quantize_weights(make_model("llama"), {"format": "int4", "group_size": np.int64(8)})
    save_quantized(model, tmp_path / "out")
    assert_same(sc.load(tmp_path / "out"), model)


def test_save_quantized_stores_few_scales_as_bytes(tmp_path: Path) -> None:
    import transformers as hf

    shape = {"hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**shape, vocab_size=96)).eval()
    sc.quantize_weights(model, "mxfp4_e2m1", filter_fn=lambda name, _: "up_proj" in name)
    save_quantized(model, tmp_path / "out")
    with safe_open(tmp_path / "out" / "quantized.safetensors", "pt") as file:
        scale = file.get_tensor("model.layers.0.mlp.up_proj.weight.scale")
        assert scale.dtype == torch.uint8
        assert scale.shape == (512, 2, 1)
    assert_same(sc.load(tmp_path / "out"), model)


def test_save_quantized_unpacked_loads_in_transformers(tmp_path: Path) -> None:
    import transformers as hf

    model = sc.quantize_weights(make_model("llama"), "int4")
    saved = save_quantized(model, tmp_path / "plain", packed=False)
    assert saved.written == saved.plain
    assert_same(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), model)
    save_quantized(model, tmp_path / "packed")
    with pytest.raises(OSError, match="no file named"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path / "packed", local_files_only=True)


def test_save_quantized_refuses_unsuitable_models(tmp_path: Path) -> None:
    model = make_model("llama")
    with pytest.raises(UserError, match="no quantized weights"):
        save_quantized(model, tmp_path / "out")
    sc.quantize_weights(model, "int4")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UserError, match="exists and is not empty"):
        save_quantized(model, tmp_path / "full")
    with pytest.raises(UserError, match="has no save_pretrained"):
        save_quantized(sc.quantize_weights(nn.Sequential(nn.Linear(4, 4)), "int4"), tmp_path / "out")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2.0)
    with pytest.raises(UserError, match="has changed since it was quantized"):
        save_quantized(model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_save_quantized_leaves_nothing_on_a_full_disk(tmp_path: Path) -> None:
    model = sc.quantize_weights(make_model("llama"), "int4")
    (tmp_path / ".out.scantling").mkdir()
    (tmp_path / ".out.scantling" / "left by one that was killed").touch()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(RunError, match=r"cannot write .*out: "):
            save_quantized(model, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
    save_quantized(model, tmp_path / "out")
    assert_same(sc.load(tmp_path / "out"), model)


def save_and_die(folder: Path) -> None:
    model = sc.quantize_weights(make_model("llama"), "int4")
    save_quantized(model, folder, also=lambda _: os.kill(os.getpid(), signal.SIGKILL))


def test_save_quantized_leaves_no_folder_when_killed(tmp_path: Path) -> None:
    process = processes.server().Process(target=save_and_die, args=(tmp_path / "out",))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    save_quantized(sc.quantize_weights(make_model("llama"), "int4"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_read_quantized_refuses_damaged_folders(tmp_path: Path) -> None:
    model = sc.quantize_weights(make_model("llama"), "int4")
    save_quantized(model, tmp_path / "out")
    (tmp_path / "out" / CHECKSUMS).unlink()  # reach the checks that follow the checksums
    index, tensors = tmp_path / "out" / "quantized.json", tmp_path / "out" / "quantized.safetensors"
    good = index.read_text()
    # clone, or else it is a memory map of the file
    good_tensors = {key: value.clone() for key, value in load_file(tensors).items()}
    name = "model.layers.0.mlp.up_proj.weight"

    def refused(words: str) -> None:
        with pytest.raises(UserError, match=words):
            sc.load(tmp_path / "out")

    def with_entry(**changes: Any) -> None:
        content = json.loads(good)
        content["tensors"][name] |= changes
        index.write_text(json.dumps(content))

    for changes, words in (
        ({"format": "int3"}, "take .* bytes"),
        ({"format": "int"}, "a number format must be"),
        ({"matrix": [1 << 40, 1 << 20]}, "damaged|take .* bytes"),
        ({"shape": [3]}, "damaged"),
        ({"dtype": "nn"}, "float dtype of torch; given 'nn'"),
        ({"dtype": "float31"}, "given 'float31'"),
        ({"dtype": "int8"}, "given 'int8'"),
        ({"group_size": 7}, "damaged"),
        ({"group_size": 0}, "damaged"),
        ({"scale_shape": [5, 5]}, "damaged"),
    ):
        with_entry(**changes)
        refused(words)
    for text in ("{", "[]", '{"format": 1}', '{"format": 1, "tensors": {"x": {}}}'):
        index.write_text(text)
        refused(r"quantized\.json.* (is not valid JSON|must hold a JSON object|it is damaged)|as it is damaged or")
    index.write_text(good.replace('"format":1,', '"format":2,', 1))
    refused("newer scantling wrote it, in format 2; upgrade")
    index.write_text(good)
    os.truncate(tensors, 3000)
    refused("it is damaged")
    save_file({key: value for key, value in good_tensors.items() if "norm" not in key}, tensors)
    refused("holds no values for 3 parameters")
    save_file(good_tensors, tensors)
    assert_same(sc.load(tmp_path / "out"), model)


def test_save_quantized_keeps_neighboring_folders(tmp_path: Path) -> None:
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "mine").touch()
    save_quantized(sc.quantize_weights(make_model("llama"), "int4"), tmp_path / "out")
    assert (tmp_path / "out.tmp" / "mine").exists()


@pytest.mark.parametrize("packed", [True, False])
def test_save_quantized_uses_the_umask(packed: bool, tmp_path: Path) -> None:
    save_quantized(sc.quantize_weights(make_model("llama"), "int4"), tmp_path / "out", packed=packed)
    files = [path.stat().st_mode for path in (tmp_path / "out").iterdir()]
    assert len(set(files)) == 1
