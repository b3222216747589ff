"""What the inputs of layers look like: the Hessians that GPTQ needs, block by block.

Layers in one child of a `ModuleList` or `Sequential` are a block, such as a decoder layer; any other is a block by
itself. Blocks come in the order in which a model calls them. For each, all batches go through the model once more, so
that its inputs are those that the quantised blocks before it give; a pass ends where the batch is done with the block.
Inputs are taken as they come, before a layer of `quantize_training` rounds them.

Cost: for n blocks about n / 2 + 1 forward passes over all batches, the first of which only tells in what order each
batch calls the layers, and 2 in^2 FLOPs a token for each input; memory 4 in^2 bytes for each input of one block. Layers
that read the same tensor (Q, K and V), unchanged in between and once a pass, share one Hessian.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from scantling.errors import UserError
from scantling.modes import evaluating
from scantling.precision.matrices import Matrix

Batch: TypeAlias = Mapping[str, Any] | Tensor | Callable[[nn.Module], Any]
"""Arguments of a model by name, its one argument, or a function that puts a batch through the model."""


_WANTED = "a mapping of inputs such as {'input_ids': ids}, or a tensor of ids (alone in a tuple or list, too)"


class _Enough(Exception):
    """Thrown out of a model when the layers of a block have seen their inputs."""


class _Pass(NamedTuple):
    """How often a batch calls each layer, and where among all calls for the first and the last time."""

    counts: Counter[int]
    first: dict[int, int]
    last: dict[int, int]

    @classmethod
    def of(cls, calls: list[int]) -> _Pass:
        last = {key: place for place, key in enumerate(calls)}
        first = {key: place for place, key in reversed(list(enumerate(calls)))}
        return cls(Counter(calls), first, last)

    def after(self, layers: Iterable[int]) -> set[int]:
        """The layers whose first call comes after all calls of some others; none where those are not called."""
        ends = [self.last[key] for key in layers if key in self.last]
        return {key for key, place in self.first.items() if place > max(ends)} if ends else set()


class Calibration:
    """Batches, and what a model does with them.

    Args:
        model: left in the mode that it is in.
        matrices: weights with the layers that multiply by them.
        batches: see `Batch`; gone through once, and kept.

    Attributes:
        tokens: how many inputs each weight has seen in `hessians`, by its name.

    Raises:
        UserError: no batches, empty ones, something that is no batch, or batches that call none of the layers.
    """

    def __init__(self, model: nn.Module, matrices: list[Matrix], batches: Iterable[Batch]) -> None:
        self._model = model
        self._batches = _checked(batches)
        self._matrices = {id(module): matrix for matrix in matrices for module in matrix.modules}
        self._modules = {id(module): module for matrix in matrices for module in matrix.modules}
        self._device = next((each.device for each in model.parameters()), torch.device("cpu"))
        self._leaders: dict[int, int] = {}  # of each layer, the one that has its input first
        self._passes: list[_Pass] = []
        self.tokens: dict[str, int] = {}
        self._trace(matrices)

    def blocks(self) -> Iterator[list[Matrix]]:
        """The weights of each block, in the order in which they are used."""
        names = {id(module): name for name, module in self._model.named_modules()}
        found: dict[str, list[Matrix]] = {}
        for matrix in dict.fromkeys(self._matrices[key] for each in self._passes for key in each.counts):
            found.setdefault(_block_of(self._model, names[id(matrix.modules[0])]), []).append(matrix)
        yield from found.values()

    def hessians(self, block: list[Matrix]) -> dict[str, Tensor]:
        """The mean of x x^T over all inputs x of each weight of a block, by its name: (in, in) fp32.

        A weight that sees no input has none.
        """
        leading = {self._leaders[id(module)] for matrix in block for module in matrix.modules}
        sums: dict[int, Tensor] = {}
        counts: Counter[int] = Counter()

        def add(key: int, x: Tensor) -> None:
            x = x.detach().reshape(-1, x.shape[-1]).float()
            if key in sums:
                sums[key].addmm_(x.t(), x)
            else:
                sums[key] = x.t() @ x
            counts[key] += len(x)

        for batch, traced in zip(self._batches, self._passes, strict=True):
            after = traced.after(leading)

            def see(key: int, x: Tensor, after: set[int] = after) -> None:
                if key in after:
                    raise _Enough
                add(key, x)

            self._run(batch, leading | after, see)
        found: dict[str, Tensor] = {}
        for matrix in block:
            keys = [self._leaders[id(module)] for module in matrix.modules]
            tokens = sum(counts[key] for key in keys)
            if tokens == 0:
                continue
            found[matrix.name] = torch.stack([sums[key] for key in keys if key in sums]).sum(0) / tokens
            self.tokens[matrix.name] = tokens
        return found

    def _trace(self, matrices: list[Matrix]) -> None:
        """Put all batches through: the order in which each calls the layers, and which layers share their inputs."""
        for batch in self._batches:
            calls: list[int] = []
            inputs: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}  # by id, which is theirs while they live

            def see(key: int, x: Tensor, calls: list[int] = calls, inputs: dict[int, Any] = inputs) -> None:
                version = -1 - len(calls) if x.is_inference() else x._version  # a change in place raises it
                seen, before, leader = inputs.get(id(x), (None, None, key))
                if seen is None or seen() is not x or before != version:
                    leader = key
                inputs[id(x)] = (weakref.ref(x), version, leader)
                if self._leaders.setdefault(key, leader) != leader:
                    self._leaders[key] = key
                calls.append(key)

            self._run(batch, self._modules, see)
            self._passes.append(_Pass.of(calls))
        if self._modules and not self._leaders:
            raise UserError(
                "calibration: the batches put nothing through any of the layers; give batches of what the model reads"
            )
        for matrix in matrices:
            for module in matrix.modules:
                key, leader = id(module), self._leaders.get(id(module), id(module))
                once = all(each.counts[key] == each.counts[leader] <= 1 for each in self._passes)
                self._leaders[key] = leader if once else key

    def _run(self, batch: Batch, watched: Iterable[int], see: Callable[[int, Tensor], None]) -> None:
        hooks = []
        for key in watched:

            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], key: int = key) -> None:
                see(key, args[0] if args else next(iter(kwargs.values())))

            hooks.append(self._modules[key].register_forward_pre_hook(hook, with_kwargs=True))
        try:
            with torch.no_grad(), evaluating(self._model):
                _put_through(self._model, batch, self._device)
        except _Enough:
            pass
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            if "memory" in str(error):
                raise
            raise UserError(
                f"calibration: the model does not take a batch of it ({type(error).__name__}: {error}). A batch is "
                f"{_WANTED}, and ids are below the size of the vocabulary"
            ) from error
        finally:
            for handle in hooks:
                handle.remove()


def _checked(batches: Iterable[Batch | Sequence[Tensor]]) -> list[Batch]:
    if isinstance(batches, str | bytes | Mapping | Tensor) or not isinstance(batches, Iterable):
        raise UserError(
            f"calibration is an iterable of batches of the model's inputs: {_WANTED}; given a {type(batches).__name__}"
        )
    found = [_unwrapped(each) for each in batches]
    if not found:
        raise UserError(
            "calibration gives no batches, as of a text that is shorter than one sequence; take more text or shorter "
            "sequences"
        )
    for batch in found:
        if not isinstance(batch, Mapping | Tensor) and not callable(batch):
            raise UserError(
                f"calibration gives batches of the model's inputs: {_WANTED}; given a {type(batch).__name__}"
            )
        tensors = batch.values() if isinstance(batch, Mapping) else [batch]
        if any(isinstance(each, Tensor) and not each.numel() for each in tensors):
            raise UserError("calibration gives a batch without tokens: its text is shorter than one sequence")
    return found


def _unwrapped(batch: Any) -> Any:
    """The tensor of a batch that holds nothing else, as those of a `TensorDataset` do."""
    is_alone = isinstance(batch, tuple | list) and len(batch) == 1 and isinstance(batch[0], Tensor)
    return batch[0] if is_alone else batch


def _put_through(model: nn.Module, batch: Batch, device: torch.device) -> None:
    if isinstance(batch, Tensor):
        model(batch.to(device))
    elif isinstance(batch, Mapping):
        model(**{name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()})
    else:
        batch(model)


def _block_of(model: nn.Module, name: str) -> str:
    """The name of the block that a layer belongs to."""
    parts = name.split(".")
    module = model
    for place, part in enumerate(parts):
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            return ".".join(parts[: place + 1])
        module = module.get_submodule(part) if part else module
    return name
