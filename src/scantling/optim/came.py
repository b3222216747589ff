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

With b1 = 0 the momentum is u, the residual (6) would be 0 but for e2, and (9) would divide by its root: neither
momentum nor confidence is kept, D = u in (10). That is for gradients which are a momentum already, such as those of
`scantling.MomentumExchange`.

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

Cost: state of 4, 2, 1.02 or 0.53 bytes a parameter (momentum in fp32, bf16, int8, int4; 8 in fp64) plus four vectors a
matrix, see `came_state_bytes`; three reads of the gradient (four with a rounded momentum), two reads and a write of
the momentum, one of the parameter; scratch of a few tiles, see `_eager.py`, or of a few rows, see `_native.py`.
Limits: the update (9) is not bounded: where gradients never change, the residual (6) falls as b1^2t and (9) grows as
b3^(-t/2) until e2 stops it, debiased or not; with as much noise as signal it stays at 1.1 lr. e1 = 0 divides by 0 where
a row or column never had a gradient. In (1), (2) and v the magnitude of g counts up to 2^63, divided by the root of
the longer side of a matrix, so that no sum of squares overflows in fp32; Inf and NaN still make the parameter NaN.
Sparse and complex gradients are refused.

Sharded: DTensor parameters placed as Shard or Replicate, along any dims of any mesh, are stepped as on one device, with
at most three all-reduces a step and process group, of the row and column statistics and one number a parameter; see
`_sharded.py`. Momentum in codes needs whole rows: not Shard(1) of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scantling.errors import UserError
from scantling.groups import check_matrix_dims
from scantling.numerics.torch_private import disable_dynamo
from scantling.optim._codec import Momentum
from scantling.optim._drive import step_all
from scantling.optim._eager import Hyper, Job
from scantling.optim._factor import Factor
from scantling.optim._rounding import Rounding
from scantling.optim._sharded import step_sharded
from scantling.optim._shardplan import laid_out, local, local_bytes, local_grad, place, plan_of, zeros
from scantling.optim._slice import cut_state, shape_of
from scantling.optim._state import DTYPES, Shapes, averaged_dims, needed_state, view_of
from scantling.optim._validation import (
    check_grads,
    check_hyper,
    check_param,
    check_saved_groups,
    check_start,
    plain_numbers,
)
from scantling.optimizer_state import load_keeping_dtypes, name_of


