"""Compare ways to shrink the large tables of a DLRM to the same size, trained on real flights.

`cores`: tensor-train matrices. `hash`: the hashing trick, in which several categories share a row (Weinberger et al.,
arXiv 0902.2206). `qr`: the product of a row for the quotient and a row for the remainder of the id (Shi et al., arXiv
1909.02107). Each `hash` or `qr` table has as many parameters as the TT table, or as few as the method allows.

The data is that of the recipe flights-dlrm. Pairs of its columns are crossed to get tables of tens of thousands of
rows. A tenth of the rows is the test set, the same for all runs. Values that occur only once share the row of unknown
values, so that this row is trained. `uncrossed` is a dense model without the crossed pairs; it shows their benefit.
"""

from __future__ import annotations

import csv
import gzip
import os
import time
from math import ceil, isqrt, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from resumable import Line, Spec, spec_key
from small_models import ROOT, data_folder, run_facts
from torch import Tensor, nn

import scantling as sc
from scantling.distributed.context import SINGLE_PROCESS
from scantling.errors import UserError
from scantling.optim.registry import build_optimizer
from scantling.trainer.data.hashing import key64, uniform
from scantling.trainer.data.loader import BatchSource
from scantling.trainer.data.sampler import Sampler
from scantling.trainer.models.dlrm import DLRM
from scantling.trainer.planning.resolve import ResolvedRun
from scantling.trainer.recipe import load_recipe
from scantling.trainer.recipe.schema import TensorSection
from scantling.trainer.tasks import get_task
from scantling.trainer.training.build import build_run_model
from scantling.trainer.training.evaluate import evaluate_heldout
from scantling.trainer.training.schedule import lr_factor

RECIPE = ROOT / "recipes" / "flights-dlrm.yaml"
CROSSED = {
    "plane_route": ("tailnum", "origin", "dest"),
    "flight_route": ("carrier", "flight", "origin", "dest"),
    "plane_month": ("tailnum", "month"),
    "flight_month": ("carrier", "flight", "month"),
}
SMALL_ROWS = 1000
"""Smallest number of rows of a table that is compressed; smaller tables stay dense."""


class HashedBag(nn.Module):
    """Embedding bag with fewer rows than ids: id i takes row i mod n."""

    def __init__(self, num_rows: int, dim: int, bound: float) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(num_rows, dim, mode="sum")
        nn.init.uniform_(self.rows.weight, -bound, bound)

    def forward(self, ids: Tensor) -> Tensor:  # (batch, ids) -> (batch, dim)
        bags: Tensor = self.rows(ids % self.rows.num_embeddings)
        return bags


class QuotientRemainderBag(nn.Module):
    """Embedding bag that sums products of two rows, one for id // n and one for id mod n, so each id has its own
    product.

    Args:
        num_embeddings: number of ids.
        num_rows: rows of both tables together, at least 2 sqrt(num_embeddings) or as few as possible.
        dim: width of a row.
        bound: initial values lie within this bound, as in the dense table.
    """

    def __init__(self, num_embeddings: int, num_rows: int, dim: int, bound: float) -> None:
        super().__init__()
        root = sqrt(max(0.0, num_rows**2 - 4 * num_embeddings))
        self.divisor = max(isqrt(num_embeddings), int((num_rows + root) / 2)) if root else ceil(sqrt(num_embeddings))
        self.quotients = nn.Embedding(ceil(num_embeddings / self.divisor), dim)
        self.remainders = nn.Embedding(self.divisor, dim)
        nn.init.uniform_(self.quotients.weight, -bound, bound)
        nn.init.uniform_(self.remainders.weight, 0.5, 1.5)

    def forward(self, ids: Tensor) -> Tensor:  # (batch, ids) -> (batch, dim)
        quotients = self.quotients(torch.div(ids, self.divisor, rounding_mode="floor"))
        products: Tensor = quotients * self.remainders(ids % self.divisor)
        return products.sum(1)


