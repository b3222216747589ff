"""MovieLens small as click data: ratings of 4 and more are clicks; and a training run of a DLRM on it.

The file holds the first 85 % of each user's ratings. Each user's ratings are split by time: the first 80 % train, the
next 10 % are the dev set, the last 10 % the test set. A split of all ratings at one date has no power: nearly all users
rate on one or two days, so 96 % of its test rows are by users without a training row. Ids, their order and the scaling
come from the training rows alone.
"""

from __future__ import annotations

import csv
import gzip
import re
import time
from collections.abc import Iterator
from functools import cache
from math import isqrt, pi
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from click_tables import HashedBag, QuotientRemainderBag
from resumable import Line, Spec, spec_key
from small_models import data_folder, run_facts
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, dropout

import scantling as sc
from scantling.tensor.layer import TTLayer
from scantling.trainer.models.dlrm import DLRM, DLRMConfig
from scantling.trainer.tasks.clicks import auc, binary_entropy

PRIOR = 20.0
"""Ratings of average size that are added to those of each id before ids are ordered by rating."""
BATCH, STEPS, EVERY, PATIENCE = 512, 1056, 33, 6
"""Rows per step; steps at most (8 passes); steps between evaluations on the dev set; evaluations without a new best."""
DECAY = 0.99
"""Decay per step of the averaged weights, which are the ones evaluated."""
SHRINK_STEPS = 264
"""Steps in which a rank adapter reaches its size; the best weights are those of a later step."""

Array = npt.NDArray[Any]


class Ratings(NamedTuple):
    """Rows of one set: numeric features (rows, 27), ids of user, item and genre set (rows, 3), labels (rows,)."""

    numeric: Tensor
    ids: Tensor
    labels: Tensor


class MovieLens(NamedTuple):
    """Training, dev and test rows, and the number of ids of each table: user, item, genre set."""

    sets: tuple[Ratings, Ratings, Ratings]
    sizes: tuple[int, ...]


@cache
def movielens(order: str) -> MovieLens:
    """Read MovieLens.

    Args:
        order: order of the ids of each table: `key`, which has nothing to do with the labels; `frequency`, most
            frequent first; `rating`, by the share of clicks beyond that of the raters' average.
    """
    folder = data_folder() / "recsys"
    with gzip.open(folder / "ml_latest_small_movies.csv.gz", "rt", encoding="utf-8", newline="") as file:
        movies = {int(row["movieId"]): (_year(row["title"]), row["genres"]) for row in csv.DictReader(file)}
    with gzip.open(folder / "ml_latest_small_ratings_first85pct_per_user.csv.gz", "rt", encoding="utf-8") as file:
        users, items, ratings, seconds = np.loadtxt(file, delimiter=",", skiprows=1).T
    part = split(users, items, seconds)
    genre_sets = np.array([movies[int(item)][1] for item in items])
    labels = ratings >= 4
    is_train = part == 0
    columns, sizes = [], []
    means = np.full(len(labels), labels[is_train].mean())
    for values in (users, items, genre_sets):
        ids, size = number(values, is_train, labels - means, order)
        columns.append(ids)
        sizes.append(size)
        if values is users:
            clicks, rows = (np.bincount(ids[is_train], w, size) for w in (labels[is_train], None))
            means = (clicks / np.maximum(rows, 1))[ids]
    names = sorted({genre for _, genres in movies.values() for genre in genres.split("|")})
    years = np.array([movies[int(item)][0] for item in items])
    rated = 1970 + seconds / (365.2425 * 86400)
    day, week = (2 * pi * (seconds % period) / period for period in (86400, 7 * 86400))
    scaled = np.stack([years, rated, rated - years], axis=1)
    scaled = (scaled - scaled[is_train].mean(0)) / scaled[is_train].std(0)
    waves = np.stack([np.sin(day), np.cos(day), np.sin(week), np.cos(week)], axis=1)
    multi_hot = np.array([[name in genres.split("|") for name in names] for genres in genre_sets])
    numeric = np.concatenate([multi_hot, scaled, waves], axis=1).astype(np.float32)
    ids = np.stack(columns, axis=1)
    sets = [
        Ratings(
            torch.from_numpy(numeric[part == side]),
            torch.from_numpy(ids[part == side]),
            torch.from_numpy(labels[part == side].astype(np.float32)),
        )
        for side in range(3)
    ]
    return MovieLens((sets[0], sets[1], sets[2]), tuple(sizes))


def _year(title: str) -> float:
    found = re.search(r"\((\d{4})\)\s*$", title.strip())
    return float(found[1]) if found else 1995.0  # the median; 13 movies have no year