class CAME(torch.optim.Optimizer):
    """CAME (Luo et al., arXiv 2307.02047) as a plain `torch.optim.Optimizer`; the equations are at the top of its file.

    Recommended: `debias=True` with betas (0.9, 0.95, 0.995), at the learning rate of AdamW. The defaults are the
    paper's; without bias correction the first step is 11 times `lr`, and later ones are about 50 times where
    gradients point one way, so divide AdamW's by 3 to 10.

    Args:
        params: parameters, named parameters or groups; from `scantling.param_groups(model)` also which dims are rows.
        lr: learning rate, a float or a 0-D tensor, of which each group has a copy: write into `group["lr"]`. Needed,
            but where every group has its own.
        betas: of the momentum, the factored second moment and the factored instability, each in [0, 1). With the first
            0 there is no momentum and no confidence, D = u, and no state for either: for gradients that are a momentum.
        eps: added to the squared gradient and to the instability; the second above 0 where there is a confidence.
        clip_threshold: largest RMS of the update before the momentum.
        weight_decay: decoupled, scaled by the current lr.
        debias: correct all averages for their start at zero.
        factor: "auto" (group key `matrix_dims`, convolutions as O x (I * kernel), sides under 16 unfactored) or "last2"
            (the last two dims of everything, as the reference).
        momentum: how the momentum of factored parameters is kept: "fp32", "bf16", "int8" or "int4", see `_codec.py`.
        confidence: divide the momentum by the root of its instability, (6) to (9). Without, D = m, there is less state,
            and the third beta and the second eps have no effect.
        rounding: how bf16 parameters are written back: "nearest", "stochastic" or "compensated", see `_rounding.py`.
        maximize: ascend.
        foreach: False takes one parameter after the other in PyTorch operations, which is slower and the plainest.
            Otherwise all parameters on a CPU that the step in C knows go through it together, see `_native.py`, and
            on a GPU through Triton's kernels, see `_grouped.py`.
        capturable: keep `lr` in a tensor, so that a CUDA graph that captured `step` follows a schedule; schedulers of
            torch write into it. Nothing else in a step needs the host.

    Every argument is a group key and can be set per group.

    Raises:
        UserError: a value out of range, and parameters or gradients that are sparse, complex or not float, and
            DTensor parameters that are neither replicated nor in plain shards.

    Example:
        >>> groups = sc.param_groups(model, weight_decay=0.1)  # doctest: +SKIP
        >>> optimizer = sc.CAME(groups, lr=1e-3, betas=(0.9, 0.95, 0.995), debias=True)  # doctest: +SKIP
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor | None = None,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
        *,
        debias: bool = False,
        momentum: Momentum = "fp32",
        rounding: Rounding = "nearest",
        factor: Factor = "auto",
        confidence: bool = True,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
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
            "confidence": confidence,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "matrix_dims": None,
            "role": None,
        }
        check_hyper({**defaults, "lr": 0.0 if lr is None else lr})
        if betas[0] == 0 and momentum != "fp32":
            raise UserError(
                f"momentum={momentum!r} says how a momentum is kept; with betas[0] = 0 there is none. Leave momentum "
                "out, or give betas[0] above 0; a group may have 0 beside others that keep their momentum in few bits"
            )
        self._places: dict[int, tuple[int, int]] | None = None
        self.released: set[int] = set()  # ids of parameters that the backward pass steps
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._places = None  # of the parameters' ids, which a copy does not share
        self.released = set()
        for group in self.param_groups:
            for key, default in self.defaults.items():
                group.setdefault(key, default)
            _place_lr(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its keys override the defaults. A parameter given twice is stepped once.

        Raises:
            UserError: a value out of range, or a parameter CAME cannot train; the group is not added.
        """
        group = {**self.defaults, **param_group}
        check_hyper(group)
        check_start(group)
        group |= plain_numbers(group)
        self._places = None
        if isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"].clone()  # a scheduler writes into the tensor of each group
        if not isinstance(group["params"], Tensor | set):
            group["params"] = _unique(group["params"])
        super().add_param_group(group)
        try:
            for index, param in enumerate(group["params"]):
                if group["matrix_dims"] is not None:
                    group["matrix_dims"] = check_matrix_dims(group["matrix_dims"], param.ndim)
                if param.requires_grad or param.dtype not in DTYPES:  # the rest is checked in its first step
                    check_param(name_of(group, index), param, group)
        except UserError:
            self.param_groups.pop()
            raise
        _place_lr(group)

    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the gradients that are there; a parameter without one keeps its state.

        Collectives: none without sharded parameters. With them at most three all-reduces for each process group over
        which they are sharded, see `_sharded.py`: every rank must call this, with its sharded parameters in the same
        order and the same of them requiring gradients. A gradient not placed as its parameter is redistributed first,
        and must be there on all ranks. Parameters that `release_gradients` steps in the backward pass take part only
        with a gradient that it left; without any, there is no collective for them.

        Args:
            closure: computes the loss again; called with gradients enabled.

        Returns:
            What the closure returned, or None.

        Raises:
            UserError: a sparse or complex gradient, one on another mesh, or a loaded state that does not fit; no
                parameter has changed.
            MemoryError: no memory for what the step in C needs.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_grads(self.param_groups)
        jobs: list[Job] = []
        ordinal = 0
        for group in self.param_groups:
            hyper = Hyper.of(group)
            for param in group["params"]:
                if self._takes_part(param):
                    jobs.append(self.job(group, param, ordinal, hyper))
                ordinal += 1
        _take(jobs)
        return loss

    @disable_dynamo
    @torch.no_grad()
    def step_parameters(self, params: Sequence[Tensor]) -> None:
        """Take the step of some parameters with the gradients they have, as `release_gradients` does.

        Collectives: for sharded parameters those of `step`, for these alone: every rank must call this with the same of
        them, in the same order, and have gradients of the same.

        Raises:
            UserError: a sparse or complex gradient, or a parameter that is not in this optimizer.
        """
        check_grads([{"params": params}])
        placed = [(param, *self._place(param)) for param in params if param.grad is not None and param.numel()]
        _take([self.job(group, param, ordinal) for param, group, ordinal in placed])

    def _takes_part(self, param: Tensor) -> bool:
        """Whether a step is taken for a parameter: for a sharded one on all ranks alike, gradient or not."""
        if not param.numel():
            return False
        if not plan_of(param).cuts:
            return param.grad is not None
        return param.requires_grad and (param.grad is not None or id(param) not in self.released)

    def parameters(self) -> Iterator[Tensor]:
        """All parameters, group by group."""
        for group in self.param_groups:
            yield from group["params"]

    def slice_state(self, param: Tensor, dim: int, index: Tensor) -> None:
        """Keep only some positions of one dim of a parameter's state, because the parameter keeps only those.

        The next step is the one that the whole parameter would have taken there, up to what the global clip and the
        row and column means of new gradients lose with the rest; codes are made anew where their blocks change, see
        `_slice.py` for the error. Call it once for each cut, before or after the parameter itself is cut
        (`param.data = param.data.index_select(dim, index)`).

        Args:
            param: of this optimizer.
            dim: of the parameter; negative ones count from the end.
            index: positions that stay, 1-D int64, or a bool mask of the dim.

        Raises:
            UserError: not a parameter of this optimizer, a sharded one, or an index that does not fit.
        """
        group, _ = self._place(param)
        if plan_of(param).cuts:
            raise UserError("slice_state: the parameter is sharded; what shrinks must be replicated")
        state = self.state.get(param)
        if not state:
            return  # nor is known whether the parameter was cut already
        shape = shape_of(state)
        dim, index = _checked_index(shape, dim, index, param.device)
        if not len(index):
            del self.state[param]  # an empty parameter has none
            return
        after = (*shape[:dim], len(index), *shape[dim + 1 :])
        views = view_of(group, shape), view_of(group, after)
        needed = needed_state(group, after, param.dtype)
        whole = {key: local(value) for key, value in state.items()}
        cut = cut_state(whole, dim, index, views=views, momentum=group["momentum"], needed=needed)
        self.state[param] = {key: laid_out(value, param, averaged_dims(key, views[1])) for key, value in cut.items()}

    def state_bytes(self) -> int:
        """Bytes of the state on this rank once all parameters that are trained have been stepped.

        `scantling.optim.state_bytes` counts what is there.
        """
        return sum(
            local_bytes(param, size, dtype, averaged_dims(key, view_of(group, param.shape)))
            for group in self.param_groups
            for param in group["params"]
            if param.numel() and (param.requires_grad or param in self.state)
            for key, (size, dtype) in _needed(group, param).items()
        )

    def _place(self, param: Tensor) -> tuple[dict[str, Any], int]:
        """The group of a parameter, and its number among all."""
        if self._places is None:
            owners = (number for number, group in enumerate(self.param_groups) for _ in group["params"])
            pairs = zip(self.parameters(), owners, strict=True)
            self._places = {id(other): (number, ordinal) for ordinal, (other, number) in enumerate(pairs)}
        if id(param) not in self._places:
            raise UserError(f"a parameter of shape {tuple(param.shape)} is not in this optimizer")
        number, ordinal = self._places[id(param)]
        return self.param_groups[number], ordinal

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
        needed = _needed(group, param)
        if not state:
            check_param(f"a parameter of shape {tuple(param.shape)}", param, group)  # a model may have been converted
            view = view_of(group, param.shape)
            for key, (size, dtype) in needed.items():
                state[key] = zeros(param, size, dtype, averaged_dims(key, view))
        elif not _fits(state, needed):
            raise UserError(
                f"the state of a parameter of shape {tuple(param.shape)}, {_short(param.dtype)}, does not fit it any "
                f"more: it holds {_described(state)}, needed is {_described(needed)}. Convert a model, "
                "and set momentum, rounding, factor and whether betas[0] is 0, before the optimizer's first step; cut "
                "a parameter together with `slice_state`"
            )
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned: every tensor keeps the dtype it was saved with, and is copied.

        As with all optimizers of torch, the options of the groups are then those that were saved: lr, betas, `debias`.

        Raises:
            UserError: it is of another optimizer, was saved with another momentum, rounding or factor, or a state
                tensor is missing, unknown or of another shape or dtype than this parameter's; nothing has been loaded.
        """
        check_saved_groups(state_dict, self.param_groups, self.defaults)
        released = self.released
        try:
            load_keeping_dtypes(self, super().load_state_dict, state_dict, _check_state, _place)
        finally:
            self.released = released


def _place_lr(group: dict[str, Any]) -> None:
    """Put a learning rate that a CUDA graph is to read into a tensor beside the parameters."""
    if group["capturable"]:
        lr = group["lr"] if isinstance(group["lr"], Tensor) else torch.tensor(float(group["lr"]), dtype=torch.float32)
        group["lr"] = lr.to(group["params"][0].device) if group["params"] else lr


def _take(jobs: Sequence[Job]) -> None:
    step_all([job for job in jobs if not job.plan.cuts])
    step_sharded([job for job in jobs if job.plan.cuts])


def _fits(state: Mapping[str, Tensor], needed: Shapes) -> bool:
    return state.keys() == needed.keys() and all(
        value.shape == needed[key][0] and value.dtype == needed[key][1] for key, value in state.items()
    )


def _needed(group: dict[str, Any], param: Tensor) -> Shapes:
    return needed_state(group, param.shape, param.dtype)


def _checked_index(shape: tuple[int, ...], dim: int, index: Tensor, device: torch.device) -> tuple[int, Tensor]:
    if not isinstance(dim, int) or isinstance(dim, bool) or not -len(shape) <= dim < len(shape):
        raise UserError(f"slice_state: dim must be from {-len(shape)} to {len(shape) - 1}; given {dim!r}")
    size = shape[dim]
    if not isinstance(index, Tensor) or index.ndim != 1 or index.dtype not in (torch.int64, torch.bool):
        given = f"{index.dtype} of shape {tuple(index.shape)}" if isinstance(index, Tensor) else repr(index)
        raise UserError(f"slice_state: index must be a 1-D tensor of int64 positions or a bool mask; given {given}")
    if index.dtype == torch.bool:
        if len(index) != size:
            raise UserError(f"slice_state: the mask has {len(index)} entries, dim {dim} has {size}")
        index = index.nonzero().flatten()
    elif len(index) and not (int(index.min()) >= 0 and int(index.max()) < size):
        raise UserError(f"slice_state: positions must be from 0 to {size - 1}; given {index.tolist()}")
    elif len(index) != len(set(index.tolist())):
        raise UserError(f"slice_state: each position may stay once; given {index.tolist()}")
    return dim % len(shape), index.to(device)


def _check_state(group: dict[str, Any], param: Tensor, state: dict[str, Any], name: str) -> None:
    needed = _needed(group, param)
    given = {key: (tuple(value.shape), value.dtype) for key, value in state.items() if isinstance(value, Tensor)}
    if given != needed or len(given) != len(state):
        raise UserError(
            f"the loaded state of {name}, {tuple(param.shape)}, does not fit: given {_described(state)}, needed "
            f"{_described(needed)}. "
            "Load it into an optimizer with the same parameters, momentum, rounding, factor and matrix_dims"
        )


def _place(group: dict[str, Any], param: Tensor, key: str, value: Tensor) -> Tensor:
    return place(value, param, averaged_dims(key, view_of(group, param.shape)))


def _described(tensors: dict[str, Any]) -> str:
    parts = []
    for key, value in tensors.items():
        if isinstance(value, Tensor | tuple):
            size, dtype = (value.shape, value.dtype) if isinstance(value, Tensor) else value
            parts.append(f"{key} {tuple(size)} {_short(dtype)}")
        else:
            parts.append(f"{key} {value!r}")
    return ", ".join(parts)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unique(params: Iterable[Any]) -> list[Any]:
    """Parameters, or (name, parameter) pairs, each parameter once."""
    unique: dict[int, Any] = {}
    for item in params:
        unique.setdefault(id(item[1] if isinstance(item, tuple) else item), item)
    return list(unique.values())
