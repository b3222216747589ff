"""Tests that training, export and post-training quantization round the same weights, however a model reads them."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from tensor.families import FAMILIES, batch, make_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import scantling as sc
from scantling.precision import fake_quantize, quantized_weights, restore

TEXT = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
RECURRENT = {**TEXT, **HEADS, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8, "head_dim": 8}
JAMBA = {**TEXT, **HEADS, "num_experts": 2, "mamba_dt_rank": 4, "attn_layer_offset": 1}
DEBERTA = {**TEXT, "num_attention_heads": 4, "intermediate_size": 48, "relative_attention": True}
MOBILE = {"num_attention_heads": 4, "intermediate_size": 32, "embedding_size": 16, "intra_bottleneck_size": 16}
OTHERS: dict[str, Callable[[], Any]] = {
    "mamba": lambda: hf.MambaForCausalLM(hf.MambaConfig(**TEXT, state_size=4)),
    "falcon-mamba": lambda: hf.FalconMambaForCausalLM(hf.FalconMambaConfig(**TEXT, state_size=4)),
    "mamba2": lambda: hf.Mamba2ForCausalLM(hf.Mamba2Config(**TEXT, num_heads=8, head_dim=8, n_groups=2, state_size=4)),
    "jamba": lambda: hf.JambaForCausalLM(hf.JambaConfig(**JAMBA, attn_layer_period=2)),
    "recurrent-gemma": lambda: hf.RecurrentGemmaForCausalLM(hf.RecurrentGemmaConfig(**RECURRENT)),
    "rwkv": lambda: hf.RwkvForCausalLM(hf.RwkvConfig(**TEXT, attention_hidden_size=32, intermediate_size=48)),
    "falcon": lambda: hf.FalconForCausalLM(hf.FalconConfig(**TEXT, num_attention_heads=4)),
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4)),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(**TEXT, num_attention_heads=4, ffn_dim=48, word_embed_proj_dim=16, max_position_embeddings=32)
    ),
    "deberta": lambda: hf.DebertaForMaskedLM(hf.DebertaConfig(**DEBERTA)),
    "mobilebert": lambda: hf.MobileBertForMaskedLM(hf.MobileBertConfig(**TEXT, **MOBILE)),
    "albert": lambda: hf.AlbertForMaskedLM(
        hf.AlbertConfig(**TEXT, embedding_size=16, num_attention_heads=4, intermediate_size=48)
    ),
}


def build_model(name: str) -> Any:
    torch.manual_seed(0)
    if name in FAMILIES:
        return make_model(name)
    model = OTHERS[name]().eval()
    with torch.no_grad():  # some models draw weights too small for any change to be visible
        for module in model.modules():
            if isinstance(module, nn.Linear | Conv1D):
                module.weight.normal_(0.0, 0.2)
    return model


def inputs(model: Any) -> dict[str, Tensor]:
    given = batch(model=model)
    if not model.config.is_encoder_decoder:
        del given["labels"]
    return given


@torch.no_grad()
@pytest.mark.parametrize("everything", [False, True], ids=["default", "embeddings too"])
@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_training_and_export_round_the_same_weights(name: str, everything: bool) -> None:
    model = build_model(name)
    given = inputs(model)
    filter_fn = (lambda *_: True) if everything else None
    whole = model(**given).logits
    after = sc.quantize_weights(copy.deepcopy(model), "int3", filter_fn=filter_fn)
    sc.quantize_training(model, weights="int3", filter_fn=filter_fn)
    logits = model(**given).logits
    assert not torch.allclose(logits, whole, atol=1e-3)
    restore(model, weights="rounded")
    torch.testing.assert_close(model(**given).logits, logits)
    for (one, weight), other in zip(model.named_parameters(), after.parameters(), strict=True):
        assert torch.equal(weight, other), one


@pytest.mark.parametrize("name", ["mamba", "falcon-mamba", "jamba", "mobilebert"])
def test_gptq_of_weights_that_models_read_directly(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = build_model(name)
    before = {key: value.clone() for key, value in model.named_parameters()}
    sc.quantize_weights(model, "int4", method="gptq", calibration=[batch(8, model=model)["input_ids"]] * 2)
    methods = {key: weight.method for key, weight in quantized_weights(model).items()}
    unseen = [key for key, method in methods.items() if method == "rtn"]
    assert unseen
    assert set(methods.values()) == {"gptq", "rtn"}
    assert f"{len(unseen)} of {len(methods)} weights are rounded to nearest" in caplog.text
    parameters = dict(model.named_parameters())
    for key in unseen:
        assert torch.equal(parameters[key], fake_quantize(before[key], "int4", granularity="channel")), key


class Reads(nn.Module):
    """Products that read the weights of layers directly, in several ways, without calling the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.direct, self.fused, self.called = (nn.Linear(8, 8) for _ in range(3))
        self.layers = nn.ModuleList([nn.Linear(8, 8), Scaled(8, 8)])
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv1d = Conv1D(8, 8)
        self.bilinear, self.recurrent = nn.Bilinear(8, 8, 8), nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.direct.weight, self.direct.bias) + x
        x = x @ torch.cat([self.fused.weight.t(), self.called.weight.t()], 1)[:, 4:12]
        x = self.called(x) + self.layers[1](x) + x
        for layer in self.layers:
            x = x + torch.einsum("bti,oi->bto", x, getattr(layer, "weight"))  # noqa: B009
        x = x + torch.addmm(self.conv1d.bias, x.flatten(0, 1), self.conv1d.weight).view_as(x)
        x = x + self.attention(x, x, x)[0]
        return x + self.bilinear(x, x) + self.recurrent(x)[0]


