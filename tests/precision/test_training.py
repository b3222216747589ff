"""Tests of `quantize_training`: the rounded tensors, their gradients, and that nothing else changes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensor.families import make_model
from torch import Tensor, nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
)

import scantling as sc
from scantling.errors import UserError
from scantling.precision import Quantizer, fake_quantize, matmul, restore
from scantling.precision.layers import LayerFormats, QuantizedEmbedding, QuantizedLinear
from scantling.precision.matmul import check_device
from scantling.tensor.slicing import slice_parameter
from tests import processes
from tests.precision.llamas import INPUT, llama


def gradients(model: nn.Module, inputs: Tensor = INPUT) -> dict[str, Tensor]:
    model.zero_grad()
    model(inputs, labels=inputs).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_linear_matches_the_paper() -> None:
    layer = nn.Linear(24, 16).double()
    x = torch.randn(3, 5, 24, dtype=torch.float64, requires_grad=True)
    reference_x = x.detach().clone().requires_grad_()
    weight = layer.weight.detach().clone().requires_grad_()
    by_tensor = {"format": "int8", "granularity": "tensor"}
    model = sc.quantize_training(nn.Sequential(layer), weights="int4", activations=by_tensor)
    up = torch.randn(3, 5, 16, dtype=torch.float64)
    y = model(x)
    y.backward(up)
    expected_x = fake_quantize(reference_x, "int8")
    expected = expected_x @ fake_quantize(weight, "int4", granularity="channel").t() + layer.bias
    torch.testing.assert_close(y, expected)
    expected.backward(up)
    torch.testing.assert_close(x.grad, reference_x.grad)
    torch.testing.assert_close(layer.weight.grad, weight.grad)
    torch.testing.assert_close(x.grad, up @ fake_quantize(weight.detach(), "int4", granularity="channel"))


@pytest.mark.parametrize("loss_scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("fmt", ["int3", "int8", "fp8_e4m3", "fp4_e2m1", "mxfp4_e2m1"])
def test_gradients_do_not_depend_on_the_scale_of_the_loss(fmt: str, loss_scale: float) -> None:
    model = sc.quantize_training(nn.Sequential(nn.Linear(64, 32, bias=False)), weights=fmt, activations=fmt)
    x = torch.randn(16, 64)
    up = torch.randn(16, 32)
    model(x).backward(up * loss_scale)
    ideal = up.t() @ Quantizer.from_spec(fmt, "token")(x)
    cosine = torch.cosine_similarity(model[0].weight.grad.flatten(), ideal.flatten(), dim=0)
    assert cosine >= 0.999


def test_16_bit_formats_change_nothing() -> None:
    model = llama()
    before = gradients(copy.deepcopy(model))
    loss = model(INPUT, labels=INPUT).loss
    formats = dict.fromkeys(("weights", "activations", "kv_cache", "queries", "gradients"), "int16")
    sc.quantize_training(model, **formats)
    assert model(INPUT, labels=INPUT).loss.item() == pytest.approx(loss.item(), rel=1e-5)
    for name, grad in gradients(model).items():
        assert torch.cosine_similarity(grad.flatten(), before[name].flatten(), dim=0) > 0.9999, name


def test_quantize_training_keeps_names_ties_and_hooks() -> None:
    model = llama()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    called = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: called.append(1))
    sc.quantize_training(model, weights="int4", activations="int4", kv_cache="int4")
    assert isinstance(model.model.layers[0].mlp.up_proj, QuantizedLinear)
    assert type(model.lm_head) is nn.Linear
    assert type(model.model.embed_tokens) is nn.Embedding
    model(INPUT)
    assert called == [1]
    assert list(model.state_dict()) == list(state)
    assert all(type(value) is Tensor and torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert [group["role"] for group in sc.param_groups(model)] == [group["role"] for group in sc.param_groups(llama())]


@pytest.mark.parametrize("formats", [{"weights": "int3"}, {"kv_cache": "int4"}, {"queries": "int3"}])
def test_restore_returns_the_original_model(formats: dict[str, str]) -> None:
    model = llama()
    logits = model(INPUT).logits
    quantized = sc.quantize_training(copy.deepcopy(model), **formats)
    assert not torch.allclose(quantized(INPUT).logits, logits)
    assert torch.equal(restore(quantized)(INPUT).logits, logits)
    assert all(type(a) is type(b) for a, b in zip(model.modules(), quantized.modules(), strict=True))
    assert quantized.config._attn_implementation == "sdpa"


def test_restore_with_rounded_weights_keeps_outputs() -> None:
    model = sc.quantize_training(llama(), weights="int3")
    logits = model(INPUT).logits
    torch.testing.assert_close(restore(model, weights="rounded")(INPUT).logits, logits)


def test_filter_takes_embeddings_and_keeps_ties() -> None:
    model = llama()
    sc.quantize_training(model, weights="int4", filter_fn=lambda name, _: "embed" in name or name == "lm_head")
    assert isinstance(model.model.embed_tokens, QuantizedEmbedding)
    assert isinstance(model.lm_head, QuantizedLinear)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    table = fake_quantize(model.lm_head.weight.detach(), "int4", granularity="channel")
    assert torch.equal(model.model.embed_tokens(INPUT), table[INPUT])
    hidden = torch.randn(3, 32)
    torch.testing.assert_close(model.lm_head(hidden), hidden @ table.t())
    restore(model, weights="rounded")
    assert torch.equal(model.lm_head.weight, table)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("given", ["int4", {"format": "int4", "granularity": "tensor"}, "nvfp4", "mxfp8_e4m3"])
def test_embedding_looks_up_the_rounded_table(given: Any) -> None:
    model = nn.Sequential(nn.Embedding(40, 32))
    sc.quantize_training(model, weights=given, filter_fn=lambda *_: True)
    indices = torch.randint(0, 40, (3, 4))
    assert torch.equal(model(indices), Quantizer.from_spec(given, "channel")(model[0].weight, axis=0)[indices])
    model(indices).sum().backward()
    assert model[0].weight.grad.sum() == indices.numel() * 32


@pytest.mark.parametrize("sparse", [False, True])
def test_embedding_bag_uses_the_rounded_table(sparse: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.EmbeddingBag(40, 32, mode="sum", sparse=sparse, padding_idx=7))
    sc.quantize_training(model, weights="int4", filter_fn=lambda *_: True)
    assert "QuantizedEmbeddingBag(40, 32, mode='sum', padding_idx=7, weights=int4 by channel)" in repr(model)
    rows, offsets, shares = torch.tensor([0, 2, 2, 39, 7]), torch.tensor([0, 3]), torch.rand(5)
    table = fake_quantize(model[1].weight, "int4", granularity="channel")
    settings = {"mode": "sum", "per_sample_weights": shares, "padding_idx": 7}
    expected = nn.functional.embedding_bag(rows, table.detach(), offsets, **settings)
    y = model[1](rows, offsets, shares)
    assert torch.equal(y, expected)
    y.sum().backward()
    grad = model[1].weight.grad
    assert grad.is_sparse == sparse
    dense = grad.to_dense()[:, 0]
    torch.testing.assert_close(
        dense[torch.tensor([0, 2, 39, 7])], torch.stack([shares[0], shares[1:3].sum(), shares[3], 0 * shares[4]])
    )
    assert type(restore(model)[1]) is nn.EmbeddingBag


def test_embedding_bag_renorms_before_rounding() -> None:
    bag = nn.EmbeddingBag(10, 8, mode="sum", max_norm=1.0)
    plain = copy.deepcopy(bag)
    sc.quantize_training(bag, weights="int4")
    rows = torch.tensor([[1], [4]])
    assert torch.equal(bag(rows), fake_quantize(plain(rows), "int4", granularity="token"))
    assert torch.equal(bag.weight, plain.weight)


@pytest.mark.parametrize("table", [nn.Embedding(10, 8), nn.EmbeddingBag(10, 8), sc.TTMEmbedding(10, 8, rank=2)])
def test_embedding_alone_is_quantized_but_not_inside_a_model(table: nn.Module) -> None:
    rows = torch.tensor([[1, 2]])
    whole = table(rows)
    sc.quantize_training(table, weights="int3")
    assert not torch.equal(table(rows), whole)
    restore(table)
    assert torch.equal(table(rows), whole)
    sc.quantize_training(nn.Sequential(table, nn.Linear(8, 8)), weights="int3")
    assert torch.equal(table(rows), whole)
    sc.quantize_weights(table, "int3")
    assert not torch.equal(table(rows), whole)


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_embedding_padding_row_gets_no_gradient(granularity: str) -> None:
    model = nn.Sequential(nn.Embedding(40, 32, padding_idx=3))
    given = {"format": "int4", "granularity": granularity}
    sc.quantize_training(model, weights=given, filter_fn=lambda *_: True)
    model(torch.tensor([3, 5])).sum().backward()
    assert model[0].weight.grad[3].sum() == 0
    assert model[0].weight.grad[5].sum() == 32


def test_activation_and_gradient_channels_are_features() -> None:
    model = nn.Sequential(nn.Linear(8, 6, bias=False))
    by_feature = {"format": "int3", "granularity": "channel"}
    sc.quantize_training(model, activations=by_feature, gradients=by_feature)
    x, up = torch.randn(2, 5, 8), torch.randn(2, 5, 6)
    x[0, :, 2], up[1, :, 3] = 100.0, 100.0
    y = model(x)
    rounded_x, rounded_up = (Quantizer.from_spec(by_feature)(each, axis=-1) for each in (x, up))
    torch.testing.assert_close(y, rounded_x @ model[0].weight.t())
    y.backward(up)
    torch.testing.assert_close(model[0].weight.grad, torch.einsum("bto,bti->oi", rounded_up, rounded_x))


def test_conv1d_is_rounded_per_output() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0))
    layer = model.transformer.h[0].mlp.c_fc
    x = torch.randn(5, 32)
    sc.quantize_training(model, weights="int4")
    expected = x @ fake_quantize(layer.weight.detach(), "int4", granularity="channel", axis=1) + layer.bias
    torch.testing.assert_close(layer(x), expected)
    restore(model, weights="rounded")
    torch.testing.assert_close(layer(x), expected)
    assert "int" not in repr(layer)


def test_kv_cache_rounds_only_keys_and_values() -> None:
    model = llama()
    kept = []

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> Any:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        kept.append((query, key, value))
        return sdpa_attention_forward(module, query, key, value, *args, **kw)

    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register("spy", attention)
    AttentionMaskInterface.register("spy", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("spy")
    model(INPUT)
    sc.quantize_training(model, kv_cache={"format": "int4", "granularity": "token"}, queries="int8")
    model(INPUT)
    (query, key, value), (rounded_query, rounded_key, rounded_value) = kept[0], kept[2]
    assert torch.equal(rounded_query, fake_quantize(query, "int8", granularity="token"))
    assert torch.equal(rounded_key, fake_quantize(key, "int4", granularity="token"))
    assert torch.equal(rounded_value, fake_quantize(value, "int4", granularity="token"))
    restore(model)
    assert model.config._attn_implementation == "spy"


def test_two_models_with_different_attention_formats() -> None:
    first, second = (sc.quantize_training(llama(), kv_cache=fmt) for fmt in ("int3", "int8"))
    whole = llama()(INPUT).logits
    errors = [(model(INPUT).logits - whole).abs().max() for model in (first, second)]
    assert errors[0] > 4 * errors[1] > 0


def test_kv_cache_leaves_other_models_of_the_config_alone() -> None:
    config = llama().config
    first, second = (LlamaForCausalLM(config).eval() for _ in range(2))
    whole = second(INPUT).logits
    before = first(INPUT).logits
    sc.quantize_training(first, kv_cache="int2")
    assert torch.equal(second(INPUT).logits, whole)
    assert not torch.equal(first(INPUT).logits, before)
    with pytest.raises(UserError, match="already quantized"):
        sc.quantize_training(first, kv_cache="int8")
    sc.precision.restore(first)
    sc.quantize_training(first.model, kv_cache="int2")
    with pytest.raises(UserError, match="queries of this model's LlamaModel are already quantized"):
        sc.quantize_training(first, kv_cache="int8")
    sc.precision.restore(first)
    assert torch.equal(first(INPUT).logits, before)


def test_new_model_from_a_quantized_models_config_is_unquantized() -> None:
    first = sc.quantize_training(llama(), kv_cache="int2")
    second = LlamaForCausalLM(first.config).eval()
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(INPUT).logits, llama()(INPUT).logits)
    sc.quantize_training(second, kv_cache="int4")
    assert not torch.equal(second(INPUT).logits, first(INPUT).logits)


def clip_model() -> CLIPModel:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text, vision = {**sizes, "vocab_size": 99}, {**sizes, "image_size": 8, "patch_size": 4}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def test_kv_cache_rounds_each_sub_config() -> None:
    kept: list[Tensor] = []

    def attention(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kw: Any) -> Any:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        kept.append(key)
        return sdpa_attention_forward(module, query, key, *args, **kw)

    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register("mine", attention)  # without a mask function
    model = clip_model().eval()
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "mine"})
    pixels = torch.randn(1, 3, 8, 8)
    texts = model.get_text_features(INPUT[:1, :5]).pooler_output
    images = model.get_image_features(pixels).pooler_output
    sc.quantize_training(model, kv_cache="int4")
    assert not torch.equal(model.get_text_features(INPUT[:1, :5]).pooler_output, texts)
    assert not torch.equal(model.get_image_features(pixels).pooler_output, images)
    assert torch.equal(kept[1], fake_quantize(kept[0], "int4", granularity="token"))
    restore(model)
    assert torch.equal(model.get_text_features(INPUT[:1, :5]).pooler_output, texts)
    assert torch.equal(model.get_image_features(pixels).pooler_output, images)
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    with pytest.raises(UserError, match="attention 'eager' has no function that can be wrapped"):
        sc.quantize_training(model, kv_cache="int4")


def test_kv_cache_rounds_attention_registered_later() -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import AttentionInterface

    model = sc.quantize_training(llama(), kv_cache="int4")
    rounded = model(INPUT).logits
    AttentionInterface.register("later", sdpa_attention_forward)
    model.set_attn_implementation("later")
    torch.testing.assert_close(model(INPUT).logits, rounded)
    for part in (model, model.model):
        part.set_attn_implementation("eager")
        with pytest.raises(UserError, match="values and queries would not be quantized"):
            part(INPUT)


def test_kv_cache_refuses_eager_attention_set_later() -> None:
    model = llama()
    whole = model(INPUT).logits
    sc.quantize_training(model, kv_cache="int4")
    copied = copy.deepcopy(model)
    copied.set_attn_implementation("eager")
    with pytest.raises(UserError, match="values and queries would not be quantized"):
        copied(INPUT)
    restore(copied)
    torch.testing.assert_close(copied(INPUT).logits, whole)
    copied.set_attn_implementation("sdpa")
    assert not torch.equal(model(INPUT).logits, copied(INPUT).logits)


def chooses_its_keys() -> PreTrainedModel:
    """Return a model that selects keys; it builds the selection mask for some attention names only."""
    return DeepseekV32ForCausalLM(
        DeepseekV32Config(
            vocab_size=99,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            first_k_dense_replace=2,
            index_topk=4,
            index_head_dim=16,
            index_n_heads=2,
            initializer_range=0.3,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=16,
            num_experts_per_tok=1,
        )
    )


def slices_its_queries() -> PreTrainedModel:
    """Return a model that, for some attention names only, keeps the queries of all tokens."""
    return Gemma4ForCausalLM(
        Gemma4TextConfig(
            vocab_size=99,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            global_head_dim=16,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=99,
            sliding_window=64,
            layer_types=["sliding_attention", "full_attention"] * 2,
            max_position_embeddings=64,
        )
    )


@pytest.mark.parametrize("build", [chooses_its_keys, slices_its_queries])
def test_models_that_check_the_attention_name_still_work(
    build: Callable[[], PreTrainedModel],
) -> None:
    torch.manual_seed(0)
    model = build().eval()
    with torch.no_grad():
        whole = model(INPUT, logits_to_keep=3).logits
        sc.quantize_training(model, kv_cache="int16")
        torch.testing.assert_close(model(INPUT, logits_to_keep=3).logits, whole, rtol=0.0, atol=2e-3)


def test_padded_transformer_encoder_skips_the_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2).eval()
    sc.quantize_training(model, weights="int4", activations="int8")
    padded = torch.zeros(2, 8, dtype=torch.bool)
    padded[1, 5:] = True
    x = torch.randn(2, 8, 32)
    expected = model(x, src_key_padding_mask=padded)
    with torch.no_grad():
        torch.testing.assert_close(model(x, src_key_padding_mask=padded), expected)
    assert restore(model).use_nested_tensor


def test_embeddings_ignore_activation_formats() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8))
    sc.quantize_training(model, activations="int4", filter_fn=lambda *_: True)
    assert [type(layer) for layer in model] == [nn.Embedding, QuantizedLinear]


def test_embedding_scale_grad_by_freq() -> None:
    indices = torch.tensor([3, 3, 5])
    grads = []
    for given in (None, "int8"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 8, scale_grad_by_freq=True))
        if given is not None:
            settings = {"format": given, "granularity": "tensor"}
            sc.quantize_training(model, weights=settings, filter_fn=lambda *_: True)
        model(indices).sum().backward()
        grads.append(model[0].weight.grad)
    assert torch.equal(*grads)


def test_hardware_products_refuse_double_backward() -> None:
    model = sc.quantize_training(nn.Sequential(nn.Linear(8, 6)), weights="int8", activations="int8", compute="int8")
    x = torch.randn(3, 8, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_kv_cache_formats_that_differ_only_in_scales() -> None:
    groups: dict[str, Any] = {"format": "fp4_e2m1", "group_size": 32}
    alone = [Quantizer.from_spec(given)(torch.linspace(0, 1, 32)) for given in ("mxfp4_e2m1", groups)]
    assert not torch.equal(*alone)
    first, second = (sc.quantize_training(llama(), kv_cache=fmt)(INPUT).logits for fmt in ("mxfp4_e2m1", groups))
    assert not torch.equal(first, second)


def test_generation_with_a_low_precision_cache() -> None:
    model = sc.quantize_training(llama(), weights="int8", kv_cache={"format": "int8", "granularity": "token"}).eval()
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    cached, whole = (model.generate(INPUT[:1, :5], use_cache=use, **settings) for use in (True, False))
    assert torch.equal(cached, whole)


def test_tt_layer_rounds_cores_and_input() -> None:
    torch.manual_seed(0)
    layer = sc.TTLinear(24, 16, rank=4, in_modes=(4, 6), out_modes=(4, 4))
    model = nn.Sequential(layer)
    x = torch.randn(7, 24, requires_grad=True)
    rounded = copy.deepcopy(layer)
    with torch.no_grad():
        for core in rounded.cores:
            core.copy_(fake_quantize(core, "int4", granularity="channel", axis=2))
    expected = rounded(fake_quantize(x, "int8", granularity="token"))
    sc.quantize_training(model, weights="int4", activations="int8", gradients="int8")
    y = model(x)
    torch.testing.assert_close(y, expected)
    up = torch.randn_like(y)
    (of_y,) = torch.autograd.grad(expected, rounded.cores[0], fake_quantize(up, "int8", granularity="token"))
    y.backward(up)
    torch.testing.assert_close(layer.cores[0].grad, of_y)
    restore(model)
    assert layer.formats is None
    sc.quantize_training(model, weights="int4")
    torch.testing.assert_close(restore(model, weights="rounded")(x), rounded(x))


@pytest.mark.parametrize("more", [{}, {"activations": "int8", "compute": "int8"}])
def test_tt_embedding_rounds_its_cores(more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(sc.TTMEmbedding(60, 24, rank=4))
    indices = torch.randint(0, 60, (3, 5))
    whole = model(indices)
    sc.quantize_training(model, weights="int4", filter_fn=lambda *_: True, **more)
    rounded = model(indices)
    assert not torch.allclose(rounded, whole)
    torch.testing.assert_close(restore(model, weights="rounded")(indices), rounded)


def test_tt_head_rounds_its_input() -> None:
    torch.manual_seed(0)
    table = sc.TTMEmbedding(60, 24, rank=4)
    x = torch.randn(3, 24)
    expected = table.logits(fake_quantize(x, "int4", granularity="token"))
    sc.quantize_training(nn.Sequential(table), activations="int4", filter_fn=lambda *_: True)
    torch.testing.assert_close(table.logits(x), expected)


def test_unquantized_sibling_of_a_quantized_tt_layer_is_exact() -> None:
    model = llama()
    sc.tensorize(model, rank=4, filter_fn=lambda name, _: "self_attn" in name)
    attention = model.model.layers[0].self_attn
    sc.quantize_training(model, activations="int3", filter_fn=lambda name, _: name.endswith("q_proj"))
    found = {}
    for name in ("q_proj", "k_proj", "v_proj"):
        layer = getattr(attention, name)
        layer.register_forward_hook(lambda layer, args, y, name=name: found.update({name: (args[0], y)}))
    model(INPUT)
    for name, (x, y) in found.items():
        torch.testing.assert_close(y, getattr(attention, name)(x), msg=name)


def test_tt_layer_multiplies_merged_blocks_in_int8() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(sc.TTLinear(48, 32, rank=4, in_modes=(6, 8), out_modes=(8, 4)))
    sc.quantize_training(model, weights="int4", activations="int6", compute="int8")
    x = torch.randn(200, 48)
    steps = model[0].plan(200).steps
    assert len(steps) == 2  # x A B, with rounded cores
    a, b = (block.reshape(step.inner, step.width) for block, step in zip(model[0].blocks(steps), steps, strict=True))
    by_token, by_column = Quantizer.from_spec("int8", "token"), Quantizer.from_spec("int8", "channel")
    inner = by_token(fake_quantize(x, "int6", granularity="token")) @ by_column(a.t()).t()
    expected = by_token(inner) @ by_column(b.t()).t() + model[0].bias
    y = model(x)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    assert all(core.grad is not None and core.grad.abs().sum() > 0 for core in model[0].cores)


@pytest.mark.parametrize("gradients_too", [False, True])
@pytest.mark.parametrize(
    ("compute", "weights", "activations", "apart", "cosine"),
    [
        ("int8", "int8", "int8", 0.02, 0.999),
        ("int8", "int4", "int8", 0.02, 0.999),
        ("int8", "int3", "int5", 0.02, 0.999),
        ("fp8", "fp8_e4m3", "fp8_e4m3", 0.06, 0.997),
    ],
)
def test_tt_hardware_products_are_close_to_simulation(
    compute: Any, weights: str, activations: str, apart: float, cosine: float, gradients_too: bool
) -> None:
    """For every format, products add at most the rounding error of their widest operands."""
    gradients = ("int8" if compute == "int8" else "fp8_e5m2") if gradients_too else None
    torch.manual_seed(0)
    simulated = nn.Sequential(sc.TTLinear(64, 48, rank=6))
    real = copy.deepcopy(simulated)
    of_gradients = None if gradients is None else {"format": gradients, "granularity": "token"}
    sc.quantize_training(simulated, weights=weights, activations=activations, gradients=of_gradients)
    sc.quantize_training(real, weights=weights, activations=activations, gradients=gradients, compute=compute)
    x, up = torch.randn(200, 64), torch.randn(200, 48)
    found = []
    for model in (simulated, real):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        found.append([y, *torch.autograd.grad(y, [leaf, *model[0].cores], up)])
    (y, *grads), (close, *close_grads) = found
    assert (close - y).norm() < apart * y.norm()
    for one, other in zip(grads, close_grads, strict=True):
        assert torch.cosine_similarity(one.flatten(), other.flatten(), dim=0) > cosine
    plain, expected = (restore(model, weights="rounded") for model in (real, simulated))
    torch.testing.assert_close(plain(x), expected(x))


@pytest.mark.parametrize(
    "weights", ["int4", "bf16", {"format": "int4", "granularity": "tensor"}, {"format": "int4", "clip": "mse"}]
)
def test_removing_pruned_ranks_keeps_rounded_outputs(weights: Any) -> None:
    torch.manual_seed(0)
    layer = sc.TTLinear(24, 16, rank=4)
    sc.quantize_training(nn.Sequential(layer), weights=weights)
    layer.attach_gates(0.0)
    with torch.no_grad():
        for control, left, right in zip(layer.rank_gates, layer.cores[:-1], layer.cores[1:], strict=True):
            control.copy_(torch.tensor([0.7, 0.0, 1.3, -0.2][: len(control)]))
            left[..., control <= 0.0] *= 50.0
            right[control <= 0.0] *= 50.0
    x = torch.randn(5, 24)
    expected = layer(x)
    plain = restore(nn.Sequential(copy.deepcopy(layer)), weights="rounded")
    torch.testing.assert_close(plain(x), expected)
    for param, dim, index in layer.rank_slices([live.nonzero().flatten() for live in layer.active_ranks()]):
        slice_parameter(param, dim, index, None)
    assert max(layer.ranks) == 2
    torch.testing.assert_close(layer(x), expected)
    layer.fold_gates()
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("compute", ["int8", "fp8"])
@pytest.mark.parametrize("gradients_too", [False, True])
def test_tt_hardware_gradients_are_close_to_unquantized(compute: Any, gradients_too: bool) -> None:
    fmt = {"int8": "int8", "fp8": "fp8_e4m3"}[compute]
    of_gradients = {"int8": "int8", "fp8": "fp8_e5m2"}[compute] if gradients_too else None
    activations = {"format": fmt, "granularity": "token"}
    torch.manual_seed(0)
    model = nn.Sequential(sc.TTLinear(24, 16, rank=4, in_modes=(4, 6), out_modes=(4, 4)))
    x, up = torch.randn(50, 24), torch.randn(50, 16)

    def compute_gradients(layer: nn.Module) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        return list(torch.autograd.grad(layer(leaf), [leaf, *layer[0].cores], up))

    whole = compute_gradients(model)
    sc.quantize_training(model, weights=fmt, activations=activations, gradients=of_gradients, compute=compute)
    for found, expected in zip(compute_gradients(model), whole, strict=True):
        assert 0.99 < torch.cosine_similarity(found.flatten(), expected.flatten(), dim=0) < 1.0 - 1e-7


@pytest.mark.parametrize(("compute", "operator"), [("int8", "int8_matmul"), ("fp8", "float8_matmul")])
@pytest.mark.parametrize(("gradients_too", "products"), [(False, 1), (True, 3)])
def test_hardware_products_are_called(
    compute: Any, operator: str, gradients_too: bool, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real = getattr(matmul, operator)
    monkeypatch.setattr(matmul, operator, lambda *args, **kw: calls.append(args[0].dtype) or real(*args, **kw))
    fmt = {"int8": "int8", "fp8": "fp8_e4m3"}[compute]
    model = nn.Sequential(nn.Linear(32, 16))
    settings = {"weights": fmt, "activations": fmt, "gradients": fmt if gradients_too else None}
    sc.quantize_training(model, **settings, compute=compute)
    model(torch.randn(8, 32, requires_grad=True)).sum().backward()
    assert calls == [{"int8": torch.int8, "fp8": torch.float8_e4m3fn}[compute]] * products


def test_gates_fold_into_unrounded_cores() -> None:
    layer = sc.TTLinear(24, 16, rank=4)
    sc.quantize_training(nn.Sequential(layer), weights="int3")
    layer.attach_gates(0.0)
    before = [core.detach().clone() for core in layer.cores]
    layer.fold_gates()
    assert all(torch.equal(core, old) for core, old in zip(layer.cores, before, strict=True))


def test_tt_model_trains_in_low_precision_with_came() -> None:
    model = sc.tensorize(llama(), rank=6, filter_fn=lambda name, _: "mlp" in name)
    sc.quantize_training(model, weights="int8", activations="int8", kv_cache="int8")
    optimizer = sc.CAME(sc.param_groups(model), lr=3e-3, debias=True, betas=(0.9, 0.95, 0.995))
    losses = []
    for _ in range(8):
        loss = model(INPUT, labels=INPUT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("compute", ["int8", "fp8"])
@pytest.mark.parametrize("gradients_too", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    ("device", "rows"),
    [("cpu", (2, 9)), *(pytest.param("cuda", rows, marks=pytest.mark.gpu) for rows in ((1,), (2, 9), (40,)))],
)
def test_hardware_products_match_simulation(
    compute: Any, gradients_too: bool, per_token: bool, device: str, rows: tuple[int, ...]
) -> None:
    """On a GPU, rows and sides that need padding are covered too."""
    fmt = {"int8": "int8", "fp8": "fp8_e4m3"}[compute]
    of_gradients = {"int8": "int8", "fp8": "fp8_e5m2"}[compute] if gradients_too else None
    activations = {"format": fmt, "granularity": "token" if per_token else "tensor"}
    settings = {"weights": fmt, "activations": activations, "gradients": of_gradients}
    torch.manual_seed(0)
    simulated = sc.quantize_training(nn.Sequential(nn.Linear(37, 21)), **settings)
    real = copy.deepcopy(restore(copy.deepcopy(simulated)))
    sc.quantize_training(real, **settings, compute=compute)
    x = torch.randn(*rows, 37)
    results = []
    for model in (simulated.to(device), real.to(device)):
        leaf = x.to(device, copy=True).requires_grad_()
        y = model(leaf)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(device))
        results.append((y.detach(), leaf.grad, model[0].weight.grad, model[0].bias.grad))
    y, of_x, of_weight, of_bias = zip(*results, strict=True)
    tolerance: dict[str, float] = {}
    if compute == "fp8" and device == "cuda":
        tolerance = {"rtol": 1e-3, "atol": 1e-3}  # Hopper's instructions keep about 14 bits of a sum
    torch.testing.assert_close(*y, **tolerance)
    for one, other in (of_x, of_weight):
        if gradients_too:  # rounded with different scales
            cosine = torch.cosine_similarity(one.flatten(), other.flatten(), dim=0)
            assert cosine > (0.999 if compute == "int8" else 0.99)
        else:
            torch.testing.assert_close(one, other, **tolerance)
    torch.testing.assert_close(*of_bias)


@pytest.mark.parametrize(
    ("given", "granularity"), [("int8", "token"), ({"format": "int8", "granularity": "tensor"}, "tensor")]
)
def test_hardware_gradients_are_rounded_after_scaling(given: Any, granularity: Any) -> None:
    torch.manual_seed(0)
    model = sc.quantize_training(
        nn.Sequential(nn.Linear(24, 12, bias=False)),
        weights="int8",
        activations={"format": "int8", "granularity": "token"},
        gradients=given,
        compute="int8",
    )
    weight = model[0].weight.detach()
    x, up = torch.randn(6, 24, requires_grad=True), torch.randn(6, 12)
    model(x).backward(up)
    of_grads, by_row, by_output = (Quantizer.from_spec("int8", each) for each in (granularity, "token", "channel"))
    of_x, of_weight = by_row.encode(x.detach()), by_output.encode(weight)
    torch.testing.assert_close(x.grad, of_grads(up * of_weight.scale.t()) @ of_weight.codes)
    torch.testing.assert_close(model[0].weight.grad, of_grads((up * of_x.scale).t()) @ of_x.codes)


def test_quantize_training_refuses_uncallable_filters() -> None:
    with pytest.raises(UserError, match="filter_fn must be a function"):
        sc.quantize_training(nn.Sequential(nn.Linear(8, 8)), weights="int4", filter_fn="mlp")  # type: ignore[arg-type]


def test_quantize_training_compiles_without_graph_break() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
    sc.quantize_training(model, weights="int4", activations="int8", gradients="int8")
    x = torch.randn(5, 32)
    expected = model(x)
    expected.sum().backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    y = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_quantized_layers_copy_and_pickle() -> None:
    model = sc.quantize_training(nn.Sequential(nn.Linear(16, 8)), weights="int4", activations="int8")
    x = torch.randn(3, 16)
    pickled = pickle.loads(pickle.dumps(model))  # noqa: S301
    for other in (copy.deepcopy(model), pickled):
        assert torch.equal(other(x), model(x))


def compute_logits(path: Path) -> None:
    model, ids = torch.load(path, weights_only=False)
    torch.save(model(ids).logits, path)


def test_kv_cache_formats_survive_pickling_to_another_process(tmp_path: Path) -> None:
    model = sc.quantize_training(llama(), kv_cache={"format": "int4", "granularity": "token"})
    wanted = copy.deepcopy(model)(INPUT).logits
    torch.save([model, INPUT], tmp_path / "model.pt")
    process = processes.server().Process(target=compute_logits, args=(tmp_path / "model.pt",))
    process.start()
    process.join()
    assert process.exitcode == 0
    torch.testing.assert_close(torch.load(tmp_path / "model.pt"), wanted)


@torch.no_grad()
def test_transformer_encoder_layer_rounds_in_eval() -> None:
    """In eval mode, torch has a fast path for them, which would read the unquantized weights."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    x = torch.randn(2, 5, 32)
    whole = model.eval()(x)
    sc.quantize_training(model, weights="int2", activations="int2")
    rounded = model.train()(x)
    assert (rounded - whole).abs().max() > 0.1
    torch.testing.assert_close(model.eval()(x), rounded)
    assert model.layers[0].activation_relu_or_gelu == 0
    torch.testing.assert_close(restore(model)(x), whole)
    assert model.layers[0].activation_relu_or_gelu == layer.activation_relu_or_gelu == 1


