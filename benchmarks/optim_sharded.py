"""Check which optimizers step FSDP2-sharded parameters as they step unsharded ones, and which raise.

    python benchmarks/optim_sharded.py        (gloo on CPUs; reports missing packages; some minutes)

`fully_shard` shards a small network, whose sides do not divide evenly, over 2 and over 3 ranks. It takes a few steps
with given gradients; one process takes the same steps with unsharded parameters. The report has two maxima over the
parameters: the largest difference of an element over the parameter's root mean square, and the norm of the difference
over the parameter's norm. If an optimizer raises, the report has the first line of its error. With 8-bit codes, the
last bit of a sum sometimes moves a code by one step. The exit code is 1 if CAME raises, or if it differs in fp32 by
over 2e-6 anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from dated import dated, write
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh

from scantling.errors import first_line
from scantling.groups import param_groups
from scantling.optim import CAME

Row = dict[str, Any]
Make = Callable[[nn.Module], torch.optim.Optimizer]

STEPS = 5
WORLDS = (2, 3)
LR = 1e-2
LIMIT = 2e-6
"""Limit for CAME in fp32, where only the order of sums differs from one device."""
HELD_TO_LIMIT = "CAME fp32"


def _came(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return CAME(param_groups(net, weight_decay=0.1), lr=LR, betas=(0.9, 0.95, 0.995), debias=True, **options)


def _torch(net: nn.Module, *, name: str, **options: Any) -> torch.optim.Optimizer:
    params = [param for param in net.parameters() if param.ndim == 2 or name != "Muon"]  # Muon refuses vectors
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(params, lr=LR, **options)
    return optimizer


def _came_pytorch(net: nn.Module) -> torch.optim.Optimizer:
    from came_pytorch import CAME as Published

    optimizer: torch.optim.Optimizer = Published(net.parameters(), lr=LR)
    return optimizer


def _pytorch_optimizer(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    from pytorch_optimizer import CAME as Other

    optimizer: torch.optim.Optimizer = Other(net.parameters(), lr=LR, **options)
    return optimizer


OPTIMIZERS: dict[str, Make] = {
    HELD_TO_LIMIT: _came,
    "CAME int8": partial(_came, momentum="int8"),
    "torch AdamW": partial(_torch, name="AdamW"),
    "torch Adafactor": partial(_torch, name="Adafactor", foreach=False),
    "torch Adafactor foreach": partial(_torch, name="Adafactor", foreach=True),
    "torch Muon, matrices only": partial(_torch, name="Muon"),
    "came-pytorch": _came_pytorch,
    "pytorch_optimizer CAME": partial(_pytorch_optimizer, foreach=False),
    "pytorch_optimizer CAME foreach": partial(_pytorch_optimizer, foreach=True),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(101, 64), nn.Linear(64, 133), nn.LayerNorm(133), nn.Linear(133, 50))


def gradient(shape: torch.Size, step: int, index: int) -> Tensor:
    """Return a gradient whose rows and columns differ in magnitude, so that a mean over the wrong part shows."""
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + index))
    for dim, size in enumerate(shape):
        grad *= torch.logspace(-1, 1, size).view([-1 if d == dim else 1 for d in range(len(shape))])
    return grad


def run_steps(make: Make, net: nn.Module) -> list[Tensor]:
    """Take `STEPS` steps and return the unsharded parameters."""
    optimizer = make(net)
    for number in range(STEPS):
        for index, param in enumerate(net.parameters()):
            grad = gradient(param.shape, number, index)
            if isinstance(param, DTensor):
                grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
            param.grad = grad
        optimizer.step()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in net.parameters()]


def differences(sharded: list[Tensor], whole: list[Tensor]) -> Row:
    """Return the largest element difference over a parameter's RMS, and the largest relative difference in norm."""
    errors = [(a - b, b) for a, b in zip(sharded, whole, strict=True)]
    return {
        "difference": max(float(error.abs().max() / b.square().mean().sqrt()) for error, b in errors),
        "norm_difference": max(float(error.norm() / b.norm()) for error, b in errors),
    }


def _rank(rank: int, world: int, folder: str, name: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    net = network()
    mesh = init_device_mesh("cpu", (world,))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    try:
        result = differences(run_steps(OPTIMIZERS[name], net), run_steps(OPTIMIZERS[name], network()))
    except Exception as error:  # any error that an optimizer raises here is its result
        result = {"error": f"{type(error).__name__}: {first_line(error)}"}
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # a gloo thread can abort while the interpreter shuts down, after all work is done (PyTorch 2.13)


def run_sharded(name: str, world: int, *, seconds: float = 300) -> Row:
    """Run an optimizer in several processes; return the largest `differences` over all ranks, or `error`."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        ranks = [context.Process(target=_rank, args=(rank, world, folder, name)) for rank in range(world)]
        for process in ranks:
            process.start()
        end = time.monotonic() + seconds
        for process in ranks:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    for result in found:
        if "error" in result:
            return {"error": result["error"]}
    if len(found) < world:
        codes = [process.exitcode for process in ranks]
        return {"error": f"only {len(found)} of {world} ranks came to an end (exit codes {codes})"}
    return {key: max(result[key] for result in found) for key in found[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    rows = []
    print(f"difference to one device after {STEPS} steps: of any element over the root mean square, of the norm")
    for name in OPTIMIZERS:
        for world in WORLDS:
            row = {"optimizer": name, "ranks": world, **run_sharded(name, world)}
            rows.append(row)
            known = "difference" in row
            text = f"{row['difference']:.1e}  {row['norm_difference']:.1e}" if known else row["error"]
            print(f"{name:32} {world} ranks  {text}", flush=True)
    shapes = [list(param.shape) for param in network().parameters()]
    report = dated(__file__, steps=STEPS, lr=LR, shapes=shapes, limit=LIMIT, results=rows)
    print(write(report, "optim-sharded", options.out))
    ours = [row for row in rows if row["optimizer"].startswith("CAME ")]
    exact = all(row.get("difference", 1.0) <= LIMIT for row in ours if row["optimizer"] == HELD_TO_LIMIT)
    return 0 if exact and all("difference" in row for row in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
