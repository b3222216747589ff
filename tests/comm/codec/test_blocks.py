"""Tests of splitting matrices of any shape into blocks, and of the block transform."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.fft import dctn, idctn

from scantling.comm.codec import dct
from scantling.comm.codec.blocks import divisor_side, even_side, make_grid

VIEWS = {
    1: [((0,), ())],
    2: [((0,), (1,)), ((1,), (0,))],
    3: [((1,), (2,)), ((0, 1), (2,)), ((2,), (0, 1))],
    4: [((0,), (1, 2, 3)), ((2,), (3,)), ((3, 0), (2,))],
}


@given(st.data())
@settings(deadline=None)
def test_block_grid_round_trips(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
    view = data.draw(st.sampled_from(VIEWS[len(shape)]))
    grid = make_grid(shape, view, data.draw(st.integers(1, 6)), divide=data.draw(st.booleans()))
    value = torch.arange(prod(shape), dtype=torch.float64).view(shape)
    blocks = grid.to_blocks(value)
    assert blocks.shape == (grid.count, grid.height, grid.width)
    assert torch.equal(grid.from_blocks(blocks), value)
    assert float(blocks.sum()) == float(value.sum())  # the padding is zero


@given(st.data())
@settings(deadline=None)
def test_scatter_add_equals_adding_full_blocks(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    grid = make_grid(shape, data.draw(st.sampled_from(VIEWS[len(shape)])), data.draw(st.integers(1, 6)))
    size = grid.height * grid.width
    kept = data.draw(st.integers(1, size))
    index = torch.stack([torch.randperm(size)[:kept] for _ in range(grid.count)])
    values = torch.randn(grid.count, kept)
    before = torch.randn(shape)
    wanted = before + grid.from_blocks(
        torch.zeros(grid.count, size).scatter(1, index, values).view(-1, grid.height, grid.width)
    )
    if grid.is_row_major(before):
        grid.scatter_add(index, values, to=before)
        assert torch.equal(before, wanted)
    else:
        assert grid.view not in (((0,), (1,)), ((1,), (2,)), ((0, 1), (2,)), ((0,), (1, 2, 3)))


def test_block_grid_accepts_noncontiguous_tensors() -> None:
    value = torch.randn(7, 11).t()
    grid = make_grid((11, 7), ((0,), (1,)), 4)
    assert torch.equal(grid.to_blocks(value), grid.to_blocks(value.contiguous()))


@pytest.mark.parametrize(
    ("length", "chunk", "even", "divisor"),
    [(768, 64, 64, 64), (100, 64, 50, 50), (1021, 64, 64, 1), (50257, 64, 64, 29), (30, 64, 30, 30), (65, 64, 33, 13)],
)
def test_block_sides(length: int, chunk: int, even: int, divisor: int) -> None:
    assert even_side(length, chunk) == even
    assert divisor_side(length, chunk) == divisor
    parts = -(-length // even)
    assert parts * even - length < parts


@pytest.mark.parametrize(("height", "width"), [(64, 64), (29, 64), (5, 7), (1, 6), (1, 1)])
def test_dct_equals_scipy_and_inverts(height: int, width: int) -> None:
    blocks = torch.randn(3, height, width, dtype=torch.float64)
    wanted = dctn(blocks.numpy(), axes=(1, 2), norm="ortho")
    torch.testing.assert_close(dct.forward(blocks), torch.from_numpy(wanted))
    torch.testing.assert_close(dct.inverse(blocks), torch.from_numpy(idctn(blocks.numpy(), axes=(1, 2), norm="ortho")))
    torch.testing.assert_close(dct.inverse(dct.forward(blocks)), blocks)


def test_inverse_sparse_equals_inverse() -> None:
    index = torch.stack([torch.randperm(35)[:4] for _ in range(6)])
    values = torch.randn(6, 4, dtype=torch.float64)
    whole = torch.zeros(6, 35, dtype=torch.float64).scatter(1, index, values).view(6, 5, 7)
    torch.testing.assert_close(dct.inverse_sparse(index, values, 5, 7), dct.inverse(whole))
