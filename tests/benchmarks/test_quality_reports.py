"""Tests of the quality benchmarks' reports, on lines with known answers."""

from __future__ import annotations

import argparse
from math import inf
from typing import Any

import pytest
import torch


def test_steps_to_reach_adafactor(capsys: pytest.CaptureFixture[str]) -> None:
    """CAME falls twice as fast as Adafactor, AdamW ends above it; the best of three rates is the middle one."""
    import optim_tasks as tasks
    from resumable import spec_key

    comparison = tasks.Comparison("bert-rotary", "python", 1000)
    ends = {"adafactor-momentum": 2.0, "adamw": 3.0, "came-reference": 2.0, "came": 0.0}
    start = tasks.GRID.start
    lines: dict[str, dict[str, Any]] = {}
    for name, end in ends.items():
        for seed in tasks.SEEDS:
            for index in (start - 1, start, start + 1):
                final = end + abs(index - start)
                spec = comparison.spec(name, tasks.GRID.rates[index], seed)
                curve = [[step, 4.0 + (final - 4.0) * step / 100] for step in range(10, 101, 10)]
                accuracy = [[step, 1.0 - loss / 4.0] for step, loss in curve]
                lines[spec_key(spec)] = {**spec, "eval_loss": final, "heldout": curve, "accuracy": accuracy}
    assert {spec["optim"]["lr"] for spec in comparison.finalists(lines, 0).values()} == {tasks.GRID.rates[start]}
    comparison.report(lines)
    printed = [line for line in capsys.readouterr().out.splitlines() if "reaches adafactor-momentum's last" in line]
    assert len(printed) == 6  # three optimizers, by loss and by accuracy
    found = {(line.split()[0], line.split()[4]): line for line in printed}
    for measure in ("loss", "accuracy"):
        assert found["came", measure].count(" 0.50 (") == 3
        assert "mean 0.500 ± 0.000" in found["came", measure]
        assert found["came-reference", measure].count(" 1.00 (") == 3
        assert found["adamw", measure].count("never") == 3


def test_fine_tuning_against_adamw(capsys: pytest.CaptureFixture[str]) -> None:
    import optim_finetune as finetune
    from resumable import spec_key

    comparison = finetune.Comparison("banking77", {})
    start = finetune.GRID.start
    lines: dict[str, dict[str, Any]] = {}
    for name in finetune.COMPARED:
        optimizer = finetune.make_optimizer(finetune.run_spec("banking77", name, 1e-3, 0), torch.nn.Linear(20, 20))
        assert {group["lr"] for group in optimizer.param_groups} == {1e-3}
        for seed in finetune.SEEDS:
            for index in (start - 1, start, start + 1):
                spec = finetune.run_spec("banking77", name, finetune.GRID.rates[index], seed)
                accuracy = 0.8 + seed / 100 + (0.02 if name.startswith(("came", "plain")) else 0.0)
                lines[spec_key(spec)] = {
                    **spec,
                    "dev_error": 0.1 + abs(index - start) / 10,
                    "eval_loss": 1.0,
                    "accuracy": {"banking77": accuracy},
                    "optimizer_state_bytes": 2**20,
                }
    comparison.report(lines)
    rows = [line for line in capsys.readouterr().out.splitlines() if "seeds)" in line]
    assert [row.split()[0] for row in rows] == list(finetune.COMPARED)
    assert "81.00 ± 2.48 % (3 seeds)" in rows[0]  # ± 4.303 x 1 % / sqrt(3)
    assert "minus adamw" not in rows[0]
    assert "minus adamw   0.00 ± 0.00 %" in rows[1]
    for row in rows[2:]:
        assert "83.00 ± 2.48 %" in row
        assert "minus adamw   2.00 ± 0.00 %" in row


def test_two_seeds_choose_between_the_two_best_rates() -> None:
    """With seed 0, the start of the grid is best; with seed 9, the next higher rate is better by more."""
    import optim_quality as quality
    from resumable import spec_key

    lines: dict[str, dict[str, Any]] = {}
    start, rates = quality.GRID.start, quality.GRID.rates

    def add(index: int, seed: int, loss: float | None) -> None:
        spec = quality.finalist_spec("python", "no confidence", rates[index], seed)
        lines[spec_key(spec)] = {**spec, "eval_loss": loss}

    def chosen() -> float | None:
        return quality.finalist_rate(lines, "python", "no confidence")

    add(start - 1, 0, 2.3)
    add(start, 0, 2.01)
    assert quality.best_two(lines, "python", "no confidence") == []
    add(start + 1, 0, 2.02)
    assert quality.best_two(lines, "python", "no confidence") == [rates[start], rates[start + 1]]
    assert chosen() is None
    add(start, 9, 2.06)
    assert chosen() is None
    add(start + 1, 9, 2.0)
    assert chosen() == rates[start + 1]
    assert quality.seed_spec(lines, "python", "no confidence, int4", 1)["optim"]["lr"] == rates[start + 1]
    add(start + 1, 9, None)
    assert chosen() == rates[start]


