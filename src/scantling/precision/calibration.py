"""Statistics of layer inputs: the Hessians that GPTQ needs, block by block.

A block is one child of a `ModuleList` or `Sequential`, such as a decoder layer; any other layer is a block by itself.
Blocks come in the order in which the model calls them. For each block, all batches go through the model again, so that
its inputs are those that the already quantized earlier blocks produce. A forward pass stops when the batch has passed
the block. Inputs are captured before a layer of `quantize_training` rounds them.

Cost for n blocks: about n / 2 + 1 forward passes over all batches. The first pass only records the order in which each
batch calls the layers. Each input adds 2 in^2 FLOPs per token; memory is 4 in^2 bytes for each input of one block.
Layers share one Hessian if they read the same unchanged tensor (Q, K and V) and run once per pass.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from scantling.errors import UserError
from scantling.eval_mode import eval_mode
from scantling.numerics.torch_private import version_counter
from scantling.precision.matrices import WeightMatrix

Batch: TypeAlias = Mapping[str, Any] | Tensor | Callable[[nn.Module], Any]
"""Keyword arguments of a model, its only argument, or a function that runs the model on a batch."""


_ALLOWED = "a mapping of inputs such as {'input_ids': ids}, or a tensor of ids (alone in a tuple or list, too)"


class _StopForward(Exception):
    """Raised inside a forward pass to stop it when the layers of a block have seen their inputs."""


class _Pass(NamedTuple):
    """Number of calls of each layer in one batch, and the positions of its first and last call."""

    counts: Counter[int]
    first: dict[int, int]
    last: dict[int, int]

    @classmethod
    def from_calls(cls, calls: list[int]) -> _Pass:
        last = {key: i for i, key in enumerate(calls)}
        first = {key: i for i, key in reversed(list(enumerate(calls)))}
        return cls(Counter(calls), first, last)

    def layers_after(self, layers: Iterable[int]) -> set[int]:
        """Return the layers first called after the last call of the given layers; empty if those are not called."""
        ends = [self.last[key] for key in layers if key in self.last]
        return {key for key, i in self.first.items() if i > max(ends)} if ends else set()


class Calibration:
    """Calibration batches, and the order in which they call the layers.

    Args:
        model: the model; its train or eval mode is unchanged afterwards.
        matrices: weights, each with the layers that multiply by it.
        batches: see `Batch`; read once and kept.

    Attributes:
        tokens: number of inputs that each weight has seen in `hessians`, by its name.

    Raises:
        UserError: if there are no batches, a batch is empty or of another type, or the batches call none of the layers.
    """

    def __init__(self, model: nn.Module, matrices: list[WeightMatrix], batches: Iterable[Batch]) -> None:
        self._model = model
        self._batches = _check_batches(batches)
        self._matrices = {id(module): matrix for matrix in matrices for module in matrix.modules}
        self._modules = {id(module): module for matrix in matrices for module in matrix.modules}
        self._device = next((each.device for each in model.parameters()), torch.device("cpu"))
        self._leaders: dict[int, int] = {}  # layer id -> id of the first layer with the same input
        self._passes: list[_Pass] = []
        self.tokens: dict[str, int] = {}
        self._trace(matrices)

    def blocks(self) -> Iterator[list[WeightMatrix]]:
        """Yield the weights of each block, in the order in which the model uses them."""
        names = {id(module): name for name, module in self._model.named_modules()}
        blocks: dict[str, list[WeightMatrix]] = {}
        # A Counter keeps the order of first calls, so the weights come in that order, each once.
        for matrix in dict.fromkeys(self._matrices[key] for each in self._passes for key in each.counts):
            blocks.setdefault(_block_name(self._model, names[id(matrix.modules[0])]), []).append(matrix)
        yield from blocks.values()

    def hessians(self, block: list[WeightMatrix]) -> dict[str, Tensor]:
        """Return the mean of x x^T over all inputs x of each weight of a block, by name: (in, in) fp32.

        Weights that see no input are left out.
        """
        # of layers with the same input, only the first adds it up
        leading = {self._leaders[id(module)] for matrix in block for module in matrix.modules}
        sums: dict[int, Tensor] = {}
        counts: Counter[int] = Counter()

        def add(key: int, x: Tensor) -> None:
            x = x.detach().reshape(-1, x.shape[-1]).float()  # (tokens, in)
            if key in sums:
                sums[key].addmm_(x.t(), x)
            else:
                sums[key] = x.t() @ x
            counts[key] += len(x)

        for batch, traced in zip(self._batches, self._passes, strict=True):
            after = traced.layers_after(leading)  # when one of these is called, the block has seen its inputs

            def observe(key: int, x: Tensor, after: set[int] = after) -> None:
                if key in after:
                    raise _StopForward
                add(key, x)

            self._run(batch, leading | after, observe)
        hessians: dict[str, Tensor] = {}
        for matrix in block:
            keys = [self._leaders[id(module)] for module in matrix.modules]
            tokens = sum(counts[key] for key in keys)
            if tokens == 0:
                continue
            # several layers can share a tied weight: add up their sums, then divide by all of their tokens
            hessians[matrix.name] = torch.stack([sums[key] for key in keys if key in sums]).sum(0) / tokens
            self.tokens[matrix.name] = tokens
        return hessians

    def _trace(self, matrices: list[WeightMatrix]) -> None:
        """Run all batches; record the order in which each calls the layers, and which layers share an input."""
        for batch in self._batches:
            calls: list[int] = []
            inputs: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}  # by tensor id, unique while it lives

            def observe(key: int, x: Tensor, calls: list[int] = calls, inputs: dict[int, Any] = inputs) -> None:
                # in-place changes raise the version; inference tensors have none, and never count as the same
                version = -1 - len(calls) if x.is_inference() else version_counter(x)
                # A tensor id can be reused after the tensor dies, so the weak reference must point to the same tensor.
                seen, before, leader = inputs.get(id(x), (None, None, key))
                if seen is None or seen() is not x or before != version:
                    leader = key
                inputs[id(x)] = (weakref.ref(x), version, leader)
                # batches that disagree about the leader: the layer keeps its own Hessian
                if self._leaders.setdefault(key, leader) != leader:
                    self._leaders[key] = key
                calls.append(key)

            self._run(batch, self._modules, observe)
            self._passes.append(_Pass.from_calls(calls))
        if self._modules and not self._leaders:
            raise UserError(
                "calibration: the batches reach none of the layers to quantize; give batches of the model's inputs"
            )
        for matrix in matrices:
            for module in matrix.modules:
                key, leader = id(module), self._leaders.get(id(module), id(module))
                # sharing one Hessian requires that both layers run at most once, and equally often, in every batch.
                once = all(each.counts[key] == each.counts[leader] <= 1 for each in self._passes)
                self._leaders[key] = leader if once else key

    def _run(self, batch: Batch, watched: Iterable[int], observe: Callable[[int, Tensor], None]) -> None:
        hooks = []
        for key in watched:

            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], key: int = key) -> None:
                observe(key, args[0] if args else next(iter(kwargs.values())))

            hooks.append(self._modules[key].register_forward_pre_hook(hook, with_kwargs=True))
        try:
            with torch.no_grad(), eval_mode(self._model):
                _run_model(self._model, batch, self._device)
        except _StopForward:
            pass
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            # Out of memory is no fault of the batch.
            if "memory" in str(error):
                raise
            raise UserError(
                f"calibration: the model does not take a batch of it ({type(error).__name__}: {error}). A batch is "
                f"{_ALLOWED}, and ids are below the size of the vocabulary"
            ) from error
        finally:
            for handle in hooks:
                handle.remove()


def _check_batches(batches: Iterable[Batch | Sequence[Tensor]]) -> list[Batch]:
    if isinstance(batches, str | bytes | Mapping | Tensor) or not isinstance(batches, Iterable):
        raise UserError(f"calibration must be an iterable of batches, {_ALLOWED}; given a {type(batches).__name__}")
    unwrapped = [_unwrap(each) for each in batches]
    if not unwrapped:
        raise UserError(
            "calibration has no batches; its text may be shorter than one sequence: give more text or shorter sequences"
        )
    for batch in unwrapped:
        if not isinstance(batch, Mapping | Tensor) and not callable(batch):
            raise UserError(f"a batch of calibration must be {_ALLOWED}; given a {type(batch).__name__}")
        tensors = batch.values() if isinstance(batch, Mapping) else [batch]
        if any(isinstance(each, Tensor) and not each.numel() for each in tensors):
            raise UserError(
                "a batch of calibration has no tokens; its text may be shorter than one sequence: give more"
            )
    return unwrapped


def _unwrap(batch: Any) -> Any:
    """Return the tensor of a one-element batch, as a `TensorDataset` gives it; other batches unchanged."""
    is_alone = isinstance(batch, tuple | list) and len(batch) == 1 and isinstance(batch[0], Tensor)
    return batch[0] if is_alone else batch


def _run_model(model: nn.Module, batch: Batch, device: torch.device) -> None:
    if isinstance(batch, Tensor):
        model(batch.to(device))
    elif isinstance(batch, Mapping):
        model(**{name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()})
    else:
        batch(model)


def _block_name(model: nn.Module, name: str) -> str:
    """Return the name of the block that a layer belongs to."""
    parts = name.split(".")
    module = model
    for i, part in enumerate(parts):
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            return ".".join(parts[: i + 1])
        module = module.get_submodule(part) if part else module
    return name
