"""State of DeMo or of an exchange as tensors of each process, for torch.distributed.checkpoint.

That format saves a plain tensor once for all processes with the same name. Residuals differ between replicas, and with
FSDP2 each process has its shards: here every name contains the rank of the process.

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
"""Options of a group that may change during a run."""


@torch.no_grad()
def rank_tensors(optimizer: DeMo | MomentumExchange) -> dict[str, Tensor]:
    """Return the state of this process, with zeros for missing tensors; also the tensors to load into.

    Args:
        optimizer: before its first step, or after any step. For an exchange, the optimizer's own state is not included.

    Returns:
        Copies by names such as `rank0/layers.0.weight/residual`; residuals are in fp32.

    Raises:
        UserError: neither a DeMo nor a MomentumExchange.
    """
    exchange = _get_exchange(optimizer)
    # The result of an exchange in flight is part of the state.
    exchange.flush()
    prefix = f"rank{_rank()}"
    tensors = {f"{prefix}/step": torch.tensor([exchange.step]), f"{prefix}/{_PROCESSES}": torch.tensor([_processes()])}
    params, names = all_parameters(exchange.param_groups), parameter_names(exchange.param_groups)
    has_result = any("pending" in exchange.state.get(param, {}) for param in params)
    tensors[f"{prefix}/has_result"] = torch.tensor([has_result])
    tensors |= {name: torch.tensor(float(group[key]), dtype=torch.float64) for name, group, key in _scheduled(exchange)}
    for block_group in all_block_groups(make_buckets(exchange.param_groups, exchange.config)):
        for slot in block_group.slots:
            param, name = params[slot.param], f"{prefix}/{names[slot.param]}"
            if keeps_residuals(block_group, exchange.config):
                tensors[f"{name}/residual"] = exchange.residuals.read(param).clone()
            if isinstance(optimizer, DeMo) and not block_group.spec.is_matrix:
                moments = optimizer.moments(param)
                tensors |= {f"{name}/{key}": moments[key].clone() for key in MOMENTS}
            # Zeros if nothing is pending: names must not depend on the step, since loading needs the same ones.
            if exchange.config.delay:
                zeros = torch.zeros_like(to_local(param), dtype=torch.float32)
                tensors[f"{name}/result"] = exchange.state.get(param, {}).get("pending", zeros).clone()
    return tensors


@torch.no_grad()
def load_rank_tensors(optimizer: DeMo | MomentumExchange, tensors: Mapping[str, Tensor]) -> None:
    """Load what `rank_tensors` returned on this rank.

    Args:
        optimizer: over the same parameters, with the same options.
        tensors: by name; those of other ranks are ignored.

    Raises:
        UserError: not a DeMo or a MomentumExchange; tensors of other ranks only, of another number of processes, or of
            other parameters, shapes or options; nothing has been loaded.
    """
    # The current state has the expected names and shapes. Check all of them before the first change.
    expected, exchange = rank_tensors(optimizer), _get_exchange(optimizer)
    for name, like in expected.items():
        if name not in tensors:
            raise UserError(
                f"the saved tensors have no {name}: load with the version, model, options and number of processes that "
                "saved them"
            )
        if tensors[name].shape != like.shape:
            raise UserError(
                f"{name} should have the shape {tuple(like.shape)}; given {tuple(tensors[name].shape)}. Load on as "
                "many processes as saved, with the same model and options"
            )

    def load_copy(name: str) -> Tensor:
        return tensors[name].to(expected[name].device, copy=True)

    prefix = f"rank{_rank()}"
    if (saved := int(tensors[f"{prefix}/{_PROCESSES}"])) != _processes():
        raise UserError(
            f"the tensors were saved by {saved} processes, and these are {_processes()}: the residuals of the others "
            "would be lost. Load on as many as saved"
        )
    # Exchanges in flight belong to the replaced state.
    exchange.discard_pending()
    step = int(tensors[f"{prefix}/step"])
    exchange.step = step
    for name, group, key in _scheduled(exchange):
        # Fill an lr that is a tensor in place: other code may hold it.
        if isinstance(group[key], Tensor):
            group[key].fill_(tensors[name])
        else:
            group[key] = float(tensors[name])
    if isinstance(optimizer, DeMo):
        for group in optimizer.param_groups:
            group["steps"] = exchange.step
            # A loaded `dense_lr` is not a new value: keep the loaded `dense_ratio`.
            group["dense_set"] = group["dense_lr"]
    names = parameter_names(exchange.param_groups)
    residuals = {
        name: tensors[f"{prefix}/{name}/residual"] for name in names if f"{prefix}/{name}/residual" in expected
    }
    exchange.load_local_state_dict({"world_size": None, "rank": None, "residuals": residuals})
    has_result = bool(tensors[f"{prefix}/has_result"])
    for param, name in zip(all_parameters(exchange.param_groups), names, strict=True):
        state = exchange.state.setdefault(param, {})
        state.pop("pending", None)
        if has_result and f"{prefix}/{name}/result" in expected:
            state["pending"] = load_copy(f"{prefix}/{name}/result")
        if f"{prefix}/{name}/{MOMENTS[0]}" in expected:
            state |= {key: load_copy(f"{prefix}/{name}/{key}") for key in MOMENTS}


def _get_exchange(optimizer: DeMo | MomentumExchange) -> MomentumExchange:
    if isinstance(optimizer, MomentumExchange):
        return optimizer
    if not isinstance(optimizer, DeMo):
        raise UserError(f"rank_tensors are those of a DeMo or a MomentumExchange; given a {type(optimizer).__name__}")
    return optimizer.exchange


def _scheduled(exchange: MomentumExchange) -> list[tuple[str, dict[str, Any], str]]:
    """Return (name, group, key) of each scheduled option of each group."""
    return [
        (f"rank{_rank()}/group{number}/{key}", group, key)
        for number, group in enumerate(exchange.param_groups)
        for key in _SCHEDULED
        if group.get(key) is not None
    ]


def _processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _rank() -> int:
    """Return the global rank: the shards of one replica share their rank among the replicas."""
    return dist.get_rank() if dist.is_initialized() else 0
