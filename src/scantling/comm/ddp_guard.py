"""Find and refuse wrappers that average gradients which must stay local.

A replica whose gradients were averaged before the exchange trains correctly and saves nothing: everything was sent.
"""

# No `from __future__ import annotations` here: DDP reads the annotations of its hook and wants the classes themselves.
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
    """Make a backward pass outside of `model.no_sync()` raise a UserError.

    With `MomentumExchange` or `DeMo`, every backward pass must be in `no_sync()`, also that of the last micro-batch:
    with averaged gradients a run looks right but sends everything. A second call does nothing.

    Args:
        model: without another communication hook.

    Example:
        >>> model = DistributedDataParallel(module)  # doctest: +SKIP
        >>> scantling.comm.refuse_reduction(model)  # doctest: +SKIP
        >>> with model.no_sync(): loss_of(model).backward()  # doctest: +SKIP
    """
    if model not in _GUARDED:
        model.register_comm_hook(None, _refuse)
        _GUARDED.add(model)


def _refuse(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    raise UserError(
        "DistributedDataParallel was about to average gradients that MomentumExchange or DeMo exchange their own way; "
        "put every backward pass into model.no_sync(), or train the bare module"
    )


class Averaging(IntEnum):
    """Degree of certainty that gradients were averaged over the replicas in the last backward pass."""

    NO = 0
    PERHAPS = 1
    YES = 2


def find_wrappers(params: Iterable[Tensor], ranks: Iterable[int]) -> list[nn.Module]:
    """Search the memory for modules that reduce the gradients of some parameters. No communication.

    Args:
        params: parameters of the exchange.
        ranks: global ranks of the processes of the exchange, if they are known.

    Returns:
        DistributedDataParallel and DeepSpeed engines over several of these ranks.

    Raises:
        UserError: FSDP1 holds the parameters, so that each rank has a shard instead of a full replica.
    """
    ids, between = {id(param) for param in params}, set(ranks)
    found: list[nn.Module] = []
    for each in _living_wrappers():
        if any(id(param) in ids for param in each.parameters()) and _spans(each, between):
            found.append(each)
            if _FSDP1 in _class_names(type(each)):
                raise UserError(
                    "the model is in FullyShardedDataParallel, which averages gradients and leaves each process a "
                    "shard. Use FSDP2: fully_shard(model, mesh=mesh['shard']), and process_group=mesh['replicate'] for "
                    "the exchange; or train the bare model"
                )
    return found


def find_averaging(wrapper: nn.Module) -> Averaging:
    """Return the certainty that a wrapper averaged the gradients of the last backward pass."""
    if _DEEPSPEED in _class_names(type(wrapper)):
        return Averaging.PERHAPS
    if not getattr(wrapper, "require_forward_param_sync", True):  # the last forward pass ran in no_sync()
        return Averaging.NO
    hooks = comm_hooks(wrapper)
    if any(hook in (noop_hook, _refuse) for hook in hooks):
        return Averaging.NO
    # A custom hook may average or not.
    return Averaging.PERHAPS if hooks else Averaging.YES


def _living_wrappers() -> list[nn.Module]:
    # No registry lists the wrappers, but the garbage collector finds the instances of a class. `gc.get_objects` would
    # also return tuples that other threads are still building, and any reference to such a tuple makes them fail.
    classes: set[type] = set()
    unseen: list[type] = [nn.Module]
    while unseen:
        cls = unseen.pop()
        unseen += cls.__subclasses__()
        if _WRAPPERS & _class_names(cls):
            classes.add(cls)
    # The type, since `isinstance` would run code of lazy proxies.
    return [each for each in gc.get_referrers(*classes) if type(each) in classes]


def _class_names(cls: type) -> set[str]:
    return {base.__name__ for base in cls.__mro__}


def _spans(wrapper: nn.Module, ranks: set[int]) -> bool:
    """Return True if a wrapper communicates between several of these ranks, or if that is unknown."""
    group = getattr(wrapper, "process_group", None)
    try:
        return not ranks or len(ranks & set(dist.get_process_group_ranks(group))) > 1
    except (KeyError, ValueError, TypeError):  # a group that PyTorch has no ranks of, such as those of torchft
        return True
