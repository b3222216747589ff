"""Contraction order of tokens with a chain of cores: the cheapest one for the number of tokens.

y = x W, where W is a chain of cores: first the input cores, then the output cores. x is contracted with blocks of
neighboring cores, from the first core to the last; each block is merged beforehand. Two extremes are well known: x
through core after core (best for few tokens) and W built in full (rarely good). In between lies y = (x A) B, where A
and B are the merged input and output cores (best for many tokens; CoMERA, arXiv 2405.14377). The best order depends on
tokens, modes and ranks. So all 2^(n-1) ways to split n <= 10 cores into blocks are compared. Each block is merged in
its cheapest order, which does not depend on the other blocks:

    C[i, j] = min over k of  C[i, k] + C[k+1, j] + r_{i-1} S_i..S_k r_k S_{k+1}..S_j r_j          merge cores i..j

Every step is one matrix product: the block is a K x Q matrix, the state of x is viewed as P x K x S, where S are the
contiguous trailing elements, and the result is P x Q x S. In every step the backward pass costs twice as much as the
forward pass. Starting at another core never helps if all bonds have rank 2 or more, and hardly if some have rank 1.

The cost of an order is its multiplications, and on the scale of multiplications the elements that it reads or writes
and, on a GPU, the launches of its products with tokens; see `scantling.tensor.costs`. Launches of merging are not
counted, since equal layers share them. But no order may take more than `MAX_OVERHEAD` times the multiplications of the
best among core after core, y = (x A) B, W built in full, and a dense layer. Where launches cost something, orders whose
blocks may be kept are allowed, too.

Blocks may be merged once for several passes, or for all future passes. This saves multiplications but costs memory: if
merging were always free, W built in full would always be best, and a table of any size would be held dense. So merging
is discounted only for orders whose blocks hold at most `MAX_KEPT` times the elements of the cores. For other orders
it counts fully, and their blocks are merged for each pass and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from math import prod
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from scantling.tensor.costs import CPU, DeviceCosts

Tree: TypeAlias = "int | tuple[Tree, Tree]"

MAX_OVERHEAD = 1.05
"""Multiplications of an order relative to the best standard order, at most."""
MAX_KEPT = 4.0
"""Elements of kept blocks per element of the cores, at most.

Equal to what AdamW keeps per element (weight, gradient, two moments). A and B of a linear layer fit if the cores are
much smaller than W and not tiny (2.3 times the cores at 768 x 768 and rank 30, 4.0 at 768 x 3072, 0.9 at 4096 x 4096
and rank 256). W fits if the cores save little. All rows of a large table never fit.
"""
MAX_KEPT_ORDERS = 2
"""Orders per layer whose blocks are kept: a table's for lookups and for a head, other layers' for many and for few
tokens.
"""
MAX_TOKENS = 1 << 22
"""Number of tokens beyond which the order no longer changes."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Chain of cores that x (tokens, inputs) is contracted with: first the input cores, then the output cores.

    Attributes:
        modes: modes of all cores.
        ranks: ranks of all bonds, including the outer ones.
        num_inputs: number of input cores.
        has_activation: True if a nonlinear activation stands between input and output cores; no block spans it.
    """

    modes: tuple[int, ...]
    ranks: tuple[int, ...]
    num_inputs: int
    has_activation: bool = False

    def inputs(self, first: int, last: int) -> int:
        """Return the product of the input modes among cores first..last; 1 if there are none."""
        return prod(self.modes[first : min(last + 1, self.num_inputs)])

    def outputs(self, first: int, last: int) -> int:
        """Return the product of the output modes among cores first..last; 1 if there are none."""
        return prod(self.modes[max(first, self.num_inputs) : last + 1])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each core without its bonds."""
        return self.modes

    def absorb(self, first: int, last: int) -> tuple[int, int, int, int]:
        """Return P, K, S, Q of the step that absorbs cores first..last; the state is (outputs, rank, remaining
        inputs).
        """
        # P: outputs so far; K: left rank times inputs of the block; S: later inputs; Q: outputs times right rank.
        before, behind = self.outputs(0, first - 1), self.inputs(last + 1, len(self.modes))
        inner = self.ranks[first] * self.inputs(first, last)
        return before, inner, behind, self.outputs(first, last) * self.ranks[last + 1]


