"""Train six-encoder classifiers from scratch on Banking77 and CLINC150: dense models, TT models and their rivals.

    python benchmarks/intent_accuracy.py prepare               tokenize the texts of SCANTLING_DATA/intent
    python benchmarks/intent_accuracy.py run SPECS.json        train the listed runs that have no line yet

A run is a dictionary of plain values, with the defaults in `DEFAULTS`. On a GPU a whole training step is one CUDA graph,
and several runs train at the same time, each on its own stream. Held-out texts: every 7th text of Banking77, stratified
by order; of CLINC150 the published validation set. A separate tenth of the training texts is the dev set, on which
learning rates are chosen.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from resumable import spec_key
from small_models import ROOT, data_folder
from torch import Tensor, nn

import scantling as sc
from scantling.tensor.embedding import TTMEmbedding
from scantling.tensor.layer import TTLayer
from scantling.tensor.linear import TTLinear

RESULTS = ROOT / "benchmarks" / "results" / "intent-accuracy.jsonl"
TOKENS = ROOT / "build" / "intent"
DEFAULTS: dict[str, Any] = {
    "data": "banking77",
    "dev": True,
    "width": 128,
    "layers": 3,
    "form": "dense",  # dense, tt, low-rank, cola, tt-silu
    "rank": 30,
    "embedding_rank": 32,
    "num_modes": None,
    "lr": 1e-3,
    "rule": "ratio",  # how the rates of cores follow from lr
    "core": 1 / 3,
    "embedding": 1 / 3,
    "gain": None,  # None, gates, bond, layer
    "gate": 10.0,
    "target": None,
    "begin": 0.0,
    "adapt": 0.5,
    "steps": 2000,
    "batch": 32,
    "warmup": 0.1,
    "weight_decay": 0.0,
    "betas": [0.9, 0.999],
    "dropout": 0.1,
    "optimizer": "adamw",
    "seed": 0,
}
OBSERVED_EVERY = 10
"""Steps between two updates of the importance of ranks; options of the adapter count such intervals."""


def filled(spec: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted({*spec} - {*DEFAULTS})
    if unknown:
        raise SystemExit(f"unknown keys in a spec: {unknown}")
    return {**DEFAULTS, **spec}


# --- data ---


def read_texts(name: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return (text, label) pairs for training and for the test."""
    folder = data_folder() / "intent"
    if name == "banking77":
        with open(folder / "banking77_train.csv", encoding="utf-8", newline="") as file:
            rows = [(row["text"], row["category"]) for row in csv.DictReader(file)]
        rows.sort(key=lambda row: row[1])  # so that every label gives the same share to the test
        return [row for i, row in enumerate(rows) if i % 7], [row for i, row in enumerate(rows) if i % 7 == 0]
    with gzip.open(folder / "clinc150_train_val.json.gz", "rt", encoding="utf-8") as file:
        found = json.load(file)
    return [tuple(row) for row in found["train"]], [tuple(row) for row in found["val"]]


