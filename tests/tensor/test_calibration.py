"""Tests of `tensorize` with calibration batches: Gram matrices, errors, sizes and refusals."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from families import FAMILIES, batch, logits, make_model
from torch import nn

import scantling as sc
from scantling.errors import UserError
from scantling.tensor.calibration import calibrate
from scantling.tensor.experts import TTExperts
from scantling.tensor.find_layers import find_layers
from scantling.tensor.report import LayerReport

SEEDS = (2, 3)


def batches(model: Any) -> list[dict[str, torch.Tensor]]:
    return [batch(8, seed, model=model) for seed in SEEDS]


def record_gram(model: nn.Module, name: str, given: list[Any]) -> torch.Tensor:
    """Return the Gram matrix of a layer's inputs, from all inputs at once."""
    inputs: list[torch.Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for each in given:
            model(**each)
    handle.remove()
    x = torch.cat(inputs)
    return x.t() @ x / len(x)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        (
            "llama",
            ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj", "model.layers.0.mlp.down_proj"],
        ),
        ("gpt2", ["transformer.h.0.attn.c_attn", "transformer.h.0.mlp.c_proj"]),
        ("t5", ["decoder.block.0.layer.1.EncDecAttention.k", "encoder.block.0.layer.1.DenseReluDense.wo"]),
    ],
)
def test_gram_matrices_are_those_of_the_inputs(family: str, names: list[str]) -> None:
    model = make_model(family)
    candidates = [each for each in find_layers(model)[0] if each.name in names]
    found = calibrate(model, candidates, batches(model))
    for candidate in candidates:
        (gram,) = found.grams[candidate.module][""]
        wanted = record_gram(model, candidate.name, batches(model))
        assert gram is not None
        assert torch.allclose(gram, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


def test_padding_does_not_count() -> None:
    model = make_model("bert")
    (candidate,) = (each for each in find_layers(model)[0] if each.name.endswith("attention.self.query"))
    short = batch(8)
    padded = {name: nn.functional.pad(ids, (0, 5)) for name, ids in short.items()}
    mask = nn.functional.pad(torch.ones_like(short["input_ids"]), (0, 5))
    (alone,), (found,) = (
        calibrate(model, [candidate], [given]).grams[candidate.module][""]
        for given in (short, {**padded, "attention_mask": mask})
    )
    assert torch.allclose(alone, found, rtol=1e-4, atol=1e-5)


def test_expert_gram_matrices_are_those_of_their_tokens() -> None:
    model = make_model("mixtral")
    (candidate,) = (each for each in find_layers(model)[0] if each.name.endswith("experts"))
    found = calibrate(model, [candidate], batches(model)).grams[candidate.module]
    # TT experts of full rank call one layer per expert and projection.
    exact = sc.tensorize(copy.deepcopy(model), {"*experts": 64}, init="svd", filter_fn=lambda *_: True)
    for part in ("up", "down"):
        assert len(found[part]) == 4
        for i, gram in enumerate(found[part]):
            wanted = record_gram(exact, f"{candidate.name}.{part}.{i}", batches(model))
            assert gram is not None
            assert torch.allclose(gram, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_size_target_holds_and_calibration_lowers_output_errors(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """The errors of whitened layers are lower than those of a plain SVD at the same ranks, measured on the inputs."""
    model = make_model(family)
    dense = copy.deepcopy(model)
    report: list[LayerReport] = []
    with caplog.at_level(logging.WARNING, logger="scantling"):
        sc.tensorize(model, size_target=0.6, init="svd", calibration=batches(model), report=report)
    *layers, whole = report
    sizes = {each.name: sum(weight.numel() for weight in each.weights) for each in find_layers(dense)[0]}
    tables = {name for name, module in dense.named_modules() if isinstance(module, nn.Embedding)}
    linear = sum(size for name, size in sizes.items() if name not in tables)
    left_dense = linear - sum(each.dense_parameters for each in layers)
    assert 0.5 * linear < left_dense + sum(each.tt_parameters for each in layers) <= 0.6 * linear
    assert all(each.tt_parameters < each.dense_parameters for each in layers)
    assert (whole.name, whole.dense_parameters) == ("", sum(each.dense_parameters for each in layers))
    with torch.no_grad():
        before, after = (made(**batch(8, SEEDS[0], model=made)).logits for made in (dense, model))
    assert whole.output_error == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-3)
    assert f"the output of the model by {100 * (whole.output_error or 0):.1f} %" in caplog.text

    def rank(name: str) -> Any:
        layer = model.get_submodule(name)
        return layer.up[0].ranks[1] if isinstance(layer, TTExperts) else layer.ranks[1]

    ranks = {each.name: rank(each.name) for each in layers}
    plain = copy.deepcopy(dense)
    sc.tensorize(plain, ranks, format="low-rank", init="svd")
    for each in layers:
        assert each.output_error is not None
        if not isinstance(model.get_submodule(each.name), TTExperts):
            gram = record_gram(dense, each.name, batches(dense)).double()
            weight, found, other = (
                made.get_submodule(each.name).weight.detach().double() for made in (dense, model, plain)
            )
            weight = weight if isinstance(dense.get_submodule(each.name), nn.Linear) else weight.t()  # GPT-2's Conv1D
            errors = [float(torch.trace((weight - way) @ gram @ (weight - way).t())) for way in (found, other)]
            assert errors[0] < errors[1]
            total = float(torch.trace(weight @ gram @ weight.t()))
            assert each.output_error == pytest.approx((errors[0] / total) ** 0.5, rel=1e-3)
    assert sc.densify(model).state_dict().keys() == dense.state_dict().keys()


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "bert"])
@pytest.mark.parametrize("frozen", [False, True])
def test_effects_predict_the_error_of_the_output(family: str, frozen: bool) -> None:
    """Noise in a layer's weight changes the output of the model as predicted, up to a factor.

    The prediction assumes that the errors of the tokens are independent, which noise of the value projection is not.
    """
    model = make_model(family).requires_grad_(not frozen)
    candidates = [each for each in find_layers(model)[0] if not isinstance(each.module, nn.Embedding)]
    given = [batch(16, seed, model=model) for seed in range(4)]
    found = calibrate(model, candidates, given, with_effects=True).effects
    assert all(param.grad is None for param in model.parameters())
    wanted = logits(model)
    ratios = []
    for candidate in candidates:
        errors = []
        for seed in range(8):
            noisy = copy.deepcopy(model)
            source = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                module = noisy.get_submodule(candidate.name)
                # A relative error of 1 % in the output of the layer.
                for weight in [param for param in module.parameters() if param.ndim > 1][-1:]:
                    weight += 0.01 * weight.square().mean().sqrt() * torch.randn(weight.shape, generator=source)
            errors.append(float((logits(noisy) - wanted).square().sum() / wanted.square().sum()) / 0.01**2)
        ratios.append(sum(errors) / len(errors) / found[candidate.module])
    assert 0.3 < min(ratios) <= max(ratios) < 8.0, ratios
    assert max(found.values()) > 3.0 * min(found.values()), "equal effects would predict as well"


