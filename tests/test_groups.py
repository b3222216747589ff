"""Tests of parameter properties: roles, matrix dims, weight decay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import scantling as sc
from scantling.errors import UserError
from scantling.groups import check_matrix_dims, param_groups


def describe_groups(model: nn.Module) -> dict[str, tuple[str, Any]]:
    groups = param_groups(model, weight_decay=0.1)
    assert all(group["params"] for group in groups)
    assert all(group["weight_decay"] == (0.0 if group["role"] == "vector" else 0.1) for group in groups)
    return {name: (group["role"], group["matrix_dims"]) for group in groups for name, _ in group["params"]}


MATRIX, VECTOR, EMBEDDING = ("matrix", ((0,), (1,))), ("vector", None), ("embedding", ((0,), (1,)))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(3, 4), {"weight": MATRIX, "bias": VECTOR}),
        (nn.Linear(3, 1), {"weight": MATRIX, "bias": VECTOR}),
        (nn.Conv1d(3, 4, 5), {"weight": ("matrix", ((0,), (1, 2))), "bias": VECTOR}),
        (nn.Conv2d(3, 4, 5), {"weight": ("matrix", ((0,), (1, 2, 3))), "bias": VECTOR}),
        (nn.Conv3d(3, 4, 5), {"weight": ("matrix", ((0,), (1, 2, 3, 4))), "bias": VECTOR}),
        (nn.ConvTranspose2d(3, 4, 5), {"weight": ("matrix", ((0,), (1, 2, 3))), "bias": VECTOR}),
        (nn.Embedding(5, 3), {"weight": EMBEDDING}),
        (nn.EmbeddingBag(5, 3), {"weight": EMBEDDING}),
        (nn.LayerNorm((3, 4)), {"weight": VECTOR, "bias": VECTOR}),
        (nn.RMSNorm((3, 4)), {"weight": VECTOR}),
        (nn.BatchNorm1d(3), {"weight": VECTOR, "bias": VECTOR}),
        (nn.GroupNorm(1, 3), {"weight": VECTOR, "bias": VECTOR}),
        (
            nn.MultiheadAttention(4, 2, add_bias_kv=True),
            {
                "in_proj_weight": MATRIX,
                "in_proj_bias": VECTOR,
                "bias_k": VECTOR,
                "bias_v": VECTOR,
                "out_proj.weight": MATRIX,
                "out_proj.bias": VECTOR,
            },
        ),
        (
            nn.LSTM(3, 4),
            {"weight_ih_l0": MATRIX, "weight_hh_l0": MATRIX, "bias_ih_l0": VECTOR, "bias_hh_l0": VECTOR},
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_param_groups_of_torch_layers(module: nn.Module, expected: dict[str, Any]) -> None:
    assert describe_groups(module) == expected


class Loose(nn.Module):
    """Module of a custom type with its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.ones(4, 6, 5))
        self.deep_experts = nn.Parameter(torch.ones(2, 4, 6, 5))
        self.experts_bias = nn.Parameter(torch.ones(4, 6))
        self.class_token = nn.Parameter(torch.ones(1, 1, 8))
        self.positions = nn.Parameter(torch.ones(1, 9, 8))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Parameter(torch.ones(4, 4), requires_grad=False)


def test_param_groups_of_other_modules_use_shapes() -> None:
    assert describe_groups(Loose()) == {
        "experts": ("matrix", ((1,), (2,))),
        "deep_experts": ("matrix", ((2,), (3,))),
        "experts_bias": VECTOR,
        "class_token": VECTOR,
        "positions": ("matrix", ((1,), (2,))),
        "scale": VECTOR,
        "frozen": ("matrix", ((0,), (1,))),
    }


