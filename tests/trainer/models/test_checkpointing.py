"""Tests of activation checkpointing of feed-forward layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensor.families import FAMILIES, batch, make_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import scantling as sc
from scantling.errors import UserError
from scantling.trainer.models.checkpointing import checkpoint_activations


def stored_bytes(model: Any, inputs: dict[str, Tensor]) -> tuple[int, Tensor]:
    """Return the bytes that a forward pass stores for the backward pass, without parameters, and the loss."""
    parameters = {param.untyped_storage().data_ptr() for param in model.parameters()}
    stored: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            stored[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**inputs).loss
    return sum(tensor.untyped_storage().nbytes() for tensor in stored.values()), loss


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [param.grad for param in model.parameters()]


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_stay_and_less_is_stored(family: str, tensor: bool) -> None:
    plain = make_model(family).train()
    if tensor:
        sc.tensorize(plain, rank=4, filter_fn=lambda *_: True)
    for module in plain.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    recomputed = copy.deepcopy(plain)
    checkpoint_activations(recomputed, "feed_forward")
    inputs = batch(model=plain)
    found = []
    for model in (plain, copy.deepcopy(recomputed)):
        torch.manual_seed(0)
        size, loss = stored_bytes(model, inputs)
        loss.backward()
        found.append((size, loss, gradients(model)))
    assert found[1][0] < found[0][0]
    torch.testing.assert_close(found[1][1:], found[0][1:], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [{"rank": 64}, {"rank": 128, "format": "cola"}], ids=["tt", "cola"])
def test_llama_stores_half(settings: dict[str, Any]) -> None:
    shape = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 688}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=256))
    sc.tensorize(model, **settings)
    ids = torch.randint(256, (2, 128))
    before, loss = stored_bytes(model, {"input_ids": ids, "labels": ids})
    checkpoint_activations(model, "feed_forward")
    after, same = stored_bytes(model, {"input_ids": ids, "labels": ids})
    assert torch.equal(loss, same)
    assert before >= 2 * after


def test_dropout_is_repeated() -> None:
    model = make_model("bert").train()
    checkpoint_activations(model, "feed_forward")
    torch.manual_seed(0)
    model(**batch()).loss.backward()
    first = [None if grad is None else grad.clone() for grad in gradients(model)]
    plain = make_model("bert").train()
    torch.manual_seed(0)
    plain(**batch()).loss.backward()
    torch.testing.assert_close(first, gradients(plain))


def test_models_without_feed_forward_layers_are_refused() -> None:
    with pytest.raises(UserError, match="found no feed-forward layers in Linear; set it to true"):
        checkpoint_activations(nn.Linear(3, 3), "feed_forward")
