"""Numbers for people: one place that says how many digits, which units and what stands for "not known"."""

from __future__ import annotations

import math

MISSING = "–"

_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB")
_SI = ("k", "M", "G", "T", "P", "E")


def format_bytes(value: float | None) -> str:
    """`1536` → `1.50 KiB`: three significant digits in binary units; `–` for None and NaN."""
    if value is None or not math.isfinite(value):
        return MISSING
    if abs(value) < 1024:
        return f"{value:.0f} B"
    scaled, unit = _scale(value, 1024.0, _BINARY)
    return f"{scaled} {unit}"


def format_number(value: float | None) -> str:
    """`1234567` → `1.23M`: three significant digits with SI prefixes; whole numbers below 1000 as they are."""
    if value is None or not math.isfinite(value):
        return MISSING
    if abs(value) < 1000:
        return f"{value:.0f}" if float(value).is_integer() else _three_digits(value)
    scaled, unit = _scale(value, 1000.0, _SI)
    return f"{scaled}{unit}"


def format_seconds(value: float | None) -> str:
    """`0.0123` → `12.3 ms`, `200` → `3 min 20 s`; `–` for None and NaN."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value < 0:
        return "-" + format_seconds(-value)
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (99.95, 1.0, "s")):
        if value < limit:
            return f"{_three_digits(value * factor)} {unit}"
    whole = round(value)
    minutes, seconds = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def format_decimal(value: float | None, digits: int = 4) -> str:
    """A loss or a probability with a fixed number of decimals; `–` for None and NaN."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def format_percent(value: float | None, digits: int = 1, *, sign: bool = False) -> str:
    """`0.125` → `12.5 %`, with a `+` on request."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{100 * value:{'+' if sign else ''}.{digits}f} %"


def format_ratio(value: float | None, reference: float | None) -> str:
    """How many times the reference a value is, `×0.51`; `same` where they are equal, `–` where it has no meaning."""
    if value is None or reference is None or not (math.isfinite(value) and math.isfinite(reference)):
        return MISSING
    if value == reference:
        return "same"
    if reference == 0:
        return MISSING
    ratio = value / reference
    return f"×{_three_digits(ratio)}" if abs(ratio) < 1000 else f"×{format_number(ratio)}"


def format_difference(value: float | None, reference: float | None, digits: int = 4) -> str:
    """A value less the reference with its sign, `-0.0210`; `same` where they are equal."""
    if value is None or reference is None or not (math.isfinite(value) and math.isfinite(reference)):
        return MISSING
    return "same" if value == reference else f"{value - reference:+.{digits}f}"


def _three_digits(value: float) -> str:
    """Three significant digits, no exponent down to 0.001: `0.512`, `1.23`, `12.3`, `123`."""
    size = abs(value)
    if size >= 99.95:
        return f"{value:.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995:
        return f"{value:.2f}"
    return f"{value:.3f}" if size >= 0.001 or size == 0 else f"{value:.2e}"


def _scale(value: float, base: float, units: tuple[str, ...]) -> tuple[str, str]:
    power = 0
    while abs(value) >= base and power < len(units):
        value /= base
        power += 1
    if round(abs(value)) >= base and power < len(units):  # 1023.9 KiB reads as 1.00 MiB
        value /= base
        power += 1
    return _three_digits(value), units[power - 1]
