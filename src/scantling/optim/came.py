"""CAME: confidence-guided, memory-efficient optimizer with momentum, factored second moment and confidence.

Paper: Luo et al., CAME: Confidence-guided Adaptive Memory Efficient Optimization, ACL 2023, arXiv 2307.02047.
Reference code: came-pytorch 0.1.3. The equations are the functions of `stages.py`; `_dispatch.py` selects the driver of
each parameter: `_eager.py`, `_cpu.py` with `kernels/came.c`, or `_triton.py` with `kernels/came_gpu.py`.

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

With b1 = 0 the momentum is u, the residual (6) is only e2, and (9) would divide by its root. So neither momentum nor
confidence is kept, and D = u in (10). Use it for gradients that already are a momentum, such as those of
`scantling.MomentumExchange`.

With `debias=True` every average is divided by 1 - b^t when it is used: r and c by 1 - b2^t in (3), s and k by 1 - b3^t
and m by 1 - b1^t in (9). The residual (6) uses the uncorrected m: with the corrected one u - m is 0 at t = 1, U falls
to its floor e2 and (9) explodes.

Differences from the paper and the reference code:

| where | paper or reference | here | why |
|---|---|---|---|
| factors | paper: row and column sums; reference: means | means | equal except for the scale of e1 |
| bias correction | none, which makes the first step 11 lr | `debias` | AdamW's lr carries over |
| convolutions | reference: factors the kernel window, more state than Adam's | O x (I kernel) | `factor="auto"` |
| thin matrices | reference: factored | a side under 16: full second moment | `factor="auto"` |
| state dtype | reference: cast to the parameter's on load | kept | EMAs with b3 = 0.9999 stand still in bf16 |
| low-precision weights | reference: decay and update rounded in turn | rounded once | small decay is not lost |
| (3), (9) | rsqrt(r / mean(r)) | sqrt(mean(r)) rsqrt(r) | the quotient underflows for untouched rows |

With `factor="last2"` and no other option the trajectory is the reference's. Its step size has a hidden schedule: s and
k start at 0 and are never corrected, so (9) is too large by 1 / sqrt(1 - b3^t). If all gradients have one magnitude the
first step is lr (1 - b1) / (b1 sqrt(1 - b3)): 11.1 lr with the default betas, against 0.1 lr for a vector.

Cost: state of 4, 2, 1.02 or 0.53 bytes per parameter (momentum in fp32, bf16, int8, int4; 8 in fp64) plus four vectors
per matrix, see `came_state_bytes`; three reads of the gradient (four with a rounded momentum), two reads and a write of
the momentum, one of the parameter; scratch of a few tiles, see `_eager.py`, or of a few rows, see `_cpu.py`.
Limits: the update (9) is not bounded: if gradients never change, the residual (6) falls as b1^2t and (9) grows as
b3^(-t/2) until e2 stops it, debiased or not; with as much noise as signal it stays at 1.1 lr. e1 = 0 divides by 0 if a
row or column never had a gradient. In (1), (2) and v the magnitude of g is clamped at 2^63, divided by the root of the
longer side of a matrix, so that no sum of squares overflows in fp32; Inf and NaN still make the parameter NaN. Sparse
and complex gradients are refused.

Sharded: DTensor parameters placed as Shard or Replicate, along any dims of any mesh, take the same step as on one
device, with at most three all-reduces per step and process group, of the row and column statistics and one number per
parameter; see `_dispatch.py`. Momentum in codes needs whole rows: not Shard(1) of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scantling.errors import UserError
from scantling.groups import check_matrix_dims
from scantling.numerics.device import is_capturing
from scantling.numerics.torch_private import disable_dynamo
from scantling.optim._dispatch import dispatch_steps
from scantling.optim._repeat import RepeatedStep
from scantling.optim.checks import (
    check_grads,
    check_hyperparams,
    check_initial_lr,
    check_param,
    check_saved_groups,
    check_slice,
    to_python_numbers,
)
from scantling.optim.codecs import Momentum, Rounding
from scantling.optim.sharding import (
    copy_state_tensor,
    distribute_like,
    is_sharded,
    local_bytes,
    local_grad,
    local_tensor,
    new_state_tensor,
    shard_plan,
)
from scantling.optim.slicing import param_shape, slice_tensors
from scantling.optim.state import (
    DTYPES,
    Factor,
    HyperParams,
    ParamLayout,
    ParamStep,
    averaged_dims,
    group_matrix_view,
    state_shapes,
)
from scantling.optimizer_state import load_keeping_dtypes, param_name


class CAME(torch.optim.Optimizer):
    """CAME (Luo et al., arXiv 2307.02047) as a plain `torch.optim.Optimizer`; the equations are at the top of its file.

    Recommended: `debias=True` with betas (0.9, 0.95, 0.995), at the learning rate of AdamW. The defaults are the
    paper's; without bias correction the first step is 11 times `lr`, and later ones are about 50 times `lr` if
    gradients keep their direction, so divide AdamW's learning rate by 3 to 10.

    Args:
        params: parameters, named parameters or groups; groups of `scantling.param_groups(model)` also say which dims
            are rows.
        lr: learning rate, a float or a 0-D tensor, copied for each group: write into `group["lr"]`. Required
            unless every group has its own.
        betas: decay rates of the momentum, the factored second moment and the factored instability, each in [0, 1).
            With betas[0] = 0 there is no momentum and no confidence, D = u, and no state for either: for gradients that
            already are a momentum.
        eps: added to the squared gradient and to the instability; the second must be above 0 with confidence.
        clip_threshold: largest RMS of the update before the momentum.
        weight_decay: decoupled, scaled by the current lr.
        debias: correct all averages for their start at zero.
        factor: "auto" (group key `matrix_dims`, convolutions as O x (I * kernel), sides under 16 unfactored) or "last2"
            (the last two dims of everything, as the reference).
        momentum: codec of the momentum of factored parameters: "fp32", "bf16", "int8" or "int4", see `codecs.py`.
        confidence: divide the momentum by the root of its instability, (6) to (9). Without, D = m, the state is
            smaller, and betas[2] and eps[1] have no effect.
        rounding: how bf16 parameters are written back: "nearest", "stochastic" or "compensated", see `codecs.py`.
        maximize: ascend instead of descend.
        foreach: False steps one parameter after the other in PyTorch operations, the slowest and plainest driver.
            Otherwise parameters on a CPU take the C step together, see `_cpu.py`, and those on a GPU the Triton step,
            see `_triton.py`, if these support them.
        capturable: keep `lr` in a tensor, so that a CUDA graph that captured `step` follows a schedule; torch's
            schedulers write into it. Nothing else in a step needs the host.

    Every argument is a group key and can be set per group.

    Raises:
        UserError: a value out of range, parameters or gradients that are sparse, complex or not float, or DTensor
            parameters with placements other than Replicate and Shard.

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
        check_hyperparams({**defaults, "lr": 0.0 if lr is None else lr})
        if betas[0] == 0 and momentum != "fp32":
            raise UserError(
                f"momentum={momentum!r} is the codec of a momentum, and with betas[0] = 0 there is none. Remove "
                "momentum, or give betas[0] above 0. With a low-precision momentum, single groups may have betas[0] = 0"
            )
        # By id of a parameter, its group and its index; built at the first use.
        self._param_index: dict[int, tuple[int, int]] | None = None
        self._layouts: dict[Tensor, ParamLayout] = {}  # see `_layout`
        self._repeated: RepeatedStep | None = None  # the last step, if kernels have taken it
        self.released: set[int] = set()  # ids of parameters that the backward pass steps
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A copy has other parameters, with other ids and addresses.
        self._param_index = None
        self._layouts = {}
        self._repeated = None
        self.released = set()
        for group in self.param_groups:
            # A pickle of an older version may lack options.
            for key, default in self.defaults.items():
                group.setdefault(key, default)
            _move_lr(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its keys override the defaults. A parameter listed twice in it is stepped once.

        Raises:
            UserError: a value out of range, or a parameter CAME cannot train; the group is not added.
        """
        group = {**self.defaults, **param_group}
        check_hyperparams(group)
        check_initial_lr(group)
        group |= to_python_numbers(group)
        self._param_index = None
        if isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"].clone()  # a scheduler writes into the tensor of each group
        # torch warns about a parameter that a group lists twice, as tied parameters can be.
        if not isinstance(group["params"], Tensor | set):
            group["params"] = _deduplicate(group["params"])
        super().add_param_group(group)
        try:
            for index, param in enumerate(group["params"]):
                if group["matrix_dims"] is not None:
                    group["matrix_dims"] = check_matrix_dims(group["matrix_dims"], param.ndim)
                if param.requires_grad or param.dtype not in DTYPES:  # others are checked in their first step
                    check_param(param_name(group, index), param, group)
        except UserError:
            # torch has appended the group before this check.
            self.param_groups.pop()
            raise
        _move_lr(group)

    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; a parameter without a gradient keeps its value and state.

        Collectives: none without sharded parameters. With them at most three all-reduces for each process group over
        which they are sharded, see `_dispatch.py`: every rank must call this, with its sharded parameters in the same
        order and the same of them requiring gradients. A gradient with other placements than its parameter is
        redistributed first, and must exist on all ranks. Parameters that `release_gradients` steps in the backward pass
        take part only if it left a gradient; without any, there is no collective for them.

        Args:
            closure: computes the loss again; called with gradients enabled.

        Returns:
            The result of the closure, or None.

        Raises:
            UserError: a sparse or complex gradient, one on another mesh, or a loaded state that does not fit; no
                parameter has changed.
            MemoryError: no memory for the scratch of the C step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._repeated is not None:
            if self._repeated.take(self.param_groups, self.state):
                return loss
            self._repeated = None
        # Check everything before the first parameter changes.
        check_grads(self.param_groups)
        steps: list[ParamStep] = []
        param_idx = 0
        for group in self.param_groups:
            hyper = HyperParams.from_group(group)
            for param in group["params"]:
                if self._is_stepped(param):
                    steps.append(self.param_step(group, param, param_idx, hyper))
                param_idx += 1
        if len(self._layouts) > param_idx:  # groups have lost parameters: let go of their state
            self._layouts = {param: self._layouts[param] for param in self.parameters() if param in self._layouts}
        stages = dispatch_steps(steps)
        if stages and not is_capturing(stages[0].device):
            self._repeated = RepeatedStep(self.param_groups, self.state, self._layouts, stages)
        return loss

    @disable_dynamo
    @torch.no_grad()
    def step_parameters(self, params: Sequence[Tensor]) -> None:
        """Take the step of some parameters with their gradients, as `release_gradients` does.

        Collectives: those of `step` for these parameters: every rank must call this with the same sharded parameters
        in the same order, and have gradients of the same.

        Raises:
            UserError: a sparse or complex gradient, or a parameter that is not in this optimizer.
        """
        check_grads([{"params": params}])
        with_grad = [(*self._find_param(param), param) for param in params if param.grad is not None and param.numel()]
        dispatch_steps([self.param_step(group, param, param_idx) for group, param_idx, param in with_grad])

    def _is_stepped(self, param: Tensor) -> bool:
        """True if a parameter takes a step. The answer is the same on all ranks for a sharded one, gradient or not."""
        if not param.numel():
            return False
        if not is_sharded(param):
            return param.grad is not None
        return param.requires_grad and (param.grad is not None or id(param) not in self.released)

    def parameters(self) -> Iterator[Tensor]:
        """Yield all parameters, group by group."""
        for group in self.param_groups:
            yield from group["params"]

    def slice_state(self, param: Tensor, dim: int, index: Tensor) -> None:
        """Slice the state of a parameter along one dim, together with the parameter.

        The next step is that of the whole parameter at the kept indices, except for the global clip and for the row and
        column means of new gradients, which no longer include the removed ones. Codes are encoded again if their blocks
        change, see `slicing.py` for the error. Call it once for each slice, before or after slicing the parameter
        itself (`param.data = param.data.index_select(dim, index)`).

        Args:
            param: parameter of this optimizer.
            dim: dim of the parameter; negative ones count from the end.
            index: indices to keep, 1-D int64, or a bool mask of the dim.

        Raises:
            UserError: a parameter of another optimizer, a sharded one, or an index that does not fit.
        """
        group, _ = self._find_param(param)
        if is_sharded(param):
            raise UserError("slice_state: the parameter is sharded; only replicated and plain parameters can be sliced")
        state = self.state.get(param)
        if not state:
            return  # the state will be made at the first step, in the shape of the sliced parameter
        # The cached layout holds addresses of the old state.
        self._layouts.pop(param, None)
        self._repeated = None
        shape = param_shape(state)
        dim, index = check_slice(shape, dim, index)
        if not len(index):
            del self.state[param]  # an empty parameter has no state
            return
        sliced_shape = (*shape[:dim], len(index), *shape[dim + 1 :])
        # The sliced parameter may be too thin to be factored: its view is then None.
        views = group_matrix_view(group, shape), group_matrix_view(group, sliced_shape)
        sliced = slice_tensors(
            {key: local_tensor(value) for key, value in state.items()},
            dim,
            index.to(param.device),
            views=views,
            momentum=group["momentum"],
            shapes=state_shapes(group, sliced_shape, param.dtype),
        )
        self.state[param] = {
            key: distribute_like(value, param, averaged_dims(key, views[1])) for key, value in sliced.items()
        }

    def state_bytes(self) -> int:
        """Return the bytes of the state on this rank after every trained parameter has been stepped.

        `scantling.optim.state_bytes` counts the state that exists now.
        """
        return sum(
            local_bytes(param, size, dtype, averaged_dims(key, group_matrix_view(group, param.shape)))
            for group in self.param_groups
            for param in group["params"]
            if param.numel() and (param.requires_grad or param in self.state)
            for key, (size, dtype) in state_shapes(group, param.shape, param.dtype).items()
        )

    def _find_param(self, param: Tensor) -> tuple[dict[str, Any], int]:
        """Return the group of a parameter and its index among all parameters."""
        if self._param_index is None:
            group_indices = (index for index, group in enumerate(self.param_groups) for _ in group["params"])
            pairs = zip(self.parameters(), group_indices, strict=True)
            self._param_index = {id(other): (index, param_idx) for param_idx, (other, index) in enumerate(pairs)}
        if id(param) not in self._param_index:
            raise UserError(f"a parameter of shape {tuple(param.shape)} is not in this optimizer")
        index, param_idx = self._param_index[id(param)]
        return self.param_groups[index], param_idx

    def param_step(
        self, group: dict[str, Any], param: Tensor, param_idx: int, hyper: HyperParams | None = None
    ) -> ParamStep:
        """Return the next step of one parameter, not yet taken; without a gradient, that of zeros (sharded ones)."""
        hyper = hyper or HyperParams.from_group(group)
        # A sharded parameter without a gradient on this rank takes part with zeros.
        layout, grad = self._layout(group, param, hyper), local_grad(param)
        zeros = layout.param.new_zeros(()).expand(layout.param.shape) if grad is None else grad
        return ParamStep(layout, zeros, hyper, param_idx, has_grad=grad is not None)

    def _layout(self, group: dict[str, Any], param: Tensor, hyper: HyperParams) -> ParamLayout:
        """Return the cached layout of a parameter; make it again if the parameter, its state or its options changed."""
        # Local parts of DTensors are new tensors in every step, so only the shard plan of theirs is reused.
        mesh = getattr(param, "device_mesh", None)
        # The mesh in the key keeps it alive, so that its id is not reused.
        placements = None if mesh is None else (id(mesh), mesh, param.placements)  # type: ignore[attr-defined]
        key = (param.shape, param.stride(), param.dtype, hyper.layout_key, placements)
        cached = self._layouts.get(param)
        if cached is not None and cached.is_current(key, self.state[param]):
            return cached
        state = {name: local_tensor(value) for name, value in self._ensure_state(group, param).items()}
        plan = cached.plan if cached is not None and cached.key == key else shard_plan(param)
        view = group_matrix_view(group, param.shape)
        self._layouts[param] = layout = ParamLayout.build(key, local_tensor(param), state, view, plan)
        return layout

    def _ensure_state(self, group: dict[str, Any], param: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter; create it at the first step."""
        state: dict[str, Tensor] = self.state[param]
        shapes = state_shapes(group, param.shape, param.dtype)
        if not state:
            check_param(f"a parameter of shape {tuple(param.shape)}", param, group)  # a model may have been converted
            view = group_matrix_view(group, param.shape)
            for key, (size, dtype) in shapes.items():
                state[key] = new_state_tensor(param, size, dtype, averaged_dims(key, view))
        elif {key: (tuple(value.shape), value.dtype) for key, value in state.items()} != shapes:
            raise UserError(
                f"the state of a parameter of shape {tuple(param.shape)}, {_short(param.dtype)}, no longer fits it: "
                f"given {_describe(state)}, needed {_describe(shapes)}. Convert a model, and set momentum, rounding, "
                "factor and whether betas[0] is 0, before the first step; slice a parameter together with `slice_state`"
            )
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`: every tensor is copied and keeps its saved dtype.

        As with all optimizers of torch, the options of the groups become the saved ones: lr, betas, `debias`.

        Raises:
            UserError: the state of another optimizer, one saved with another momentum, rounding or factor, or a state
                tensor that is missing, unknown or of another shape or dtype; nothing has been loaded.
        """
        check_saved_groups(state_dict, self.param_groups, self.defaults)
        released = self.released  # `__setstate__` in the load resets it
        try:
            load_keeping_dtypes(self, super().load_state_dict, state_dict, _check_state, _copy_state)
        finally:
            self.released = released
            self._layouts = {}
            self._repeated = None


def _move_lr(group: dict[str, Any]) -> None:
    """Move a learning rate that a CUDA graph reads into a tensor on the device of the parameters."""
    if group["capturable"]:
        lr = group["lr"] if isinstance(group["lr"], Tensor) else torch.tensor(float(group["lr"]), dtype=torch.float32)
        group["lr"] = lr.to(group["params"][0].device) if group["params"] else lr


def _check_state(group: dict[str, Any], param: Tensor, state: dict[str, Any], name: str) -> None:
    shapes = state_shapes(group, param.shape, param.dtype)
    given = {key: (tuple(value.shape), value.dtype) for key, value in state.items() if isinstance(value, Tensor)}
    if given != shapes or len(given) != len(state):
        raise UserError(
            f"the loaded state of {name}, {tuple(param.shape)}, does not fit: given {_describe(state)}, needed "
            f"{_describe(shapes)}. "
            "Load it into an optimizer with the same parameters, momentum, rounding, factor and matrix_dims"
        )


def _copy_state(group: dict[str, Any], param: Tensor, key: str, value: Tensor) -> Tensor:
    return copy_state_tensor(value, param, averaged_dims(key, group_matrix_view(group, param.shape)))


def _describe(tensors: Mapping[str, Any]) -> str:
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


def _deduplicate(params: Iterable[Any]) -> list[Any]:
    """Return parameters, or (name, parameter) pairs, with each parameter once."""
    unique: dict[int, Any] = {}
    for item in params:
        unique.setdefault(id(item[1] if isinstance(item, tuple) else item), item)
    return list(unique.values())
