"""Compare six-encoder classifiers trained from scratch on Banking77 and CLINC150: dense, TT, and rivals of equal size.

    pip install --no-deps --target DIR galore-torch bitsandbytes       and DIR on PYTHONPATH, for the row `galore`

    python benchmarks/intent_accuracy.py sweep       rates of each row, one seed, on the dev set
    python benchmarks/intent_accuracy.py seeds       each row at its best rates, five seeds, on the test set
    python benchmarks/intent_accuracy.py variants    changes of the TT model: rates of each, then three seeds, dev set
    python benchmarks/intent_accuracy.py times       time of a step of each row, relative to dense, in turns
    python benchmarks/intent_accuracy.py report      tables, from the raw lines alone

`--size small` is 3 encoders of width 128 and `--size full` 6 encoders of width 256, with the paper's ranks; `--size
tiny` is 2 encoders of width 64 at rank 16, to choose among variants. Every row has the same budget for its rates: first
the learning rate of everything, then the ratios of the layers' and of the embedding's rates to it, each along a grid
until the best value lies between two worse ones. At `full` the ratios are those of `small`. Rows at a size target other
than `tt 0.2` take the rates of `tt`, `tt 0.2` or `low rank`, and variants the ratios of `tt`. The standard deviation of
BERT's first weights, 0.02 at width 768, is scaled by 1 / sqrt(width): at width 128, 0.02 is so small that every model
mostly learns the scale of its weights.

The training, dev and test texts are those of finetune_data.py; no text is in two of them. `bag of words` is a linear
model of word counts. Results are lines of benchmarks/results/intent-accuracy.jsonl; no run is repeated.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dated import RESULTS, dated, write
from finetune_data import TASKS, similar_lengths
from interleaved import ratio, take_turns
from resumable import Grid, Ledger, Line, Spec, command_line, interval, side_by_side, spec_key, threads_a_job
from small_models import printed, rate_factors, run_facts
from torch import Tensor, nn

import scantling as sc
from scantling.optim.registry import build_optimizer
from scantling.tensor.layer import GAIN_RATE, TTLayer
from scantling.tensor.linear import TTLinear

RESULT_FILE = RESULTS / "intent-accuracy.jsonl"
DATA = ("banking77", "clinc150")
LENGTH = 32
"""Most tokens of a text; 6 % of the texts of Banking77 are longer, and none of CLINC150."""
VOCABULARY = 4096
PAPER_RANKS = {"rank": 30, "embedding_rank": 32}
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"width": 64, "layers": 2, "rank": 16, "embedding_rank": 16},
    "small": {"width": 128, "layers": 3, **PAPER_RANKS},
    "full": {"width": 256, "layers": 6, **PAPER_RANKS},
}
SWEEP_STEPS = {"tiny": 1000, "small": 1500, "full": 1500}
SEED_STEPS = {"banking77": 3094, "clinc150": 3368}
"""Steps of the runs of `seeds`: 14 epochs."""
SEEDS = (1, 2, 3, 4, 5)
BATCH, WARM_UP, DROPOUT = 32, 0.1, 0.1
WARM_UP_ROUNDS = 5
"""Steps of each row that `times` does not count."""
BEGIN, END = 0.3, 0.7
"""Fractions of a run at which the rank reduction begins and ends."""
TT = {"form": "tt"}
OTHER_TARGETS = {"tt 0.8": 0.8, "tt 0.5": 0.5, "tt 361x": 0.1777}
LOW_RANK = {**TT, "form": "low-rank"}
ROWS: dict[str, dict[str, Any]] = {
    "dense": {"form": "dense"},
    "tt": TT,
    "dense as tt": {"form": "dense", "as_large_as": "tt"},
    "tt 0.2": {**TT, "target": 0.2},
    "dense as tt 0.2": {"form": "dense", "as_large_as": "tt 0.2"},
    "low rank": LOW_RANK,
    "cola": {**TT, "form": "cola"},
    "galore": {"form": "dense", "optimizer": "galore"},
    **{name: {**TT, "target": target} for name, target in OTHER_TARGETS.items()},
    **{f"low rank {target}": {**LOW_RANK, "target": target} for target in (0.5, 0.2)},
}
"""Settings of each row: the format of the layers, and what else differs from `dense`."""
SHARED = {"tt 0.8": "tt", "tt 0.5": "tt", "tt 361x": "tt 0.2", "low rank 0.5": "low rank", "low rank 0.2": "low rank"}
"""Rows that take all rates of another row."""
VARIANTS: dict[str, dict[str, Any]] = {
    "tt": {},
    "without gain": {"gain": 0.0},
    "gates at 10 times the rate of the run": {"gates": True, "control": 10.0},
    "gates at 10 times the rate of the run, without gain": {"gates": True, "control": 10.0, "gain": 0.0},
    "gates at the rate of the run": {"gates": True, "control": 1.0},
    "target 0.5, gates at 10 times the rate of the run": {"target": 0.5, "control": 10.0},
    "target 0.5, gates at the rate of the run": {"target": 0.5, "control": 1.0},
    "target 0.5, gates at the rate of the cores": {"target": 0.5},
    "target 0.5, fixed gates": {"target": 0.5, "control": 0.0},
    "muon": {"optimizer": "muon on cores"},
    "rates by rms": {"power": 0.5},
    "rates by rms, in full": {"power": 1.0},
    "rates by rms, weight decay": {"power": 0.5, "weight_decay": 0.1},
    "rates by rms, gates at the rate of the cores": {"power": 0.5, "gates": True},
    "gates at the rate of the cores": {"gates": True},
    "clipped gradients": {"clip": 1.0},
    "rates as in LoRA+": {"last_core": 4.0},
    "muon with current norms": {"optimizer": "muon on cores", "current_norms": True},
    "init by spectrum": {"spectrum": 1.0},
    "weight decay": {"weight_decay": 0.1},
    "weight decay of the product": {"product_decay": 0.1},
    "longer warm-up": {"warm_up": 0.3},
    "svd after 300 dense steps": {"dense_steps": 300},
    "ranks removed late": {"rank": 24, "embedding_rank": 24, "target": "tt"},
    "ranks removed late, gates at 10 times the rate of the run": {
        "rank": 24,
        "embedding_rank": 24,
        "target": "tt",
        "control": 10.0,
    },
    "more ranks in attention": {"rank": {"attention": 22, "rest": 12}},
    "more ranks in feed-forward": {"rank": {"attention": 10, "rest": 20}},
    "more ranks in the embedding": {"rank": 14, "embedding_rank": 24},
    "diagonal residual": {"diagonal": True},
    "sparse residual": {"sparse": 0.03, "rank": 14},
    "tt-silu": {"form": "tt-silu"},
    "two modes": {"num_modes": 2},
    "dense embedding": {"embedding_rank": 0},
    "init of 0.02": {"init_std": 0.02},
    "init of 0.02 without gain": {"init_std": 0.02, "gain": 0.0},
    "init of 0.02, gain at a tenth of the rate": {"init_std": 0.02, "gain": 0.1},
    "init of 0.02, gates at 10 times the rate of the run, without gain": {
        "init_std": 0.02,
        "gates": True,
        "control": 10.0,
        "gain": 0.0,
    },
    "dense": {"form": "dense"},
    "dense, init of 0.02": {"form": "dense", "init_std": 0.02},
}
"""Changes of the row `tt`. Their learning rate is searched, with the ratios of the row of their form."""
RATES = [0.125e-3 * 2**power for power in range(8)]
RATIOS = [1 / 27, 1 / 9, 1 / 3, 1.0, 3.0, 9.0, 27.0, 81.0, 243.0, 729.0]


def coordinates(settings: Mapping[str, Any]) -> dict[str, Grid]:
    """Return the grids of the rates of a row, in the order of the search."""
    is_dense = settings["form"] == "dense"
    return {
        "lr": Grid(RATES, start=3 if is_dense else 5),
        "layers_ratio": Grid(RATIOS, start=3 if is_dense else 2),
        "embedding_ratio": Grid(RATIOS, start=3),
    }


# data


@cache
def read_arrays(name: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return token ids, (texts, LENGTH) with 0 as padding, and labels, of the training, dev and test texts."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    data = TASKS[name](sys.maxsize)
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]"]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([row.text for row in data.train], trainer)
    number = {label: i for i, label in enumerate(data.labels)}
    arrays = {}
    for part, rows in {"train": data.train, "dev": data.dev, "test": data.tests[name]}.items():
        ids = torch.zeros(len(rows), LENGTH, dtype=torch.long)
        for i, row in enumerate(rows):
            own = [2, *tokenizer.encode(row.text).ids][:LENGTH]
            ids[i, : len(own)] = torch.tensor(own)
        arrays[part] = ids, torch.tensor([number[row.label] for row in rows])
    return arrays


def split(name: str, *, dev: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ids and labels of the training texts, and of the dev or the test texts."""
    arrays = read_arrays(name)
    return *arrays["train"], *arrays["dev" if dev else "test"]


