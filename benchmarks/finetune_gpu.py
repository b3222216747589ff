"""Fine-tune a model of Llama-3-8B's shape on a GPU limited to 24 GB: peak memory of Scantling and of other optimizers.

    python benchmarks/finetune_gpu.py --group scantling         one of scantling, full, low-rank
    python benchmarks/finetune_gpu.py --only "LoRA, AdamW"      some contenders
    python benchmarks/finetune_gpu.py --device cpu --size tiny  tiny, only to try the script
    python benchmarks/gpu.py --parts finetune-scantling finetune-full finetune-low-rank

With --seconds the script ends in time and leaves out the contenders for which no time was left.

The packages of the contenders (see `finetune_rivals.py`) come from an index, or as wheels for a machine without one:

    sh scripts/gpu-wheels.sh DIR 3.12 rivals                   then as that script says

A package that is not installed is reported, and the other contenders run. Each contender trains in its own process,
where `torch.cuda.set_per_process_memory_fraction` limits the memory. One that runs out of memory is started again
without the limit for a few steps, which shows its need. All have the settings of recipes/finetune-8b-24gb.yaml:
random weights, two sequences of 2,048 tokens, blocks that recompute their activations and take one sequence at a time,
and a loss in chunks of 512 tokens. So contenders differ only in weights, gradients and state. The two sequences are the
same in every step, so that the loss falls; rates are not tuned, and the losses compare nothing.

`state_bytes` counts the tensors that the optimizer holds, `gradient_bytes` the gradients that exist at a time: all of
them, or the largest if they are released. `peak_bytes` and `peak_reserved_bytes` are those of PyTorch's allocator from
the start of the process on; the CUDA context takes some hundred megabytes more. `median_s` leaves out the first steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contenders import held_bytes
from dated import dated, write
from finetune_rivals import CONTENDERS, GROUPS, RECIPE, Built, Contender, Options
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 3
"""Steps without a time: they compile kernels and allocate the state."""
TINY = {
    "vocab_size": 2004,
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ALLOCATOR = "expandable_segments:True"
"""Allocator setting of all contenders, which keeps reserved memory near the allocated memory."""
LEAST_SECONDS = 20
"""Time below which no process is started."""


class Phase:
    """Name of the part of a run that an error message names."""

    name = "building the model"


def shape(size: str) -> tuple[dict[str, Any], int, int]:
    """Return the sizes of the model, the tokens of a sequence and those of a chunk of the loss."""
    from scantling.trainer.recipe import load_recipe

    recipe = load_recipe(RECIPE)
    assert recipe.train.loss_chunk is not None
    if size == "tiny":
        return recipe.model.overrides | TINY, 64, 16
    return dict(recipe.model.overrides), recipe.data.seq_len, recipe.train.loss_chunk


def build(contender: Contender, options: argparse.Namespace, phase: Phase) -> tuple[Any, Built, Tensor]:
    """Return the bare model of a contender, the model with its optimizer, and two sequences of token ids."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from scantling.trainer.models.block_parts import checkpoint_in_parts
    from scantling.trainer.models.checkpointing import checkpoint_activations
    from scantling.trainer.tasks.chunked_loss import chunk_loss

    sizes, seq_len, chunk = shape(options.size)
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, max_position_embeddings=seq_len)
    with torch.device(options.device):
        model: Any = LlamaForCausalLM._from_config(config, dtype=contender.dtype)
    ids = torch.randint(config.vocab_size, (2, seq_len + 1), device=options.device)  # (sequences, tokens)
    model.train()
    checkpoint_activations(model)
    checkpoint_in_parts(model, 1)
    chunk_loss(model, chunk)
    phase.name = "building the optimizer"
    settings = Options(sizes["hidden_size"], on_gpu=options.device == "cuda", exact_svd=options.exact_svd)
    return model, contender.build(model, settings), ids


def train(name: str, options: argparse.Namespace, phase: Phase) -> dict[str, Any]:
    """Take the steps of a contender in this process; return its measured values."""
    from scantling.trainer.tasks.chunked_loss import loss_labels

    contender = CONTENDERS[name]
    model, built, ids = build(contender, options, phase)
    inputs, labels = ids[:, :-1], ids[:, 1:].contiguous()
    losses, seconds = [], []
    # autocast would keep a bf16 copy of all weights in its cache
    autocast = torch.autocast(
        options.device, torch.bfloat16, enabled=contender.dtype == torch.float32, cache_enabled=False
    )
    for step in range(options.steps):
        phase.name = f"step {step + 1}"
        began = time.perf_counter()
        with autocast, loss_labels(model, labels):
            loss = built.model(input_ids=inputs, use_cache=False).logits / labels.numel()
        loss.backward()
        if not built.is_released:
            built.optimizer.step()
            built.optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if options.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    timed = seconds[WARM_UP_STEPS:] or seconds[-1:]
    times = {"median_s": float(np.median(timed)), "raw_s": seconds}
    return {**_bytes(built), **_peak(options.device), "losses": losses, **times}


def _bytes(built: Built) -> dict[str, Any]:
    """Return the bytes of weights, gradients and state, and their sum per parameter."""
    params = [*built.model.parameters()]
    gradients = [param.nbytes for param in params if param.requires_grad]
    found = {
        "weight_bytes": sum(param.nbytes for param in params),
        "gradient_bytes": max(gradients) if built.is_released else sum(gradients),
        "state_bytes": held_bytes(built.optimizer),
    }
    numel = sum(param.numel() for param in params)
    return {"num_parameters": numel, **found, "bytes_per_parameter": sum(found.values()) / numel}


