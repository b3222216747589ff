"""CAME's step on a GPU: the stages of `_eager.py`, traced once for each kind of parameter and compiled by Inductor.

The trace runs the very stages that work off tiles elsewhere, over the whole parameter as one tile, and fuses what they
do into a few kernels without scratch of a parameter's size, but for one that a momentum in codes may need. Learning
rate, betas, decay and the number of the parameter go in as tensors, so that schedules and further parameters of a shape
do not compile again; other hyper-parameters are constants of the trace. Nothing waits for the device, and a CUDA graph
can capture the step once each kind of parameter has been stepped.

Compiling takes seconds for each shape, in the first step of a process; Inductor keeps the kernels on disk for the next.
Where it fails, or where SCANTLING_NATIVE=0 says so, the tiles of `_eager.py` do the same with more launches.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from scantling.optim import _eager
from scantling.optim._eager import Hyper, Job

logger = logging.getLogger(__name__)

DEVICES = ("cuda",)
BACKEND = "inductor"
_OPTIONS: dict[str, Any] = {
    "realize_reads_threshold": 64,  # compute a whitened gradient again rather than keep it
    "realize_opcount_threshold": 1000,
    "emulate_precision_casts": True,  # codes are relative to the scale as it is kept, in fp16
}
_SCHEDULED = ("lr", "beta1", "beta2", "beta3", "weight_decay")
_SCRATCH = 64 << 20
_SCRATCH_SHARE = 0.02

_functions: dict[tuple[Any, ...], Callable[..., None]] = {}
_failed = False


def can_step(job: Job, total_bytes: int) -> bool:
    """Whether the compiled step takes this parameter: on a GPU, whole, and small enough for what scratch there may be.

    Args:
        job: the parameter.
        total_bytes: of all parameters of the optimizer.
    """
    if job.param.device.type not in DEVICES or job.plan.cuts or not _available():
        return False
    return scratch_bytes(job) <= allowed_scratch_bytes(total_bytes)


def scratch_bytes(job: Job) -> int:
    """What the compiled step of this parameter may allocate of its size: the momentum, where it is kept in codes."""
    return job.param.numel() * job.dtype.itemsize if _has_codes(job) else 0


def allowed_scratch_bytes(total_bytes: int) -> float:
    """What a compiled step may allocate in an optimizer of so many bytes of parameters; tiles take what needs more."""
    return max(_SCRATCH, _SCRATCH_SHARE * total_bytes)


def step(jobs: Sequence[Job]) -> list[Job]:
    """One step of each of these parameters, which `can_step`.

    Returns:
        Those that have not been stepped, because nothing can be compiled here.
    """
    global _failed
    from torch._dynamo.exc import TorchDynamoException

    numbers: dict[tuple[int, torch.device], list[Tensor]] = {}
    for index, job in enumerate(jobs):
        key = id(job.hyper), job.param.device
        if key not in numbers:
            numbers[key] = [_number(getattr(job.hyper, name), job.param.device) for name in _SCHEDULED]
        arguments = [job.param, job.grad, _ordinal(job.ordinal, job.param.device), *numbers[key], *job.state.values()]
        try:
            _function_of(job, arguments)(*arguments)
        except TorchDynamoException as error:
            _failed = True
            reason = str(error).strip().splitlines()[0]
            logger.warning("CAME steps slower than it could: its step does not compile here: %s", reason)
            return list(jobs[index:])
    return []


def _function_of(job: Job, arguments: Sequence[Tensor]) -> Callable[..., None]:
    constants = tuple(getattr(job.hyper, field.name) for field in fields(Hyper) if field.name not in _SCHEDULED)
    signature = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in arguments)
    decays = bool(job.hyper.weight_decay)
    key = (signature, tuple(job.state), job.view, job.param.device, decays, *constants)
    if key not in _functions:
        logger.info("compiling CAME's step for parameters of shape %s", tuple(job.param.shape))
        _functions[key] = _compile(job, arguments)
    return _functions[key]


def _compile(job: Job, arguments: Sequence[Tensor]) -> Callable[..., None]:
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    keys, plan, view, hyper = tuple(job.state), job.plan, job.view, job.hyper

    def run(param: Tensor, grad: Tensor, ordinal: Tensor, *rest: Tensor) -> None:
        scheduled, state = rest[: len(_SCHEDULED)], rest[len(_SCHEDULED) :]
        lr, beta1, beta2, beta3, decay = scheduled
        decay_or_none = decay if hyper.weight_decay else 0.0
        traced = replace(hyper, lr=lr, beta1=beta1, beta2=beta2, beta3=beta3, weight_decay=decay_or_none)
        whole = Job(param, grad, dict(zip(keys, state, strict=True)), traced, view, ordinal, plan)
        _eager.step(whole, tile=param.numel())

    graph = make_fx(run, tracing_mode="fake")(*(tensor.detach() for tensor in arguments))
    options = _OPTIONS if BACKEND == "inductor" else None
    return torch.compile(graph, backend=BACKEND, dynamic=False, fullgraph=True, options=options)


def _number(value: float | Tensor, device: torch.device) -> Tensor:
    """A hyper-parameter on the device, without waiting for it: a fill, or a copy of what is in a tensor already."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float64, non_blocking=True)
    return torch.full((), value, dtype=torch.float64, device=device)


@lru_cache(maxsize=65536)
def _ordinal(number: int, device: torch.device) -> Tensor:
    return torch.full((), number, dtype=torch.int64, device=device)


def _has_codes(job: Job) -> bool:
    return "exp_avg_codes" in job.state


def _available() -> bool:
    if _failed or os.environ.get("SCANTLING_NATIVE", "1") == "0":
        return False
    return BACKEND != "inductor" or importlib.util.find_spec("triton") is not None
