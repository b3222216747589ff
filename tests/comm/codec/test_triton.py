"""Tests of the block kernels against PyTorch operations; without a GPU, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scantling.comm.codec import triton
from scantling.comm.codec.block_group import BlockGroup
from scantling.comm.exchange import MomentumExchange
from scantling.comm.layout import make_block_groups
from tests.kernels import compile_for_gpus

pytest.importorskip("triton", reason="the kernels for GPUs are in Triton, which is not installed")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SHAPES = [(70, 96), (3, 64, 40), (64, 128), (130, 33)]


def group_options(**options: Any) -> dict[str, Any]:
    """Return the options of a group of matrices."""
    group = {"params": [nn.Parameter(torch.zeros(64, 64))], "values": "fp32", **options}
    made = MomentumExchange([group])
    return {**made.param_groups[0], "role": "matrix", "matrix_dims": None}


def block_groups(shapes: list[tuple[int, ...]] = SHAPES, **options: Any) -> list[BlockGroup]:
    group = group_options(**options)
    places = dict(enumerate(shapes))
    numels = {place: torch.Size(shape).numel() for place, shape in places.items()}
    return make_block_groups(places, numels, [group] * len(shapes))


def make_tensors(seed: int, shapes: list[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def of(block_group: BlockGroup, tensors: list[Tensor]) -> list[Tensor]:
    return [tensors[slot.param] for slot in block_group.slots]


@pytest.fixture(autouse=True)
def on_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "DEVICES", (DEVICE,))
    triton._make_plan.cache_clear()


@pytest.mark.parametrize("transform", ["dct", "none"])
@pytest.mark.parametrize(
    ("topk", "chunk", "dtype"),
    [
        (8, 64, torch.float32),
        (5, 32, torch.float32),
        (200, 64, torch.float32),
        (8, 64, torch.bfloat16),
        pytest.param(5, 32, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(200, 64, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_select_equals_pytorch_operations(transform: str, topk: int, chunk: int, dtype: Any) -> None:
    for block_group in block_groups(transform=transform, topk=topk, chunk=chunk):
        residuals, gradients = of(block_group, make_tensors(0)), of(block_group, make_tensors(1, dtype=dtype))
        wanted = [
            torch.add(gradient, residual, alpha=block_group.spec.decay)
            for residual, gradient in zip(residuals, gradients, strict=True)
        ]
        cut = block_group.to_blocks({slot.param: value for slot, value in zip(block_group.slots, wanted, strict=True)})
        assert triton.can_select(block_group, residuals, gradients)
        index, values = triton.select(block_group, residuals, gradients)
        for residual, value in zip(residuals, wanted, strict=True):
            torch.testing.assert_close(residual, value)
        assert (index[:, 1:] > index[:, :-1]).all()
        torch.testing.assert_close(values, cut.gather(1, index), rtol=1e-4, atol=1e-5)
        _, expected = block_group.spec.codec.select(cut)
        torch.testing.assert_close(values.abs().sort(1).values, expected.abs().sort(1).values, rtol=1e-4, atol=1e-5)


def test_select_takes_the_first_of_equal_elements() -> None:
    (block_group,) = block_groups([(64, 64)], transform="none", topk=3)
    residual, gradient = torch.zeros(64, 64, device=DEVICE), torch.zeros(64, 64, device=DEVICE)
    assert triton.select(block_group, [residual], [gradient])[0].tolist() == [[0, 1, 2]]
    gradient[5, 6], gradient[1, 2], gradient[40, :] = -2.0, 1.0, 1.0
    assert triton.select(block_group, [residual], [gradient])[0].tolist() == [[64 + 2, 5 * 64 + 6, 40 * 64]]


def test_select_includes_nan() -> None:
    (block_group,) = block_groups([(64, 64)], transform="none", topk=2)
    gradient = torch.randn(64, 64, device=DEVICE)
    gradient[7, 7] = torch.nan
    _, values = triton.select(block_group, [torch.zeros(64, 64, device=DEVICE)], [gradient])
    assert values.isnan().any()


@pytest.mark.parametrize("transform", ["dct", "none"])
@pytest.mark.parametrize("senders", [1, 2])
def test_add_equals_pytorch_operations(transform: str, senders: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of an index that several replicas sent are added."""
    for block_group in block_groups(transform=transform, topk=8):
        sent = [
            block_group.spec.codec.select(torch.randn(block_group.count, block_group.spec.codec.size, device=DEVICE))
            for _ in range(senders)
        ]
        index = torch.cat([each[0] for each in sent if each[0] is not None], 1)
        values = torch.cat([each[1] for each in sent], 1)
        found = {}
        for name, devices in (("fused", (DEVICE,)), ("plain", ())):
            monkeypatch.setattr(triton, "DEVICES", devices)
            tensors = of(block_group, make_tensors(3))
            by_place = {slot.param: value for slot, value in zip(block_group.slots, tensors, strict=True)}
            block_group.add_sparse(index, values, -0.5, to=by_place.__getitem__)
            pasted = dict(block_group.decode_sparse(index, values))
            found[name] = [*tensors, *(pasted[slot.param] for slot in block_group.slots)]
        for one, other in zip(found["fused"], found["plain"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("values", ["fp32", "sign", "int4"])
@pytest.mark.parametrize("transform", ["dct", "none"])
def test_exchange_with_kernels_equals_pytorch_operations(
    values: str, transform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare momentum and residuals over three steps; one parameter lacks a gradient once, and one is small."""
    kernels: list[str] = []
    for name in ("select", "add"):
        plain = getattr(triton, name)
        monkeypatch.setattr(
            triton,
            name,
            lambda *given, _name=name, _plain=plain, **more: (kernels.append(_name), _plain(*given, **more))[1],
        )

    def run(devices: tuple[str, ...]) -> list[Tensor]:
        monkeypatch.setattr(triton, "DEVICES", devices)
        shapes = [(64, 128), (70, 96), (128,), (64, 64)]
        params = [nn.Parameter(value) for value in make_tensors(5, shapes)]
        made = MomentumExchange([{"params": params, "transform": transform}], topk=16, values=values, check_every=None)
        found = []
        for step in range(3):
            for param, gradient in zip(params, make_tensors(10 + step, shapes), strict=True):
                param.grad = gradient
            if step == 1:
                params[1].grad = None
            made.exchange()
            found += [param.grad.clone() for param in params if param.grad is not None]
        return found + [made.residuals.read(param) for param in params]

    plain = run(())
    assert not kernels
    for one, other in zip(run((DEVICE,)), plain, strict=True):
        near = torch.isclose(one, other, rtol=1e-3, atol=1e-4)
        assert near.float().mean() > 0.98  # of two nearly equal coefficients, either may be chosen
    assert {"select", "add"} == set(kernels)


@pytest.mark.gpu
def test_kernels_are_deterministic() -> None:
    (block_group,) = block_groups([(4096, 4096)], topk=8, values="sign")
    found = []
    for _ in range(2):
        residuals = make_tensors(0, [(4096, 4096)])
        index, values = triton.select(block_group, residuals, make_tensors(1, [(4096, 4096)]))
        triton.add(block_group, index, values, -1.0, residuals)
        found.append([index, values, *residuals])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.skipif(ON_GPU, reason="there the kernels run")
def test_kernels_compile_for_gpus() -> None:
    compile_for_gpus(COMPILE)


COMPILE = """
from scantling.comm.codec import kernels

types = {"table": "*i64", "owners": "*i32", "index": "*i64", "k": "i32", "count": "i32", "first": "i32"}
types |= {"decay": "fp32", "scale": "fp32"}
block = {"height": 64, "width": 64, "down": 64, "across": 64, "aligned": True}
for transformed in (False, True):
    how = {"gradient": tl.bfloat16, "transformed": transformed, "precision": "tf32"}
    ptx = build(kernels.select, capability, types, **how, **block)
    assert "ld.global.v4.b32" in ptx, "residuals are read one number at a time"
for overwrite in (False, True):
    build(kernels.add_transformed, capability, types, overwrite=overwrite, precision="ieee", **block)
build(kernels.add_numbers, capability, types, height=64, width=64, size=256)
"""
