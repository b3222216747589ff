"""Find and refuse wrappers that average gradients which must stay local.

A replica whose gradients were averaged before the exchange trains correctly and saves nothing: everything was sent.
"""

# no `from __future__ import annotations`: DDP checks that the annotations of its hook are the classes themselves
import gc
import weakref
from collections.abc import Iterable
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from scantling.errors import UserError
from scantling.numerics.torch_private import comm_hooks

_FSDP1, _DEEPSPEED = "FullyShardedDataParallel", "DeepSpeedEngine"
_WRAPPERS = frozenset({DistributedDataParallel.__name__, _FSDP1, _DEEPSPEED})
_GUARDED: "weakref.WeakSet[DistributedDataParallel]" = weakref.WeakSet()


def refuse_reduction(model: DistributedDataParallel) -> None:
    """Raise a UserError in every later backward pass outside of `model.no_sync()`.

    With `MomentumExchange` or `DeMo` every backward pass belongs into `no_sync()`, also that of the last micro-batch:
    with averaged gradients a run looks right but sends everything. A second call does nothing.

    Args:
        model: a wrapped model without a communication hook.

    Example:
        >>> model = DistributedDataParallel(module)  # doctest: +SKIP
        >>> scantling.comm.refuse_reduction(model)  # doctest: +SKIP
        >>> with model.no_sync(): model(x).sum().backward()  # doctest: +SKIP
    """
    if model not in _GUARDED:
        model.register_comm_hook(None, _refuse)
        _GUARDED.add(model)


def _refuse(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    raise UserError(
        "DistributedDataParallel would average gradients that MomentumExchange or DeMo exchange; run every backward "
        "pass in model.no_sync(), or train the module without the wrapper"
    )


class Averaging(IntEnum):
    """Degree of certainty that gradients were averaged over the replicas in the last backward pass."""

    NO = 0
    PERHAPS = 1
    YES = 2


def find_wrappers(params: Iterable[Tensor], ranks: Iterable[int]) -> list[nn.Module]:
    """Find live modules that reduce the gradients of some parameters. No communication.

    Args:
        params: parameters of the exchange.
        ranks: global ranks of the exchange, if they are known.

    Returns:
        DistributedDataParallel and DeepSpeed engines over several of these ranks.

    Raises:
        UserError: FSDP1 holds the parameters, so that no rank has a complete replica.
    """
    ids, members = {id(param) for param in params}, set(ranks)
    is_wrapper: dict[type, bool] = {}
    found: list[nn.Module] = []
    for each in gc.get_objects():
        kind = type(each)
        if kind not in is_wrapper:  # not `isinstance`, which would run code of lazy proxies
            is_wrapper[kind] = issubclass(kind, nn.Module) and bool(_WRAPPERS & _base_names(kind))
        if is_wrapper[kind] and any(id(param) in ids for param in each.parameters()) and _spans(each, members):
            found.append(each)
            if _FSDP1 in _base_names(kind):
                raise UserError(
                    "the model is in FullyShardedDataParallel, which averages gradients and leaves a shard to each "
                    "process; use FSDP2 with fully_shard(model, mesh=mesh['shard']) and "
                    "process_group=mesh['replicate'] for the exchange, or train the model without the wrapper"
                )
    return found


def find_averaging(wrapper: nn.Module) -> Averaging:
    """Return how certain it is that a wrapper averaged the gradients of the last backward pass."""
    if _DEEPSPEED in _base_names(type(wrapper)):
        return Averaging.PERHAPS
    if not getattr(wrapper, "require_forward_param_sync", True):  # the last forward pass ran in no_sync()
        return Averaging.NO
    hooks = comm_hooks(wrapper)
    if any(hook in (noop_hook, _refuse) for hook in hooks):
        return Averaging.NO
    return Averaging.PERHAPS if hooks else Averaging.YES


def _base_names(kind: type) -> set[str]:
    return {base.__name__ for base in kind.__mro__}


def _spans(wrapper: nn.Module, ranks: set[int]) -> bool:
    """True if a wrapper communicates between several of these ranks, or if that is unknown."""
    group = getattr(wrapper, "process_group", None)
    try:
        return not ranks or len(ranks & set(dist.get_process_group_ranks(group))) > 1
    except (KeyError, ValueError, TypeError):  # a group without ranks in PyTorch, such as torchft's
        return True
