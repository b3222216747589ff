"""Save and load the states of a run: model, optimizer, exchange, TT ranks, random generators."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from scantling.comm import GradientExchange
from scantling.comm.transport.shards import as_shard, to_local
from scantling.distributed.context import DistContext
from scantling.distributed.objects import broadcast_tensors
from scantling.errors import RunError, UserError
from scantling.optim import CAME
from scantling.optim.sharding import new_state_tensor
from scantling.optim.state import averaged_dims, group_matrix_view
from scantling.trainer.training.checkpoint import Checkpoint, State

if TYPE_CHECKING:
    from scantling.trainer.training.tensor_training import TensorTraining

logger = logging.getLogger(__name__)


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by name, each storage once (of tied parameters, the first name)."""
    seen: set[tuple[int, torch.Size]] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        # tied parameters share an address; empty tensors, and empty parts of sharded ones, all have address 0
        part = to_local(tensor)
        key = (part.data_ptr() if part.numel() else id(tensor), tensor.shape)
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        tensors[name] = tensor.detach()
    return tensors


def model_state(model: nn.Module) -> State:
    """Return the model's part of a checkpoint."""
    return State({f"model/{name}": tensor for name, tensor in model_tensors(model).items()})


def load_model(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Fill a model from a checkpoint, in place.

    Raises:
        UserError: the names or shapes of the checkpoint and of the model differ.
    """
    # the parameters themselves are the targets, so that they are filled in place
    wanted = {f"model/{name}": tensor for name, tensor in model_tensors(model).items()}
    stored = checkpoint.load_tensors("model/", wanted)
    missing, unknown = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    if missing or unknown:
        raise UserError(
            f"{checkpoint.path} does not fit the model: missing {missing[:5]}, unknown {unknown[:5]}; "
            "use the recipe that the run was started with"
        )


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, replicas: DistContext | None = None) -> State:
    """Return the optimizer's part: state by parameter name, and the hyperparameters of each group.

    Args:
        optimizer: of the model.
        model: the model.
        replicas: context of replicas whose states differ, each saved under keys with its number; None if all are
            equal. Collective: a gather of JSON values.
    """
    prefix = "optimizer/" if replicas is None else f"inner/rank{replicas.replica}/"
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
                    state.tensors[f"{prefix}{name}/{key}"] = value
                    # such as step counts, which PyTorch keeps on the CPU for parameters on a GPU
                    if value.device.type == "cpu" and parameter.device.type != "cpu":
                        on_cpu.append(f"{name}/{key}")
                else:
                    plain.setdefault(name, {})[key] = _json_value(value, f"{name}/{key}")
        # values that JSON cannot hold, such as a learning rate in a tensor, come from the recipe
        hyper = {k: v for k, v in group.items() if k not in ("params", "param_names") and _is_json(v)}
        groups.append({"names": [names[id(p)] for p in group["params"]], "hyper": hyper})
    own = {"plain": plain, "on_cpu": on_cpu, "groups": groups}
    state.values["optimizer"] = own
    if replicas is not None:
        by_replica = replicas.all_gather_object(own)[:: replicas.num_shards]
        state.values["optimizer"] = by_replica[0]
        state.values["inner"] = {str(replica): each for replica, each in enumerate(by_replica)}
    return state


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, checkpoint: Checkpoint) -> None:
    """Restore the stored state bitwise, with its dtypes.

    Raises:
        UserError: the parameter groups of the checkpoint and of the optimizer differ.
    """
    values = checkpoint.values["optimizer"]
    into = _sharded_state(optimizer, model, checkpoint, "optimizer/")
    stored = checkpoint.load_tensors("optimizer/", into)
    _fill_optimizer(
        optimizer, model, {key.removeprefix("optimizer/"): stored[key] for key in stored}, values, checkpoint.path
    )


def load_own_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, checkpoint: Checkpoint, context: DistContext
) -> None:
    """Restore the state of this replica; of M saved replicas, replica i takes the state of replica i modulo M.

    Replicas whose folder is missing do not count. Collectives: a gather and those of `_rank_tensors`, or those of
    `run_on_all` for sharded replicas.

    Raises:
        UserError: as of `load_optimizer`, or the state is on another machine.
    """
    values = checkpoint.values["inner"]
    source = context.replica % len(values)
    found: dict[str, torch.Tensor] = {}
    if context.num_shards == 1:
        held = sorted(set().union(*context.all_gather_object(checkpoint.index.ranks("inner"))))
        if source not in held and held:
            source = held[context.replica % len(held)]
            logger.warning(
                "%s: no folder of this run has the optimizer state of replica %d; replica %d continues with that of %d",
                checkpoint.path,
                context.replica % len(values),
                context.replica,
                source,
            )
        found = _rank_tensors("inner", checkpoint, [source], context).get(source, {})
    else:
        prefix = f"inner/rank{source}/"

        def load() -> None:
            stored = checkpoint.load_tensors(prefix, _sharded_state(optimizer, model, checkpoint, prefix))
            found.update({key.removeprefix(prefix): tensor for key, tensor in stored.items()})

        context.run_on_all(load)
    _fill_optimizer(optimizer, model, found, values[str(source)], checkpoint.path)


def _fill_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    path: Path,
) -> None:
    """Set the state of an optimizer from tensors with keys `<parameter>/<entry>`, and its hyperparameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ours = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if ours != [group["names"] for group in values["groups"]]:
        raise UserError(
            f"{path}: its parameter groups differ from those of the optimizer; "
            "use the recipe that the run was started with"
        )
    # assign state directly: `Optimizer.load_state_dict` would cast it to the parameter's dtype
    by_name = dict(model.named_parameters())
    on_cpu = set(values["on_cpu"])
    states: dict[str, dict[str, Any]] = {name: dict(plain) for name, plain in values["plain"].items()}
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition("/")
        device = torch.device("cpu") if f"{name}/{entry}" in on_cpu else by_name[name].device
        states.setdefault(name, {})[entry] = tensor.to(device)
    for name, entries in states.items():
        optimizer.state[by_name[name]] = entries
    for group, stored in zip(optimizer.param_groups, values["groups"], strict=True):
        for key, value in stored["hyper"].items():
            if isinstance(group.get(key), torch.Tensor):  # a captured graph may read it
                group[key].fill_(value)
            # keep equal values: JSON has turned tuples, such as betas, into lists
            elif not _is_json(group.get(key)) or json.dumps(group.get(key)) != json.dumps(value):
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _sharded_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, checkpoint: Checkpoint, prefix: str
) -> dict[str, torch.Tensor]:
    """Return empty tensors for the stored state of sharded parameters, each with the part on this process."""
    params = dict(model.named_parameters())
    groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    targets: dict[str, torch.Tensor] = {}
    for key, entry in checkpoint.index.entries(prefix).items():
        name, _, kind = key.removeprefix(prefix).rpartition("/")
        param: Any = params.get(name)
        if not isinstance(param, DTensor):
            continue
        averaged: tuple[int, ...] | None = () if entry.size == param.shape else None
        if isinstance(optimizer, CAME):
            averaged = averaged_dims(kind, group_matrix_view(groups[id(param)], param.shape))
        if averaged is not None:
            targets[key] = new_state_tensor(param, tuple(entry.size), entry.properties.dtype, averaged)
    return targets