def split(users: Array, items: Array, seconds: Array) -> Array:
    """Return the set of each rating: 0 to train, 1 for dev, 2 for test, by its place among the user's ratings."""
    part = np.zeros(len(users), dtype=np.int64)
    ranked = np.lexsort((items, seconds, users))  # ratings of the same second by item
    for rows in np.split(ranked, np.flatnonzero(np.diff(users[ranked])) + 1):
        part[rows[int(0.8 * len(rows)) :]] = 1
        part[rows[int(0.9 * len(rows)) :]] = 2
    return part


def number(values: Array, is_train: Array, residuals: Array, order: str) -> tuple[Array, int]:
    """Return an id for each value, and the number of ids; id 0 is for values with fewer than two training rows."""
    keys, inverse, counts = np.unique(values[is_train], return_inverse=True, return_counts=True)
    if order == "frequency":
        ranked = np.argsort(-counts, kind="stable")
    elif order == "rating":
        ranked = np.argsort(-np.bincount(inverse, residuals[is_train]) / (counts + PRIOR), kind="stable")
    else:
        ranked = np.random.default_rng(0).permutation(len(keys))
    ranked = ranked[counts[ranked] >= 2]
    ids_of = dict(zip(keys[ranked].tolist(), range(1, len(ranked) + 1), strict=True))
    return np.array([ids_of.get(value, 0) for value in values.tolist()]), len(ranked) + 1


