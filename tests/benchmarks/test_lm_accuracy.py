"""Tests of `lm_accuracy.py`: the decoder, the steps that the host only launches, and the order of runs."""

from __future__ import annotations

import importlib
from pathlib import Path
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
def lm_runs() -> Any:
    return importlib.import_module("lm_runs")


@pytest.fixture
def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = {name: torch.randint(64, (size,), generator=generator) for name, size in (("train", 2000), ("valid", 400))}
    return {name: own.to(torch.int16) for name, own in ids.items()}


def make_run(lm_runs: Any, tokens: dict[str, Tensor], form: str, **changes: Any) -> Any:
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
    return lm_runs.Run({**spec, **changes}, tokens, None, lm_runs.Ops())


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
    torch.manual_seed(0)
    state = torch.get_rng_state()
    lm_models.tt_parameters.cache_clear()
    lm_models.tt_parameters(shape, fewer)
    assert torch.equal(torch.get_rng_state(), state)  # the first call must not change the weights of a model
    assert narrow.width % 8 == 0
    assert narrow.intermediate % 8 == 0


@pytest.mark.parametrize("form", FORMS)
def test_step_reads_nothing_on_the_host(lm_runs: Any, tokens: dict[str, Tensor], form: str) -> None:
    run = make_run(lm_runs, tokens, form)
    run.advance(1)
    with RecordReads() as mode:
        run.step()
    assert mode.found == []


@pytest.mark.parametrize("form", FORMS)
def test_run_follows_the_schedule_and_learns(lm_runs: Any, tokens: dict[str, Tensor], form: str) -> None:
    tokens = {name: own % 4 for name, own in tokens.items()}
    run = make_run(lm_runs, tokens, form, steps=40)
    factors = torch.tensor(lm_runs.rate_factors(40, lm_runs.WARM_UP_SHARE))
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


def test_evaluation_predicts_every_token_of_the_windows(lm_runs: Any, tokens: dict[str, Tensor]) -> None:
    run = make_run(lm_runs, tokens, "dense")
    valid = tokens["valid"].long()
    windows = [valid[start : start + 17] for start in range(0, len(valid) - 16, 16)]
    with torch.no_grad():
        expected = [nn.functional.cross_entropy(run.model.logits(own[None, :-1]), own[1:]).item() for own in windows]
    assert run.evaluate() == pytest.approx(np.mean(expected), rel=1e-5)


def test_forms_see_the_same_windows_in_another_order_each_epoch(lm_runs: Any) -> None:
    starts = lm_runs.window_starts(1000, 16, 130, seed=3)
    assert torch.equal(starts, lm_runs.window_starts(1000, 16, 130, seed=3))
    assert not torch.equal(starts, lm_runs.window_starts(1000, 16, 130, seed=4))
    assert int(starts.max()) + 17 <= 1000
    first, second = starts[:61], starts[62:123]
    assert len(first.unique()) == 61
    assert len((first % 16).unique()) == 1
    assert not torch.equal(first, second)


def test_gates_are_folded_before_the_evaluation(lm_runs: Any, tokens: dict[str, Tensor]) -> None:
    gated, plain = (make_run(lm_runs, tokens, form) for form in ("tt gates", "tt"))
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


class Options:
    """Command line of a small comparison."""

    steps, sweep_steps, batch, small, seconds, at_once = 8, 4, 2, True, 1e9, 2
    gate_scale, rest_lr, device, no_compile = 10.0, 4e-3, "cpu", True
    forms = ("dense", "tt")


def test_plan_sweeps_a_form_before_its_first_run_and_starts_with_the_most_important(lm_accuracy: Any) -> None:
    plan, lines = lm_accuracy.Plan(Options()), {}
    order = []
    while (spec := plan.next(["seeds"], lines, [])) is not None:
        loss = abs(spec["lr"] - 2e-3)  # best at 2e-3
        lines[lm_accuracy.spec_key(spec)] = {**spec, "eval_loss": loss}
        order.append((spec["form"], spec["fewer"], spec["seed"], spec["lr"]))
    swept = [("dense", 1, 0)] * 4 + [("dense", 1, 1)] + [("tt", 4, 0)] * 3
    first = [("tt", fewer, 1) for fewer in (4, 2, 8)]
    more = [(*one, seed) for seed in (2, 3) for one in (("dense", 1), ("tt", 4))]
    more += [("tt", fewer, seed) for seed in (2, 3) for fewer in (2, 8)]
    assert [run[:3] for run in order] == swept + first + more
    assert {run[3] for run in order if run[2]} == {2e-3}


def test_plan_runs_other_forms_while_a_sweep_is_in_flight(lm_accuracy: Any) -> None:
    plan = lm_accuracy.Plan(Options())
    spec = plan.next(["seeds"], {}, [])
    assert spec["form"] == "dense"
    assert plan.next(["seeds"], {}, [spec])["form"] == "tt"
    assert plan.next(["seeds"], {}, [], {lm_accuracy.spec_key(spec)})["form"] == "tt"


def test_plan_gives_the_time_of_the_dense_run(lm_accuracy: Any) -> None:
    plan = lm_accuracy.Plan(Options())
    clock = plan.clock_spec(["dense", "tt 4x"])
    clock |= {"key": lm_accuracy.spec_key(clock), "times": {"dense": {"ratio": 1.0}, "tt 4x": {"ratio": 2.0}}}
    other = {**plan.clock_spec(["dense"]), "batch": 3, "times": {"tt 4x": {"ratio": 9.0}}}
    other["key"] = lm_accuracy.spec_key({**plan.clock_spec(["dense"]), "batch": 3})
    times = plan.step_times({line["key"]: line for line in (clock, other)})
    assert plan.steps_in_time(times, "tt", 4) == 4
    assert plan.steps_in_time(times, "tt", 2) is None


def test_trainer_appends_a_line_for_each_run_and_goes_on_after_a_failure(
    lm_accuracy: Any, tokens: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "tokens.npz", **{name: own.numpy() for name, own in tokens.items()})
    monkeypatch.setattr(lm_accuracy, "SMALL", lm_accuracy.Shape(**SHAPE))
    monkeypatch.setattr(lm_accuracy, "SEEDS", (1, 2))
    monkeypatch.setattr(lm_accuracy, "RATES", [2e-3])
    monkeypatch.setattr(lm_accuracy, "START", dict.fromkeys(lm_accuracy.FORMS, 0))
    options = Options()
    options.tokens, options.results = tmp_path / "tokens.npz", tmp_path / "lines.jsonl"
    build = lm_accuracy.Run

    def run(spec: dict[str, Any], *rest: Any) -> Any:
        if spec["form"] == "dense" and spec["seed"] == 2:
            raise RuntimeError("no memory")
        return build(spec, *rest)

    monkeypatch.setattr(lm_accuracy, "Run", run)
    lm_accuracy.Trainer(options).train(["seeds"])
    lines = lm_accuracy.Ledger(options.results, Path()).lines()
    done = [(line["form"], line["fewer"], line["seed"]) for line in lines.values() if line["seed"]]
    expected = [("dense", 1, 1)] + [("tt", fewer, seed) for fewer in (2, 4, 8) for seed in (1, 2)]
    assert sorted(done) == sorted(expected)
    assert all(line["eval_loss"] < 10 for line in lines.values())
    # nothing is repeated, and nothing starts after the time
    options.seconds = -1.0
    lm_accuracy.Trainer(options).train(["seeds"])
    assert len(lm_accuracy.Ledger(options.results, Path()).lines()) == len(lines)
