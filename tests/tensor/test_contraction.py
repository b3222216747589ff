"""Tests that contraction orders are correct and the cheapest."""

from __future__ import annotations

from itertools import product
from math import prod

import opt_einsum
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scantling as sc
from scantling.tensor.contraction import (
    MAX_OVERHEAD,
    Chain,
    Step,
    best_orders,
    best_plan,
    contract,
    make_plan,
    make_steps,
    merge_block,
)
from scantling.tensor.cores import dense
from scantling.tensor.costs import DeviceCosts


@st.composite
def chains(draw: st.DrawFn, least: int = 1) -> Chain:
    inputs, outputs = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    modes = draw(st.lists(st.integers(least, 6), min_size=inputs + outputs, max_size=inputs + outputs))
    ranks = draw(st.lists(st.integers(least, 9), min_size=len(modes) - 1, max_size=len(modes) - 1))
    return Chain(tuple(modes), (1, *ranks, 1), inputs)


def core_indices(chain: Chain) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = zip(chain.ranks[:-1], chain.modes, chain.ranks[1:], strict=True)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def assert_contracts(x: torch.Tensor, cores: list[torch.Tensor], steps: tuple[Step, ...], wanted: torch.Tensor) -> None:
    y = contract(x, [merge_block(cores, step.tree) for step in steps], steps, wanted.shape[1])
    torch.testing.assert_close(y, wanted)


def optimal_macs(chain: Chain, num_tokens: int) -> int:
    """Return the multiplications of the path that opt_einsum finds by exhaustive search."""
    num = len(chain.modes)
    bonds = [chr(ord("A") + bond) for bond in range(1, num)]
    letters = [chr(ord("a") + mode) for mode in range(num)]
    terms = ["Z" + "".join(letters[: chain.num_inputs])]
    terms += ["".join(bonds[max(0, i - 1) : i]) + letters[i] + "".join(bonds[i : i + 1]) for i in range(num)]
    result = "Z" + "".join(letters[chain.num_inputs :])
    sizes = dict(zip(letters, chain.modes, strict=True)) | dict(zip(bonds, chain.ranks[1:-1], strict=True))
    sizes["Z"] = num_tokens
    shapes = [[sizes[index] for index in term] for term in terms]
    path, _ = opt_einsum.contract_path(",".join(terms) + "->" + result, *shapes, shapes=True, optimize="dp")
    operands, total = [set(term) for term in terms], 0
    for pair in path:
        taken = [operands.pop(place) for place in sorted(pair, reverse=True)]
        involved = set().union(*taken)
        total += prod(sizes[index] for index in involved) if len(taken) > 1 else 0
        operands.append(involved & set(result).union(*operands))
    return total


@given(chains(), st.integers(1, 70))
@settings(deadline=None)
def test_every_order_matches_dense_product(chain: Chain, num_tokens: int) -> None:
    cores = core_indices(chain)
    x = torch.randn(num_tokens, chain.inputs(0, len(cores)), dtype=torch.float64)
    wanted = x @ dense(cores).reshape(x.shape[1], -1)
    merged, sequential, rebuilt = [chain.num_inputs], range(1, len(cores)), []
    ways = [make_steps(chain, splits) for splits in (merged, sequential, rebuilt)]
    for steps in (best_plan(chain, num_tokens).steps, *ways):
        assert_contracts(x, cores, steps, wanted)


@given(chains(least=2), st.integers(1, 100))
@settings(deadline=None)
def test_best_plan_is_optimal(chain: Chain, num_tokens: int) -> None:
    """All sizes are at least 2: then an outer product never pays off, and the search leaves it out."""
    assert best_plan(chain, num_tokens, costs=DeviceCosts(element=0.0)).macs == optimal_macs(chain, num_tokens)


@given(chains())
@settings(deadline=None, max_examples=50)
def test_best_orders_match_best_plan(chain: Chain) -> None:
    known = best_orders(chain)
    assert [limit for limit, _ in known] == sorted({limit for limit, _ in known})
    for num_tokens in (1, 2, 3, 7, 20, 100, 4096, 1 << 20, *(limit for limit, _ in known)):
        steps = next(steps for limit, steps in known if num_tokens <= limit)
        found = make_plan(chain, num_tokens, steps)
        assert found.macs <= MAX_OVERHEAD * found.naive_macs
        if num_tokens.bit_count() == 1 or num_tokens in dict(known):
            assert found.macs == best_plan(chain, num_tokens).macs


def test_best_orders_only_change_between_powers_of_two() -> None:
    chain = Chain((1, 2, 3, 1, 4), (1, 1, 3, 1, 2, 1), 4)
    steps = {num_tokens: best_plan(chain, num_tokens).steps for num_tokens in (2, 3, 4)}
    assert steps[2] == steps[4] != steps[3]
    assert next(found for limit, found in best_orders(chain) if limit >= 3) == steps[4]


@pytest.mark.parametrize(("num_tokens", "most"), [(1, 0.08e6), (32, 2.01e6), (4096, 190.2e6)])
def test_plan_cost_of_known_layer(num_tokens: int, most: float) -> None:
    """768 x 768 at rank 30: known orders take 0.08, 2.5 (core by core) and 190 million; 32 tokens have a better one."""
    chain = Chain((12, 8, 8, 8, 8, 12), (1, 12, 30, 30, 30, 12, 1), 3)
    assert best_plan(chain, num_tokens).macs <= most


def test_shared_merging_costs_less() -> None:
    chain = Chain((12, 8, 8, 8, 8, 12), (1, 12, 30, 30, 30, 12, 1), 3)
    assert len(best_plan(chain, 32, 0.0).steps) < len(best_plan(chain, 32).steps)


def test_plan_prints_its_cost() -> None:
    chain = Chain((12, 8, 8, 8, 8, 12), (1, 12, 30, 30, 30, 12, 1), 3)
    text = str(best_plan(chain, 4096))
    assert "naive" in text
    assert "with cores ((1 2) 3), then (4 (5 6))" in text
    assert "2415.919 M" in text
    assert "12.70 times as many" in text


@pytest.mark.parametrize("shape", [(768, 768), (768, 3072), (3072, 768), (1024, 4096), (2048, 2048)])
def test_best_plan_stays_close_to_standard_orders(shape: tuple[int, int]) -> None:
    """60 cases of shapes, ranks and tokens: dense, full W, merged input and output, core by core."""
    for rank, tokens in product((8, 30, 64), (1, 32, 256, 2048)):
        layer = sc.TTLinear(*shape, rank, bias=False, device="meta")
        chain = layer.network
        last = len(chain.modes)
        splits: list[list[int]] = [[], [chain.num_inputs], list(range(1, last))]
        known = [make_plan(chain, tokens, make_steps(chain, each)).macs for each in splits]
        chosen = best_plan(chain, tokens)
        assert chosen.macs <= 1.05 * min(*known, tokens * shape[0] * shape[1])
        assert chosen.naive_macs == known[-1]