class NeighborBag(nn.Module):
    """Embedding bag with fewer rows than ids: neighboring ids share a row."""

    def __init__(self, num_embeddings: int, num_rows: int, dim: int, bound: float) -> None:
        super().__init__()
        self.width = -(-num_embeddings // num_rows)
        self.rows = nn.EmbeddingBag(-(-num_embeddings // self.width), dim, mode="sum")
        nn.init.uniform_(self.rows.weight, -bound, bound)

    def forward(self, ids: Tensor) -> Tensor:  # (batch, ids) -> (batch, dim)
        bags: Tensor = self.rows(ids // self.width)
        return bags


class Biases(nn.Module):
    """Logistic regression: one weight per numeric feature and one per id."""

    def __init__(self, num_numeric: int, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(size, 1, mode="sum") for size in sizes)
        for table in self.tables:
            nn.init.zeros_(table.weight)
        self.top = nn.Linear(num_numeric, 1)

    def forward(self, numeric: Tensor, categorical: Tensor) -> Any:
        biases = [table(ids[:, None]) for table, ids in zip(self.tables, categorical.unbind(1), strict=True)]
        return SimpleNamespace(logits=(self.top(numeric) + sum(biases)).squeeze(1))


def build(spec: Spec, sizes: tuple[int, ...], num_numeric: int) -> tuple[nn.Module, sc.RankAdapter | None]:
    """Return the model of a run with at most `spec["budget"]` parameters in its tables, and its rank adapter."""
    if spec["kind"] == "biases":
        return Biases(num_numeric, sizes), None
    config = DLRMConfig(num_numeric, sizes, spec["dim"], bottom_mlp=[64], top_mlp=[64, 32])
    model = DLRM(config)
    kind, budget, dim = spec["kind"], spec["budget"], spec["dim"]
    if kind.startswith("tt"):
        # An adapter starts with ten times as many parameters as it ends with.
        begin = budget * 10 if kind.startswith("tt-adapter") else budget
        rank = max(rank for rank in range(1, 1000) if tt_numel(sizes, dim, rank, spec["modes"]) <= begin or rank == 1)
        options = {"rank": rank, "num_modes": spec["modes"]}
        sc.tensorize(model, {"tables.*": options}, filter_fn=lambda name, layer: True)
        if kind == "tt":
            return model, None
        target = 1.0 if kind.startswith("tt-gates") else 0.995 * budget  # within the adapter's tolerance
        return model, sc.RankAdapter(model, size_target=target, steps=SHRINK_STEPS)
    if kind in ("hash", "qr"):
        # Quotient and remainder need some rows for each table; the other rows are shared out by size.
        least = [qr_rows(size) if kind == "qr" else 1 for size in sizes]
        spare = max(0, budget // dim - sum(least))
        for n, size in enumerate(sizes):
            rows, bound = least[n] + spare * size // sum(sizes), size**-0.5
            if kind == "qr":
                model.tables[n] = QuotientRemainderBag(size, rows, dim, bound)
            elif spec["order"] == "rating":
                model.tables[n] = NeighborBag(size, rows, dim, bound)
            else:
                model.tables[n] = HashedBag(rows, dim, bound)
    return model, None


@cache
def tt_numel(sizes: tuple[int, ...], dim: int, rank: int, modes: int) -> int:
    """Return the number of parameters of TT tables."""
    tables = (sc.TTMEmbeddingBag(size, dim, rank, num_modes=modes, device="meta") for size in sizes)
    return sum(table.num_parameters() for table in tables)


def qr_rows(size: int) -> int:
    """Return the smallest number of rows of quotients and remainders together."""
    divisor = isqrt(size - 1) + 1
    return divisor + -(-size // divisor)


def run_training(spec: Spec) -> Line:
    """Train one model until the dev set's AUC stops rising; return the dev and test figures of its best weights."""
    began = time.time()
    sets, sizes = movielens(spec["order"])
    train, dev, test = [
        Ratings(each.numeric, each.ids * torch.tensor([1, 0, 1]), each.labels) if spec["kind"] == "no-item" else each
        for each in sets
    ]
    torch.manual_seed(spec["seed"])
    model, adapter = build(spec, sizes, train.numeric.shape[1])
    found: list[Tensor] = []

    def keep_rows(table: nn.Module, _: Any, rows: Tensor) -> Tensor | None:
        found.append(rows)
        return dropout(rows, spec["dropout"]) if table.training and spec["dropout"] else None

    for table in model.tables:  # type: ignore[union-attr]
        table.register_forward_hook(keep_rows)
    rate = spec["lr"] * spec["table_rate"]
    groups = sc.param_groups(model, embedding_lr=rate, core_lr=rate, embedding_core_lr=rate)
    optimizer = torch.optim.AdamW(groups, lr=spec["lr"], weight_decay=0.0)
    averages = [param.detach().clone() for param in model.parameters()]
    best: dict[str, Any] = {"dev_auc": 0.0}
    curve = []
    for step, rows in enumerate(batches(len(train.labels), spec["seed"]), start=1):
        found.clear()
        logits = model(train.numeric[rows], train.ids[rows]).logits
        loss = binary_cross_entropy_with_logits(logits, train.labels[rows])
        # Squared norms of the rows in the batch: the same regularizer for every kind of table.
        loss = loss + spec["penalty"] * sum(each.square().sum(-1).mean() for each in found)
        optimizer.zero_grad()
        (loss if adapter is None else adapter.loss(loss)).backward()
        optimizer.step()
        if adapter is not None and step == SHRINK_STEPS:
            adapter.truncate(optimizer)
            averages = [param.detach().clone() for param in model.parameters()]
        now = [param.detach() for param in model.parameters()]
        torch._foreach_lerp_(averages, now, 1 - min(DECAY, step / (step + 9)))
        if step % EVERY or (spec["kind"].startswith("tt-adapter") and step <= SHRINK_STEPS):
            continue
        kept = [param.clone() for param in now]
        torch._foreach_copy_(now, averages)
        figures = evaluate(model, dev)
        curve.append(round(figures["auc"], 4))
        if figures["auc"] > best["dev_auc"]:
            best = {"eval_loss": figures["loss"], "dev_auc": figures["auc"], **evaluate(model, test), "best_step": step}
        torch._foreach_copy_(now, kept)
        if step - best.get("best_step", step) >= PATIENCE * EVERY:
            break
    tables = sum(param.numel() for param in model.tables.parameters())  # type: ignore[union-attr]
    total = sum(param.numel() for param in model.parameters())
    if adapter is not None:  # gates are multiplied into the cores at the end
        total, tables = total - tables + adapter.num_parameters(), adapter.num_parameters()
    sizes_found = {"table_numel": tables, "num_parameters": total, "steps": step, "curve": curve}
    ranks = {name: layer.ranks for name, layer in model.named_modules() if isinstance(layer, TTLayer)}
    return {"key": spec_key(spec), **spec, **best, **sizes_found, "ranks": ranks, **run_facts(began)}


def batches(rows: int, seed: int) -> Iterator[Tensor]:
    """Yield the row indices of each step, a new order in each pass."""
    generator = torch.Generator().manual_seed(seed)
    per_pass = rows // BATCH
    for step in range(STEPS):
        if step % per_pass == 0:
            order = torch.randperm(rows, generator=generator)
        yield order[step % per_pass * BATCH :][:BATCH]


@torch.no_grad()
def evaluate(model: nn.Module, rows: Ratings) -> dict[str, float]:
    """Return loss, AUC and normalized entropy of a set."""
    model.eval()
    logits = model(rows.numeric, rows.ids).logits
    model.train()
    loss = float(binary_cross_entropy_with_logits(logits, rows.labels))
    area = auc(logits.numpy(), rows.labels.numpy())
    assert area is not None
    return {"loss": loss, "auc": area, "normalized_entropy": loss / binary_entropy(float(rows.labels.mean()))}