@dataclass(frozen=True, slots=True)
class Lookup:
    """Lookup of rows in a TTM table, one row mode and one column mode per core; the state of an id is (columns, rank).

    Attributes:
        row_modes, col_modes: modes of all cores.
        ranks: ranks of all bonds, including the outer ones.
    """

    row_modes: tuple[int, ...]
    col_modes: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(rows * cols for rows, cols in zip(self.row_modes, self.col_modes, strict=True))

    def absorb(self, first: int, last: int) -> tuple[int, int, int, int]:
        # The digits of an id select one row of the block, so only columns and ranks are left, and S = 1.
        columns, right = prod(self.col_modes[first : last + 1]), self.ranks[last + 1]
        return prod(self.col_modes[:first]), self.ranks[first], 1, columns * right


@dataclass(frozen=True, slots=True)
class Head:
    """Product of h (tokens, columns) with all rows of a table; the state is (rows, rank, remaining columns).

    Attributes:
        table: the table.
    """

    table: Lookup

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.table.ranks

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.table.sizes

    def absorb(self, first: int, last: int) -> tuple[int, int, int, int]:
        # Columns are contracted and rows are created: P holds the rows so far, S the remaining columns.
        rows, cols, ranks = self.table.row_modes, self.table.col_modes, self.table.ranks
        inner = ranks[first] * prod(cols[first : last + 1])
        return prod(rows[:first]), inner, prod(cols[last + 1 :]), prod(rows[first : last + 1]) * ranks[last + 1]


Network: TypeAlias = Chain | Lookup | Head
"""Tensor network that tokens are contracted with: cores in a row, and the shape of each contraction step."""


@dataclass(frozen=True, slots=True)
class Step:
    """Absorption of one merged block: (b P, K, S) times a K x Q matrix gives (b P, Q, S), for b tokens.

    Attributes:
        tree: merge order of the block: the index of a core, or a pair of trees.
        leading: P.
        inner: K.
        trailing: S.
        width: Q.
    """

    tree: Tree
    leading: int
    inner: int
    trailing: int
    width: int

    @property
    def macs(self) -> int:
        """Multiplications per token."""
        return self.leading * self.inner * self.trailing * self.width

    @property
    def elements(self) -> int:
        """Elements read and written per token; counted twice if S > 1, which makes many small batched products."""
        return self.leading * self.trailing * (self.inner + self.width) * (1 if self.trailing == 1 else 2)


@dataclass(frozen=True, slots=True)
class Plan:
    """Contraction order and its costs.

    Attributes:
        steps: steps in order.
        num_tokens: number of tokens that the plan was made for.
        merge_macs: multiplications for merging the blocks; independent of tokens, needed once per optimizer step.
        token_macs: multiplications with tokens.
        naive_macs: multiplications of core after core, without merging.
        dense_macs: multiplications of a dense layer.
    """

    steps: tuple[Step, ...]
    num_tokens: int
    merge_macs: int
    token_macs: int
    naive_macs: int
    dense_macs: int

    @property
    def macs(self) -> int:
        return self.merge_macs + self.token_macs

    def __str__(self) -> str:
        """Return the order as text, with its cost next to those of the naive order and of a dense layer."""
        blocks = ", then ".join(_format_tree(step.tree) for step in self.steps)
        lines = [
            f"{self.num_tokens} tokens with cores {blocks}",
            f"  chosen  {self.macs / 1e6:12.3f} M multiplications, {self.merge_macs / 1e6:.3f} M of them merge cores",
        ]
        others = {"naive": self.naive_macs, "dense": self.dense_macs}
        for name, macs in others.items():
            if macs:
                lines.append(f"  {name:7} {macs / 1e6:12.3f} M, {macs / max(1, self.macs):.2f} times as many")
        return "\n".join(lines)


def best_plan(chain: Network, num_tokens: int, merges: float = 1.0, costs: DeviceCosts = CPU) -> Plan:
    """Return the cheapest order.

    Args:
        chain: modes and ranks.
        num_tokens: rows of x.
        merges: weight of merging costs: below 1 if a merged block serves several passes, 0 if it serves all future
            ones. Blocks that are too large to keep count fully.
        costs: costs of the device.
    """
    candidates = _enumerate_orders(chain)
    return make_plan(chain, num_tokens, candidates.orders[candidates.best(num_tokens, merges, costs)])


