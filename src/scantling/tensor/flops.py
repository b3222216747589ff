"""Number of contractions with each TT layer per step, on which FLOPs depend in addition to the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from scantling.errors import UserError
from scantling.tensor.contraction import Head, Lookup, Network, best_plan, rank_factors
from scantling.tensor.embedding import TTMEmbedding, TTMHead
from scantling.tensor.experts import TTExperts
from scantling.tensor.layer import TTLayer
from scantling.tensor.sizes import Term

LayerUses: TypeAlias = Mapping[TTLayer, "LayerUse"]


@dataclass(frozen=True)
class LayerUse:
    """Use of one layer in a step.

    Attributes:
        num_tokens: tokens per step.
        num_rows: rows that this layer receives: for an expert the tokens that choose it, for a table the unique ids,
            at most its number of rows.
        num_heads: number of output layers tied to it.
    """

    num_tokens: int
    num_rows: int
    num_heads: int = 0

    def flop_terms(self, layer: TTLayer, ranks: tuple[int, ...], first_bond: int) -> list[Term]:
        """Return the terms of the FLOPs per token at these ranks; see `scantling.tensor.sizes.flop_terms`."""
        network = layer.network_at(ranks)
        share = self.num_rows / self.num_tokens  # terms are per row of the layer, sizes per token of the step
        terms = [(value * share, bonds) for value, bonds in flop_terms(network, self.num_rows, first_bond)]
        if self.num_heads and isinstance(network, Lookup):
            terms += self.num_heads * flop_terms(Head(network), self.num_tokens, first_bond)
        return terms


def count_uses(model: nn.Module, num_tokens: int) -> LayerUses:
    """Return the use of every TT layer in a model, for a step of `num_tokens` tokens.

    Experts are assumed to be chosen evenly.

    Raises:
        UserError: if the number of experts per token is unknown.
    """
    # Every layer receives all tokens, a table the unique ids at most.
    uses: dict[TTLayer, LayerUse] = {}
    modules = list(model.modules())
    for layer in modules:
        if isinstance(layer, TTMEmbedding):
            heads = sum(isinstance(head, TTMHead) and head.table is layer for head in modules)
            uses[layer] = LayerUse(num_tokens, min(num_tokens, layer.num_embeddings), heads)
        elif isinstance(layer, TTLayer):
            uses[layer] = LayerUse(num_tokens, num_tokens)
    for name, experts in model.named_modules():
        if isinstance(experts, TTExperts):
            per_token = experts.experts_per_token
            if per_token is None:
                raise UserError(
                    f"unit='flops' needs the number of experts per token, but the configuration of '{name}' has no "
                    "num_experts_per_tok; use unit='parameters' or 'bytes'"
                )
            # An expert receives its share of the tokens, if they are spread evenly.
            rows = max(1, round(num_tokens * min(1.0, per_token / experts.num_experts)))
            for layer in (*experts.up, *experts.down):
                uses[layer] = LayerUse(num_tokens, rows)
    return uses


def flop_terms(network: Network, num_tokens: int, first_bond: int) -> list[Term]:
    """Return the terms of the FLOPs per token, forward and backward, in the best order at these ranks.

    Args:
        network: modes and ranks.
        num_tokens: tokens per step; the cost of merging is divided by it.
        first_bond: index of the chain's first inner bond among all bonds.
    """
    last = len(network.sizes)
    plan = best_plan(network, num_tokens)
    # 2 FLOPs per multiplication, times 3: the backward pass costs twice as much as the forward pass.
    return [
        (6.0 * macs / num_tokens, [first_bond + bond - 1 for bond in bonds if 0 < bond < last])
        for macs, bonds in rank_factors(network, plan)
    ]
