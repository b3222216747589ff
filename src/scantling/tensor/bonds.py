"""Inner bonds of many TT layers as one vector: which ranks are active, how large the layers are with these, and which
ranks to keep for a given size.

Scores decide which ranks to keep: the importance of a rank for the loss (`importance.py`) or, without gradients, its
contribution to the weight. The contribution is the rank's share of the squared norm, from the Gram matrices of the
chain on either side. It depends on the parameters alone, so all replicas make the same decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice, zip_longest
from typing import TypeAlias

import torch
from torch import Tensor

from scantling.errors import UserError
from scantling.groups import MatrixDims, Role
from scantling.numerics.torch_private import foreach_norm, own_parameters
from scantling.tensor.choose import nearest
from scantling.tensor.layer import CoreLayer, gate
from scantling.tensor.options import RankOptions
from scantling.tensor.sizes import SizePolynomial, Term, byte_terms, number_terms
from scantling.tensor.uses import Uses

BytesOf: TypeAlias = Callable[[tuple[int, ...], torch.dtype, Role, MatrixDims], float]
"""Bytes of training state of a core, from its shape, dtype, role and matrix dims."""

_MARGIN = 5.0
"""Size of a rank gate, in thresholds, after its rank is pruned or activated, so that it does not flip straight back."""
_MOST_ORDERS = 8
"""Contraction orders to try before giving up on bringing FLOPs to a size."""
_MOST_HALVINGS = 20
"""Bisections of the requested FLOPs if trying orders does not reach the size."""


class Bonds:
    """Inner bonds of TT layers that have rank gates (`controls`).

    Args:
        layers: layers with rank gates, by name.
        options: unit of the size, threshold and tolerance.
        uses: use of each layer in a step, for the unit `flops`.
        bytes_of: training bytes of a core, for the unit `bytes`.

    Attributes:
        controls: rank gates of all bonds, layer by layer; empty once they are folded into the cores.
        device: device of the rank gates.
    """

    def __init__(
        self, layers: Mapping[str, CoreLayer], options: RankOptions, *, uses: Uses, bytes_of: BytesOf | None
    ) -> None:
        self._layers, self._options = layers, options
        self._uses, self._bytes_of = uses, bytes_of
        self.device: torch.device
        self.refresh()

    def refresh(self) -> None:
        """Rebuild the vector of rank gates and the size polynomial after shapes or device have changed."""
        self.controls = list(self._controls_now())
        if self.controls:
            self.device = self.controls[0].device
        counts = torch.tensor([len(control) for control in self.controls])
        self._bond_of = torch.repeat_interleave(torch.arange(len(counts)), counts).to(self.device)
        bonds_of = torch.tensor([len(layer.cores) - 1 for layer in self._layers.values()])
        self._layer_of = torch.repeat_interleave(torch.arange(len(bonds_of)), bonds_of).to(self.device)
        terms: list[Term] = []
        first = 0
        for layer in self._layers.values():
            terms += self._terms(layer, first)
            first += len(layer.cores) - 1
        self._counted = SizePolynomial.of(terms, len(self.controls))  # on the CPU
        self._size = self._counted.to(self.device)  # fixed until shapes change, since captured graphs read it

    @property
    def has_moved(self) -> bool:
        """True if the device or the rank gates of the model have changed since the last `refresh`."""
        if not self.controls:
            return False
        return self.controls[0].device != self.device or any(
            own is not control for own, control in zip_longest(self.controls, self._controls_now())
        )

    def cores(self) -> list[Tensor]:
        """Return the cores of all layers."""
        return [core for layer in self._layers.values() for core in layer.cores]

    def ranks(self) -> dict[str, tuple[int, ...]]:
        """Return the active ranks of each layer, outer bonds (1) included; all inner ranks are 0 if one of them is."""
        counts = iter(self._per_bond((self._flat().detach() > self._options.threshold).long()).tolist())
        found = {}
        for name, layer in self._layers.items():
            inner = list(islice(counts, len(layer.cores) - 1))
            found[name] = (1, *(inner if all(inner) else [0] * len(inner)), 1)
        return found

    def size(self) -> float:
        """Return the size at the active ranks.

        Raises:
            UserError: if the rank gates are on the meta device.
        """
        if self.controls and self.device.type == "meta":
            raise UserError("which ranks are live is not known on the meta device; load the cores and controls first")
        live = self._live().cpu()
        return float(self._counted_at(live)(live))

    def size_of_all(self) -> float:
        """Return the size at all ranks, active or pruned."""
        return float(self._counted(torch.tensor([len(control) for control in self.controls], dtype=torch.float64)))

    def least_size(self) -> float:
        """Return the size with one rank on every bond."""
        ones = torch.ones(len(self.controls), dtype=torch.float64)
        return float(self._counted_at(ones)(ones))

    def live_size(self) -> Tensor:
        """Return the size at the active ranks, 0-D, computed on the device without synchronization, for captured
        graphs.
        """
        return self._size(self._live())

    def relaxed_size(self) -> Tensor:
        """Return the size with the l1 norms of the rank gates instead of ranks, 0-D, with a gradient."""
        return self._size(self._per_bond(self._flat().clamp(min=0.0)))

    def squared_norm(self) -> Tensor:
        """Return the squared norm of all cores, 0-D, with a gradient."""
        return torch.stack(list(foreach_norm(self.cores()))).square().sum()

    @torch.no_grad()
    def bring_to(self, wanted: float, scores: Tensor | None = None) -> None:
        """Prune the ranks with the lowest score per cost, or activate those with the highest, until the size is
        reached.

        Every bond keeps one rank; if none is active, the one with the largest gate is activated. If single ranks are
        coarser than the tolerance, ranks are exchanged for ranks of other bonds. Bonds whose ranks were all removed
        are skipped.

        Args:
            wanted: size to reach, in the unit of the target.
            scores: score of each rank of all bonds in order, at least 0; default: contribution to the weight.

        Raises:
            UserError: if a rank gate is not finite; nothing has changed then.
        """
        self.check_finite()
        threshold, tolerance = self._options.threshold, self._options.tolerance
        margin = _MARGIN * threshold
        for control in self.controls:
            if len(control) and not bool((control > threshold).any()):
                control[control.argmax()] = margin
        if not sum(map(len, self.controls)):
            return
        device = torch.device("cpu")
        flat, bond_of = self._flat().to(device), self._bond_of.to(device)
        before = live = tried = flat > threshold
        share = (torch.cat(list(self.contributions())) if scores is None else scores).to(device, torch.float64)

        def ranks() -> Tensor:
            return torch.zeros(len(self.controls), dtype=torch.float64).index_add(0, bond_of, tried.double())

        def size_now() -> float:
            return float(self._counted_at(ranks())(ranks()))

        def alive() -> Tensor:
            return ranks().clamp(min=1.0)

        def valued() -> tuple[SizePolynomial, Tensor]:
            """Return the size polynomial near the ranks under trial, and the value per cost of each rank there."""
            counted = self._counted_at(alive())
            return counted, share / counted.slopes(alive())[bond_of].clamp(min=1e-30)

        least_off = abs(size_now() - wanted)
        for _ in range(_MOST_ORDERS):
            counted, value = valued()
            tried = nearest(counted, tried, bond_of, value, wanted, tolerance)
            off = abs(size_now() - wanted)
            if off >= least_off:
                break
            live, least_off = tried, off
            if off <= tolerance * wanted or counted is self._counted:  # the same polynomial at all ranks
                break
        if least_off > tolerance * wanted and counted is not self._counted:
            # The best contraction order changes on the way: bisect on the requested size, in the current order.
            tried = before
            counted, value = valued()
            low, high = 0.0, max(2.0 * wanted, float(counted(alive())))
            for _ in range(_MOST_HALVINGS):
                asked = 0.5 * (low + high)
                tried = nearest(counted, before, bond_of, value, asked, tolerance)
                off = size_now() - wanted
                if abs(off) < least_off:
                    live, least_off = tried, abs(off)
                low, high = (asked, high) if off < 0.0 else (low, asked)
        lengths = [len(control) for control in self.controls]
        opened, shut = (torch.split(mask, lengths) for mask in (live & ~before, before & ~live))
        for control, wide, closed in zip(self.controls, opened, shut, strict=True):
            control.masked_fill_(wide.to(control.device), margin).masked_fill_(closed.to(control.device), -margin)

    def check_finite(self) -> None:
        """Raise a UserError if a rank gate is NaN or Inf."""
        for name, layer in self._layers.items():
            if not all(bool(torch.isfinite(control).all()) for control in layer.controls or ()):
                raise UserError(
                    f"a rank control of '{name}' is NaN or Inf, after a step with such a loss or gradient: "
                    "go on from a checkpoint before it"
                )

    @torch.no_grad()
    def contributions(self) -> Iterator[Tensor]:
        """Yield for each bond the share of each rank in the weight's squared norm; pruned ranks count as active."""
        threshold = self._options.threshold
        for layer in self._layers.values():
            if layer.controls is None:
                continue
            cores = [core.detach().float().flatten(1, -2) for core in layer.cores]
            gates = [gate(control, threshold).float() for control in layer.controls]
            left = right = cores[0].new_ones(1, 1)
            lefts: list[Tensor] = []
            rights: list[Tensor] = []
            # Gram matrices (r, r) of the chain before (lefts[t]) and after (rights[t]) bond t, without the gate of
            # bond t.
            for core, one in zip(cores, gates, strict=False):
                half = (left @ core.flatten(1)).view(core.shape[0] * core.shape[1], core.shape[2])
                lefts.append(core.flatten(0, 1).t() @ half)
                left = lefts[-1] * one * one[:, None]
            for core, one in zip(cores[:0:-1], [torch.ones(()), *gates[:0:-1]], strict=True):
                gated = core * one
                right = gated.flatten(1) @ (gated @ right).flatten(1).t()
                rights.insert(0, right)
            total = (left * rights[-1]).sum().clamp(min=1e-30)
            for before, behind, control in zip(lefts, rights, layer.controls, strict=True):
                opened = control.detach().float().clamp(min=threshold)
                yield before.diagonal() * behind.diagonal() * opened.square() / total

    def values(self) -> Tensor:
        """Return the rank gates of all bonds as one vector; pruned gates count as if activated, at the threshold."""
        return self._flat().detach().clamp(min=self._options.threshold)

    def _controls_now(self) -> Iterator[Tensor]:
        """Yield the layers' current rank gates in order, bypassing the slow `ParameterList`, since this runs every
        step.
        """
        for layer in self._layers.values():
            if layer.controls is not None:
                yield from (control for control in own_parameters(layer.controls).values() if control is not None)

    def _flat(self) -> Tensor:
        return torch.cat(list(self.controls))

    def _per_bond(self, values: Tensor) -> Tensor:
        """Return sums over the ranks of each bond: (bonds)."""
        return values.new_zeros(len(self.controls)).index_add(0, self._bond_of, values)

    def _live(self) -> Tensor:
        """Return the active ranks of the bonds, float64; all bonds of a layer have 0 if one has."""
        live = self._per_bond((self._flat().detach() > self._options.threshold).double())
        alive = live.new_ones(len(self._layers)).scatter_reduce(0, self._layer_of, live.clamp(max=1.0), "amin")
        return live * alive[self._layer_of]

    def _counted_at(self, ranks: Tensor) -> SizePolynomial:
        """Return the size polynomial near given ranks, (bonds); for FLOPs, in the contraction order that is best
        there.

        With fewer ranks another order may be best, and then `_counted` overestimates the size.
        """
        if self._options.unit != "flops":
            return self._counted
        terms: list[Term] = []
        inner = iter(ranks.long().tolist())
        first = 0
        for layer in self._layers.values():
            own = tuple(islice(inner, len(layer.cores) - 1))
            if all(own):
                terms += self._uses[layer].flop_terms(layer, (layer.ranks[0], *own, layer.ranks[-1]), first)
            first += len(own)
        return SizePolynomial.of(terms, len(self.controls))

    def _terms(self, layer: CoreLayer, first: int) -> list[Term]:
        """Return the size terms of a layer in the target's unit; `first` is the index of its first inner bond."""
        options, bytes_of = self._options, self._bytes_of
        if options.unit == "flops":
            return self._uses[layer].flop_terms(layer, layer.ranks, first)
        numbers = number_terms(layer.sizes, first)
        if options.unit == "parameters" or not all(layer.ranks):
            return numbers
        if bytes_of is None:
            return [(constant * options.bytes_per_parameter, bonds) for constant, bonds in numbers]

        def of_core(place: int, left: int, right: int) -> float:
            core = layer.cores[place]
            return bytes_of((left, *core.shape[1:-1], right), core.dtype, layer.core_role, layer.core_dims)

        return byte_terms(layer.ranks, of_core, first)
