"""Tests of `lm_accuracy.py`: the decoder, the steps that the host only launches, and the order of runs."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

SHAPE = {"vocabulary": 64, "width": 32, "intermediate": 48, "layers": 2, "length": 16}
FORMS = ("dense", "tt gates", "low rank", "cola gates", "tt silu", "dense narrow", "galore")
READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "_unique2", "is_nonzero")
"""Operations whose result the host waits for."""


class RecordReads(TorchDispatchMode):
    """Record the operations that make the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def lm_accuracy() -> Any:
    return importlib.import_module("lm_accuracy")


@pytest.fixture
def lm_models() -> Any:
    return importlib.import_module("lm_models")


@pytest.fixture
def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = {name: torch.randint(64, (size,), generator=generator) for name, size in (("train", 2000), ("valid", 400))}
    return {name: own.to(torch.int16) for name, own in ids.items()}


def make_run(lm_accuracy: Any, tokens: dict[str, Tensor], form: str, **changes: Any) -> Any:
    spec = {
        "form": form,
        "fewer": 4,
        "lr": 2e-3,
        "gate_scale": 10.0,
        "rest_lr": 4e-3,
        "seed": 1,
        "steps": 20,
        "batch": 4,
        "shape": SHAPE,
        "eval_windows": None,
    }
    return lm_accuracy.Run({**spec, **changes}, tokens, None, lm_accuracy.Ops())


def test_decoder_computes_what_transformers_computes(lm_models: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = lm_models.Decoder(lm_models.Shape(**SHAPE))
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=lm_models.HEADS,
            rms_norm_eps=lm_models.EPS,
            tie_word_embeddings=True,
        )
    )
    for param in model.parameters():
        param.data.add_(torch.randn_like(param), alpha=0.1)
    missing = llama.load_state_dict(model.state_dict(), strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"])
    assert not missing.unexpected_keys
    llama.tie_weights()
    ids = torch.randint(64, (3, 16))
    torch.testing.assert_close(model.logits(ids).view(3, 16, -1), llama(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fewer", [2, 4, 8])
def test_narrower_model_has_the_size_of_the_tt_model(lm_models: Any, fewer: int) -> None:
    shape = lm_models.Shape()
    wanted = lm_models.tt_parameters(shape, fewer)
    narrow = lm_models.narrower(shape, wanted)
    own = lm_models.count_parameters(lm_models.Decoder(narrow))
    assert own["num_parameters"] == narrow.num_parameters
    assert own["num_parameters"] == pytest.approx(wanted, rel=0.01)
    assert narrow.width % 8 == 0
    assert narrow.intermediate % 8 == 0


@pytest.mark.parametrize("form", FORMS)
def test_step_reads_nothing_on_the_host(lm_accuracy: Any, tokens: dict[str, Tensor], form: str) -> None:
    run = make_run(lm_accuracy, tokens, form)
    run.advance(1)
    with RecordReads() as mode:
        run.step()
    assert mode.found == []


@pytest.mark.parametrize("form", FORMS)
def test_run_follows_the_schedule_and_learns(lm_accuracy: Any, tokens: dict[str, Tensor], form: str) -> None:
    tokens = {name: own % 4 for name, own in tokens.items()}
    run = make_run(lm_accuracy, tokens, form, steps=40)
    factors = lm_accuracy.rate_factors(40)
    # 2 steps of warm-up, then down to 0 in 38
    assert factors[:3].tolist() == pytest.approx([0.5, 1.0, 1.0])
    assert float(factors[-1]) == pytest.approx(1 / 38)
    for number in range(3):
        run.advance(1)
        assert run.rates.tolist() == pytest.approx((run._peaks * factors[number]).tolist())
        assert [float(group["lr"]) for group in run._optimizer.param_groups] == run.rates.tolist()
    expected = {2e-3, 4e-3} | ({2e-2} if "gates" in form else set())
    assert {round(rate, 6) for rate in run._peaks.tolist()} == expected
    while not run.all_launched:
        run.advance()
    line = run.line()
    assert float(run.losses[-5:].mean()) < float(run.losses[0]) - 1.0
    assert line["eval_loss"] < 2.5
    assert line["tokens"] == 40 * 4 * 16
    assert len(run.losses.nonzero()) == 40


def test_evaluation_predicts_every_token_of_the_windows(lm_accuracy: Any, tokens: dict[str, Tensor]) -> None:
    run = make_run(lm_accuracy, tokens, "dense")
    valid = tokens["valid"].long()
    windows = [valid[start : start + 17] for start in range(0, len(valid) - 16, 16)]
    with torch.no_grad():
        expected = [nn.functional.cross_entropy(run.model.logits(own[None, :-1]), own[1:]).item() for own in windows]
    assert run.evaluate() == pytest.approx(np.mean(expected), rel=1e-5)


def test_forms_see_the_same_windows_in_another_order_each_epoch(lm_accuracy: Any) -> None:
    starts = lm_accuracy.window_starts(1000, 16, 130, seed=3)
    assert torch.equal(starts, lm_accuracy.window_starts(1000, 16, 130, seed=3))
    assert not torch.equal(starts, lm_accuracy.window_starts(1000, 16, 130, seed=4))
    assert int(starts.max()) + 17 <= 1000
    first, second = starts[:61], starts[62:123]
    assert len(first.unique()) == 61
    assert len((first % 16).unique()) == 1
    assert not torch.equal(first, second)


def test_gates_are_folded_before_the_evaluation(lm_accuracy: Any, tokens: dict[str, Tensor]) -> None:
    gated, plain = (make_run(lm_accuracy, tokens, form) for form in ("tt gates", "tt"))
    assert gated.counts == plain.counts
    gated.advance(10)
    ids = tokens["valid"][:34].view(2, 17).long()
    with torch.no_grad():
        before = float(gated.model(ids))
        gated.evaluate()
        assert not any("rank_gates" in name for name, _ in gated.model.named_parameters())
        assert float(gated.model(ids)) == pytest.approx(before, rel=1e-5)


def test_projection_at_full_rank_expands_to_the_gradient(lm_models: Any) -> None:
    torch.manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape)) for shape in ((4, 6), (6, 4))]
    before = [matrix.detach().clone() for matrix in matrices]
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    projections = lm_models.Projections(matrices, 4)
    projections.refresh()
    projections.project()
    for small in projections.small:
        small.data.copy_(-small.grad)
    projections.expand()
    for matrix, old in zip(matrices, before, strict=True):
        torch.testing.assert_close(matrix.detach(), old - 0.25 * matrix.grad)
    assert not any(small.any() for small in projections.small)


