"""Build one measurable training step of a DLRM with Criteo Kaggle's tables, dense or TT, with its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import torch
from contenders import held_bytes
from torch import Tensor, nn
from zipf_clicks import CRITEO_KAGGLE, ZipfClicks

import scantling as sc
from scantling.tensor.layer import TTLayer, keep_merged
from scantling.trainer.models.dlrm import DLRM, DLRMConfig

WIDTH = 32
RANK, MLP_RANK = 64, 32
LARGE_ROWS = 90_000
"""Smallest table that becomes a TT layer; these tables hold 33.7 of the 33.8 million rows."""
LARGE_LAYERS = ("bottom.2", "top.0", "top.2")
"""Linear layers that become TT layers: 512 to 256 in the bottom MLP, the first of the top MLP, and 512 to 256 there."""
ROWS = ("dense-sgd", "dense-adamw", "cores-sgd", "cores-adamw")


def build_model(name: str, *, rank: int = RANK, shrink: int = 1, device: str = "cpu") -> DLRM:
    """Return the model of a row; a TT table is never held as a dense table.

    Args:
        name: name of the row.
        rank: rank of the TT tables.
        shrink: factor by which tables have fewer rows, for a quick look.
        device: `meta` for a model without memory.
    """
    sizes = [max(2, size // shrink) for size in CRITEO_KAGGLE]
    with torch.device("meta"):
        model = DLRM(DLRMConfig(table_sizes=sizes, embedding_dim=WIDTH))
    if name.startswith("cores"):
        large = [number for number, size in enumerate(CRITEO_KAGGLE) if size >= LARGE_ROWS]
        ranks: dict[str, Any] = {f"tables.{number}": {"rank": rank, "num_modes": 4} for number in large}
        sc.tensorize(model, ranks | dict.fromkeys(LARGE_LAYERS, MLP_RANK))
    if device != "meta":
        model.to_empty(device=device)
        torch.manual_seed(0)
        for module in model.modules():
            if isinstance(module, TTLayer):
                rows = getattr(module, "num_embeddings", None)
                # norm of a table that is uniform within 1 / sqrt(rows)
                norm = None if rows is None else (WIDTH / 3) ** 0.5
                module.reset_parameters(norm=norm)  # type: ignore[operator]
            else:
                model._init_weights(module)
    return model.train()


def build_optimizer(name: str, model: DLRM) -> torch.optim.Optimizer:
    """Return SGD with sparse gradients for dense tables, as the public DLRM trains, or AdamW with dense gradients."""
    if name.endswith("sgd"):
        for table in model.tables:
            if isinstance(table, nn.EmbeddingBag):
                table.sparse = True
        return torch.optim.SGD(model.parameters(), lr=0.1)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)


def make_batches(count: int, batch_size: int, shrink: int = 1) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return numeric features, ids and labels of Zipf-distributed clicks."""
    clicks = ZipfClicks(cardinalities=[max(2, size // shrink) for size in CRITEO_KAGGLE])
    made = []
    for number in range(count):
        rows = clicks.rows(number * batch_size, batch_size)
        numeric = np.log1p(np.nan_to_num(rows.numbers)).astype(np.float32)
        made.append((torch.from_numpy(numeric), torch.from_numpy(rows.ids), torch.from_numpy(rows.labels).float()))
    return made


class Training:
    """A model with its optimizer and a few batches; `step()` runs one whole training step.

    Args:
        name: one of `ROWS`.
        batches: from `make_batches`.
        rank, shrink: as for `build_model`.
    """

    def __init__(self, name: str, batches: list[tuple[Tensor, Tensor, Tensor]], *, rank: int, shrink: int) -> None:
        self.model = build_model(name, rank=rank, shrink=shrink)
        self.optimizer = build_optimizer(name, self.model)
        self._batches = batches

    def step(self) -> Callable[[], None]:
        turns = cycle(self._batches)

        def run() -> None:
            numeric, ids, labels = next(turns)
            self.optimizer.zero_grad(set_to_none=True)
            logits = self.model(numeric, ids).logits
            nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
            self.optimizer.step()

        return run

    def evaluate(self) -> None:
        """Evaluate one batch as an evaluation during training does, with gradients and optimizer state in memory."""
        numeric, ids, _ = self._batches[0]
        self.model.eval()
        with torch.no_grad(), keep_merged(self.model):
            self.model(numeric, ids)
        self.model.train()

    def sizes(self) -> dict[str, int]:
        """Return the parameter count and the bytes of weights, gradients and optimizer state after a step."""
        gradients = [param.grad for param in self.model.parameters() if param.grad is not None]
        held = [
            part for each in gradients for part in ((each._indices(), each._values()) if each.is_sparse else [each])
        ]
        return {
            "num_parameters": sum(param.numel() for param in self.model.parameters()),
            "weight_bytes": sum(param.nbytes for param in self.model.parameters()),
            "gradient_bytes": sum(part.nbytes for part in held),
            "optimizer_state_bytes": optimizer_bytes(self.optimizer),
        }


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes that an optimizer holds, without sparse gradients, which have no storage."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and param.grad.is_sparse:
                param.grad = None
    return held_bytes(optimizer)
