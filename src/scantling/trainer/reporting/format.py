"""Number formats for display: digits, units, and the symbol for unknown values."""

from __future__ import annotations

import math
import re
from textwrap import fill

MISSING = "–"
SAME = "same"

_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB")
_HUGE = 1e12
"""Numbers from here on are written with an exponent, unless a unit has made them smaller."""
_SI = ("k", "M", "G", "T", "P", "E")


_UNPRINTABLE = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f\\ud800-\\udfff]")
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGTP]i)?B\b|tok/s|m?s\b)")


def fold_lines(text: str, width: int, *, indent: str | None = None) -> str:
    """Wrap the lines of a text between words, but not between a number and its unit; longer words are not broken.

    Args:
        text: any number of lines.
        width: width of the terminal.
        indent: prefix of continuation lines. Default: the indent of the line that is continued.
    """

    def folded(line: str) -> str:
        own = re.match(r" *(?:- )?", line)
        hanging = " " * own.end() if own is not None and indent is None else indent or ""
        joined = _BEFORE_UNIT.sub("\u00a0", line)
        parts = fill(
            joined,
            max(1, width),
            subsequent_indent=hanging,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
        return parts.replace("\u00a0", " ") if joined != line else parts

    return "\n".join(map(folded, text.split("\n")))


def replace_unprintable(text: str) -> str:
    """Replace control characters and lone surrogates, which terminals and files cannot show."""
    return _UNPRINTABLE.sub("\ufffd", text)


def format_bytes(value: float | None) -> str:
    """Format bytes: `1536` → `1.50 KiB`, three significant digits in binary units; `–` for None and NaN."""
    if value is None or not math.isfinite(value):
        return MISSING
    if abs(value) < 1024:
        return f"{value:.0f} B"
    scaled, unit = _scale(value, 1024.0, _BINARY)
    return f"{scaled} {unit}"


def format_number(value: float | None) -> str:
    """Format a number: `4096` → `4,096`, `1234567` → `1.23M`; from ten thousand on, three digits and an SI prefix."""
    if value is None or not math.isfinite(value):
        return MISSING
    if abs(value) < 1000 and not float(value).is_integer():
        return _three_digits(value)
    if abs(value) < 10_000:
        return f"{value:,.0f}"
    scaled, unit = _scale(value, 1000.0, _SI)
    return f"{scaled}{unit}"


def format_seconds(value: float | None) -> str:
    """Format seconds: `0.0123` → `12.3 ms`, `200` → `3 min 20 s`; `–` for None and NaN."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value < 0:
        return "-" + format_seconds(-value)
    if value >= _HUGE:
        return f"{value:.2e} s"
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (99.95, 1.0, "s")):
        if value < limit:
            return f"{_three_digits(value * factor)} {unit}"
    whole = round(value)
    minutes, seconds = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def format_decimal(value: float | None, digits: int = 4) -> str:
    """Format a loss or a probability with a fixed number of decimals; `–` for None and NaN."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:.{digits}f}" if abs(value) < _HUGE else f"{value:.2e}"


def format_percent(value: float | None, digits: int = 1, *, sign: bool = False) -> str:
    """Format a share: `0.125` → `12.5 %`, with a `+` if `sign`."""
    if value is None or not math.isfinite(value):
        return MISSING
    plus = "+" if sign else ""
    return f"{100 * value:{plus}.{digits}f} %" if abs(value) < _HUGE else f"{value:{plus}.2e}"


def format_ratio(value: float | None, reference: float | None) -> str:
    """Format the ratio of a value to a reference, `×0.51`; `same` if they are equal, `–` if it is undefined."""
    if value is None or reference is None or not (math.isfinite(value) and math.isfinite(reference)):
        return MISSING
    if value == reference:
        return SAME
    if reference == 0:
        return MISSING
    ratio = value / reference
    if not math.isfinite(ratio):
        return MISSING
    return f"×{_three_digits(ratio)}" if abs(ratio) < 1000 else f"×{format_number(ratio)}"


def format_difference(value: float | None, reference: float | None, digits: int = 4) -> str:
    """Format a value minus the reference with its sign, `-0.0210`; `same` if they are equal."""
    if value is None or reference is None or not (math.isfinite(value) and math.isfinite(reference)):
        return MISSING
    if value == reference:
        return SAME
    difference = value - reference
    return f"{difference:+.{digits}f}" if abs(difference) < _HUGE else f"{difference:+.2e}"


def format_last_steps(fewest: int, most: int | None = None) -> str:
    """Return the steps that a mean covers, such as `last 10 steps`; a range if runs differ."""
    counts = str(fewest) if most in (None, fewest) else f"{fewest} to {most}"
    return f"last {counts} steps" if counts != "1" else "last step"


def _three_digits(value: float) -> str:
    """Format three significant digits: `0.00512`, `0.512`, `1.23`, `12.3`, `123`; with an exponent only below 0.001."""
    size = abs(value)
    if size == 0:
        return "0"
    if size < 0.000_999_5:
        return f"{value:.2e}"
    if size >= _HUGE:
        return f"{value:.2e}"
    for digits, limit in ((0, 99.95), (1, 9.995), (2, 0.9995), (3, 0.099_95), (4, 0.009_995)):
        if size >= limit:
            return f"{value:.{digits}f}"
    return f"{value:.5f}"


def _scale(value: float, base: float, units: tuple[str, ...]) -> tuple[str, str]:
    power = 0
    while abs(value) >= base and power < len(units):
        value /= base
        power += 1
    if round(abs(value)) >= base and power < len(units):  # 1023.9 KiB becomes 1.00 MiB
        value /= base
        power += 1
    return _three_digits(value), units[power - 1]