class Scaled(nn.Linear):
    """A linear layer that computes more than a linear layer."""

    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input) + self.weight.mean()


@pytest.fixture
def reads() -> Reads:
    torch.manual_seed(0)
    return Reads().eval()


X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_weight_is_rounded_wherever_it_is_read(reads: Reads, training: bool, compiled: bool) -> None:
    reads.train(training)
    whole = reads(X)
    master = {name: value.clone() for name, value in reads.named_parameters()}
    sc.quantize_training(reads, weights="int3")
    run = torch.compile(reads, backend="aot_eager") if compiled else reads
    with torch.set_grad_enabled(training):
        y = run(X)
    assert not torch.allclose(y, whole, atol=1e-2)
    if training:
        y.square().sum().backward()
        assert all(parameter.grad is not None for parameter in reads.parameters() if parameter.ndim > 1)
    assert all(torch.equal(value, master[name]) for name, value in reads.named_parameters())
    restore(reads, weights="rounded")
    torch.testing.assert_close(reads(X), y)
    changed = {name for name, value in reads.named_parameters() if not torch.equal(value, master[name])}
    names = ["direct", "fused", "called", "layers.0", "layers.1", "attention.out_proj", "conv1d"]
    assert changed == {f"{name}.weight" for name in names}


def test_weight_is_the_parameter_outside_forward(reads: Reads) -> None:
    sc.quantize_training(reads, weights="int3")
    for layer in (reads.direct, reads.layers[1], reads.attention.out_proj, reads.conv1d):
        assert layer.weight is layer.get_parameter("weight")
    reads(X).sum().backward()
    assert reads.direct.weight is dict(reads.named_parameters())["direct.weight"]
    assert reads.direct.weight.grad is not None
    with pytest.raises(RuntimeError):
        reads(X[..., :3])
    assert isinstance(reads.direct.weight, nn.Parameter)
    found = []
    thread = threading.Thread(target=lambda: found.append(reads.direct.weight))
    reads.register_forward_pre_hook(lambda *_: thread.start())
    reads(X)
    thread.join()
    assert isinstance(found[0], nn.Parameter)


def test_weight_after_an_interrupted_forward(reads: Reads) -> None:
    sc.quantize_training(reads, weights="int3")

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = reads.called.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        reads(X)
    handle.remove()
    reads(X)
    assert isinstance(reads.direct.weight, nn.Parameter)
    assert isinstance(restore(reads).direct.weight, nn.Parameter)


def test_subclasses_are_rounded_and_copied(reads: Reads) -> None:
    plain = [type(module) for module in reads.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in reads.modules()]
    sc.quantize_training(reads, weights="int3", activations="int4", gradients="int8")
    assert type(reads.layers[1]).__name__ == "QuantizedScaled"
    assert "weights=int3 by channel" in repr(reads.layers[1])
    y = reads(X)
    for copied in (copy.deepcopy(reads), pickle.loads(pickle.dumps(reads))):  # noqa: S301
        assert torch.equal(copied(X), y)
        assert [type(module) for module in restore(copied).modules()] == plain
    restore(reads)
    assert [type(module) for module in reads.modules()] == plain
    assert [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in reads.modules()] == hooks


def test_inputs_of_subclasses_are_rounded() -> None:
    torch.manual_seed(0)
    layer, x = Scaled(8, 8), torch.randn(3, 8)
    expected = copy.deepcopy(layer)
    with torch.no_grad():
        expected.weight.copy_(fake_quantize(layer.weight, "int3", granularity="channel"))
    sc.quantize_training(layer, weights="int3", activations="int4")
    torch.testing.assert_close(layer(x), expected(fake_quantize(x, "int4", granularity="token")))


def test_subclasses_warn_about_simulated_products(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Scaled(8, 8), nn.MultiheadAttention(8, 2).out_proj)
    sc.quantize_training(model, weights="int8", activations="int8", compute="int8")
    assert "products of ['Scaled'] are simulated" in caplog.text
    assert model(torch.randn(3, 8)).shape == (3, 8)


class Tied(nn.Module):
    """A head tied to an embedding without any declaration of the tie."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.table(ids)))


IDS = torch.arange(6)[None]


def test_layer_tied_to_an_embedding_is_not_quantized() -> None:
    model = Tied()
    table = model.table.weight.clone()
    sc.quantize_training(model, weights="int3")
    assert type(model.head) is nn.Linear
    logits = model(IDS)
    torch.testing.assert_close(restore(model, weights="rounded")(IDS), logits)
    assert torch.equal(model.head.weight, table)
    sc.quantize_weights(model, "int3")
    assert list(quantized_weights(model)) == ["inner.weight"]


@pytest.mark.parametrize("taken", ["head", "table"])
def test_shared_weight_is_rounded_in_all_its_layers(taken: str) -> None:
    model = Tied()
    after = sc.quantize_weights(copy.deepcopy(model), "int3", filter_fn=lambda name, _: name == taken)
    sc.quantize_training(model, weights="int3", filter_fn=lambda name, _: name == taken)
    logits = model(IDS)
    torch.testing.assert_close(restore(model, weights="rounded")(IDS), logits)
    torch.testing.assert_close(after(IDS), logits)