def test_exchanges_on_novels_and_digits(capsys: pytest.CaptureFixture[str]) -> None:
    """The lines of both data sets are separate; novels keep the keys they had before digits were added."""
    import comm_quality as quality
    from resumable import spec_key

    assert "data" not in quality.run_spec("novels", "ddp fp32", 1e-3, 0)
    lines: dict[str, dict[str, Any]] = {}
    start = quality.GRID.start
    for index in (start - 1, start, start + 1):
        spec = quality.run_spec("digits", "ddp, one rate", quality.GRID.rates[index], 0)
        assert quality.build_recipe(spec)["data"]["images"] == "digits"
        lines[spec_key(spec)] = {**spec, "eval_loss": 0.1 + abs(index - start)}
    quality.report(lines, "novels")
    assert "0.1000" not in capsys.readouterr().out
    quality.report(lines, "digits")
    printed = capsys.readouterr().out.splitlines()
    (row,) = [line for line in printed if line.startswith("ddp, one rate")]
    assert [cell for cell in row.split() if cell != "-"][3:] == ["1.1000", "0.1000", "1.1000"]
    assert printed[-1].startswith("AdamW of one rate is best at 0.002, but embeddings learn at 0.001")


def test_rate_of_a_large_embedding_is_swept_after_that_of_matrices(capsys: pytest.CaptureFixture[str]) -> None:
    import comm_quality as quality
    from resumable import spec_key

    data, start = "novels-8k", quality.RATES.index(quality.WORKS["novels-8k"].dense_lr)
    lines: dict[str, dict[str, Any]] = {}

    def add(worse: float, lr: int, **options: Any) -> None:
        spec = quality.run_spec(data, quality.SIGNS, quality.RATES[lr], 0, **options)
        assert spec["options"]["embeddings"] == "sparse gradients"
        lines[spec_key(spec)] = {**spec, "eval_loss": 5.0 + worse}

    for lr in (start - 1, start, start + 1):
        add(abs(lr - start) / 10, lr)
    assert quality.best_rate(lines, data, quality.SIGNS) == quality.RATES[start]
    assert quality.best_rates(lines, data, quality.SIGNS) is None
    for dense in (start - 1, start + 1, start + 2):
        add(-0.1 + abs(dense - start - 1) / 5, start, dense_lr=quality.RATES[dense])
    best = {"lr": quality.RATES[start], "dense_lr": quality.RATES[start + 1]}
    assert quality.best_rates(lines, data, quality.SIGNS) == best
    quality.report(lines, data)
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "rate of embeddings" in line]
    assert "4.9000" in row
    # where it is not swept
    assert quality.best_rates(lines, "novels", quality.LOCAL) is None
    assert quality.best_rates({}, "llama-10m-8k-batch32", quality.SIGNS_MUON) == {"lr": 2e-3, "dense_lr": 32e-3}
    assert "dense_lr" not in quality.run_spec(data, "ddp, one rate", 1e-3, 0)["options"]


