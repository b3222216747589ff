"""Define other weight formats than tensor trains for `tensor_formats.py`; all replace the linear layers of a decoder.

low rank
    y = (x A) B: a chain of two cores
cola
    y = silu(x A) B: a nonlinearity at the narrow rank (arXiv 2502.10940)
tt silu
    the same with A and B as chains of three cores
btt
    block tensor-train: two block-diagonal matrices with a transposition between them (arXiv 2406.06248, section 3).
    With x as (i1, i2) and y as (o1, o2):

              z[i1, o2, r] = sum over i2 of x[i1, i2] R[i1, i2, (o2, r)]
              y[o1, o2]    = sum over i1, r of z[i1, o2, r] L[o2, (i1, r), o1]

Each layer's rank is chosen so that its parameter count is nearest to a share of the dense layer's. Its outputs have the
variance of the dense layer's.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

import scantling as sc
from scantling.groups import MatrixDims, Role
from scantling.tensor.modes import split
from scantling.tensor.options import FORMATS
from scantling.tensor.shared_input import fuse_shared_inputs

Roles = dict[str, tuple[Role, MatrixDims | None]]
OF_CORES = {name.replace("-", " "): options for name, options in FORMATS.items()}
"""Formats that this project provides, with the options of `TTLinear`."""


class BlockTensorTrain(nn.Module):
    """Two block-diagonal matrices with a transposition between them; inputs and outputs have two modes each."""

    def __init__(self, in_features: int, out_features: int, rank: int) -> None:
        super().__init__()
        self.inputs, self.outputs, self.rank = split(in_features, 2)[::-1], split(out_features, 2)[::-1], rank
        (i1, i2), (o1, o2) = self.inputs, self.outputs
        right = torch.randn(i1, i2, o2 * rank) / i2**0.5
        left = torch.randn(o2, i1 * rank, o1) / (3.0 * i1 * rank) ** 0.5
        self.cores = nn.ParameterList([right, left])

    def parameter_roles(self) -> Roles:
        return {f"cores.{place}": ("matrix", ((1,), (2,))) for place in range(2)}

    def forward(self, x: Tensor) -> Tensor:
        (i1, i2), (o1, o2) = self.inputs, self.outputs
        right, left = self.cores
        z = torch.bmm(x.reshape(-1, i1, i2).transpose(0, 1), right)  # (i1, tokens, o2 r)
        z = z.view(i1, -1, o2, self.rank).permute(2, 1, 0, 3).reshape(o2, -1, i1 * self.rank)
        y = torch.bmm(z, left)  # (o2, tokens, o1)
        return y.permute(1, 2, 0).reshape(*x.shape[:-1], o1 * o2)


@cache
def num_parameters(name: str, in_features: int, out_features: int, rank: int) -> int:
    """Return the number of parameters in a layer of a format."""
    if name in OF_CORES:
        layer = sc.TTLinear(in_features, out_features, rank, **OF_CORES[name], bias=False, device="meta")
        return layer.num_parameters()
    (i1, i2), (o1, o2) = split(in_features, 2)[::-1], split(out_features, 2)[::-1]
    return rank * prod((i1, o2)) * (i2 + o1)


def build_layer(name: str, linear: nn.Linear, share: float) -> nn.Module:
    """Return a layer of a format with about this share of the parameters of a dense layer without bias."""
    shape = linear.in_features, linear.out_features
    wanted = share * prod(shape)
    rank = min(range(1, min(shape) + 1), key=lambda rank: abs(num_parameters(name, *shape, rank) - wanted))
    norm = float(linear.weight.detach().norm())
    if name in OF_CORES:
        cores = sc.TTLinear(*shape, rank, **OF_CORES[name], bias=False)
        cores.reset_parameters(norm=norm)
        return cores
    layer = BlockTensorTrain(*shape, rank)
    with torch.no_grad():
        # initial entries of the product have variance 1 / (3 in), so its norm is sqrt(out / 3)
        layer.cores[-1].mul_(norm / (shape[1] / 3.0) ** 0.5)
    return layer


def replace_linears(model: nn.Module, name: str, share: float) -> nn.Module:
    """Replace the linear layers of a decoder's blocks.

    Args:
        model: changed in place.
        name: name of the format, `btt` or one of OF_CORES.
        share: share of the dense layer's parameters.
    """
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and ".layers." in path:
            parent, _, last = path.rpartition(".")
            setattr(model.get_submodule(parent), last, build_layer(name, module, share))
    fuse_shared_inputs(model)
    return model


def register(name: str, share: float, core_lr: float) -> None:
    """Register a format for the runs of this process; its matrices or cores have their own learning rate."""
    from scantling.trainer.training import build

    convert, groups = build.convert_model, build.param_groups

    def convert_model(model: Any, recipe: Any) -> Any:
        return replace_linears(convert(model, recipe), name, share)

    def param_groups(model: nn.Module, *, weight_decay: float, **_: Any) -> list[dict[str, Any]]:
        return groups(model, weight_decay=weight_decay, core_lr=core_lr)

    build.convert_model, build.param_groups = convert_model, param_groups
