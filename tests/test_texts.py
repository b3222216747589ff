"""Tests of the text that tests train on."""

from __future__ import annotations

import zlib

from tests.texts import english_like


def test_english_like_is_reproducible() -> None:
    text = english_like(10_000)
    assert len(text) == 10_000
    assert zlib.crc32(text.encode("ascii")) == 1894843130
    assert english_like(100, seed=1) != text[:100]
