"""Tests of the conversion to TT and back: the families of transformers, and custom models."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, VOCAB, batch, logits, make_model
from torch import nn

import scantling as sc
from scantling.errors import UserError
from scantling.tensor.embedding import TTMHead
from scantling.tensor.experts import TTExperts
from scantling.tensor.replace import find_tt_layers

RANK = 4
ALL = {"filter_fn": lambda name, module: True}


def tied_records(model: Any) -> list[dict[str, str]]:
    return [dict(model._tied_weights_keys or {}), dict(model.all_tied_weights_keys)]


def classes(model: nn.Module) -> dict[str, type[nn.Module]]:
    return {name: type(module) for name, module in model.named_modules(remove_duplicate=False)}


@pytest.mark.parametrize("family", FAMILIES)
def test_full_rank_tensorize_and_densify_keep_outputs(family: str) -> None:
    model = make_model(family)
    dense = copy.deepcopy(model)
    wanted = logits(model)
    assert sc.tensorize(model, 64, init="svd", **ALL) is model
    found = logits(model)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert not any(isinstance(module, nn.Linear | nn.Embedding) for module in model.modules())

    model.tie_weights()
    model.init_weights()
    assert torch.equal(logits(model), found), "tying or initializing again changed the cores"

    assert sc.densify(model) is model
    assert (logits(model) - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    assert classes(model) == classes(dense)
    shapes = {name: tensor.shape for name, tensor in dense.state_dict().items()}
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == shapes
    assert tied_records(model) == tied_records(dense)
    names = [name for name, _ in dense.named_parameters()]
    assert sorted(name for name, _ in model.named_parameters()) == sorted(names), "not tied as before"


@pytest.mark.parametrize("family", FAMILIES)
def test_tensorized_model_trains(family: str) -> None:
    model = make_model(family).train()
    before = sum(parameter.numel() for parameter in model.parameters())
    sc.tensorize(model, RANK)
    assert sum(parameter.numel() for parameter in model.parameters()) < before / 2
    groups = sc.param_groups(model)
    roles = {name: group["role"] for group in groups for name, _ in group["params"]}
    optimizer = sc.CAME(groups, lr=1e-2, debias=True)
    losses = []
    for step in range(20):
        loss = model(**batch(8, model=model)).loss
        loss.backward()
        if step == 0:
            for name, parameter in model.named_parameters():
                if "cores" in name:
                    assert parameter.grad is not None, f"{name} has no gradient"
                    assert parameter.grad.abs().max() > 0, f"{name} has no gradient"
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0] - 0.1
    for layer in find_tt_layers(model):
        wanted = "embedding" if isinstance(layer, sc.TTMEmbedding) else "matrix"
        for name, _ in layer.named_parameters():
            if "cores" in name:
                assert any(role == wanted for path, role in roles.items() if path.endswith(name))


def test_tensorize_is_deterministic_for_a_seed() -> None:
    one, other, third = (make_model("llama-tied") for _ in range(3))
    for model, seed in ((one, 3), (other, 3), (third, 4)):
        torch.manual_seed(seed)
        sc.tensorize(model, RANK)
    assert torch.equal(logits(one), logits(other))
    assert not torch.equal(logits(one), logits(third))


def test_tt_experts_route_like_dense_experts() -> None:
    """Expert indices beyond the last one stand for no expert; biases and gates are those of the original class."""
    experts = make_model("gpt-oss").model.layers[0].mlp.experts
    nn.init.normal_(experts.gate_up_proj_bias)
    nn.init.normal_(experts.down_proj_bias)
    holder = nn.ModuleDict({"experts": copy.deepcopy(experts)})
    sc.tensorize(holder, 64, init="svd", **ALL)
    cores = holder["experts"]
    assert isinstance(cores, TTExperts)
    hidden, weights = torch.randn(9, 32), torch.rand(9, 2)
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(9)])
    assert torch.allclose(cores(hidden, chosen, weights), experts(hidden, chosen, weights), atol=1e-5)
    chosen[:, 1] = cores.num_experts
    alone = weights.clone()
    alone[:, 1] = 0
    chosen_zero = chosen.clone()
    chosen_zero[:, 1] = 0
    assert torch.allclose(cores(hidden, chosen, weights), experts(hidden, chosen_zero, alone), atol=1e-5)


class Own(nn.Module):
    """Custom language model: a tied head, a block used twice, a torch layer that reads weights directly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.layers = nn.ModuleList([self.block, self.block])
        self.head = nn.Linear(32, VOCAB)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def own() -> Own:
    torch.manual_seed(0)
    return Own().eval()


