"""Measure the CPU speed of TT layers, forward and backward, against dense and plain low-rank layers.

    python benchmarks/tensor_layers.py layers     TTLinear, nn.Linear and two thin matrices, in fp32 and bf16
    python benchmarks/tensor_layers.py grid       60 cases: the chosen contraction order against the known orders
    python benchmarks/tensor_layers.py lookup     a table of 10 million rows

All contenders of a case take turns (`interleaved.py`). A speed-up is the dense layer's time over the layer's own time
in the same round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from dated import dated, write
from interleaved import ratio, take_turns
from torch import Tensor, nn

import scantling as sc
from scantling.tensor.contraction import Chain, Step, best_plan, contract, make_plan, make_steps, merge_block
from scantling.trainer.training.meters import MemoryMeter

LAYERS = [((768, 768), 30), ((768, 3072), 30), ((4096, 4096), 64)]
TOKENS = (32, 512, 4096)
GRID_SHAPES = [(768, 768), (768, 3072), (3072, 768), (1024, 4096), (2048, 2048)]
GRID_RANKS = (8, 30, 64)
GRID_TOKENS = (1, 32, 256, 2048)
AIMS = {
    ("768x3072", 4096, "float32"): 6.0,
    ("4096x4096", 512, "float32"): 15.0,
    **{(shape, 32, "float32"): 1.0 for shape in ("768x768", "768x3072", "4096x4096")},
    ("768x768", 32, "bfloat16"): 1 / 1.25,
}


def forward_backward(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """Return a callable that runs a forward and a backward pass and discards the gradients."""
    wanted = torch.randn_like(model(x))

    def run() -> None:
        x.grad = None
        model.zero_grad(set_to_none=True)
        model(x).backward(wanted)

    return run


def layers(rounds: int) -> dict[str, Any]:
    """Return the times for each layer, number of tokens and dtype."""
    rows = {}
    for ((inputs, outputs), rank), dtype, tokens in product(LAYERS, (torch.float32, torch.bfloat16), TOKENS):
        torch.manual_seed(0)
        x = torch.randn(tokens, inputs, dtype=dtype, requires_grad=True)
        low_rank = nn.Sequential(nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs)).to(dtype)
        cores = sc.TTLinear(inputs, outputs, rank, dtype=dtype)
        dense = nn.Linear(inputs, outputs, dtype=dtype)
        work = {
            name: forward_backward(layer, x)
            for name, layer in (("dense", dense), ("low rank", low_rank), ("cores", cores))
        }
        work["dense again"] = forward_backward(nn.Linear(inputs, outputs, dtype=dtype), x)
        times = take_turns(work, rounds, least_s=0.02)
        name = str(dtype).removeprefix("torch.")
        key = f"{inputs}x{outputs} rank {rank}, {tokens} tokens, {name}"
        rows[key] = {
            "parameters": {"dense": inputs * outputs, "cores": cores.num_parameters() - outputs},
            "plan": str(cores.plan(tokens)),
            **{one: ratio(times["dense"], own) for one, own in times.items()},
        }
        aim = AIMS.get((f"{inputs}x{outputs}", tokens, name))
        faster = {one: rows[key][one]["ratio"] for one in ("cores", "low rank", "dense again")}
        verdict = "" if aim is None else f"   aim {aim:g}: {'met' if faster['cores'] >= aim else 'MISSED'}"
        print(f"{key:46} " + "  ".join(f"{one} {value:6.2f}x" for one, value in faster.items()) + verdict, flush=True)
    return rows


class InOrder(nn.Module):
    """TT layer contracted in a given order."""

    def __init__(self, layer: sc.TTLinear, steps: tuple[Step, ...]) -> None:
        super().__init__()
        self.cores, self.steps, self.outputs = layer.cores, steps, layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        cores = list(self.cores)
        return contract(x, [merge_block(cores, step.tree) for step in self.steps], self.steps, self.outputs)


def known_orders(chain: Chain) -> dict[str, tuple[Step, ...]]:
    """Return the three well-known contraction orders."""
    cores, middle = len(chain.modes), chain.num_inputs
    return {
        "merged": make_steps(chain, [middle]),
        "one by one": make_steps(chain, range(1, cores)),
        "whole": make_steps(chain, []),
    }


def grid(rounds: int) -> dict[str, Any]:
    """Return FLOPs and times of the chosen order, relative to the best known order and to a dense layer.

    `layer` has the gain and the checks of a TT layer, which take longer than the products of one token.
    """
    rows = {}
    worst_flops, worst_time = 0.0, 0.0
    for (inputs, outputs), rank, tokens in product(GRID_SHAPES, GRID_RANKS, GRID_TOKENS):
        torch.manual_seed(0)
        layer = sc.TTLinear(inputs, outputs, rank, bias=False)
        chain = layer.network
        known = known_orders(chain)
        chosen = best_plan(chain, tokens)
        macs = {name: make_plan(chain, tokens, steps).macs for name, steps in known.items()}
        macs["dense"] = tokens * inputs * outputs
        x = torch.randn(tokens, inputs, requires_grad=True)
        work = {name: forward_backward(InOrder(layer, steps), x) for name, steps in known.items()}
        work |= {
            "dense": forward_backward(nn.Linear(inputs, outputs, bias=False), x),
            "chosen": forward_backward(InOrder(layer, chosen.steps), x),
            "layer": forward_backward(layer, x),
        }
        times = take_turns(work, rounds, warmup=1, least_s=0.01)
        found = {name: ratio(own, times["dense"]) for name, own in times.items()}
        best = min(known, key=lambda name: found[name]["ratio"])
        against = ratio(times["chosen"], times[best])
        flops = chosen.macs / min(macs.values())
        worst_flops, worst_time = max(worst_flops, flops), max(worst_time, against["ratio"])
        key = f"{inputs}x{outputs} rank {rank}, {tokens} tokens"
        rows[key] = {"macs": {**macs, "chosen": chosen.macs}, "best": best, "over_best": against, **found}
        slower = f"  {found['layer']['ratio']:.2f} of a dense layer" if found["layer"]["ratio"] > 1.0 else ""
        print(f"{key:34} FLOPs {flops:5.3f}  time {against['ratio']:5.2f} of {best}{slower}", flush=True)
    verdict = "met" if worst_flops <= 1.05 and worst_time <= 1.25 else "MISSED"
    print(
        f"the most over the best: {worst_flops:.3f} in FLOPs, {worst_time:.2f} in time; aims 1.05 and 1.25: {verdict}"
    )
    return rows


def lookup(rounds: int) -> dict[str, Any]:
    """Measure a table of ten million rows: parameters, indices, memory of a step, and the gain of deduplicating ids.

    Ids are drawn from two power laws: one gives nearly all distinct ids, the other few.
    """
    torch.manual_seed(0)
    table = sc.TTMEmbedding(10_000_000, 64, rank=32)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    draws = {power: (torch.rand(10_000) ** power * 10_000_000).long() for power in (4, 32)}
    ids = draws[4]
    meter = MemoryMeter(torch.device("cpu"))
    for _ in range(3):
        table(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    held = meter.peak_bytes() - meter.base_bytes

    upstream = torch.randn(10_000, 64)
    work: dict[str, Callable[[], object]] = {}
    for power, drawn in draws.items():
        work[f"distinct {power}"] = lambda drawn=drawn: table(drawn).backward(upstream)  # type: ignore[misc]
        work[f"every id {power}"] = lambda drawn=drawn: table.rows(drawn).backward(upstream)  # type: ignore[misc]
    times = take_turns(work, rounds)
    row = {
        "numbers": table.num_parameters(),
        "index_bytes": sum(buffer.nbytes for buffer in table.buffers()),
        "step_bytes": held,
        "times_over_every_id": {
            f"{int(drawn.unique().numel())} distinct": ratio(times[f"distinct {power}"], times[f"every id {power}"])
            for power, drawn in draws.items()
        },
    }
    print({key: value for key, value in row.items() if key != "times_over_every_id"})
    for what, found in row["times_over_every_id"].items():
        print(f"{what}: {found['ratio']:.2f} {found['ratio_95']} times as long as every id by itself")
    return {"10,000,000 x 64, rank 32, 10,000 ids": row}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=["layers", "grid", "lookup"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = {"layers": layers, "grid": grid, "lookup": lookup}[options.phase](options.rounds)
    report = dated(__file__, threads=options.threads, results=rows)
    print(write(report, f"tensor-{options.phase}-cpu", options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
