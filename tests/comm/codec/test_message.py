"""Tests of message encoding: sealed messages decode unchanged, and damaged ones are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scantling.comm.codec.message import HEADER_BYTES, Header, check_headers, pack_message, unpack_messages
from scantling.comm.codec.quantize import dequantize, quantize, quantized_bytes
from scantling.comm.codec.topk import TopKCodec, topk_indices
from scantling.comm.config import Values
from scantling.errors import PayloadError

OWN = Header(True, 3, 70_000, 1, 0xDEADBEEF)
ERRORS = {"fp32": 0.0, "bf16": 2.0**-8, "int8": 1 / 127, "int4": 1 / 7}
"""Largest error of an element, relative to the largest element of its row."""


@pytest.mark.parametrize("values", get_args(Values))
@given(rows=st.integers(0, 5), length=st.integers(0, 9), seed=st.integers(0, 999))
@settings(deadline=None, max_examples=30)
def test_quantize_error_is_within_the_format(values: Values, rows: int, length: int, seed: int) -> None:
    value = torch.randn(rows, length, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 40 - 20)
    coded = quantize(value, values)
    assert coded.numel() == quantized_bytes(rows, length, values)
    found = dequantize(coded, rows, length, values)
    if values == "sign":
        wanted = value.sign() * value.abs().mean(1, keepdim=True)
        torch.testing.assert_close(found, wanted, rtol=2.0**-8, atol=0.0)
    elif value.numel():
        assert ((found - value).abs() <= ERRORS[values] * value.abs().amax(1, keepdim=True)).all()


def test_quantize_keeps_rows_of_zeros() -> None:
    for values in get_args(Values):
        assert not dequantize(quantize(torch.zeros(2, 3), values), 2, 3, values).any()


@given(st.integers(1, 70), st.integers(0, 5), st.data())
@settings(deadline=None)
def test_codec_sends_the_largest_elements(size: int, count: int, data: st.DataObject) -> None:
    codec = TopKCodec(size, data.draw(st.integers(1, size)), data.draw(st.sampled_from(get_args(Values))))
    blocks = torch.randn(count, size)
    index, values = codec.select(blocks)
    packed = codec.pack(index, values)
    assert packed.numel() == codec.num_bytes(count)
    found_index, found = codec.unpack(packed, count)
    assert torch.equal(codec.round_trip(index, values)[1], found)
    if index is None:
        assert found_index is None
    else:
        assert torch.equal(found_index, index)
        least = blocks.abs().sort(descending=True).values[:, codec.k - 1 : codec.k]
        assert (values.abs() >= least).all()
    if codec.values == "fp32":
        whole = torch.zeros(count, size)
        codec.add(found_index, found, whole)
        assert torch.equal(whole != 0, whole == blocks)


@pytest.mark.parametrize("kept", [1, 8, 192, 1000])
def test_topk_indices_of_many_blocks(kept: int) -> None:
    blocks = torch.randn(300, 4096)
    assert torch.equal(topk_indices(blocks, kept).sort().values, blocks.abs().topk(kept).indices.sort().values)


def test_message_round_trips() -> None:
    bodies = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (0, 1, 7, 8, 1000)]
    headers = [replace(OWN, rank=rank, valid=rank != 2) for rank in range(5)]
    found, given = unpack_messages([pack_message(header, body) for header, body in zip(headers, bodies, strict=True)])
    assert found == headers
    assert all(map(torch.equal, given, bodies))
    check_headers(found, OWN)


@given(st.integers(0, 200), st.integers(0, 7), st.integers(0, 99))
@settings(deadline=None, max_examples=300)
def test_message_detects_every_flipped_bit(size: int, bit: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    message = pack_message(OWN, torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator))
    place = int(torch.randint(0, message.numel(), (1,), generator=generator))
    message[place] ^= 1 << bit
    with pytest.raises(PayloadError, match="rank 0"):
        unpack_messages([message])


@given(st.binary(min_size=HEADER_BYTES, max_size=200))
@settings(deadline=None)
def test_unpack_refuses_random_bytes(noise: bytes) -> None:
    with pytest.raises(PayloadError):
        unpack_messages([torch.frombuffer(bytearray(noise), dtype=torch.uint8)])


def test_message_errors_hint_at_a_change_on_one_rank() -> None:
    with pytest.raises(PayloadError, match=r"rank 0 sent b'.*If one rank changed options"):
        unpack_messages([torch.zeros(100, dtype=torch.uint8)])
    with pytest.raises(PayloadError, match=r"expects 4\. If one rank changed options"):
        check_headers([replace(OWN, rank=0, step=5)], replace(OWN, rank=0, step=4))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"step": 5}, "rank 1 sent a message of step 5; rank 0 expects 4"),
        ({"epoch": 9}, "epoch 9; rank 0 expects 3"),
        ({"configuration": 1}, "configuration 00000001; rank 0 expects deadbeef"),
        ({"rank": 0}, "rank 0; rank 0 expects 1"),
    ],
)
def test_check_headers_refuses_another_step_or_run(change: dict[str, int], text: str) -> None:
    own = replace(OWN, rank=0, step=4)
    with pytest.raises(PayloadError, match=text):
        check_headers(
            [own, replace(own, rank=1, **{key: value for key, value in change.items() if key != "rank"})]
            if "rank" not in change
            else [own, own],
            own,
        )
