"""Parsers of options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence

from scantling.errors import UserError


def pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """Parse `NAME=VALUE` arguments into a mapping.

    Raises:
        UserError: an argument has no `=`, or two have the same name.
    """
    found: dict[str, str] = {}
    for each in given:
        name, sign, value = (part.strip() for part in each.partition("="))
        if not sign:
            raise UserError(f"{option} takes NAME=VALUE; given '{each}'")
        if name in found:
            raise UserError(f"{option} gives {name} twice, as '{found[name]}' and '{value}'; give it once")
        found[name] = value
    return found
