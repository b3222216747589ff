"""Run directories as a real run leaves them, made without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

PARAMETERS = 1_181_696
TOKENS_PER_STEP = 4096
SECTIONS = {
    "model": {
        "preset": "llama-1m",
        "hf": None,
        "pretrained": None,
        "task": "causal-lm",
        "overrides": {},
        "attention": "sdpa",
    },
    "data": {"corpus": "python-stdlib", "text": None, "tokenizer": {"bpe": 2048}, "seq_len": 256, "heldout": 0.05},
    "optim": {"name": "adamw", "lr": 0.003, "weight_decay": 0.1, "betas": [0.9, 0.95]},
    "comm": {"name": "allreduce", "bucket_mb": 25.0},
    "precision": {"compute": "fp32"},
    "train": {
        "steps": 200,
        "batch_tokens": TOKENS_PER_STEP,
        "clip": 1.0,
        "schedule": "cosine",
        "warmup": 20.0,
        "seed": 0,
    },
}


def make_run(
    folder: Path,
    *,
    name: str = "demo-dense",
    steps: int = 200,
    planned_steps: int | None = None,
    optim: str = "adamw",
    speed: float = 1.0,
    floor: float = 2.1,
    evaluated: bool = True,
    status: str | None = "done",
    with_plan: bool = True,
    seed: int = 0,
) -> Path:
    """Write the folder of a run of `steps` steps; `status=None` leaves out `result.json`, as after a crash."""
    noise = np.random.default_rng(seed)
    planned_steps = planned_steps or steps
    recipe: dict[str, Any] = {"name": name, **{key: dict(section) for key, section in SECTIONS.items()}}
    recipe["optim"]["name"] = optim
    recipe["train"]["steps"] = planned_steps
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    (folder / "environment.json").write_text(json.dumps(_environment(), indent=2))
    state = 2 * 4 * PARAMETERS if optim == "adamw" else 4 * PARAMETERS + 120_000
    plan = _plan(state)
    if with_plan:
        (folder / "plan.json").write_text(json.dumps(plan | {"name": name}, indent=2))
    records = [
        _record(
            step, planned_steps, noise, state=state, speed=speed, floor=floor, evaluated=evaluated, last=step == steps
        )
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if status is not None:
        last = records[-1]
        held_out = next((r for r in reversed(records) if "eval_loss" in r), {})
        same = "tokens num_parameters weight_bytes gradient_bytes optimizer_state_bytes wire_bytes base_memory_bytes"
        result = {
            "name": name,
            "status": status,
            "step": steps,
            **{key: last[key] for key in [*same.split(), "memory_source"]},
            "energy_j": None,
            "energy_source": None,
            "step_s": float(np.median([r["step_s"] for r in records])),
            "tokens_per_s": float(np.median([r["tokens_per_s"] for r in records])),
            "peak_memory_bytes": max(r["peak_memory_bytes"] for r in records),
            "train_loss": float(np.mean([r["loss"] for r in records[-10:]])),
            "train_loss_steps": len(records[-10:]),
            "last_step_loss": records[-1]["loss"],
            **{key: held_out[key] for key in ("eval_loss", "perplexity", "bits_per_byte") if key in held_out},
        }
        (folder / "result.json").write_text(json.dumps(result, indent=2))
    return folder


def _record(
    step: int, planned: int, noise: Any, *, state: int, speed: float, floor: float, evaluated: bool, last: bool
) -> dict[str, Any]:
    loss = floor + 5.4 * float(np.exp(-step / 22)) + 0.5 * float(np.exp(-step / 120)) + 0.06 * noise.standard_normal()
    step_s = 0.41 / speed * (1 + 0.05 * abs(noise.standard_normal())) * (2.5 if step == 1 else 1)
    parts = {"data": 0.004, "forward": 0.32, "backward": 0.6, "exchange": 0.0, "optimizer": 0.07}
    warmup, done = min(1.0, step / 20), step / planned
    record: dict[str, Any] = {
        "step": step,
        "epoch": step // 150,
        "tokens": step * TOKENS_PER_STEP,
        "loss": loss,
        "grad_norm": 1.5 * float(np.exp(-step / 60)) + 0.4 + 0.08 * abs(noise.standard_normal()),
        "lr": 0.003 * warmup * (0.1 + 0.45 * (1 + float(np.cos(np.pi * done)))),
        "tokens_per_s": TOKENS_PER_STEP / step_s,
        "step_s": step_s,
        **{f"{phase}_s": share * step_s for phase, share in parts.items()},
        "peak_memory_bytes": 742_000_000 + state + 1000 * min(step, 30),
        "memory_source": "rss",
        "base_memory_bytes": 401_000_000,
        "num_parameters": PARAMETERS,
        "weight_bytes": 4 * PARAMETERS,
        "gradient_bytes": 4 * PARAMETERS,
        "optimizer_state_bytes": state,
        "wire_bytes": 0,
        "energy_j": None,
        "energy_source": None,
        "time": 1_795_000_000.0 + step,
    }
    if evaluated and (step % 50 == 0 or last):
        held_out = loss + 0.08
        record |= {
            "eval_loss": held_out,
            "perplexity": float(np.exp(held_out)),
            "bits_per_byte": held_out / np.log(2) / 3.1,
        }
    return record


def _plan(state: int) -> dict[str, Any]:
    activations, base = 330_000_000, 400_000_000
    return {
        "world_size": 1,
        "num_parameters": PARAMETERS,
        "num_trainable": PARAMETERS,
        "weight_bytes": 4 * PARAMETERS,
        "gradient_bytes": 4 * PARAMETERS,
        "optimizer_state_bytes": state,
        "activation_bytes": activations,
        "temporary_bytes": 9_000_000,
        "base_bytes": base,
        "peak_memory_bytes": 4 * PARAMETERS + state + activations + 9_000_000 + base,
        "wire_bytes": 0,
        "flops_per_step": 31_000_000_000,
        "tokens_per_step": TOKENS_PER_STEP,
        "notes": [],
    }


def _environment() -> dict[str, Any]:
    return {
        "versions": {
            "scantling": "0.1.0",
            "python": "3.11.7",
            "torch": "2.13.0+cpu",
            "transformers": "5.23.0",
            "cuda": None,
        },
        "hardware": {
            "platform": "Linux-6.1",
            "cpu": "Example CPU @ 2.60GHz",
            "cpu_count": 2,
            "memory_bytes": 25_000_000_000,
            "gpus": [],
        },
        "git_commit": "0123456789abcdef0123456789abcdef01234567",
        "command": ["scantling", "train", "recipes/demo-dense.yaml"],
        "world_size": 1,
        "device": "cpu",
        "data": {"documents": 3121, "tokens": 2_912_300, "bytes": 11_999_871, "fingerprint": "9f3c"},
    }