@dataclass(frozen=True, slots=True)
class _Candidates:
    """All ways to split a chain into blocks, and their costs.

    Attributes:
        orders: steps of each order.
        macs, elements: (2, orders): for merging the blocks, and per token.
        can_keep: True for orders whose blocks are small enough to keep.
        standard: indices of the standard orders: W in full, (x A) B, core after core.
        dense: multiplications of a dense layer per token; infinite without one.
    """

    orders: tuple[tuple[Step, ...], ...]
    macs: NDArray[np.float64]
    elements: NDArray[np.float64]
    can_keep: NDArray[np.bool_]
    standard: tuple[int, ...]
    dense: float

    def best(self, num_tokens: int, merges: float, costs: DeviceCosts) -> int:
        """Return the index of the cheapest allowed order."""
        # How often each cost is paid: merging once, or less if its blocks are kept; the rest once per token.
        times = np.stack([np.where(self.can_keep, merges, max(1.0, merges)), np.full(len(self.orders), num_tokens)])
        macs = (times * self.macs).sum(0)
        # No order takes fewer multiplications than the minimum, so at least one is always allowed.
        limit = max(macs.min(), MAX_OVERHEAD * min(*macs[list(self.standard)], num_tokens * self.dense))
        is_allowed = (macs <= limit) | (self.can_keep & (costs.launch > 0.0))
        launches = costs.launch * np.array([len(steps) for steps in self.orders])
        cost = macs + costs.element * (times * self.elements).sum(0) + launches
        return int(np.where(is_allowed, cost, np.inf).argmin())


@lru_cache(maxsize=4096)
def _enumerate_orders(chain: Network) -> _Candidates:
    last = len(chain.sizes)
    # Each order is a set of cores at which blocks begin; few blocks first.
    splits = [split for count in range(last) for split in combinations(range(1, last), count)]
    if isinstance(chain, Chain) and chain.has_activation:
        splits = [split for split in splits if chain.num_inputs in split]  # no block spans the activation
    orders = tuple(make_steps(chain, split) for split in splits)
    macs = [(merge_macs(chain, (step.tree for step in steps)), sum(step.macs for step in steps)) for steps in orders]
    elements = [
        (sum(_best_merge(chain, *block_ends(step.tree))[1] for step in steps), sum(step.elements for step in steps))
        for steps in orders
    ]
    middle = (chain.num_inputs,) if isinstance(chain, Chain) else ()
    standard = tuple(splits.index(split) for split in ((), middle, tuple(range(1, last))) if split in splits)
    # With an activation W in full is no order, and no dense layer computes the same.
    dense = 0 if len(standard) < 3 else _dense_macs(chain)
    return _Candidates(
        orders,
        np.array(macs, dtype=np.float64).T,
        np.array(elements, dtype=np.float64).T,
        np.array([can_keep(chain, [step.tree for step in steps]) for steps in orders]),
        standard,
        dense if dense else np.inf,
    )


Orders: TypeAlias = tuple[tuple[int, tuple[Step, ...]], ...]


