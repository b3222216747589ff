"""MovieLens as click data: nothing comes from dev and test rows, and contenders have their sizes."""

from __future__ import annotations

import numpy as np
import pytest


def test_split_by_time_per_user() -> None:
    from movielens import split

    users = np.repeat([7, 3], [20, 10])
    seconds = np.concatenate([np.arange(20)[::-1], np.arange(10) + 1000])
    part = split(users, np.zeros(30), seconds)
    assert part[:20].tolist() == [2, 2, 1, 1] + [0] * 16
    assert part[20:].tolist() == [0] * 8 + [1, 2]


@pytest.mark.parametrize(
    ("order", "expected"),
    [("frequency", [1, 1, 1, 2, 2, 0, 0, 1, 0]), ("rating", [2, 2, 2, 1, 1, 0, 0, 2, 0])],
)
def test_ids_come_from_training_rows(order: str, expected: list[int]) -> None:
    from movielens import number

    values = np.array(list("aaabbcdad"))
    is_train = np.array([True] * 6 + [False] * 3)
    residuals = np.array([-0.5, -0.5, 0.5, 0.5, 0.5, 0.5, 9.0, 99.0, 9.0])
    ids, size = number(values, is_train, residuals, order)
    assert (ids.tolist(), size) == (expected, 3)


@pytest.mark.parametrize("kind", ["tt", "tt-gates", "tt-adapter", "hash", "qr"])
@pytest.mark.parametrize("order", ["key", "rating"])
def test_tables_keep_to_their_budget(kind: str, order: str) -> None:
    import torch
    from movielens import build

    spec = {"kind": kind, "budget": 3951, "dim": 16, "modes": 2, "order": order}
    model, adapter = build(spec, (611, 4771, 730), 27)
    numel = sum(param.numel() for param in model.tables.parameters())
    if kind == "tt-adapter":
        assert adapter is not None
        assert adapter.target <= 3951
        assert 20_000 < adapter.num_parameters() <= 39_510
    else:
        gates = 0 if adapter is None else numel - adapter.num_parameters()
        assert 0.8 * 3951 < numel - gates <= 3951
    ids = torch.tensor([[0, 0, 0], [610, 4770, 729]])
    assert model(torch.zeros(2, 27), ids).logits.shape == (2,)


def test_sweep_follows_the_best_value() -> None:
    from dlrm_movielens import START, run_spec, tuned
    from resumable import spec_key

    lines: dict[str, dict[str, float]] = {}
    name = "dense"
    while (spec := tuned(lines, name)[1]) is not None:
        lines[spec_key(spec)] = {"dev_auc": -abs(spec["lr"] - 6e-3) - abs(spec["penalty"] - 0.1)}
    settings, _ = tuned(lines, name)
    assert settings == {**START, "dim": 64, "lr": 6e-3, "penalty": 0.1, "table_rate": 0.3}
    assert len(lines) <= 25
    assert spec_key(run_spec(name, settings, 0)) in lines
