"""The work of a step as CUDA graphs: launched as a whole, without Python and without waiting for it.

Two graphs for each shape of the batches: the passes of all micro-batches with the gradients' norm, and clip and update.
Between them the host reads the figures of the step, as ever, so that a NaN stops the run before the update. What the
graphs read (batches, learning rates, prices of ranks, the share of a target in the mean) is in tensors that stay where
they are; what they cannot hold (schedules, records, the removal of ranks) is done between them.

A graph writes to the addresses it was captured with. Whatever gives parameters or state other ones, such as ranks that
are removed or a checkpoint that is loaded, must be followed by `forget`: new graphs are captured after a few more steps
without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from scantling.errors import UserError, first_line
from scantling.trainer.data.loader import Batch
from scantling.trainer.recipe import Recipe

WARM_UP = 3
"""Steps without a graph before one is captured, at least one of the same shape: they allocate state and compile."""
MOST_GRAPHS = 8
"""Shapes of batches that are captured; others are stepped without a graph."""

Shapes: TypeAlias = tuple[tuple[tuple[str, torch.Size, torch.dtype], ...], ...]
Passes: TypeAlias = Callable[[Sequence[Batch], Tensor], tuple[Tensor, Tensor]]
"""(micro-batches, share of a target) to (sum of the losses, gradient norm); gradients are in `.grad`, made anew."""
Update: TypeAlias = Callable[[Tensor], None]
"""(gradient norm): clip and optimizer step."""


def check_graph(recipe: Recipe, world_size: int, device: str) -> None:
    """Raise a UserError where the steps of a recipe cannot be captured here."""
    if not recipe.train.graph:
        return
    if world_size > 1:
        raise UserError(f"train.graph captures the step of one process; given {world_size}. Leave the key out")
    if device != "cuda":
        raise UserError("train.graph captures CUDA graphs, and there is no GPU here; leave the key out")


class Graph(Protocol):
    """What a function does on the device, to be done again."""

    def capture(self, function: Callable[[], None]) -> None:
        """Record the function; whether it also takes effect is not defined."""
        ...

    def replay(self) -> None:
        """Do what was recorded, with the tensors it was recorded with."""
        ...


NewGraphs: TypeAlias = Callable[[], Callable[[], Graph]]
"""Makes what makes empty graphs."""


class CudaGraphs:
    """Makes CUDA graphs that share their memory, since no two of them run at once, and a stream of their own."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self) -> Graph:
        """An empty graph."""
        return CudaGraph(self._pool, self._stream)


class CudaGraph:
    """A CUDA graph.

    Args:
        pool: of its memory.
        stream: on which it is captured.
    """

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._graph, self._pool, self._stream = torch.cuda.CUDAGraph(), pool, stream

    def capture(self, function: Callable[[], None]) -> None:
        # threads that pin memory for the next batches may go on meanwhile
        mode = "thread_local"
        with torch.cuda.graph(self._graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
            function()

    def replay(self) -> None:
        self._graph.replay()


@dataclass
class _Captured:
    """The graphs of one shape of batches, and the tensors they read and write."""

    batches: list[Batch]
    share: Tensor
    passes: Graph
    update: Graph
    loss_sum: Tensor
    norm: Tensor
    gradients: list[Tensor | None]


class StepGraphs:
    """Captures the two halves of a step, and takes steps with them.

    Args:
        model: whose parameters the step changes.
        passes: the first half.
        update: the second.
        new_graphs: makes what makes empty graphs, such as `CudaGraphs`; anew whenever all graphs were dropped.

    Attributes:
        num_captured: graphs captured so far, pairs counted once.
    """

    def __init__(self, model: nn.Module, passes: Passes, update: Update, new_graphs: NewGraphs) -> None:
        self._model, self._passes, self._update, self._new_graphs = model, passes, update, new_graphs
        self._new_graph: Callable[[], Graph] | None = None
        self._captured: dict[Shapes, _Captured] = {}
        self._current: _Captured | None = None
        self._steps: Counter[Shapes] = Counter()
        self.num_captured = 0

    def forget(self) -> None:
        """Drop all graphs: addresses or shapes are about to be, or have been, other ones."""
        self._without_graph()
        self._captured, self._current, self._new_graph, self._steps = {}, None, None, Counter()

    def passes(self, batches: Sequence[Batch], share: Tensor) -> tuple[Tensor, Tensor] | None:
        """The first half of a step, with gradients in `.grad` at its end; None where it is to be taken without a graph.

        Args:
            batches: on any device.
            share: 0-D, on the device.

        Raises:
            UserError: the step cannot be captured.
        """
        self._current = None
        shapes = _shapes(batches)
        captured = self._captured.get(shapes)
        if captured is None:
            is_warm = self._steps.total() >= WARM_UP and self._steps[shapes] > 0
            if not is_warm or len(self._captured) >= MOST_GRAPHS:
                self._steps[shapes] += 1
                self._without_graph()
                return None
            captured = self._captured[shapes] = self._capture(batches, share)
        for own, given in zip(captured.batches, batches, strict=True):
            for into, values in zip(_tensors(own), _tensors(given), strict=True):
                into.copy_(values, non_blocking=True)
        captured.share.copy_(share)
        self._put(captured.gradients)
        captured.passes.replay()
        self._current = captured
        return captured.loss_sum, captured.norm

    def update(self) -> None:
        """The second half of the step whose first half was taken last."""
        assert self._current is not None
        self._current.update.replay()
        # a replay changes parameters behind the back of autograd, whose counters tell others that they have changed
        torch.autograd.graph.increment_version(list(self._model.parameters()))

    def _capture(self, batches: Sequence[Batch], share: Tensor) -> _Captured:
        self._without_graph()
        device = share.device
        own = [_copy(batch, device) for batch in batches]
        held, loss_sum, norm = share.clone(), share.new_zeros((), dtype=torch.float64), share.new_zeros(())
        if self._new_graph is None:
            self._new_graph = self._new_graphs()
        first, second = self._new_graph(), self._new_graph()

        def passes() -> None:
            self._without_graph()
            for result, value in zip((loss_sum, norm), self._passes(own, held), strict=True):
                result.copy_(value)

        try:
            first.capture(passes)
            gradients = [parameter.grad for parameter in self._model.parameters()]
            second.capture(lambda: self._update(norm))
        except RuntimeError as error:
            cause: BaseException = error
            while cause.__context__ is not None:  # the end of a capture that failed fails, too
                cause = cause.__context__
            raise UserError(
                f"train.graph: the step cannot be captured as a CUDA graph: {first_line(cause)}; set "
                "train.graph to false"
            ) from error
        self.num_captured += 1
        return _Captured(own, held, first, second, loss_sum, norm, gradients)

    def _without_graph(self) -> None:
        """Take the gradients of graphs out of the way of passes that are not replayed."""
        self._put([None for _ in self._model.parameters()])

    def _put(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._model.parameters(), gradients, strict=True):
            parameter.grad = gradient


def _tensors(batch: Batch) -> list[Tensor]:
    return [*batch.inputs.values(), batch.labels]


def _copy(batch: Batch, device: torch.device) -> Batch:
    inputs = {name: value.to(device, copy=True) for name, value in batch.inputs.items()}
    return Batch(inputs, batch.labels.to(device, copy=True), batch.num_targets, batch.num_tokens)


def _shapes(batches: Sequence[Batch]) -> Shapes:
    return tuple(
        tuple((name, each.shape, each.dtype) for name, each in [*batch.inputs.items(), ("", batch.labels)])
        for batch in batches
    )
