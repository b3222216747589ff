"""CAME: confidence-guided, memory-efficient optimizer: momentum, factored second moment, confidence.

Paper: Luo et al., CAME: Confidence-guided Adaptive Memory Efficient Optimization, ACL 2023, arXiv 2307.02047.
Reference code: came-pytorch 0.1.3. Stages in `_update.py`, their order in `_eager.py`, factoring in `_factor.py`.

For a matrix with gradient g (R x C), learning rate lr, betas (b1, b2, b3), eps (e1, e2), clip threshold d, decay w:

    (1)  r <- b2 r + (1 - b2) mean over columns of (g^2 + e1)            (R)
    (2)  c <- b2 c + (1 - b2) mean over rows    of (g^2 + e1)            (C)
    (3)  u  = g / sqrt(r c / mean(r))                                    (R x C), outer product of r and c
    (4)  u  = u / max(1, RMS(u) / d)                                     RMS over the whole tensor, batch dims included
    (5)  m <- b1 m + (1 - b1) u
    (6)  U  = (u - m)^2 + e2                                             instability, with the new m
    (7)  s <- b3 s + (1 - b3) mean over columns of U                     (R)
    (8)  k <- b3 k + (1 - b3) mean over rows    of U                     (C)
    (9)  D  = m / sqrt(s k / mean(s))
    (10) p <- p (1 - lr w) - lr D

A vector, a scalar and, with `factor="auto"`, a thin matrix keep a full second moment v <- b2 v + (1 - b2)(g^2 + e1),
u = g / sqrt(v), (4), (5), and D = m: no confidence.

With `debias=True` every average is divided by 1 - b^t where it is used: r and c by 1 - b2^t in (3), s and k by 1 - b3^t
and m by 1 - b1^t in (9). The residual (6) keeps the uncorrected m: with the corrected one u - m is 0 at t = 1, U falls
to its floor e2 and (9) explodes.

What differs from the paper and the reference code:

| where | paper or reference | here | why |
|---|---|---|---|
| factors | paper: row and column sums; reference: means | means | equal but for the place of e1 |
| bias correction | none, which makes the first step 11 lr | `debias` | AdamW's lr carries over |
| convolutions | reference: factors the kernel window, more state than Adam's | O x (I kernel) | `factor="auto"` |
| thin matrices | reference: factored | side under 16: full second moment | `factor="auto"` |
| state dtype | reference: lost on load, PyTorch casts it to the parameter's | kept | b3 = 0.9999 stands still in bf16 |
| low-precision weights | reference: decay and update rounded in turn | rounded once | small decay is not lost |
| (3), (9) | rsqrt(r / mean(r)) | sqrt(mean(r)) rsqrt(r) | the quotient underflows for untouched rows |

With `factor="last2"` and no other option the trajectory is the reference's. Its step size holds a hidden schedule: s
and k start at 0 and are never corrected, so that (9) is too large by 1 / sqrt(1 - b3^t). Where all gradients have one
magnitude the first step is lr (1 - b1) / (b1 sqrt(1 - b3)): 11.1 lr with the default betas, against 0.1 lr of a vector.

Cost: state 4 bytes a parameter (momentum in fp32, or 8 in fp64) plus four vectors a matrix, see `came_state_bytes`;
three reads of the gradient, two reads and a write of the momentum, one of the parameter; scratch of a tile or two, see
`_eager.py`. Limits: the update (9) is not bounded; e1 = 0 divides by 0 where a row or column never had a gradient;
sparse and complex gradients are refused.

Sharded: DTensor parameters placed as Shard or Replicate, along any dims of any mesh, are stepped as on one device, with
at most three all-reduces a step and process group, of the row and column statistics and one number a parameter; see
`_sharded.py`. Momentum in codes needs whole rows: not Shard(1) of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from scantling.errors import UserError
from scantling.groups import check_matrix_dims
from scantling.optim._checkpoint import load_keeping_dtypes
from scantling.optim._codec import Momentum
from scantling.optim._eager import Hyper, Job, step
from scantling.optim._factor import Factor
from scantling.optim._rounding import Rounding
from scantling.optim._sharded import step_sharded
from scantling.optim._shardplan import local, local_bytes, local_grad, place, plan_of, zeros
from scantling.optim._state import averaged_dims, state_tensors, view_of
from scantling.optim._validation import check_grads, check_hyper, check_param, name_of


class CAME(torch.optim.Optimizer):
    """CAME (Luo et al., arXiv 2307.02047) as a plain `torch.optim.Optimizer`; the equations are at the top of its file.

    Recommended: `debias=True` with betas (0.9, 0.95, 0.995), at the learning rate of AdamW. The defaults are the
    paper's; without bias correction their first steps are up to 11 times `lr`, so divide AdamW's by 3 to 10.

    Args:
        params: parameters, named parameters or groups; from `scantling.param_groups(model)` also which dims are rows.
        lr: learning rate, a float or a 0-D tensor.
        betas: of the momentum, the factored second moment and the factored instability, each in [0, 1).
        eps: added to the squared gradient and to the instability.
        clip_threshold: largest RMS of the update before the momentum.
        weight_decay: decoupled, scaled by the current lr.
        debias: correct all averages for their start at zero.
        factor: "auto" (group key `matrix_dims`, convolutions as O x (I * kernel), sides under 16 unfactored) or "last2"
            (the last two dims of everything, as the reference).
        maximize: ascend.

    Every argument is a group key and can be set per group.

    Raises:
        UserError: a value out of range, and parameters or gradients that are sparse, complex or not float, and
            DTensor parameters that are neither replicated nor in plain shards.

    Example:
        >>> optimizer = sc.CAME(sc.param_groups(model, weight_decay=0.1), lr=1e-3, betas=(0.9, 0.95, 0.995),
        debias=True)
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor = 2e-4,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
        *,
        debias: bool = False,
        momentum: Momentum = "fp32",
        rounding: Rounding = "nearest",
        factor: Factor = "auto",
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "weight_decay": weight_decay,
            "debias": debias,
            "momentum": momentum,
            "rounding": rounding,
            "factor": factor,
            "maximize": maximize,
            "matrix_dims": None,
            "role": None,
        }
        check_hyper(defaults)
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, default in self.defaults.items():
                group.setdefault(key, default)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its keys override the defaults. A parameter given twice is stepped once.

        Raises:
            UserError: a value out of range, or a parameter CAME cannot train; the group is not added.
        """
        group = {**self.defaults, **param_group}
        check_hyper(group)
        if not isinstance(group["params"], Tensor | set):
            group["params"] = _unique(group["params"])
        super().add_param_group(group)
        try:
            for index, param in enumerate(group["params"]):
                if group["matrix_dims"] is not None:
                    group["matrix_dims"] = check_matrix_dims(group["matrix_dims"], param.ndim)
                check_param(name_of(group, index), param, group)
        except UserError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the gradients that are there; a parameter without one keeps its state.

        Collectives: none without sharded parameters. With them at most three all-reduces for each process group over
        which they are sharded, see `_sharded.py`: every rank must call this, with its sharded parameters in the same
        order and the same of them requiring gradients. A gradient not placed as its parameter is redistributed first,
        and must be there on all ranks.

        Args:
            closure: computes the loss again; called with gradients enabled.

        Returns:
            What the closure returned, or None.

        Raises:
            UserError: a sparse or complex gradient or one on another mesh, before any parameter has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_grads(self.param_groups)
        sharded = []
        ordinal = 0
        for group in self.param_groups:
            hyper = Hyper.of(group)
            for param in group["params"]:
                if param.numel() and plan_of(param).cuts:
                    if param.requires_grad:
                        sharded.append(self.job(group, param, ordinal, hyper))
                elif param.numel() and param.grad is not None:
                    step(self.job(group, param, ordinal, hyper))
                ordinal += 1
        step_sharded(sharded)
        return loss

    def state_bytes(self) -> int:
        """Bytes of the state on this rank once all parameters have been stepped; `state_bytes` counts what is there."""
        return sum(
            local_bytes(param, size, dtype, averaged_dims(key, view_of(group, param.shape)))
            for group in self.param_groups
            for param in group["params"]
            if param.numel()
            for key, (size, dtype) in _needed(group, param).items()
        )

    def job(self, group: dict[str, Any], param: Tensor, ordinal: int, hyper: Hyper | None = None) -> Job:
        """The next step of one parameter, not yet taken; without a gradient, that of a sharded one with zeros."""
        view, part, grad = view_of(group, param.shape), local(param), local_grad(param)
        return Job(
            part,
            part.new_zeros(()).expand(part.shape) if grad is None else grad,
            {key: local(value) for key, value in self._state_of(group, param).items()},
            hyper or Hyper.of(group),
            view,
            ordinal,
            plan_of(param),
            has_grad=grad is not None,
        )

    def _state_of(self, group: dict[str, Any], param: Tensor) -> dict[str, Tensor]:
        """The state of a parameter, made at its first step."""
        state: dict[str, Tensor] = self.state[param]
        if not state:
            view = view_of(group, param.shape)
            for key, (size, dtype) in _needed(group, param).items():
                state[key] = zeros(param, size, dtype, averaged_dims(key, view))
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned: every tensor keeps the dtype it was saved with, and is copied.

        Raises:
            UserError: it was saved with another momentum, rounding or factor, or a state tensor is missing, unknown or
                of another shape or dtype than this parameter's; nothing has been loaded.
        """
        for index, (saved, group) in enumerate(zip(state_dict["param_groups"], self.param_groups, strict=False)):
            for key in ("momentum", "rounding", "factor"):
                if saved.get(key, self.defaults[key]) != group[key]:
                    raise UserError(
                        f"group {index} was saved with {key}={saved.get(key)!r}, this optimizer has "
                        f"{key}={group[key]!r}; build it with the same"
                    )
        load_keeping_dtypes(self, super().load_state_dict, state_dict, _check_state, _place)


