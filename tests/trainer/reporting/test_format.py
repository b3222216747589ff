"""Tests of number formatting."""

from __future__ import annotations

import math

import pytest

from scantling.trainer.reporting.format import (
    format_bytes,
    format_decimal,
    format_difference,
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (4_726_784, "4.51 MiB"),
        (1_048_575, "1.00 MiB"),
        (150 * 2**30, "150 GiB"),
        (2**60, "1024 PiB"),
        (-2048, "-2.00 KiB"),
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "–"),
    ],
)
def test_format_bytes(value: float | None, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (0.25, "0.250"),
        (0.0051, "0.00510"),
        (0.00051, "5.10e-04"),
        (999.7, "1000"),
        (4096, "4,096"),
        (9665.8, "9,666"),
        (12_345, "12.3k"),
        (999_999, "1.00M"),
        (1_181_696, "1.18M"),
        (7e9, "7.00G"),
        (-12_345, "-12.3k"),
        (None, "–"),
    ],
)
def test_format_number(value: float | None, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 µs"),
        (2.5e-5, "25.0 µs"),
        (0.0123, "12.3 ms"),
        (1.5, "1.50 s"),
        (99.9, "99.9 s"),
        (99.96, "1 min 40 s"),
        (200, "3 min 20 s"),
        (3600, "1 h 00 min"),
        (90_061, "25 h 01 min"),
        (-0.5, "-500 ms"),
        (math.nan, "–"),
    ],
)
def test_format_seconds(value: float, text: str) -> None:
    assert format_seconds(value) == text


def test_format_ratio_and_difference() -> None:
    assert format_ratio(4.62, 9.02) == "×0.512"
    assert format_ratio(3, 3) == "same"
    assert format_ratio(3, 0) == "–"
    assert format_ratio(None, 3) == "–"
    assert format_ratio(5e6, 1) == "×5.00M"
    assert format_difference(2.25, 2.5) == "-0.2500"
    assert format_difference(2.5, 2.5) == "same"
    assert format_difference(math.nan, 2.5) == "–"
    assert format_percent(0.125) == "12.5 %"
    assert format_percent(0.008, sign=True) == "+0.8 %"
    assert format_decimal(2.0, 2) == "2.00"
    assert format_decimal(None) == "–"
