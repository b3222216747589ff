"""Tests of the intent benchmark: the search of rates, the variants, and runs of a few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch


def _search_all(intent: Any, lines: dict[str, Any], row: str, size: str, best: dict[str, float]) -> dict[str, float]:
    """Run a search to its end; the error of a run is its distance to the best rates, in octaves."""
    import numpy as np
    from resumable import spec_key

    for _ in range(40):
        spec, rates = intent.search_row(lines, row, size)
        if spec is None:
            return rates or {}
        error = sum(abs(np.log2(spec[name] / value)) for name, value in best.items()) / 100
        lines[spec_key(spec)] = {**spec, "accuracy": 1.0 - error, "eval_loss": 0.0}
    raise AssertionError("the search does not end")


def test_search_finds_the_best_rates_and_starts_the_full_size_from_the_small_one() -> None:
    import intent_accuracy as intent

    lines: dict[str, Any] = {}
    assert intent.search_row(lines, "tt", "full") == (None, None)
    best = {"lr": 8e-3, "layers_ratio": 1 / 9, "embedding_ratio": 3.0}
    assert _search_all(intent, lines, "tt", "small", best) == best
    assert intent.best_rates(lines, "tt 0.5", "small") == best
    assert intent.best_rates(lines, "dense", "small") is None
    before = len(lines)
    assert _search_all(intent, lines, "tt", "full", {**best, "lr": 4e-3}) == {**best, "lr": 4e-3}
    assert len(lines) - before == 3  # the best rate of `small` and its neighbors of the new best one


def test_narrow_dense_model_is_as_large_as_the_compressed_one() -> None:
    import intent_accuracy as intent

    spec = intent.make_spec(intent.ROWS["dense as tt"], {}, "small")
    wanted = intent.size_of_row(spec, 77)
    width = intent.width_of_size(spec["layers"], 77, wanted)
    found = intent.count_parameters(intent.on_meta({**spec, "width": width}, 77))
    assert abs(found / wanted - 1.0) < 0.1
    assert intent.size_of_row({**spec, "as_large_as": "tt 0.2"}, 77) < 0.5 * wanted


def test_sparse_and_diagonal_residuals_start_at_zero_and_are_trained() -> None:
    import intent_accuracy as intent

    def model(**changes: Any) -> torch.nn.Module:
        torch.manual_seed(0)
        spec = intent.make_spec({**intent.TT, **changes}, {}, "tiny")
        built: torch.nn.Module = intent.build_model(spec, 5).eval()
        return built

    ids = torch.randint(1, 50, (3, 8))
    plain, changed = model(), model(sparse=0.03, diagonal=True)
    changed.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(intent.predict(changed, ids), intent.predict(plain, ids))
    intent.predict(changed, ids).square().sum().backward()
    grads = [param.grad for name, param in changed.named_parameters() if name.endswith(("sparse", "diagonal"))]
    assert len(grads) > 10
    assert all(grad is not None and bool(grad.any()) for grad in grads)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["tt", "target 0.5, fixed gates", "muon with current norms", "init by spectrum", "sparse residual"]
)
def test_variant_learns(name: str, data_folder: Path) -> None:
    import intent_accuracy as intent

    rates = {"lr": 4e-3, "layers_ratio": 1 / 3, "embedding_ratio": 1.0}
    spec = intent.make_spec(intent.variant_settings(name), rates, "tiny", data="banking77", dev=True, seed=0, steps=200)
    line = intent.run_training(spec)
    assert line["curve"][-1] < line["curve"][0] - 0.3
    assert len(line["right"]) == 2 * (971 // 8 + 1)
