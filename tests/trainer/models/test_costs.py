"""Tests that predicted costs equal the measured ones."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from scantling.errors import UserError
from scantling.numerics.device import has_fast_matmul
from scantling.trainer.models.checkpointing import checkpoint_activations
from scantling.trainer.models.costs import BACKWARD, Trace, forward_flops, linear_flops, no_packed_documents, trace_step

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
# Models in which layers run several times, for one position or in a decoder, or are not nn.Linear, need a trace.
TRACED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "albert": ("albert", "AutoModelForMaskedLM", {**BERT_LIKE, "embedding_size": 16}),
    "distilbert-classifier": (
        "distilbert",
        "AutoModelForSequenceClassification",
        {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "vocab_size": 64},
    ),
    "xlnet": ("xlnet", "AutoModelForCausalLM", {"d_model": 32, "d_inner": 48, "n_layer": 2, "n_head": 4}),
    "t5": (
        "t5",
        "AutoModelForSeq2SeqLM",
        {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2, "vocab_size": 64},
    ),
    "rwkv": ("rwkv", "AutoModelForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}),
}

EXPERTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("mixtral", "AutoModelForCausalLM", {**LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        "AutoModelForCausalLM",
        {**LLAMA_LIKE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    ),
}


def build(case: str, device: str = "cpu") -> Any:
    model_type, auto_class, keys = (CASES | TRACED | EXPERTS)[case]
    config = transformers.CONFIG_MAPPING[model_type](**keys)
    config.use_cache = False
    torch.manual_seed(0)
    with torch.device(device):
        return getattr(transformers, auto_class).from_config(config).train()


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits; an encoder-decoder gets the same ids for its decoder."""
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    logits: torch.Tensor = model(**inputs).logits
    return logits


def traced(model: Any, *, sequences: int, seq_len: int, **keys: Any) -> Trace:
    def loss(inner: Any) -> torch.Tensor:
        ids = torch.zeros((sequences, seq_len), dtype=torch.long)
        return logits_of(inner, ids).float().square().sum()

    with no_packed_documents():
        return trace_step(model, loss, **keys)