class Cores(nn.Module):
    """Module that declares two TT cores and a vector of rank gates."""

    def __init__(self, roles: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.cores = nn.ParameterList([torch.ones(1, 4, 3), torch.ones(3, 5, 1)])
        self.gate = nn.Parameter(torch.ones(3, 3))
        self.other = nn.Parameter(torch.ones(3, 3))
        self.roles = roles

    def parameter_roles(self) -> dict[str, Any]:
        return self.roles or {
            "cores.0": ("matrix", ((0, 1), (2,))),
            "cores.1": ("matrix", [[0, 1], [2]]),
            "gate": ("vector", None),
        }


def test_parameter_roles_override_the_rules() -> None:
    assert describe_groups(nn.Sequential(Cores())) == {
        "0.cores.0": ("matrix", ((0, 1), (2,))),
        "0.cores.1": ("matrix", ((0, 1), (2,))),
        "0.gate": VECTOR,
        "0.other": MATRIX,
    }


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Cores()

    def parameter_roles(self) -> dict[str, Any]:
        return {"inner.gate": ("matrix", ((1,), (0,)))}


def test_outer_parameter_roles_override_inner() -> None:
    found = describe_groups(Outer())
    assert found["inner.gate"] == ("matrix", ((1,), (0,)))
    assert found["inner.cores.0"] == ("matrix", ((0, 1), (2,)))


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"core": ("vector", None)}, "names 'core'; its parameters are gate, other, cores.0, cores.1"),
        ({"gate": ("scalar", None)}, "role of 'gate' must be one of matrix, embedding, vector; given 'scalar'"),
        ({"gate": ("matrix", ((0,), (2,)))}, "'gate': matrix_dims must hold dims from 0 to 1"),
        ({"gate": ("embedding", None)}, "'gate': matrix_dims must be"),
    ],
    ids=str,
)
def test_param_groups_refuses_invalid_parameter_roles(roles: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=r"parameter_roles\(\) of Cores at '0'") as error:
        param_groups(nn.Sequential(Cores(roles)))
    assert message in str(error.value)


class Tied(nn.Module):
    def __init__(self, *, head_first: bool, tie: bool) -> None:
        super().__init__()
        if head_first:
            self.head = nn.Linear(3, 5)
        self.table = nn.Embedding(5, 3)
        if not head_first:
            self.head = nn.Linear(3, 5)
        if tie:
            self.head.weight = self.table.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.parametrize("head_first", [False, True])
def test_tied_head_is_one_embedding(head_first: bool) -> None:
    found = describe_groups(Tied(head_first=head_first, tie=True))
    assert found == {("head.weight" if head_first else "table.weight"): EMBEDDING, "head.bias": VECTOR}


def test_untied_head_is_an_embedding() -> None:
    model = nn.ModuleDict({"inner": Tied(head_first=False, tie=False), "classifier": nn.Linear(3, 2)})
    assert describe_groups(model) == {
        "inner.table.weight": EMBEDDING,
        "inner.head.weight": EMBEDDING,
        "inner.head.bias": VECTOR,
        "classifier.weight": MATRIX,
        "classifier.bias": VECTOR,
    }


def test_param_groups_keep_the_order_of_the_model() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Embedding(4, 4), nn.Linear(4, 4))
    for _ in range(3):
        groups = param_groups(model)
        assert [group["role"] for group in groups] == ["vector", "matrix", "embedding"]
        assert [name for name, _ in groups[1]["params"]] == ["1.weight", "3.weight"]


def test_param_groups_cover_each_parameter_once() -> None:
    model = nn.Sequential(Loose(), Cores(), Tied(head_first=True, tie=True), nn.Conv2d(3, 4, 3))
    optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=1e-3)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    expected = dict(model.named_parameters())
    assert len(names) == len(expected)
    assert all(expected[name] is param for name, param in zip(names, params, strict=True))


def test_param_groups_of_transformers_models() -> None:
    transformers: Any = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }

    def roles(config: Any, auto: str = "AutoModelForCausalLM") -> dict[str, tuple[str, Any]]:
        return describe_groups(getattr(transformers, auto).from_config(config))

    for tied in (True, False):
        llama = roles(transformers.LlamaConfig(vocab_size=11, tie_word_embeddings=tied, **sizes))
        embeddings = {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
        assert {name for name, found in llama.items() if found == EMBEDDING} == embeddings
        assert {name for name, found in llama.items() if found == VECTOR} == {n for n in llama if "norm" in n}
        assert llama["model.layers.0.mlp.down_proj.weight"] == MATRIX

    gpt2 = roles(transformers.GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=16))
    assert gpt2["transformer.h.0.attn.c_attn.weight"] == MATRIX  # Conv1D, (in, out)
    assert {name for name, found in gpt2.items() if found == EMBEDDING} == {
        "transformer.wte.weight",
        "transformer.wpe.weight",
    }

    bert = roles(transformers.BertConfig(vocab_size=11, **sizes), "AutoModelForSequenceClassification")
    assert bert["classifier.weight"] == MATRIX
    assert bert["bert.embeddings.position_embeddings.weight"] == EMBEDDING
    assert all(found == VECTOR for name, found in bert.items() if "LayerNorm" in name or name.endswith("bias"))


