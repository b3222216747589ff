"""Measure one optimizer step on a CPU: CAME and existing optimizers, as ratios to fused AdamW.

    python benchmarks/optim_step.py            (reports peers that are not installed)

All optimizers hold copies of the same parameters (the matrices and norms of a small Llama). They take turns, one step
each, rounds in random order, so a disturbance of the machine hits all equally. Results are medians over the rounds of
(own step / fused AdamW's step of the same round) with their 95 % bootstrap interval; the file also has the raw times. A
second run of the control shows the resolution of this machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from dated import dated, write
from interleaved import ratio, take_turns

import scantling as sc

LAYER = [(512, 512)] * 4 + [(1408, 512), (1408, 512), (512, 1408), (512,), (512,)]
SHAPES = [(8192, 512), *LAYER * 4, (512,)]
CONTROL = "AdamW fused"

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def peers() -> tuple[dict[str, tuple[Make, torch.dtype]], list[str]]:
    """Return optimizers by name with the dtype of their parameters, and the missing packages."""
    fp32, bf16 = torch.float32, torch.bfloat16
    adamw, came = torch.optim.AdamW, sc.CAME
    options: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95, 0.995), "debias": True, "weight_decay": 0.1}
    found: dict[str, tuple[Make, torch.dtype]] = {
        CONTROL: (lambda p: adamw(p, lr=1e-4, fused=True), fp32),
        "AdamW fused again": (lambda p: adamw(p, lr=1e-4, fused=True), fp32),
        "AdamW foreach": (lambda p: adamw(p, lr=1e-4, foreach=True), fp32),
        "Adafactor foreach": (lambda p: torch.optim.Adafactor(p, lr=1e-4, foreach=True), fp32),
        "CAME fp32": (lambda p: came(p, **options), fp32),
        "CAME bf16": (lambda p: came(p, momentum="bf16", **options), fp32),
        "CAME int8": (lambda p: came(p, momentum="int8", **options), fp32),
        "CAME int4": (lambda p: came(p, momentum="int4", **options), fp32),
        "CAME fp32, operations": (lambda p: came(p, foreach=False, **options), fp32),
        "AdamW fused, bf16 weights": (lambda p: adamw(p, lr=1e-4, fused=True), bf16),
        "CAME int8, bf16 weights, stochastic": (
            lambda p: came(p, momentum="int8", rounding="stochastic", **options),
            bf16,
        ),
        "CAME int4, bf16 weights, stochastic": (
            lambda p: came(p, momentum="int4", rounding="stochastic", **options),
            bf16,
        ),
    }
    missing = []
    try:
        from came_pytorch import CAME as Published

        found["came-pytorch"] = (lambda p: Published(p, lr=1e-4), fp32)
    except ImportError:
        missing.append("came-pytorch")
    try:
        import pytorch_optimizer

        found["pytorch_optimizer CAME"] = (lambda p: pytorch_optimizer.CAME(p, lr=1e-4), fp32)
    except ImportError:
        missing.append("pytorch_optimizer")
    return found, missing


def prepare_optimizer(make: Make, dtype: torch.dtype) -> torch.optim.Optimizer:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter((torch.randn(s, generator=generator) / 20).to(dtype)) for s in SHAPES]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(dtype)
    return make(params)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found, missing = peers()
    optimizers = {name: prepare_optimizer(*peer) for name, peer in found.items()}
    times = take_turns({name: optimizer.step for name, optimizer in optimizers.items()}, options.rounds)
    rows = {name: ratio(own, times[CONTROL]) for name, own in times.items()}
    for name, row in rows.items():
        print(f"{name:38} {row['ratio']:6.2f}x  [{row['ratio_95'][0]:.2f}, {row['ratio_95'][1]:.2f}]")
    numbers = sum(torch.Size(shape).numel() for shape in SHAPES)
    report = dated(__file__, parameters=numbers, shapes=SHAPES, control=CONTROL, missing=missing, results=rows)
    print(f"missing: {', '.join(missing) or 'nothing'}")
    print(write(report, "optim-step-cpu", options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
