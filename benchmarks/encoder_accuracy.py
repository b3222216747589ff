"""Train the runs of `six_encoder.py`: width 256 on the sentence pairs of SCANTLING_DATA/nli."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from resumable import Grid, Line, Spec, spec_key
from small_models import ROOT, data_folder, run_facts, train_line

MODEL = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
ADAMW = {"name": "adamw", "betas": [0.9, 0.999]}
GALORE = {"name": "galore", "rank": 64}
CORES = {
    "rank": {"*.word_embeddings": 32, "*.dense": 30, "*.self.*": 30},
    "lr_scale": 0.5,
    "embedding_lr_scale": 16.0,
}
"""The paper's ranks. All other parameters learn at `optim.lr`, as in the dense model."""
TARGETS = {"0.8": 0.8, "0.5": 0.5, "0.2": 0.2, "361x": 0.1777}
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "dense": (ADAMW, None),
    "galore": (GALORE, None),
    "cores": (ADAMW, CORES),
    **{f"cores-{name}": (ADAMW, {**CORES, "size_target": target}) for name, target in TARGETS.items()},
}
"""Optimizer and tensor section of each row."""
ADAPT, BEGIN = 0.75, 0.5
"""Fractions of a run at which the rank reduction ends and begins."""
GRID = Grid([31.25e-6 * 2**power for power in range(10)], start=2)  # 31.25e-6 to 16e-3
STARTS = {"galore": 4}
"""Grid index at which a row's sweep starts, if not at 125e-6."""
TESTS = ("lingnli_valid", "mnli_dev_matched_part_a")
SEEDS = (1, 2, 3)
COMPARED = ("dense", "cores", "cores-0.2")
"""Rows run with every seed; the other rows are points of a curve and run with the first seed."""
PAIRS_A_BATCH, EMBEDDING_RATE = 32, 1e-3
SWEEP_STEPS, EPOCHS, TRAINING_PAIRS = 3753, 4, 60_051
STEPS_A_PASS = round(TRAINING_PAIRS / PAIRS_A_BATCH)


def swept_row(row: str) -> str:
    """Return the row whose learning rate a row uses."""
    return "cores" if row.startswith("cores") else row


def run_spec(row: str, lr: float, seed: int, steps: int, *, dev: bool) -> Spec:
    """Return one run at width 256 as plain values; their hash decides whether it has already been run."""
    optim, tensor = ROWS[row]
    if tensor is not None and "size_target" in tensor:
        tensor = {**tensor, "adapt": ADAPT, "adapter": {**tensor.get("adapter", {}), "begin": round(BEGIN * steps)}}
    optim = {**optim, "lr": lr, "embedding_lr_scale": EMBEDDING_RATE / lr, "weight_decay": 0.0}
    fixed = {"model": MODEL, "batch": PAIRS_A_BATCH, "compute": "bf16", "bucket": True}
    return {**fixed, "row": row, "optim": optim, "tensor": tensor, "seed": seed, "steps": steps, "dev": dev}


def trivial_spec(test: str) -> Spec:
    """Return the specification of the trivial baselines on a test set."""
    return {"measure": "trivial", "test": test}