def prepare() -> None:
    """Tokenize both data sets with a BPE of the training texts, and save the arrays."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    TOKENS.mkdir(parents=True, exist_ok=True)
    for name in ("banking77", "clinc150"):
        train, test = read_texts(name)
        tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=["[PAD]", "[UNK]", "[CLS]"], show_progress=False)
        tokenizer.train_from_iterator([text for text, _ in train], trainer)
        labels = {label: i for i, label in enumerate(sorted({label for _, label in train}))}
        arrays = {}
        for part, rows in (("train", train), ("test", test)):
            ids = [[2, *tokenizer.encode(text).ids][:48] for text, _ in rows]
            padded = np.zeros((len(ids), 48), np.uint16)
            for i, own in enumerate(ids):
                padded[i, : len(own)] = own
            arrays |= {f"{part}_ids": padded, f"{part}_labels": np.array([labels[label] for _, label in rows])}
        np.savez_compressed(TOKENS / f"{name}.npz", **arrays)
        print(name, {key: value.shape for key, value in arrays.items()}, tokenizer.get_vocab_size(), len(labels))


class Data:
    """Arrays of a data set on a device. With `dev`, every 10th training text is held out instead of the test."""

    def __init__(self, name: str, dev: bool, device: str) -> None:
        with np.load(TOKENS / f"{name}.npz") as arrays:
            ids, labels = arrays["train_ids"].astype(np.int64), arrays["train_labels"]
            test = arrays["test_ids"].astype(np.int64), arrays["test_labels"]
        self.labels_count = int(labels.max()) + 1
        if dev:
            held = np.arange(len(ids)) % 10 == 5
            test = ids[held], labels[held]
            ids, labels = ids[~held], labels[~held]
        self.ids, self.labels = torch.from_numpy(ids).to(device), torch.from_numpy(labels).to(device)
        self.test_ids, self.test_labels = (torch.from_numpy(part).to(device) for part in test)


# --- model ---


def build_model(spec: dict[str, Any], num_labels: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(spec["seed"])
    width = spec["width"]
    config = BertConfig(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=spec["layers"],
        num_attention_heads=max(1, width // 32) if width % 32 == 0 else 4,
        max_position_embeddings=64,
        num_labels=num_labels,
        hidden_dropout_prob=spec["dropout"],
        attention_probs_dropout_prob=spec["dropout"],
    )
    model = BertForSequenceClassification(config)
    if spec["form"] != "dense":
        rank: dict[str, Any] = {"*.dense": spec["rank"], "*.self.*": spec["rank"]}
        if spec["embedding_rank"]:
            rank = {"*.word_embeddings": spec["embedding_rank"], **rank}
        sc.tensorize(model, rank, format=spec["form"], num_modes=spec["num_modes"])
    return model


def tt_layers(model: nn.Module) -> dict[str, TTLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, TTLayer)}


def dense_shape(layer: TTLayer) -> tuple[int, int]:
    if isinstance(layer, TTLinear):
        return layer.in_features, layer.out_features
    assert isinstance(layer, TTMEmbedding)
    return layer.num_embeddings, layer.embedding_dim


def relative_rate(layer: TTLayer, core: Tensor) -> float:
    """Return the rate of a core over that of the dense weight, for an equal relative change of the weight per step.

    An optimizer with normalized updates changes a weight by lr / rms(W) per step, and a core by lr / rms(core). The
    changes of n cores add up like independent ones.
    """
    from scantling.tensor.cores import squared_norm

    rows, columns = dense_shape(layer)
    weight_rms = math.sqrt(float(squared_norm([own.detach().double() for own in layer.chain])) / (rows * columns))
    core_rms = float(core.detach().double().square().mean().sqrt())
    return core_rms / weight_rms / math.sqrt(len(layer.chain))


def parameter_groups(spec: dict[str, Any], model: nn.Module) -> list[dict[str, Any]]:
    """Return one group for each rate."""
    rates: dict[int, float] = {}
    for layer in tt_layers(model).values():
        scale = spec["embedding"] if isinstance(layer, TTMEmbedding) else spec["core"]
        for core in layer.chain:
            rates[id(core)] = scale * (relative_rate(layer, core) if spec["rule"] == "relative" else 1.0)
        for gate in layer.rank_gates or ():
            rates[id(gate)] = spec["gate"]
    groups: dict[tuple[float, bool], list[Tensor]] = {}
    for name, param in model.named_parameters():
        decays = param.ndim > 1 and "LayerNorm" not in name
        groups.setdefault((rates.get(id(param), 1.0), decays), []).append(param)
    return [
        {"params": params, "lr": rate * spec["lr"], "weight_decay": spec["weight_decay"] if decays else 0.0}
        for (rate, decays), params in groups.items()
    ]


# --- a run ---


class Run:
    """A model in training, advanced by `advance`."""

    def __init__(self, spec: dict[str, Any], data: Data, device: str) -> None:
        self.began = time.time()
        self.spec, self.data, self.device = spec, data, device
        self.model = build_model(spec, data.labels_count).to(device).train()
        self.adapter: sc.RankAdapter | None = None
        steps = spec["steps"]
        if spec["target"] is not None:
            every = OBSERVED_EVERY if device == "cuda" else 1
            begin, end = (round(spec[key] * steps) // every for key in ("begin", "adapt"))
            self.adapter = sc.RankAdapter(
                self.model,
                size_target=spec["target"],
                begin=begin,
                steps=end,
                interval=20 // every,
                memory=0.98**every,
            )
        elif spec["gain"] == "gates":
            for layer in tt_layers(self.model).values():
                layer.attach_gates(1e-2)
        groups = parameter_groups(spec, self.model)
        self.base_rates = [group["lr"] for group in groups]
        on_gpu = device == "cuda"
        for group in groups:
            group["lr"] = torch.tensor(group["lr"], device=device)
        self.optimizer = torch.optim.AdamW(groups, betas=spec["betas"], fused=True, capturable=on_gpu)
        generator = torch.Generator().manual_seed(1000 + spec["seed"])
        count = len(data.ids)
        per_epoch = count // spec["batch"]
        order = [
            torch.randperm(count, generator=generator)[: per_epoch * spec["batch"]].view(per_epoch, spec["batch"])
            for _ in range(-(-steps // per_epoch))
        ]
        self.order = torch.cat(order)[:steps].to(device)
        warm = max(1, round(spec["warmup"] * steps))
        factors = [min((i + 1) / warm, (steps - i) / max(1, steps - warm)) for i in range(steps)]
        self.factors = torch.tensor(factors, dtype=torch.float32, device=device)
        self.step_index = torch.zeros((), dtype=torch.long, device=device)
        self.losses = torch.zeros(steps, device=device)
        self.step_number = 0
        self.stream = torch.cuda.Stream() if on_gpu else None
        self.graph: torch.cuda.CUDAGraph | None = None

    def forward(self, ids: Tensor) -> Tensor:
        # A 4-D mask is used as given, without the checks of its values that transformers would make on the host.
        mask = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device).masked_fill(ids == 0, -1e9)
        logits: Tensor = self.model(ids, attention_mask=mask[:, None, None, :].expand(-1, 1, ids.shape[1], -1)).logits
        return logits

    def one_step(self) -> None:
        """Take a step; everything that changes between steps is read on the device."""
        index = self.order.index_select(0, self.step_index.view(1)).view(-1)
        ids, labels = self.data.ids.index_select(0, index), self.data.labels.index_select(0, index)
        if self.device == "cpu":
            ids = ids[:, : int((ids != 0).sum(1).max())]
        for group, base in zip(self.optimizer.param_groups, self.base_rates, strict=True):
            group["lr"].copy_(self.factors.index_select(0, self.step_index.view(1)).view(()) * base)
        loss = nn.functional.cross_entropy(self.forward(ids), labels)
        self.losses.index_copy_(0, self.step_index.view(1), loss.detach().view(1))
        if self.adapter is not None:
            loss = self.adapter.objective(loss)
        self.optimizer.zero_grad(set_to_none=self.device == "cpu")
        loss.backward()
        self.optimizer.step()
        self.step_index += 1

    def capture(self) -> None:
        """Warm up on the side stream with the rates of the first steps, and capture the step."""
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self.one_step()
        self.step_number += 3
        self.stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.one_step()

    @property
    def is_done(self) -> bool:
        return self.step_number >= self.spec["steps"]

    def advance(self) -> None:
        if self.graph is None:
            self.one_step()
        else:
            assert self.stream is not None
            with torch.cuda.stream(self.stream):
                self.graph.replay()
        self.step_number += 1
        if self.adapter is not None and self.graph is not None and self.step_number % OBSERVED_EVERY == 0:
            self._observe()

    def _observe(self) -> None:
        """Let the adapter count an interval as one step."""
        assert self.adapter is not None
        assert self.stream is not None
        self.adapter.begin_step()
        with torch.cuda.stream(self.stream), torch.no_grad():
            next(iter(self.adapter._budget.rank_gates)).mul_(1.0)  # a replay does not raise version counters
            self.adapter.observe()

    @torch.no_grad()
    def finish(self) -> dict[str, Any]:
        """Return the line of the finished run."""
        if self.stream is not None:
            self.stream.synchronize()
        seconds = time.time() - self.began
        if self.adapter is not None:
            self.adapter.finish(self.optimizer)
        self.model.eval()
        logits = torch.cat([self.forward(part) for part in self.data.test_ids.split(256)])
        right = logits.argmax(1) == self.data.test_labels
        layers = tt_layers(self.model)
        curve = [round(float(part.mean()), 4) for part in self.losses.cpu().chunk(40)]
        return {
            "accuracy": float(right.float().mean()),
            "eval_loss": float(nn.functional.cross_entropy(logits, self.data.test_labels)),
            "right": np.packbits(right.cpu().numpy()).tobytes().hex(),
            "curve": curve,
            "num_parameters": sum(param.numel() for param in self.model.parameters()),
            "core_numbers": sum(core.numel() for layer in layers.values() for core in layer.chain),
            "seconds": round(seconds, 1),
        }


def finished_keys(path: Path) -> set[str]:
    if not path.exists():
        return set()
    return {json.loads(line)["key"] for line in path.read_text(encoding="utf-8").splitlines()}


def train_all(specs: list[dict[str, Any]], device: str, at_once: int, seconds: float, path: Path) -> None:
    """Train the runs that have no line yet, several at once on a GPU; start none after the given time."""
    from scantling.trainer.training.run_dir import environment

    end = time.monotonic() + seconds
    done = finished_keys(path)
    waiting = [spec for spec in specs if spec_key(spec) not in done]
    facts = environment()
    named = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if device == "cuda" else facts["hardware"]["cpu"],
        "torch": torch.__version__,
        "git_commit": facts["git_commit"],
    }
    data: dict[tuple[str, bool], Data] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    running: list[tuple[dict[str, Any], Run]] = []
    iterator: Iterator[dict[str, Any]] = iter(waiting)
    with open(path, "a", encoding="utf-8") as file:
        while True:
            while len(running) < at_once and time.monotonic() < end:
                spec = next(iterator, None)
                if spec is None:
                    break
                own = filled(spec)
                place = (own["data"], own["dev"])
                if place not in data:
                    data[place] = Data(*place, device)
                try:
                    run = Run(own, data[place], device)
                    if device == "cuda":
                        run.capture()
                except Exception as error:
                    print(f"failed: {spec}: {type(error).__name__}: {error}", flush=True)
                    raise
                running.append((spec, run))
            if not running:
                return
            for _ in range(20):
                for _, run in running:
                    if not run.is_done:
                        run.advance()
            for item in list(running):
                spec, run = item
                if run.is_done:
                    line = {"key": spec_key(spec), **spec, **run.finish(), **named, "at_once": at_once}
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    short = {key: value for key, value in spec.items() if key not in ("data", "dev")}
                    print(f"{line['accuracy']:.4f} {line['eval_loss']:.4f} {line['num_parameters']:9} "
                          f"{line['seconds']:6.1f}s {short}", flush=True)
                    running.remove(item)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=["prepare", "run"])
    parser.add_argument("specs", nargs="?", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after this time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.phase == "prepare":
        prepare()
        return 0
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    specs = json.loads(options.specs.read_text(encoding="utf-8"))
    train_all(specs, options.device, options.at_once, options.seconds, options.results)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    sys.exit(main())