def test_error_bounds_the_error_of_each_layer() -> None:
    model = make_model("llama")
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    report: list[LayerReport] = []
    sc.tensorize(model, error=0.55, init="svd", calibration=batches(model), report=report)
    assert report[:-1]
    assert all(each.output_error is not None and each.output_error <= 0.5501 for each in report[:-1])
    converted = {each.name for each in report}
    assert all(type(model.get_submodule(name)) is nn.Linear for name in linear if name not in converted)
    with pytest.raises(UserError, match=r"with error=1e-06 none of the 8 layers becomes smaller"):
        sc.tensorize(make_model("llama"), error=1e-6, init="svd")


def test_full_rank_with_calibration_keeps_outputs() -> None:
    model = make_model("gpt2")
    wanted = logits(model)
    sc.tensorize(model, 64, init="svd", calibration=batches(model), filter_fn=lambda *_: True)
    assert (logits(model) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_bf16_model_keeps_its_dtype() -> None:
    model = make_model("llama").to(torch.bfloat16)
    report: list[LayerReport] = []
    sc.tensorize(model, size_target=0.7, init="svd", calibration=batches(model), report=report)
    layer = model.get_submodule(report[0].name)
    assert {param.dtype for param in layer.parameters()} == {torch.bfloat16}
    assert all(0.0 < (each.output_error or 0.0) < 1.0 for each in report)
    assert torch.isfinite(logits(model)).all()


def test_batches_may_be_tuples_or_tensors() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), torch.randn(50, 32)
    reports: list[list[LayerReport]] = [[], []]
    for report, given in zip(reports, (x, (x,)), strict=True):
        sc.tensorize(copy.deepcopy(net), size_target=0.5, init="svd", calibration=[given], report=report)
    assert reports[0] == reports[1]


