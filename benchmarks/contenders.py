"""Optimizers whose state `optim_bytes.py` counts: CAME and its competitors, each built for one list of shapes.

Each contender has a build function that imports its package, so a missing package or an unsupported machine is reported
for that contender alone. Settings are the authors' recommendations for large Llamas: GaLore and APOLLO at a quarter of
the hidden size on the layers' matrices, Adam on the rest; Muon on the matrices, AdamW on the rest; SCALE with momentum
for the output layer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scantling.optim import CAME, ParameterSpec, build_optimizer, predicted_state_bytes


class Spec(NamedTuple):
    """Role (matrix, embedding, head or vector) and shape of a parameter."""

    role: str
    shape: tuple[int, ...]


class Model(NamedTuple):
    """Parameters with their roles, and the hidden size from which low ranks are derived."""

    params: list[tuple[str, nn.Parameter]]
    hidden: int

    @classmethod
    def of(cls, specs: list[Spec], *, hidden: int, dtype: torch.dtype, device: str) -> Model:
        """Return parameters with small random values and gradients; shapes alone on the meta device."""
        params = []
        for role, shape in specs:
            param = nn.Parameter(torch.empty(shape, dtype=dtype, device=device).uniform_(-0.05, 0.05))
            param.grad = torch.empty_like(param).uniform_(-1.0, 1.0)
            params.append((role, param))
        return cls(params, hidden)

    def role(self, *roles: str) -> list[nn.Parameter]:
        return [param for role, param in self.params if role in roles]

    @property
    def all(self) -> list[nn.Parameter]:
        return [param for _, param in self.params]

    def low_rank(self, **settings: Any) -> list[dict[str, Any]]:
        """Return parameter groups in the form that galore-torch and apollo-torch expect."""
        return [{"params": self.role("embedding", "head", "vector")}, {"params": self.role("matrix"), **settings}]


Build = Callable[[Model], Optimizer]


@dataclass(frozen=True)
class Contender:
    """An optimizer under comparison.

    Attributes:
        name: the name in the report.
        build: makes the optimizer; raises if its package is missing or does not support this machine.
        predict: returns the bytes of state for a model on the meta device, if the optimizer has a formula; otherwise a
            step is taken there.
        sides: divisor of all sides on real tensors, for optimizers whose step takes minutes: an SVD, Newton-Schulz, a
            product in bf16, CAME without its C code.
    """

    name: str
    build: Build
    predict: Callable[[Model], int] | None = None
    sides: int = 1


def came(**options: Any) -> Contender:
    def build(model: Model) -> CAME:
        roles = {"matrix": "matrix", "embedding": "embedding", "head": "embedding", "vector": "vector"}
        groups = [{"params": own, "role": role} for key, role in roles.items() if (own := model.role(key))]
        return CAME(groups, lr=1e-3, betas=(0.9, 0.95, 0.995), debias=True, rounding="stochastic", **options)

    operations = options.get("foreach") is False
    name = f"CAME {options['momentum']}" + (", operations" if operations else "")
    return Contender(name, build, lambda model: build(model).state_bytes(), sides=4 if operations else 1)


def _adamw(model: Model) -> Optimizer:
    return torch.optim.AdamW(model.all, lr=1e-3, foreach=False)


def _fused_adamw(model: Model) -> Optimizer:
    return torch.optim.AdamW(model.all, lr=1e-3, fused=True)


def _adafactor(model: Model) -> Optimizer:
    return torch.optim.Adafactor(model.all, lr=1e-2)


def _predicted_adafactor(model: Model) -> int:
    specs = [ParameterSpec(tuple(param.shape), param.dtype) for param in model.all]
    return predicted_state_bytes("adafactor", specs) or 0


def _transformers_adafactor(model: Model) -> Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(model.all, lr=1e-3, scale_parameter=False, relative_step=False)


def _muon(model: Model) -> Optimizer:
    groups = [{"params": model.role(role), "role": role} for role in ("matrix", "embedding", "head", "vector")]
    return build_optimizer("muon", groups, lr=1e-3)


def _scale_like(model: Model) -> Optimizer:
    from peers import ScaleLike

    return ScaleLike(
        [{"params": model.role("matrix", "embedding", "vector")}, {"params": model.role("head"), "role": "embedding"}]
    )


def _torchao(name: str) -> Build:
    def build(model: Model) -> Optimizer:
        import torchao.optim

        optimizer: Optimizer = getattr(torchao.optim, name)(model.all, lr=1e-3)
        return optimizer

    return build


def _bitsandbytes(name: str) -> Build:
    def build(model: Model) -> Optimizer:
        import bitsandbytes

        optimizer: Optimizer = getattr(bitsandbytes.optim, name)(model.all, lr=1e-3)
        return optimizer

    return build


def _galore(model: Model) -> Optimizer:
    from galore_torch import GaLoreAdamW

    groups = model.low_rank(rank=model.hidden // 4, update_proj_gap=200, scale=0.25, proj_type="std")
    return GaLoreAdamW(groups, lr=1e-2, no_deprecation_warning=True)


def _apollo(*, mini: bool) -> Build:
    def build(model: Model) -> Optimizer:
        from apollo_torch import APOLLOAdamW

        own: dict[str, Any] = {"rank": model.hidden // 4, "scale_type": "channel", "scale": 1}
        if mini:
            own = {"rank": 1, "scale_type": "tensor", "scale": 128}
        return APOLLOAdamW(model.low_rank(**own, proj="random", update_proj_gap=200, proj_type="std"), lr=1e-2)

    return build


def _flashoptim(model: Model) -> Optimizer:
    from flashoptim import FlashAdamW

    return FlashAdamW(model.all, lr=1e-3)


def _pytorch_optimizer(name: str) -> Build:
    def build(model: Model) -> Optimizer:
        import pytorch_optimizer

        optimizer: Optimizer = getattr(pytorch_optimizer, name)(model.all, lr=1e-3)
        return optimizer

    return build


def _came_pytorch(model: Model) -> Optimizer:
    from came_pytorch import CAME as Published

    return Published(model.all, lr=1e-3)


MOMENTA = ("fp32", "bf16", "int8", "int4")
CONTENDERS = [
    *(came(momentum=momentum) for momentum in MOMENTA),
    *(came(momentum=momentum, foreach=False) for momentum in MOMENTA),
    Contender("torch AdamW", _adamw),
    Contender("torch AdamW, fused", _fused_adamw),
    Contender("torchao AdamW8bit", _torchao("AdamW8bit")),
    Contender("torchao AdamW4bit", _torchao("AdamW4bit")),
    Contender("bitsandbytes AdamW8bit", _bitsandbytes("AdamW8bit")),
    Contender("bitsandbytes PagedAdamW8bit", _bitsandbytes("PagedAdamW8bit")),
    Contender("FlashOptim FlashAdamW", _flashoptim),
    Contender("pytorch_optimizer FlashAdamW", _pytorch_optimizer("FlashAdamW")),
    Contender("torch Adafactor", _adafactor, _predicted_adafactor),
    Contender("transformers Adafactor", _transformers_adafactor),
    Contender("torch Muon + AdamW", _muon, sides=8),
    Contender("GaLore, rank hidden/4", _galore, sides=8),
    Contender("APOLLO, rank hidden/4", _apollo(mini=False), sides=8),
    Contender("APOLLO-Mini", _apollo(mini=True), sides=8),
    Contender("SCALE-like", _scale_like),
    Contender("came-pytorch", _came_pytorch),
    Contender("pytorch_optimizer CAME", _pytorch_optimizer("CAME")),
]


def held_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of every storage that is reachable from an optimizer, without its parameters and gradients.

    The count includes state inside tensor subclasses (torchao), projectors (GaLore, APOLLO) and tables of the optimizer
    itself. Shared storages count once.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    own = {t.untyped_storage()._cdata for param in params for t in (param, param.grad) if t is not None}
    found: dict[int, int] = {}
    for tensor in _tensors(optimizer):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def _tensors(root: object) -> Iterator[Tensor]:
    seen: set[int] = set()
    todo = [root]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type) or callable(item):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if hasattr(item, "__tensor_flatten__"):
                todo += [getattr(item, name) for name in item.__tensor_flatten__()[0]]
            else:
                yield item
        elif isinstance(item, dict):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            todo += item
        elif hasattr(item, "__dict__"):
            todo += vars(item).values()
