"""Background thread that runs exchanges in order while the training continues.

An exchange sends two rounds of messages and decodes between them, which no asynchronous collective of PyTorch does. In
a thread with its own process group the same code works: gloo and NCCL release the GIL while they wait. On a GPU the
thread uses a separate stream.

An ending process first waits for submitted tasks: a thread that returns from a collective during the interpreter's
shutdown aborts the process.
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
"""Seconds that an ending process waits for the thread: enough for a message, but not for a dead peer."""


class Task(Generic[Result]):
    """Submitted function; `result` waits for its return value."""

    def __init__(self, work: Callable[[], Result], device: torch.device) -> None:
        self._work, self._device = work, device
        self._future: Future[Result] = Future()
        self._ready: torch.cuda.Event | None = None
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._ready = torch.cuda.current_stream(device).record_event()

    def run(self, stream: Any) -> None:
        """Run the function, on a stream that waits for the operations queued before the task was made."""
        try:
            with torch.no_grad():
                if self._ready is None:
                    value = self._work()
                else:
                    stream.wait_event(self._ready)
                    with torch.cuda.stream(stream):
                        value = self._work()
                        self._done = stream.record_event()
            self._future.set_result(value)
        except BaseException as error:
            self._future.set_exception(error)

    def result(self, tensors: Callable[[Result], Iterable[Tensor]]) -> Result:
        """Wait for the return value, or raise the exception of the function.

        Args:
            tensors: returns the tensors of the value that are used afterwards, on the current stream.
        """
        value = self._future.result()
        if self._done is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._done)
            for tensor in tensors(value):
                tensor.record_stream(stream)
        return value


Tasks: TypeAlias = "queue.SimpleQueue[Task[Any] | None]"


class Background:
    """Thread for tasks; it ends when this object is collected, or with the process within `WAIT_S`."""

    def __init__(self) -> None:
        self._tasks: Tasks = queue.SimpleQueue()
        thread = threading.Thread(target=_run, args=(self._tasks,), name="scantling-exchange", daemon=True)
        _running[thread] = self._tasks
        atexit.unregister(_end_all)
        atexit.register(_end_all)  # runs before all handlers registered earlier
        thread.start()
        weakref.finalize(self, self._tasks.put, None).atexit = False

    def submit(self, work: Callable[[], Result], device: torch.device) -> Task[Result]:
        """Run a function after all submitted earlier.

        Args:
            work: called in the thread, without gradients.
            device: device of the tensors that it uses.
        """
        task = Task(work, device)
        self._tasks.put(task)
        return task


_running: dict[threading.Thread, Tasks] = {}


def _run(tasks: Tasks) -> None:
    streams: dict[torch.device, Any] = {}
    while (task := tasks.get()) is not None:
        device = task._device
        if device.type == "cuda" and device not in streams:
            streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        task.run(streams.get(device))
        del task  # it holds tensors
    _running.pop(threading.current_thread(), None)


def _end_all() -> None:
    for thread, tasks in list(_running.items()):
        tasks.put(None)
        thread.join(WAIT_S)