def test_core_lr_applies_to_cores() -> None:
    net = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    sc.tensorize(net, 2, filter_fn=lambda name, module: name != "1")
    assert all("lr" not in group for group in param_groups(net, weight_decay=0.1))
    groups = param_groups(net, weight_decay=0.1, core_lr=1e-3)
    rates = {name: group.get("lr") for group in groups for name, _ in group["params"]}
    assert {name for name, rate in rates.items() if rate == 1e-3} == {name for name in rates if "2.cores." in name}
    assert rates["1.weight"] is rates["0.cores.0"] is None
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    assert {group["lr"] for group in optimizer.param_groups} == {1e-3, 3e-3}
    with pytest.raises(UserError, match=r"core_lr must be at least 0; given -1"):
        param_groups(net, core_lr=-1)


def test_embedding_lr_applies_to_embeddings() -> None:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 1, "vocab_size": 31}
    net = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    groups = param_groups(net, weight_decay=0.1, embedding_lr=1e-2)
    rates = {name: group.get("lr") for group in groups for name, _ in group["params"]}
    roles_of = {name: group["role"] for group in groups for name, _ in group["params"]}
    assert rates["shared.weight"] == 1e-2
    assert all((rate == 1e-2) == (roles_of[name] == "embedding") for name, rate in rates.items())
    with pytest.raises(UserError, match=r"embedding_lr must be at least 0; given -1"):
        param_groups(net, embedding_lr=-1)


def test_embedding_cores_use_the_rate_of_the_optimizer() -> None:
    net = nn.Sequential(nn.Embedding(600, 16), nn.Linear(16, 16))
    sc.tensorize(net, 2)
    for core_lr in (None, 1e-3):
        groups = param_groups(net, core_lr=core_lr, embedding_lr=1e-2)
        rates = {name: group.get("lr") for group in groups for name, _ in group["params"] if ".cores." in name}
        assert rates == {name: core_lr if name.startswith("1.") else None for name in rates}


def test_embedding_cores_take_a_separate_lr() -> None:
    net = nn.Sequential(nn.Embedding(600, 16), nn.Linear(16, 16))
    sc.tensorize(net, 2)
    groups = param_groups(net, core_lr=1e-3, embedding_core_lr=1e-2)
    rates = {name: group.get("lr") for group in groups for name, _ in group["params"] if ".cores." in name}
    assert {name: rate == 1e-2 for name, rate in rates.items()} == {name: name.startswith("0.") for name in rates}
    assert set(rates.values()) == {1e-3, 1e-2}
    with pytest.raises(UserError, match=r"embedding_core_lr must be at least 0; given -1"):
        param_groups(net, embedding_core_lr=-1)


def test_rank_gates_take_a_separate_lr() -> None:
    net = nn.Sequential(nn.Linear(16, 16))
    sc.tensorize(net, 2)
    sc.RankAdapter(net, size_target=0.9)
    groups = param_groups(net, core_lr=1e-3, control_lr=1e-1)
    rates = {name: group.get("lr") for group in groups for name, _ in group["params"]}
    assert {name for name, rate in rates.items() if rate == 1e-1} == {name for name in rates if ".rank_gates." in name}
    assert {name for name, rate in rates.items() if rate == 1e-3} == {name for name in rates if ".cores." in name}
    for groups, rate in ((param_groups(net, core_lr=1e-3), 1e-3), (param_groups(net), None)):
        own = [group.get("lr") for group in groups for name, _ in group["params"] if ".rank_gates." in name]
        assert own == [rate] * len(own), "the rate of the cores"
    with pytest.raises(UserError, match="control_lr must be at least 0; given nan"):
        param_groups(net, control_lr=float("nan"))


def test_param_groups_refuses_unusable_models() -> None:
    with pytest.raises(UserError, match=r"weight_decay must be at least 0; given -0\.1"):
        param_groups(nn.Linear(2, 2), weight_decay=-0.1)
    with pytest.raises(UserError, match="Linear has no trainable parameter"):
        param_groups(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(UserError, match=r"'0\.weight' has no shape yet"):
        param_groups(nn.Sequential(nn.LazyLinear(3)))


@pytest.mark.parametrize(
    "matrix_dims",
    [None, 3, "ab", ((0,),), ((0,), ()), ((0,), (0,)), ((0,), (3,)), ((-1,), (0,)), ((0.0,), (1,)), (0, 1)],
)
def test_check_matrix_dims_refuses_invalid_dims(matrix_dims: Any) -> None:
    with pytest.raises(UserError, match="matrix_dims"):
        check_matrix_dims(matrix_dims, 3)


def test_check_matrix_dims_converts_lists() -> None:
    assert check_matrix_dims([[0, 1], [2]], 3) == ((0, 1), (2,))