def test_tensorize_converts_custom_model() -> None:
    model, ids = own(), torch.randint(0, VOCAB, (3, 7))
    dense = copy.deepcopy(model)
    with torch.no_grad():
        wanted = model(ids)
        sc.tensorize(model, 64, init="svd", **ALL)
        assert (model(ids) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert isinstance(model.block.linear1, sc.TTLinear)
    assert model.layers[1].linear1 is model.block.linear1
    assert type(model.block.self_attn.out_proj).__name__ == "NonDynamicallyQuantizableLinear", "a subclass"
    assert isinstance(model.head, TTMHead)
    assert model.head.table is model.embed
    assert [name for name in model.state_dict() if name.startswith("head")] == ["head.bias"]
    sc.densify(model)
    assert model.head.weight is model.embed.weight
    assert model.layers[1].linear1 is model.block.linear1
    assert model.state_dict().keys() == dense.state_dict().keys()
    with torch.no_grad():
        assert (model(ids) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_tensorize_keeps_shared_embeddings_shared() -> None:
    model = sc.tensorize(make_model("t5"), RANK)
    assert model.shared is model.encoder.embed_tokens
    assert model.shared is model.decoder.embed_tokens
    assert model.lm_head.table is model.shared
    assert model.get_input_embeddings() is model.shared
    assert model.get_output_embeddings() is model.lm_head
    sc.densify(model)
    assert model.shared.weight is model.encoder.embed_tokens.weight
    assert model.shared.weight is model.lm_head.weight


def test_tensorize_keeps_tied_bias() -> None:
    model = sc.tensorize(make_model("bert"), RANK)
    assert model.cls.predictions.decoder.bias is model.cls.predictions.bias
    model.tie_weights()
    assert model.cls.predictions.decoder.bias is model.cls.predictions.bias
    sc.densify(model)
    assert model.cls.predictions.decoder.bias is model.cls.predictions.bias


def test_copied_head_is_tied_to_copied_table() -> None:
    model = sc.tensorize(make_model("llama-tied"), RANK)
    before = logits(model)
    twin = copy.deepcopy(model)
    assert twin.lm_head.table is twin.model.embed_tokens
    with torch.no_grad():
        twin.model.embed_tokens.cores[0].mul_(2)
    assert not torch.allclose(logits(twin), before)
    assert torch.equal(logits(model), before)
    assert model.state_dict().keys() == twin.state_dict().keys()


def test_tensorize_skips_weights_shared_with_other_modules() -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * 2

    model = nn.ModuleDict({"embed": Scaled(96, 32), "head": nn.Linear(32, 96), "other": nn.Linear(32, 96)})
    model["head"].weight = model["embed"].weight
    sc.tensorize(model, RANK)
    assert type(model["head"]) is nn.Linear
    assert model["head"].weight is model["embed"].weight
    assert isinstance(model["other"], sc.TTLinear)

    twins = nn.ModuleDict({"one": nn.Linear(32, 96), "two": nn.Linear(32, 96)})
    twins["two"].weight = twins["one"].weight
    with pytest.raises(UserError, match="one: its weight is shared with a Linear"):
        sc.tensorize(twins, RANK)


def test_tensorize_ranks_by_pattern() -> None:
    model = make_model("llama")
    sc.tensorize(
        model,
        {
            "*layers.0.self_attn.q_proj": [1, 2, 3, 2, 1],
            "*self_attn*": 3,
            "*mlp.up_proj": {"rank": 5, "in_modes": (8, 4), "out_modes": [8, 8]},
            "*embed*": {"rank": 2, "num_modes": 2},
        },
    )
    layer = model.model.layers[0]
    assert layer.self_attn.q_proj.ranks == (1, 1, 2, 3, 2, 1, 1)
    assert max(layer.self_attn.k_proj.ranks) == 3
    assert (layer.mlp.up_proj.in_modes, layer.mlp.up_proj.out_modes) == ((8, 4), (8, 8))
    assert layer.mlp.up_proj.ranks == (1, 5, 5, 5, 1)
    assert len(model.model.embed_tokens.cores) == 2
    assert type(layer.mlp.down_proj) is nn.Linear
    assert type(model.lm_head) is nn.Linear


def test_tensorize_expert_ranks_by_pattern() -> None:
    model = sc.tensorize(make_model("mixtral"), {"*.experts.up": 3, "*.experts": {"rank": 5, "num_modes": 2}})
    experts = model.model.layers[0].mlp.experts
    assert max(experts.up[2].ranks) == 3
    assert max(experts.down[2].ranks) == 5
    assert len(experts.down[2].cores) == 4


def test_tensorize_warns_of_unused_pattern(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="scantling"):
        sc.tensorize(make_model("llama"), {"*q_proj": 4, "*foo": 8})
    assert [record.getMessage() for record in caplog.records] == ["tensorize: the pattern '*foo' selects no layer"]


def test_tensorize_skips_layers_that_would_grow() -> None:
    model = nn.ModuleDict({"wide": nn.Linear(64, 64), "classifier": nn.Linear(64, 2)})
    sc.tensorize(model, 8)
    assert isinstance(model["wide"], sc.TTLinear)
    assert type(model["classifier"]) is nn.Linear
    sc.tensorize(nn.ModuleDict({"classifier": nn.Linear(64, 2)}), 8, **ALL)


def test_tensorize_keeps_layer_settings() -> None:
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(32, 48).to(torch.bfloat16),
            "table": nn.Embedding(96, 32, padding_idx=5, sparse=True),
            "bag": nn.EmbeddingBag(96, 32, mode="sum", include_last_offset=True, padding_idx=1),
        }
    )
    linear = model["linear"]
    bias = linear.bias
    linear.weight.requires_grad_(False)
    linear.eval()
    calls: list[int] = []
    handle = linear.register_forward_hook(lambda *_: calls.append(1))
    norms = {name: module.weight.detach().double().norm().item() for name, module in model.items()}
    sc.tensorize(model, RANK)
    cores = model["linear"]
    assert cores.bias is bias
    assert bias.requires_grad
    assert {(core.dtype, core.requires_grad) for core in cores.cores} == {(torch.bfloat16, False)}
    assert not cores.training
    assert model["table"].training
    assert model["table"].padding_idx == 5
    assert (model["bag"].mode, model["bag"].include_last_offset, model["bag"].padding_idx) == ("sum", True, 1)
    for name, module in model.items():
        tolerance = 2e-2 if name == "linear" else 1e-5  # bf16 cores are rounded
        assert module.dense_weight().detach().double().norm().item() == pytest.approx(norms[name], rel=tolerance)
    cores(torch.randn(2, 32, dtype=torch.bfloat16))
    handle.remove()
    cores(torch.randn(2, 32, dtype=torch.bfloat16))
    assert calls == [1]

    sc.densify(model)
    assert model["linear"].bias is bias
    assert not model["linear"].weight.requires_grad
    assert not model["linear"].training
    assert (model["table"].padding_idx, model["table"].sparse) == (5, True)