def test_time_to_the_loss_of_ddp(capsys: pytest.CaptureFixture[str]) -> None:
    """Ours needs as many steps and a quarter of the time per step; PowerSGD never reaches the loss."""
    import comm_quality as quality
    import time_to_loss
    from resumable import spec_key

    data = "llama-10m-64"
    work = quality.WORKS[data]
    steps, start = work.steps, work.grid.start
    lines: dict[str, dict[str, Any]] = {}
    for name, end in (("ddp fp32", 2.0), ("ours k2 owner", 2.0), ("powersgd r4", 3.0)):
        for seed in (0, *quality.WORKS["digits"].seeds):
            for index in (start - 2, start - 1, start, start + 1):
                spec = quality.run_spec(data, name, quality.GRID.rates[index], seed)
                last = end + abs(index - start)
                curve = [[part * steps // 10, 6.0 + (last - 6.0) * part / 10] for part in range(1, 11)]
                lines[spec_key(spec)] = {**spec, "eval_loss": last, "heldout": curve}
    found = time_to_loss.compared(
        lines, data, {"alone": 0.5, "ddp fp32": 4.0, "ours k2 owner": 1.0, "powersgd r4": 1.0}
    )
    assert found.keys() == {"ddp fp32", "ours k2 owner", "powersgd r4"}
    assert found["ours k2 owner"]["seeds"] == list(work.few_seeds)  # the seeds of PowerSGD
    assert found["ours k2 owner"]["faster"] == pytest.approx({"exact": 4.0, "near": 4.0})
    assert found["ddp fp32"]["exact_s"] == pytest.approx(4.0 * steps)
    assert found["ours k2 owner"]["exact_s"] == pytest.approx(1.0 * steps)
    assert found["ours k2 owner"]["near_s"] == pytest.approx((1.0 - 0.01 / 4.0) * steps)
    assert found["powersgd r4"]["near_s"] == float("inf")
    assert found["ddp fp32"]["loss_at_equal_time"] == pytest.approx(5.0)  # a quarter of its steps
    assert found["ours k2 owner"]["loss_at_equal_time"] == pytest.approx(2.0)
    half = time_to_loss.compared(lines, data, {"ddp fp16": 2.0, "ours k2 owner": 1.0}, "ddp fp16")
    assert half["ours k2 owner"]["faster"] == pytest.approx({"exact": 2.0, "near": 2.0})
    step_s = {"alone": 0.5, "ddp fp32": 4.0, "powersgd r4": 1.0, "diloco h30": 0.8}
    time_to_loss.show(found, step_s, 4.5, 10)
    printed = capsys.readouterr().out
    assert "to the loss    never" in printed
    assert "bound, measured: 8.00 x; ours 4.00 x: 50% of it, MISSED" in printed
    assert "bound, computed: 10.00 x; ours 4.00 x: 40% of it, MISSED" in printed
    assert "at least 10 times DDP: MISSED" in printed
    assert "diloco h30 at most (it was not trained) 5.00 x: MISSED" in printed
    time_to_loss.show({"ddp fp32": found["ddp fp32"]}, step_s, 4.5, 10)
    assert "bound" not in capsys.readouterr().out, "before there are runs of ours"
    warm_up = 30  # PowerSGD averages everything in these steps
    step_s = {"ddp fp32": 4.0, "powersgd r4": 1.0}
    took = 4.0 * warm_up + steps - warm_up
    assert time_to_loss.elapsed_seconds(data, "powersgd r4", steps, step_s) == took
    assert time_to_loss.steps_in(data, "powersgd r4", 4.0 * warm_up + 7.0, step_s) == warm_up + 7.0


def test_tables_of_the_exchanges() -> None:
    """Ours loses 0.25, sends a hundredth of the bytes, and takes a quarter of the time at 100 Mbit/s."""
    import comm_quality as quality
    import comm_table
    from resumable import spec_key

    lines: dict[str, dict[str, Any]] = {}
    start, steps = quality.GRID.start, quality.WORKS["digits"].steps
    for name, worse in (("ddp fp32", 0.0), ("ours k8 owner", 0.25)):
        for seed, replicas in ((0, 2), (1, 2), (2, 2), (3, 2), (1, 4)):
            for index in (start - 1, start, start + 1):
                spec = quality.run_spec("digits", name, quality.GRID.rates[index], seed, replicas)
                last = 0.1 + seed / 100 + worse + abs(index - start)
                curve = [[part * steps // 10, last + 1.0 - part / 10] for part in range(1, 11)]
                lines[spec_key(spec)] = {**spec, "eval_loss": last, "heldout": curve, "accuracy": 0.9}
    found = comm_table.loss_table(lines, "digits", has_bytes=False).splitlines()
    assert found[2] == ("| ddp fp32 | 0.002 | 3 | 0.120 ± 0.025 | – | 300 | 90.0 ± 0.0 | 0.110 | – |")
    assert found[3] == (
        "| ours k8 owner | 0.002 | 3 | 0.370 ± 0.025 | +0.250 ± 0.000 | never | 90.0 ± 0.0 | 0.360 | +0.250 |"
    )

    assert comm_table.settings_table(lines, "digits") == ""
    for index in (start - 1, start, start + 1):
        spec = quality.run_spec("digits", quality.OURS, quality.GRID.rates[index], 0)
        lines[spec_key(spec)] = {**spec, "eval_loss": 1.0 + abs(index - start)}
    for seed in (1, 2, 3):
        spec = quality.run_spec("digits", quality.OURS, quality.GRID.rates[start], seed)
        lines[spec_key(spec)] = {**spec, "eval_loss": 0.2, "computed_bytes": 100.0}
        spec = quality.run_spec("digits", quality.OURS, quality.GRID.rates[start], seed, delay=1)
        lines[spec_key(spec)] = {**spec, "eval_loss": 0.3, "computed_bytes": 50.0}
    found = comm_table.settings_table(lines, "digits").splitlines()
    assert found[2:] == [f"| delay 1 | {quality.OURS} | 0.300 ± 0.000 | +0.100 ± 0.000 | 0.50 |"]

    def link(scale: float, seconds: float) -> dict[str, Any]:
        def rounds(sent: float, step_s: float) -> list[list[dict[str, Any]]]:
            return [[{"sent_bytes": 1.1 * sent, "computed_bytes": sent, "step_s": [step_s], "cpu_s": step_s / 2}]]

        return {
            "methods": {
                "alone": rounds(0.0, 0.5),
                "ddp fp32": rounds(scale * 8e5, 4.0 * seconds),
                "ours k8 owner": rounds(scale * 8e3, seconds),
            }
        }

    links = {(2, "100mbit"): link(1.0, 1.0), (2, "1gbit"): link(1.0, 0.5), (8, "100mbit"): link(2.0, 1.0)}
    found = comm_table.link_table(lines, "digits", links).splitlines()
    assert found[2] == "| ddp fp32 | 880.0 | 1.100 | 1 | – | 1760.0 | 4000 | 2000 | – | +1750 | 0.870 |"
    assert found[3] == "| ours k8 owner | 8.8 | 1.100 | 100 | – | 17.6 | 1000 | 500 | – | +250 | 0.370 |"

    near = link(1.0, 0.5) | {"rate": "1gbit", "emulated_round_trip": False}
    far = link(1.0, 1.0) | {"rate": "100mbit", "emulated_round_trip": True, "round_trip_ms": 50.4}
    del far["methods"]["alone"]
    found = comm_table.times_table([near, far]).splitlines()
    columns = "1gbit: ms | × faster | 100mbit, round trip of 50 ms: ms | × faster"
    assert found[0] == f"| exchange | kB counted | × fewer | {columns} |"
    rows = ["| ddp fp32 | 880.0 | 1 | 2000 | 1.0 | 4000 | 1.0 |"]
    rows += ["| ours k8 owner | 8.8 | 100 | 500 | 4.0 | 1000 | 4.0 |"]
    assert found[2:] == rows

    for each in (near, far):
        each["methods"]["ddp fp16"] = each["methods"].pop("ddp fp32")
    found = comm_table.times_table([near, far]).splitlines()
    assert sorted(found[2:]) == [rows[0].replace("fp32", "fp16"), rows[1]]


def test_step_time_with_few_exchanges_is_the_mean() -> None:
    import network
    from comm_methods import METHODS

    rows = [{"step_s": [1.0] * 29 + [31.0]}, {"step_s": [1.0] * 30}]
    assert network.step_seconds(rows, "diloco h30") == 2.0
    assert network.step_seconds(rows, "ours k8 owner") == 1.0
    every = {method: count for method in METHODS if (count := network.exchanges_every(method)) != 1}
    local = {"ours k192 h5 all_gather": 5, "ours k144 h5 owner": 5}
    for name in ("kept", "muon"):
        local |= {f"ours {name} k176 h5": 5, f"ours {name} k960 h20": 20, f"ours {name} k4096 h40": 40}
    local |= {"ours adamw h15": 15, "ours muon h15": 15}
    assert every == {"diloco h30": 30, "diloco h100": 100, "sparseloco h30": 30, **local}
    assert [network.parse_mbit(rate) for rate in ("100mbit", "1gbit", "uncapped")] == [100.0, 1000.0, inf]
    assert [network.burst_bytes(rate) for rate in ("10mbit", "100mbit", "1gbit")] == [32768, 32768, 250000]
    with pytest.raises(argparse.ArgumentTypeError, match="given 10mbps"):
        network.parse_mbit("10mbps")