def _needed(group: dict[str, Any], param: Tensor) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    view = view_of(group, param.shape)
    return state_tensors(tuple(param.shape), param.dtype, view, group["momentum"], group["rounding"])


def _check_state(group: dict[str, Any], param: Tensor, state: dict[str, Any], name: str) -> None:
    needed = _needed(group, param)
    given = {key: (tuple(value.shape), value.dtype) for key, value in state.items() if isinstance(value, Tensor)}
    if given != needed or len(given) != len(state):
        raise UserError(
            f"the loaded state of {name} {tuple(param.shape)} does not fit: given {_described(state)}, needed "
            f"{_described(needed)}. Load it into an optimizer with the same parameters, momentum, rounding, factor and "
            "matrix_dims"
        )


def _place(group: dict[str, Any], param: Tensor, key: str, value: Tensor) -> Tensor:
    return place(value, param, averaged_dims(key, view_of(group, param.shape)))


def _described(tensors: dict[str, Any]) -> str:
    parts = []
    for key, value in tensors.items():
        size, dtype = (value.shape, value.dtype) if isinstance(value, Tensor) else value
        parts.append(f"{key} {tuple(size)} {str(dtype).removeprefix('torch.')}")
    return ", ".join(parts)


def _unique(params: Iterable[Any]) -> list[Any]:
    """Parameters, or (name, parameter) pairs, each parameter once."""
    unique: dict[int, Any] = {}
    for item in params:
        unique.setdefault(id(item[1] if isinstance(item, tuple) else item), item)
    return list(unique.values())