def test_calibration_runs_in_evaluation_mode_and_leaves_no_hooks() -> None:
    net = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.BatchNorm1d(64), nn.Linear(64, 32)).train()
    mean = net[2].running_mean.clone()
    sc.tensorize(net, size_target=0.5, init="svd", calibration=[torch.randn(20, 32)])
    assert net[1].training
    assert torch.equal(net[2].running_mean, mean)
    assert not any(module._forward_pre_hooks for module in net.modules())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no batches": ({"calibration": []}, "calibration is empty; give at least one batch"),
    "a batch": ({"calibration": {"input_ids": torch.ones(2, 3)}}, "must be an iterable of batches"),
    "a size without batches": ({"calibration": None}, "size_target without calibration; give a few batches"),
    "random": ({"init": "random"}, "given size_target and calibration with init='random'"),
    "two sizes": ({"rank": 4}, "given rank and size_target; give exactly one of rank, error, size_target"),
    "no size": ({"size_target": None}, "given no ranks; give exactly one of"),
    "a negative size": ({"size_target": -1.0}, "size_target=-1.0; it must be a number above 0"),
    "a large error": ({"size_target": None, "error": 1.5}, "error=1.5; it must be a number above 0 and below 1"),
    "a small size": ({"size_target": 0.001}, "size target of .* parameters; it must be at least"),
    "the dense size": ({"size_target": 1.0}, "with size_target=1 none of the 8 layers becomes smaller"),
    "several modes": ({"format": "tt"}, "use format='low-rank'"),
    "silu in the layers": ({"format": "cola"}, "needs linear layers, but format='cola' has silu in them"),
    "texts": ({"calibration": [["a text", "another"]]}, "a batch holds texts; give token ids"),
    "a filter for nothing": ({"filter_fn": lambda name, _: "embed" in name}, "nothing to replace"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensorize_refuses_invalid_sizes_and_batches_without_changes(case: str) -> None:
    arguments, message = REFUSED[case]
    model = make_model("llama")
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(UserError, match=message):
        sc.tensorize(model, **{"size_target": 0.5, "init": "svd", "calibration": batches(model), **arguments})
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_calibration_that_reaches_no_layer_is_refused() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model, x = Unused(), torch.randn(8, 32)
    with pytest.raises(UserError, match="reaches none of the 1 layers to convert, such as unused"):
        sc.tensorize(model, 4, init="svd", calibration=[x], filter_fn=lambda name, _: name == "unused")
    with pytest.raises(UserError, match="calibration: the inputs of used hold NaN or Inf"):
        sc.tensorize(model, 4, init="svd", calibration=[x / 0], filter_fn=lambda *_: True)
    assert type(model.used) is nn.Linear
    report: list[LayerReport] = []
    sc.tensorize(model, 4, init="svd", calibration=[x], filter_fn=lambda *_: True, report=report)
    assert isinstance(model.unused, sc.TTLinear)
    assert [each.output_error is None for each in report] == [False, True, False]


class TwoHeads(nn.Module):
    """A model whose output depends on its trunk and its first head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(64, 64), nn.Linear(64, 64)
        self.pooler, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.trunk(x).relu()
        return self.head(y), self.pooler(y)


def test_layers_that_the_output_does_not_depend_on_stay_dense(caplog: pytest.LogCaptureFixture) -> None:
    model, x = TwoHeads(), torch.randn(100, 64)
    report: list[LayerReport] = []
    with caplog.at_level(logging.WARNING, logger="scantling"):
        sc.tensorize(model, size_target=0.5, init="svd", calibration=[x], report=report)
    assert "does not depend on 2 layers (pooler, unused); they stay dense" in caplog.text
    assert type(model.pooler) is type(model.unused) is nn.Linear
    # The target is half of the other layers, whose sizes are those of the report unless one stays dense.
    assert {each.name for each in report[:-1]} <= {"trunk", "head"}
    left = 2 * 64 * 64 - report[-1].dense_parameters
    assert 0.45 * 2 * 64 * 64 < left + report[-1].tt_parameters <= 0.5 * 2 * 64 * 64
    model = TwoHeads()
    with pytest.raises(UserError, match=r"does not depend on 1 layers \(pooler\), which are all layers to convert"):
        sc.tensorize(
            model,
            size_target=0.5,
            init="svd",
            calibration=[x],
            filter_fn=lambda name, _: name == "pooler",
        )
    assert type(model.pooler) is nn.Linear


@pytest.mark.parametrize("options", [{"size_target": 0.5}, {"error": 0.5}, {"rank": 4}])
def test_model_that_is_itself_a_layer_is_refused(options: dict[str, Any]) -> None:
    layer, x = nn.Linear(32, 32), torch.randn(20, 32)
    with pytest.raises(UserError, match="the model is itself a Linear; use from_dense"):
        sc.tensorize(layer, init="svd", calibration=[x], **options)
    assert not [*layer.children()]


class Detached(nn.Sequential):
    """A model whose output has no gradients."""

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(x)
        return found


def test_gradients_that_size_target_needs() -> None:
    x = torch.randn(20, 32)
    layers = [nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)]
    options: dict[str, Any] = {"size_target": 0.5, "init": "svd", "calibration": [x]}
    with pytest.raises(UserError, match=r"whose forward pass runs under torch\.no_grad"):
        sc.tensorize(Detached(*layers), **options)
    with torch.inference_mode():
        options["calibration"] = [x.clone()]
        with pytest.raises(UserError, match=r"does not work in torch\.inference_mode\(\)"):
            sc.tensorize(nn.Sequential(*layers), **options)
    with torch.no_grad():
        net = sc.tensorize(nn.Sequential(*layers), **options)
    assert isinstance(net[0], sc.TTLinear) or isinstance(net[2], sc.TTLinear)


def test_inputs_of_one_token_without_a_batch() -> None:
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    alone, together = ([torch.ones(32)], [torch.ones(1, 32)])
    reports: list[list[LayerReport]] = [[], []]
    for report, given in zip(reports, (alone, together), strict=True):
        sc.tensorize(copy.deepcopy(net), error=0.5, init="svd", calibration=given, report=report)
    assert reports[0] == reports[1]


def test_shared_linear_layer_counts_all_its_inputs() -> None:
    layer = nn.Linear(32, 32)
    net = nn.Sequential(layer, nn.ReLU(), layer)
    (candidate,) = find_layers(net)[0]
    x = torch.randn(40, 32)
    (gram,) = calibrate(net, [candidate], [x]).grams[layer][""]
    with torch.no_grad():
        both = torch.cat([x, torch.relu(layer(x))])
    assert gram is not None
    assert torch.allclose(gram, both.t() @ both / 80, atol=1e-5)
