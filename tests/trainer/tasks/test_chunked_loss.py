"""Tests of the loss whose logits exist for a few tokens at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, LlamaConfig, PhiConfig

import scantling as sc
from scantling.errors import UserError
from scantling.trainer.tasks.base import cross_entropy_sum
from scantling.trainer.tasks.chunked_loss import chunk_loss, chunked_cross_entropy, loss_labels
from tests.runs import records, tiny_recipe

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("tokens", [1, 3, 7, 100])
def test_loss_and_gradients_are_those_of_whole_logits(tokens: int, has_bias: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(50, 16, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(50, generator=generator).to(dtype).requires_grad_() if has_bias else None
    labels = torch.randint(0, 50, (2, 7), generator=generator)
    labels[0, :3] = -100
    inputs = [each for each in (hidden, weight, bias) if each is not None]
    wanted = cross_entropy_sum(torch.nn.functional.linear(hidden, weight, bias), labels)
    found = chunked_cross_entropy(hidden, weight, bias, labels, tokens)
    tolerance: dict[str, float] = (
        {"rtol": 2e-2, "atol": 6e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    )
    torch.testing.assert_close(found, wanted.float(), **tolerance)
    for one, other in zip(torch.autograd.grad(3 * found, inputs), torch.autograd.grad(3 * wanted, inputs), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, **tolerance)


def test_logits_of_all_tokens_never_exist() -> None:
    from scantling.numerics.torch_private import TorchDispatchMode

    largest = 0

    class Sizes(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    hidden, weight = torch.randn(512, 8, requires_grad=True), torch.randn(100, 8, requires_grad=True)
    with Sizes():
        chunked_cross_entropy(hidden, weight, None, torch.zeros(512, dtype=torch.long), 16).backward()
    assert largest == 512 * 8  # of the hidden states; a chunk of logits has 1,600, all have 51,200


def test_logits_of_one_chunk_exist_at_a_time() -> None:
    from scantling.trainer.models.costs import trace_step

    def loss(head: torch.nn.Module) -> torch.Tensor:
        hidden, labels = torch.ones(512, 8, requires_grad=True), torch.zeros(512, dtype=torch.long)
        return chunked_cross_entropy(hidden, head.weight, None, labels, 64)  # type: ignore[arg-type]

    peak = trace_step(torch.nn.Linear(8, 1000, bias=False, device="meta"), loss).peak_bytes
    assert peak < 1.5 * 4 * 64 * 1000  # gradients and hidden states take a quarter of the logits


@pytest.mark.parametrize("kind", [LlamaConfig, PhiConfig])
def test_model_returns_the_loss_inside_the_context_only(kind: Any) -> None:
    model = AutoModelForCausalLM.from_config(kind(**TINY))
    ids = torch.randint(1, 96, (2, 9))
    wanted = cross_entropy_sum(model(input_ids=ids).logits, ids)
    chunk_loss(model, 4)
    with loss_labels(model, ids) as is_chunked:
        found = model(input_ids=ids).logits
    assert is_chunked
    torch.testing.assert_close(found, wanted)
    assert model(input_ids=ids).logits.shape == (2, 9, 96)


@pytest.mark.parametrize("config", [CohereConfig(**TINY), Gemma2Config(**TINY)], ids=["scaled", "limited"])
def test_models_that_change_the_logits_are_refused(config: Any) -> None:
    with pytest.raises(UserError, match="changes the outputs of its output layer"):
        chunk_loss(AutoModelForCausalLM.from_config(config), 4)


@pytest.mark.parametrize("tied", [True, False])
def test_run_with_chunks_learns_the_same(tied: bool, tmp_path: Path) -> None:
    runs = {}
    for chunk in (None, 5):
        recipe = tiny_recipe(tmp_path, train={"loss_chunk": chunk, "micro_batch_size": 2})
        recipe["model"]["overrides"] = {**recipe["model"]["overrides"], "tie_word_embeddings": tied}
        runs[chunk] = sc.train(recipe, run_dir=tmp_path / str(chunk))
    for one, other in zip(records(tmp_path / "None"), records(tmp_path / "5"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert runs[5].metrics["eval_loss"] == pytest.approx(runs[None].metrics["eval_loss"], rel=1e-5)
    whole, chunked = (sc.plan(tiny_recipe(tmp_path, train={"loss_chunk": each})) for each in (None, 5))
    assert chunked.flops_per_step is not None
    assert whole.flops_per_step is not None
    assert chunked.flops_per_step > whole.flops_per_step  # logits are computed again
    assert chunked.activation_bytes < whole.activation_bytes  # type: ignore[operator]


def test_loss_chunk_of_another_task_or_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="belongs to causal-lm"):
        sc.train(tiny_recipe(tmp_path, model={"preset": "bert-6-encoder"}, train={"loss_chunk": 4}))
    with pytest.raises(UserError, match="has to be a linear layer"):
        sc.train(tiny_recipe(tmp_path, tensor={"rank": 4}, train={"loss_chunk": 4}))
