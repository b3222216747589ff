"""Costs of an exchange: bytes sent and bytes of state. No communication."""

from __future__ import annotations

from collections.abc import Sequence

from scantling.comm.codec.block_group import BlockGroup
from scantling.comm.collectives import wire_bytes
from scantling.comm.config import ExchangeConfig
from scantling.comm.layout import all_block_groups, choose_strategy, keeps_residuals, make_buckets, residual_format
from scantling.comm.param_groups import Group, all_parameters, group_by_param
from scantling.comm.residuals import residual_bytes
from scantling.comm.transport.shards import to_local


def planned_wire_bytes(groups: Sequence[Group], config: ExchangeConfig, world_size: int) -> int:
    """Return the bytes that each replica sends in an exchange, headers included."""
    strategy = choose_strategy(groups, config, world_size)
    return sum(wire_bytes(bucket.block_groups, world_size, strategy) for bucket in make_buckets(groups, config))


def planned_wire_bytes_per_step(groups: Sequence[Group], config: ExchangeConfig, world_size: int) -> float:
    """Return the mean bytes per step: exchanges and averages of residuals, without comparisons of replicas."""
    sent = float(planned_wire_bytes(groups, config, world_size))
    if config.state_sync_every is not None and config.exchange != "dense" and world_size > 1:
        numel = sum(_numels(groups, config))
        sent += 2 * (world_size - 1) / world_size * 4 * numel / config.state_sync_every
    return sent / config.sync_every


def planned_state_bytes(groups: Sequence[Group], config: ExchangeConfig) -> int:
    """Return the bytes of the residuals after the first exchange."""
    params, param_groups = all_parameters(groups), group_by_param(groups)
    return sum(
        residual_bytes(to_local(params[idx]).numel(), residual_format(params[idx], param_groups[idx]))
        for idx in _indices(groups, config)
    )


def describe_layout(groups: Sequence[Group], config: ExchangeConfig) -> str:
    """Return one line for each block group: number and size of its parameters, selection and bytes."""
    return "\n".join(_describe(each, groups, config) for each in all_block_groups(make_buckets(groups, config)))


def _describe(block_group: BlockGroup, groups: Sequence[Group], config: ExchangeConfig) -> str:
    spec, params = block_group.spec, all_parameters(groups)
    numel = sum(to_local(params[slot.param]).numel() for slot in block_group.slots)
    what = f"{spec.codec.k} of {spec.height} x {spec.width}" if spec.is_matrix else f"rows of {spec.width}"
    if config.exchange == "dense":
        what = "all of a matrix" if spec.is_matrix else "all"
    return (
        f"{len(block_group.slots):4} tensors, {numel:>12,} elements: {what}, {spec.codec.values}, "
        f"{block_group.num_bytes:,} bytes"
    )


def _indices(groups: Sequence[Group], config: ExchangeConfig) -> list[int]:
    """Return the indices of the parameters that have residuals."""
    block_groups = all_block_groups(make_buckets(groups, config))
    return [slot.param for each in block_groups if keeps_residuals(each, config) for slot in each.slots]


def _numels(groups: Sequence[Group], config: ExchangeConfig) -> list[int]:
    params = all_parameters(groups)
    return [to_local(params[idx]).numel() for idx in _indices(groups, config)]
