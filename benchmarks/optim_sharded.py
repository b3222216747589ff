"""Which optimizers step parameters sharded by FSDP2 as they step whole ones, and which only raise.

    python benchmarks/optim_sharded.py        (gloo on CPUs; packages that are missing are named; some minutes)

A small network with sides that do not divide evenly is sharded by `fully_shard` over 2 and over 3 ranks, and takes a
few steps with given gradients; one process takes the same steps with whole parameters. Reported is, of the parameter
where it is largest, the difference of any one element over the parameter's root mean square, and the norm of the
difference over the parameter's norm; or the first line of what was raised. With codes of 8 bits a last bit of a sum
becomes one step of a code here and there. Ends with 1 where CAME raises, or differs in fp32 by over 2e-6 anywhere.
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
"""CAME in fp32 sums in another order than on one device, and nothing else differs."""
HELD_TO_LIMIT = "CAME fp32"


def _came(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return CAME(param_groups(net, weight_decay=0.1), lr=LR, betas=(0.9, 0.95, 0.995), debias=True, **options)


def _torch(net: nn.Module, *, name: str, **options: Any) -> torch.optim.Optimizer:
    params = [param for param in net.parameters() if param.ndim == 2 or name != "Muon"]  # which refuses vectors
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
    """Rows and columns of different magnitude, so that a mean over the wrong part shows."""
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + index))
    for dim, size in enumerate(shape):
        grad *= torch.logspace(-1, 1, size).view([-1 if d == dim else 1 for d in range(len(shape))])
    return grad


def stepped(make: Make, net: nn.Module) -> list[Tensor]:
    """The whole parameters after `STEPS` steps."""
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
    """Of any element over the root mean square of its parameter, and of a parameter in norm: the largest of each."""
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
        result = differences(stepped(OPTIMIZERS[name], net), stepped(OPTIMIZERS[name], network()))
    except Exception as error:  # whatever an optimizer raises here is its result
        result = {"error": f"{type(error).__name__}: {first_line(error)}"}
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # a gloo thread can abort while the interpreter shuts down, after all work is done (PyTorch 2.13)


def sharded(name: str, world: int, *, seconds: float = 300) -> Row:
    """An optimizer's steps in a group of processes: `differences`, the largest of all ranks, or `error`."""
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
            row = {"optimizer": name, "ranks": world, **sharded(name, world)}
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