def exchange_state(
    exchange: GradientExchange, model: nn.Module, context: DistContext, values: Mapping[str, Any]
) -> State:
    """Return the exchange's state of each replica, under keys of its number. Collective: a gather of JSON values.

    Args:
        exchange: of the run.
        model: the model.
        context: of this process.
        values: further JSON values of this replica.
    """
    own = {**exchange.state_dict(), **({"replica": dict(values)} if values else {})}
    params = dict(model.named_parameters())
    tensors = {key: value for key, value in own.items() if isinstance(value, torch.Tensor)}
    # a key is the name of a parameter, or `<kind>/<name>`
    parts = {key: as_shard(value, params.get(key.rpartition("/")[2], value)) for key, value in tensors.items()}
    state = State({f"exchange/rank{context.replica}/{key}": part for key, part in parts.items()})
    gathered = context.all_gather_object({key: value for key, value in own.items() if key not in tensors})
    state.values["exchange"] = {str(replica): each for replica, each in enumerate(gathered[:: context.num_shards])}
    return state


def load_exchange(
    exchange: GradientExchange, model: nn.Module, checkpoint: Checkpoint, context: DistContext
) -> dict[str, Any]:
    """Restore the exchange's state of this replica; with another number of replicas, the mean over the saved ones.

    Collectives: those of `_rank_tensors`.

    Returns:
        The further values of this replica; with another number M of them, those of replica i modulo M.
    """
    values = checkpoint.values.get("exchange", {})
    if not any(values.values()):
        return {}
    # as many replicas: the state of this one; otherwise the mean over all saved ones
    same = len(values) == context.num_replicas
    ranks = [context.replica] if same else range(len(values))
    by_rank = _rank_tensors("exchange", checkpoint, ranks, context, dict(model.named_parameters()))
    if lost := [rank for rank in ranks if rank not in by_rank]:
        logger.warning(
            "%s: no folder of this run has the residuals of ranks %s; continuing %s",
            checkpoint.path,
            ", ".join(map(str, lost)),
            "with the mean of the others" if by_rank else "without residuals",
        )
    saved = [
        {**tensors, **{key: each for key, each in values[str(rank)].items() if key != "replica"}}
        for rank, tensors in (by_rank or {ranks[0]: {}}).items()
    ]
    exchange.load_state_dict(saved[0] if same else exchange.merge_states(saved))
    own: dict[str, Any] = values[str(context.replica % len(values))].get("replica", {})
    return own