def compressed(model: DLRM, kind: str, rank: int) -> DLRM:
    """Compress the large tables of a DLRM in place, to the size of TT tables of this rank."""
    large = [n for n, table in enumerate(model.tables) if table.num_embeddings >= SMALL_ROWS]
    if kind == "cores":
        sc.tensorize(model, {f"tables.{n}": {"rank": rank, "num_modes": 4} for n in large})
    elif kind in ("hash", "qr"):
        for n in large:
            rows, dim = model.tables[n].num_embeddings, model.tables[n].embedding_dim
            numbers = sc.TTMEmbeddingBag(rows, dim, rank, num_modes=4, device="meta").num_parameters()
            bound = 1 / sqrt(rows)
            if kind == "hash":
                model.tables[n] = HashedBag(max(1, numbers // dim), dim, bound)
            else:
                model.tables[n] = QuotientRemainderBag(rows, numbers // dim, dim, bound)
    return model


def flights(every: int = 1) -> tuple[Path, Path]:
    """Return the files of training rows and test rows; write them if they are missing.

    Args:
        every: use only every n-th row.
    """
    folder = ROOT / "runs" / f"flights-crossed-{every}"
    paths = folder / "train.csv", folder / "test.csv"
    if all(path.exists() for path in paths):
        return paths
    source = data_folder() / "recsys" / "nycflights13_jan_oct.csv.gz"
    if not source.is_file():
        raise UserError(f"{source} is not there; set SCANTLING_DATA to the folder of real data")
    with gzip.open(source, "rt", newline="") as file:
        rows = list(csv.DictReader(file))[::every]
    in_test = uniform(np.arange(len(rows), dtype=np.uint64), key64("flights", "test")) < 0.1
    folder.mkdir(parents=True, exist_ok=True)
    for path, side in zip(paths, (False, True), strict=True):
        part = path.with_suffix(f".{os.getpid()}")
        with part.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], *CROSSED])
            writer.writeheader()
            for row, is_test in zip(rows, in_test, strict=True):
                if is_test == side:
                    crossed = {name: " ".join(row[one] for one in columns) for name, columns in CROSSED.items()}
                    writer.writerow({**row, **crossed})
        part.replace(path)
    return paths


def build_recipe(spec: Spec) -> dict[str, Any]:
    """Return the flights recipe with crossed columns and tables of another width, evaluated on the test or dev set."""
    recipe: dict[str, Any] = yaml.safe_load(RECIPE.read_text())
    train, test = flights(spec["every"])
    data = recipe["data"]
    data["csv"] = str(train)
    if spec["kind"] != "uncrossed":
        data["clicks"]["categorical"] += list(CROSSED)
    data["clicks"]["min_count"] = 2
    if not spec["dev"]:
        del data["heldout"]
        data["validation"] = str(test)
    recipe["name"] = "flights"
    recipe["model"]["overrides"]["embedding_dim"] = spec["width"]
    recipe["optim"] |= {"lr": spec["lr"]}
    recipe["train"] |= {"steps": spec["steps"], "seed": spec["seed"], "device": "cpu"}
    return recipe


def run_training(spec: Spec) -> Line:
    """Train one kind of tables in this process and return its result line."""
    began = time.time()
    recipe = load_recipe(build_recipe(spec))
    task = get_task("clicks")
    data = task.prepare(recipe.data, seed=0)
    run = ResolvedRun(recipe, task, world_size=1, device="cpu", data=data)
    model = build_run_model(run)
    torch.manual_seed(spec["seed"])
    compressed(model, spec["kind"], spec["rank"])
    groups = sc.param_groups(model, **TensorSection().rates(recipe.optim.lr))
    optimizer = build_optimizer(recipe.optim.name, groups, lr=recipe.optim.lr)
    rates = [group["lr"] for group in optimizer.param_groups]
    batch = recipe.batch_size
    sampler = Sampler(len(data.train), batch_size=batch, seed=spec["seed"])
    batches = BatchSource(data.train, data.collate, sampler, micro_batch_size=batch)
    for step in range(1, spec["steps"] + 1):
        factor = lr_factor(step, steps=spec["steps"], schedule="cosine", warmup=0.05, min_ratio=0.1)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        loss = task.loss(model, batches.next_step()[0]).loss / batch
        if not torch.isfinite(loss):
            failure = {"eval_loss": None, "failure": f"step {step}: the loss is {float(loss)}"}
            return {"key": spec_key(spec), **spec, **failure, **run_facts(began)}
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    figures = evaluate_heldout(run, model, SINGLE_PROCESS)
    sizes = {
        "num_parameters": sum(param.numel() for param in model.parameters()),
        "table_numbers": sum(param.numel() for param in model.tables.parameters()),
        "table_sizes": list(data.features.table_sizes) if data.features is not None else [],
    }
    return {"key": spec_key(spec), **spec, **figures, **sizes, **run_facts(began)}
