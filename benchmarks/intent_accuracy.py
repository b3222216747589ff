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
    "power": 0.0,  # the rate of a core is proportional to this power of `relative_rate`
    "core": 1 / 3,
    "embedding": 1 / 3,
    "gain": 1.0,  # rate of the gain of TT layers over lr
    "gates": False,  # rank gates that nothing prunes
    "residual": None,  # diagonal: add d * x to the output of square layers
    "init_std": 0.02,  # of all matrices; 0.02 is the default of transformers
    "clip": None,  # largest norm of the gradient
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
LENGTH = 32
"""Most tokens of a text; 6 % of the texts of Banking77 are longer, and none of CLINC150."""
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
            ids, labels = arrays["train_ids"][:, :LENGTH].astype(np.int64), arrays["train_labels"]
            test = arrays["test_ids"][:, :LENGTH].astype(np.int64), arrays["test_labels"]
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
        initializer_range=spec["init_std"],
        hidden_dropout_prob=spec["dropout"],
        attention_probs_dropout_prob=spec["dropout"],
        attn_implementation="eager",  # vmap has no rule for all fused forms
    )
    model = BertForSequenceClassification(config)
    if spec["form"] != "dense":
        rank: dict[str, Any] = {}
        if spec["rank"]:
            rank = {"*.dense": spec["rank"], "*.self.*": spec["rank"]}
        if spec["embedding_rank"]:
            rank = {"*.word_embeddings": spec["embedding_rank"], **rank}
        sc.tensorize(model, rank, format=spec["form"], num_modes=spec["num_modes"])
    for layer in tt_layers(model).values():
        if spec["residual"] == "diagonal" and isinstance(layer, TTLinear) and layer.in_features == layer.out_features:
            add_diagonal(layer)
    return model


def add_diagonal(layer: TTLinear) -> None:
    """Add a trainable diagonal matrix to the weight of a square layer."""
    layer.diagonal = nn.Parameter(torch.zeros(layer.in_features))
    layer.register_forward_hook(lambda module, inputs, output: output + inputs[0] * module.diagonal)


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
            rates[id(core)] = scale * (relative_rate(layer, core) ** spec["power"] if spec["power"] else 1.0)
        rates[id(layer.log_gain)] = spec["gain"]
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


# --- training ---


MEMBER_KEYS = ("seed", "lr", "core", "embedding", "gain", "gate", "weight_decay", "power")
"""Keys in which the members of one ensemble may differ."""


def structure(spec: dict[str, Any]) -> str:
    """Return a key that is equal for runs that can train as members of one ensemble."""
    return json.dumps({key: value for key, value in filled(spec).items() if key not in MEMBER_KEYS}, sort_keys=True)