def _rank_tensors(
    kind: str,
    checkpoint: Checkpoint,
    ranks: Sequence[int],
    context: DistContext,
    params: Mapping[str, nn.Parameter] | None = None,
) -> dict[int, dict[str, torch.Tensor]]:
    """Return the per-rank tensors of some ranks by key, without ranks whose state no folder has or names.

    With `params`, those of a sharded parameter are the part on this process.

    Collectives, if ranks see several folders: gathers of the ranks that each process has and needs, and broadcasts of
    the missing ones, except of sharded states. A machine may have other ranks in each launch. If the checkpoint has
    files in several folders: those of `run_on_all`.

    Raises:
        UserError: parts of a state are in files that only the folder of another machine has.
    """
    held = checkpoint.index.ranks(kind)
    found = {rank: _one_rank(kind, checkpoint, rank, params) for rank in ranks if rank in held}
    # fetch states that only the folder of another machine has
    if context.has_separate_folders and (params is None or context.num_shards == 1):
        holders = context.all_gather_object(held)
        needed = context.all_gather_object([rank for rank in ranks if rank not in held])
        # each broadcast is a collective: all ranks must agree on the order and on the sender
        for rank in sorted(set().union(*needed)):
            source = next((holder for holder, its_ranks in enumerate(holders) if rank in its_ranks), None)
            if source is not None:
                own = _one_rank(kind, checkpoint, rank, params) if context.rank == source else None
                received = broadcast_tensors(own, source)
                if rank in ranks:
                    found[rank] = received

    # parts in this folder are enough for the same shards; others raise an error that names their files
    def read_incomplete() -> None:
        for rank in checkpoint.index.ranks(kind, absent=True):
            if rank in ranks and rank not in found:
                found[rank] = _one_rank(kind, checkpoint, rank, params)

    # all folders of one save have files elsewhere, or none
    if checkpoint.manifest.get("elsewhere"):
        context.run_on_all(read_incomplete)
    return {rank: found[rank] for rank in ranks if rank in found}


def _one_rank(
    kind: str, checkpoint: Checkpoint, rank: int, params: Mapping[str, nn.Parameter] | None = None
) -> dict[str, torch.Tensor]:
    prefix = f"{kind}/rank{rank}/"
    sharded: dict[str, Any] = {name: param for name, param in (params or {}).items() if isinstance(param, DTensor)}
    stored = checkpoint.index.entries(prefix) if sharded else {}
    into: dict[str, torch.Tensor] = {}
    for key, entry in stored.items():
        if (param := sharded.get(key.rpartition("/")[2])) is not None:
            into[key] = new_state_tensor(param, tuple(entry.size), entry.properties.dtype, ())
    loaded = checkpoint.load_tensors(prefix, into)
    return {key.removeprefix(prefix): to_local(tensor) for key, tensor in loaded.items()}


def _load_section(checkpoint: Checkpoint, prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): tensor for key, tensor in checkpoint.load_tensors(prefix).items()}


def tensor_state(tensor: TensorTraining) -> State:
    """Return the part of the TT ranks: tensors and JSON values."""
    own = tensor.state_dict()
    tensors = {f"tensor/{key}": value for key, value in own.items() if isinstance(value, torch.Tensor)}
    return State(tensors, {"tensor": {key: value for key, value in own.items() if f"tensor/{key}" not in tensors}})


def load_tensor(tensor: TensorTraining, checkpoint: Checkpoint) -> None:
    """Restore the TT ranks. Call it before model and optimizer load: parameters get their saved shapes."""
    tensor.load_state_dict({**_load_section(checkpoint, "tensor/"), **(checkpoint.values.get("tensor") or {})})


def rng_state(context: DistContext) -> State:
    """Return the states of this process's random generators, under keys of its rank. Collective: a gather."""
    # numpy's keys are uint32, which PyTorch supports only in part: store them as int64
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


def load_rng(checkpoint: Checkpoint, context: DistContext) -> None:
    """Restore this rank's generators, from a checkpoint of the same world size. Collectives: as `load_exchange`."""
    values = checkpoint.values["rng"][str(context.rank)]
    tensors = _rank_tensors("rng", checkpoint, [context.rank], context)[context.rank]
    # PyTorch on CPU and GPU, then numpy, then Python's own generator
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and context.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["cuda"], context.device)
    name, position, has_gauss, cached = values["numpy"]
    np.random.set_state((name, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    # JSON has turned the inner tuple into a list; `setstate` needs a tuple
    version, internal, gauss = values["python"]
    random.setstate((version, tuple(internal), gauss))


def merge_states(*states: State) -> State:
    """Merge states with different keys into one."""
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
        raise RunError(
            f"optimizer state {where} is a {type(value).__name__}; a checkpoint stores tensors and JSON values only"
        )
    return value
