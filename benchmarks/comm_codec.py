"""Measure the codec: the batched exchange of one process against the plain reference, which goes block by block.

    python benchmarks/comm_codec.py               (results/comm-codec-cpu-DATE.json)

The parameters are the matrices of llama-10m. With one process nothing travels: accumulate, transform, select, quantize,
pack, check, unpack, decode, subtract. Times are ratios to the plain reference in the same round, and milliseconds per
million parameters for a sense of scale.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from comm_reference import plain_exchange
from dated import dated, write
from interleaved import ratio, take_turns
from transformers import LlamaConfig, LlamaForCausalLM

import scantling as sc
from scantling.trainer.models.presets import PRESETS


def matrices() -> list[torch.nn.Parameter]:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{**PRESETS["llama-10m"].config, "vocab_size": 320}))
    groups = sc.param_groups(model)
    shapes = [param.shape for group in groups if group["role"] == "matrix" for _, param in group["params"]]
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]


def batched(params: list[torch.nn.Parameter], gradients: list[torch.Tensor], topk: int) -> Callable[[], None]:
    exchange = sc.MomentumExchange(params, topk=topk, values="fp32", check_every=None)

    def run() -> None:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        exchange.exchange()

    return run


def plain(params: list[torch.nn.Parameter], gradients: list[torch.Tensor], topk: int) -> Callable[[], None]:
    residuals = [torch.zeros_like(param) for param in params]

    def run() -> None:
        for residual, gradient in zip(residuals, gradients, strict=True):
            plain_exchange([residual.data], [gradient], decay=0.95, topk=topk, chunk=64)

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--topk", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    params = matrices()
    million = sum(param.numel() for param in params) / 1e6
    gradients = [torch.randn(param.shape) for param in params]
    rows = {}
    for topk in options.topk:
        work = {
            "plain": plain(params, gradients, topk),
            "batched": batched(params, gradients, topk),
        }
        with torch.no_grad():
            times = take_turns(work, options.rounds, warmup=1)
        rows[str(topk)] = {name: ratio(own, times["plain"]) for name, own in times.items()}
        for name, row in rows[str(topk)].items():
            low, high = row["ratio_95"]
            each = 1e3 * float(np.median(row["raw_s"])) / million
            print(f"k {topk:3} {name:8} {row['ratio']:6.3f} of plain [{low:.3f}, {high:.3f}], {each:6.1f} ms a million")
    report = dated(__file__, threads=options.threads, million_numbers=million, results=rows)
    print(write(report, "comm-codec-cpu", options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