# models


def build_model(spec: Spec, num_labels: int) -> nn.Module:
    """Return the classifier of a run, dense as long as `dense_steps` is set."""
    from transformers import BertConfig, BertForSequenceClassification

    width, heads = spec["width"], 4
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=spec["layers"],
        num_attention_heads=heads,
        max_position_embeddings=LENGTH,
        num_labels=num_labels,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
        initializer_range=spec.get("init_std", 0.02 * (768 / width) ** 0.5),
    )
    model = BertForSequenceClassification(config)
    if spec.get("spectrum"):
        draw_by_spectrum(model, spec["spectrum"])
        norms = {name: layer.weight.norm().item() for name, layer in model.named_modules() if type(layer) is nn.Linear}
        convert(model, spec, init="svd")
        restore_norms(model, norms)
    elif spec["form"] != "dense" and not spec.get("dense_steps"):
        convert(model, spec, init="random")
    return model


def convert(model: nn.Module, spec: Spec, init: Any) -> None:
    """Replace the layers of the encoder and the pooler, and the word embedding."""
    ranks = spec["rank"] if isinstance(spec["rank"], dict) else dict.fromkeys(("attention", "rest"), spec["rank"])
    tt = {"num_modes": spec["num_modes"]} if spec.get("num_modes") else {}
    patterns: dict[str, Any] = {"*.word_embeddings": spec["embedding_rank"]} if spec["embedding_rank"] else {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "classifier":
            rank = ranks["attention" if ".attention." in name else "rest"]
            if spec["form"] in ("low-rank", "cola"):  # as large as the TT layer
                shape = module.in_features, module.out_features
                size = sc.TTLinear(*shape, rank, bias=False, device="meta").num_parameters()
                rank = max(1, round(size / sum(shape)))
            patterns[name] = {"rank": rank, **tt}
    sc.tensorize(model, patterns, format=spec["form"], init=init, filter_fn=lambda *_: True)
    for layer in model.modules():
        if isinstance(layer, TTLayer) and spec.get("gates"):
            layer.attach_gates(1e-2)
        if isinstance(layer, TTLinear) and spec.get("diagonal") and layer.in_features == layer.out_features:
            layer.diagonal = nn.Parameter(torch.zeros(layer.in_features))
            layer.register_forward_hook(lambda module, inputs, output: output + inputs[0] * module.diagonal)
        if isinstance(layer, TTLinear) and spec.get("sparse"):
            add_sparse(layer, spec["sparse"])


def add_sparse(layer: TTLinear, share: float) -> None:
    """Add trainable values, 0 at first, at random positions of the weight: this share of its entries."""
    shape = layer.in_features, layer.out_features
    size = shape[0] * shape[1]
    where = torch.randperm(size)[: round(share * size)]
    layer.sparse = nn.Parameter(torch.zeros(len(where)))

    def with_sparse(module: TTLinear, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + inputs[0] @ torch.zeros(size).index_put((where,), module.sparse).view(shape)

    layer.register_forward_hook(with_sparse)


@torch.no_grad()
def draw_by_spectrum(model: nn.Module, power: float) -> None:
    """Give the k-th singular value of each weight of the encoder and the pooler a share of k^-power.

    The norm of the weight stays.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "classifier":
            u, values, vh = torch.linalg.svd(module.weight, full_matrices=False)
            wanted = torch.arange(1.0, len(values) + 1) ** -power
            module.weight.copy_((u * (wanted * values.norm() / wanted.norm())) @ vh)


@torch.no_grad()
def restore_norms(model: nn.Module, norms: Mapping[str, float]) -> None:
    """Give the weights of TT layers these norms, by their gains."""
    for name, layer in model.named_modules():
        if isinstance(layer, TTLinear):
            layer.log_gain += np.log(norms[name] / float(layer.weight.norm())) / GAIN_RATE


def count_parameters(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


@cache
def width_of_size(layers: int, num_labels: int, num_parameters: int) -> int:
    """Return the width of a dense model with about this number of parameters."""

    def size(width: int) -> int:
        return count_parameters(on_meta({"width": width, "layers": layers, "form": "dense"}, num_labels))

    return min(range(8, 260, 4), key=lambda width: abs(size(width) - num_parameters))


def on_meta(spec: Spec, num_labels: int) -> nn.Module:
    with torch.device("meta"):
        return build_model(spec, num_labels)


def count_cores(spec: Spec, num_labels: int) -> int:
    """Return the number of parameters in the cores at the first ranks."""
    layers = [module for module in on_meta(spec, num_labels).modules() if isinstance(module, TTLayer)]
    return sum(core.numel() for layer in layers for core in layer.chain)


def size_of_row(spec: Spec, num_labels: int) -> int:
    """Return the number of parameters of the row that a dense model is as large as."""
    row = {**spec, **ROWS[spec["as_large_as"]]}
    saved = (1.0 - row.get("target", 1.0)) * count_cores(row, num_labels)
    return round(count_parameters(on_meta(row, num_labels)) - saved)


def parameter_groups(model: nn.Module, spec: Spec) -> list[dict[str, Any]]:
    """Return parameter groups with the rates of a run."""
    lr, layers, embedding = spec["lr"], spec["lr"] * spec["layers_ratio"], spec["lr"] * spec["embedding_ratio"]
    rates = {"core_lr": layers, "embedding_core_lr": embedding, "embedding_lr": embedding}
    control = lr * spec["control"] if "control" in spec else None
    groups = sc.param_groups(model, weight_decay=spec.get("weight_decay", 0.0), control_lr=control, **rates)
    result = []
    for group in groups:
        if spec["form"] == "dense" and group["role"] == "matrix":
            group["lr"] = layers
        gains = {id(param) for name, param in group["params"] if name.endswith("log_gain")}
        result += split_group(group, gains, lr * spec.get("gain", 1.0))
    if spec.get("power"):
        result = [one for group in result for one in split_by_rms(group, model, spec["power"])]
    if spec.get("last_core"):
        last = {id(layer.chain[-1]) for layer in model.modules() if isinstance(layer, TTLinear)}
        result = [one for group in result for one in split_group(group, last, spec["last_core"] * group.get("lr", lr))]
    return result


def split_group(group: dict[str, Any], ids: set[int], lr: float) -> Iterator[dict[str, Any]]:
    """Yield the group without the parameters of these ids, and one of them at another rate; no empty group."""
    mine = [item for item in group["params"] if id(item[1]) in ids]
    rest = [item for item in group["params"] if id(item[1]) not in ids]
    yield from [{**group, "params": rest}] if rest else []
    yield from [{**group, "params": mine, "lr": lr}] if mine else []


def split_by_rms(group: dict[str, Any], model: nn.Module, power: float) -> Iterator[dict[str, Any]]:
    """Yield one group for each core, with a rate that grows with its root mean square relative to the others."""
    cores = {id(core): layer.chain for layer in model.modules() if isinstance(layer, TTLayer) for core in layer.chain}
    for name, param in group["params"]:
        scale = 1.0
        if id(param) in cores:
            rms = [float(core.detach().square().mean().sqrt()) for core in cores[id(param)]]
            own = float(param.detach().square().mean().sqrt())
            scale = (own / float(np.exp(np.mean(np.log(rms))))) ** power
        yield {**group, "params": [(name, param)], **({"lr": group["lr"] * scale} if "lr" in group else {})}


class MuonOnCores(torch.optim.Optimizer):
    """Orthogonalized momentum for cores, as matrices (r * modes, r'), AdamW for the rest.

    A step of a core has the spectral norm rate * its spectral norm, the initial one or the current one.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, current_norms: bool) -> None:
        mine = [group for group in groups if group["params"][0][0].split(".")[-2:-1] == ["cores"]]
        super().__init__(mine, {"lr": lr})
        self.current_norms = current_norms
        self.rest = torch.optim.AdamW([group for group in groups if group not in mine], lr=lr, fused=True)
        for group in self.param_groups:
            for core in group["params"]:
                self.state[core] = {"momentum": torch.zeros_like(core), "scale": spectral_norm(core)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.rest.step()
        for group in self.param_groups:
            for core in group["params"]:
                momentum = self.state[core]["momentum"].lerp_(core.grad, 0.1)
                matrix = core.grad.lerp(momentum, 0.9).flatten(0, -2)
                u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
                scale = spectral_norm(core) if self.current_norms else self.state[core]["scale"]
                # 10 times the rate of AdamW: 1e-3 changes a core by 1 %
                core.sub_((u @ vh).view_as(core) * (10.0 * group["lr"] * scale))


def spectral_norm(core: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(core.detach().flatten(0, -2), ord=2)


def build(spec: Spec, groups: list[dict[str, Any]]) -> list[torch.optim.Optimizer]:
    """Return the optimizers whose groups follow the schedule; the first one steps."""
    name = spec.get("optimizer", "adamw")
    if name == "muon on cores":
        muon = MuonOnCores(groups, spec["lr"], spec.get("current_norms", False))
        return [muon, muon.rest]
    if name == "galore":
        import galore

        galore.register()
        return [build_optimizer("galore", groups, lr=spec["lr"], rank=spec["width"] // 4)]
    return [torch.optim.AdamW(groups, lr=spec["lr"], weight_decay=0.0, fused=True)]


# runs


def run_training(spec: Spec) -> Line:
    """Train one model and return its line."""
    run = train(spec)
    while True:
        try:
            next(run)
        except StopIteration as end:
            line: Line = end.value
            return line


def train(spec: Spec) -> Generator[None, None, Line]:
    """Train one model, yield after each step, and return the line of the run."""
    began = time.time()
    ids, labels, test_ids, test_labels = split(spec["data"], dev=spec["dev"])
    num_labels = int(labels.max()) + 1
    torch.manual_seed(spec["seed"])
    shape = spec
    if spec.get("as_large_as"):
        shape = {**spec, "width": width_of_size(spec["layers"], num_labels, size_of_row(spec, num_labels))}
    model = build_model(shape, num_labels).train()
    steps, losses, step_s = spec["steps"], [], []
    adapter: sc.RankAdapter | None = None
    optimizers: list[torch.optim.Optimizer] = []
    batches = draw_batches(ids, steps, spec["seed"])
    factors = rate_factors(steps, spec.get("warm_up", WARM_UP))
    for step in range(steps):
        if step == spec.get("dense_steps"):
            convert(model, spec, init="svd")
            optimizers.clear()
        if not optimizers:
            if spec.get("target"):
                begin, end = round(BEGIN * steps), round(END * steps)
                target = spec["target"]
                if target == "tt":  # the size at the ranks of `tt`
                    plain = {**spec, **TT, **SIZES[spec["size"]]}
                    target = count_cores(plain, num_labels) / count_cores(spec, num_labels)
                adapter = sc.RankAdapter(model, size_target=target, begin=begin, steps=end, interval=20)
            optimizers = build(shape, parameter_groups(model, spec))
            peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        start = time.perf_counter()
        for optimizer, own in zip(optimizers, peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = factors[step] * peak
        loss = nn.functional.cross_entropy(predict(model, ids[batches[step]]), labels[batches[step]])
        losses.append(float(loss.detach()))
        if not np.isfinite(losses[-1]):
            return {"key": spec_key(spec), **spec, "eval_loss": None, **run_facts(began)}
        model.zero_grad(set_to_none=True)
        (loss if adapter is None else adapter.loss(loss)).backward()
        if spec.get("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), spec["clip"])
        optimizers[0].step()
        if spec.get("product_decay"):
            decay_products(model, factors[step] * spec["lr"] * spec["product_decay"])
        if adapter is not None and step % 100 == 99:
            adapter.truncate(*optimizers)
        step_s.append(time.perf_counter() - start)
        yield
    if adapter is not None:
        adapter.finish(*optimizers)
    found = {**measure(model, test_ids, test_labels), "width": shape["width"], "curve": shortened(losses)}
    return {"key": spec_key(spec), **spec, **found, "step_s": float(np.median(step_s)), **run_facts(began)}


@torch.no_grad()
def decay_products(model: nn.Module, share: float) -> None:
    """Shrink the weight of each TT layer, by its last core."""
    for layer in model.modules():
        if isinstance(layer, TTLayer):
            layer.chain[-1].mul_(1.0 - share)


def draw_batches(ids: Tensor, steps: int, seed: int) -> list[Tensor]:
    """Return the indices of each batch; every epoch has another order."""
    generator = torch.Generator().manual_seed(1000 + seed)
    batches: list[Tensor] = []
    while len(batches) < steps:
        batches += similar_lengths((ids != 0).sum(1), BATCH, generator)
    return batches[:steps]


def predict(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits of texts, without the columns that are padding in all of them."""
    ids = ids[:, : int((ids != 0).sum(1).max())]
    logits: Tensor = model(ids, attention_mask=(ids != 0).long()).logits
    return logits


def shortened(losses: list[float]) -> list[float]:
    return [round(float(np.mean(part)), 4) for part in np.array_split(losses, 40)]


@torch.no_grad()
def measure(model: nn.Module, ids: Tensor, labels: Tensor) -> Line:
    """Return the accuracy and the loss on held-out texts, the correct texts as bits in hexadecimal, and the sizes."""
    model.eval()
    order = (ids != 0).sum(1).argsort()
    logits = torch.empty(len(ids), int(labels.max()) + 1)
    for part in order.split(256):
        logits[part] = predict(model, ids[part])
    right = logits.argmax(1) == labels
    layers = [module for module in model.modules() if isinstance(module, TTLayer)]
    for layer in layers:
        layer.fold_gates()  # gates do not count
    return {
        "accuracy": float(right.float().mean()),
        "eval_loss": float(nn.functional.cross_entropy(logits, labels)),
        "right": np.packbits(right.numpy()).tobytes().hex(),
        "num_parameters": count_parameters(model),
        "core_numbers": sum(core.numel() for layer in layers for core in layer.chain),
    }


def bag_of_words(spec: Spec) -> Line:
    """Return the accuracy of a linear model of the counts of tokens, with the weight decay that is best on the dev set.

    It has no regard to the order of tokens.
    """
    began = time.time()
    found = [(fit_bag(spec, decay, dev=True)[0], decay) for decay in (0.0, 0.1, 1.0)]
    best = max(found)[1]
    accuracy, size = fit_bag(spec, best, dev=False)
    outcome = {"accuracy": accuracy, "eval_loss": None, "weight_decay": best, "num_parameters": size}
    return {"key": spec_key(spec), **spec, **outcome, **run_facts(began)}


def fit_bag(spec: Spec, weight_decay: float, *, dev: bool) -> tuple[float, int]:
    """Return the accuracy of a linear model of token counts, and its number of parameters."""
    ids, labels, test_ids, test_labels = split(spec["data"], dev=dev)
    torch.manual_seed(spec["seed"])
    # row 0 is that of the padding
    model = nn.EmbeddingBag(VOCABULARY, int(labels.max()) + 1, mode="sum", padding_idx=0)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=weight_decay)
    for batch in draw_batches(ids, 5000, spec["seed"]):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids[batch]), labels[batch]).backward()
        optimizer.step()
    return float((model(test_ids).argmax(1) == test_labels).float().mean()), model.weight.numel()


def time_rows(rows: Sequence[str], size: str, rounds: int) -> dict[str, Any]:
    """Return the times of the steps of all rows, which take turns with the same batches.

    Rows with a size target still have all their ranks, and gates on them.
    """
    rates = {"lr": 1e-3, "layers_ratio": 1.0, "embedding_ratio": 1.0}
    steps = WARM_UP_ROUNDS + rounds
    specs = {row: make_spec(ROWS[row], rates, size, data=DATA[0], dev=True, seed=0, steps=10 * steps) for row in rows}
    runs = {row: train(spec) for row, spec in specs.items()}
    times = take_turns({row: partial(next, run) for row, run in runs.items()}, rounds, warmup=WARM_UP_ROUNDS)
    found = {row: ratio(own, times["dense"]) for row, own in times.items()}
    for row, own in found.items():
        print(f"{row:20} {own['ratio']:5.2f} of the time of dense {own['ratio_95']}")
    return found


# the plan of all runs


def make_spec(settings: Mapping[str, Any], rates: Mapping[str, float], size: str, **rest: Any) -> Spec:
    return {"size": size, **SIZES[size], **settings, **rates, **rest}


def search(
    lines: Mapping[str, Line], settings: Mapping[str, Any], size: str, first: Mapping[str, float] | None = None
) -> tuple[Spec | None, dict[str, float]]:
    """Return the next run of a row's search, None if it has ended, and the best rates so far.

    With given first rates, only the learning rate is searched, and the ratios stay.
    """
    grids = coordinates(settings)
    rates = {name: grid.rates[grid.start] for name, grid in grids.items()}
    if first is not None:
        rates, grids = dict(first), {"lr": Grid(RATES, start=RATES.index(first["lr"]))}
    fixed = {"data": DATA[0], "dev": True, "seed": 0, "steps": SWEEP_STEPS[size]}
    for name, grid in grids.items():

        def at(value: float, name: str = name) -> Spec:
            return make_spec(settings, {**rates, name: value}, size, **fixed)

        results = grid.results(dict(lines), at, heldout_error)
        index = grid.next(results)
        if index is not None:
            return at(grid.rates[index]), rates
        rates[name] = grid.best(results) or rates[name]
    return None, rates


def heldout_error(line: Line) -> float | None:
    """Return the error on the dev set, or None if the run failed; the loss breaks ties."""
    return None if line["eval_loss"] is None else 1.0 - line["accuracy"] + 1e-6 * line["eval_loss"]


def search_row(lines: Mapping[str, Line], row: str, size: str) -> tuple[Spec | None, dict[str, float] | None]:
    """Return the next run of a row's search and the best rates so far; no rates if those it starts from are missing."""
    first = None
    if size == "full":
        first = best_rates(lines, row, "small")
        if first is None:
            return None, None
    return search(lines, ROWS[SHARED.get(row, row)], size, first)


def best_rates(lines: Mapping[str, Line], row: str, size: str) -> dict[str, float] | None:
    """Return the rates of a row; None if its search has not ended."""
    spec, rates = search_row(lines, row, size)
    return None if spec is not None else rates


def seed_spec(row: str, rates: Mapping[str, float], size: str, data: str, seed: int) -> Spec:
    return make_spec(ROWS[row], rates, size, data=data, dev=False, seed=seed, steps=SEED_STEPS[data])


def bag_spec(data: str) -> Spec:
    return {"measure": "bag of words", "data": data, "seed": 0}


def run_search(ledger: Ledger, size: str, row: str) -> None:
    """Run the search of a row's rates to its end."""
    while (spec := search_row(ledger.lines(), row, size)[0]) is not None:
        if not ledger.run(spec):
            return


def run_seeds(ledger: Ledger, size: str, item: tuple[int, str, str]) -> None:
    seed, data, row = item
    rates = best_rates(ledger.lines(), row, size)
    if rates is not None:
        ledger.run(seed_spec(row, rates, size, data, seed))


def search_variant(lines: Mapping[str, Line], name: str, size: str) -> tuple[Spec | None, dict[str, float] | None]:
    """Return the next run of a variant's search and the best rates so far; no rates without those of its row."""
    settings = variant_settings(name)
    rates = best_rates(lines, "dense" if settings["form"] == "dense" else "tt", size)
    if rates is None:
        return None, None
    return search(lines, settings, size, rates)


def variant_settings(name: str) -> dict[str, Any]:
    return {**TT, **VARIANTS[name]}


def run_variant(ledger: Ledger, size: str, name: str) -> None:
    """Search the learning rate of a variant, then run three seeds."""
    while (spec := search_variant(ledger.lines(), name, size)[0]) is not None:
        if not ledger.run(spec):
            return
    rates = search_variant(ledger.lines(), name, size)[1]
    for seed in SEEDS[:3] if rates is not None else ():
        ledger.run(variant_spec(variant_settings(name), rates, size, seed))


def variant_spec(settings: Mapping[str, Any], rates: Mapping[str, float], size: str, seed: int) -> Spec:
    return make_spec(settings, rates, size, data=DATA[0], dev=True, seed=seed, steps=SWEEP_STEPS[size])


# the report


def report_rows(lines: Mapping[str, Line], size: str) -> None:
    """Print accuracies on the test sets, and differences to the dense model paired by seed."""
    for data in DATA:
        print(f"\n{data}, {size}: accuracy in % of {len(SEEDS)} seeds, mean and 95 % interval")
        bag = lines.get(spec_key(bag_spec(data)))
        if bag is not None:
            print(f"  {'bag of words':18} {bag['num_parameters']:>10,} parameters {100 * bag['accuracy']:6.2f}")
        dense: dict[int, float] = {}
        for row in ROWS:
            rates = best_rates(lines, row, size)
            specs = {} if rates is None else {seed: seed_spec(row, rates, size, data, seed) for seed in SEEDS}
            found = {seed: line for seed, spec in specs.items() if (line := lines.get(spec_key(spec))) is not None}
            if not found:
                continue
            accuracy = {seed: 100.0 * line["accuracy"] for seed, line in found.items()}
            dense = accuracy if row == "dense" else dense
            mean, width = interval([*accuracy.values()])
            text = (
                f"  {row:18} {next(iter(found.values()))['num_parameters']:>10,} parameters {mean:6.2f} ± {width:.2f}"
            )
            pairs = [value - dense[seed] for seed, value in accuracy.items() if seed in dense]
            if row != "dense" and pairs:
                text += "   minus dense {:+.2f} ± {:.2f}".format(*interval(pairs))
            print(f"{text}   {len(found)} seeds")


def report_search(lines: Mapping[str, Line], settings: Mapping[str, Any], rates: Mapping[str, float], size: str) -> str:
    """Return the dev results of one seed at the best rates, and the means of three more seeds."""
    fixed = {"data": DATA[0], "dev": True, "seed": 0, "steps": SWEEP_STEPS[size]}
    line = lines.get(spec_key(make_spec(settings, rates, size, **fixed)))
    if line is None or line["eval_loss"] is None:
        return ""
    seeds = [lines.get(spec_key(variant_spec(settings, rates, size, seed))) for seed in SEEDS[:3]]
    found = [one for one in seeds if one is not None and one["eval_loss"] is not None]
    text = f"{100 * line['accuracy']:6.2f} % loss {line['eval_loss']:.3f}   "
    text += " ".join(f"{key} {value:.3g}" for key, value in rates.items())
    if found:
        accuracy, loss = (np.mean([one[key] for one in found]) for key in ("accuracy", "eval_loss"))
        text += f"   {len(found)} more seeds {100 * accuracy:.2f} % loss {loss:.3f}"
    return text


def report(lines: Mapping[str, Line], size: str) -> None:
    print(f"rates by search on the dev set of {DATA[0]}, {size}, {SWEEP_STEPS[size]} steps, seed 0")
    for row, settings in ROWS.items():
        spec, rates = (None, None) if row in SHARED else search_row(lines, row, size)
        if rates is not None:
            print(f"  {row:32}{report_search(lines, settings, rates, size)}{'' if spec is None else '   not ended'}")
    print("variants of `tt`")
    for name in VARIANTS:
        spec, found = search_variant(lines, name, size)
        if found is not None:
            text = report_search(lines, variant_settings(name), found, size)
            print(f"  {name:32}{text}{'' if spec is None else '   not ended'}")
    report_rows(lines, size)


def main() -> int:
    parser = command_line(__doc__, ("sweep", "seeds", "variants", "times", "report"), RESULT_FILE)
    parser.add_argument("--size", choices=[*SIZES], default="small")
    parser.add_argument("--only", nargs="+", help="names of rows or variants")
    parser.add_argument("--data", nargs="+", choices=DATA, default=DATA, help="seeds: data sets")
    options = parser.parse_args()
    if options.phase == "one":
        spec = json.loads(options.spec)
        printed(bag_of_words(spec) if spec.get("measure") else run_training(spec))
        return 0
    ledger = Ledger(options.results, Path(__file__), threads_a_job(options.jobs))
    rows = [row for row in ROWS if options.only is None or row in options.only]
    if options.phase == "sweep":
        own = [row for row in rows if row not in SHARED]
        side_by_side(options.jobs, partial(run_search, ledger, options.size), own)
    elif options.phase == "seeds":
        for data in options.data:
            ledger.run(bag_spec(data))
        items = [(seed, data, row) for seed in SEEDS for data in options.data for row in rows]
        side_by_side(options.jobs, partial(run_seeds, ledger, options.size), items)
    elif options.phase == "times":
        found = dated(__file__, size=options.size, results=time_rows(rows, options.size, rounds=40))
        print(write(found, f"intent-times-{options.size}-cpu"))
    elif options.phase == "variants":
        names = [name for name in VARIANTS if options.only is None or name in options.only]
        side_by_side(options.jobs, partial(run_variant, ledger, options.size), names)
    else:
        report(ledger.lines(), options.size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
