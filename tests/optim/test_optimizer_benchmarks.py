"""Tests that the benchmarks count every byte of an optimizer and detect steps that differ."""

from __future__ import annotations

from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.processes import server

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_bytes_count_all_storages() -> None:
    from contenders import CONTENDERS, held_bytes
    from optim_bytes import check_aims, count_bytes, llama_specs

    specs = llama_specs(1, 1024, sides=16)
    found: dict[str, Any] = {}
    for contender in CONTENDERS:
        if contender.name in ("CAME int8", "CAME int4", "torch AdamW", "torch Adafactor", "SCALE-like"):
            real, meta = (count_bytes(contender, specs, "bf16", device) for device in ("cpu", "meta"))
            assert real["state_bytes"] == meta["state_bytes"], contender.name
            found[contender.name] = real["bytes_per_parameter"]
    assert found["torch AdamW"] == pytest.approx(4.0, abs=1e-3)
    # codes and 2-byte scales per block; the rest are factors of sides of 64 to 896
    assert 1 + 2 / 128 < found["CAME int8"] < 1.1
    assert 0.5 + 2 / 64 < found["CAME int4"] < 0.6
    numel = sum(prod(spec.shape) for spec in specs)
    momentum_of_head, adam_of_norms = 2 * 64 * 256, 2 * 2 * 3 * 256
    assert found["SCALE-like"] * numel == pytest.approx(momentum_of_head + adam_of_norms)

    params = [torch.nn.Parameter(torch.ones(10))]
    optimizer = torch.optim.SGD(params)
    shared = torch.zeros(8)
    optimizer.state[params[0]] = {"projector": SimpleNamespace(matrix=shared, own=params[0]), "again": [shared[:2]]}
    assert held_bytes(optimizer) == 32
    assert not any(aim["met"] for aim in check_aims([], []))


@pytest.mark.dist
def test_sharded_benchmark_compares_with_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import optim_sharded
    from optim_sharded import HELD_TO_LIMIT, LIMIT, OPTIMIZERS, differences, network, run_sharded, run_steps

    monkeypatch.setattr(optim_sharded, "mp", SimpleNamespace(get_context=lambda _: server()))
    assert run_sharded(HELD_TO_LIMIT, 2)["difference"] <= LIMIT
    start = [param.detach().clone() for param in network().parameters()]
    moved = run_steps(OPTIMIZERS[HELD_TO_LIMIT], network())
    assert differences(moved, start)["difference"] > 0.1
    assert differences(moved, moved) == {"difference": 0.0, "norm_difference": 0.0}
