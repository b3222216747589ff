"""Run test processes in one gloo group, and count the collectives they call.

Processes are forked from a server that has only imported modules (`tests.preloaded`), because importing PyTorch and
transformers takes seconds in each new process.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(world: int, case: Callable[..., None], *args: Any) -> None:
    """Call `case(*args)` in `world` processes of one gloo group; raise an error of any of them here."""
    with tempfile.TemporaryDirectory() as folder:
        if world == 1:
            _enter(0, {}, 1, f"file://{folder}/store", case, args)
            return
        start_all(_enter, (dict(os.environ), world, f"file://{folder}/store", case, args), world)


def start_all(target: Callable[..., None], args: tuple[Any, ...], count: int, *, join: bool = True) -> Any:
    """Call `target(number, *args)` in a number of processes.

    Returns:
        The result of `torch.multiprocessing.start_processes`.
    """
    server()
    return mp.start_processes(target, args, nprocs=count, join=join, start_method="forkserver")


def server() -> multiprocessing.context.ForkServerContext:
    """Return the context that forks processes with all imports done; they have the environment of its first use."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


def _enter(
    rank: int, env: dict[str, str], world: int, store: str, case: Callable[..., None], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    if world > 1:
        os.environ.clear()
        os.environ |= env
        os.environ |= torchrun_names(rank, world)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    try:
        case(*args)
    finally:
        dist.destroy_process_group()
    if world > 1:
        quiet_exit()


def quiet_exit() -> None:
    """Exit at once when all is done: a gloo thread can abort during interpreter shutdown (PyTorch 2.13)."""
    os._exit(0)


def torchrun_names(rank: int, world: int, port: int = 0, machines: int = 1) -> dict[str, str]:
    """Return the environment variables that torchrun sets, for machines with equally many processes."""
    local = world // machines
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank % local,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": local,
        "MASTER_PORT": port,
    }
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in names.items()}}


@contextmanager
def counted() -> Iterator[list[tuple[str, Any]]]:
    """Record the collectives that are called meanwhile, each with its process group."""
    calls: list[tuple[str, Any]] = []
    names = (
        *("all_reduce", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "broadcast", "barrier"),
        *("all_gather", "all_to_all_single"),
    )
    names = tuple(name for name in names if hasattr(dist, name))
    originals = {name: getattr(dist, name) for name in names}

    def wrap(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, kwargs.get("group")))
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, wrap(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
