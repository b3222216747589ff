"""Tests of the block kernels against PyTorch operations; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import copy
import threading
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scantling as sc
from scantling.comm.codec import triton
from scantling.comm.codec.block_group import BlockGroup
from scantling.comm.codec.message import Header, pack_message, unpack_messages
from scantling.comm.codec.topk import TopKCodec
from scantling.comm.config import RESIDUAL_ROW
from scantling.comm.exchange import MomentumExchange
from scantling.comm.layout import make_block_groups
from scantling.comm.residuals import decode_int8
from scantling.errors import PayloadError
from scantling.numerics.device import has_kernels
from tests.comm.replicas import together
from tests.kernels import compile_for_gpus

pytest.importorskip("triton", reason="the kernels for GPUs are in Triton, which is not installed")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SHAPES = [(70, 96), (3, 64, 40), (64, 128), (130, 33)]
LAUNCHERS = (
    *("accumulate_and_select", "add", "add_to_coded", "select_again", "mask_unselected"),
    *("pack", "unpack", "message_checksum"),
)


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


def count_launches(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the names of the launchers that are called from now on, one at a time: the interpreter has one thread."""
    launched: set[str] = set()
    lock = threading.RLock()

    def counted(name: str, plain: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            launched.add(name)
            with lock:
                return plain(*given, **more)

        return call

    for name in LAUNCHERS:
        monkeypatch.setattr(triton, name, counted(name, getattr(triton, name)))
    return launched


def select(block_group: BlockGroup, residuals: list[Tensor], gradients: list[Any]) -> tuple[Tensor, Tensor]:
    index, values = triton.accumulate_and_select(block_group, residuals, gradients)
    assert index is not None
    return index, values


def of(block_group: BlockGroup, tensors: list[Tensor]) -> list[Tensor]:
    return [tensors[slot.param] for slot in block_group.slots]


@pytest.fixture(autouse=True)
def on_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "DEVICES", (DEVICE,))
    triton._make_plan.cache_clear()
    assert has_kernels(torch.device(DEVICE))


