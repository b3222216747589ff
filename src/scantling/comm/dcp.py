"""State of DeMo or MomentumExchange for torch.distributed.checkpoint, with the rank in the name of every tensor.

A plain tensor with one name is saved once for all processes. Residuals differ between replicas, and with FSDP2 each
process holds its own shards, so every tensor needs a name of its own.

    state = {"model": get_model_state_dict(model), "optimizer": rank_tensors(optimizer)}
    dcp.save(state, checkpoint_id=folder)
    ...
    dcp.load(state, checkpoint_id=folder)
    load_rank_tensors(optimizer, state["optimizer"])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scantling.comm.demo import MOMENTS, DeMo
from scantling.comm.exchange import MomentumExchange
from scantling.comm.layout import all_block_groups, keeps_residuals, make_buckets
from scantling.comm.param_groups import all_parameters, parameter_names
from scantling.comm.transport.shards import to_local
from scantling.errors import UserError

_PROCESSES = "processes"
_SCHEDULED = ("lr", "dense_lr", "dense_ratio", "weight_decay", "decay")
"""Options of a group that a schedule may change during a run."""


@torch.no_grad()
def rank_tensors(optimizer: DeMo | MomentumExchange) -> dict[str, Tensor]:
    """Return the state that this process needs to resume; also the template to load into.

    Args:
        optimizer: an optimizer or exchange, before its first step or later. The state of the optimizer that follows an
            exchange is not included.

    Returns:
        Copies by name, such as `rank0/layers.0.weight/residual`; zeros for missing state, residuals always in fp32.

    Raises:
        UserError: neither a DeMo nor a MomentumExchange.
    """
    exchange = _get_exchange(optimizer)
    exchange.flush()
    prefix = f"rank{_rank()}"
    tensors = {f"{prefix}/step": torch.tensor([exchange.step]), f"{prefix}/{_PROCESSES}": torch.tensor([_world_size()])}
    params, names = all_parameters(exchange.param_groups), parameter_names(exchange.param_groups)
    has_result = any("pending" in exchange.state.get(param, {}) for param in params)
    tensors[f"{prefix}/has_result"] = torch.tensor([has_result])
    tensors |= {
        name: torch.tensor(float(group[key]), dtype=torch.float64) for name, group, key in _scheduled_options(exchange)
    }
    for block_group in all_block_groups(make_buckets(exchange.param_groups, exchange.config)):
        for slot in block_group.slots:
            param, name = params[slot.param], f"{prefix}/{names[slot.param]}"
            if keeps_residuals(block_group, exchange.config):
                tensors[f"{name}/residual"] = exchange.residuals.read(param).clone()
            if isinstance(optimizer, DeMo) and not block_group.spec.is_matrix:
                moments = optimizer.moments(param)
                tensors |= {f"{name}/{key}": moments[key].clone() for key in MOMENTS}
            if exchange.config.delay:
                zeros = torch.zeros_like(to_local(param), dtype=torch.float32)
                tensors[f"{name}/result"] = exchange.state.get(param, {}).get("pending", zeros).clone()
    return tensors


@torch.no_grad()
def load_rank_tensors(optimizer: DeMo | MomentumExchange, tensors: Mapping[str, Tensor]) -> None:
    """Load the state that `rank_tensors` returned on this rank.

    Args:
        optimizer: an optimizer or exchange with the same parameters and options.
        tensors: tensors by the names of `rank_tensors`; tensors of other ranks are ignored.

    Raises:
        UserError: as `rank_tensors`, or the tensors of another world size, or other parameters, shapes or options;
            nothing has been loaded.
    """
    wanted, exchange = rank_tensors(optimizer), _get_exchange(optimizer)
    for name, like in wanted.items():
        if name not in tensors or tensors[name].shape != like.shape:
            given = tuple(tensors[name].shape) if name in tensors else "nothing"
            raise UserError(
                f"{name} must have the shape {tuple(like.shape)}; given {given}. Load with the same number of "
                "processes, model and options as saved"
            )

    def load(name: str) -> Tensor:
        return tensors[name].to(wanted[name].device, copy=True)

    prefix = f"rank{_rank()}"
    if (saved := int(tensors[f"{prefix}/{_PROCESSES}"])) != _world_size():
        raise UserError(
            f"the tensors were saved by {saved} processes, but {_world_size()} are running, so residuals would be "
            f"lost; load with {saved} processes"
        )
    exchange.discard_pending()
    step = int(tensors[f"{prefix}/step"])
    exchange.step = step
    for name, group, key in _scheduled_options(exchange):
        if isinstance(group[key], Tensor):
            group[key].fill_(tensors[name])
        else:
            group[key] = float(tensors[name])
    if isinstance(optimizer, DeMo):
        for group in optimizer.param_groups:
            group["steps"] = exchange.step
            group["dense_set"] = group["dense_lr"]
    names = parameter_names(exchange.param_groups)
    residuals = {name: tensors[f"{prefix}/{name}/residual"] for name in names if f"{prefix}/{name}/residual" in wanted}
    exchange.load_local_state_dict({"world_size": None, "rank": None, "residuals": residuals})
    has_result = bool(tensors[f"{prefix}/has_result"])
    for param, name in zip(all_parameters(exchange.param_groups), names, strict=True):
        state = exchange.state.setdefault(param, {})
        state.pop("pending", None)
        if has_result and f"{prefix}/{name}/result" in wanted:
            state["pending"] = load(f"{prefix}/{name}/result")
        if f"{prefix}/{name}/{MOMENTS[0]}" in wanted:
            state |= {key: load(f"{prefix}/{name}/{key}") for key in MOMENTS}


def _get_exchange(optimizer: DeMo | MomentumExchange) -> MomentumExchange:
    if isinstance(optimizer, MomentumExchange):
        return optimizer
    if not isinstance(optimizer, DeMo):
        raise UserError(f"rank_tensors takes a DeMo or a MomentumExchange; given a {type(optimizer).__name__}")
    return optimizer.exchange


def _scheduled_options(exchange: MomentumExchange) -> list[tuple[str, dict[str, Any], str]]:
    """List the scheduled options of all groups: tensor name, group and key."""
    return [
        (f"rank{_rank()}/group{i}/{key}", group, key)
        for i, group in enumerate(exchange.param_groups)
        for key in _SCHEDULED
        if group.get(key) is not None
    ]


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _rank() -> int:
    """Return the global rank; all shards of a replica have the same rank among replicas."""
    return dist.get_rank() if dist.is_initialized() else 0