def test_svd_keeps_nonzero_padding_row() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(96, 32, padding_idx=5)})
    nn.init.normal_(model["table"].weight)
    wanted = model["table"].weight.detach().clone()
    sc.tensorize(model, 1024, init="svd", **ALL)
    assert torch.allclose(model["table"](torch.tensor([5])), wanted[5], atol=1e-5)
    sc.densify(model)
    assert model["table"].padding_idx == 5
    assert torch.allclose(model["table"].weight, wanted, atol=1e-5)


@pytest.mark.parametrize("init", ["random", "svd"])
def test_zero_weight_stays_zero_and_trains(init: Any) -> None:
    model = nn.ModuleDict({"linear": nn.Linear(32, 48)})
    nn.init.zeros_(model["linear"].weight)
    sc.tensorize(model, RANK, init=init)
    layer = model["linear"]
    assert not layer.dense_weight().any()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x, y = torch.randn(64, 32), torch.randn(64, 48)
    losses = []
    for _ in range(50):
        loss = (layer(x) - y).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert all(core.any() for core in layer.cores)


def test_tensorize_on_meta_device() -> None:
    with torch.device("meta"):
        model = FAMILIES["llama-tied"]()
    sc.tensorize(model, RANK)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.lm_head.table is model.model.embed_tokens
    model.to_empty(device="cpu")
    state = sc.tensorize(make_model("llama-tied"), RANK).state_dict()
    model.load_state_dict(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    with torch.device("meta"):
        model = FAMILIES["llama"]()
    with pytest.raises(UserError, match=r"model.embed_tokens: init='svd' needs the weight.*meta device"):
        sc.tensorize(model, RANK, init="svd")


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
def test_tensorized_model_supports_checkpointing_and_autocast() -> None:
    model = sc.tensorize(make_model("llama-tied").train(), RANK)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(**batch()).loss.backward()
    plain = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(**batch()).loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, plain[name]), name


