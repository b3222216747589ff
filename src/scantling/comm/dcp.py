"""The state of DeMo, or of an exchange alone, as tensors of each process, for torch.distributed.checkpoint.

What is plain and alike by name, that format saves once. Residuals are not alike on replicas, and of FSDP2 each process
holds its shards: here every tensor has the rank of its process in its name.

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
"""Options of a group that may change while a run goes on."""


@torch.no_grad()
def rank_tensors(optimizer: DeMo | MomentumExchange) -> dict[str, Tensor]:
    """All that this process needs to go on, zeros where there is nothing yet: also what to load into.

    Args:
        optimizer: before its first step, or after any. Of an exchange, what its optimizer keeps is not in it.

    Returns:
        Tensors by names such as `rank0/layers.0.weight/residual`: copies, residuals in fp32 whatever they are kept in.

    Raises:
        UserError: neither a DeMo nor a MomentumExchange.
    """
    exchange = _exchange_of(optimizer)
    exchange.flush()
    prefix = f"rank{_rank()}"
    found = {f"{prefix}/step": torch.tensor([exchange.step]), f"{prefix}/{_PROCESSES}": torch.tensor([_processes()])}
    params, names = all_parameters(exchange.param_groups), parameter_names(exchange.param_groups)
    has_result = any("pending" in exchange.state.get(param, {}) for param in params)
    found[f"{prefix}/has_result"] = torch.tensor([has_result])
    found |= {name: torch.tensor(float(group[key]), dtype=torch.float64) for name, group, key in _scheduled(exchange)}
    for block_group in all_block_groups(make_buckets(exchange.param_groups, exchange.config)):
        for slot in block_group.slots:
            param, name = params[slot.param], f"{prefix}/{names[slot.param]}"
            if keeps_residuals(block_group, exchange.config):
                found[f"{name}/residual"] = exchange.residuals.read(param).clone()
            if isinstance(optimizer, DeMo) and not block_group.spec.is_matrix:
                moments = optimizer.moments(param)
                found |= {f"{name}/{key}": moments[key].clone() for key in MOMENTS}
            if exchange.config.delay:
                zeros = torch.zeros_like(to_local(param), dtype=torch.float32)
                found[f"{name}/result"] = exchange.state.get(param, {}).get("pending", zeros).clone()
    return found


@torch.no_grad()
def load_rank_tensors(optimizer: DeMo | MomentumExchange, tensors: Mapping[str, Tensor]) -> None:
    """Take back what `rank_tensors` gave on this rank.

    Args:
        optimizer: over the same parameters, with the same options.
        tensors: by the names that `rank_tensors` gives; those of other ranks may be among them.

    Raises:
        UserError: as of `rank_tensors`; tensors of other ranks alone, of another number of processes, or of other
            parameters, shapes or options; nothing has been loaded.
    """
    wanted, exchange = rank_tensors(optimizer), _exchange_of(optimizer)
    for name, like in wanted.items():
        if name not in tensors or tensors[name].shape != like.shape:
            given = tuple(tensors[name].shape) if name in tensors else "nothing"
            raise UserError(
                f"{name} should have the shape {tuple(like.shape)}; given {given}. Load on as many processes as saved, "
                "with the same model and options"
            )

    def taken(name: str) -> Tensor:
        return tensors[name].to(wanted[name].device, copy=True)

    prefix = f"rank{_rank()}"
    if (saved := int(tensors[f"{prefix}/{_PROCESSES}"])) != _processes():
        raise UserError(
            f"the tensors were saved by {saved} processes, and these are {_processes()}: the residuals of the others "
            "would be lost. Load on as many as saved"
        )
    exchange.discard_pending()
    step = int(tensors[f"{prefix}/step"])
    exchange.step = step
    for name, group, key in _scheduled(exchange):
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
            state["pending"] = taken(f"{prefix}/{name}/result")
        if f"{prefix}/{name}/{MOMENTS[0]}" in wanted:
            state |= {key: taken(f"{prefix}/{name}/{key}") for key in MOMENTS}


def _exchange_of(optimizer: DeMo | MomentumExchange) -> MomentumExchange:
    if isinstance(optimizer, MomentumExchange):
        return optimizer
    if not isinstance(optimizer, DeMo):
        raise UserError(f"rank_tensors are those of a DeMo or a MomentumExchange; given a {type(optimizer).__name__}")
    return optimizer.exchange


def _scheduled(exchange: MomentumExchange) -> list[tuple[str, dict[str, Any], str]]:
    """The numbers among the options of groups: their names here, the groups and the keys."""
    return [
        (f"rank{_rank()}/group{number}/{key}", group, key)
        for number, group in enumerate(exchange.param_groups)
        for key in _SCHEDULED
        if group.get(key) is not None
    ]


def _processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _rank() -> int:
    """Among all processes: those of several shards have one rank among their replicas."""
    return dist.get_rank() if dist.is_initialized() else 0
