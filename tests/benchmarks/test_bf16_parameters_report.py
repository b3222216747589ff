"""Tests of the benchmark of weights in bf16."""

from __future__ import annotations

import pytest

from scantling.trainer.recipe import load_recipe


def test_recipes_are_valid_and_differences_are_paired_by_seed(capsys: pytest.CaptureFixture[str]) -> None:
    import bf16_parameters as benchmark
    from resumable import spec_key

    for name in benchmark.RUNS:
        load_recipe(benchmark.build_recipe(benchmark.run_spec(name, 0)))
        load_recipe(benchmark.build_recipe(benchmark.run_spec(name, 0, is_scratch=True)))
    losses = {"fp32": (3.0, 4.0), "stochastic": (3.01, 4.03), "stochastic, released": (9.0,)}
    lines = {
        spec_key(benchmark.run_spec(name, seed)): {"eval_loss": loss}
        for name, own in losses.items()
        for seed, loss in enumerate(own)
    }
    benchmark.report(lines, is_scratch=False)
    printed = capsys.readouterr().out
    assert "+0.0200 ± 0.1271 (2 seeds)" in printed
    assert printed.count("seeds)") == 1
