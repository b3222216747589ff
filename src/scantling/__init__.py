"""Scantling: train large models for less.

Each public name is imported when it is first used, so that `import scantling` is quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scantling.lazy_names import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from scantling import comm, errors, hf, laws, optim, precision, tensor
    from scantling.comm.demo import DeMo
    from scantling.comm.exchange import MomentumExchange
    from scantling.groups import param_groups
    from scantling.optim.came import CAME
    from scantling.precision.training import quantize_training
    from scantling.precision.weights import quantize_weights
    from scantling.tensor.convert import densify, tensorize
    from scantling.tensor.embedding import TTMEmbedding, TTMEmbeddingBag
    from scantling.tensor.linear import TTLinear
    from scantling.tensor.rank_adapter import RankAdapter
    from scantling.trainer.models.load import load
    from scantling.trainer.planning.plan import Plan, plan
    from scantling.trainer.training.run import RunResult, train

_HOMES = {
    "CAME": "scantling.optim.came",
    "DeMo": "scantling.comm.demo",
    "MomentumExchange": "scantling.comm.exchange",
    "Plan": "scantling.trainer.planning.plan",
    "RankAdapter": "scantling.tensor.rank_adapter",
    "RunResult": "scantling.trainer.training.run",
    "TTLinear": "scantling.tensor.linear",
    "TTMEmbedding": "scantling.tensor.embedding",
    "TTMEmbeddingBag": "scantling.tensor.embedding",
    "densify": "scantling.tensor.convert",
    "load": "scantling.trainer.models.load",
    "param_groups": "scantling.groups",
    "plan": "scantling.trainer.planning.plan",
    "quantize_training": "scantling.precision.training",
    "quantize_weights": "scantling.precision.weights",
    "tensorize": "scantling.tensor.convert",
    "train": "scantling.trainer.training.run",
}

_MODULES = {
    "comm": "scantling.comm",
    "errors": "scantling.errors",
    "hf": "scantling.hf",
    "laws": "scantling.laws",
    "optim": "scantling.optim",
    "precision": "scantling.precision",
    "tensor": "scantling.tensor",
}

__all__ = [
    "CAME",
    "DeMo",
    "MomentumExchange",
    "Plan",
    "RankAdapter",
    "RunResult",
    "TTLinear",
    "TTMEmbedding",
    "TTMEmbeddingBag",
    "comm",
    "densify",
    "errors",
    "hf",
    "laws",
    "load",
    "optim",
    "param_groups",
    "plan",
    "precision",
    "quantize_training",
    "quantize_weights",
    "tensor",
    "tensorize",
    "train",
]


__getattr__, __dir__ = lazy_names(__name__, _HOMES, _MODULES)
