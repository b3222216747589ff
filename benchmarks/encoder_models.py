"""Build a measurable training step of the full-size six-encoder transformer, dense or TT, with its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from contenders import held_bytes
from small_models import ROOT
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import scantling as sc
from scantling.optim.registry import build_optimizer
from scantling.tensor.layer import TTLayer, keep_merged
from scantling.trainer.recipe import load_recipe

RECIPE = ROOT / "recipes" / "papers" / "mnli-six-encoder.yaml"
DENSE_PART = 66_498_048
"""Parameters in the dense weights that TT layers replace."""
CORES = 1_026_528
"""TT parameters at the initial ranks."""
TARGETS = {"0.8": 0.8, "0.5": 0.5, "0.2": 0.2, "361x": DENSE_PART / 361 / 1.01 / CORES}
"""Targets as fractions of the initial TT size. A size may exceed its target by 1 %, so the last one aims 1 % lower."""
GALORE_RANKS = {"galore": 192, "galore-30": 30, "galore-per-layer": 192}
"""Ranks of GaLore.

`galore`: a quarter of the width, as its authors train Llamas. `galore-30`: the rank of the TT layers.
`galore-per-layer`: a quarter of the width, with a step of each parameter as soon as its gradient is ready; the gradient
is then freed. This is its authors' way to the least memory.
"""
CONFIGURATIONS = ("dense", *GALORE_RANKS, "cores", "cores-adapting", *(f"cores-{target}" for target in TARGETS))


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and its input that a quick look may reduce, and the dropout."""

    layers: int = 6
    length: int = 128
    dropout: float = 0.1
    width: int = 768
    vocabulary: int = 30522


FULL = Shape()


def build_config(shape: Shape, **changes: Any) -> BertConfig:
    """Return the recipe's configuration, with BERT's defaults for the rest."""
    sizes = {"hidden_size": shape.width, "intermediate_size": 4 * shape.width, "num_attention_heads": 12}
    given = {"vocab_size": shape.vocabulary, **sizes}
    dropout = {f"{place}_dropout_prob": shape.dropout for place in ("hidden", "attention_probs")}
    return BertConfig(**{**given, **dropout, "num_hidden_layers": shape.layers, "num_labels": 3, **changes})


def build_model(name: str, shape: Shape = FULL) -> tuple[nn.Module, sc.RankAdapter | None]:
    """Return the model of a configuration in training mode, and a rank adapter if its ranks are adapting.

    The model is built on the meta device, so a TT model never holds the dense weights. Weights are drawn by torch's
    defaults, which does not affect time or memory. Given a size target, the ranks are reduced at once.
    """
    with torch.device("meta"):
        model = BertForSequenceClassification(build_config(shape))
    if name.startswith("cores"):
        tensor = load_recipe(RECIPE).tensor
        assert tensor is not None
        sc.tensorize(model, tensor.rank, num_modes=tensor.num_modes)
    materialize(model)
    target = TARGETS.get(name.removeprefix("cores-"))
    adapter = None
    if target is not None:
        sc.RankAdapter(model, size_target=target, steps=1).finish()
    elif name == "cores-adapting":
        adapter = sc.RankAdapter(model, size_target=0.2, steps=1000, begin=999)
    return model.train(), adapter


def materialize(model: nn.Module) -> None:
    """Allocate and initialize a model from the meta device."""
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, TTLayer | nn.Linear | nn.Embedding | nn.LayerNorm):
            module.reset_parameters()  # type: ignore[operator]
    embeddings = model.bert.embeddings
    embeddings.position_ids.copy_(torch.arange(embeddings.position_ids.shape[1]))
    embeddings.token_type_ids.zero_()


def make_optimizer(name: str, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Return AdamW in its fastest form, or GaLore; no weight decays, as in the paper's code."""
    groups = sc.param_groups(model)
    if name in GALORE_RANKS:
        import galore

        galore.register()
        build = partial(build_optimizer, "galore", lr=1e-4, rank=GALORE_RANKS[name])
        return galore.PerParameter(groups, build) if name == "galore-per-layer" else build(groups)
    return torch.optim.AdamW(groups, lr=1e-4, weight_decay=0.0, **{"fused": True, **options})


class Training:
    """A model with its optimizer and a batch of random tokens; calling it runs one whole training step.

    Args:
        name: one of `CONFIGURATIONS`.
        shape: shape of the model and the input.
        dtype: "float32", or "bfloat16" for autocast.
        device: device of the training.
        options: options of AdamW.
    """

    def __init__(
        self, name: str, shape: Shape = FULL, dtype: str = "float32", device: str = "cpu", **options: Any
    ) -> None:
        self.model, self.adapter = build_model(name, shape)
        self.model.to(device)
        self.optimizer = make_optimizer(name, self.model, **options)
        self._shape, self._dtype, self._device = shape, getattr(torch, dtype), device

    def step(self, batch_size: int) -> Callable[[], None]:
        """Run one training step on sequences of full length."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self._shape.vocabulary, (batch_size, self._shape.length), generator=generator)
        labels = torch.randint(0, 3, (batch_size,), generator=generator)
        ids, labels = ids.to(self._device), labels.to(self._device)

        def run() -> None:
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self._device, self._dtype, enabled=self._dtype != torch.float32):
                logits = self.model(ids).logits
            loss = nn.functional.cross_entropy(logits.float(), labels)
            if self.adapter is not None:
                capturing = self._device == "cuda" and torch.cuda.is_current_stream_capturing()
                loss = (self.adapter.objective if capturing else self.adapter.loss)(loss)
            loss.backward()
            self.optimizer.step()

        return run

    def evaluate(self, batch_size: int) -> None:
        """Evaluate one batch as an evaluation during training does, with gradients and optimizer state in memory."""
        ids = torch.randint(
            0, self._shape.vocabulary, (batch_size, self._shape.length), generator=torch.Generator().manual_seed(1)
        )
        self.model.eval()
        with torch.no_grad(), keep_merged(self.model):
            self.model(ids.to(self._device))
        self.model.train()

    def sizes(self) -> dict[str, Any]:
        """Return the parameter count and the bytes of weights, gradients and optimizer state after a step."""
        parameters = list(self.model.parameters())
        cores = [module for module in self.model.modules() if isinstance(module, TTLayer)]
        weight_bytes = sum(param.nbytes for param in parameters)
        gradient_bytes = sum(param.grad.nbytes for param in parameters if param.grad is not None)
        optimizer_bytes = held_bytes(self.optimizer)
        return {
            **asdict(self._shape),
            "num_parameters": sum(param.numel() for param in parameters),
            "core_numbers": sum(core.numel() for layer in cores for core in layer.cores),
            "weight_bytes": weight_bytes,
            "gradient_bytes": gradient_bytes,
            "optimizer_state_bytes": optimizer_bytes,
            "training_state_bytes": weight_bytes + gradient_bytes + optimizer_bytes,
        }


def warm_up(name: str, batch_size: int = 1) -> None:
    """Run a step of a small model of the same kind, so that libraries finish their lazy loading."""
    small = build_config(Shape(layers=1), vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=2)
    model = BertForSequenceClassification(small)
    if name.startswith("cores"):
        sc.tensorize(model, 2)
    optimizer = make_optimizer(name, model)
    ids = torch.zeros(batch_size, 8, dtype=torch.long)
    nn.functional.cross_entropy(model(ids).logits, ids[:, 0] % 3).backward()
    optimizer.step()
