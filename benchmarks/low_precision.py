"""Measure the speed of low-precision layers, forward and backward, as ratios to the same layer at full precision.

    python benchmarks/low_precision.py                       4096 x 4096 on this CPU: the cost of simulation
    python benchmarks/low_precision.py --device cuda         the gain of products in int8 and fp8 on a GPU

Every contender is compiled, master weights are bf16, and all take turns in random order. A ratio is the median over the
rounds of the contender's time over the time of the unquantized layer in the same round. A CPU without bf16 instructions
multiplies bf16 tens of times slower than fp32, so any ratio would look good; use `--dtype float32` there.

`simulated` rounds weights by channel and activations by tensor or by token. `products` multiplies in int8 or fp8; the
backward pass is in bf16 or, with `all three`, in int8 or fp8 too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from dated import dated, write
from interleaved import ratio, take_turns
from optim_gpu import time_in_turns
from torch import nn

import scantling as sc

WHOLE = "nothing rounded"
INT8, FP8 = ({"format": name, "granularity": "tensor"} for name in ("int8", "fp8_e4m3"))
FORMATS: dict[str, dict[str, Any]] = {
    WHOLE: {},
    "simulated int8": {"weights": "int8", "activations": INT8},
    "simulated int8, by token": {"weights": "int8", "activations": "int8"},
    "simulated int4, groups of 128": {"weights": {"format": "int4", "group_size": 128}, "activations": INT8},
    "simulated fp8": {"weights": "fp8_e4m3", "activations": FP8},
    "simulated int8, all three": {"weights": "int8", "activations": INT8, "gradients": INT8},
    "products int8": {"weights": "int8", "activations": INT8, "compute": "int8"},
    "products int8, by token": {"weights": "int8", "activations": "int8", "compute": "int8"},
    "products int8, all three": {"weights": "int8", "activations": INT8, "gradients": "int8", "compute": "int8"},
    "products fp8": {"weights": "fp8_e4m3", "activations": FP8, "compute": "fp8"},
    "products fp8, all three": {
        "weights": "fp8_e4m3",
        "activations": FP8,
        "gradients": "fp8_e5m2",
        "compute": "fp8",
    },
}
ON_CPU = tuple(name for name in FORMATS if not name.startswith("products fp8"))
AIM = 2.0
"""Largest time ratio of the simulated forms, at 4096 x 4096 on a CPU."""


def forward_backward(layer: nn.Module, x: torch.Tensor, *, compiled: bool) -> Callable[[], object]:
    """Return a callable that runs a forward and a backward pass and discards the gradients."""
    torch._dynamo.config.recompile_limit = 64  # all contenders share one forward
    model = torch.compile(layer) if compiled else layer
    upstream = torch.randn_like(model(x))

    def run() -> object:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        model(x).backward(upstream)
        return x.grad

    return run


def measure(kind: str, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of one kind of layer and number of tokens."""
    size, device, dtype = options.size, options.device, getattr(torch, options.dtype)
    torch._dynamo.reset()
    work: dict[str, Callable[[], object]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in FORMATS if device == "cuda" else ON_CPU:
        torch.manual_seed(0)
        layer: nn.Module = nn.Linear(size, size) if kind == "dense" else sc.TTLinear(size, size, options.rank)
        model = nn.Sequential(layer).to(device, dtype)
        x = torch.randn(tokens, size, device=device, dtype=dtype, requires_grad=True)
        rows[name] = {}
        try:
            if FORMATS[name]:
                sc.quantize_training(model, **FORMATS[name])
            run = forward_backward(model, x, compiled=not options.eager)
            run()
        except Exception as error:  # missing hardware support is a result too
            rows[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            continue
        work[name] = run
    times = (
        time_in_turns(work, options.rounds, device) if device == "cuda" else take_turns(work, options.rounds, warmup=1)
    )
    for name, own in times.items():
        rows[name] = ratio(own, times[WHOLE])
        low, high = rows[name]["ratio_95"]
        told = f"{rows[name]['ratio']:6.2f} [{low:.2f}, {high:.2f}] times as long"
        print(f"  {kind:6} {tokens:6} tokens  {name:32} {told}", flush=True)
    return rows


def measure_all(options: argparse.Namespace) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield all results so far, after each kind of layer and number of tokens."""
    found = {}
    for kind in options.kinds:
        for tokens in options.tokens or ((512,) if options.device == "cpu" else (4096, 16384)):
            found[f"{kind}, {tokens} tokens"] = measure(kind, tokens, options)
            yield found


def missing_the_aim(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the simulated forms of dense layers that are slower than the aim."""
    return [
        f"{what}: {name}"
        for what, rows in found.items()
        for name, row in rows.items()
        if what.startswith("dense") and name.startswith("simulated") and row.get("ratio", 0.0) > AIM
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of weights and inputs")
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=64, help="of the TT layers")
    parser.add_argument("--tokens", type=int, nargs="*", help="default: 512 on a CPU, 4096 and 16384 on a GPU")
    parser.add_argument("--kinds", nargs="*", choices=["dense", "cores"], default=["dense", "cores"])
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    missed: list[str] = []
    for found in measure_all(options):
        missed = missing_the_aim(found)
        settings = {"size": options.size, "rank": options.rank, "dtype": options.dtype, "aim": AIM, "missed": missed}
        print(write(dated(__file__, settings=settings, results=found), f"low-precision-{options.device}", options.out))
    print(f"simulated, at most {AIM:g} times as long: " + (f"MISSED by {', '.join(missed)}" if missed else "met"))
    return 1 if missed and options.device == "cpu" else 0


if __name__ == "__main__":
    sys.exit(main())