def test_projection_keeps_the_leading_directions(lm_models: Any) -> None:
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.randn(5, 8))
    matrix.grad = torch.randn(5, 8)
    projections = lm_models.Projections([matrix], 2)
    projections.refresh()
    projections.project()
    leading = torch.linalg.svdvals(matrix.grad)[:2]
    torch.testing.assert_close(torch.linalg.svdvals(projections.small[0].grad), leading)


def test_plan_starts_the_most_important_runs_first(lm_accuracy: Any) -> None:
    class Options:
        steps, sweep_steps, batch, tiny, forms = 8, 4, 2, True, ["dense", "tt gates"]

    plan, lines = lm_accuracy.Plan(Options()), {}
    order = []
    while (spec := plan.next(["sweep", "seeds"], lines, [])) is not None:
        loss = abs(spec["lr"] - 2e-3)  # best at 2e-3
        lines[lm_accuracy.spec_key(spec)] = {**spec, "eval_loss": loss}
        order.append((spec["form"], spec["fewer"], spec["seed"], spec["lr"]))
    assert [run[0] for run in order if run[2] == 0] == ["dense"] * 3 + ["tt gates"] * 3
    expected = [("dense", 1), ("tt gates", 4), ("tt gates", 2), ("tt gates", 8)]
    assert [run[:3] for run in order if run[2]] == [(*one, seed) for seed in (1, 2, 3) for one in expected]
    assert {run[3] for run in order if run[2]} == {2e-3}
    # while a run of its sweep is in flight, a form starts no other
    assert plan.next(["sweep", "seeds"], {}, [plan.spec("dense", 4, 2e-3, 0, 4)])["form"] == "tt gates"
