"""Capture a training step as CUDA graphs, which are launched as a whole, without Python overhead.

Two graphs for each shape of the batches: the passes of all micro-batches with the gradients' norm, and clip and update.
Between them the host reads loss and norm, so that a NaN stops the run before the update. Inputs of the graphs (batches,
learning rates, prices of ranks, loss scale) are in tensors with fixed addresses; schedules, records and the removal of
ranks happen between the graphs.

A graph writes to the addresses it was captured with. After any change of addresses, such as the removal of ranks or a
loaded checkpoint, call `reset`: new graphs are captured after a few steps without.
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
MAX_GRAPHS = 8
"""Number of batch shapes that are captured; steps of others run without a graph."""

Shapes: TypeAlias = tuple[tuple[tuple[str, torch.Size, torch.dtype], ...], ...]
Passes: TypeAlias = Callable[[Sequence[Batch], Tensor], tuple[Tensor, Tensor]]
"""(micro-batches, loss scale) to (sum of the losses, gradient norm); gradients are newly allocated in `.grad`."""
Update: TypeAlias = Callable[[Tensor], None]
"""(gradient norm): clip and optimizer step."""


def check_graph(recipe: Recipe, world_size: int, device: str) -> None:
    """Raise a UserError if the steps of a recipe cannot be captured here."""
    if not recipe.train.graph:
        return
    if world_size > 1:
        raise UserError(
            f"train.graph captures the step of one process; given {world_size} processes. Run one, or leave the key out"
        )
    if device != "cuda":
        raise UserError("train.graph captures CUDA graphs and needs a GPU; there is no GPU here: leave the key out")


class Graph(Protocol):
    """A recording of a function's work on the device."""

    def capture(self, function: Callable[[], None]) -> None:
        """Record the function, which may or may not take effect."""
        ...

    def replay(self) -> None:
        """Run the recording on the same tensors."""
        ...


GraphPool: TypeAlias = Callable[[], Callable[[], Graph]]
"""Creates a factory of empty graphs that share memory."""


class CudaGraphs:
    """Factory of CUDA graphs that share memory and a stream; no two of them run at once."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self) -> Graph:
        """Return an empty graph."""
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
        # other threads may pin memory for the next batches meanwhile
        mode = "thread_local"
        with torch.cuda.graph(self._graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
            function()

    def replay(self) -> None:
        self._graph.replay()


@dataclass
class _Captured:
    """Graphs of one shape of batches, and the tensors they read and write."""

    batches: list[Batch]
    scale: Tensor
    passes: Graph
    update: Graph
    loss_sum: Tensor
    norm: Tensor
    gradients: list[Tensor | None]


class StepGraphs:
    """Captures the two halves of a step and replays them.

    Args:
        model: the trained model.
        passes: first half of a step.
        update: second half of a step.
        graph_pool: creates a factory of graphs, such as `CudaGraphs`; called again after `reset`.

    Attributes:
        num_captured: number of pairs of graphs captured so far.
    """

    def __init__(self, model: nn.Module, passes: Passes, update: Update, graph_pool: GraphPool) -> None:
        self._model, self._passes, self._update, self._graph_pool = model, passes, update, graph_pool
        self._new_graph: Callable[[], Graph] | None = None
        self._captured: dict[Shapes, _Captured] = {}
        self._current: _Captured | None = None
        self._steps: Counter[Shapes] = Counter()
        self.num_captured = 0

    def reset(self) -> None:
        """Drop all graphs, because addresses or shapes change."""
        self._clear_gradients()
        self._captured, self._current, self._new_graph, self._steps = {}, None, None, Counter()

    def run_passes(self, batches: Sequence[Batch], scale: Tensor) -> tuple[Tensor, Tensor] | None:
        """Run the first half of a step, which leaves gradients in `.grad`; None if there is no graph for its shape.

        Args:
            batches: on any device.
            scale: factor of each loss, 0-D, on the device.

        Raises:
            UserError: the step cannot be captured.
        """
        # 1. find or capture the graph of these shapes
        self._current = None
        shapes = _shapes(batches)
        captured = self._captured.get(shapes)
        if captured is None:
            is_warm = self._steps.total() >= WARM_UP and self._steps[shapes] > 0
            if not is_warm or len(self._captured) >= MAX_GRAPHS:
                self._steps[shapes] += 1
                # a pass without a graph must not add to gradients that belong to one
                self._clear_gradients()
                return None
            captured = self._captured[shapes] = self._capture(batches, scale)
        # 2. copy the inputs to the addresses of the capture, 3. replay, which writes its gradients there
        for own, given in zip(captured.batches, batches, strict=True):
            for target, values in zip(_tensors(own), _tensors(given), strict=True):
                target.copy_(values, non_blocking=True)
        captured.scale.copy_(scale)
        self._set_gradients(captured.gradients)
        captured.passes.replay()
        self._current = captured
        return captured.loss_sum, captured.norm

    def run_update(self) -> None:
        """Run the second half of the step whose first half ran last."""
        assert self._current is not None
        self._current.update.replay()
        # a replay does not increment autograd's version counters, from which caches see that parameters changed
        torch.autograd.graph.increment_version(list(self._model.parameters()))

    def _capture(self, batches: Sequence[Batch], scale: Tensor) -> _Captured:
        self._clear_gradients()
        # inputs and results are allocated outside of the graphs' pool, whose memory replays reuse
        own = [_copy(batch, scale.device) for batch in batches]
        own_scale, loss_sum, norm = scale.clone(), scale.new_zeros((), dtype=torch.float64), scale.new_zeros(())
        if self._new_graph is None:
            self._new_graph = self._graph_pool()
        first, second = self._new_graph(), self._new_graph()

        def run_passes() -> None:
            # allocate the gradients within the capture: each replay writes to the same addresses
            self._clear_gradients()
            for result, value in zip((loss_sum, norm), self._passes(own, own_scale), strict=True):
                result.copy_(value)

        try:
            first.capture(run_passes)
            # the second graph reads the gradients at the addresses of the first
            gradients = [parameter.grad for parameter in self._model.parameters()]
            second.capture(lambda: self._update(norm))
        except RuntimeError as error:
            cause: BaseException = error
            while cause.__context__ is not None:  # ending a failed capture raises a second error
                cause = cause.__context__
            raise UserError(
                f"train.graph: the step cannot be captured as a CUDA graph: {first_line(cause)}; set "
                "train.graph to false"
            ) from error
        self.num_captured += 1
        return _Captured(own, own_scale, first, second, loss_sum, norm, gradients)

    def _clear_gradients(self) -> None:
        """Detach the gradients of graphs from the parameters, before passes that are not replayed."""
        self._set_gradients([None for _ in self._model.parameters()])

    def _set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
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
