"""Measure optimizer state in bytes, predicted on the meta device and counted on real tensors: CAME and others.

    python benchmarks/optim_bytes.py          (reports missing packages with the reason; 24 GiB, an hour)
    python benchmarks/optim_bytes.py --read benchmarks/results/optim-bytes-2026-11-21.json      judge its rows again

    1. state per parameter: at the shapes of Llama-3-8B on the meta device, and on real tensors for 1/32 of it (one
       layer and 1/32 of the vocabulary, which keeps all proportions)
    2. all memory that is alive in a training step with bf16 weights, stochastic rounding and gradient release
    3. temporary memory of one step
    4. convolutions
    5. a BERT of 4 billion parameters, compared with the values of CAME's authors

State is every storage that is reachable from the optimizer. Every optimizer has its own process, in which glibc returns
freed blocks, so the resident set equals the memory in use. The exit code is 1 if an aim is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from contenders import CONTENDERS, MOMENTA, Contender, Model, Spec, held_bytes
from dated import dated, write
from torch import nn

from scantling.errors import first_line
from scantling.groups import param_groups
from scantling.optim import CAME, release_gradients, state_bytes
from scantling.optim.memory import ScratchMeter
from scantling.trainer.rss import peak_rss_bytes, reset_peak_rss, rss_bytes

Row = dict[str, Any]

PACKAGES = ("torchao", "bitsandbytes", "flashoptim", "triton", "galore-torch", "apollo-torch", "came-pytorch")
PACKAGES += ("pytorch-optimizer",)

LAYERS, VOCAB = 32, 128_256  # of Llama-3-8B
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CONVOLUTIONS: dict[str, list[Spec]] = {
    "conv 3x3": [Spec("matrix", (256, 256, 3, 3))],
    "conv 1x1": [Spec("matrix", (512, 256, 1, 1))],
}
CONVOLVED = (*(f"CAME {momentum}" for momentum in MOMENTA), "torch AdamW", "torch Adafactor", "torchao AdamW8bit")
CONVOLVED += ("came-pytorch", "pytorch_optimizer CAME")
BERT = {"hidden_size": 2560, "num_hidden_layers": 48, "num_attention_heads": 40, "intermediate_size": 10240}
BERT_AUTHORS_GB = {"torch AdamW": 30.6, "came-pytorch": 16.3, "CAME fp32": 16.3}
ALL_IN = {"layers alone": (12, VOCAB // LAYERS), "as Llama-3-8B": (4, 4 * VOCAB // LAYERS)}
"""Layers and vocabulary of two models: one with many layers, next to which no gradient is large; one with the
proportions of the whole model.
"""
STATE_LIMITS = {"int8": 1.03, "int4": 0.54}
ALL_IN_LIMITS = {"int8": 3.1, "int4": 2.6}
CONV_LIMITS = {"fp32": 4.2, "int8": 1.1}


def llama_specs(layers: int, vocab: int, sides: int = 1) -> list[Spec]:
    """Return Llama-3-8B's shapes with another depth and vocabulary: untied embeddings, 8 key-value heads for 32."""
    hidden, intermediate, key_value = (side // sides for side in (4096, 14336, 1024))
    matrices = [(hidden, hidden)] * 2 + [(key_value, hidden)] * 2 + [(intermediate, hidden)] * 2
    layer = [Spec("matrix", shape) for shape in [*matrices, (hidden, intermediate)]]
    layer += [Spec("vector", (hidden,))] * 2
    rows = vocab // sides
    return [Spec("embedding", (rows, hidden)), *layer * layers, Spec("vector", (hidden,)), Spec("head", (rows, hidden))]


def resnet_specs() -> list[Spec]:
    from transformers import ResNetConfig, ResNetModel

    with torch.device("meta"):
        model = ResNetModel(ResNetConfig())  # the defaults are ResNet-50
    return [Spec("matrix", tuple(param.shape)) for param in model.parameters() if param.ndim == 4]


def bert_specs() -> list[Spec]:
    from transformers import BertConfig, BertForPreTraining

    with torch.device("meta"):
        model = BertForPreTraining(BertConfig(**BERT))
    found = []
    for group in param_groups(model):
        found += [Spec(group["role"], tuple(param.shape)) for _, param in group["params"]]
    return found


def shapes(name: str, sides: int = 1) -> list[Spec]:
    if name == "Llama-3-8B":
        return llama_specs(LAYERS, VOCAB)
    if name == "Llama-3-8B / 32":
        return llama_specs(1, VOCAB // LAYERS, sides)
    if name == "BERT-4B":
        return bert_specs()
    return CONVOLUTIONS.get(name) or resnet_specs()


def find_cases(contender: Contender, dtype: str) -> list[tuple[str, str]]:
    """Return the (shapes, device) pairs to count for an optimizer with weights of this dtype."""
    found = [("Llama-3-8B / 32", "cpu")]
    if not contender.name.endswith("operations"):
        found.insert(0, ("Llama-3-8B", "meta"))
    if dtype == "fp32" and contender.name in CONVOLVED:
        found += [(name, "cpu") for name in (*CONVOLUTIONS, "ResNet-50 convs")]
    if dtype == "fp32" and (contender.name.startswith(("CAME ", "came")) or contender.name == "torch AdamW"):
        found += [("BERT-4B", "meta")] if not contender.name.endswith("operations") else []
    return found


def count_bytes(contender: Contender, specs: list[Spec], dtype: str, device: str) -> Row:
    """Return the state of an optimizer after two steps and, on real tensors, the memory that a third step allocates."""
    hidden = next((spec.shape[1] for spec in specs if spec.role == "embedding"), 0)
    numel = sum(prod(spec.shape) for spec in specs)
    row: Row = {"parameters": numel}
    uncompiled = patch("torch.compile", lambda function, **_: function)  # compiled code does not run on meta tensors
    try:
        model = Model.of(specs, hidden=hidden, dtype=DTYPES[dtype], device=device)
        if device == "meta" and contender.predict is not None:
            row["state_bytes"] = contender.predict(model)
        else:
            optimizer = contender.build(model)
            with uncompiled if device == "meta" else nullcontext():
                optimizer.step()
                optimizer.step()
            row["state_bytes"] = held_bytes(optimizer)
            if device == "cpu":
                row["transient_bytes"] = resident_peak(optimizer.step)
            if isinstance(optimizer, CAME):
                with ScratchMeter(optimizer) as meter:
                    optimizer.step()
                row["tracked_transient_bytes"] = meter.peak
    except Exception as error:  # any error that a package raises here is its result
        return {"error": f"{type(error).__name__}: {first_line(error)}"}
    row["bytes_per_parameter"] = row["state_bytes"] / numel
    return row


def resident_peak(work: Callable[[], Any]) -> int:
    """Return the largest resident size during a call, minus the resident size before it, in bytes (Linux)."""
    reset_peak_rss()
    before = rss_bytes()
    work()
    return peak_rss_bytes() - before


def make_training(momentum: str, **config: int) -> tuple[nn.Module, CAME, Callable[[], None]]:
    """Return a Llama with bf16 weights and released gradients, its optimizer, and a training step on two tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    whole = LlamaConfig(tie_word_embeddings=False, **config)
    model = LlamaForCausalLM._from_config(whole, dtype=torch.bfloat16)
    settings: Row = {"momentum": momentum, "rounding": "stochastic", "debias": True, "betas": (0.9, 0.95, 0.995)}
    optimizer = CAME(param_groups(model, weight_decay=0.1), lr=1e-3, **settings)
    release_gradients(model, optimizer)
    tokens = torch.arange(2).view(1, 2)
    return model, optimizer, lambda: model(input_ids=tokens, labels=tokens).loss.backward()


def measure_run_bytes(momentum: str, layers: int, vocab: int) -> Row:
    """Return the bytes alive at the peak of a training step: weights, state, and all that the step allocates.

    Activations of two tokens are negligible, but are counted. The resident set also includes allocations inside
    libraries, such as the workspace of a matrix product.
    """
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64}
    # a first small step loads everything that loads once
    make_training(momentum, **small, num_attention_heads=2, num_key_value_heads=1)[2]()
    base = rss_bytes()
    sides = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    model, optimizer, step = make_training(momentum, **sides, num_hidden_layers=layers, vocab_size=vocab)
    step()
    params = list(model.parameters())
    with ScratchMeter(optimizer) as meter:
        step()
    held = rss_bytes() - base
    transient = resident_peak(step)
    if any(param.grad is not None for param in params):
        raise RuntimeError("a gradient is left after the step")
    numel, weights, state = sum(p.numel() for p in params), sum(p.nbytes for p in params), state_bytes(optimizer)
    return {
        "parameters": numel,
        "weight_bytes": weights,
        "state_bytes": state,
        "step_bytes": meter.peak,
        "largest_gradient_bytes": max(param.nbytes for param in params),
        "resident_held_bytes": held,
        "resident_transient_bytes": transient,
        "held_per_parameter": (weights + state) / numel,
        "bytes_per_parameter": (weights + state + meter.peak) / numel,
        "resident_per_parameter": (held + transient) / numel,
    }


def run_in_own_process(task: Row) -> Any:
    command = [sys.executable, __file__, "--child", json.dumps(task)]
    settings = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"the process ended with {done.returncode}: {last}"}
    return json.loads(done.stdout.splitlines()[-1])


def run_task(task: Row) -> Any:
    if "momentum" in task:
        return measure_run_bytes(**task)
    contender = next(each for each in CONTENDERS if each.name == task["optimizer"])
    rows = []
    for name, device in find_cases(contender, task["weights"]):
        sides = contender.sides if device == "cpu" else 1
        row = count_bytes(contender, shapes(name, sides), task["weights"], device)
        rows.append({**task, "shapes": name, "device": device, "sides_divided_by": sides, **row})
    return rows


def find(rows: list[Row], optimizer: str, weights: str, name: str) -> Row:
    for row in rows:
        if (row["optimizer"], row["weights"], row["shapes"]) == (optimizer, weights, name):
            return row
    return {"error": "not run"}


def check_aims(rows: list[Row], trained: list[Row]) -> list[Row]:
    """Yield every aim with its value and limit; an unavailable value misses its aim."""
    found: list[Row] = []

    def aim(name: str, value: float | None, limit: float) -> None:
        found.append({"aim": name, "value": value, "limit": limit, "met": value is not None and value <= limit})

    for momentum, limit in STATE_LIMITS.items():
        for name in ("Llama-3-8B", "Llama-3-8B / 32"):
            row = find(rows, f"CAME {momentum}", "bf16", name)
            aim(f"state, {momentum}, {name} ({row.get('device')}), B/param", row.get("bytes_per_parameter"), limit)
    for momentum, limit in ALL_IN_LIMITS.items():
        for row in (row for row in trained if row.get("momentum") == momentum):
            name = f"all in, {momentum}, gradients released, {row['model']}, B/param"
            aim(name, row.get("bytes_per_parameter"), limit)
    for momentum in MOMENTA:
        for name in (f"CAME {momentum}", f"CAME {momentum}, operations"):
            row = find(rows, name, "bf16", "Llama-3-8B / 32")
            most = max(64 * 2**20, 0.02 * 2 * row.get("parameters", 0))
            values = [row[key] for key in ("transient_bytes", "tracked_transient_bytes") if key in row]
            aim(f"transient of one step, {name}, MiB", max(values) / 2**20 if values else None, most / 2**20)
    for momentum, limit in CONV_LIMITS.items():
        for name in (*CONVOLUTIONS, "ResNet-50 convs"):
            value = find(rows, f"CAME {momentum}", "fp32", name).get("bytes_per_parameter")
            aim(f"state, {momentum}, {name}, B/param", value, limit)
    return found


def show(rows: list[Row], trained: list[Row], judged: list[Row], names: list[str]) -> None:
    print("\nstate, bytes a parameter      meta: Llama-3-8B        real: a 32nd of it      one step takes")
    print(f"{'':30}{'fp32':>8}{'bf16':>8} weights{'fp32':>8}{'bf16':>8} weights  MiB, resident (fp32 weights)")
    for name in names:
        cells = [find(rows, name, weights, f"Llama-3-8B{part}") for part in ("", " / 32") for weights in DTYPES]
        text = [f"{c['bytes_per_parameter']:8.3f}" if "state_bytes" in c else f"{'-':>8}" for c in cells]
        step = f"{cells[2]['transient_bytes'] / 2**20:8.0f}" if "transient_bytes" in cells[2] else f"{'-':>8}"
        print(f"{name:30}{text[0]}{text[1]}        {text[2]}{text[3]}        {step}")
    print("\neverything alive, bf16 weights, stochastic rounding, gradients released: bytes a parameter")
    for row in (row for row in trained if "error" not in row):
        print(
            f"{row['momentum']}, {row['model']:14} {row['parameters'] / 1e9:.2f} B parameters: held "
            f"{row['held_per_parameter']:.3f}, at the peak {row['bytes_per_parameter']:.3f} (largest gradient "
            f"{row['largest_gradient_bytes'] / row['parameters']:.3f}); resident {row['resident_per_parameter']:.3f}"
        )
    print("\nstate of convolutions (fp32 weights), bytes a parameter")
    lists = (*CONVOLUTIONS, "ResNet-50 convs")
    print(f"{'':30}" + "".join(f"{name:>18}" for name in lists))
    for name in CONVOLVED:
        cells = [find(rows, name, "fp32", each) for each in lists]
        print(f"{name:30}" + "".join(f"{c.get('bytes_per_parameter', float('nan')):18.3f}" for c in cells))
    print("\nstate of a 4-billion-parameter BERT (fp32 weights), GB")
    for row in (row for row in rows if row["shapes"] == "BERT-4B" and "state_bytes" in row):
        given = BERT_AUTHORS_GB.get(row["optimizer"])
        implied = given / row["bytes_per_parameter"] if given else 0.0
        theirs = f"   authors: {given}, which is {implied:.2f} B parameters at these bytes" if given else ""
        print(f"{row['optimizer']:30}{row['state_bytes'] / 1e9:8.2f}{theirs}")
    print("\nnot measured")
    for row in (row for row in [*rows, *trained] if "error" in row):
        where = f"{row.get('shapes', row.get('model'))}, {row.get('weights', row.get('momentum'))}"
        print(f"{row.get('optimizer', 'CAME')} ({where}): {row['error']}")
    print("\naims")
    for each in judged:
        value = "not measured" if each["value"] is None else f"{each['value']:.3f}"
        print(f"{'met   ' if each['met'] else 'MISSED'} {each['aim']}: {value}, at most {each['limit']:.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="these optimizers; no result is written without --out"
    )
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--read", type=Path, metavar="FILE", help="show the results in FILE, run nothing")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_task(options.child)))
        return 0
    names = options.only or [contender.name for contender in CONTENDERS]
    if options.read:
        report = json.loads(options.read.read_text(encoding="utf-8"))
        judged = check_aims(report["state"], report["all_in"])
        show(report["state"], report["all_in"], judged, names)
        return 0 if all(each["met"] for each in judged) else 1
    rows: list[Row] = []
    for name in names:
        for weights in DTYPES:
            task = {"optimizer": name, "weights": weights}
            result = run_in_own_process(task)
            rows += result if isinstance(result, list) else [{**task, "shapes": "all", **result}]
            print(f"{name}, {weights} weights: done", file=sys.stderr, flush=True)
    trained = []
    for model, (layers, vocab) in ALL_IN.items() if not options.only else ():
        for momentum in ALL_IN_LIMITS:
            task = {"momentum": momentum, "layers": layers, "vocab": vocab}
            trained.append({"model": model, **task, **run_in_own_process(task)})
    judged = check_aims(rows, trained)
    report = dated(
        __file__,
        packages=package_versions(),
        bert_config=BERT,
        bert_authors_gb=BERT_AUTHORS_GB,
        aims=judged,
        state=rows,
        all_in=trained,
    )
    show(rows, trained, judged, names)
    is_whole = options.out is not None or not options.only
    print(write(report, "optim-bytes", options.out) if is_whole else "no result written")
    return 0 if all(each["met"] for each in judged) else 1


def package_versions() -> dict[str, str | None]:
    """Return the versions of the compared packages; None if a package is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


if __name__ == "__main__":
    sys.exit(main())
