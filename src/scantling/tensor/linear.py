"""TTLinear: a linear layer whose weight is a tensor train.

    y = x W + bias,   W[(i_1..i_d), (o_1..o_e)] = G_1[:, i_1, :] ... G_d[:, i_d, :] H_1[:, o_1, :] ... H_e[:, o_e, :]

Input modes come before output modes (CoMERA, arXiv 2405.14377, section 3). The matrix rank of W is at most the rank of
the bond between the last input core and the first output core. For many tokens the layer is x A B with A: (in, r), B:
(r, out); for few tokens it is cheaper to contract x with the cores one by one. `contraction.py` picks the order. If
the product of the modes exceeds the dimension, x is padded with zeros and y is sliced.

With an activation f between input and output cores, y = f(x A) B + bias, which is not linear. With one input mode and
one output mode this is CoLA (arXiv 2502.10940, section 3).

Cost: `num_parameters(...)` parameters; the multiplications of `TTLinear.plan(tokens)`, and twice as many in the
backward pass. Saved for the backward pass are x, the merged cores, and the intermediate results: r elements per token
for x A B, and more if cores are contracted one by one, which only happens for few tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan, prod, sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from scantling.errors import UserError
from scantling.groups import MatrixDims, Role
from scantling.tensor.contraction import Chain, Plan, Step, best_plan, contract, core_indices, make_plan
from scantling.tensor.cores import clip_ranks, dense, random_cores
from scantling.tensor.costs import device_costs
from scantling.tensor.layer import TTLayer
from scantling.tensor.lazy_weight import LazyWeight
from scantling.tensor.low_rank_product import fused_product
from scantling.tensor.modes import boxes, check_modes, check_num_modes, check_size, split

if TYPE_CHECKING:
    from scantling.tensor.shared_input import SharedInputGroup

ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {"silu": (nn.functional.silu, 0.3558)}
"""Activations by name, with the mean of f(z)^2 for standard normal z."""


class TTLinear(TTLayer):
    """`nn.Linear` with its weight as tensor-train cores.

    Args:
        in_features, out_features: as in `nn.Linear`.
        rank: rank of every bond between cores, or one for each; clipped to the largest that the modes allow.
        num_modes: number of input modes and of output modes if these are not given.
        in_modes, out_modes: modes of input and output; their products may exceed the dimensions.
        bias: True to add a bias.
        activation: `silu`, between input and output cores; None, as in CoMERA, for a linear layer.
        device, dtype: device and dtype of the parameters.

    Attributes:
        cores: `nn.ParameterList` of (r, mode, r') tensors, input modes first.
        bias: (out_features,) or None.
        shared_input: layers that share the input of this layer, or None.

    Raises:
        UserError: if ranks or modes do not fit.

    Example:
        >>> layer = sc.TTLinear(768, 768, rank=30, in_modes=(12, 8, 8), out_modes=(8, 8, 12))
        >>> layer.ranks, sum(core.numel() for core in layer.cores)
        ((1, 12, 30, 30, 30, 12, 1), 20448)
    """

    core_role: Role = "matrix"
    core_dims: MatrixDims = ((0, 1), (2,))

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int | Sequence[int],
        *,
        num_modes: int = 3,
        in_modes: Sequence[int] | None = None,
        out_modes: Sequence[int] | None = None,
        bias: bool = True,
        activation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        in_features = self.in_features = check_size(in_features, "in_features")
        out_features = self.out_features = check_size(out_features, "out_features")
        self.shared_input: SharedInputGroup | None = None
        if activation is not None and activation not in ACTIVATIONS:
            raise UserError(f"given activation={activation!r}; it must be one of {', '.join(ACTIVATIONS)}, or None")
        self.activation = activation
        self.in_modes = _modes(in_features, num_modes, in_modes, "in_modes")
        self.out_modes = _modes(out_features, num_modes, out_modes, "out_modes")
        if out_modes is None:
            self.out_modes = self.out_modes[::-1]  # largest modes outermost, where bonds are limited most
        self.set_empty_cores(clip_ranks(rank, (*self.in_modes, *self.out_modes)), device, dtype)
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        if self.cores[0].device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self, norm: float | None = None, generator: torch.Generator | None = None) -> None:
        """Draw new random cores.

        Args:
            norm: exact Frobenius norm of W; default that of `nn.Linear`, whose entries have variance 1 / (3 in). With
                an activation: norm of the linear W whose outputs would be as large, for independent normal inputs.
            generator: random generator.
        """
        norm = sqrt(self.out_features / 3.0) if norm is None else norm
        # Boxes of the tensor that are not padding.
        valid = [
            [(part,) for part in (*rows, *cols)]
            for rows in boxes(self.in_features, self.in_modes)
            for cols in boxes(self.out_features, self.out_modes)
        ]
        if self.activation is not None:
            # The mean square of f(z) is below 1; a larger norm makes up for it.
            norm /= sqrt(ACTIVATIONS[self.activation][1])
        # The center is the bond between input and output cores, so that A and B have orthogonal rows or columns.
        drawn = random_cores(self.mode_shapes(), self.ranks, norm, valid, len(self.in_modes), generator=generator)
        if self.activation is not None:
            _scale_outputs_only(drawn, len(self.in_modes))
        self.set_core_values(drawn)
        if self.bias is not None:
            bound = 1.0 / sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound, generator)

    def mode_shapes(self) -> list[tuple[int, ...]]:
        return [(mode,) for mode in (*self.in_modes, *self.out_modes)]

    @property
    def network(self) -> Chain:
        return self.network_at(self.ranks)

    @property
    def padded_ranks(self) -> tuple[int, ...]:
        ranks: tuple[int, ...] = self._pad_ranks()
        return ranks

    @property
    def middle_rank(self) -> int:
        """Padded rank between input and output cores."""
        return self.padded_ranks[len(self.in_modes)]

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _pad_ranks(self) -> tuple[int, ...]:
        costs = device_costs(self.log_gain.device)
        return self.ranks if costs.rank_multiple == 1 else tuple(map(costs.pad_rank, self.ranks))

    def network_at(self, ranks: tuple[int, ...]) -> Chain:
        has_activation = self.activation is not None
        return Chain((*self.in_modes, *self.out_modes), ranks, len(self.in_modes), has_activation)

    @property
    def weight(self) -> Tensor:
        """Transpose of W, (out_features, in_features), as in `nn.Linear`.

        Reading its dtype, device or shape costs nothing. Any operation on it builds the matrix, and its gradient flows
        to the cores.
        """
        if torch.compiler.is_compiling():
            if self.activation is not None:  # no such matrix: NaN if more than the dtype is read
                return self.chain[0].new_full((self.out_features, self.in_features), nan)
            return self.dense_weight()  # the compiler drops it if only the dtype is read
        return LazyWeight(self.dense_weight, (self.out_features, self.in_features), self.cores[0])

    def dense_weight(self) -> Tensor:
        """Build the transpose of W from the cores: (out_features, in_features).

        Raises:
            UserError: if an activation stands between the cores, so that there is no such matrix.
        """
        if self.activation is not None:
            raise UserError(f"this layer has no dense weight: {self.activation} is between its cores")
        # (input modes..., output modes...) -> (padded inputs, padded outputs)
        padded = dense(self.gated_cores()).reshape(prod(self.in_modes), prod(self.out_modes))
        return padded[: self.in_features, : self.out_features].t()

    def plan(self, num_tokens: int) -> Plan:
        """Return the contraction order for a number of tokens; print it to see the costs.

        Hardware products (`compute` of `sc.quantize_training`) round their factors. They use one order for any number
        of tokens, so that the output of a token does not depend on the number of other tokens.

        Args:
            num_tokens: rows of the input.
        """
        network = self.network_at(self.padded_ranks)
        if self.formats is not None and self.formats.matmul is not None:
            return make_plan(network, num_tokens, self._many_token_steps)
        return best_plan(network, num_tokens, costs=device_costs(self.log_gain.device))

    def forward(self, input: Tensor) -> Tensor:
        """Return y = x W + bias: (..., in_features) to (..., out_features).

        Raises:
            UserError: if x has another number of features, or `check_input` raises it.
        """
        x = input  # `nn.Linear`'s keyword is `input`
        state, blocks, steps = self._begin(x)
        y = self._contract(state, blocks, steps)[:, : self.out_features].contiguous()
        return y if x.ndim == 2 else y.view(*x.shape[:-1], self.out_features)

    def _begin(self, x: Tensor) -> tuple[Tensor, Sequence[Tensor], Sequence[Step]]:
        """Return the state, (tokens, padded inputs), blocks and steps; perhaps after a first step with other layers."""
        if x.shape[-1] != self.in_features:
            raise UserError(f"the input has the shape {tuple(x.shape)}; its last dim must be {self.in_features}")
        self.check_input(x)
        tokens = x if x.ndim == 2 else x.reshape(-1, self.in_features)  # (tokens, in_features)
        tokens = tokens if self.formats is None else self.formats.input(tokens)
        padding = prod(self.in_modes) - self.in_features
        if padding:  # (tokens, product of the input modes)
            tokens = nn.functional.pad(tokens, (0, padding))
        multiply = None if self.formats is None else self.formats.matmul
        # Rounded products depend on the order: one order for any number of tokens keeps tokens independent.
        steps: Sequence[Step] = self._best_steps(tokens.shape[0]) if multiply is None else self._many_token_steps
        # The first product x A may be shared with other layers of the same input.
        rest = None
        if self.shared_input is not None and multiply is None and not torch.compiler.is_compiling():
            rest = self.shared_input.first_product(self, x, tokens, steps)
        return (tokens, self.blocks(steps), steps) if rest is None else rest

    def is_pair(self, num_tokens: int) -> bool:
        """True if y = (x A) B is the best order, without rounding."""
        steps = self._best_steps(num_tokens)
        return self.formats is None and len(steps) == 2 and core_indices(steps[0].tree)[-1] == len(self.in_modes) - 1

    def first_factor(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return f(x A), (tokens, rank), and B, (rank, out_features), if y = (x A) B is the best order."""
        state, blocks, steps = self._begin(x)
        if len(steps) == 2:
            state = contract(state, blocks[:1], steps[:1], steps[0].width)
        if self.activation is not None:
            state = ACTIVATIONS[self.activation][0](state)
        return state, blocks[-1].reshape(steps[-1].inner, -1)[:, : self.out_features]

    def factors(self, num_tokens: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return A, (in_features, rank), and the function that maps x A to y, if y = (x A) B is the best order."""
        steps = self._best_steps(num_tokens)
        blocks = self.blocks(steps)

        def finish(state: Tensor) -> Tensor:
            return self._contract(state, blocks[1:], steps[1:])[:, : self.out_features].contiguous()

        return blocks[0].reshape(steps[0].inner, -1)[: self.in_features], finish

    def _contract(self, state: Tensor, blocks: Sequence[Tensor], steps: Sequence[Step]) -> Tensor:
        """Contract the state with the blocks, including activation, rounding and bias: (tokens, padded outputs)."""
        out_size = prod(self.out_modes)
        multiply = torch.matmul if self.formats is None or self.formats.matmul is None else self.formats.matmul
        if self.activation is not None:
            # Blocks of input cores, then f, then blocks of output cores.
            count = sum(core_indices(step.tree)[0] < len(self.in_modes) for step in steps)
            state = contract(state, blocks[:count], steps[:count], self.middle_rank, multiply=multiply)
            state, blocks, steps = ACTIVATIONS[self.activation][0](state), blocks[count:], steps[count:]
        # Padded outputs are sliced off by the caller, so the bias is padded, too.
        bias: Tensor | None = self.bias
        if bias is not None and out_size > self.out_features:
            bias = nn.functional.pad(bias, (0, out_size - self.out_features))
        if self.formats is None:
            fused = fused_product(self, state, blocks, steps, bias)
            return contract(state, blocks, steps, out_size, bias) if fused is None else fused
        y = self.formats.output(contract(state, blocks, steps, out_size, multiply=multiply))
        return y if bias is None else y + bias.to(y.dtype)

    @property
    def _many_token_steps(self) -> tuple[Step, ...]:
        """Best order for many tokens with one merge of the cores."""
        steps: tuple[Step, ...] = self._best_orders("once", False)[-1][1]
        return steps

    @classmethod
    def from_dense(
        cls,
        linear: nn.Linear,
        rank: int | Sequence[int] | None = None,
        *,
        error: float = 0.0,
        allow_larger: bool = False,
        num_modes: int = 3,
        in_modes: Sequence[int] | None = None,
        out_modes: Sequence[int] | None = None,
    ) -> TTLinear:
        """Return the closest tensor train that TT-SVD finds.

        Args:
            linear: layer whose weight is decomposed and whose bias is copied.
            rank: maximum ranks, as in the constructor; None for as many as the error needs.
            error: allowed relative Frobenius error of the weight, from 0 to 1.
            allow_larger: True to allow cores with more parameters than the dense weight. Otherwise such a result
                raises if only `error` is given, and logs a warning if `rank` is given.
            num_modes, in_modes, out_modes: as in the constructor.

        Returns:
            The layer, in the dtype and on the device of `linear`.

        Raises:
            UserError: if the layer is of another kind, neither a rank nor an error is given, the error needs more
                parameters than the dense weight has, or the constructor raises it.
        """
        if not isinstance(linear, nn.Linear):
            raise UserError(
                f"TTLinear.from_dense takes an nn.Linear, given {type(linear).__name__}; use sc.tensorize for models "
                "and other kinds of layers"
            )
        weight = linear.weight.detach()
        # On the meta device: only modes and maximum ranks matter, since the cores are replaced below.
        made = cls(
            linear.in_features,
            linear.out_features,
            1 if rank is None else rank,
            num_modes=num_modes,
            in_modes=in_modes,
            out_modes=out_modes,
            bias=linear.bias is not None,
            device="meta",
            dtype=weight.dtype,
        )
        # W, (in, out), with zeros in the padding -> (input modes..., output modes...)
        padding = (0, prod(made.out_modes) - linear.out_features, 0, prod(made.in_modes) - linear.in_features)
        made._set_closest_cores(
            nn.functional.pad(weight.t(), padding).reshape(*made.in_modes, *made.out_modes),
            has_ranks=rank is not None,
            error=error,
            dense_numel=weight.numel(),
            allow_larger=allow_larger,
        )
        if linear.bias is not None:
            made.bias = nn.Parameter(linear.bias.detach().clone(), linear.bias.requires_grad)
        made.set_trainable(linear.weight.requires_grad)
        return made.train(linear.training)

    def to_dense(self) -> nn.Linear:
        """Return an equivalent `nn.Linear`.

        Raises:
            UserError: if an activation stands between the cores, so that no matrix is equivalent.
        """
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        linear.weight = nn.Parameter(self.dense_weight().detach().contiguous(), requires_grad=self.is_trainable)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().clone(), requires_grad=self.bias.requires_grad)
        return linear.train(self.training)

    def flops(self, tokens: int) -> int:
        """Return the floating-point operations of a forward pass over this many tokens, merging of cores included."""
        return 2 * self.plan(tokens).macs

    def num_parameters(self) -> int:
        """Return the number of parameters in cores, gain and bias."""
        return super().num_parameters() + (0 if self.bias is None else self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, in_modes={self.in_modes}, "
            f"out_modes={self.out_modes}, ranks={self.ranks}, bias={self.bias is not None}"
            + ("" if self.activation is None else f", activation={self.activation!r}")
            + ("" if self.formats is None else f", {self.formats}")
        )


def _modes(size: int, num_modes: int, modes: Sequence[int] | None, name: str) -> tuple[int, ...]:
    check_num_modes(num_modes)
    return split(size, num_modes) if modes is None else check_modes(modes, size, name)


def _scale_outputs_only(cores: list[Tensor], num_inputs: int) -> None:
    """Turn the input cores into isometries and move their scale to the output cores, so that x A is as large as x."""
    # All cores are isometries times the same factor, see `random_cores`.
    first = cores[0].flatten(0, -2)
    factor = float(first.norm()) / sqrt(min(first.shape))
    for i, core in enumerate(cores):
        # The norm of W stays the same: the output cores share the scale that the input cores lose.
        core.mul_(1.0 / factor if i < num_inputs else factor ** (num_inputs / (len(cores) - num_inputs)))
