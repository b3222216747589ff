"""What all layers of cores share: ranks, controls on the bonds, and their physical removal.

A control is one number for each rank of a bond, a gate on the core at its left (CoMERA, arXiv 2405.14377, section 4):

    W = G_1 D_1 G_2 D_2 ... D_{n-1} G_n,    D_t = diag(gate(d_t)),    gate(d) = d where d > threshold, else 0

so that W does not change when a rank whose gate is 0 is cut out of both of its cores. The gradient passes the gate as
if it were open: a rank that is shut may come back, until it is removed. There are no controls unless a `RankAdapter`
attaches them.

Blocks of neighbouring cores are merged before anything is contracted with them. What is merged does not depend on the
tokens: within `merge_once` it is done once for several passes of training, within `keep_merged` for all passes without
gradients. Nowhere else is anything kept, since not every change of a core can be seen: one that is written through
`.data` raises no counter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol, Self, TypeAlias

import torch
from torch import Tensor, nn

from scantling.errors import UserError
from scantling.groups import MatrixDims, Role
from scantling.numerics.compute import without_autocast
from scantling.tensor.contraction import (
    MOST_ORDERS,
    Head,
    Lookup,
    Network,
    Orders,
    Step,
    Tree,
    can_keep,
    merged,
    orders,
)
from scantling.tensor.cores import num_parameters, tt_svd

logger = logging.getLogger(__name__)

Cut: TypeAlias = tuple[nn.Parameter, int, Tensor]
"""A parameter, one of its dims, and the positions of it that stay."""


class Formats(Protocol):
    """What rounds the numbers a layer computes with."""

    def input(self, x: Tensor) -> Tensor:
        """In place of what comes in."""

    def core(self, core: Tensor) -> Tensor:
        """In place of a core."""

    def output(self, y: Tensor) -> Tensor:
        """In place of the product."""

    @property
    def matmul(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """In place of the products of the input with merged blocks of cores; None leaves them to torch."""


class CoreLayer(nn.Module):
    """A layer whose weight is a chain of cores.

    Attributes:
        cores: (r, modes..., r') parameters.
        controls: (r) parameters, one for each inner bond, in fp32 or wider; None where no adapter is attached.
        threshold: under which a control counts as 0.
        formats: rounds cores, input and output; None where nothing does.
    """

    core_role: Role
    core_dims: MatrixDims

    def __init__(self) -> None:
        super().__init__()
        self.cores = nn.ParameterList()
        self.controls: nn.ParameterList | None = None
        self.threshold = 0.0
        self.formats: Formats | None = None
        self._shared: dict[Tree, tuple[Tensor, Tensor]] | None = None  # while `merge_once` is in force
        self._kept: dict[Tree, Tensor] | None = None  # while `keep_merged` is in force
        self._passes = 1

    @property
    def chain(self) -> list[Tensor]:
        """The cores in order; `ParameterList` takes longer to go through."""
        return [core for core in self.cores._parameters.values() if core is not None]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all bonds, the outer ones (1) included."""
        cores = self.chain
        return (cores[0].shape[0], *[core.shape[-1] for core in cores])

    @property
    def weight(self) -> Tensor:
        """The dense weight, which is built only where an operation needs it."""
        raise NotImplementedError

    @property
    def network(self) -> Network:
        """Modes and ranks, as the search for an order of contraction takes them."""
        return self.network_at(self.ranks)

    def network_at(self, ranks: tuple[int, ...]) -> Network:
        """The same at other ranks, of all bonds, the outer ones included."""
        raise NotImplementedError

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each core beside its bonds."""
        return tuple(core.shape[1:-1].numel() for core in self.cores)

    def check_input(self, x: Tensor) -> None:
        """See that there are cores, and where the input is.

        Raises:
            UserError: the layer is a copy of `nn.DataParallel`, or x is on another device than the cores.
        """
        cores = self.chain
        if not cores:
            raise UserError(
                "this layer is a copy that nn.DataParallel made, which leaves out cores; start one process for each "
                "GPU, with torchrun, or show one GPU alone to the process (CUDA_VISIBLE_DEVICES)"
            )
        if cores[0].device != x.device:
            raise UserError(
                f"the cores of this layer are on {cores[0].device}, its input is on {x.device}; layers of cores cannot "
                "be offloaded, and a tied head computes where its embedding is: give them one device in the device_map"
            )

    @property
    def is_trainable(self) -> bool:
        """Whether the cores take steps, or did until a bond died and nothing was left of them."""
        return any(core.requires_grad or not core.numel() for core in self.chain)

    def gated(self) -> list[Tensor]:
        """The cores as they are computed with: the controls in them, and rounded.

        Ranks whose gates are 0 have no part in scales: rounding does not change when they are removed, but where groups
        of neighbours share a scale.
        """
        cores = self._with_controls(self.chain)
        if self.formats is None:
            return cores
        if self.controls is None:
            return [self.formats.core(core) for core in cores]
        first, *others = cores
        return [self.formats.core(first), *map(self._rounded_where_open, others, self.controls)]

    def _rounded_where_open(self, core: Tensor, control: Tensor) -> Tensor:
        """A core (r, modes..., r') behind a bond with controls (r); what is behind a shut gate stays as it is."""
        assert self.formats is not None
        is_open = (control.detach() > self.threshold).to(core.dtype)
        behind = core * is_open.view(-1, *[1] * (core.ndim - 1))
        return self.formats.core(behind) + (core - behind)

    def _with_controls(self, cores: list[Tensor]) -> list[Tensor]:
        if self.controls is None:
            return cores
        gates = [gate(control, self.threshold) for control in self.controls]
        return [*(core * one.to(core.dtype) for core, one in zip(cores, gates, strict=False)), cores[-1]]

    def blocks(self, steps: Sequence[Step]) -> list[Tensor]:
        """The blocks of an order of contraction, merged in the dtype of the cores even under autocast.

        Each is (r, modes as one, r'), or (r, row modes, column modes, r').
        """
        return self.merged_blocks([step.tree for step in steps])

    def merged_blocks(self, trees: Sequence[Tree]) -> list[Tensor]:
        """Blocks of neighbouring cores, see `blocks`."""
        with without_autocast(self.chain[0].device):
            if torch.compiler.is_compiling():
                return self._merged(trees)
            if torch.is_grad_enabled() and self._shared is not None:
                return self._merged_once(self._shared, trees)
            if not torch.is_grad_enabled() and self._kept is not None:
                return self._merged_and_kept(self._kept, trees)
            return self._merged(trees)

    def _merged(self, trees: Sequence[Tree]) -> list[Tensor]:
        cores = self.gated()
        return [merged(cores, tree) for tree in trees]

    def _merged_once(self, shared: dict[Tree, tuple[Tensor, Tensor]], trees: Sequence[Tree]) -> list[Tensor]:
        missing = [tree for tree in trees if tree not in shared]
        if missing and not self._has_room(shared, trees):
            return self._merged(trees)
        with saved_as_ever():
            made = self._merged(missing) if missing else []
        for tree, block in zip(missing, made, strict=True):
            shared[tree] = block, block.detach().requires_grad_(block.requires_grad)
        return [shared[tree][1] for tree in trees]

    def _merged_and_kept(self, kept: dict[Tree, Tensor], trees: Sequence[Tree]) -> list[Tensor]:
        missing = [tree for tree in trees if tree not in kept]
        if missing and not self._has_room(kept, trees):
            if not self._has_room({}, trees):
                return self._merged(trees)
            kept.clear()  # of orders for other numbers of tokens
            missing = list(trees)
        kept.update(zip(missing, self._merged(missing) if missing else [], strict=True))
        return [kept[tree] for tree in trees]

    def _has_room(self, held: Iterable[Tree], trees: Sequence[Tree]) -> bool:
        """Whether the blocks of an order may be held beside those that are."""
        network = self.network
        return can_keep(network, trees) and can_keep(network, {*held, *trees}, MOST_ORDERS)

    def _order(self, num_tokens: int, *, of_head: bool = False) -> tuple[Step, ...]:
        """The best order, by comparisons alone, which a compiled graph holds for a range of tokens."""
        merges: Literal["once", "kept", "shared"] = "once"
        if not torch.compiler.is_compiling():
            if torch.is_grad_enabled() and self._shared is not None:
                merges = "shared"
            elif not torch.is_grad_enabled() and self._kept is not None:
                merges = "kept"
        known: Orders = self._orders(merges, of_head)
        for limit, steps in known:
            if num_tokens <= limit:
                return steps
        return known[-1][1]

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _orders(self, merges: Literal["once", "kept", "shared"], of_head: bool) -> Orders:
        network = self.network
        if of_head and isinstance(network, Lookup):
            network = Head(network)
        return orders(network, {"once": 1.0, "kept": 0.0, "shared": 1.0 / self._passes}[merges])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shared": None, "_kept": None}

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._kept is not None:
            self._kept = {}
        for control in self.controls or ():
            control.data = control.data.to(torch.promote_types(control.dtype, torch.float32))
        return self

    def attach_controls(self, threshold: float) -> None:
        """Put a control of 1 on every rank of every inner bond that has none; the layer computes what it did."""
        self.threshold = threshold
        if self.controls is not None:
            return
        self.controls = nn.ParameterList(
            torch.ones(core.shape[-1], dtype=torch.promote_types(core.dtype, torch.float32), device=core.device)
            for core in self.cores[:-1]
        )

    def live(self) -> list[Tensor]:
        """For each inner bond which of its ranks count: bool (r)."""
        if self.controls is None:
            return [torch.ones(rank, dtype=torch.bool, device=self.cores[0].device) for rank in self.ranks[1:-1]]
        return [control.detach() > self.threshold for control in self.controls]

    def cuts(self, kept: Sequence[Tensor]) -> list[Cut]:
        """What must be cut so that only some ranks are left.

        Args:
            kept: for each inner bond the positions that stay, 1-D int64. Where one bond keeps none the weight is 0, and
                nothing is kept of any other either.
        """
        if any(len(index) == 0 for index in kept):
            kept = [index[:0] for index in kept]
        found: list[Cut] = []
        for bond, index in enumerate(kept):
            if len(index) == self.ranks[bond + 1]:
                continue
            found += [(self.cores[bond], self.cores[bond].ndim - 1, index), (self.cores[bond + 1], 0, index)]
            if self.controls is not None:
                found.append((self.controls[bond], 0, index))
        return found

    @torch.no_grad()
    def fold_controls(self) -> None:
        """Multiply the controls into the cores and drop them; the layer computes what it did."""
        if self.controls is not None:
            for core, value in zip(self.cores, self._with_controls(self.chain), strict=True):
                core.copy_(value)
            self.controls = None

    def num_parameters(self) -> int:
        """Numbers in the cores."""
        return num_parameters(self.sizes, self.ranks)

    def _become_closest(
        self,
        whole: Tensor,
        shapes: Sequence[tuple[int, ...]],
        *,
        held: bool,
        error: float,
        numel: int,
        allow_larger: bool,
    ) -> None:
        """Take the cores that TT-SVD finds for a tensor.

        Args:
            whole: its dims are the modes of all cores in order.
            shapes: the mode sizes of each core.
            held: whether the ranks of this layer are the most there may be; else as many as the error needs.
            error: relative Frobenius error that may be made.
            numel: numbers in the dense weight.
            allow_larger: whether cores that an error asks for may hold more numbers than that.

        Raises:
            UserError: neither ranks nor an error, or cores that are larger than the dense weight.
        """
        if not (held or error > 0.0) or not 0.0 <= error <= 1.0:
            raise UserError(f"from_dense needs a rank, an error above 0 and up to 1, or both; given error={error!r}")
        if whole.is_meta:
            raise UserError("from_dense: the weight is on the meta device and holds no values; load them first")
        if not bool(torch.isfinite(whole).all()):
            raise UserError("from_dense: the weight holds NaN or Inf")
        found = tt_svd(whole, shapes, self.ranks if held else None, error)
        size = sum(core.numel() for core in found)
        if size > numel:
            text = (
                f"from_dense: these cores hold {size:,} numbers, {size / numel:.2f} times as many as the dense weight"
            )
            if not (held or allow_larger):
                raise UserError(
                    f"{text}, for an error of {error:g}; allow a larger error, give a rank, keep the layer dense, or "
                    "pass allow_larger=True"
                )
            if not allow_larger:
                logger.warning("%s; lower the rank, or keep the layer dense", text)
        self.cores = nn.ParameterList(core.clone(memory_format=torch.contiguous_format) for core in found)

    def parameter_roles(self) -> dict[str, tuple[Role, MatrixDims | None]]:
        """A core is a matrix whose rows are its left bond and first mode, see `scantling.param_groups`."""
        roles: dict[str, tuple[Role, MatrixDims | None]] = {
            f"cores.{place}": (self.core_role, self.core_dims) for place in range(len(self.cores))
        }
        return roles | {f"controls.{bond}": ("vector", None) for bond in range(len(self.controls or ()))}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        where = prefix.rstrip(".") or type(self).__name__
        if f"{prefix}weight" in state_dict and f"{prefix}cores.0" not in state_dict:
            raise UserError(
                f"{where}: the checkpoint holds a dense weight, this layer cores; load it into a dense model and call "
                "scantling.tensorize after that, with init='svd' to keep what it computes"
            )
        if self.controls is None and f"{prefix}controls.0" in state_dict:
            raise UserError(
                f"{where}: the checkpoint was saved while ranks adapted, and holds rank controls, which this layer has "
                "not; attach a RankAdapter first, or call adapter.finish() before the model is saved"
            )
        for place, core in enumerate(self.cores):
            given = state_dict.get(f"{prefix}cores.{place}")
            if given is not None and given.shape != core.shape:
                raise UserError(
                    f"{where}: core {place + 1} of the checkpoint has the shape {tuple(given.shape)}, that of this "
                    f"layer {tuple(core.shape)} (ranks {self.ranks}); build it with the ranks of the checkpoint"
                )
        super()._load_from_state_dict(state_dict, prefix, *args)


@contextmanager
def merge_once(model: nn.Module, passes: int) -> Iterator[None]:
    """Merge the cores of a model once for several forward and backward passes, such as the micro-batches of a step.

    The gradients of the cores, and of their controls, are there when the context ends, in one pass back through what
    was merged, where `backward` was called: `torch.autograd.grad` does not reach them. Gradients of everything else
    come as ever. Nothing may change the cores meanwhile.

    Args:
        model: with any number of layers of cores.
        passes: how many there will be; orders of contraction that merge more pay off with more passes.

    Raises:
        UserError: no pass at all.
        RuntimeError: within another such context on the same model.
    """
    if passes < 1:
        raise UserError(f"merge_once: passes must be at least 1; given {passes}")
    layers = [module for module in model.modules() if isinstance(module, CoreLayer)]
    if any(layer._shared is not None for layer in layers):
        raise RuntimeError("merge_once is in force on this model already")
    for layer in layers:
        layer._shared, layer._passes = {}, passes
    try:
        yield
        pairs = [pair for layer in layers for pair in (layer._shared or {}).values() if pair[1].grad is not None]
        if pairs:
            torch.autograd.backward([block for block, _ in pairs], [used.grad for _, used in pairs])
    finally:
        for layer in layers:
            layer._shared, layer._passes = None, 1


@contextmanager
def keep_merged(model: nn.Module) -> Iterator[None]:
    """Merge the cores of a model once for all passes without gradients, such as those of an evaluation or a generation.

    Nothing may change the cores meanwhile; passes with gradients merge as ever. What is kept is a small multiple of the
    cores, see `contraction.MOST_KEPT`.

    Args:
        model: with any number of layers of cores.

    Example:
        >>> model = nn.Sequential(sc.TTLinear(64, 64, rank=8))
        >>> with keep_merged(model), torch.no_grad():
        ...     model(torch.randn(3, 64)).shape
        torch.Size([3, 64])
    """
    layers = [module for module in model.modules() if isinstance(module, CoreLayer) and module._kept is None]
    for layer in layers:
        layer._kept = {}
    try:
        yield
    finally:
        for layer in layers:
            layer._kept = None


def saved_as_ever() -> AbstractContextManager[object]:
    """The context in which tensors are saved for the backward pass itself, whatever hooks are in force.

    What is merged for several passes belongs to none of them. A checkpoint would find less to be saved when it repeats
    its pass, in which everything is merged already.
    """
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)


def gate(control: Tensor, threshold: float) -> Tensor:
    """The control where it is above the threshold, else 0; its gradient is that of the control itself."""
    return control + (control.where(control > threshold, 0.0) - control).detach()
