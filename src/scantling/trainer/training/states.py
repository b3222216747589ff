"""What a checkpoint holds of a run (model, optimizer, exchange, random generators), and how they take it back."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from scantling.comm import GradientExchange
from scantling.comm.residuals import mean_of_tensors
from scantling.distributed.context import DistContext
from scantling.distributed.objects import broadcast_tensors
from scantling.errors import RunError, UserError
from scantling.trainer.training.checkpoint import State, load_tensors
from scantling.trainer.training.index import ranks_held
from scantling.trainer.training.manifest import read_manifest

logger = logging.getLogger(__name__)


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, each storage once (of tied parameters, the first name)."""
    seen: set[tuple[int, torch.Size]] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        tensors[name] = tensor
    return tensors


def model_state(model: nn.Module) -> State:
    """The model's part of a checkpoint."""
    return State({f"model/{name}": tensor for name, tensor in model_tensors(model).items()})


def load_model(model: nn.Module, path: Path) -> None:
    """Fill a model from a checkpoint, in place.

    Raises:
        UserError: the names or shapes of the checkpoint and of the model differ.
    """
    wanted = {f"model/{name}": tensor for name, tensor in model_tensors(model).items()}
    stored = load_tensors(path, "model/", wanted)
    missing, unknown = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    if missing or unknown:
        raise UserError(f"{path} does not fit the model: missing {missing[:5]}, unknown {unknown[:5]}")


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> State:
    """The optimizer's part: state by parameter name, and the hyper-parameters of each group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = State()
    plain: dict[str, dict[str, Any]] = {}
    on_cpu: list[str] = []
    groups = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    state.tensors[f"optimizer/{name}/{key}"] = value
                    if value.device.type == "cpu" and parameter.device.type != "cpu":
                        on_cpu.append(f"{name}/{key}")
                else:
                    plain.setdefault(name, {})[key] = _json_value(value, f"{name}/{key}")
        hyper = {k: v for k, v in group.items() if k not in ("params", "param_names") and _is_json(v)}
        groups.append({"names": [names[id(p)] for p in group["params"]], "hyper": hyper})
    state.values["optimizer"] = {"plain": plain, "on_cpu": on_cpu, "groups": groups}
    return state


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, path: Path) -> None:
    """Put the stored state back as it was: no dtype is changed, nothing is recomputed.

    Raises:
        UserError: the parameter groups of the checkpoint and of the optimizer differ.
    """
    values = read_manifest(path)["values"]["optimizer"]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ours = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if ours != [group["names"] for group in values["groups"]]:
        raise UserError(f"{path}: its parameter groups are not those of this run's optimizer")
    by_name = dict(model.named_parameters())
    on_cpu = set(values["on_cpu"])
    states: dict[str, dict[str, Any]] = {name: dict(plain) for name, plain in values["plain"].items()}
    for key, tensor in load_tensors(path, "optimizer/").items():
        name, _, entry = key.removeprefix("optimizer/").rpartition("/")
        device = torch.device("cpu") if f"{name}/{entry}" in on_cpu else by_name[name].device
        states.setdefault(name, {})[entry] = tensor.to(device)
    for name, entries in states.items():
        optimizer.state[by_name[name]] = entries
    for group, stored in zip(optimizer.param_groups, values["groups"], strict=True):
        for key, value in stored["hyper"].items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            elif not _is_json(group.get(key)) or json.dumps(group.get(key)) != json.dumps(value):
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def exchange_state(exchange: GradientExchange, context: DistContext) -> State:
    """What each process keeps for the exchange, under keys of its rank. Collective: a gather of JSON values."""
    own = exchange.state_dict()
    tensors = {key: value for key, value in own.items() if isinstance(value, torch.Tensor)}
    state = State({f"exchange/rank{context.rank}/{key}": value for key, value in tensors.items()})
    values = context.all_gather_object({key: value for key, value in own.items() if key not in tensors})
    state.values["exchange"] = {str(rank): each for rank, each in enumerate(values)}
    return state


def load_exchange(exchange: GradientExchange, path: Path, context: DistContext) -> None:
    """Give the exchange back what this process kept; from another number of processes, the mean of what all kept.

    Collectives: those of `_rank_tensors`.
    """
    manifest = read_manifest(path)
    values = manifest["values"].get("exchange", {})
    if not any(values.values()):
        return
    ranks = range(manifest["world_size"]) if manifest["world_size"] != context.world_size else [context.rank]
    by_rank = _rank_tensors("exchange", path, ranks, context)
    if lost := [rank for rank in ranks if rank not in by_rank]:
        logger.warning(
            "%s: no folder of this run has the residuals of ranks %s; the mean of the others is taken",
            path,
            ", ".join(map(str, lost)),
        )
    kept = list(by_rank.values())
    found = kept[0] if len(kept) == 1 else mean_of_tensors(kept)
    exchange.load_state_dict({**found, **values[str(ranks[0])]})


def _rank_tensors(
    kind: str, path: Path, ranks: Sequence[int], context: DistContext
) -> dict[int, dict[str, torch.Tensor]]:
    """Return the own tensors of ranks by key, without ranks whose state no folder has.

    Collectives, if ranks see several folders: gathers of who has and who needs what, and broadcasts of the latter. A
    machine may get another number in each launch.
    """
    held = ranks_held(path)
    found = {rank: _own_tensors(kind, path, rank) for rank in ranks if rank in held}
    if context.has_separate_folders:
        holders = context.all_gather_object(held)
        needed = context.all_gather_object([rank for rank in ranks if rank not in held])
        for rank in sorted(set().union(*needed)):
            source = next((number for number, of in enumerate(holders) if rank in of), None)
            if source is not None:
                own = _own_tensors(kind, path, rank) if context.rank == source else None
                received = broadcast_tensors(own, source)
                if rank in ranks:
                    found[rank] = received
    return {rank: found[rank] for rank in ranks if rank in found}


def _own_tensors(kind: str, path: Path, rank: int) -> dict[str, torch.Tensor]:
    prefix = f"{kind}/rank{rank}/"
    return {key.removeprefix(prefix): tensor for key, tensor in load_tensors(path, prefix).items()}


def rng_state(context: DistContext) -> State:
    """The random generators of this process, under keys of its rank."""
    numpy_name, numpy_keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    prefix = f"rng/rank{context.rank}"
    state = State(
        {f"{prefix}/cpu": torch.get_rng_state(), f"{prefix}/numpy": torch.from_numpy(np.array(numpy_keys, np.int64))}
    )
    if context.device.type == "cuda":
        state.tensors[f"{prefix}/cuda"] = torch.cuda.get_rng_state(context.device)
    ours = {
        "python": random.getstate(),
        "numpy": [numpy_name, int(position), int(has_gauss), float(cached)],
    }
    state.values["rng"] = {str(rank): values for rank, values in enumerate(context.all_gather_object(ours))}
    return state


def load_rng(path: Path, context: DistContext) -> None:
    """Restore this rank's generators, from a checkpoint of the same world size. Collectives: as `load_exchange`."""
    values = read_manifest(path)["values"]["rng"][str(context.rank)]
    tensors = _rank_tensors("rng", path, [context.rank], context)[context.rank]
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and context.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["cuda"], context.device)
    name, position, has_gauss, cached = values["numpy"]
    np.random.set_state((name, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = values["python"]
    random.setstate((version, tuple(internal), gauss))


def merge(*states: State) -> State:
    """One state from several whose keys differ."""
    result = State()
    for state in states:
        result.tensors.update(state.tensors)
        result.values.update(state.values)
    return result


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _json_value(value: Any, where: str) -> Any:
    if not _is_json(value):
        raise RunError(f"optimizer state {where} is a {type(value).__name__}, which a checkpoint cannot hold")
    return value
