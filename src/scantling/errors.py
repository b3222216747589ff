"""Errors that a user can cause, each with a message that says what was given, what is allowed and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

STOPPED = 3
"""Exit code of what a signal has ended after saving."""


class ScantlingError(Exception):
    """Base of all errors raised on purpose. The command line prints the message without a traceback."""

    exit_code = 1
    relayed = False
    """True if another process reports the error too."""


class UserError(ScantlingError):
    """Input that cannot be used: a file, a value, a combination. Exit code 2."""

    exit_code = 2


class RunError(ScantlingError):
    """A run that started and cannot go on: a full disk, a non-finite loss. Exit code 1."""


class NonFiniteError(RunError):
    """A NaN or an Inf was found before an update; the parameters are those of the step before.

    Not so where gradients are released: other parameters may have taken the step. Nothing of it is saved.
    """


class SilentPeerError(RunError):
    """Another process does not answer: it is stopped, dead, or cut off."""


class ReplicaError(RunError):
    """Replicas that should be alike are not."""


class PayloadError(RunError):
    """What another process sent is not what it should have sent: damaged, of another run, step or configuration."""


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a recipe.

    Args:
        path: dotted path of the key, `train.steps`; empty for the recipe as a whole.
        problem: what is wrong, with what is allowed.
        given: the offending value as text, or None where there is none to show.
        hint: what to do, such as "did you mean 'steps'?".
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
    """Every fault of a recipe, reported at once."""

    def __init__(self, faults: list[Fault], source: str = "recipe") -> None:
        self.faults = faults
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        super().__init__(f"{source}: {count}\n" + "\n".join(f"  - {fault}" for fault in faults))


def first_line(error: BaseException | str) -> str:
    """The first line of a message, with the next where it only announces that; of an error without one its kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return "" if isinstance(error, str) else type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def shorten(text: str, length: int) -> str:
    """Return a text of at most this length; a longer one ends in "..."."""
    return text if len(text) <= length else text[: length - 3] + "..."


def did_you_mean(name: str, allowed: Iterable[str]) -> str | None:
    """Return "did you mean 'x'?" for the closest of the first 1,000 allowed names, or None where nothing is close."""
    close = difflib.get_close_matches(str(name)[:100], [str(a)[:100] for a in islice(allowed, 1000)], n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else None


def hinted(text: str, name: str, allowed: Iterable[str]) -> str:
    """A message about a name that is not allowed, with what was probably meant."""
    hint = did_you_mean(name, allowed)
    return f"{text} ({hint})" if hint else text
