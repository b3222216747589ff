"""Background thread that runs exchanges in order while training goes on.

An exchange by owners is two collectives with decoding between them, which PyTorch's asynchronous collectives cannot
express. In a thread with its own process group the same code works: gloo and NCCL release Python's lock while they
wait. On a GPU the thread has its own stream.

An ending process waits for the submitted tasks: a thread that returns from a collective while the interpreter shuts
down aborts the process.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

WAIT_S = 10.0
"""Seconds that an ending process waits for the thread: enough for a message, but not for a peer that is gone."""


class Task(Generic[Result]):
    """Task of the thread; `result` waits for it."""

    def __init__(self, work: Callable[[], Result], device: torch.device) -> None:
        self._work, self._device = work, device
        self._future: Future[Result] = Future()
        self._ready: torch.cuda.Event | None = None
        self._done: torch.cuda.Event | None = None
        # The inputs are complete after the work that is queued on the current stream.
        if device.type == "cuda":
            self._ready = torch.cuda.current_stream(device).record_event()

    def run(self, stream: Any) -> None:
        """Run the task, on a stream that waits for the work that was queued when the task was made."""
        try:
            # Grad mode is local to a thread.
            with torch.no_grad():
                if self._ready is None:
                    found = self._work()
                else:
                    stream.wait_event(self._ready)
                    with torch.cuda.stream(stream):
                        found = self._work()
                        self._done = stream.record_event()
            self._future.set_result(found)
        # The waiting thread raises it; this one goes on with the next task.
        except BaseException as error:
            self._future.set_exception(error)

    @property
    def is_done(self) -> bool:
        """True if `result` does not wait."""
        return self._future.done()

    @property
    def has_failed(self) -> bool:
        """True if the task is done and `result` raises its error."""
        return self._future.done() and self._future.exception() is not None

    def result(
        self, tensors: Callable[[Result], Iterable[Tensor]] = lambda _: (), *, timeout_s: float | None = None
    ) -> Result:
        """Return the result of the task, or raise its error.

        Args:
            tensors: yields the tensors of the result, which the current stream uses next.
            timeout_s: longest time to wait in seconds; None for no limit.

        Raises:
            TimeoutError: the task takes longer.
        """
        found = self._future.result(timeout_s)
        # The current stream waits, not the host.
        if self._done is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._done)
            # The allocator must not reuse this memory before the current stream has read it.
            for tensor in tensors(found):
                tensor.record_stream(stream)
        return found


Tasks: TypeAlias = "queue.SimpleQueue[Task[Any] | None]"


class Background:
    """Background thread. It ends after its tasks once this object is collected, or with the process within `WAIT_S`."""

    def __init__(self, name: str = "scantling-exchange") -> None:
        self._tasks: Tasks = queue.SimpleQueue()
        thread = threading.Thread(target=_run, args=(self._tasks,), name=name, daemon=True)
        # Before the start: the thread removes itself when it ends.
        _running[thread] = self._tasks
        atexit.unregister(_end_all)
        atexit.register(_end_all)  # runs before the handlers that were registered until now
        thread.start()
        # Not at exit, where `_end_all` ends the thread and waits for it.
        weakref.finalize(self, self._tasks.put, None).atexit = False

    def submit(self, work: Callable[[], Result], device: torch.device) -> Task[Result]:
        """Run a task after all earlier ones.

        Args:
            work: called in the thread, without gradients.
            device: of its tensors.
        """
        task = Task(work, device)
        self._tasks.put(task)
        return task


_running: dict[threading.Thread, Tasks] = {}


def _run(tasks: Tasks) -> None:
    streams: dict[torch.device, Any] = {}
    while (task := tasks.get()) is not None:
        device = task._device
        # One side stream per device: exchanges run next to training, but in order.
        if device.type == "cuda" and device not in streams:
            streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        task.run(streams.get(device))
        del task  # it holds tensors
    _running.pop(threading.current_thread(), None)


def _end_all() -> None:
    # A copy of the items: ending threads remove themselves.
    for thread, tasks in list(_running.items()):
        tasks.put(None)
        thread.join(WAIT_S)
