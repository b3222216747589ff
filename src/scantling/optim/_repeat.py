"""The step of the same parameters again, without describing each of them again.

Before a step, CAME describes every parameter: its matrix view, its place in the whole parameter, addresses, and the
launch that it belongs to. That takes longer than the launches of the kernels. If these have stepped all parameters, the
next step takes over the descriptions, as long as parameters, states and the form of the gradients stay the same, which
is checked for all parameters at once. Only the addresses of gradients and the hyper-parameters are new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scantling.numerics.device import is_capturing
from scantling.numerics.torch_private import dtensor_spec, is_zero_tensor, local_part
from scantling.optim._dispatch import RepeatedSharded
from scantling.optim._eager import run_stages
from scantling.optim._triton import BatchStages
from scantling.optim.state import HyperParams, ParamLayout

_FORM = attrgetter("shape", "dtype", "device", "requires_grad")
_DTYPE = attrgetter("dtype")
_PLAIN = {Tensor, nn.Parameter}


class RepeatedStep:
    """Step that can be taken again.

    Args:
        groups: parameter groups of the optimizer.
        states: states of the parameters.
        layouts: layouts of the parameters.
        stages: stages that have just stepped all parameters with a gradient.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        states: Mapping[Tensor, Mapping[str, Tensor]],
        layouts: Mapping[Tensor, ParamLayout],
        stages: Sequence[BatchStages],
    ) -> None:
        self._all = _flat(groups)
        self._kinds = [_kind(HyperParams.from_group(group)) for group in groups]
        owners = [index for index, group in enumerate(groups) for _ in group["params"]]
        stepped = sorted(index for each in stages for index in each.indices)
        self._params = [self._all[index] for index in stepped]
        self._others = [self._all[index] for index in sorted({*range(len(self._all))} - {*stepped})]
        self._states = [states[param] for param in self._params]
        self._all_states = list(states.values())  # in the order of insertion: looking each up takes longer
        self._tensors = list(chain.from_iterable(state.values() for state in self._states))
        self._local_tensors = _local(self._tensors)
        self._addresses = _addresses(_local(self._params)), _addresses(self._local_tensors)
        grads = [param.grad for param in self._params]
        self._classes = _classes(self._params), _classes(grads)
        self._forms = list(map(_FORM, _local(self._params)))
        self._grad_forms = _grad_forms(_local(grads))
        # Positions of the parameters of each batch among those stepped, and their groups.
        place = {index: position for position, index in enumerate(stepped)}
        self._batches = [
            (each, np.array([place[i] for i in each.indices]), [owners[i] for i in each.indices]) for each in stages
        ]
        plans = [layouts[param].plan for param in self._params]
        sharded = [each for each in stages if each.is_sharded]
        self._sharded = RepeatedSharded(sharded, [plan for plan in plans if plan.sharded_dims]) if sharded else None

    def take(self, groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, Mapping[str, Tensor]]) -> bool:
        """Take the step with the current gradients and hyper-parameters.

        Collectives: those of the step that is repeated.

        Returns:
            False if something else has changed; nothing is stepped then.
        """
        # The buffers of a captured step must outlive this object.
        if any(is_capturing(stages.device) for stages, _, _ in self._batches):
            return False
        hypers = [HyperParams.from_group(group) for group in groups]
        grads = self._grad_addresses(groups, states, hypers)
        if grads is None:
            return False
        for stages, places, owners in self._batches:
            stages.begin(grads[places], [hypers[owner] for owner in owners])
        for stages, _, _ in self._batches:
            if not stages.is_sharded:
                run_stages(stages)
        if self._sharded is not None:
            self._sharded.step()
        return True

    def _grad_addresses(
        self,
        groups: Sequence[Mapping[str, Any]],
        states: Mapping[Tensor, Mapping[str, Tensor]],
        hypers: Sequence[HyperParams],
    ) -> np.ndarray[Any, Any] | None:
        """Return the addresses of the gradients; None if the step cannot be repeated."""
        params, grads = _flat(groups), [param.grad for param in self._params]
        if (
            not _same(params, self._all)
            or list(map(_kind, hypers)) != self._kinds
            or any(param.grad is not None for param in self._others)
            or not _same(list(states.values()), self._all_states)
            or not _same(list(chain.from_iterable(state.values() for state in self._states)), self._tensors)
        ):
            return None
        try:
            if (_classes(self._params), _classes(grads)) != self._classes:
                return None
            local_params, local = _local(self._params), _local(grads)
            if list(map(_FORM, local_params)) != self._forms or _grad_forms(local) != self._grad_forms:
                return None
            if (_addresses(local_params), _addresses(self._local_tensors)) != self._addresses:
                return None
            found = np.array(_addresses(local))
        except (AttributeError, RuntimeError):  # a tensor of another class, or without memory
            return None
        if (
            not all(map(Tensor.is_contiguous, local))
            or any(map(Tensor.is_neg, local))
            or any(map(is_zero_tensor, local))
        ):
            return None
        if any(stages.is_aligned and (found[places] % 16).any() for stages, places, _ in self._batches):
            return None
        return found


def _flat(groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    return list(chain.from_iterable(group["params"] for group in groups))


def _same(tensors: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(tensors) == len(others) and all(map(is_, tensors, others))


def _kind(hyper: HyperParams) -> tuple[Any, ...]:
    """Return the hyper-parameters that decide which kernels are launched."""
    lr = id(hyper.lr) if isinstance(hyper.lr, Tensor) else None
    return hyper.layout_key, hyper.debias, hyper.maximize, hyper.weight_decay != 0, hyper.foreach, lr


def _local(tensors: Sequence[Any]) -> list[Tensor]:
    """Return the parts of DTensors on this rank, and other tensors as they are."""
    if set(map(type, tensors)) <= _PLAIN:
        return list(tensors)
    return [tensor if type(tensor) in _PLAIN else local_part(tensor) for tensor in tensors]


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _classes(tensors: Sequence[Any]) -> tuple[list[type], list[Any]]:
    """Return the classes of tensors, and the mesh and placements of DTensors."""
    classes = list(map(type, tensors))
    specs = [] if set(classes) <= _PLAIN else [tensor for tensor in tensors if type(tensor) not in _PLAIN]
    return classes, list(map(dtensor_spec, specs))


def _grad_forms(tensors: Sequence[Tensor]) -> tuple[list[torch.dtype], list[int]]:
    """Return what may change in gradients: PyTorch gives them the shape and the device of their parameters."""
    return list(map(_DTYPE, tensors)), list(map(Tensor.numel, tensors))
