"""Base class of TT layers: ranks, rank gates on the bonds, and the removal of pruned ranks.

A rank gate is one scalar per rank of a bond that scales the core on its left (CoMERA, arXiv 2405.14377, section 4).
Its trained values d_t are the parameters `rank_gates`:

    W = G_1 D_1 G_2 D_2 ... D_{n-1} G_n,    D_t = diag(gate(d_t)),    gate(d) = d if d > threshold, else 0

A rank whose gate is 0 is pruned: removing it from both of its cores does not change W. The gradient passes as if the
gate were active (straight-through), so a pruned rank may become active again until it is removed. Only a `RankAdapter`
attaches rank gates.

The weight is also scaled by exp(GAIN_RATE * log_gain), with one trainable `log_gain` per layer, 0 at first. Optimizers
with normalized steps change the norm of a dense weight by all of its entries at once. The cores of a chain cannot do
this at rates at which their product is stable, so a model whose first weights are too small would learn slowly.

Blocks of neighboring cores are merged before the contraction. Merging does not depend on tokens: inside `merge_once`
it is done once for several training passes, inside `keep_merged` once for all passes without gradients. Nothing is
cached elsewhere, since some changes of a core cannot be detected: writing through `.data` does not raise the version
counter.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, Protocol, Self, TypeAlias

import torch
from torch import Tensor, nn

from scantling.errors import UserError
from scantling.groups import MatrixDims, Role
from scantling.numerics.device import without_autocast
from scantling.numerics.torch_private import current_backward_id, own_parameters
from scantling.tensor.contraction import (
    MAX_KEPT_ORDERS,
    Head,
    Lookup,
    Network,
    Orders,
    Step,
    Tree,
    best_orders,
    block_ends,
    can_keep,
    core_indices,
    merge_block,
    merge_macs,
    pad_to,
)
from scantling.tensor.cores import num_parameters, tt_svd
from scantling.tensor.costs import device_costs

logger = logging.getLogger(__name__)

GAIN_RATE = 30.0
"""Change of the logarithm of a weight's scale per unit of `log_gain`.

An optimizer with normalized updates moves `log_gain` by its learning rate per step, and so the weight by up to 30 times
the rate: 3 % at a rate of 1e-3. Measured in benchmarks/intent_accuracy.py.
"""

ParameterSlice: TypeAlias = tuple[nn.Parameter, int, Tensor]
"""A parameter, one of its dims, and the positions to keep."""


class Formats(Protocol):
    """Rounding of the values that a TT layer computes with."""

    def input(self, x: Tensor) -> Tensor:
        """Quantize the input."""

    def core(self, core: Tensor) -> Tensor:
        """Quantize a core."""

    def output(self, y: Tensor) -> Tensor:
        """Return the output; its gradient is quantized in the backward pass."""

    @property
    def matmul(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Product of the input and merged blocks of cores; None uses torch."""


class Merging(Protocol):
    """Forward pass of a model in which layers may be merged together."""

    def blocks(self, layer: TTLayer, trees: Sequence[Tree]) -> list[Tensor] | None:
        """Return the merged blocks of a layer; None if it has to merge them alone."""


class _Running(threading.local):
    """Running forward passes of this thread, the innermost last."""

    def __init__(self) -> None:
        self.passes: list[Merging] = []


running = _Running()


