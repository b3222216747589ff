"""Training tasks. A task is one file with one class, and one line in this module."""

from __future__ import annotations

from scantling.errors import UserError, with_hint
from scantling.trainer.tasks.base import LossSums, Task, TaskData
from scantling.trainer.tasks.causal_lm import CausalLM
from scantling.trainer.tasks.classification import Classification
from scantling.trainer.tasks.clicks import ClickPrediction
from scantling.trainer.tasks.image_classification import ImageClassification
from scantling.trainer.tasks.masked_lm import MaskedLM
from scantling.trainer.tasks.seq2seq import Seq2Seq

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (CausalLM, MaskedLM, Seq2Seq, Classification, ClickPrediction, ImageClassification)
}


def get_task(name: str) -> Task:
    """Return the task with this name.

    Raises:
        UserError: no such task.
    """
    if name not in TASKS:
        raise UserError(with_hint(f"model.task: must be one of {', '.join(TASKS)}; given '{name}'", name, TASKS))
    return TASKS[name]()


__all__ = ["TASKS", "LossSums", "Task", "TaskData", "get_task"]
