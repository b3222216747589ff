"""Save checkpoints in a thread while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scantling.comm.transport.background import Background, Task
from scantling.distributed.context import DistContext
from scantling.trainer.training.checkpoint import Checkpoint, Checkpointer, State
from scantling.trainer.training.checkpoint_parts import Part, own_parts


class BackgroundCheckpointer(Checkpointer):
    """Saves the checkpoints of one run in a thread, one at a time.

    `save` copies the tensors that this rank writes to CPU memory, which it uses again in the next save. Then the thread
    runs `Checkpointer.write` over a separate process group, so that the files are the same.

    Collective: a new process group.

    Args:
        folder, context, keep: as of `Checkpointer`.
    """

    def __init__(self, folder: Path, context: DistContext, *, keep: int = 2) -> None:
        super().__init__(folder, context, keep=keep)
        self._writer = Checkpointer(folder, context.with_own_group(), keep=keep)
        self._background = Background("scantling-checkpoint")
        self._task: Task[Path] | None = None
        self._staged: dict[str, torch.Tensor] = {}

    def save(self, step: int, state: State) -> Path:
        """Start to write a checkpoint, and return the folder that it gets. Waits for the save before.

        Raises:
            RunError: as of `wait`.
        """
        self.wait()
        parts = self._stage(own_parts(state.tensors, self.context))
        # the values may refer to lists of a running optimizer
        work = partial(self._writer.write, step, parts, copy.deepcopy(state.values))
        # the copies are complete: the thread needs no device
        self._task = self._background.submit(work, torch.device("cpu"))
        return self.folder / f"step-{step}"

    def _stage(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        """Copy parts to CPU memory, pinned for those of a GPU, and return the copies."""
        before, self._staged = self._staged, {}
        for key, part in parts.items():
            buffer, values = before.pop(key, None), part.values
            # the strides of the copy, in which the file has it, are those of `empty_like`
            if buffer is None or _layout(buffer) != _layout(torch.empty_like(values, device="meta")):
                buffer = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
            self._staged[key] = buffer.copy_(values, non_blocking=True)
        if self.context.device.type == "cuda":
            torch.cuda.current_stream(self.context.device).synchronize()
        return {key: replace(part, values=self._staged[key]) for key, part in parts.items()}

    @property
    def has_failed(self) -> bool:
        """True if `wait` raises the error of a save."""
        return self._task is not None and self._task.has_failed

    @property
    def is_writing(self) -> bool:
        """True if `wait` waits."""
        return self._task is not None and not self._task.is_done

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the checkpoint of the last `save` is on all disks.

        Args:
            timeout_s: longest time to wait in seconds; None for no limit.

        Raises:
            RunError: a rank could not write it; all ranks raise the same, and earlier checkpoints are untouched.
            TimeoutError: the save takes longer.
        """
        if self._task is not None:
            task, self._task = self._task, None
            try:
                task.result(timeout_s=timeout_s)
            except TimeoutError:
                raise TimeoutError(f"it was not complete after {timeout_s:g} s") from None

    def newest(self, *, weights_only: bool = False) -> Checkpoint | None:
        """Wait for the save in the background, and return what `Checkpointer.newest` returns."""
        self.wait()
        return super().newest(weights_only=weights_only)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()