def _peak(device: str) -> dict[str, int]:
    if device != "cuda":
        return {}
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "peak_reserved_bytes": torch.cuda.max_memory_reserved()}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the values of a contender, or the reason why there are none."""
    note = {"note": CONTENDERS[name].note} if CONTENDERS[name].note else {}
    phase = Phase()
    try:
        if options.device == "cuda" and options.limit_gb is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, options.limit_gb * 1e9 / total))
        return train(name, options, phase) | note
    except torch.OutOfMemoryError as error:
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        held = torch.cuda.memory_allocated() / 1e9
        text = f"out of memory in {phase.name}: asked for {asked[1] if asked else '?'} with {held:.1f} GB allocated"
        return {"error": text, "is_out_of_memory": True, **_peak(options.device), **note}
    except ImportError as error:
        return {"missing": f"not installed: {error.name or error}"}
    except Exception as error:  # an unsupported rival is a result too
        return {"error": f"{type(error).__name__} in {phase.name}: {error}"[:500], **note}


def run_child(
    name: str, options: argparse.Namespace, *, limit_gb: float | None, steps: int, seconds: float
) -> dict[str, Any]:
    """Return the values of a contender, measured in its own process, which is stopped after some seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--contender", name, "--out", str(path), "--device", options.device]
        command += ["--size", options.size, "--steps", str(steps), *["--exact-svd"] * options.exact_svd]
        command += [] if limit_gb is None else ["--limit-gb", str(limit_gb)]
        paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths, "PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, env=environment, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"stopped after {seconds:.0f} s"}
        if done.returncode or not path.exists():
            return {"error": f"exit code {done.returncode}: {done.stderr[-400:]}"}
        row: dict[str, Any] = json.loads(path.read_text())
        return row


def compare(names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Measure contenders and write the report after each; return their values."""
    end = time.monotonic() + options.seconds
    results: dict[str, Any] = {}

    def left() -> float:
        return min(options.contender_seconds, end - time.monotonic())

    for name in names:
        if left() < LEAST_SECONDS:
            results[name] = {"missing": "not run: no time was left"}
        elif options.device == "cpu":  # without limits, so one process serves all
            results[name] = _by_limit("no limit", measure(name, options))
            gc.collect()
        else:
            row = run_child(name, options, limit_gb=options.limit_gb, steps=options.steps, seconds=left())
            results[name] = _by_limit(f"{options.limit_gb:g} GB", row)
            if row.get("is_out_of_memory") and left() >= LEAST_SECONDS:
                results[name]["no limit"] = run_child(
                    name, options, limit_gb=None, steps=options.unlimited_steps, seconds=left()
                )
        show(name, results[name])
        report = dated(__file__, recipe=RECIPE.name, allocator=ALLOCATOR, limit_gb=options.limit_gb, results=results)
        write(report, f"finetune-gpu-{options.group or 'all'}", options.out)
    return results


def _by_limit(limit: str, row: dict[str, Any]) -> dict[str, Any]:
    return row if "missing" in row else {limit: row}


def show(name: str, rows: dict[str, Any]) -> None:
    """Print the values of a contender, one line for each limit."""
    if "missing" in rows:
        print(f"{name:46} {rows['missing']}", flush=True)
        return
    for limit, row in rows.items():
        if "error" in row:
            print(f"{name:46} {limit:9} {row['error']}", flush=True)
            continue
        peaks = "".join(
            f"{kind} {row[key] / 1e9:6.2f} GB  "
            for kind, key in (("allocated", "peak_bytes"), ("reserved", "peak_reserved_bytes"))
            if key in row
        )
        print(
            f"{name:46} {limit:9} {peaks}{row['bytes_per_parameter']:6.2f} bytes per parameter  "
            f"{1e3 * row['median_s']:8.1f} ms per step  loss {row['losses'][0]:.3f} to {row['losses'][-1]:.3f}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", choices=GROUPS, default=None, help="only the contenders of a group")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=None, help="only these contenders")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tries the script")
    parser.add_argument("--size", choices=["8b", "tiny"], default="8b")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--unlimited-steps", type=int, default=3, help="of contenders that exceed the limit")
    parser.add_argument("--limit-gb", type=float, default=None, help="memory of a process; default 24 on a GPU")
    parser.add_argument("--seconds", type=float, default=840.0, help="time of all contenders")
    parser.add_argument("--contender-seconds", type=float, default=150.0, help="time of one process")
    parser.add_argument("--exact-svd", action="store_true", help="GaLore's own decomposition: minutes per step")
    parser.add_argument("--contender", choices=CONTENDERS, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if options.contender is not None:
        options.out.write_text(json.dumps(measure(options.contender, options)))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("finetune-gpu: no NVIDIA GPU here; --device cpu --size tiny tries the script")
        return 4
    if options.device == "cuda" and options.limit_gb is None:
        options.limit_gb = 24.0
    names = [name for name, each in CONTENDERS.items() if options.group in (None, each.group)]
    compare([name for name in names if options.only is None or name in options.only], options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
