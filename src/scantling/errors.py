"""Errors that a user can cause. Messages say the value given, the values allowed, and the fix, in this order."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

EXIT_STOPPED = 3
"""Exit code of a run that a signal has stopped after saving."""


class ScantlingError(Exception):
    """Base class of all errors raised on purpose. The command line prints the message without a traceback."""

    exit_code = 1
    relayed = False
    """True if another process also reports the error."""


class UserError(ScantlingError):
    """Input that cannot be used: a file, a value, a combination. Exit code 2."""

    exit_code = 2


class RunError(ScantlingError):
    """Failure of a run that has started, such as a full disk or a non-finite loss. Exit code 1."""


class NonFiniteError(RunError):
    """NaN or Inf before an update; the parameters are those after the previous step.

    With released gradients, other parameters may have taken the step already. Nothing of it is saved.
    """


class SilentPeerError(RunError):
    """Another process does not answer: it is stopped, dead, or disconnected."""


class ReplicaError(RunError):
    """Replicas that should be identical differ."""


class PayloadError(RunError):
    """Message of another process that is damaged, or of another run, step or configuration."""


@dataclass(frozen=True)
class Fault:
    """One problem of a recipe.

    Args:
        path: dotted path of the key, such as `train.steps`; empty for the recipe as a whole.
        problem: the problem, with the allowed values.
        given: the offending value as text; None if there is none to show.
        hint: the fix, such as "did you mean 'steps'?".
    """

    path: str
    problem: str
    given: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        text = f"{self.path or '(recipe)'}: {self.problem}"
        if self.given is not None:
            text += f"; given {self.given}"
        if self.hint:
            text += f" ({self.hint})"
        return shorten(text, 1000)


class RecipeError(UserError):
    """All faults of a recipe, reported together."""

    def __init__(self, faults: list[Fault], source: str = "recipe") -> None:
        self.faults = faults
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        super().__init__(f"{source}: {count}\n" + "\n".join(f"  - {fault}" for fault in faults))


def first_line(error: BaseException | str) -> str:
    """Return the first line of a message, and the next if it ends in a colon; without a message, the type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return "" if isinstance(error, str) else type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def shorten(text: str, length: int) -> str:
    """Return a text of at most this length; a longer one ends in "..."."""
    return text if len(text) <= length else text[: length - 3] + "..."


def first_names(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, separated by commas, with "…" after them if there are more."""
    return ", ".join([*names[:most], *(["…"] if len(names) > most else [])])


def did_you_mean(name: str, allowed: Iterable[str]) -> str | None:
    """Return "did you mean 'x'?" for the closest of the first 1,000 allowed names; None if none is close."""
    close = difflib.get_close_matches(str(name)[:100], [str(a)[:100] for a in islice(allowed, 1000)], n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else None


def with_hint(text: str, name: str, allowed: Iterable[str]) -> str:
    """Return a message about a name that is not allowed, followed by the closest allowed name."""
    hint = did_you_mean(name, allowed)
    return f"{text} ({hint})" if hint else text