class Ensemble:
    """Models of one structure that train side by side in the same operations, by `torch.vmap` over stacked parameters.

    Their seeds, batches and learning rates differ. A step has as many kernels as that of a single model.
    """

    def __init__(self, specs: list[dict[str, Any]], data: Data, device: str) -> None:
        self.began = time.time()
        self.specs, self.data, self.device = [filled(spec) for spec in specs], data, device
        self.shared = shared = self.specs[0]
        self.steps = shared["steps"]
        self.models = [build_model(spec, data.labels_count).to(device).train() for spec in self.specs]
        self.adapters: list[sc.RankAdapter] = []
        for model in self.models:
            if shared["target"] is not None:
                begin, end = (round(shared[key] * self.steps) // OBSERVED_EVERY for key in ("begin", "adapt"))
                memory = 0.98**OBSERVED_EVERY
                self.adapters.append(
                    sc.RankAdapter(
                        model, size_target=shared["target"], begin=begin, steps=end, interval=2, memory=memory
                    )
                )
            elif shared["gates"]:
                for layer in tt_layers(model).values():
                    layer.attach_gates(1e-2)
        self._stack()
        self._make_batches()
        self.step_number = 0
        self.stream = torch.cuda.Stream() if device == "cuda" else None
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def _stack(self) -> None:
        """Move the parameters of all models into one matrix with a row for each model, and their gradients too."""
        count = sum(param.numel() for param in self.models[0].parameters())
        members = len(self.models)
        self.flat, self.grad, self.rates = (torch.zeros(members, count, device=self.device) for _ in range(3))
        self.decay = torch.zeros(members, count, device=self.device)
        self.mean, self.square = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        names = {id(param): name for name, param in self.models[0].named_parameters()}
        self.params: dict[str, Tensor] = {}
        self.orthogonal: list[tuple[tuple[int, ...], Tensor, Tensor, Tensor, Tensor]] = []
        shared = self.shared
        rates = [
            {id(param): (group["lr"], group["weight_decay"]) for group in groups for param in group["params"]}
            for groups in (parameter_groups(spec, model) for spec, model in zip(self.specs, self.models, strict=True))
        ]
        begin = 0
        for same in zip(*(model.parameters() for model in self.models), strict=True):
            end, shape = begin + same[0].numel(), (members, *same[0].shape)
            for row, param in enumerate(same):
                self.flat[row, begin:end] = param.detach().flatten()
                self.rates[row, begin:end], self.decay[row, begin:end] = rates[row][id(param)]
            stacked = self.flat[:, begin:end].view(shape)
            gradient = self.grad[:, begin:end].view(shape)
            for row, param in enumerate(same):  # each model stays usable by itself
                param.data, param.grad = stacked[row], gradient[row]
            leaf = stacked.detach().requires_grad_()
            leaf.grad = gradient
            self.params[names[id(same[0])]] = leaf
            if shared["optimizer"] == "muon" and ".cores." in names[id(same[0])]:
                self._add_orthogonal(same, begin, end)
            begin = end
        self.decay *= self.rates

    def _add_orthogonal(self, same: Any, begin: int, end: int) -> None:
        """Step a core by orthogonalized momentum from now on, relative to its initial spectral norm."""
        core = same[0]
        shape = (len(same), core.shape[:-1].numel(), core.shape[-1])
        scale = torch.stack([torch.linalg.matrix_norm(param.flatten(0, -2), ord=2) for param in same]).view(-1, 1, 1)
        rate = self.rates[:, begin].view(-1, 1, 1) * scale
        self.rates[:, begin:end] = 0.0  # AdamW does not step it
        places = (self.flat[:, begin:end], self.grad[:, begin:end], self.mean[:, begin:end])
        self.orthogonal.append((shape, *places, rate))

    def _make_batches(self) -> None:
        batch, steps, count = self.shared["batch"], self.steps, len(self.data.ids)
        orders = []
        for spec in self.specs:
            generator = torch.Generator().manual_seed(1000 + spec["seed"])
            epochs = [
                torch.randperm(count, generator=generator)[: count // batch * batch].view(-1, batch)
                for _ in range(-(-steps // (count // batch)))
            ]
            orders.append(torch.cat(epochs)[:steps])
        self.order = torch.stack(orders, 1).to(self.device)  # (steps, members, batch)
        warm = max(1, round(self.shared["warmup"] * steps))
        factors = [min((i + 1) / warm, (steps - i) / max(1, steps - warm)) for i in range(steps)]
        self.factors = torch.tensor(factors, dtype=torch.float32, device=self.device)
        self.step_index = torch.zeros(1, dtype=torch.long, device=self.device)
        self.losses = torch.zeros(steps, len(self.specs), device=self.device)

    def _loss(self, params: dict[str, Tensor], ids: Tensor, labels: Tensor) -> Tensor:
        logits = torch.func.functional_call(self.models[0], params, (ids,), {"attention_mask": attention_mask(ids)}).logits
        return nn.functional.cross_entropy(logits, labels)

    def one_step(self) -> None:
        """Take a step; everything that changes between steps is read on the device."""
        index = self.order.index_select(0, self.step_index).squeeze(0)
        ids, labels = self.data.ids[index], self.data.labels[index]  # (members, batch, length), (members, batch)
        if self.device == "cpu":
            ids = ids[:, :, : int((ids != 0).sum(-1).max())]
        losses = torch.vmap(self._loss, randomness="different")(self.params, ids, labels)
        self.losses.index_copy_(0, self.step_index, losses.detach()[None])
        self.grad.zero_()
        losses.sum().backward()
        if self.shared["clip"] is not None:
            self.grad *= (self.shared["clip"] / self.grad.norm(dim=1, keepdim=True)).clamp(max=1.0)
        self._adamw()
        self.step_index += 1

    @torch.no_grad()
    def _adamw(self) -> None:
        """Step all models by AdamW, each with its own rates."""
        beta1, beta2 = self.shared["betas"]
        count = (self.step_index + 1).double()
        correction1, correction2 = (1.0 - beta1**count).float(), (1.0 - beta2**count).float()
        factor = self.factors.index_select(0, self.step_index)
        self.mean.lerp_(self.grad, 1.0 - beta1)
        self.square.mul_(beta2).addcmul_(self.grad, self.grad, value=1.0 - beta2)
        update = self.mean / (self.square / correction2).sqrt_().add_(1e-8)
        self.flat.addcmul_(self.flat, self.decay * factor, value=-1.0)
        self.flat.addcmul_(update, self.rates * (factor / correction1), value=-1.0)
        for shape, values, gradient, mean, rate in self.orthogonal:
            direction = newton_schulz((gradient * (1.0 - beta1) + mean * beta1).view(shape))  # Nesterov
            values.addcmul_((direction * rate).view(values.shape), factor.expand(values.shape), value=-1.0)

    def capture(self) -> None:
        """Take three steps on a side stream, then capture the step."""
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
        return self.step_number >= self.steps

    def advance(self) -> None:
        if self.graph is None:
            self.one_step()
        else:
            assert self.stream is not None
            with torch.cuda.stream(self.stream):
                self.graph.replay()
        self.step_number += 1
        if self.adapters and self.step_number % OBSERVED_EVERY == 0:
            for adapter in self.adapters:
                self._observe(adapter)

    def _observe(self, adapter: sc.RankAdapter) -> None:
        """Let an adapter count an interval as one step."""
        adapter.begin_step()
        with torch.cuda.stream(self.stream), torch.no_grad():  # no effect for None
            next(iter(adapter._budget.rank_gates)).mul_(1.0)  # a replay does not raise version counters
            adapter.observe()

    @torch.no_grad()
    def finish(self) -> list[dict[str, Any]]:
        """Return a line for each finished run."""
        if self.stream is not None:
            self.stream.synchronize()
        seconds = time.time() - self.began
        lines = []
        for member, (spec, model) in enumerate(zip(self.specs, self.models, strict=True)):
            if self.adapters:
                self.adapters[member].finish()
            model.eval()
            logits = torch.cat(
                [model(part, attention_mask=attention_mask(part)).logits for part in self.data.test_ids.split(256)]
            )
            right = logits.argmax(1) == self.data.test_labels
            layers = tt_layers(model)
            lines.append(
                {
                    "accuracy": float(right.float().mean()),
                    "eval_loss": float(nn.functional.cross_entropy(logits, self.data.test_labels)),
                    "right": np.packbits(right.cpu().numpy()).tobytes().hex() if not spec["dev"] else None,
                    "curve": [round(float(part.mean()), 4) for part in self.losses[:, member].cpu().chunk(40)],
                    "num_parameters": sum(param.numel() for param in model.parameters()),
                    "core_numbers": sum(core.numel() for layer in layers.values() for core in layer.chain),
                    "seconds": round(seconds, 1),
                    "members": len(self.specs),
                }
            )
        return lines


def newton_schulz(matrices: Tensor) -> Tensor:
    """Return the nearest orthonormal matrices, (batch, rows, columns), by five iterations of Muon's polynomial."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if is_tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-20)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if is_tall else x


def attention_mask(ids: Tensor) -> Tensor:
    """Return a 4-D mask, which transformers uses as given, without checks of its values on the host."""
    mask = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device).masked_fill(ids == 0, -1e9)
    return mask[:, None, None, :].expand(-1, 1, ids.shape[1], -1)


def finished_keys(path: Path) -> set[str]:
    if not path.exists():
        return set()
    return {json.loads(line)["key"] for line in path.read_text(encoding="utf-8").splitlines()}


def train_all(specs: list[dict[str, Any]], device: str, at_once: int, members: int, seconds: float, path: Path) -> None:
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
    jobs: dict[str, list[dict[str, Any]]] = {}
    for spec in waiting:
        jobs.setdefault(structure(spec), []).append(spec)
    parts = [own[i : i + members] for own in jobs.values() for i in range(0, len(own), members)]
    parts.sort(key=lambda part: waiting.index(part[0]))
    path.parent.mkdir(parents=True, exist_ok=True)
    running: list[tuple[list[dict[str, Any]], Ensemble]] = []
    iterator = iter(parts)
    with open(path, "a", encoding="utf-8") as file:
        while True:
            while len(running) < at_once and time.monotonic() < end:
                part = next(iterator, None)
                if part is None:
                    break
                own = filled(part[0])
                place = (own["data"], own["dev"])
                if place not in data:
                    data[place] = Data(*place, device)
                try:
                    ensemble = Ensemble(part, data[place], device)
                    if device == "cuda":
                        ensemble.capture()
                except (RuntimeError, sc.UserError) as error:  # other structures may still work
                    print(f"failed: {part[0]}: {type(error).__name__}: {str(error)[:500]}", flush=True)
                    continue
                running.append((part, ensemble))
            if not running:
                return
            for _ in range(20):
                for _, ensemble in running:
                    if not ensemble.is_done:
                        ensemble.advance()
            for item in list(running):
                if not item[1].is_done:
                    continue
                for spec, found in zip(item[0], item[1].finish(), strict=True):
                    line = {"key": spec_key(spec), **spec, **found, **named}
                    file.write(json.dumps(line) + "\n")
                    short = {key: value for key, value in spec.items() if key not in ("data", "dev")}
                    print(
                        f"{line['accuracy']:.4f} {line['eval_loss']:.4f} {line['num_parameters']:9} "
                        f"{line['seconds']:6.1f}s {short}",
                        flush=True,
                    )
                file.flush()
                running.remove(item)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=["prepare", "run"])
    parser.add_argument("specs", nargs="?", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--members", type=int, default=8, help="most models of an ensemble")
    parser.add_argument("--part", default="0/1", help="I/N: only this part of the structures, for N processes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after this time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.phase == "prepare":
        prepare()
        return 0
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    specs = json.loads(options.specs.read_text(encoding="utf-8"))
    part, parts = map(int, options.part.split("/"))
    # Runs of one structure stay together.
    structures = list(dict.fromkeys(map(structure, specs)))
    specs = [spec for spec in specs if structures.index(structure(spec)) % parts == part]
    train_all(specs, options.device, options.at_once, options.members, options.seconds, options.results)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    sys.exit(main())
