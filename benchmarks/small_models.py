"""Shared parts of the quality benchmarks: the compared optimizers, the text, and a run of a recipe as a result line."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from peers import register
from resumable import Line, Spec, spec_key

ROOT = Path(__file__).resolve().parents[1]

CONFIDENT = [0.9, 0.95, 0.995]
CAME = {"name": "came", "debias": True, "betas": CONFIDENT}
PLAIN = {**CAME, "confidence": False}
LARGE_EMBEDDINGS = {"embedding_lr_scale": 16.0}
"""Option for T5, whose embeddings are initialized with a scale of 1, but matrices with 0.02 to 0.1."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "betas": [0.9, 0.95]},
    "adamw-slow": {"name": "adamw", "betas": [0.9, 0.99]},
    "came-slow": {**CAME, "betas": [0.9, 0.99, 0.999]},
    "adafactor-momentum": {"name": "adafactormomentum"},  # decays by lr times the RMS, like its steps
    "came-reference": {"name": "came", "factor": "last2"},
    "came": CAME,
    "came-int8": {**CAME, "momentum": "int8"},
    "came-int4": {**CAME, "momentum": "int4"},
    "plain": PLAIN,
    "plain-int8": {**PLAIN, "momentum": "int8"},
    "plain-int4": {**PLAIN, "momentum": "int4"},
    "adamw-embeddings": {"name": "adamw", "betas": [0.9, 0.95], **LARGE_EMBEDDINGS},
    "came-embeddings": {**CAME, **LARGE_EMBEDDINGS},
    "plain-embeddings": {**PLAIN, **LARGE_EMBEDDINGS},
    "muon": {"name": "muon"},
    "scale-like": {"name": "scalelike"},
    "apollo-mini": {"name": "apollomini"},
    "lamb": {"name": "lamb", "betas": [0.9, 0.95]},
}


def data_folder() -> Path:
    """Return the data folder."""
    return Path(os.environ.get("SCANTLING_DATA", ROOT.parent / "shared" / "data"))


def text(data: str) -> dict[str, Any]:
    """Return the source for a recipe's data section: `python` or `novels`."""
    if data == "novels":
        folder = data_folder()
        return {
            "text": str(folder / "lm" / "english_novels_train.txt.xz"),
            "validation": str(folder / "lm" / "english_novels_valid.txt.xz"),
            "document_separator": "<|doc|>",
            "max_bytes": 40_000_000,
        }
    return {"corpus": "python-stdlib", "max_bytes": 30_000_000}


def keep_freed_memory() -> None:
    """Keep freed memory in this process and its forks, so that large temporaries take no page faults.

    By default, glibc maps and unmaps each tensor of 32 MiB and more, and the kernel clears its pages each time. On a
    virtual machine with two cores whose transparent huge pages are always on, this took a third of a step of
    comm_quality.py's `llama-10m-8k-batch32`.
    """
    trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8  # malloc.h
    libc = ctypes.CDLL(None)
    for option, value in ((trim_threshold, -1), (top_pad, 2**28), (mmap_max, 0), (arena_max, 1)):
        libc.mallopt(option, value)


def rate_factors(steps: int, warm_up: float) -> list[float]:
    """Return the learning rate of each step as a fraction of its peak: linear warm-up, then linear to 0.

    Args:
        steps: length of the run.
        warm_up: fraction of the steps in which the rate rises.
    """
    warm = max(1, round(warm_up * steps))
    return [min((step + 1) / warm, (steps - step) / max(1, steps - warm)) for step in range(steps)]


def train_line(
    spec: Spec,
    recipe: dict[str, Any],
    *,
    run_dir: Path | None = None,
    finish: Callable[[Path], Line] | None = None,
) -> Line:
    """Train in this process and return the result line.

    Args:
        spec: specification of the run; its hash is the key of the line.
        recipe: recipe of the run. With `train.eval_every`, the line has the held-out curve.
        run_dir: folder of a long run's checkpoints, from which it resumes; removed at the end.
        finish: returns further values for the line from the run directory.
    """
    import scantling as sc
    from scantling.errors import NonFiniteError

    register()
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        place = run_dir or Path(folder) / "run"
        resume = any((place / "checkpoints").glob("step-*"))
        try:
            result = sc.train(recipe, run_dir=place, resume=resume, force=not resume)
            if result.status != "done":
                raise SystemExit(f"stopped by a signal after step {result.step}")  # not a result
            outcome = _outcome(dict(result.metrics), place / "metrics.jsonl")
            outcome |= {} if finish is None else finish(place)
        except NonFiniteError as error:
            outcome = {"eval_loss": None, "failure": str(error)}
        if resume:
            outcome["resumed"] = True  # the seconds are then those of the last part only
    if run_dir is not None:
        shutil.rmtree(run_dir)
    return {"key": spec_key(spec), **spec, **outcome, **run_facts(began)}


def _outcome(metrics: dict[str, Any], path: Path) -> dict[str, Any]:
    from scantling.trainer.reporting.metrics import read_metrics

    records = read_metrics(path)
    outcome = {key: metrics.get(key) for key in ("eval_loss", "bits_per_byte", "optimizer_state_bytes")}
    outcome["loss"] = metrics.get("train_loss")
    losses = records.column("loss")
    outcome["curve"] = [round(float(np.mean(part)), 4) for part in np.array_split(losses, min(50, len(losses)))]
    outcome["num_parameters"] = metrics["num_parameters"]
    outcome["step_s"] = metrics["step_s"]
    outcome |= {key: records.last[key] for key in ("tensor_parameters", "tensor_size") if key in records.last}
    columns = records.columns()
    evaluated = np.flatnonzero(np.isfinite(records.column("eval_loss")))
    figures = {
        key: [[int(columns["step"][index]), float(columns[key][index])] for index in evaluated]
        for key in ("eval_loss", "accuracy")
        if key in columns
    }
    if len(evaluated) > 1:
        outcome["heldout"] = figures["eval_loss"]
    if "accuracy" in figures:
        outcome["accuracy"] = figures["accuracy"]
    return outcome


def run_facts(began: float) -> dict[str, Any]:
    """Return when and where a run was made, and how long it took."""
    import torch

    from scantling.trainer.training.run_dir import environment

    found = environment()
    return {
        "seconds": round(time.time() - began),
        "date": time.strftime("%Y-%m-%d"),
        "threads": torch.get_num_threads(),
        "versions": found["versions"],
        "cpu": found["hardware"]["cpu"],
        "git_commit": found["git_commit"],
    }


def printed(line: Line) -> None:
    """Print a line as the last output of a process."""
    print(json.dumps(line), flush=True)
