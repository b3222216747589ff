"""A DistributedDataParallel whose gradients must stay local says so when it would average them."""

# No `from __future__ import annotations` here: DDP reads the annotations of its hook and wants the classes themselves.
import weakref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from scantling.errors import UserError

_GUARDED: "weakref.WeakSet[DistributedDataParallel]" = weakref.WeakSet()


def refuse_reduction(model: DistributedDataParallel) -> None:
    """Let a backward pass outside of `model.no_sync()` raise a UserError.

    With `MomentumExchange` or `DeMo` every backward pass belongs into `no_sync()`, that of the last micro-batch too:
    gradients that were averaged already make a run that looks right and sends everything. A second call does nothing.

    Args:
        model: from now on without any other communication hook.

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
