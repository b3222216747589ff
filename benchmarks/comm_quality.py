"""Measure the loss of every communication method, from the same weights and in the same data order.

    python benchmarks/comm_quality.py sweep      one grid of learning rates for every method, seed 0
    python benchmarks/comm_quality.py seeds      each at its best rate, the same data order: MAIN with 8 seeds
                                                 (5 of the long runs), the others with 3; `--replicas 4` and 8 with more
    python benchmarks/comm_quality.py settings   ours with other coefficients, decay, alpha, formats; DiLoCo with other
                                                 outer rates
    python benchmarks/comm_quality.py rates      replicas that step AdamW on their own and average all weights after
                                                 every step, at the rates of AdamW under DDP and at higher ones
    python benchmarks/comm_quality.py report     the current state of the sweep

comm_table.py turns the result lines into tables, with differences paired by seed. time_to_loss.py computes from them
the times to a loss on a link.

The data sets, `--data`:

- `novels` (default): a decoder of half a million parameters on English novels.
- `novels-8k`: the same decoder with a vocabulary of 8,192, which has 62 % of its parameters. Its settings are channels
  for embeddings.
- `digits`: a vision transformer of 0.2 million parameters on scikit-learn's digits.
- `shapes-resnet` and `shapes-vit`: a ResNet with batch normalization, of 0.3 million parameters, and a vision
  transformer of 0.5 million, on the color images of shapes.py. Running statistics are averaged over the replicas before
  each evaluation.
- `llama-10m-long`: the preset llama-10m on bytes of the novels, 2,250 steps with the batches that network.py times, in
  bf16. A CPU without bf16 instructions computes products in fp32 and rounds them; `widened` marks lines of such runs.
- `llama-10m-8k`: the same model with a vocabulary of 8,192 and a head apart from the embedding, both together 35 % of
  15 million parameters.
- `llama-10m-8k-batch32`: the same with batches of 32 x 128 tokens, four times as many, for 600 steps. Only averaged
  AdamW is swept; Muon takes one pair of rates.
- `llama-10m`: 300 steps in fp32 of AdamW under DDP alone; the learning rate of embeddings comes from these runs.
- `llama-10m-64`: the same model for 2,000 steps of 8 x 64 tokens, in fp32, which takes ten minutes on two cores: DeMo
  and its settings, local steps, and the other methods.

Two replicas are two processes, each with half of every batch. Four and eight replicas each have a smaller part and take
the rates that are best with two; the result of AdamW under DDP is taken from two replicas, because it computes the
same, except with batch normalization, which takes the statistics of each replica's part. The seeds of the long runs
include that of the sweep. The length of a run is a multiple of the local steps, and evaluations are of the weights
after the last exchange. `ours k192 h5 all_gather` takes five AdamW steps between exchanges, which send the signs of the
192 largest of 4,096 coefficients; `ours k144 h5 owner` sends 144 with the owner strategy. Bytes come from the formulas,
which benchmarks/network.py checks against the counters of an interface. `bytes_over_the_run` includes the first 30
steps of PowerSGD, which average everything: a tenth of 300, as its documentation advises.

In all methods but SGD, published DeMo and `ddp, one rate`, AdamW trains embeddings and vectors at the rate that is best
for AdamW alone. This rate is swept first; afterwards only the rate of the matrices is swept. DeMo's AdamW has a
separate rate, and this gives the other methods the same advantage. With a vocabulary of 8,192, where the embedding is a
large part of the model, its rate is swept for each method, too, at the best rate of the matrices. Gradients are clipped
at a norm of 1 for AdamW and SGD. DeMo was published with a decay of 0.999, which suits long runs; it is run with 0.95,
as ours is, too. Runs are lines of results/comm-quality.jsonl; no run is repeated.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import shapes
from dated import RESULTS
from optim_quality import MODEL
from resumable import Grid, Ledger, Line, Spec, command_line, spec_key
from small_models import keep_freed_memory, printed, run_facts, text

REPLICAS = 2
ALSO = (4, 8)
"""World sizes of further runs."""
RATES = [0.125e-3 * 2**power for power in range(14)]  # to 1
GRID = Grid(RATES, start=4, least=3)  # starts at 2e-3
STARTS = {"ddp sgd": 10, "dion r4": 7, "dion r16": 7}
OURS, BETA1_0 = "ours k8 all_gather", "exchange k8, adamw beta1 0"
LOCAL, LOCAL_OWNER = "ours k192 h5 all_gather", "ours k144 h5 owner"
"""Methods that exchange after every five AdamW steps."""
KEPT, SELDOM, RARE = "ours kept k176 h5", "ours kept k960 h20", "ours kept k4096 h40"
"""Methods whose replicas keep the residual in their weights, with 5, 20 and 40 local steps; RARE sends all signs."""
DDP_MUON, MUON = "ddp muon", "ours muon k960 h20"
"""Muon for matrices and AdamW for the rest: on averaged gradients, and in the local steps of SELDOM."""
SIGNS, SIGNS_MUON = "ours adamw h15", "ours muon h15"
"""Local steps that send the signs of all elements, the defaults of the library."""


@dataclass(frozen=True)
class Work:
    """A model with its data, and the settings that all of its runs share.

    Attributes:
        model, data: sections of the recipe.
        batch: examples in a step of all replicas together.
        steps: length of a run.
        dense_lr: AdamW's learning rate for embeddings and vectors, in all methods but ONE_RATE; found by the first
            method's sweep.
        tunes_dense: True to sweep this rate for each method, from `dense_lr` on.
        dense_betas: of AdamW for the same parameters; those of the matrices by default.
        options: of all methods with an exchange of ours.
        methods: the methods to compare; all by default.
        eval_samples: held-out samples.
        grid: learning rates.
        rates: learning rates of methods that are not swept.
        seeds: seeds of AdamW and MAIN.
        few_seeds: seeds of the other methods.
        compute: format of matrix products.
    """

    model: dict[str, Any]
    data: dict[str, Any]
    batch: int
    steps: int
    dense_lr: float
    tunes_dense: bool = False
    dense_betas: tuple[float, float] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    eval_samples: int = 400
    grid: Grid = GRID
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    seeds: range = range(1, 9)
    few_seeds: range = range(1, 4)
    compute: str = "fp32"


WORKS = {
    "novels": Work(
        {"preset": "llama-1m", "overrides": MODEL},
        {**text("novels"), "tokenizer": {"bpe": 512}, "seq_len": 128},
        batch=16,
        steps=300,
        dense_lr=2e-3,
    ),
    "digits": Work({"preset": "vit-digits"}, {"images": "digits", "heldout": 0.2}, batch=64, steps=300, dense_lr=1e-3),
    "llama-10m": Work(
        {"preset": "llama-10m"},
        {**text("novels"), "seq_len": 128},
        batch=8,
        steps=300,
        dense_lr=5e-4,
        methods=("ddp fp32", "ddp, one rate"),
        eval_samples=200,
    ),
}
REAL_VOCABULARY = {"tunes_dense": True, "dense_betas": (0.6, 0.99), "options": {"embeddings": "sparse gradients"}}
WORKS["novels-8k"] = replace(
    WORKS["novels"],
    **REAL_VOCABULARY,
    data={**WORKS["novels"].data, "tokenizer": {"bpe": 8192}},
    steps=1000,
    dense_lr=32e-3,
    methods=("ddp, one rate", "ddp fp32", DDP_MUON, SIGNS, SIGNS_MUON, BETA1_0, OURS),
    seeds=range(1, 6),
    few_seeds=range(1, 6),
)
WORKS["shapes-resnet"] = Work(
    {
        "hf": str(Path(__file__).with_name("resnet-shapes.json")),
        "task": "image-classification",
        "attention": "eager",
    },
    {"images": str(shapes.PATH), "image_size": shapes.SIDE, "heldout": 0.25},
    batch=64,
    steps=600,
    dense_lr=8e-3,
    methods=(
        "ddp, one rate",
        "ddp fp32",
        "powersgd r4",
        "one bit, adamw",
        "diloco h30",
        LOCAL,
        SELDOM,
        SIGNS,
        OURS,
        BETA1_0,
        "exchange k8, came beta1 0",
    ),
    eval_samples=2000,
    seeds=range(1, 6),
    few_seeds=range(1, 6),
)
WORKS["shapes-vit"] = replace(
    WORKS["shapes-resnet"],
    model={
        "preset": "vit-digits",
        "overrides": {"patch_size": 4, "hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 4},
    },
    steps=1500,
    methods=("ddp, one rate", "ddp fp32", SIGNS, SIGNS_MUON, BETA1_0),
    seeds=range(1, 4),
    few_seeds=range(1, 4),
)
WORKS["llama-10m-long"] = replace(
    WORKS["llama-10m"],
    steps=2250,
    methods=("ddp fp32", LOCAL, LOCAL_OWNER),
    grid=replace(GRID, start=2),
    seeds=range(5),
    few_seeds=range(3),
    compute="bf16",
)
WORKS["llama-10m-64"] = replace(
    WORKS["llama-10m"],
    data={**WORKS["llama-10m"].data, "seq_len": 64},
    steps=2000,
    methods=(
        "ddp, one rate",
        "ddp fp32",
        DDP_MUON,
        BETA1_0,
        "exchange k8, came beta1 0",
        OURS,
        "ours k8 muon",
        SIGNS,
        SIGNS_MUON,
        "powersgd r4",
        "dion r16",
        "one bit, adamw",
        "diloco h30",
    ),
    eval_samples=400,
    grid=replace(GRID, start=2),
    seeds=range(3),
    few_seeds=range(3),
)
WORKS["llama-10m-8k"] = replace(
    WORKS["llama-10m-long"],
    **REAL_VOCABULARY,
    dense_lr=8e-3,
    model={"preset": "llama-10m", "overrides": {"tie_word_embeddings": False}},
    data={**WORKS["llama-10m"].data, "tokenizer": {"bpe": 8192}},
    methods=("ddp, one rate", "ddp fp32", SIGNS, BETA1_0),
    few_seeds=range(5),
)
WORKS["llama-10m-8k-batch32"] = replace(
    WORKS["llama-10m-8k"],
    batch=32,
    steps=600,
    dense_lr=32e-3,
    grid=replace(GRID, start=3),
    methods=("ddp fp32", DDP_MUON, SIGNS_MUON),
    rates={method: {"lr": 2e-3, "dense_lr": 32e-3} for method in (DDP_MUON, SIGNS_MUON)},
    few_seeds=range(5),
)
METHODS = (
    "ddp fp32",
    "ddp, one rate",
    "ddp fp16",
    "ddp sgd",
    DDP_MUON,
    "powersgd r1",
    "powersgd r4",
    "powersgd r16",
    "dion r4",
    "dion r16",
    "one bit, adamw",
    "diloco h30",
    "diloco h100",
    "sparseloco h30",
    *(f"demo paper k{k}" for k in (32, 16, 8, 4, 2, 1)),
    "demo paper k32 decay 0.95",
    "ours whole",
    "ours k32 all_gather",
    OURS,
    "ours k8 owner",
    "ours k2 owner",
    LOCAL,
    LOCAL_OWNER,
    KEPT,
    SELDOM,
    MUON,
    RARE,
    SIGNS,
    SIGNS_MUON,
    *(f"exchange k8, {name}" for name in ("adamw", "adamw beta1 0", "came beta1 0")),
    "ours k8 muon",
)
ONE_RATE = ("ddp, one rate", "ddp sgd", "demo paper")
"""First rates of methods with one rate for all parameters; the other methods sweep the rate of the matrices."""
WITH_CHANNELS = ("ours", "exchange", "diloco", "sparseloco")
"""Beginnings of methods whose exchange has a channel for embeddings."""
MAIN = ("ddp fp32", OURS, LOCAL, LOCAL_OWNER)
"""Methods run with all seeds. With 8 replicas, only the owner strategy stays 200 times below 16-bit gradients."""
RESIDUAL_IN_WEIGHTS = {"decay": 1.0, "outer_lr": 1.0, "keep_unsent": True}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "decay 0.9": (OURS, {"decay": 0.9}),
    "delay 1": (OURS, {"delay": 1}),
    "residual int8": (OURS, {"residual": "int8"}),
    "decay 0.99": (OURS, {"decay": 0.99}),
    "values int8": (OURS, {"values": "int8"}),
    "values fp32": (OURS, {"values": "fp32"}),
    "dense bf16": (OURS, {"dense": "bf16"}),
    "local steps, no decay": (LOCAL, {"decay": 1.0}),
    "local steps, ten between exchanges": (LOCAL, {"every": 10}),
    "local steps, 112 of 4,096 in 4 bits": (LOCAL, {"topk": 112, "values": "int4"}),
    "local steps, outer rate 1": (LOCAL, {"outer_lr": 1.0}),
    "local steps, outer rate 1.6": (LOCAL, {"outer_lr": 1.6}),
    "local steps, residual in the weights": (LOCAL, RESIDUAL_IN_WEIGHTS),
    "chunk 32, topk 2": (OURS, {"chunk": 32, "topk": 2}),
    "residuals averaged every 50": (OURS, {"state_sync_every": 50}),
    "no transform": (OURS, {"transform": "none"}),
    "no transform, adamw": (BETA1_0, {"transform": "none"}),
    "diloco h30, a plain mean": ("diloco h30", {"outer_lr": 1.0, "outer_momentum": 0.0}),
    "diloco h30, outer rate 0.4": ("diloco h30", {"outer_lr": 0.4}),
    "diloco h30, outer rate 1": ("diloco h30", {"outer_lr": 1.0}),
    "diloco h100, outer rate 1": ("diloco h100", {"outer_lr": 1.0}),
}
"""Variants by name: a method at its best rate, and the options that are changed."""
VOCABULARY: dict[str, tuple[str, dict[str, Any]]] = {
    "local steps, embeddings in full": (LOCAL, {"embeddings": "dense"}),
    **{
        name: (LOCAL, {"every": 20, "topk": 960, **options})
        for name, options in (
            ("20 local steps", {"decay": 0.95, "outer_lr": 1.3, "keep_unsent": False}),
            ("20 local steps, residual in the weights", RESIDUAL_IN_WEIGHTS),
        )
    },
    "beta1 0, embeddings in full": (BETA1_0, {"embeddings": "dense"}),
}
"""Variants of the works with REAL_VOCABULARY; names of embeddings as of `comm_methods.channels`."""
MOMENTUM: dict[str, tuple[str, dict[str, Any]]] = {
    "decay 0.9": (BETA1_0, {"decay": 0.9}),
    "decay 0.99": (BETA1_0, {"decay": 0.99}),
    "decay 0.99, warmed up": (BETA1_0, {"decay": 0.99, "decay_warmup": True}),
    "decay 0.999, warmed up": (BETA1_0, {"decay": 0.999, "decay_warmup": True}),
    "32 of 4,096": (BETA1_0, {"topk": 32}),
    "signs, decay 0.99": (OURS, {"decay": 0.99}),
    "signs, 32 of 4,096": (OURS, {"topk": 32}),
}
"""Variants of `llama-10m-64`: DeMo's settings at its size, with the seed of the sweep."""
AVERAGED = {"topk": 4096, "values": "fp32", "dense": "fp32", "every": 1}
"""Options of SELDOM that average all weights after every step."""
DDP_RATES = (2e-3, 8e-3)
"""Learning rates of matrices and of embeddings for averaged gradients, in the phase `rates`."""
Lines = dict[str, Line]


