"""The tasks of lm-evaluation-harness on a run's model: a door to a package that is not installed with this one."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from scantling.errors import UserError, first_line, with_hint
from scantling.numerics.device import autocast
from scantling.trainer.data.prepare import document_marks
from scantling.trainer.data.tokenizers import Tokenizer
from scantling.trainer.models.build import quiet
from scantling.trainer.recipe.parsing import parse_yaml, read_text
from scantling.trainer.training.trained import opened

BATCH = 16
"""Requests that go through the model at a time."""


def evaluate_tasks(run_dir: str | Path, tasks: Sequence[str], *, device: str | None = None) -> dict[str, Any]:
    """Run tasks of lm-evaluation-harness on the newest whole checkpoint of a run, which computes as it was trained.

    Args:
        run_dir: the directory of a run of the task causal-lm.
        tasks: names that lm-evaluation-harness knows, or paths of YAML files of tasks.
        device: auto, cpu or cuda. Default: what the run's recipe names.

    Returns:
        What the harness calls results: figures by task.

    Raises:
        UserError: lm-evaluation-harness is not installed, knows no such task, or cannot get its data; a run of another
            task.
    """
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        missing = "" if error.name in (None, "lm_eval") else f" ({error.name} is missing)"
        raise UserError(f"--lm-eval needs lm-evaluation-harness{missing}: pip install 'scantling[harness]'") from None
    import transformers

    manager = TaskManager()
    chosen = [_task(name, manager.all_tasks) for name in tasks]
    wanted = "--lm-eval wants a causal language model"
    with tempfile.TemporaryDirectory() as folder, opened(run_dir, device=device, causal=wanted) as run:
        model = run.model
        run.task.save_inputs(Path(folder), data=run.data, config=model.config)
        with quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        _compute_in(run.recipe.precision.autocast(run.context.device.type), model, run.context.device)
        harnessed = HFLM(
            pretrained=model.eval(), tokenizer=tokenizer, batch_size=BATCH, **_beginnings(tokenizer, run.data.tokenizer)
        )
        try:
            found = lm_eval.simple_evaluate(harnessed, tasks=chosen, task_manager=manager)
        except Exception as error:  # the harness and its data sets raise errors of many kinds
            raise UserError(f"--lm-eval {','.join(tasks)}: {first_line(error)}") from error
    return dict(found["results"])


def _beginnings(tokenizer: Any, own: Tokenizer | None) -> dict[str, Any]:
    """Let requests begin as documents did in training, and return the settings of the harness that do so.

    A request is the beginning of a document: it has the tokens that the tokenizer puts before a text, not those after.
    """
    from tokenizers.processors import TemplateProcessing

    if own is None:
        return {}
    marks = document_marks(own)
    if marks.begin:
        before = [(str(tokenizer.convert_ids_to_tokens(id_)), id_) for id_ in marks.begin]
        single = [*(token for token, _ in before), "$A"]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=before)
    return {"add_bos_token": bool(marks.begin), "prefix_token_id": marks.first[-1] if marks.first else None}


def _compute_in(compute: str, model: Any, device: torch.device) -> None:
    """Let a model compute in a format wherever it is called; its logits are fp32, since the harness sums their logs.

    A context around the harness would not do: lm-evaluation-harness 0.4.13 turns autocast off where it calls a model.
    """
    if compute == "fp32":
        return
    forward = model.forward

    @wraps(forward)
    def in_format(*args: Any, **kwargs: Any) -> Any:
        with autocast(compute, device):
            found = forward(*args, **kwargs)
        found.logits = found.logits.float()
        return found

    model.forward = in_format


def _task(name: str, known: Sequence[str]) -> Any:
    """A task's name as it is, or the settings in a YAML file; one that names code of its own is refused."""
    if name.endswith((".yaml", ".yml")):
        try:
            return parse_yaml(read_text(Path(name)))
        except (OSError, ValueError) as error:
            raise UserError(f"--lm-eval: cannot read the task {name}: {error}") from None
    if name not in known:
        raise UserError(with_hint(f"--lm-eval: lm-evaluation-harness has no task '{name}'", name, known))
    return name
