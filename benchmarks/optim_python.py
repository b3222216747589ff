"""Measure the Python time of a CAME step with the GPU kernels: everything but kernels and all-reduces.

    python benchmarks/optim_python.py            (on a CPU)

On a GPU without a CUDA graph, a step takes as long as the slower of the kernels and the Python code that launches them.
Here the parameters are on the CPU, and launches, all-reduces and operations on lists return at once. There are 219, as
in a Llama of 24 layers, plain or sharded over two ranks. `described` steps describe each parameter, as the first step
does; `repeated` steps are all later ones. They take turns, and so find nothing in the caches of the CPU; `in a loop`,
one kind of step follows another. Aim: a repeated step in at most 1 ms.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # read at the first import of Triton

import torch
import torch.distributed as dist
from dated import dated, write
from interleaved import ratio
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from scantling.optim import CAME, _cpu, _dispatch, _triton
from scantling.optim.kernels import came_gpu

LAYER = [(64, 64)] * 7 + [(64,)] * 2
SHAPES = [(64, 64), *LAYER * 24, (64,), (64, 64)]
AIM_MS = 1.0
WARM_UP = 5


class NoLaunch:
    """Kernel that does nothing."""

    def __getitem__(self, _: Any) -> Callable[..., None]:
        return lambda *_, **__: None


@contextmanager
def without_kernels() -> Iterator[None]:
    """Let CAME take the step of a GPU for parameters on the CPU, without any work outside of Python."""
    kernels = [name for name in vars(came_gpu) if hasattr(vars(came_gpu)[name], "run") and not name.startswith("_")]
    with (
        patch.multiple(came_gpu, **{name: NoLaunch() for name in kernels}),
        patch.object(_triton, "DEVICES", ("cpu",)),
        patch.object(_dispatch, "foreach_copy_", lambda *_: None),
        patch.object(_cpu, "can_step", lambda step: False),
        patch.object(dist, "all_reduce", lambda *_, **__: None),
    ):
        yield


def make_step(place: Callable[[Tensor], Tensor], *, repeated: bool) -> Callable[[], float]:
    """Return a function that takes a step with new gradients and another rate, and returns its seconds."""
    params = [nn.Parameter(place(torch.randn(shape))) for shape in SHAPES]
    grads = [[place(torch.randn(shape)) for shape in SHAPES] for _ in range(2)]
    for given in grads:
        for param, grad in zip(params, given, strict=True):
            if isinstance(param, DTensor):
                grad._spec = param._spec  # type: ignore[attr-defined]  # FSDP2 shares it
    optimizer = CAME(params, lr=1e-3, momentum="int8")
    count = [0]

    def step() -> float:
        count[0] += 1
        for param, grad in zip(params, grads[count[0] % 2], strict=True):
            param.grad = grad
        optimizer.param_groups[0]["lr"] = 1e-3 / count[0]
        if not repeated:
            optimizer._repeated = None
            optimizer._layouts.clear()
        began = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - began

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    sharded = partial(distribute_tensor, device_mesh=mesh, placements=[Shard(0)], src_data_rank=None)
    places = {"plain": lambda value: value, "sharded": sharded}
    with without_kernels():
        work = {
            f"{name}, {kind}": make_step(place, repeated=kind == "repeated")
            for name, place in places.items()
            for kind in ("described", "repeated")
        }
        times: dict[str, list[float]] = {name: [] for name in work}
        for number in range(WARM_UP + options.rounds):
            for name in random.Random(number).sample(list(work), len(work)):
                seconds = work[name]()
                if number >= WARM_UP:
                    times[name].append(seconds)
        for name in [name for name in work if "repeated" in name]:
            times[f"{name}, in a loop"] = [work[name]() for _ in range(WARM_UP + options.rounds)][WARM_UP:]
    rows = {
        name: {"ms": 1e3 * sorted(own)[len(own) // 2], **ratio(times["plain, described"], own)}
        for name, own in times.items()
    }
    for name, row in rows.items():
        aim = f"   aim {AIM_MS:g} ms: {'met' if row['ms'] <= AIM_MS else 'MISSED'}" if "repeated" in name else ""
        print(f"{name:30} {row['ms']:6.2f} ms   {row['ratio']:5.1f} times as fast as plain, described{aim}")
    print(write(dated(__file__, parameters=len(SHAPES), results=rows), "optim-python", options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
