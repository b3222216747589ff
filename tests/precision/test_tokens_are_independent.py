"""Tests that, by default, low precision keeps causal models causal and the sequences of a batch independent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensor.families import FAMILIES, batch, make_model
from torch import Tensor, nn

import scantling as sc
from scantling.errors import UserError
from scantling.precision import Quantizer

PARTS = ("weights", "activations", "kv_cache", "queries")
INT4 = dict.fromkeys(PARTS, "int4")
SETTINGS: dict[str, dict[str, Any]] = {
    "int4": INT4,
    "int4, clipped": {part: {"format": "int4", "clip": "mse"} for part in PARTS},
    "fp8": dict.fromkeys(PARTS, "fp8_e4m3"),
    "bf16": dict.fromkeys(PARTS, "bf16"),
    "mxfp4": dict.fromkeys(PARTS, "mxfp4_e2m1"),
    "nvfp4": dict.fromkeys(PARTS, "nvfp4"),
    "int8 products": {"weights": "int8", "activations": "int8", "compute": "int8", "kv_cache": "int8"},
    "fp8 products": {"weights": "fp8_e4m3", "activations": "fp8_e5m2", "compute": "fp8"},
}
SEES_ALL = ("bert", "roberta", "vit")


def quantized(family: str, settings: dict[str, Any], *, tt: bool = False) -> Any:
    """Return a quantized model in fp64, so the order of sums almost never moves a value over a rounding boundary."""
    model = make_model(family)
    if tt:
        sc.tensorize(model, 6)
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # the only implementation in fp64
    if family == "gpt-oss":  # supports eager attention only
        settings = {part: given for part, given in settings.items() if part not in ("kv_cache", "queries")}
    return sc.quantize_training(model.double(), **settings)


def inputs(model: Any, rows: int = 4) -> dict[str, Tensor]:
    given = batch(rows, model=model)
    del given["labels"]
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = given["input_ids"].flip(1)
    return {name: each.double() if each.is_floating_point() else each for name, each in given.items()}


def assert_equal_but_for_sums(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # sums of fp8 products are in fp32


def check_causal(model: Any) -> None:
    given = inputs(model)
    name = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    changed = dict(given)
    changed[name] = given[name].clone()
    changed[name][:, -1] = (given[name][:, -1] + 7) % 90 + 4
    before, after = model(**given).logits, model(**changed).logits
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


def check_rows(model: Any) -> None:
    given = inputs(model)
    together = model(**given).logits
    alone = [model(**{name: each[row : row + 1] for name, each in given.items()}).logits for row in range(4)]
    assert_equal_but_for_sums(torch.cat(alone), together)


@torch.no_grad()
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("tt", [False, True], ids=["dense", "tt"])
def test_quantize_training_keeps_a_llama_causal(settings: dict[str, Any], tt: bool) -> None:
    model = quantized("llama", settings, tt=tt)
    check_causal(model)
    check_rows(model)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_quantize_training_keeps_models_causal_and_rows_independent(family: str) -> None:
    model = quantized(family, INT4)
    if family not in SEES_ALL:
        check_causal(model)
    check_rows(model)


@torch.no_grad()
@pytest.mark.parametrize("settings", ["int4", "nvfp4", "int8 products"])
@pytest.mark.parametrize("tt", [False, True], ids=["dense", "tt"])
def test_generation_matches_with_and_without_cache(settings: str, tt: bool) -> None:
    model = quantized("llama", SETTINGS[settings], tt=tt)
    prompt = batch(2)["input_ids"][:, :5]
    found = [
        model.generate(
            prompt,
            use_cache=cache,
            max_new_tokens=10,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for cache in (True, False)
    ]
    assert torch.equal(found[0].sequences, found[1].sequences)
    for one, other in zip(found[0].logits, found[1].logits, strict=True):
        assert_equal_but_for_sums(one, other)


@torch.no_grad()
def test_outputs_do_not_depend_on_padding_of_others() -> None:
    model = quantized("llama", INT4)
    ids = batch(2)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    padded = model(input_ids=ids, attention_mask=mask).logits
    ids[1, :6] = 5
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits[0], padded[0])
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits[1, 6:], padded[1, 6:])


@torch.no_grad()
def test_compiled_models_stay_causal() -> None:
    model = quantized("llama", INT4)
    model.compile(backend="aot_eager")
    check_causal(model)


def test_gradient_of_a_batch_is_the_sum_over_rows() -> None:
    layer = nn.Linear(24, 16, bias=False).double()
    model = sc.quantize_training(nn.Sequential(layer), weights="int4", activations="int4", gradients="int4")
    x, up = torch.randn(4, 5, 24, dtype=torch.float64), torch.randn(4, 5, 16, dtype=torch.float64)
    model(x).backward(up)
    whole, layer.weight.grad = layer.weight.grad, None
    for row in range(4):
        model(x[row]).backward(up[row])
    torch.testing.assert_close(layer.weight.grad, whole)


@torch.no_grad()
@pytest.mark.parametrize(
    "given",
    [
        {"activations": {"format": "int4", "granularity": "tensor"}},
        {"activations": {"format": "int4", "granularity": "channel"}},
        {"activations": {"format": "nvfp4", "granularity": "tensor"}},
        {"kv_cache": {"format": "int4", "granularity": "tensor"}},
        {"queries": {"format": "int4", "granularity": "tensor"}},
    ],
)
def test_tensor_granularity_mixes_tokens_and_warns(given: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    model = quantized("llama", given)
    (part,) = given
    assert f"share scales of {part} (" in caplog.text
    assert "granularity='token' avoids that" in caplog.text
    ids = batch(4)["input_ids"]
    alone = torch.cat([model(row[None]).logits for row in ids])
    assert (model(ids).logits - alone).abs().max() > 1e-4


def test_default_granularities_do_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    for settings in SETTINGS.values():
        quantized("llama", settings)
    assert "share scales" not in caplog.text


def test_nvfp4_scale_per_token_or_tensor() -> None:
    x = torch.randn(3, 40) * torch.tensor([[1.0], [1e-3], [1e3]])
    by_token = Quantizer.from_spec({"format": "nvfp4", "granularity": "token"})
    assert by_token == Quantizer.from_spec("nvfp4", "token")
    assert by_token.scales == "fp8_token"
    by_tensor = Quantizer.from_spec({"format": "nvfp4", "granularity": "tensor"}, "token")
    assert by_tensor == Quantizer.from_spec("nvfp4") == Quantizer.from_spec("nvfp4", "channel")
    assert torch.equal(by_token(x), torch.cat([by_tensor(row[None]) for row in x]))
    assert torch.equal(by_token(x[0]), by_tensor(x[0]))
    assert by_token(x[:0]).shape == (0, 40)
    with pytest.raises(UserError, match="nvfp4 fixes granularity='group'; given 'channel'"):
        Quantizer.from_spec({"format": "nvfp4", "granularity": "channel"})
