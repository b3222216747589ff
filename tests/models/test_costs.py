"""Costs said beforehand are those that are counted afterwards."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from scantling.models.costs import BACKWARD, forward_flops, linear_flops, trace_forward

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
LLAMA_LIKE = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2}
BERT_LIKE = {**SMALL, "intermediate_size": 48}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "AutoModelForCausalLM", LLAMA_LIKE),
    "mistral": ("mistral", "AutoModelForCausalLM", LLAMA_LIKE),
    "qwen2": ("qwen2", "AutoModelForCausalLM", LLAMA_LIKE),
    "gpt2": ("gpt2", "AutoModelForCausalLM", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}),
    "gpt_neox": ("gpt_neox", "AutoModelForCausalLM", BERT_LIKE),
    "bert": ("bert", "AutoModelForMaskedLM", BERT_LIKE),
    "roberta": ("roberta", "AutoModelForMaskedLM", BERT_LIKE),
    "bert-classifier": ("bert", "AutoModelForSequenceClassification", {**BERT_LIKE, "num_labels": 3}),
    "roberta-classifier": ("roberta", "AutoModelForSequenceClassification", {**BERT_LIKE, "num_labels": 3}),
}


def build(case: str) -> Any:
    model_type, auto_class, keys = CASES[case]
    config = transformers.CONFIG_MAPPING[model_type](**keys)
    torch.manual_seed(0)
    return getattr(transformers, auto_class).from_config(config, attn_implementation="sdpa")


@pytest.mark.parametrize("case", CASES)
def test_flops_are_those_of_the_flop_counter(case: str) -> None:
    """Exact, with the unfused attention, whose products the counter sees (it has no rule for the CPU's fused one)."""
    model = build(case)
    ids = torch.randint(3, 64, (3, 10))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        logits = model(input_ids=ids).logits
        forward = counter.get_total_flops()
        logits.float().square().sum().backward()
    expected = forward_flops(model, sequences=3, seq_len=10)
    assert expected is not None
    assert forward == expected
    assert counter.get_total_flops() == (1 + BACKWARD) * expected


def test_flops_that_are_not_known_are_not_guessed() -> None:
    keys = {**LLAMA_LIKE, "num_local_experts": 2, "num_experts_per_tok": 1}
    with torch.device("meta"):
        experts = transformers.MixtralForCausalLM(transformers.MixtralConfig(**keys))
    assert forward_flops(experts, sequences=1, seq_len=4) is None


def test_a_module_that_states_its_cost_is_believed() -> None:
    class Cheap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 48)

        def flops(self, tokens: int) -> int:
            return 7 * tokens

    model = build("llama")
    before = forward_flops(model, sequences=2, seq_len=5)
    assert before is not None
    model.model.layers[0].mlp.up_proj = Cheap()
    assert forward_flops(model, sequences=2, seq_len=5) == before - linear_flops(10, 32, 48) + 70


@pytest.mark.parametrize("case", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_traced_bytes_are_what_autograd_keeps(case: str, dtype: torch.dtype | None) -> None:
    """The storages autograd saves in a real pass, counted by the same rule, byte for byte."""
    ids = torch.randint(3, 64, (3, 10))

    def loss(model: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            logits = model(input_ids=ids).logits
        return F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())

    model = build(case).train()
    known = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers(), ids]}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = loss(model)
    real = sum(size for key, size in saved.items() if key not in known)
    del result
    trace = trace_forward(lambda: build(case).train(), loss)
    assert trace.output_bytes == 3 * 10 * 64 * 4
    assert trace.saved_bytes == pytest.approx(real, rel=0.02), "ids and the generator's state are the difference"


def test_tracing_leaves_nothing_behind() -> None:
    made: list[weakref.ref[Any]] = []

    def make() -> Any:
        model = build("llama")
        made.append(weakref.ref(model))
        return model

    ids = torch.zeros((1, 4), dtype=torch.long)
    trace_forward(make, lambda model: model(input_ids=ids).logits.sum())
    gc.collect()
    assert made[0]() is None
