"""Evaluate a run's model with lm-evaluation-harness, an optional package."""

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
from scantling.trainer.training.trained_run import open_run

BATCH = 16
"""Number of requests per batch."""


def evaluate_tasks(run_dir: str | Path, tasks: Sequence[str], *, device: str | None = None) -> dict[str, Any]:
    """Run tasks of lm-evaluation-harness on the newest complete checkpoint of a run, in its training precision.

    Args:
        run_dir: the directory of a run of the task causal-lm.
        tasks: names of tasks of lm-evaluation-harness, or paths of YAML files of tasks.
        device: auto, cpu or cuda. Default: `train.device` of the run's recipe.

    Returns:
        The `results` of the harness: metrics by task.

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
    chosen = [_find_task(name, manager.all_tasks) for name in tasks]
    reason = "--lm-eval needs a causal language model"
    with tempfile.TemporaryDirectory() as folder, open_run(run_dir, device=device, causal=reason) as run:
        model = run.model
        # the harness needs a tokenizer of transformers: write ours in its format and load it
        run.task.save_inputs(Path(folder), data=run.data, config=model.config)
        with quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        _set_compute(run.recipe.precision.autocast(run.context.device.type), model, run.context.device)
        harnessed = HFLM(
            pretrained=model.eval(),
            tokenizer=tokenizer,
            batch_size=BATCH,
            **_set_document_start(tokenizer, run.data.tokenizer),
        )
        try:
            report = lm_eval.simple_evaluate(harnessed, tasks=chosen, task_manager=manager)
        except Exception as error:  # the harness and its data sets raise errors of many kinds
            raise UserError(f"--lm-eval {','.join(tasks)}: {first_line(error)}") from error
    return dict(report["results"])


def _set_document_start(tokenizer: Any, own: Tokenizer | None) -> dict[str, Any]:
    """Let requests start like documents in training, and return the settings of the harness for it.

    A request is the start of a document: it has the tokens that the tokenizer puts before a text, not those after.
    """
    from tokenizers.processors import TemplateProcessing

    if own is None:
        return {}
    marks = document_marks(own)
    # the tokenizer of the harness gets the same prefix, and no suffix
    if marks.begin:
        before = [(str(tokenizer.convert_ids_to_tokens(id_)), id_) for id_ in marks.begin]
        # $A is the text of the request
        single = [*(token for token, _ in before), "$A"]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=before)
    return {"add_bos_token": bool(marks.begin), "prefix_token_id": marks.first[-1] if marks.first else None}


def _set_compute(compute: str, model: Any, device: torch.device) -> None:
    """Run a model's forward pass in a number format, with fp32 logits, because the harness sums their logs.

    A context around the harness has no effect: lm-evaluation-harness 0.4.13 turns autocast off when it calls a model.
    """
    if compute == "fp32":
        return
    forward = model.forward

    @wraps(forward)
    def in_format(*args: Any, **kwargs: Any) -> Any:
        with autocast(compute, device):
            output = forward(*args, **kwargs)
        output.logits = output.logits.float()
        return output

    model.forward = in_format


def _find_task(name: str, known: Sequence[str]) -> Any:
    """Return a task's name, or the settings in a YAML file; files that refer to code are refused."""
    if name.endswith((".yaml", ".yml")):
        try:
            return parse_yaml(read_text(Path(name)))
        except (OSError, ValueError) as error:
            raise UserError(f"--lm-eval: cannot read the task {name}: {error}") from None
    if name not in known:
        raise UserError(with_hint(f"--lm-eval: lm-evaluation-harness has no task '{name}'", name, known))
    return name
