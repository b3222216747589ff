"""Rank gates of many TT layers as one vector: which ranks are active, how large the layers are with these, and which
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
from scantling.tensor.flops import LayerUses
from scantling.tensor.layer import TTLayer, threshold_gate
from scantling.tensor.options import RankOptions
from scantling.tensor.rank_selection import select_ranks
from scantling.tensor.sizes import SizePolynomial, Term, byte_terms, parameter_terms

CoreBytes: TypeAlias = Callable[[tuple[int, ...], torch.dtype, Role, MatrixDims], float]
"""Bytes of training state of a core, from its shape, dtype, role and matrix dims."""

_MARGIN = 5.0
"""Size of a rank gate, in thresholds, after its rank is pruned or activated, so that it does not flip straight back."""


class RankBudget:
    """Rank gates on the inner bonds of TT layers, and the size of the layers as a function of the active ranks.

    Args:
        layers: layers with rank gates, by name.
        options: unit of the size, threshold and tolerance.
        uses: use of each layer in a step, for the unit `flops`.
        core_bytes: training bytes of a core, for the unit `bytes`.

    Attributes:
        rank_gates: rank gates of all bonds, layer by layer; empty once they are folded into the cores.
        device: device of the rank gates.
    """

    def __init__(
        self, layers: Mapping[str, TTLayer], options: RankOptions, *, uses: LayerUses, core_bytes: CoreBytes | None
    ) -> None:
        self._layers, self._options = layers, options
        self._uses, self._core_bytes = uses, core_bytes
        self.device: torch.device
        self.refresh()

    def refresh(self) -> None:
        """Rebuild the vector of rank gates and the size polynomial after shapes or device have changed."""
        self.rank_gates = list(self._current_gates())
        if self.rank_gates:
            self.device = self.rank_gates[0].device
        counts = torch.tensor([len(gate) for gate in self.rank_gates])
        # The bond of each rank, and the layer of each bond.
        self._bond_of = torch.repeat_interleave(torch.arange(len(counts)), counts).to(self.device)
        num_bonds = torch.tensor([len(layer.cores) - 1 for layer in self._layers.values()])
        self._layer_of = torch.repeat_interleave(torch.arange(len(num_bonds)), num_bonds).to(self.device)
        terms: list[Term] = []
        first = 0
        for layer in self._layers.values():
            terms += self._terms(layer, first)
            first += len(layer.cores) - 1
        self._polynomial = SizePolynomial.from_terms(terms, len(self.rank_gates))  # on the CPU
        self._device_polynomial = self._polynomial.to(self.device)  # captured graphs read it until shapes change

    @property
    def has_moved(self) -> bool:
        """True if the device or the rank gates of the model have changed since the last `refresh`."""
        if not self.rank_gates:
            return False
        return self.rank_gates[0].device != self.device or any(
            own is not gate for own, gate in zip_longest(self.rank_gates, self._current_gates())
        )

    def cores(self) -> list[Tensor]:
        """Return the cores of all layers."""
        return [core for layer in self._layers.values() for core in layer.cores]

    def ranks(self) -> dict[str, tuple[int, ...]]:
        """Return the active ranks of each layer, outer bonds (1) included; all inner ranks are 0 if one of them is."""
        counts = iter(self._sum_per_bond((self._flat_gates().detach() > self._options.threshold).long()).tolist())
        ranks = {}
        for name, layer in self._layers.items():
            inner = list(islice(counts, len(layer.cores) - 1))
            ranks[name] = (1, *(inner if all(inner) else [0] * len(inner)), 1)
        return ranks

    def size(self) -> float:
        """Return the size at the active ranks.

        Raises:
            UserError: if the rank gates are on the meta device.
        """
        if self.rank_gates and self.device.type == "meta":
            raise UserError(
                "the rank gates are on the meta device and hold no values; load the weights of the model first"
            )
        active = self._active_ranks().cpu()
        return float(self._polynomial_at(active)(active))

    def full_size(self) -> float:
        """Return the size at all ranks, active or pruned."""
        return float(self._polynomial(torch.tensor([len(gate) for gate in self.rank_gates], dtype=torch.float64)))

    def min_size(self) -> float:
        """Return the size with one rank on every bond."""
        ones = torch.ones(len(self.rank_gates), dtype=torch.float64)
        return float(self._polynomial_at(ones)(ones))

    def active_size(self) -> Tensor:
        """Return the size at the active ranks, 0-D, computed on the device without synchronization, for captured
        graphs.
        """
        return self._device_polynomial(self._active_ranks())

    def relaxed_size(self) -> Tensor:
        """Return the size with the l1 norms of the rank gates instead of ranks, 0-D, with a gradient.

        Negative gates count as 0, without a gradient: their ranks are pruned.
        """
        return self._device_polynomial(self._sum_per_bond(self._flat_gates().clamp(min=0.0)))

    def core_norm_squared(self) -> Tensor:
        """Return the squared norm of all cores, 0-D, with a gradient."""
        return torch.stack(list(foreach_norm(self.cores()))).square().sum()

    @torch.no_grad()
    def fit_to(self, wanted: float, scores: Tensor | None = None) -> None:
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
        threshold = self._options.threshold
        margin = _MARGIN * threshold
        # The weight would be 0 if one of its bonds had no active rank.
        for gate in self.rank_gates:
            if len(gate) and not bool((gate > threshold).any()):
                gate[gate.argmax()] = margin
        if not sum(map(len, self.rank_gates)):
            return
        cpu = torch.device("cpu")
        if scores is None:
            scores = torch.cat(list(self.contributions()))
        before = self._flat_gates().to(cpu) > threshold
        # On the CPU: the search takes many small steps, each of which depends on values of the last.
        active = select_ranks(
            self._polynomial_at,
            before,
            self._bond_of.to(cpu),
            scores.to(cpu, torch.float64),
            wanted,
            self._options.tolerance,
            num_bonds=len(self.rank_gates),
            is_fixed=self._options.unit != "flops",
        )
        # Only ranks that change get a new gate; other gates keep their trained values.
        lengths = [len(gate) for gate in self.rank_gates]
        masks = (torch.split(mask, lengths) for mask in (active & ~before, before & ~active))
        for gate, activated, pruned in zip(self.rank_gates, *masks, strict=True):
            gate.masked_fill_(activated.to(gate.device), margin).masked_fill_(pruned.to(gate.device), -margin)

    def check_finite(self) -> None:
        """Raise a UserError if a rank gate is NaN or Inf."""
        for name, layer in self._layers.items():
            if not all(bool(torch.isfinite(gate).all()) for gate in layer.rank_gates or ()):
                raise UserError(
                    f"a rank gate of '{name}' is NaN or Inf, after a step with a non-finite loss or gradient; continue "
                    "from an earlier checkpoint"
                )

    @torch.no_grad()
    def contributions(self) -> Iterator[Tensor]:
        """Yield for each bond the share of each rank in the weight's squared norm; pruned ranks count as active."""
        threshold = self._options.threshold
        for layer in self._layers.values():
            if layer.rank_gates is None:
                continue
            cores = [core.detach().float().flatten(1, -2) for core in layer.cores]  # (r, modes, r')
            gates = [threshold_gate(gate, threshold).float() for gate in layer.rank_gates]
            left = right = cores[0].new_ones(1, 1)
            lefts: list[Tensor] = []
            rights: list[Tensor] = []
            # Gram matrices (r, r) of the chain before (lefts[t]) and after (rights[t]) bond t, without the gate of
            # bond t.
            for core, gate in zip(cores, gates, strict=False):
                # (r, r) (r, modes r') -> (r modes, r'), then with the core again -> (r', r')
                half = (left @ core.flatten(1)).view(core.shape[0] * core.shape[1], core.shape[2])
                lefts.append(core.flatten(0, 1).t() @ half)
                left = lefts[-1] * gate * gate[:, None]
            # From the right: each core comes with the gate on its right bond, the last core without one.
            for core, gate in zip(cores[:0:-1], [torch.ones(()), *gates[:0:-1]], strict=True):
                gated = core * gate
                right = gated.flatten(1) @ (gated @ right).flatten(1).t()
                rights.insert(0, right)
            total = (left * rights[-1]).sum().clamp(min=1e-30)  # |W|^2
            for before, after, gate in zip(lefts, rights, layer.rank_gates, strict=True):
                # Share of rank j: lefts[j, j] * d_j^2 * rights[j, j] / |W|^2
                values = gate.detach().float().clamp(min=threshold)
                yield before.diagonal() * after.diagonal() * values.square() / total

    def gate_values(self) -> Tensor:
        """Return the rank gates of all bonds as one vector; pruned gates count as if activated, at the threshold."""
        return self._flat_gates().detach().clamp(min=self._options.threshold)

    def _current_gates(self) -> Iterator[Tensor]:
        """Yield the layers' current rank gates in order, bypassing the slow `ParameterList`, since this runs every
        step.
        """
        for layer in self._layers.values():
            if layer.rank_gates is not None:
                yield from (gate for gate in own_parameters(layer.rank_gates).values() if gate is not None)

    def _flat_gates(self) -> Tensor:
        return torch.cat(list(self.rank_gates))

    def _sum_per_bond(self, values: Tensor) -> Tensor:
        """Return sums over the ranks of each bond: (bonds)."""
        return values.new_zeros(len(self.rank_gates)).index_add(0, self._bond_of, values)

    def _active_ranks(self) -> Tensor:
        """Return the active ranks of the bonds, float64; all bonds of a layer have 0 if one has."""
        active = self._sum_per_bond((self._flat_gates().detach() > self._options.threshold).double())
        # 0 if a bond of the layer has no active rank, since its whole weight is 0 then.
        alive = active.new_ones(len(self._layers)).scatter_reduce(0, self._layer_of, active.clamp(max=1.0), "amin")
        return active * alive[self._layer_of]

    def _polynomial_at(self, ranks: Tensor) -> SizePolynomial:
        """Return the size polynomial near given ranks, (bonds); for FLOPs, in the contraction order that is best
        there.

        With fewer ranks another order may be best, and then this polynomial overestimates the size.
        """
        if self._options.unit != "flops":
            return self._polynomial
        terms: list[Term] = []
        inner = iter(ranks.long().tolist())
        first = 0
        for layer in self._layers.values():
            own = tuple(islice(inner, len(layer.cores) - 1))
            # A layer with a bond of rank 0 costs nothing.
            if all(own):
                terms += self._uses[layer].flop_terms(layer, (layer.ranks[0], *own, layer.ranks[-1]), first)
            first += len(own)
        return SizePolynomial.from_terms(terms, len(self.rank_gates))

    def _terms(self, layer: TTLayer, first: int) -> list[Term]:
        """Return the size terms of a layer in the target's unit; `first` is the index of its first inner bond."""
        options, core_bytes = self._options, self._core_bytes
        if options.unit == "flops":
            return self._uses[layer].flop_terms(layer, layer.ranks, first)
        terms = parameter_terms(layer.sizes, first)
        # With ranks of 0 all terms are 0 in any unit, and `byte_terms` does not accept such ranks.
        if options.unit == "parameters" or not all(layer.ranks):
            return terms
        if core_bytes is None:
            return [(constant * options.bytes_per_parameter, bonds) for constant, bonds in terms]

        def bytes_at(i: int, left: int, right: int) -> float:
            core = layer.cores[i]
            return core_bytes((left, *core.shape[1:-1], right), core.dtype, layer.core_role, layer.core_dims)

        return byte_terms(layer.ranks, bytes_at, first)