def build_recipe(spec: Spec) -> dict[str, Any]:
    folder = data_folder() / "nli"
    held = {"heldout": 0.05} if spec["dev"] else {"validation": str(folder / f"{TESTS[-1]}.jsonl.gz")}
    recipe = {
        "name": "six-encoder",
        "model": {"preset": "bert-6-encoder", "task": "classification", "overrides": spec["model"]},
        "data": {
            "jsonl": str(folder / "train.jsonl.gz"),
            "fields": {"text": "premise", "pair": "hypothesis", "label": "label"},
            "labels": ["entailment", "neutral", "contradiction"],
            "tokenizer": {"bpe": spec["model"]["vocab_size"]},
            "seq_len": 80,
            "bucket": spec["bucket"],
            **held,
        },
        "optim": spec["optim"],
        "precision": {"compute": spec["compute"]},
        "train": {
            "steps": spec["steps"],
            "batch_size": spec["batch"],
            "schedule": "linear",
            "warmup": 0.1,
            "checkpoint_every": max(1, spec["steps"] // 20),
            "eval_every": STEPS_A_PASS,
            "seed": spec["seed"],
            "device": "cpu",
        },
    }
    return recipe | ({} if spec["tensor"] is None else {"tensor": spec["tensor"]})


def run_training(spec: Spec) -> Line:
    """Train in this process, or resume an interrupted run, and return the result line."""
    if spec["optim"]["name"] == "galore":
        import galore

        galore.register()
    run_dir = ROOT / "runs" / f"six-encoder-{spec_key(spec)}"
    return train_line(spec, build_recipe(spec), run_dir=run_dir, finish=None if spec["dev"] else finished)


def finished(run_dir: Path) -> Line:
    """Return the sizes and, for both test sets, the accuracy and the correct pairs as bits in hexadecimal."""
    import numpy as np
    import torch

    from scantling.tensor.embedding import TTMEmbedding
    from scantling.tensor.layer import TTLayer
    from scantling.tensor.linear import TTLinear
    from scantling.trainer.reporting.metrics import read_metrics
    from scantling.trainer.training.trained_run import load_run

    run = load_run(run_dir)
    model = run.model
    tests, right, pairs = {}, {}, {}
    answers: list[torch.Tensor] = []
    model.register_forward_hook(lambda module, inputs, found: answers.append(found.logits.argmax(-1)))
    for test in TESTS:
        section = run.recipe.data.model_copy(update={"validation": str(data_folder() / "nli" / f"{test}.jsonl.gz")})
        data = run.task.prepare(section, seed=run.recipe.train.seed)
        answers.clear()
        tests[test] = replace(run, data=data).evaluate()["accuracy"]
        assert data.heldout is not None
        labels = torch.tensor([data.heldout[index].label for index in range(len(data.heldout))])
        bits = (torch.cat(answers) == labels).numpy()
        assert abs(bits.mean() - tests[test]) < 1e-9
        right[test], pairs[test] = np.packbits(bits).tobytes().hex(), len(bits)
    last = read_metrics(run_dir / "metrics.jsonl").last
    layers = {name: module for name, module in model.named_modules() if isinstance(module, TTLayer)}
    dense = {TTLinear: ("in_features", "out_features"), TTMEmbedding: ("num_embeddings", "embedding_dim")}
    sizes = [[getattr(layer, side) for side in dense[type(layer)]] for layer in layers.values()]
    return {
        "tests": tests,
        "right": right,
        "pairs": pairs,
        "num_parameters": sum(param.numel() for param in model.parameters()),
        "training_state_bytes": sum(last[f"{part}_bytes"] for part in ("weight", "gradient", "optimizer_state")),
        "core_numbers": sum(core.numel() for layer in layers.values() for core in layer.cores),
        "dense_numbers": sum(rows * cols for rows, cols in sizes),
        "ranks": {name: layer.ranks for name, layer in layers.items()},
    }


def trivial_line(spec: Spec) -> Line:
    """Return the accuracy on a test set of the most frequent label and of a linear model of the hypothesis alone."""
    from scantling.trainer.recipe import load_recipe
    from scantling.trainer.tasks import get_task

    began = time.time()
    recipe = load_recipe(build_recipe(run_spec("dense", 1e-3, 0, 1, dev=False)))
    section = recipe.data.model_copy(update={"validation": str(data_folder() / "nli" / f"{spec['test']}.jsonl.gz")})
    task = get_task("classification")
    return {"key": spec_key(spec), **spec, **task.baselines(task.prepare(section, seed=0)), **run_facts(began)}


def heldout_error(line: Line) -> float | None:
    """Return the final error on the held-out pairs, or None if the run failed.

    The few pairs lead to ties. The loss breaks them, scaled so small that it changes nothing else.
    """
    # 1e-9 times a loss of order 1 is far below the error of a single pair
    return 1.0 - float(line["accuracy"][-1][1]) + 1e-9 * float(line["eval_loss"]) if "accuracy" in line else None


def swept(lines: dict[str, Line], row: str, steps: int) -> list[float | None]:
    """Return the held-out error of each learning rate with seed 0."""
    return GRID.results(lines, lambda rate: run_spec(row, rate, 0, steps, dev=True), heldout_error)
