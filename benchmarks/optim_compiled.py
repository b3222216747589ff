"""Measure a `torch.compile`d CAME step on a CPU against the C step, as ratios to fused AdamW.

    python benchmarks/optim_compiled.py

The compiled step calls the stage functions of `scantling.optim.stages` on whole tensors, one compiled function for each
shape, which Inductor fuses into C++ loops. It would replace the C step if it took at most 2.5 times fused AdamW.
All contenders hold copies of the same parameters and take turns on one thread; results are medians over the rounds of
(own step / fused AdamW's step of the same round), with 95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from dated import dated, write
from interleaved import ratio, take_turns
from optim_step import SHAPES as SMALL_LLAMA
from torch import Tensor, nn

import scantling as sc
from scantling.optim.stages import (
    add_means,
    apply_update,
    begin_mean,
    bias_correction,
    clip_factor,
    inverse_root,
    square_sum,
    squared,
    update_momentum,
    whiten,
)
from scantling.optim.state import matrix_view

LR, WEIGHT_DECAY, EPS = 1e-4, 0.1, (1e-30, 1e-16)
BETAS = (0.9, 0.95, 0.995)
CASES = {
    "4 x (1024, 1024)": [(1024, 1024)] * 4,
    "4 x (256, 256)": [(256, 256)] * 4,
    "4 x (4096, 512)": [(4096, 512)] * 4,
    "2 x (512, 4096)": [(512, 4096)] * 2,
    "small Llama": SMALL_LLAMA,
}
CONTROL = "AdamW fused"


def step_matrix(param: Tensor, grad: Tensor, m: Tensor, step: Tensor, *factors: Tensor) -> None:
    """Take the debiased step of a matrix (R, C) with `stages.py` on whole tensors."""
    row, col, res_row, res_col = factors  # (R, 1), (1, C), (R, 1), (1, C)
    (beta1, beta2, beta3), dims, dtype = BETAS, ((0,), (1,)), param.dtype
    num_rows, num_cols = param.shape
    step.add_(1.0)
    for average in (row, col):
        begin_mean(average, beta2, EPS[0])
    weights = (1.0 - beta2) / num_cols, (1.0 - beta2) / num_rows
    add_means(squared(grad, dtype, max(num_rows, num_cols)), row, col, dims, weights)
    a, b = inverse_root(row, col, row.mean(dim=0, keepdim=True))
    b.mul_(bias_correction(step, beta2, dtype).sqrt_())
    a.mul_(clip_factor(square_sum(whiten(grad, a, b)), param.numel(), 1.0))
    for average in (res_row, res_col):
        begin_mean(average, beta3, EPS[1])
    weight = beta1**2 * (1.0 - beta3)
    difference = update_momentum(m, whiten(grad, a, b), beta1)
    add_means(difference.square(), res_row, res_col, dims, (weight / num_cols, weight / num_rows))
    a, b = inverse_root(res_row, res_col, res_row.mean(dim=0, keepdim=True))
    scale = -LR * bias_correction(step, beta3, dtype).sqrt_() / bias_correction(step, beta1, dtype)
    apply_update(param, m * (a * scale), b, torch.full_like(step, -LR * WEIGHT_DECAY))


def step_vector(param: Tensor, grad: Tensor, m: Tensor, step: Tensor, v: Tensor) -> None:
    """Take the debiased step of a parameter with a full second moment."""
    (beta1, beta2, _), dtype = BETAS, param.dtype
    step.add_(1.0)
    begin_mean(v, beta2, EPS[0])
    v.add_(squared(grad, dtype), alpha=1.0 - beta2)
    correction = bias_correction(step, beta2, dtype)
    u = v.rsqrt() * grad
    clip = clip_factor(square_sum(u) * correction, param.numel(), 1.0) * correction.sqrt()
    update_momentum(m, u * clip, beta1)
    apply_update(param, m, -LR / bias_correction(step, beta1, dtype), torch.full_like(step, -LR * WEIGHT_DECAY))


def make_params(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator) / 20) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    return params


def compiled_step(params: list[nn.Parameter]) -> Callable[[], None]:
    """Return a function that steps all parameters with compiled stage functions."""
    matrix, vector = (torch.compile(each, dynamic=False) for each in (step_matrix, step_vector))
    arguments = []
    for param in params:
        value, counter = param.detach(), torch.zeros(())
        state = [torch.zeros_like(value), counter]
        if matrix_view(tuple(param.shape)) is None:
            state.append(torch.zeros_like(value))
        else:
            rows, cols = param.shape
            state += [torch.zeros(size) for size in ((rows, 1), (1, cols), (rows, 1), (1, cols))]
        arguments.append((vector if len(state) == 3 else matrix, (value, param.grad, *state)))

    @torch.no_grad()
    def step() -> None:
        for function, tensors in arguments:
            function(*tensors)

    return step


def max_difference(params: list[nn.Parameter], others: list[nn.Parameter]) -> float:
    """Return the largest difference between two copies of the parameters, relative to lr."""
    return max(float((a - b).detach().abs().max()) for a, b in zip(params, others, strict=True)) / LR


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    came = {"lr": LR, "betas": BETAS, "eps": EPS, "debias": True, "weight_decay": WEIGHT_DECAY}
    results = {}
    for case, shapes in CASES.items():
        copies = {name: make_params(shapes) for name in (CONTROL, "AdamW fused again", "CAME C", "CAME compiled")}
        work = {name: torch.optim.AdamW(copies[name], lr=LR, fused=True).step for name in list(copies)[:2]}
        work["CAME C"] = sc.CAME(copies["CAME C"], **came).step
        work["CAME compiled"] = compiled_step(copies["CAME compiled"])
        for _ in range(2):
            work["CAME C"]()
            work["CAME compiled"]()
        difference = max_difference(copies["CAME C"], copies["CAME compiled"])
        times = take_turns(work, options.rounds)
        rows = {name: ratio(own, times[CONTROL]) for name, own in times.items()}
        results[case] = {"difference_after_2_steps_in_lr": difference, **rows}
        for name, row in rows.items():
            print(f"{case:18} {name:20} {row['ratio']:6.2f}x  [{row['ratio_95'][0]:.2f}, {row['ratio_95'][1]:.2f}]")
        print(f"{case:18} difference of the two CAME steps {difference:.1e} lr", flush=True)
    print(write(dated(__file__, control=CONTROL, limit=2.5, results=results), "optim-compiled-cpu", options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