@pytest.mark.parametrize("transform", ["dct", "none"])
@pytest.mark.parametrize(
    ("topk", "chunk", "dtype"),
    [
        (8, 64, torch.float32),
        (5, 32, torch.float32),
        (200, 64, torch.float32),
        (8, 64, torch.bfloat16),
        pytest.param(5, 32, torch.float16, marks=pytest.mark.slow),
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
        assert triton.can_accumulate(block_group, residuals, gradients)
        index, values = select(block_group, residuals, gradients)
        for residual, value in zip(residuals, wanted, strict=True):
            torch.testing.assert_close(residual, value)
        assert (index[:, 1:] > index[:, :-1]).all()
        torch.testing.assert_close(values, cut.gather(1, index), rtol=1e-4, atol=1e-5)
        _, expected = block_group.spec.codec.select(cut)
        torch.testing.assert_close(values.abs().sort(1).values, expected.abs().sort(1).values, rtol=1e-4, atol=1e-5)


def test_select_reads_gradients_of_several_dtypes_and_none() -> None:
    shapes = [(64, 64)] * 4
    (block_group,) = block_groups(shapes, topk=3)
    residuals, gradients = make_tensors(0, shapes), make_tensors(1, shapes)
    given = [gradients[0], None, gradients[2].bfloat16(), gradients[3].half()]
    wanted = [
        0.95 * residual + (0.0 if gradient is None else gradient.float())
        for residual, gradient in zip(residuals, given, strict=True)
    ]
    assert triton.can_accumulate(block_group, residuals, given)
    select(block_group, residuals, given)
    for residual, value in zip(residuals, wanted, strict=True):
        torch.testing.assert_close(residual, value)


@pytest.mark.parametrize("terms", [3, 100])
def test_select_first_subtracts_what_was_sent(terms: int) -> None:
    for block_group in block_groups(topk=8):
        residuals, gradients = of(block_group, make_tensors(0)), of(block_group, make_tensors(1))
        others = [residual.clone() for residual in residuals]
        generator = torch.Generator().manual_seed(2)
        index = torch.randint(block_group.spec.codec.size, (block_group.count, terms), generator=generator).to(DEVICE)
        values = torch.randn(index.shape, generator=generator).to(DEVICE)
        found = triton.accumulate_and_select(block_group, residuals, gradients, (index, values))
        triton.add(block_group, index, values, -1.0, others)
        wanted = triton.accumulate_and_select(block_group, others, gradients)
        for residual, other in zip(residuals, others, strict=True):
            torch.testing.assert_close(residual, other, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[1], wanted[1], rtol=1e-3, atol=1e-4)


def test_select_takes_the_first_of_equal_elements() -> None:
    (block_group,) = block_groups([(64, 64)], transform="none", topk=3)
    residual, gradient = torch.zeros(64, 64, device=DEVICE), torch.zeros(64, 64, device=DEVICE)
    assert select(block_group, [residual], [gradient])[0].tolist() == [[0, 1, 2]]
    gradient[5, 6], gradient[1, 2], gradient[40, :] = -2.0, 1.0, 1.0
    assert select(block_group, [residual], [gradient])[0].tolist() == [[64 + 2, 5 * 64 + 6, 40 * 64]]


def test_select_includes_nan() -> None:
    (block_group,) = block_groups([(64, 64)], transform="none", topk=2)
    gradient = torch.randn(64, 64, device=DEVICE)
    gradient[7, 7] = torch.nan
    _, values = select(block_group, [torch.zeros(64, 64, device=DEVICE)], [gradient])
    assert values.isnan().any()


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ([(300,), (7, 5), (64,), (130,)], {}),
        (SHAPES, {"topk": 4096, "transform": "none", "values": "sign", "decay": 0.5}),
    ],
    ids=["rows", "blocks"],
)
def test_all_elements_equal_pytorch_operations(
    keeps: bool, shapes: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    gradients = make_tensors(1, shapes)
    for block_group in block_groups(shapes, dense="int8", **options):
        assert block_group.spec.codec.is_dense
        residuals, own = of(block_group, make_tensors(0, shapes)), of(block_group, gradients)
        decay = block_group.spec.decay
        wanted = [each + decay * residual if keeps else each for each, residual in zip(own, residuals, strict=True)]
        by_place = {slot.param: value for slot, value in zip(block_group.slots, wanted, strict=True)}
        kept = residuals if keeps else None
        assert triton.can_accumulate(block_group, kept, own)
        index, values = triton.accumulate_and_select(block_group, kept, own)
        assert index is None
        assert torch.equal(values, block_group.to_blocks(by_place))
        if keeps:
            assert all(map(torch.equal, residuals, wanted))
        for idx, value in block_group.decode_sparse(None, values):
            assert torch.equal(value, by_place[idx])
        block_group.add_sparse(None, values, -1.0, to=by_place.__getitem__)
        assert not any(value.any() for value in by_place.values())


@pytest.mark.parametrize("transform", ["dct", "none"])
@pytest.mark.parametrize(("senders", "topk"), [(1, 8), (2, 8), (2, 100)])
def test_add_equals_pytorch_operations(
    transform: str, senders: int, topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of an index that several replicas sent are added."""
    for block_group in block_groups(transform=transform, topk=topk):
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


def test_decoded_matrices_have_the_wanted_dtype() -> None:
    (block_group,) = block_groups([(64, 64), (64, 128)], topk=8)
    index, values = block_group.spec.codec.select(torch.randn(3, 4096, device=DEVICE))
    wanted = {0: torch.bfloat16, 1: torch.float16}
    plain = dict(block_group.decode_sparse(index, values))
    for idx, value in block_group.decode_sparse(index, values, wanted):
        assert value.dtype == wanted[idx]
        torch.testing.assert_close(value.float(), plain[idx], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("size", "k"), [(4096, 32), (4096, 8), (4096, 1), (96, 5), (4096, 192), (60, 60), (128, 128), (4096, 2048)]
)
@pytest.mark.parametrize("values", ["fp32", "bf16", "int8", "int4", "sign"])
def test_packed_blocks_have_the_same_bytes(size: int, k: int, values: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = TopKCodec(size, k, values)
    for count in (0, 1, 3):
        monkeypatch.setattr(triton, "DEVICES", ())
        index, sent = codec.select(torch.randn(count, size, device=DEVICE))
        sent[:1, :1] = 0.0
        packed = codec.pack(index, sent)
        plain, kept = codec.unpack(packed, count), codec.round_trip(index, sent)[1]
        monkeypatch.setattr(triton, "DEVICES", (DEVICE,))
        assert torch.equal(codec.pack(index, sent), packed)
        assert torch.equal(codec.round_trip(index, sent)[1], kept)
        found = codec.unpack(packed, count)
        assert torch.equal(found[1], plain[1])
        assert torch.equal(found[1], kept)
        assert found[0] is plain[0] is None or torch.equal(found[0], plain[0])
        noise = torch.randint(0, 256, packed.shape, dtype=torch.uint8, device=DEVICE)
        damaged, _ = codec.unpack(noise, count)
        assert damaged is None or not count or bool(((damaged >= 0) & (damaged < size)).all())


def test_messages_are_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    header = Header(valid=True, epoch=1, step=2, rank=0, configuration=77)
    for length in (0, 5, 8, 10_000):
        body = torch.randint(0, 256, (length,), dtype=torch.uint8, device=DEVICE)
        monkeypatch.setattr(triton, "DEVICES", ())
        plain = pack_message(header, body)
        monkeypatch.setattr(triton, "DEVICES", (DEVICE,))
        assert torch.equal(pack_message(header, body), plain)
        headers, bodies = unpack_messages([plain, plain])
        assert headers == [header, header]
        assert torch.equal(bodies[1], body)
        plain[-1] ^= 64
        with pytest.raises(PayloadError, match="damaged"):
            unpack_messages([plain])


@pytest.mark.parametrize("transform", ["dct", "none"])
@pytest.mark.parametrize(
    ("exchange", "replicas", "values"),
    [
        ("all_gather", 1, "int4"),
        ("all_gather", 2, "fp32"),
        ("all_gather", 2, "sign"),
        ("owner", 2, "fp32"),  # means of codes are often equal, and then any of them may be chosen
    ],
)
def test_exchange_with_kernels_equals_pytorch_operations(
    transform: str, exchange: Any, replicas: int, values: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare momentum and residuals over three steps; one parameter lacks a gradient once, and one is small."""
    launched = count_launches(monkeypatch)

    def work(group: Any) -> list[Tensor]:
        shapes = [(64, 128), (70, 96), (128,), (64, 64)]
        params = [nn.Parameter(value) for value in make_tensors(5, shapes)]
        made = MomentumExchange(
            [{"params": params, "transform": transform}],
            process_group=group,
            topk=16,
            values=values,
            exchange=exchange,
            check_every=None,
        )
        found = []
        for step in range(3):
            for param, gradient in zip(params, make_tensors(10 + 7 * step + group.rank, shapes), strict=True):
                param.grad = gradient
            if step == 1:
                params[1].grad = None
            made.exchange()
            found += [param.grad.clone() for param in params if param.grad is not None]
        return found + [made.residuals.read(param) for param in params]

    def run(devices: tuple[str, ...]) -> list[list[Tensor]]:
        monkeypatch.setattr(triton, "DEVICES", devices)
        return together(replicas, work)

    plain = run(())
    assert not launched
    found = run((DEVICE,))
    for one, other in zip(found, plain, strict=True):
        for value, wanted in zip(one, other, strict=True):
            near = torch.isclose(value, wanted, rtol=1e-3, atol=1e-4)
            assert near.float().mean() > 0.98  # of two nearly equal coefficients, either may be chosen
    momenta = [each[:-4] for each in found]  # the last four are residuals
    assert all(all(map(torch.equal, momenta[0], each)) for each in momenta)
    owner = {"select_again", "mask_unselected"} if exchange == "owner" else set()
    assert launched == {"accumulate_and_select", "add", "pack", "unpack", "message_checksum"} | owner


@pytest.mark.parametrize("transform", ["dct", "none"])
def test_int8_residuals_are_rounded_without_bias(transform: str) -> None:
    shapes = [(64, 64), (100, 128)]
    for block_group in block_groups(shapes, topk=4, transform=transform):
        scales_of = {shape: torch.Size(shape).numel() // RESIDUAL_ROW for shape in shapes}
        gradients = of(block_group, make_tensors(1, shapes))
        grids = [slot.grid.shape for slot in block_group.slots]
        sums = [torch.zeros(shape, device=DEVICE) for shape in grids]
        others = [torch.zeros(shape, device=DEVICE) for shape in grids]
        rounds = 12
        for seed in range(rounds):
            codes = [torch.zeros(shape, dtype=torch.int8, device=DEVICE) for shape in grids]
            scales = [torch.zeros(scales_of[shape], device=DEVICE) for shape in grids]
            assert triton.can_accumulate(block_group, codes, gradients)
            index, values = triton.accumulate_and_select(block_group, codes, gradients, scales=scales, seed=seed << 32)
            triton.add_to_coded(block_group, index, values, -1.0, codes, scales, (seed << 32) + 7)
            for total, code, scale in zip(sums, codes, scales, strict=True):
                total += decode_int8(code, scale)
        wanted = [residual.clone() for residual in others]
        index, values = select(block_group, wanted, gradients)
        triton.add(block_group, index, values, -1.0, wanted)
        for total, residual in zip(sums, wanted, strict=True):
            step = residual.abs().max() / 127
            difference = total / rounds - residual
            assert difference.abs().max() < 2.5 * step
            assert difference.mean().abs() < 0.05 * step
    # Values far below a step of their row are kept on average; to the nearest code all of them would be 0.
    (block_group,) = block_groups([(64, 64)], topk=1, transform=transform)
    small = torch.full((64, 64), 1e-3, device=DEVICE)
    small[:, 0] = 1.0
    codes, scales = torch.zeros(64, 64, dtype=torch.int8, device=DEVICE), torch.zeros(64, device=DEVICE)
    total = 0.0
    for seed in range(4):
        codes.zero_()
        triton.accumulate_and_select(block_group, [codes], [small], scales=[scales], seed=seed << 24)
        total += float(decode_int8(codes, scales)[:, 1:].mean())
    assert 0.7e-3 < total / 4 < 1.3e-3
    (block_group,) = block_groups([(64, 48)], topk=4, transform=transform)  # rows of blocks do not share a scale
    assert not triton.can_accumulate(block_group, [torch.zeros(64, 48, dtype=torch.int8, device=DEVICE)], [None])
    # nor is there a kernel for blocks that send everything
    (block_group,) = block_groups([(2, 2048)], topk=4096, transform=transform)
    assert block_group.spec.codec.is_dense
    assert block_group.spec.width == RESIDUAL_ROW
    assert not triton.can_accumulate(block_group, [torch.zeros(2, 2048, dtype=torch.int8, device=DEVICE)], [None])


@pytest.mark.parametrize("exchange", ["all_gather", "owner"])
@pytest.mark.parametrize("role", ["matrix", "embedding"])
def test_int8_residuals_are_updated_by_kernels_alone(role: str, exchange: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No block is built in fp32, and rounded residuals lose little of all gradients."""
    launched = count_launches(monkeypatch)

    def refuse(*given: Any) -> Any:
        raise AssertionError("blocks are built")

    monkeypatch.setattr(BlockGroup, "to_blocks", refuse)

    def work(group: Any) -> list[Tensor]:
        param = nn.Parameter(torch.zeros(70, 128, device=DEVICE))
        made = MomentumExchange(
            [{"params": [param], "role": role}],
            process_group=group,
            topk=2,
            decay=1.0,
            residual="int8",
            exchange=exchange,
            check_every=None,
        )
        given, applied = torch.zeros_like(param), torch.zeros_like(param)
        for step in range(3):
            (param.grad,) = make_tensors(20 + 5 * step + group.rank, [(70, 128)])
            given += param.grad
            made.exchange()
            applied += param.grad
        assert made.residuals.state[param]["residual"].dtype == torch.int8
        return [given, applied, made.residuals.read(param)]

    found = together(2, work)
    given, applied, left = ((found[0][kind] + found[1][kind]) / 2 for kind in range(3))
    assert torch.equal(found[0][1], found[1][1])
    assert (given - applied - left).abs().max() < 0.2
    assert {"accumulate_and_select", "add_to_coded"} <= launched


@pytest.mark.parametrize("exchange", ["all_gather", "owner"])
@pytest.mark.parametrize(("values", "topk"), [("sign", 9), ("int8", 9), ("sign", 4096)])
def test_kernels_lose_nothing(exchange: Any, values: Any, topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without decay, all mean gradients equal the applied momentum and the mean residual."""
    count_launches(monkeypatch)
    shapes = [(64, 64), (70, 96), (300,)]

    def work(group: Any) -> list[list[Tensor]]:
        params = [nn.Parameter(torch.zeros(shape, device=DEVICE)) for shape in shapes]
        options: dict[str, Any] = {"values": values, "dense": values, "exchange": exchange, "topk": topk}
        group_of_all = {"params": params, "transform": "none" if topk == 4096 else "dct"}  # as after local steps
        made = MomentumExchange([group_of_all], process_group=group, decay=1.0, check_every=None, **options)
        given, applied = ([torch.zeros_like(param) for param in params] for _ in range(2))
        for step in range(3):
            for number, gradient in enumerate(make_tensors(20 + 5 * step + group.rank, shapes)):
                params[number].grad = gradient
                given[number] += gradient
            made.exchange()
            for number, param in enumerate(params):
                applied[number] += param.grad
        return [given, applied, [made.residuals.read(param) for param in params]]

    found = together(2, work)
    for number in range(len(shapes)):
        given, applied, left = ([each[kind][number] for each in found] for kind in range(3))
        assert torch.equal(*applied)
        torch.testing.assert_close(applied[0] + sum(left) / 2, sum(given) / 2, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("update", "dtype", "scale"),
    [("muon", torch.bfloat16, 1e-2), ("muon", torch.float16, 1e-5), ("sign", torch.float16, 2e-7)],
)
def test_updates_of_16_bit_weights_are_those_of_fp32(
    update: Any, dtype: Any, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The momentum is not rounded to fp16, where it underflows, nor to bf16 for Muon, which amplifies the errors."""

    def step(devices: tuple[str, ...]) -> Tensor:
        monkeypatch.setattr(triton, "DEVICES", devices)
        param = nn.Parameter(torch.zeros(64, 64, device=DEVICE, dtype=dtype))
        topk = 8 if update == "muon" else 512  # a matrix of low rank
        optimizer = sc.DeMo([param], lr=1.0, topk=topk, values="fp32", update=update, check_every=None)
        param.grad = (scale * make_tensors(1, [(64, 64)])[0]).to(dtype)
        optimizer.step()
        return param.detach().float()

    plain, found = step(()), step((DEVICE,))
    if update == "sign":
        assert (found != 0).float().mean() == (plain != 0).float().mean() == 1.0
    assert (found - plain).norm() < 0.03 * plain.norm()


def make_change(name: str, made: MomentumExchange, params: list[nn.Parameter], step: int, rank: int) -> None:
    """Change something before a step of `test_changes_between_steps`."""
    if name == "nan" and step == 1 and rank == 0:
        params[0].grad[3, 3] = torch.nan
    if name == "overflow" and step == 2 and rank == 0:
        made.residuals.read(params[0])[3, 3] = 3e38
        params[0].grad[3, 3] = 3e38
    if name == "freeze" and step == 1:
        params[1].requires_grad_(False)
        params[1].grad = None
    if name == "decay" and step >= 1:
        made.param_groups[0]["decay"] = 0.9 - 0.1 * step
    if name == "to int8" and step == 1:
        made.param_groups[0]["residual"] = "int8"
    if name == "to fp32" and step in (0, 2):
        made.param_groups[0]["residual"] = "int8" if step == 0 else "fp32"
    if name == "clear" and step == 2:
        made.residuals.state.clear()


@pytest.mark.parametrize(
    ("change", "exchange"),
    [
        *(("nan", exchange) for exchange in ("owner", "all_gather")),
        ("overflow", "owner"),
        *((change, "all_gather") for change in ("freeze", "decay", "to int8", "to fp32", "clear")),
    ],
)
def test_changes_between_steps(change: str, exchange: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent coefficients are subtracted once, whatever changes between the exchange and the next accumulation."""
    count_launches(monkeypatch)
    shapes = [(64, 64), (64, 128)]

    is_rounded = change in ("to int8", "to fp32")

    def work(group: Any) -> list[Tensor]:
        params = [nn.Parameter(torch.zeros(shape, device=DEVICE)) for shape in shapes]
        made = MomentumExchange(
            params,
            process_group=group,
            topk=6,
            values="fp32",
            exchange=exchange,
            check_every=None,
            decay=1.0 if is_rounded else 0.95,
        )
        found = []
        for step in range(4):
            for param, gradient in zip(params, make_tensors(40 + 5 * step + group.rank, shapes), strict=True):
                param.grad = gradient if param.requires_grad else None
            make_change(change, made, params, step, group.rank)
            made.exchange()
            found += [param.grad.clone() for param in params if param.grad is not None]
        found += [made.residuals.read(param).clone() for param in params]
        # Rounding chooses other coefficients: compare the applied momentum plus the residual, which no choice changes.
        return [sum(found[place :: len(shapes)]) for place in range(len(shapes))] if is_rounded else found

    results = []
    for devices in ((), (DEVICE,)):
        monkeypatch.setattr(triton, "DEVICES", devices)
        results.append(together(2, work))
    means = [[sum(each) / 2 for each in zip(*result, strict=True)] for result in results]
    compared = means if is_rounded else [[*chain.from_iterable(result)] for result in results]
    for one, other in zip(*compared, strict=True):
        if is_rounded:
            assert (one - other).norm() < 0.05 * one.norm()
        else:
            torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3)


def test_state_has_no_coefficients_that_were_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels subtract what was sent in the next step; whoever saves or reads the state before sees it subtracted."""
    gradients = make_tensors(3, [(64, 64)])

    def make() -> tuple[sc.DeMo, nn.Parameter]:
        param = nn.Parameter(torch.zeros(64, 64, device=DEVICE))
        return sc.DeMo([param], lr=0.01, topk=8, values="fp32", check_every=None), param

    def steps(optimizer: sc.DeMo, param: nn.Parameter, count: int) -> Tensor:
        for _ in range(count):
            param.grad = gradients[0].clone()
            optimizer.step()
        return param.detach().clone()

    whole = steps(*make(), 4)
    for load in ("state_dict", "shared and local", "deepcopy", "slice"):
        optimizer, param = make()
        steps(optimizer, param, 2)
        assert optimizer.exchange.residuals._sent
        other, copy_of = make()
        with torch.no_grad():
            copy_of.copy_(param)
        if load == "state_dict":
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif load == "shared and local":
            local, shared = optimizer.local_state_dict(), optimizer.shared_state_dict()
            steps(other, copy_of, 1)  # leaves coefficients that must not be subtracted from what is loaded
            with torch.no_grad():
                copy_of.copy_(param)
            other.load_local_state_dict(local)
            other.load_shared_state_dict(shared)
        elif load == "deepcopy":
            other = copy.deepcopy(optimizer)
            copy_of = other.param_groups[0]["params"][0]
        else:
            optimizer.slice_state(param, 0, torch.arange(64, device=DEVICE))
            other, copy_of = optimizer, param
        assert not other.exchange.residuals._sent
        torch.testing.assert_close(steps(other, copy_of, 2), whole, msg=load)


@pytest.mark.gpu
def test_kernels_are_deterministic() -> None:
    (block_group,) = block_groups([(4096, 4096)], topk=8, values="sign")
    found = []
    for _ in range(2):
        residuals = make_tensors(0, [(4096, 4096)])
        index, values = select(block_group, residuals, make_tensors(1, [(4096, 4096)]))
        triton.add(block_group, index, values, -1.0, residuals)
        found.append([index, values, *residuals])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.skipif(ON_GPU, reason="there the kernels run")
def test_kernels_compile_for_gpus() -> None:
    compile_for_gpus(COMPILE, max_spills=256)


COMPILE = """
from scantling.comm.codec import kernels

types = {"table": "*i64", "owners": "*i32", "index": "*i64", "sent_index": "*i64", "k": "i32", "count": "i32"}
types |= {"first": "i32", "sent": "i32", "length": "i32", "last": "i32", "seed": "i32", "senders": "fp32"}
types |= {"decay": "fp32", "scale": "fp32", "selected": "*i64", "words": "*i32", "bytes": "*u8", "message": "*u8"}
types |= {"total": "*i64", "rows_at": "i32", "codes_at": "i32", "scales_at": "i32"}
block = {"height": 64, "width": 64, "down": 64, "across": 64}
for size, precision, flag in ((16, "ieee", False), (64, "tf32", True)):
    how = {**block, "size": size, "precision": precision, "aligned": True}
    ptx = build(kernels.select, capability, types, transformed=flag, coded=False, **how)
    assert "ld.global.v4.b32" in ptx, "residuals are read one number at a time"
    build(kernels.add_transformed, capability, types, overwrite=flag, **how)
for flag, precision in ((True, "tf32"), (False, "ieee")):
    how = {**block, "precision": precision}
    build(kernels.select, capability, types, transformed=flag, coded=True, aligned=True, size=16, **how)
    build(kernels.add_to_coded, capability, types, size=64, **how)
build(kernels.select_again, capability, types, size=64, **block)
build(kernels.add_numbers, capability, types, height=64, width=64, size=256)
row = {"height": 1, "width": 128, "down": 1, "across": 128}
for flag in (False, True):
    build(kernels.accumulate_rows, capability, types, keeps=flag, **row)
    build(kernels.add_rows, capability, types, overwrite=flag, **row)
build(kernels.mask_unselected, capability, types, size=256)
for bits, levels, low, high in ((32, 0, -1, 0), (16, 0, 0, 4351), (8, 127, 12, 0), (4, 7, 6, 96), (1, 0, 6, 96)):
    how = {"low": low, "row": high, "bits": bits, "levels": levels, "size": 32}
    build(kernels.pack, capability, types, **how)
    build(kernels.unpack, capability, types, row_size=1 << high.bit_length(), **how)
build(kernels.add_checksum, capability, types, front=24, size=1024)
"""