REFUSED: dict[str, tuple[Any, str]] = {
    "no rank": ({"rank": 0}, "rank: given .* must be a positive integer or a sequence"),
    "a word": ({"rank": "8"}, "rank: given .* must be a positive integer or a sequence"),
    "no patterns": ({"rank": {}}, "empty mapping"),
    "an option": (
        {"rank": {"*q_proj": {"rank": 4, "modes": 2}}},
        r"self_attn.q_proj: given the option 'modes'; it must be one of rank",
    ),
    "an option of tables": (
        {"rank": {"*q_proj": {"rank": 4, "row_modes": (8, 4)}}},
        r"q_proj: given the option 'row_modes'; it must be",
    ),
    "no rank in a pattern": ({"rank": {"*q_proj": {"num_modes": 2}}}, r"rank of the pattern '\*q_proj': .* must be a"),
    "ranks that do not fit": ({"rank": [2, 2, 2]}, "layers.0.self_attn.q_proj: given rank=.* each of the 5 bonds"),
    "modes that do not fit": (
        {"rank": {"*q_proj": {"rank": 4, "in_modes": (3, 3)}}},
        r"q_proj: given in_modes=\(3, 3\), whose product is 9",
    ),
    "too many modes": ({"rank": 4, "num_modes": 6}, "q_proj: given num_modes=6; it must be from 1 to 5"),
    "an init": ({"rank": 4, "init": "zeros"}, "init=.* must be one of random, svd"),
    "a filter that is none": ({"rank": 4, "filter_fn": "*q_proj"}, "filter_fn=.* must be a function"),
    "a filter for nothing": (
        {"rank": 4, "filter_fn": lambda n, m: "foo" in n},
        "select none of its 8 layers, such",
    ),
    "a pattern for nothing": ({"rank": {"*foo": 4}}, r"lm_head can only be replaced with the embedding it is tied to"),
    "all too large": ({"rank": 500}, "its cores would have .* lower the rank"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensorize_refuses_invalid_arguments_without_changes(case: str) -> None:
    arguments, message = REFUSED[case]
    model = make_model("llama-tied")
    before = classes(model)
    with pytest.raises(UserError, match=message):
        sc.tensorize(model, **arguments)
    assert classes(model) == before


def test_tensorize_refuses_unsupported_models() -> None:
    model = sc.tensorize(make_model("llama"), RANK)
    with pytest.raises(UserError, match=r"model.embed_tokens is already a TT layer; call sc.densify"):
        sc.tensorize(model, RANK)
    with pytest.raises(UserError, match="has no linear layers"):
        sc.tensorize(nn.Sequential(nn.LayerNorm(8)), RANK)
    with pytest.raises(UserError, match="the model is itself a Linear"):
        sc.tensorize(nn.Linear(64, 64), RANK)
    with pytest.raises(UserError, match=r"to_dense\(\)"):
        sc.densify(sc.TTLinear(64, 64, RANK))
    broken = nn.Sequential(nn.Linear(64, 64))
    with torch.no_grad():
        broken[0].weight[0, 0] = torch.nan
    with pytest.raises(UserError, match="0: its weight holds NaN"):
        sc.tensorize(broken, RANK)
    with pytest.raises(UserError, match="TT bags support the modes sum and mean"):
        sc.tensorize(nn.Sequential(nn.EmbeddingBag(96, 32, mode="max")), RANK)
    plain = own()
    assert sc.densify(plain) is plain


def test_tensorize_accepts_numpy_integer_ranks() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    sc.tensorize(model, rank={"0": np.int64(4), "1": np.array([2, 3, 3, 3, 2])})
    assert model[0].ranks == (1, 4, 4, 4, 4, 4, 1)
    assert model[1].ranks == (1, 2, 3, 3, 3, 2, 1)


def test_tensorize_skips_computed_weights() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        computed = torch.nn.utils.weight_norm(nn.Linear(64, 64))
    model = nn.Sequential(computed, nn.Linear(64, 64))
    sc.tensorize(model, rank=4)
    assert type(model[0]) is nn.Linear
    assert type(model[1]) is sc.TTLinear
    assert model(torch.randn(2, 64)).shape == (2, 64)


def test_tensorize_skips_empty_layers_and_replaced_forwards() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(0, 5), nn.Linear(64, 64))
    moved = model[2].forward
    model[2].forward = lambda x: moved(x)  # as offloading does
    sc.tensorize(model, rank=4, num_modes=np.int64(2))  # type: ignore[arg-type]
    assert [type(module) for module in model] == [sc.TTLinear, nn.Linear, nn.Linear]
    assert len(model[0].cores) == 4
    with pytest.raises(UserError, match="its forward method was replaced"):
        sc.tensorize(nn.Sequential(model[2]), 4)


def test_tt_layers_accept_keyword_inputs() -> None:
    ids = torch.arange(6)
    for layer, given in (
        (sc.TTLinear(8, 8, 2), {"input": torch.randn(2, 8)}),
        (sc.TTMEmbedding(60, 8, 2), {"input": ids}),
        (sc.TTMEmbeddingBag(60, 8, 2), {"input": ids, "offsets": torch.tensor([0, 2])}),
        (TTMHead(sc.TTMEmbedding(60, 8, 2)), {"input": torch.randn(2, 8)}),
    ):
        assert torch.equal(layer(**given), layer(*given.values()))
        assert layer.weight.requires_grad
        assert not layer.requires_grad_(False).weight.requires_grad or isinstance(layer, TTMHead)


def test_tt_layer_refuses_dense_checkpoint() -> None:
    dense = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model = sc.tensorize(copy.deepcopy(dense), rank=4)
    with pytest.raises(UserError, match=r"0: the checkpoint holds a dense weight.*scantling\.tensorize"):
        model.load_state_dict(dense.state_dict())