def channel_options(data: str, method: str) -> dict[str, Any]:
    """Return the options that a work gives to methods with an exchange of ours."""
    return WORKS[data].options if method.startswith(WITH_CHANNELS) else {}


def run_spec(data: str, method: str, lr: float, seed: int, replicas: int = REPLICAS, **options: Any) -> Spec:
    """Return the specification of one run, as plain values."""
    work = WORKS[data]
    named = {} if data == "novels" else {"data": data}  # the first result lines have no key for the default data
    named |= {} if work.compute == "fp32" else {"compute": work.compute}
    if not method.startswith(ONE_RATE):
        own = {} if work.dense_betas is None else {"dense_betas": list(work.dense_betas)}
        options = {"dense_lr": work.dense_lr, **own, **options}
    options = {**channel_options(data, method), **options}
    return {
        **named,
        "method": method,
        "lr": lr,
        "seed": seed,
        "steps": work.steps,
        "replicas": replicas,
        "options": options,
    }


def make_grid(data: str, method: str) -> Grid:
    """Return the learning rates of a method, starting near its expected best rate."""
    grid = WORKS[data].grid
    return replace(grid, start=STARTS.get(method, grid.start))


def warm_up_steps(method: str, steps: int) -> int:
    """Return the number of steps in which a method averages everything before it starts to compress."""
    return min(30, steps // 10) if method.startswith("powersgd") else 0


def get_work(spec: Spec) -> Work:
    return WORKS[spec.get("data", "novels")]


def build_recipe(spec: Spec) -> dict[str, Any]:
    work = get_work(spec)
    return {
        "name": "comm",
        "model": work.model,
        "data": work.data,
        "precision": {"compute": work.compute},
        "train": {
            "steps": spec["steps"],
            "batch_size": work.batch,
            "warmup": 0.05,
            "eval_samples": work.eval_samples,
            "seed": spec["seed"],
            "device": "cpu",
        },
    }


def replica(rank: int, spec: Spec, port: int, out: str) -> None:
    """Run one process of a run; rank 0 writes the outcome."""
    import torch
    from comm_methods import group

    from scantling.numerics.bf16_products import bf16_products

    torch.set_num_threads(1)
    with group(f"127.0.0.1:{port}", rank, spec["replicas"]), bf16_products(torch.device("cpu")):
        found = trained(rank, spec)
        if rank == 0:
            Path(out).write_text(json.dumps(found))


def trained(rank: int, spec: Spec) -> dict[str, Any]:
    """Train in the current process group and return losses and bytes."""
    import torch
    from comm_methods import METHODS as KNOWN
    from comm_methods import numel

    from scantling.comm import allreduce_wire_bytes, average_buffers
    from scantling.distributed.context import DistContext
    from scantling.errors import NonFiniteError
    from scantling.numerics.device import autocast, has_fast_matmul
    from scantling.trainer.data.loader import BatchSource
    from scantling.trainer.data.sampler import Sampler
    from scantling.trainer.models.build import recipe_task
    from scantling.trainer.planning.resolve import ResolvedRun
    from scantling.trainer.recipe import load_recipe
    from scantling.trainer.tasks import get_task
    from scantling.trainer.training.build import build_run_model
    from scantling.trainer.training.evaluate import evaluate_heldout
    from scantling.trainer.training.schedule import lr_factor

    world = spec["replicas"]
    recipe = load_recipe(build_recipe(spec))
    task = get_task(recipe_task(recipe))
    data = task.prepare(recipe.data, seed=0)
    run = ResolvedRun(recipe, task, world, "cpu", data)
    model = build_run_model(run)
    work = get_work(spec)
    options: dict[str, Any] = {}
    if start := warm_up_steps(spec["method"], spec["steps"]):
        options["start"] = start
    method = METHODS[0] if spec["method"] == ONE_RATE[0] else spec["method"]
    replica = KNOWN[method](model, spec["lr"], **options, **spec["options"])
    sampler = Sampler(len(data.train), batch_size=work.batch, seed=spec["seed"], lengths=data.lengths)
    share = work.batch // world
    batches = BatchSource(data.train, data.collate, sampler, micro_batch_size=share, rank=rank, world_size=world)
    context = DistContext(rank, world, torch.device("cpu"))
    rates = [group["lr"] for group in replica.optimizer.param_groups]
    losses, heldout, figures = [], [], {}

    def compute_loss(called: torch.nn.Module) -> torch.Tensor:
        with autocast(work.compute, context.device):
            return task.loss(called, batch).loss / batch.num_targets

    for step in range(1, spec["steps"] + 1):
        factor = lr_factor(step, steps=spec["steps"], schedule="cosine", warmup=0.05)
        for group, rate in zip(replica.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        (batch,) = batches.next_step()
        try:
            loss = replica.step(compute_loss)
        except NonFiniteError as error:  # raised on all replicas at once
            figures = {"eval_loss": None, "failure": str(error)}
            break
        losses.append(float(loss))
        if step % max(1, spec["steps"] // 10) == 0 or step == spec["steps"]:
            average_buffers(model)
            with replica.common_weights():
                figures = evaluate_heldout(run, model, context)
            heldout.append([step, figures["eval_loss"]])
            model.train()
    dense = float(allreduce_wire_bytes(4 * numel(model), world))
    sent, early = replica.computed_bytes(), options.get("start", 0) / spec["steps"]
    return {
        "eval_loss": figures.get("eval_loss"),
        "heldout": heldout,
        **{name: figures[name] for name in ("failure", "accuracy") if name in figures},
        "train_loss": sum(losses[-20:]) / max(1, len(losses[-20:])),
        "computed_bytes": sent,
        "bytes_over_the_run": early * dense + (1.0 - early) * sent,
        "num_parameters": numel(model),
        **({} if has_fast_matmul(work.compute, context.device) else {"widened": True}),
    }


def run_one(spec: Spec) -> Line:
    """Train in child processes and return the result line.

    The children are forked from this process, which has no threads and has imported all modules they need. Otherwise a
    short run would mostly import.
    """
    import comm_methods  # noqa: F401
    import torch.multiprocessing as mp
    from transformers import LlamaForCausalLM, ViTForImageClassification  # noqa: F401

    import scantling.trainer.training.run  # noqa: F401

    keep_freed_memory()
    began = time.time()
    if spec.get("data", "").startswith("shapes") and not shapes.PATH.exists():
        shapes.write(shapes.PATH)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "found.json")
        mp.start_processes(replica, (spec, port, out), nprocs=spec["replicas"], start_method="fork")
        found = json.loads(Path(out).read_text())
    if found["eval_loss"] is not None and not found["eval_loss"] < 100.0:
        found |= {"eval_loss": None, "failure": "the loss is not finite"}
    return {"key": spec_key(spec), **spec, **found, **run_facts(began)}


def swept(lines: Lines, data: str, method: str) -> list[float | None]:
    return GRID.results(lines, lambda rate: run_spec(data, method, rate, 0), "eval_loss")


def best_rate(lines: Lines, data: str, method: str) -> float | None:
    """Return the best rate of matrices, or None if its sweep has not ended or every run failed."""
    return make_grid(data, method).best(swept(lines, data, method))


def tunes_dense(data: str, method: str) -> bool:
    """Return True if the rate of embeddings and vectors is swept, too."""
    return WORKS[data].tunes_dense and not method.startswith(ONE_RATE)


def dense_grid(data: str) -> Grid:
    return Grid(RATES, start=RATES.index(WORKS[data].dense_lr))


def swept_dense(lines: Lines, data: str, method: str, rate: float) -> list[float | None]:
    return GRID.results(lines, lambda dense: run_spec(data, method, rate, 0, dense_lr=dense), "eval_loss")


def best_rates(lines: Lines, data: str, method: str) -> dict[str, float] | None:
    """Return the best `lr`, and `dense_lr` if it is swept; None if a sweep has not ended or every run failed."""
    if method in WORKS[data].rates:
        return WORKS[data].rates[method]
    rate = best_rate(lines, data, method)
    if rate is None:
        return None
    if not tunes_dense(data, method):
        return {"lr": rate}
    dense = dense_grid(data).best(swept_dense(lines, data, method, rate))
    return None if dense is None else {"lr": rate, "dense_lr": dense}


def sweep(ledger: Ledger, data: str, method: str) -> None:
    """Run the sweeps of a method's rates, unless the work gives its rates."""
    if method in WORKS[data].rates:
        return
    make_grid(data, method).sweep(ledger, lambda rate: run_spec(data, method, rate, 0), "eval_loss")
    rate = best_rate(ledger.lines(), data, method)
    if rate is not None and tunes_dense(data, method):
        dense_grid(data).sweep(ledger, lambda dense: run_spec(data, method, rate, 0, dense_lr=dense), "eval_loss")


def methods_for(data: str) -> tuple[str, ...]:
    return WORKS[data].methods or METHODS


def seeds_for(data: str, method: str) -> range:
    return WORKS[data].seeds if method in MAIN else WORKS[data].few_seeds


def settings_for(data: str) -> dict[str, tuple[str, dict[str, Any]]]:
    return VOCABULARY if WORKS[data].tunes_dense else MOMENTUM if data == "llama-10m-64" else SETTINGS


def setting_seeds(data: str) -> range:
    return range(1) if settings_for(data) is MOMENTUM else WORKS[data].few_seeds


def setting_specs(lines: Lines, data: str) -> Iterator[Spec]:
    for method, options in settings_for(data).values():
        rates = best_rates(lines, data, method)
        if rates is None:
            raise SystemExit(f"run the sweep of {method} first")
        yield from (run_spec(data, method, seed=seed, **{**rates, **options}) for seed in setting_seeds(data))


def rate_specs(data: str) -> Iterator[tuple[str, Spec]]:
    """Return the runs of the phase `rates` with the names of their rows."""
    lr, dense_lr = DDP_RATES
    for seed in WORKS[data].few_seeds:
        yield "averaged gradients", run_spec(data, METHODS[0], lr, seed, dense_lr=dense_lr)
        for count in (REPLICAS, 2 * REPLICAS):
            for name, of_matrices, of_embeddings in (
                ("", 1.0, 1.0),
                (f", embeddings at {count} times the rate", 1.0, count),
                (f", all at sqrt({count}) times the rates", count**0.5, count**0.5),
            ):
                rates = {"lr": of_matrices * lr, "dense_lr": of_embeddings * dense_lr}
                yield (
                    f"averaged weights, {count} replicas{name}",
                    run_spec(data, SELDOM, seed=seed, replicas=count, **rates, **AVERAGED),
                )


def report(lines: Lines, data: str) -> None:
    """Print the sweep: losses by learning rate."""
    print(f"{data}: held-out nats a target by learning rate, seed 0\n{GRID.header()}")
    for method in methods_for(data):
        print(GRID.row(method[:24], swept(lines, data, method)))
        rate = best_rate(lines, data, method)
        if rate is not None and tunes_dense(data, method):
            print(dense_grid(data).row("  rate of embeddings", swept_dense(lines, data, method, rate)))
    one = best_rate(lines, data, ONE_RATE[0])
    if one is not None and one != WORKS[data].dense_lr and not WORKS[data].tunes_dense:
        print(f"AdamW of one rate is best at {one:g}, but embeddings learn at {WORKS[data].dense_lr:g}: set it")


def main() -> int:
    phases = ["sweep", "seeds", "settings", "rates", "report"]
    parser = command_line(__doc__, phases, RESULTS / "comm-quality.jsonl")
    parser.add_argument("--data", choices=list(WORKS), default="novels", help="data set (default: novels)")
    parser.add_argument("--only", nargs="*", help="sweep and seeds: these methods")
    parser.add_argument("--replicas", type=int, default=REPLICAS, help="seeds: number of processes")
    options = parser.parse_args()
    if options.phase == "one":
        printed(run_one(json.loads(options.spec)))
        return 0
    ledger = Ledger(options.results, Path(__file__), make=run_one)
    methods = options.only or methods_for(options.data)
    if options.phase == "report":
        report(ledger.lines(), options.data)
    elif options.phase == "sweep":
        for method in methods:
            sweep(ledger, options.data, method)
    elif options.phase == "seeds":
        lines = ledger.lines()
        for seed in (seeds := WORKS[options.data].seeds):
            for method in methods:
                rates = best_rates(lines, options.data, method)
                if rates is not None and seed in seeds_for(options.data, method):
                    ledger.run(run_spec(options.data, method, seed=seed, replicas=options.replicas, **rates))
                elif rates is None and seed == seeds[0]:
                    print(f"{method}: its sweep has not ended")
    elif options.phase == "rates":
        for _, spec in rate_specs(options.data):
            ledger.run(spec)
    else:
        for spec in list(setting_specs(ledger.lines(), options.data)):
            ledger.run(spec)
    return 0


if __name__ == "__main__":
    sys.exit(main())