@lru_cache(maxsize=4096)
def best_orders(chain: Network, merges: float = 1.0, costs: DeviceCosts = CPU) -> Orders:
    """Return the best order for every token count: (largest token count, steps), ascending.

    Args:
        chain: modes and ranks.
        merges, costs: see `best_plan`.

    Powers of 2 are tried; between two neighbors with different orders, bisection finds the change. Which orders are
    allowed depends on the tokens, so an order may be best only between two powers. That one is missed; the order used
    there instead is allowed, too.
    """
    candidates = _enumerate_orders(chain)

    def changes(low: int, high: int) -> Iterator[tuple[int, int]]:
        """Yield (largest token count, order) for every change between two token counts."""
        first, last = (candidates.best(num_tokens, merges, costs) for num_tokens in (low, high))
        if first != last and high - low > 1:
            yield from changes(low, (low + high) // 2)
            yield from changes((low + high) // 2, high)
        elif first != last:
            yield low, first

    powers = [1 << power for power in range(MAX_TOKENS.bit_length())]
    limits = [change for low, high in pairwise(powers) for change in changes(low, high)]
    limits.append((MAX_TOKENS, candidates.best(MAX_TOKENS, merges, costs)))
    return tuple((limit, candidates.orders[order]) for limit, order in limits)


def make_plan(chain: Network, num_tokens: int, steps: Sequence[Step]) -> Plan:
    """Return a plan with its costs for given steps."""
    return Plan(
        tuple(steps),
        num_tokens,
        merge_macs(chain, (step.tree for step in steps)),
        num_tokens * sum(step.macs for step in steps),
        # Core after core: a block begins at each core.
        num_tokens * sum(step.macs for step in make_steps(chain, range(1, len(chain.sizes)))),
        num_tokens * _dense_macs(chain),
    )


def rank_factors(chain: Network, plan: Plan) -> list[tuple[float, tuple[int, ...]]]:
    """Return the multiplications of a plan as products: (rank-independent factor, bonds whose ranks multiply it)."""
    factors: list[tuple[float, tuple[int, ...]]] = []
    ranks = chain.ranks

    def add_merges(tree: Tree) -> None:
        if isinstance(tree, int):
            return
        first, middle, last = core_indices(tree)[0], core_indices(tree[1])[0], core_indices(tree)[-1]
        # The last term of C[i, j], see the head of this file: sizes times the ranks r_{i-1}, r_k and r_j.
        factors.append((prod(chain.sizes[first : last + 1]), (first, middle, last + 1)))
        for part in tree:
            add_merges(part)

    for step in plan.steps:
        first, last = block_ends(step.tree)
        bonds = first, last + 1
        # The multiplications P K S Q contain two ranks, left (in K) and right (in Q) of the block.
        factors.append((plan.num_tokens * step.macs / max(1, ranks[bonds[0]] * ranks[bonds[1]]), bonds))
        add_merges(step.tree)
    return factors


def _dense_macs(chain: Network) -> int:
    """Return the multiplications per token with the full matrix; 0 for a lookup."""
    return 0 if isinstance(chain, Lookup) else prod(chain.sizes)


def make_steps(chain: Network, splits: Sequence[int]) -> tuple[Step, ...]:
    """Return the steps that absorb blocks from left to right.

    Args:
        chain: modes and ranks.
        splits: indices of the cores, after the first, at which a block begins.
    """
    firsts = [0, *splits]
    lasts = [*(split - 1 for split in splits), len(chain.sizes) - 1]
    return tuple(_make_step(chain, first, last) for first, last in zip(firsts, lasts, strict=True))


def core_indices(tree: Tree) -> list[int]:
    """Return the core indices of a block, in order."""
    return [tree] if isinstance(tree, int) else core_indices(tree[0]) + core_indices(tree[1])


def can_keep(chain: Network, trees: Iterable[Tree], num_orders: int = 1) -> bool:
    """True if all blocks together are small enough to be kept for later passes.

    Args:
        chain: modes and ranks.
        trees: merge orders of the blocks.
        num_orders: number of orders that the blocks belong to.
    """
    core_numel = sum(_numel(chain, core, core) for core in range(len(chain.sizes)))
    return block_numel(chain, trees) <= num_orders * MAX_KEPT * core_numel


def block_numel(chain: Network, trees: Iterable[Tree]) -> int:
    """Return the number of elements in all merged blocks together."""
    return sum(_numel(chain, *block_ends(tree)) for tree in trees)


def _numel(chain: Network, first: int, last: int) -> int:
    """Return the number of elements in the block of cores first..last."""
    return chain.ranks[first] * prod(chain.sizes[first : last + 1]) * chain.ranks[last + 1]


def block_ends(tree: Tree) -> tuple[int, int]:
    """Return the first and last core of a block."""
    block = core_indices(tree)
    return block[0], block[-1]


def merge_macs(chain: Network, trees: Iterable[Tree]) -> int:
    """Return the multiplications for merging blocks."""
    return sum(_best_merge(chain, *block_ends(tree))[0] for tree in trees)


@lru_cache(maxsize=65536)
def _best_merge(chain: Network, first: int, last: int) -> tuple[int, int, Tree]:
    """Return the fewest multiplications that merge cores first..last, their reads and writes, and the merge order."""
    if first == last:
        return 0, 0, first

    numel = _numel(chain, first, last)
    options = []
    for k in range(first, last):  # C[first, k], C[k + 1, last] and their product; see the head of this file
        left, right = _best_merge(chain, first, k), _best_merge(chain, k + 1, last)
        macs = left[0] + right[0] + numel * chain.ranks[k + 1]
        elements = left[1] + right[1] + _numel(chain, first, k) + _numel(chain, k + 1, last) + numel
        options.append((macs, elements, k, (left[2], right[2])))
    macs, elements, _, tree = min(options)
    return macs, elements, tree


def _make_step(chain: Network, first: int, last: int) -> Step:
    return Step(_best_merge(chain, first, last)[2], *chain.absorb(first, last))


def merge_block(
    cores: Sequence[Tensor], tree: Tree, num_stack_dims: int = 0, done: dict[Tree, Tensor] | None = None
) -> Tensor:
    """Merge a block of cores into one core: (r, modes, r'), or (r, row modes, column modes, r').

    Args:
        cores: cores of one chain, or of several equal chains with this number of stack dims in front.
        tree: merge order.
        num_stack_dims: number of dims before r.
        done: merged blocks by their trees, which are used and to which new ones are added.
    """
    if isinstance(tree, int):
        return cores[tree]
    if done is not None and tree in done:
        return done[tree]
    left, right = (merge_block(cores, part, num_stack_dims, done) for part in tree)
    *stack, rank = left.shape[: num_stack_dims + 1]
    modes, others = left.shape[num_stack_dims + 1 : -1], right.shape[num_stack_dims + 1 : -1]
    product = left.flatten(num_stack_dims, -2) @ right.flatten(num_stack_dims + 1)  # (r modes, r_k) (r_k, modes' r')
    if len(modes) == 2:  # (r, m, n, m', n', r'): bring both row modes before both column modes
        product = product.view(*stack, rank, *modes, *others, right.shape[-1]).transpose(-3, -4)
    merged = [size * other for size, other in zip(modes, others, strict=True)]
    block = product.reshape(*stack, rank, *merged, right.shape[-1])
    if done is not None:
        done[tree] = block
    return block


def pad_to(values: Tensor, shape: Sequence[int]) -> Tensor:
    """Append zeros to each dim up to a shape."""
    missing = [size - own for size, own in zip(shape, values.shape, strict=True)]
    return F.pad(values, [number for size in reversed(missing) for number in (0, size)]) if any(missing) else values


def contract(
    x: Tensor,
    blocks: Sequence[Tensor],
    steps: Sequence[Step],
    out_size: int,
    bias: Tensor | None = None,
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Tensor:
    """Contract x with the blocks, in order.

    Args:
        x: (tokens, in_size).
        blocks: merged blocks of the steps.
        steps: steps of the plan.
        out_size: product of the output modes.
        bias: (out_size,); added within the last product if possible, which saves a pass over the result.
        multiply: product of two matrices; steps with S > 1 use torch's batched product instead.

    Returns:
        (tokens, out_size).
    """
    num_tokens = x.shape[0]
    for step, block in zip(steps, blocks, strict=True):
        matrix = block.reshape(step.inner, step.width)
        # `addmm` adds the bias to whole rows, so the last product must have the shape (tokens, out_size).
        is_last = step is steps[-1] and step.leading == 1 and step.width == out_size
        if bias is not None and is_last and multiply is torch.matmul:
            return torch.addmm(bias, x.reshape(num_tokens, step.inner), matrix)
        if step.trailing == 1:  # (tokens P, K) (K, Q)
            x = multiply(x.reshape(num_tokens * step.leading, step.inner), matrix)
        else:  # (Q, K) (tokens P, K, S)
            x = matrix.t() @ x.reshape(num_tokens * step.leading, step.inner, step.trailing)
    y = x.reshape(num_tokens, out_size)
    return y if bias is None else y + bias.to(y.dtype)


def _format_tree(tree: Tree) -> str:
    return str(tree + 1) if isinstance(tree, int) else f"({_format_tree(tree[0])} {_format_tree(tree[1])})"