class TTLayer(nn.Module):
    """Layer whose weight is a chain of TT cores.

    Attributes:
        cores: (r, modes..., r') parameters.
        log_gain: (1,) parameter; the weight is multiplied by exp(GAIN_RATE * log_gain), 1 at first.
        rank_gates: (r) parameters, one for each inner bond, in fp32 or wider; None without an adapter.
        threshold: gates at or below it count as 0.
        formats: rounding of cores, input and output; None without rounding.
    """

    core_role: Role
    core_dims: MatrixDims
    log_gain: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.cores = nn.ParameterList()
        self.rank_gates: nn.ParameterList | None = None
        self.threshold = 0.0
        self.formats: Formats | None = None
        self._merged_once: dict[Tree, tuple[Tensor, Tensor]] | None = None  # a dict inside `merge_once`
        self._merged_kept: dict[Tree, Tensor] | None = None  # a dict inside `keep_merged`
        self._passes = 1
        self._is_stacked = False
        self.paddings: dict[Any, Any] = {}  # of `merging`, kept from pass to pass

    @property
    def chain(self) -> list[Tensor]:
        """Cores in order, read without the slow `ParameterList`."""
        return [core for core in own_parameters(self.cores).values() if core is not None]

    @property
    def parts(self) -> list[Tensor]:
        """Cores, gain, and rank gates if there are any: all that the weight consists of."""
        return [*self.chain, self.log_gain, *(self.rank_gates or ())]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all bonds, including the outer ones (1)."""
        cores = self.chain
        return (cores[0].shape[0], *[core.shape[-1] for core in cores])

    @property
    def weight(self) -> Tensor:
        """Dense weight, built only if an operation needs it."""
        raise NotImplementedError

    @property
    def network(self) -> Network:
        """Modes and ranks, for the search of a contraction order."""
        return self.network_at(self.ranks)

    def network_at(self, ranks: tuple[int, ...]) -> Network:
        """Return the network with other ranks of all bonds, including the outer ones."""
        raise NotImplementedError

    @property
    def padded_ranks(self) -> tuple[int, ...]:
        """Ranks of all bonds in products with tokens, where the device's kernels need a multiple of some number."""
        return self.ranks

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each core without its bonds."""
        return tuple(core.shape[1:-1].numel() for core in self.cores)

    def mode_shapes(self) -> list[tuple[int, ...]]:
        """Return the mode sizes of each core."""
        raise NotImplementedError

    def set_empty_cores(
        self, ranks: Sequence[int], device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        """Replace the cores by uninitialized ones with these ranks of all bonds, including the outer ones."""
        self.replace_cores(
            torch.empty(left, *shape, right, device=device, dtype=dtype)
            for left, shape, right in zip(ranks[:-1], self.mode_shapes(), ranks[1:], strict=True)
        )

    def replace_cores(self, cores: Iterable[Tensor]) -> None:
        """Replace the cores by new parameters of any ranks, and the gain by 1 on their device."""
        self.cores = nn.ParameterList(cores)
        self.log_gain = nn.Parameter(self.cores[0].detach().new_zeros(1))

    def set_trainable(self, is_trainable: bool) -> None:
        """Train the weight, or freeze it."""
        self.cores.requires_grad_(is_trainable)
        self.log_gain.requires_grad_(is_trainable)

    @torch.no_grad()
    def set_core_values(self, values: Sequence[Tensor]) -> None:
        """Copy values into the cores, which stay the same parameters, and set the gain to 1."""
        for core, value in zip(self.cores, values, strict=True):
            core.copy_(value)
        self.log_gain.zero_()

    def check_input(self, x: Tensor) -> None:
        """Raise unless the layer has cores and the input is on their device.

        Raises:
            UserError: if the layer is a replica of `nn.DataParallel`, or x is on another device than the cores.
        """
        cores = self.chain
        if not cores:
            raise UserError(
                "this layer is a copy made by nn.DataParallel, which does not copy cores; start one process per GPU "
                "with torchrun, or make a single GPU visible (CUDA_VISIBLE_DEVICES)"
            )
        if cores[0].device != x.device:
            raise UserError(
                f"the cores of this layer are on {cores[0].device}, its input is on {x.device}. TT layers cannot be "
                "offloaded, and a tied head must be on the device of its embedding: set one device for both in the "
                "device_map"
            )

    @property
    def is_trainable(self) -> bool:
        """True if the cores are trained, or were until all ranks of a bond were removed."""
        return any(core.requires_grad or not core.numel() for core in self.chain)

    def gated_cores(self) -> list[Tensor]:
        """Return the cores as used in the computation: with gain and rank gates, and rounded.

        Pruned ranks do not affect scales, so removing them does not change the rounding, unless groups of neighbors
        share a scale.
        """
        cores = self._with_gain_and_gates()
        if self.formats is None:
            return cores
        if self.rank_gates is None:
            return [self.formats.core(core) for core in cores]
        first, *others = cores  # core 1 has no bond on its left
        return [self.formats.core(first), *map(self._round_active, others, self.rank_gates)]

    def _round_active(self, core: Tensor, gate: Tensor) -> Tensor:
        """Round a core (r, modes..., r') behind a bond with gates (r), except the slices of pruned ranks."""
        assert self.formats is not None
        is_active = (gate.detach() > self.threshold).to(core.dtype)
        active = core * is_active.view(-1, *[1] * (core.ndim - 1))
        # Pruned slices pass unrounded: they must not set scales, but still get a gradient.
        return self.formats.core(active) + (core - active)

    def _with_gain_and_gates(self) -> list[Tensor]:
        return scale_cores(self.chain, self.log_gain, list(self.rank_gates or ()), self.threshold)

    def blocks(self, steps: Sequence[Step]) -> list[Tensor]:
        """Return the merged blocks of a contraction order, in the dtype of the cores even under autocast.

        Each is (r, modes as one, r'), or (r, row modes, column modes, r'), with padded ranks.
        """
        return self.merged_blocks([step.tree for step in steps])

    def merged_blocks(self, trees: Sequence[Tree]) -> list[Tensor]:
        """Return merged blocks of neighboring cores, see `blocks`."""
        with without_autocast(self.chain[0].device):
            is_compiling = torch.compiler.is_compiling()  # compiled code must not hold tensors of earlier passes
            if torch.is_grad_enabled():
                if self._merged_once is not None and not is_compiling:
                    return self._merge_once(self._merged_once, trees)
                return self._merge_for_pass(trees)
            if self._merged_kept is not None and not is_compiling:
                return self._merge_kept(self._merged_kept, trees)
            return self._merge_blocks(trees)

    def _merge_blocks(self, trees: Sequence[Tree]) -> list[Tensor]:
        cores = self.gated_cores()
        blocks = [merge_block(cores, tree) for tree in trees]
        if device_costs(self.log_gain.device).rank_multiple == 1:
            return blocks
        ranks = self.padded_ranks
        return [
            pad_to(block, (ranks[first], *block.shape[1:-1], ranks[last + 1]))
            for block, (first, last) in zip(blocks, map(block_ends, trees), strict=True)
        ]

    def _merge_for_pass(self, trees: Sequence[Tree]) -> list[Tensor]:
        """Return blocks for a pass with gradients, merged together with those of other layers if possible."""
        blocks = running.passes[-1].blocks(self, trees) if running.passes else None
        if torch.compiler.is_compiling():
            return self._merge_blocks(trees) if blocks is None else blocks
        if running.passes:
            self._is_stacked = blocks is not None
        if blocks is not None:
            return blocks
        # A checkpoint that repeats a pass must save as many tensors as this pass, in which stacks saved none.
        is_repeated = self._is_stacked and current_backward_id() != -1
        with without_saving_hooks() if is_repeated else nullcontext():
            return self._merge_blocks(trees)

    def _merge_once(self, shared: dict[Tree, tuple[Tensor, Tensor]], trees: Sequence[Tree]) -> list[Tensor]:
        missing = [tree for tree in trees if tree not in shared]
        # Too large to keep: merge for this pass only.
        if missing and not self._can_hold(shared, trees):
            return self._merge_blocks(trees)
        with without_saving_hooks():
            blocks = self._merge_for_pass(missing) if missing else []
        for tree, block in zip(missing, blocks, strict=True):
            # Passes use a leaf, which collects the gradients of all passes; see `merge_once`.
            shared[tree] = block, block.detach().requires_grad_(block.requires_grad)
        return [shared[tree][1] for tree in trees]

    def _merge_kept(self, kept: dict[Tree, Tensor], trees: Sequence[Tree]) -> list[Tensor]:
        missing = [tree for tree in trees if tree not in kept]
        if missing and not self._can_hold(kept, trees):
            # Too large even without other orders: merge for this pass only.
            if not self._can_hold({}, trees):
                return self._merge_blocks(trees)
            kept.clear()  # drop the orders of other token counts
            missing = list(trees)
        kept.update(zip(missing, self._merge_blocks(missing) if missing else [], strict=True))
        return [kept[tree] for tree in trees]

    def _can_hold(self, held: Iterable[Tree], trees: Sequence[Tree]) -> bool:
        """True if the blocks of an order may be kept in addition to those already held."""
        network = self.network
        return can_keep(network, trees) and can_keep(network, {*held, *trees}, MAX_KEPT_ORDERS)

    def _best_steps(self, num_tokens: int, *, is_head: bool = False) -> tuple[Step, ...]:
        """Return the best order, found by comparisons only, so that a compiled graph is valid for a range of tokens."""
        merges: Literal["once", "kept", "shared"] = "once"
        if not torch.compiler.is_compiling():
            if torch.is_grad_enabled() and self._merged_once is not None:
                merges = "shared"
            elif not torch.is_grad_enabled() and self._merged_kept is not None:
                merges = "kept"
        orders: Orders = self._best_orders(merges, is_head)
        for limit, steps in orders:
            if num_tokens <= limit:
                return steps
        return orders[-1][1]

    @property
    def orders_to_merge(self) -> list[list[Tree]]:
        """Blocks of each order that is best for some number of tokens."""
        return [[step.tree for step in steps] for _, steps in self._best_orders("once", False)]

    # The search depends on shapes only, and the compiler cannot trace it.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _best_orders(self, merges: Literal["once", "kept", "shared"], is_head: bool) -> Orders:
        network = self.network_at(self.padded_ranks)
        if is_head and isinstance(network, Lookup):
            network = Head(network)
        costs = device_costs(self.log_gain.device)
        return best_orders(network, {"once": 1.0, "kept": 0.0, "shared": 1.0 / self._passes}[merges], costs)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def merging_cost(self, ranks: tuple[int, ...], num_layers: int) -> float:
        """Return the cost of merging the blocks for many tokens in stacks of this many layers, each with these ranks.

        It is on the scale of multiplications, see `scantling.tensor.costs`.
        """
        trees = [step.tree for step in self._best_orders("once", False)[-1][1]]
        num_products = sum(len(core_indices(tree)) - 1 for tree in trees)
        launches: float = device_costs(self.log_gain.device).launch * num_products
        return launches + num_layers * merge_macs(self.network_at(ranks), trees)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has other cores, and its blocks would never be dropped.
        return {**self.__dict__, "_merged_once": None, "_merged_kept": None, "paddings": {}}

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.paddings = {}  # on the old device
        # The kept blocks have the old device and dtype.
        if self._merged_kept is not None:
            self._merged_kept = {}
        # In half precision a gate near 1 would ignore small steps.
        for gate in self.rank_gates or ():
            gate.data = gate.data.to(torch.promote_types(gate.dtype, torch.float32))
        return self

    def attach_gates(self, threshold: float) -> None:
        """Attach a gate of 1 to every rank of every inner bond unless gates exist; the output does not change."""
        self.threshold = threshold
        if self.rank_gates is not None:
            return
        self.rank_gates = nn.ParameterList(
            torch.ones(core.shape[-1], dtype=torch.promote_types(core.dtype, torch.float32), device=core.device)
            for core in self.cores[:-1]
        )

    def active_ranks(self) -> list[Tensor]:
        """Return the mask of active ranks of each inner bond: bool (r)."""
        if self.rank_gates is None:
            return [torch.ones(rank, dtype=torch.bool, device=self.cores[0].device) for rank in self.ranks[1:-1]]
        return [gate.detach() > self.threshold for gate in self.rank_gates]

    def rank_slices(self, kept: Sequence[Tensor]) -> list[ParameterSlice]:
        """Return the slices that remove all other ranks.

        Args:
            kept: for each inner bond the positions to keep, 1-D int64. If one bond keeps none, the weight is 0, and
                the other bonds keep none either.
        """
        if any(len(index) == 0 for index in kept):
            kept = [index[:0] for index in kept]
        slices: list[ParameterSlice] = []
        for bond, index in enumerate(kept):
            if len(index) == self.ranks[bond + 1]:
                continue
            # The right dim of the core before the bond, and the left dim of the core after it.
            slices += [(self.cores[bond], self.cores[bond].ndim - 1, index), (self.cores[bond + 1], 0, index)]
            if self.rank_gates is not None:
                slices.append((self.rank_gates[bond], 0, index))
        return slices

    @torch.no_grad()
    def fold_gates(self) -> None:
        """Multiply gain and rank gates into the cores and drop the gates; the output does not change."""
        if self.rank_gates is not None:
            self.set_core_values(self._with_gain_and_gates())
            self.rank_gates = None

    def num_parameters(self) -> int:
        """Return the number of parameters in the cores and the gain."""
        return num_parameters(self.sizes, self.ranks) + 1

    def _set_closest_cores(
        self,
        tensor: Tensor,
        *,
        has_ranks: bool,
        error: float,
        dense_numel: int,
        allow_larger: bool,
    ) -> None:
        """Replace the cores by those that TT-SVD finds for a tensor.

        Args:
            tensor: tensor whose dims are the modes of all cores in order.
            has_ranks: True if the ranks of this layer are upper bounds; False for as many ranks as the error needs.
            error: allowed relative Frobenius error.
            dense_numel: number of parameters in the dense weight.
            allow_larger: True to allow cores with more parameters than the dense weight.

        Raises:
            UserError: if neither ranks nor an error are given, or the cores are larger than the dense weight.
        """
        if not (has_ranks or error > 0.0) or not 0.0 <= error <= 1.0:
            raise UserError(f"given error={error!r}; from_dense needs a rank, an error above 0 and up to 1, or both")
        if tensor.is_meta:
            raise UserError("from_dense: the weight is on the meta device and holds no values; load them first")
        if not bool(torch.isfinite(tensor).all()):
            raise UserError("from_dense: the weight holds NaN or Inf")
        cores = tt_svd(tensor, self.mode_shapes(), self.ranks if has_ranks else None, error)
        size = sum(core.numel() for core in cores)
        if size > dense_numel:
            text = (
                f"from_dense: the cores have {size:,} parameters, {size / dense_numel:.2f} times as many as the dense "
                "weight"
            )
            if not (has_ranks or allow_larger):
                raise UserError(
                    f"{text}, for an error of {error:g}; allow a larger error, give a rank, keep the layer dense, or "
                    "pass allow_larger=True"
                )
            if not allow_larger:
                logger.warning("%s; lower the rank, or keep the layer dense", text)
        # Always a copy: the core of a chain of one shares memory with the dense weight.
        self.replace_cores(core.clone(memory_format=torch.contiguous_format) for core in cores)

    def parameter_roles(self) -> dict[str, tuple[Role, MatrixDims | None]]:
        """Return the roles: a core is a matrix whose rows are its left bond and first mode, see
        `scantling.param_groups`.
        """
        roles: dict[str, tuple[Role, MatrixDims | None]] = {
            f"cores.{i}": (self.core_role, self.core_dims) for i in range(len(self.cores))
        }
        roles["log_gain"] = "vector", None
        return roles | {f"rank_gates.{bond}": ("vector", None) for bond in range(len(self.rank_gates or ()))}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        where = prefix.rstrip(".") or type(self).__name__
        if f"{prefix}weight" in state_dict and f"{prefix}cores.0" not in state_dict:
            raise UserError(
                f"{where}: the checkpoint holds a dense weight, but this is a TT layer; load the checkpoint into a "
                "dense model, then call scantling.tensorize with init='svd' to keep its weights"
            )
        if self.rank_gates is None and f"{prefix}rank_gates.0" in state_dict:
            raise UserError(
                f"{where}: the checkpoint was saved with a RankAdapter attached and holds rank gates, which this layer "
                "does not have; attach a RankAdapter before loading, or call adapter.finish() before saving"
            )
        for i, core in enumerate(self.cores):
            given = state_dict.get(f"{prefix}cores.{i}")
            if given is not None and given.shape != core.shape:
                raise UserError(
                    f"{where}: core {i + 1} of the checkpoint has the shape {tuple(given.shape)}, that of this layer "
                    f"{tuple(core.shape)} (ranks {self.ranks}); build the layer with the ranks of the checkpoint"
                )
        super()._load_from_state_dict(state_dict, prefix, *args)


@contextmanager
def merge_once(model: nn.Module, passes: int) -> Iterator[None]:
    """Merge the cores of a model once for several forward and backward passes, such as the micro-batches of a step.

    The gradients of cores and rank gates are complete when the context ends: one backward pass then runs through the
    merging. This works with `backward`, not with `torch.autograd.grad`. All other gradients are computed as usual. The
    cores must not change inside the context.

    Args:
        model: model with any number of TT layers.
        passes: number of passes; orders that merge more pay off with more passes.

    Raises:
        UserError: if `passes` is below 1.
        RuntimeError: if the model is already inside such a context.
    """
    if passes < 1:
        raise UserError(f"merge_once: given passes={passes}; it must be at least 1")
    layers = [module for module in model.modules() if isinstance(module, TTLayer)]
    if any(layer._merged_once is not None for layer in layers):
        raise RuntimeError("merge_once is already active on this model")
    for layer in layers:
        layer._merged_once, layer._passes = {}, passes
    try:
        yield
        # One backward pass through the merging, with the gradients that all passes left in the leaves.
        pairs = [pair for layer in layers for pair in (layer._merged_once or {}).values() if pair[1].grad is not None]
        if pairs:
            torch.autograd.backward([block for block, _ in pairs], [leaf.grad for _, leaf in pairs])
    finally:
        for layer in layers:
            layer._merged_once, layer._passes = None, 1


@contextmanager
def keep_merged(model: nn.Module) -> Iterator[None]:
    """Merge the cores of a model once for all passes without gradients, such as an evaluation or generation.

    The cores must not change inside the context; passes with gradients merge as usual. The memory of the kept blocks
    is a small multiple of the memory of the cores, see `contraction.MAX_KEPT`.

    Args:
        model: model with any number of TT layers.

    Example:
        >>> model = nn.Sequential(sc.TTLinear(64, 64, rank=8))
        >>> with keep_merged(model), torch.no_grad():
        ...     model(torch.randn(3, 64)).shape
        torch.Size([3, 64])
    """
    layers = [module for module in model.modules() if isinstance(module, TTLayer) and module._merged_kept is None]
    for layer in layers:
        layer._merged_kept = {}
    try:
        yield
    finally:
        for layer in layers:
            layer._merged_kept = None


def without_saving_hooks() -> AbstractContextManager[object]:
    """Return a context that saves tensors for the backward pass unchanged, whatever hooks are active.

    Blocks merged for several passes belong to none of them. A checkpoint would find fewer saved tensors when it
    repeats its pass, in which everything is already merged.
    """
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)


def scale_cores(
    cores: Sequence[Tensor], log_gain: Tensor, gates: Sequence[Tensor], threshold: float, num_stack_dims: int = 0
) -> list[Tensor]:
    """Scale the last core by the gain, and the right bond of each other core by its gates, if there are any: G_t D_t.

    Args:
        cores, log_gain, gates: those of one layer, or of several equal layers with this number of stack dims in front.
        threshold: gates at or below it count as 0.
        num_stack_dims: number of dims before those of one layer.
    """

    def scale(core: Tensor, factors: Tensor) -> Tensor:
        ones = [1] * (core.ndim - factors.ndim)
        return core * factors.to(core.dtype).view(*factors.shape[:num_stack_dims], *ones, -1)

    last = scale(cores[-1], torch.exp(GAIN_RATE * log_gain))
    if not gates:
        return [*cores[:-1], last]
    active = (threshold_gate(gate, threshold) for gate in gates)
    return [*(scale(core, factors) for core, factors in zip(cores, active, strict=False)), last]


def threshold_gate(gate: Tensor, threshold: float) -> Tensor:
    """Return the gate if it is above the threshold, else 0; the gradient passes unchanged (straight-through)."""
    return gate + (gate.where(gate > threshold, 0.0) - gate).detach()