def test_quantize_training_warns_about_unquantized_experts(caplog: pytest.LogCaptureFixture) -> None:
    sc.quantize_training(make_model("mixtral"), weights="int4")
    assert "of the matrix parameters stay unquantized" in caplog.text
    assert "experts.gate_up_proj" in caplog.text
    caplog.clear()
    sc.quantize_training(llama(), weights="int4")
    assert not caplog.text


@pytest.mark.parametrize("part", ["weights", "activations", "kv_cache"])
def test_activation_checkpointing_repeats_stochastic_rounding(part: str) -> None:
    found = []
    for is_checkpointed in (False, True):
        model = llama().train()
        model.config.use_cache = False
        sc.quantize_training(model, **{part: {"format": "int4", "rounding": "stochastic"}})  # type: ignore[arg-type]
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(1)
        found.append(gradients(model))
    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name])


def test_gradient_rounding_allows_in_place_addition() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(inplace=True), nn.Linear(8, 8))
    sc.quantize_training(model, gradients="int8")
    model(torch.randn(2, 8)).sum().backward()
    assert model[0].weight.grad is not None


def test_quantize_training_under_bf16_autocast() -> None:
    model = sc.quantize_training(nn.Sequential(nn.Linear(32, 16)), weights="int8", activations="int8")
    real = sc.quantize_training(restore(copy.deepcopy(model)), weights="int8", activations="int8", compute="int8")
    x = torch.randn(4, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = [each(x) for each in (model, real)]
    assert all(y.dtype == torch.bfloat16 for y in results)
    torch.testing.assert_close(*results, rtol=0.02, atol=0.02)


def test_repr_shows_formats() -> None:
    model = sc.quantize_training(nn.Sequential(nn.Linear(4, 4)), weights="int4", activations="int8", compute="int8")
    assert "weights=int4 by channel, activations=int8 by token, compute=int8" in repr(model)
    cores = sc.quantize_training(nn.Sequential(sc.TTLinear(16, 16, rank=2)), weights="int4")
    assert "weights=int4 by channel" in repr(cores)
    assert "weights=" not in repr(restore(cores))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "give a format"),
        ({"weights": "int1"}, "2 to 16"),
        ({"kv_cache": "int8"}, "transformers"),
        ({"weights": "int8", "compute": "int8"}, "give one for activations"),
        ({"weights": "int8", "activations": "int12", "compute": "int8"}, "int2 to int8"),
        ({"weights": "int8", "activations": "int8", "compute": "fp8"}, "fp8_e4m3"),
        (
            {"weights": {"format": "int8", "group_size": 4}, "activations": "int8", "compute": "int8"},
            "granularity tensor or channel",
        ),
        ({"weights": "int8", "activations": "int8", "compute": "int4"}, "compute must be one of"),
        (
            {"weights": "int8", "activations": "fp8_e5m2", "gradients": "fp8_e5m2", "compute": "fp8"},
            "compute='fp8' takes weights",
        ),
        (
            {"weights": "fp8_e4m3", "activations": "fp8_e5m2", "gradients": "fp8_e5m2", "compute": "fp8"},
            "two formats with 5 exponent bits",
        ),
        (
            {"weights": "int8", "activations": "int8", "gradients": {"format": "int8", "group_size": 4}}
            | {"compute": "int8"},
            "takes gradients with granularity tensor or token",
        ),
        ({"weights": "int8", "filter_fn": lambda *_: False}, "filter_fn takes none of the 1 layers"),
    ],
)
def test_quantize_training_refuses_invalid_settings(settings: dict[str, Any], says: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(UserError, match=says):
        sc.quantize_training(model, **settings)
    assert type(model[0]) is nn.Linear


def test_check_device_refuses_gpus_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    check_device("int8", torch.device("cuda"))
    check_device("fp8", torch.device("cpu"))
    with pytest.raises(UserError, match="NVIDIA A100 has no fp8 matrix products; leave out compute='fp8'"):
        check_device("fp8", torch.device("cuda"))


def test_quantize_training_refuses_a_second_call() -> None:
    model = sc.quantize_training(llama(), kv_cache="int8")
    with pytest.raises(UserError, match="already quantized"):
        sc.quantize_training(model, weights="int8")
    with pytest.raises(UserError, match="no linear layers"):
        sc.quantize_training(nn.Sequential(nn.ReLU()), weights="int8")


def test_output_layer_of_an_inner_model_is_not_quantized() -> None:
    model = nn.ModuleDict({"inner": llama()})
    sc.quantize_training(model, weights="int8")
    assert type(model["inner"].lm_head) is nn.Linear


def test_kv_cache_refuses_eager_attention() -> None:
    with pytest.raises(UserError, match="set_attn_implementation"):
        sc.quantize_training(_eager(), kv_cache="int8")


def _eager() -> LlamaForCausalLM:
    model = llama()
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_hardware_products_of_empty_tensors(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(8, 6))
    sc.quantize_training(model, weights="int8", activations="int8", compute="int8")
    assert model(torch.zeros(shape)).shape == (*shape[:-1], 6)


def test_restore_refuses_unknown_weights() -> None:
    model = sc.quantize_training(nn.Sequential(nn.Linear(8, 8)), weights="int4")
    with pytest.raises(UserError, match="weights must be master or rounded; given 'round'"):
        restore(model, weights="round")  # type: ignore[arg-type]


def test_empty_formats_do_nothing() -> None:
    x, weight = torch.randn(2, 3), torch.randn(4, 3)
    assert torch.equal(LayerFormats().product(x, weight, None), x @ weight.t())
