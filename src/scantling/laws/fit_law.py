"""Fit a law to a table of runs: checks of the options and of the runs, both stages, and the search."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from scantling.errors import UserError, with_hint
from scantling.laws.fitting import Problem, solve
from scantling.laws.inputs import FULL_PRECISION
from scantling.laws.result import Fit
from scantling.laws.runs import Runs, read_runs

if TYPE_CHECKING:
    from scantling.laws.law import Law

logger = logging.getLogger(__name__)

BASE_CONSTANTS = ("A", "B", "E", "alpha", "beta", "power")
_MIN_SPREAD = 0.02
"""Standard deviation of log N or log D below which an exponent is not identifiable."""


def fit_law(
    law_class: type[Law],
    runs: Any,
    *,
    base: Law | Fit | Literal["fit"] | None = None,
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, Any] | None = None,
    fixed: Mapping[str, float] | None = None,
    tie: Mapping[str, str] | None = None,
    free: Sequence[str] = (),
    delta: float = 1e-3,
) -> Fit:
    """Fit a law to a table of runs; `scantling.laws.fit` describes the arguments."""
    _check_options(base, columns, where, fixed, tie, free)
    table = read_runs(runs, law_class, columns, where)
    if not (isinstance(delta, int | float) and np.isfinite(delta) and delta > 0):
        raise UserError(f"delta is a positive number; given {delta!r}")
    if isinstance(base, type):
        raise UserError(f"base is a law with constants, such as {base.__name__}.published(); given the class")
    fixed, tie = fixed or {}, tie or {}
    _check_constant_names(law_class, table, "free", free)
    if isinstance(base, str):
        # first stage; afterwards its constants are fixed
        base = _fit_base(base, law_class.base_class(), table, fixed, tie, free, delta)
        tie = {name: leader for name, leader in tie.items() if name not in BASE_CONSTANTS}
        free = [name for name in free if name not in BASE_CONSTANTS]

    from_base = _base_constants(law_class, base)
    # Options for a constant override the base.
    from_base = {name: value for name, value in from_base.items() if name not in fixed and name not in free}
    held = from_base | _checked_fixed(law_class, table, fixed)
    fitted = [name for name in dict.fromkeys([*law_class.free_constants(table), *free]) if name not in held]
    _check_tie(law_class, tie, fitted)
    names = tuple(name for name in fitted if name not in tie)
    if not names:
        raise UserError("nothing is left to fit: every constant is fixed, or the bits are the same in all runs")
    if held.get("E", 0.0) >= (lowest := float(table["loss"].min())):
        raise UserError(f"E is fixed at {held['E']:g}, but a run has a loss of {lowest:g}; fix E below it")
    _check_identifiable(table, names)

    problem = _problem(law_class, table, names, tie, held, delta)
    _check_parts(problem.law, table)
    inactive = problem.law.inactive_constants()
    for name in fitted:
        if name in inactive:
            raise UserError(f"free names {name}, a constant of {inactive[name]}, which has low precision in no run")
    theta, total = solve(problem)
    return Fit.from_solution(problem, theta, total, table, base=base, from_base=tuple(from_base))


def _fit_base(
    base: str,
    base_class: type[Law],
    table: Runs,
    fixed: Mapping[str, float],
    tie: Mapping[str, str],
    free: Sequence[str],
    delta: float,
) -> Fit:
    """Fit the first stage to the full-precision runs, with the options for its constants."""
    if base != "fit":
        raise UserError(f"base is a law, or 'fit' to fit one to the same runs; given '{base}'")
    runs = table.full_precision()
    try:
        fitted = fit_law(
            base_class,
            {name: runs[name] for name in ("N", "D", "loss")},
            fixed={name: value for name, value in fixed.items() if name in BASE_CONSTANTS},
            tie={name: leader for name, leader in tie.items() if name in BASE_CONSTANTS},
            free=[name for name in free if name in BASE_CONSTANTS],
            delta=delta,
        )
    except UserError as error:
        raise UserError(f"the base, fitted to {runs.count} full-precision runs: {error}") from None
    for name, reason in fitted.unidentified.items():
        logger.warning("the base does not identify %s: %s", name, reason)
    return fitted


def _base_constants(law_class: type[Law], base: Law | Fit | None) -> dict[str, float]:
    """Return the constants that a law takes from its base: all if it is the same law."""
    if base is None:
        return {}
    law = base.law if isinstance(base, Fit) else base
    is_same = isinstance(law, law_class)
    return {name: value for name, value in law.constants().items() if is_same or name in BASE_CONSTANTS}


def _problem(
    law_class: type[Law],
    table: Runs,
    names: tuple[str, ...],
    tie: Mapping[str, str],
    held: Mapping[str, float],
    delta: float,
) -> Problem:
    """Return the problem in units of the geometric means of N and D."""
    # a fixed amplitude changes in these units with its exponent, if that is fitted
    pinned = {
        name: held[name]
        for name, exponents in law_class.AMPLITUDES.items()
        if name in held and not held.keys() >= {*exponents}
    }
    # geometric means as units, so that the problem is well-conditioned
    size, tokens = (float(np.exp(np.log(table[x]).mean())) for x in ("N", "D"))
    law = law_class.with_ones().with_constants({**dict.fromkeys([*names, *tie], 1.0), **held}).in_units(size, tokens)
    runs = replace(table, columns={**table.columns, "N": table["N"] / size, "D": table["D"] / tokens})
    return Problem(law, runs, names, tie, delta, size, tokens, pinned)


def _check_options(base: Any, columns: Any, where: Any, fixed: Any, tie: Any, free: Any) -> None:
    """Raise a UserError for an option of the wrong type."""
    options = (("columns", columns, True), ("where", where, False), ("fixed", fixed, False), ("tie", tie, True))
    for option, given, has_names_as_values in options:
        if given is None:
            continue
        texts = [*given, *(given.values() if has_names_as_values else ())] if isinstance(given, Mapping) else [None]
        if not all(isinstance(each, str) for each in texts):
            raise UserError(f"{option} is a mapping of names; given {given!r}")
    if isinstance(free, str) or not (isinstance(free, Sequence) and all(isinstance(name, str) for name in free)):
        raise UserError(f"free is a list of names of constants; given {free!r}")
    if not (base is None or isinstance(base, str | type) or hasattr(base, "with_constants")):
        raise UserError(f"base is a law, a fit, or 'fit'; given {base!r}")


def _check_constant_names(law_class: type[Law], table: Runs, option: str, given: Iterable[str]) -> None:
    """Raise a UserError for a constant that the law does not have for these runs."""
    names = law_class.constant_names(table)
    for name in given:
        if name not in names:
            text = f"{option} names '{name}'; the {law_class.name} law of these runs has {', '.join(names)}"
            raise UserError(with_hint(text, name, names))


def _checked_fixed(law_class: type[Law], table: Runs, fixed: Mapping[str, float]) -> dict[str, float]:
    _check_constant_names(law_class, table, "fixed", fixed)
    for name, value in fixed.items():
        if not isinstance(value, int | float | np.number) or not np.isfinite(value):
            raise UserError(f"fixed {name} is {value!r}; it is a finite number")
        if name not in law_class.OFFSETS and (value < 0 or (value == 0 and name != "E")):
            raise UserError(f"fixed {name} is {value!r}; {'E is 0 or more' if name == 'E' else f'{name} is above 0'}")
    return dict(fixed)


def _check_tie(law_class: type[Law], tie: Mapping[str, str], fitted: Sequence[str]) -> None:
    for follower, leader in tie.items():
        if leader == follower or leader in tie:
            raise UserError(f"tie lets {follower} follow {leader}, which follows {tie.get(leader)}; name a free one")
        if follower not in fitted or leader not in fitted:
            raise UserError(f"tie names {follower} and {leader}; it takes two fitted constants: {', '.join(fitted)}")
        units = [law_class.UNITS.get(name.partition("[")[0]) for name in (follower, leader)]
        if units[0] != units[1]:
            raise UserError(f"tie lets {follower}, in {units[0]}, follow {leader}, in {units[1]}; their units differ")


def _check_parts(law: Law, table: Runs) -> None:
    """Refuse low-precision parts whose cost the law cannot learn; warn if no run has low precision."""
    low = {
        part: float(table[part][table[part] < FULL_PRECISION][0])
        for part in law.PARTS
        if (table[part] < FULL_PRECISION).any()
    }
    for part, bits in low.items():
        if part not in law.modeled_parts():
            raise UserError(
                f"all runs have {part} of {bits:g} bits: the {law.name} law cannot learn their cost. Add runs at other "
                "bits, give base= or fixed constants for this part, or take law chinchilla"
            )
    if law.PARTS and not low and not np.isfinite(table.columns.get("post", np.array([np.inf]))).any():
        logger.warning("no run has low precision: only the base of the %s law is fitted", law.name)


def _check_identifiable(table: Runs, names: Sequence[str]) -> None:
    """Refuse too few runs, and runs in which size and tokens do not vary separately."""
    if table.count <= len(names):
        raise UserError(
            f"{table.count} runs are too few for {len(names)} constants ({', '.join(names)}): add runs, or give base= "
            f"or fixed constants"
        )
    logs = {name: np.log(table[name]) - np.log(table[name]).mean() for name in ("N", "D")}
    for name, exponent in (("N", "alpha"), ("D", "beta")):
        if exponent in names and logs[name].std() < _MIN_SPREAD:
            raise UserError(
                f"all runs have {name} of about {table[name][0]:.4g}, so {exponent} is not identifiable. Add runs with "
                f"another {name}, or give base= or fixed={{'{exponent}': …}}"
            )
    if {"alpha", "beta"} <= set(names):
        # spread of log D that a line through log N does not explain
        slope = (logs["N"] @ logs["D"]) / (logs["N"] @ logs["N"])
        if (logs["D"] - slope * logs["N"]).std() < _MIN_SPREAD * logs["D"].std():
            ratio = float(np.median(table["D"] / table["N"]))
            raise UserError(
                f"N and D are collinear: tokens follow parameters in all runs (D / N about {ratio:.3g}), so their "
                f"effects on the loss are not separable. Add runs off this line, or give base="
            )
