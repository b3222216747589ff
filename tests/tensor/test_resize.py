"""Tests of transformers' `resize_token_embeddings` on models whose embeddings and heads are TT layers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tensor.families import FAMILIES, VOCAB, batch, make_model

import scantling as sc
from scantling.errors import UserError
from scantling.tensor.embedding import TTMEmbedding

LANGUAGE = [family for family in FAMILIES if family != "vit"]


def every(name: str, module: Any) -> bool:
    return True


@pytest.mark.parametrize("tokens", [VOCAB + 1, 4 * VOCAB, 70])
@pytest.mark.parametrize("family", LANGUAGE)
def test_resized_models_keep_logits_train_save_and_densify(family: str, tokens: int, tmp_path: Path) -> None:
    model = make_model(family)
    sc.tensorize(model, 64, init="svd", filter_fn=every)
    kept = min(tokens, VOCAB)
    inputs = {name: ids % kept for name, ids in batch(model=model).items()}
    with torch.no_grad():  # resizing RoBERTa's bias in place fails if a graph still holds it
        before = model(**inputs).logits[..., :kept]
    table = model.resize_token_embeddings(tokens)
    assert table is model.get_input_embeddings()
    assert isinstance(table, TTMEmbedding)
    assert model.config.vocab_size == table.num_embeddings == tokens
    after = model(**inputs).logits
    assert after.shape[-1] == tokens
    torch.testing.assert_close(after[..., :kept], before, rtol=1e-5, atol=1e-5)

    new = torch.full_like(inputs["input_ids"], tokens - 1)
    loss = model(**inputs | {"input_ids": new, "labels": new}).loss
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad is not None for parameter in table.parameters())

    model.save_pretrained(tmp_path)
    assert torch.equal(sc.load(tmp_path).eval()(**inputs).logits, model(**inputs).logits)
    dense = sc.densify(copy.deepcopy(model))
    torch.testing.assert_close(dense(**inputs).logits, after, rtol=1e-5, atol=1e-5)
    dense.resize_token_embeddings(tokens + 1)


def test_resize_with_only_head_or_only_table_as_tt() -> None:
    for pattern in ("lm_head", "*embed_tokens"):
        model = make_model("llama")
        sc.tensorize(model, {pattern: 8})
        before = model(**batch()).logits
        model.resize_token_embeddings(VOCAB + 40)
        after = model(**batch()).logits
        assert after.shape[-1] == VOCAB + 40
        torch.testing.assert_close(after[..., :VOCAB], before)


def test_resize_pads_to_multiple() -> None:
    model = sc.tensorize(make_model("llama"), 8)
    assert model.resize_token_embeddings(pad_to_multiple_of=64).num_embeddings == 128
    assert model(**batch()).logits.shape[-1] == model.config.vocab_size == 128
    assert model.resize_token_embeddings() is model.get_input_embeddings()


@pytest.mark.parametrize("mean", [True, False])
def test_resize_follows_mean_resizing(mean: bool) -> None:
    torch.manual_seed(0)
    model = sc.tensorize(make_model("llama"), 16)
    old = model.get_input_embeddings().dense_weight().detach()
    table = model.resize_token_embeddings(5 * VOCAB, mean_resizing=mean)
    rows = table.dense_weight().detach()
    torch.testing.assert_close(rows[:VOCAB], old)
    share = float(rows[2 * VOCAB :].square().mean().sqrt() / old.square().mean().sqrt())
    assert (share < 0.7) if mean else (0.5 < share < 2.0)


def test_resize_drops_padding_row_beyond_end() -> None:
    config = hf.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=96, pad_token_id=95
    )
    model = sc.tensorize(hf.LlamaForCausalLM(config), 8)
    assert model.get_input_embeddings().padding_idx == 95
    assert model.resize_token_embeddings(90).padding_idx is None
    assert sc.densify(model).get_input_embeddings().padding_idx is None


def test_resize_of_separately_tensorized_base() -> None:
    model = make_model("llama")
    sc.tensorize(model.model, 8)
    model.resize_token_embeddings(VOCAB + 8)
    assert model(**batch()).logits.shape[-1] == VOCAB + 8


def test_resize_of_logits_buffer() -> None:
    config = hf.BartConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        vocab_size=VOCAB,
    )
    model = sc.tensorize(hf.BartForConditionalGeneration(config).eval(), 8)
    before = model(**batch()).logits
    model.resize_token_embeddings(VOCAB + 30)
    torch.testing.assert_close(model(**batch()).logits[..., :VOCAB], before)


def test_resize_refuses_attached_adapter() -> None:
    model = sc.tensorize(make_model("llama"), 8)
    adapter = sc.RankAdapter(model, size_target=0.5, steps=4)
    with pytest.raises(UserError, match=r"RankAdapter is attached.*resize before"):
        model.resize_token_embeddings(VOCAB + 1)
    adapter.detach()
    model.resize_token_embeddings(VOCAB + 1)


@pytest.mark.parametrize("tokens", [0, -3])
def test_resize_refuses_invalid_sizes(tokens: int) -> None:
    with pytest.raises(UserError, match=r"new_num_tokens=.* must be a positive integer"):
        sc.tensorize(make_model("llama"), 8).resize_token_embeddings(tokens)


def test_resize_refuses_split_head() -> None:
    config = hf.MobileBertConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        embedding_size=32,
        intra_bottleneck_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
    )
    model = sc.tensorize(hf.MobileBertForMaskedLM(config), 8, filter_fn=every)
    with pytest.raises(UserError, match=r"keeps a part of its output layer transposed.*densify"):
        model.resize_token_embeddings(VOCAB + 1)