LIKE_ANOTHER = ("mistral", "qwen2", "roberta", "roberta-classifier")
"""Models with the same products as Llama, BERT, or BERT with a classifier; slow tests."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in LIKE_ANOTHER else []) for case in CASES]
)
def test_flops_are_those_of_the_flop_counter(case: str) -> None:
    """Exact for unfused attention, whose products the counter sees (it has no rule for the CPU's fused attention)."""
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
    assert traced(build(case, "meta"), sequences=3, seq_len=10).forward_flops == expected


@pytest.mark.parametrize("case", TRACED)
def test_trace_counts_every_product(case: str) -> None:
    model = build(case)
    ids = torch.randint(3, 64, (3, 10))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        logits_of(model, ids)
    assert traced(build(case, "meta"), sequences=3, seq_len=10).forward_flops == counter.get_total_flops()


@pytest.mark.parametrize("case", ["llama", "gpt2", "bert", "t5"])
def test_recomputed_activations_are_traced(case: str) -> None:
    totals = []
    ids = torch.randint(3, 64, (3, 10))
    for checkpointing in (False, True):
        model, twin = build(case), build(case, "meta")
        if checkpointing:
            checkpoint_activations(model)
            checkpoint_activations(twin)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            logits_of(model, ids).float().square().sum().backward()
        totals.append(counter.get_total_flops())
        assert traced(twin, sequences=3, seq_len=10).recomputed_flops == totals[-1] - totals[0]


@pytest.mark.parametrize("case", EXPERTS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_experts_are_traced(case: str, checkpointing: bool) -> None:
    """The counter sees the products of a token's experts in a loop over the experts."""
    model, twin = build(case), build(case, "meta")
    model.set_experts_implementation("eager")
    if checkpointing:
        checkpoint_activations(model)
        checkpoint_activations(twin)
    ids = torch.randint(3, 64, (3, 10))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        logits = logits_of(model, ids)
        forward = counter.get_total_flops()
        logits.float().square().sum().backward()
    trace = traced(twin, sequences=3, seq_len=10)
    assert trace.forward_flops == forward
    assert trace.recomputed_flops == counter.get_total_flops() - (1 + BACKWARD) * forward


def test_unknown_flops_are_none() -> None:
    keys = {**LLAMA_LIKE, "num_local_experts": 2, "num_experts_per_tok": 1}
    with torch.device("meta"):
        experts = transformers.MixtralForCausalLM(transformers.MixtralConfig(**keys))
    assert forward_flops(experts, sequences=1, seq_len=4) is None
    assert forward_flops(build("t5", "meta"), sequences=1, seq_len=4) is None


def test_module_with_stated_flops_is_counted() -> None:
    class Cheap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 48)

        def flops(self, tokens: int) -> int:
            return 7 * tokens

        def forward(self, vectors: torch.Tensor) -> torch.Tensor:
            return self.inner(vectors)

    model = build("llama")
    before = forward_flops(model, sequences=2, seq_len=5)
    assert before is not None
    model.model.layers[0].mlp.up_proj = Cheap()
    expected = before - linear_flops(10, 32, 48) + 70
    assert forward_flops(model, sequences=2, seq_len=5) == expected
    assert traced(model.to("meta"), sequences=2, seq_len=5).forward_flops == expected


def allocated_peak(work: Callable[[], Any]) -> int:
    """Return the peak bytes of torch's CPU allocator minus its initial bytes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    result = profiler.profiler.kineto_results
    events = [(event.start_ns(), event.nbytes()) for event in result.events() if event.name() == "[memory]"]
    changes = [size for _, size in sorted(events, key=lambda event: event[0])]
    return max(itertools.accumulate(changes))


def peaks() -> Iterator[Any]:
    """Yield each model in four variants; two complementary ones are in the default suite, and all four for Llama."""
    for case in ("llama", "gpt2", "bert", "t5", "mixtral"):
        for dtype, checkpointing in itertools.product((None, torch.bfloat16), (False, True)):
            is_slow = case != "llama" and (dtype is None) == checkpointing
            yield pytest.param(case, dtype, checkpointing, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize(("case", "dtype", "checkpointing"), list(peaks()))
def test_traced_peak_is_that_of_the_allocator(case: str, dtype: torch.dtype | None, checkpointing: bool) -> None:
    """Exact except for generator states: with checkpointing, 5 KB per layer to replay dropout.

    In bf16, gradients of an earlier pass exist.
    """
    gradients_held = dtype is not None

    def loss(model: Any) -> torch.Tensor:
        ids = torch.zeros((8, 64), dtype=torch.long)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            logits = logits_of(model, ids)
        return F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())

    model, twin = build(case), build(case, "meta")
    if checkpointing:
        checkpoint_activations(model)
        checkpoint_activations(twin)
    loss(model).backward()  # type: ignore[no-untyped-call]
    if not gradients_held:
        model.zero_grad()
    gc.collect()
    measured = allocated_peak(lambda: loss(model).backward())  # type: ignore[no-untyped-call]
    with no_packed_documents():
        trace = trace_step(twin, loss, gradients_held=gradients_held)
    layers = 2 * (1 + model.config.is_encoder_decoder)
    off = 8_000 * layers if checkpointing else 2_500
    # if the CPU multiplies bf16 itself, oneDNN's scratch memory comes from the measured allocator
    has_scratch = dtype == torch.bfloat16 and has_fast_matmul("bf16", torch.device("cpu"))
    assert trace.peak_bytes == pytest.approx(measured, abs=off, rel=0.06 if has_scratch else None)
    assert trace.activation_bytes <= trace.peak_bytes


def test_traced_activations_hold_what_autograd_keeps() -> None:
    """Expected: the storages that autograd saves in a real pass, the inputs, the logits and the loss."""
    model = build("llama")
    ids = torch.zeros((3, 10), dtype=torch.long)
    known = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    held = {ids.untyped_storage()._cdata: ids.nbytes}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(input_ids=ids).logits.float()
        result = logits.square().sum()
    held[result.untyped_storage()._cdata] = result.nbytes
    kept = sum(size for key, size in held.items() if key not in known)
    assert traced(build("llama", "meta"), sequences=3, seq_len=10).activation_bytes == kept


def test_tracing_leaves_nothing_behind() -> None:
    model = build("llama", "meta")
    gone = weakref.ref(model)
    traced(model, sequences=1, seq_len=4)
    del model
    gc.collect()
    assert gone() is None


def test_data_dependent_model_cannot_be_traced() -> None:
    def loss(model: Any) -> torch.Tensor:
        logits = model(input_ids=torch.zeros((1, 4), dtype=torch.long)).logits
        return logits.sum() if logits.max() > 0 else logits.mean()

    with pytest.raises(UserError, match="cannot be traced"):
        trace_step(build("llama", "meta"), loss)
