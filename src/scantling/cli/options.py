"""What several commands make of their options."""

from __future__ import annotations

from collections.abc import Sequence

from scantling.errors import UserError


def pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` each, as a mapping.

    Raises:
        UserError: if one has no `=`, or two have the same name.
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
