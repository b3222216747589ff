"""The laws by name, and one way to fit any of them."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from scantling.errors import UserError, hinted
from scantling.laws.fitting import Problem, solve
from scantling.laws.law import BASE, Law
from scantling.laws.result import Fit
from scantling.laws.runs import WHOLE, Runs, read_runs

logger = logging.getLogger(__name__)

_HOMES = {
    "chinchilla": ("chinchilla", "ChinchillaLaw"),
    "efficiency": ("efficiency", "EfficiencyLaw"),
    "kumar": ("precision", "PrecisionLaw"),
    "ouyang": ("post_training", "PostTrainingLaw"),
}
_SPREAD = 0.02


def names() -> list[str]:
    """The laws that `fit` knows."""
    return sorted(_HOMES)


def law_named(name: str | type[Law]) -> type[Law]:
    """The class of a law; one of the caller's own is itself.

    Raises:
        UserError: if there is none of this name.
    """
    if isinstance(name, type) and issubclass(name, Law):
        if name is Law or not isinstance(getattr(name, "name", None), str):
            raise UserError(f"a law of your own is a subclass of Law that has a name; given {name.__name__}")
        return name
    if not isinstance(name, str) or name not in _HOMES:
        raise UserError(hinted(f"no law '{name}'; there are {', '.join(names())}", name, _HOMES))
    module, cls = _HOMES[name]
    found: type[Law] = getattr(importlib.import_module(f"scantling.laws.{module}"), cls)
    return found


def fit(
    runs: Any,
    law: str | type[Law] = "chinchilla",
    *,
    base: Law | Fit | Literal["fit"] | None = None,
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, Any] | None = None,
    fixed: Mapping[str, float] | None = None,
    tie: Mapping[str, str] | None = None,
    free: Sequence[str] = (),
    delta: float = 1e-3,
) -> Fit:
    """Fit a law to a table of runs.

    Args:
        runs: a CSV, JSON or JSON-lines file, .gz or not; a mapping of columns; a data frame; or one mapping a run.
        law: a name of `names()`, or a class of your own.
        base: a law all of whose constants are held, so that only what it does not have is fitted (the second stage);
            `fit` for Chinchilla's, fitted to those of the runs in which nothing has few bits (the first stage). One
            that was fitted is fitted anew where a size of model is left out, see `Fit.hold_out`.
        columns: what the table calls N, D, loss, weights, activations, kv_cache, post and scheme. C, the FLOPs of
            training, may stand in for D, which is then C / 6N. post may be `post.*`, the columns that a sweep has of
            losses after quantisation: each run is then a row as it was trained, and one for each of them.
        where: only the runs whose columns have these values, an empty one for nulls.
        fixed: constants that are held, such as {"n_w": 0.0}.
        tie: constants that follow another, such as {"beta": "alpha"}.
        free: constants that are held otherwise, such as power, C_w or "eff_D[w4a4]".
        delta: where Huber's loss of the logarithm turns from square to straight.

    Returns:
        The law with its evidence.

    Raises:
        UserError: for runs from which these constants cannot be had, with the reason.
    """
    cls = law_named(law)
    for what, given in (("columns", columns), ("where", where), ("fixed", fixed), ("tie", tie)):
        _check_mapping(what, given, of_names=what in ("columns", "tie"))
    if isinstance(free, str) or not (isinstance(free, Sequence) and all(isinstance(name, str) for name in free)):
        raise UserError(f"free is a list of names of constants; given {free!r}")
    if base is not None and not isinstance(base, Law | Fit | str | type):
        raise UserError(f"base is a law, a fit, or 'fit'; given {base!r}")
    table = read_runs(runs, cls, columns, where)
    if not (isinstance(delta, int | float) and np.isfinite(delta) and delta > 0):
        raise UserError(f"delta is a positive number; given {delta!r}")
    if isinstance(base, type):
        raise UserError(f"base is a law with constants, such as {base.__name__}.published(); given the class")
    fixed, tie = fixed or {}, tie or {}
    _check_names(cls, table, "free", free)
    if isinstance(base, str):
        base = _fitted_base(base, table, fixed, tie, free, delta)
        tie = {name: leader for name, leader in tie.items() if name not in BASE}
        free = [name for name in free if name not in BASE]
    lent = {name: value for name, value in _lent(cls, base).items() if name not in fixed and name not in free}
    held = lent | _checked(cls, table, fixed)
    wanted = [name for name in dict.fromkeys([*cls.fittable(table), *free]) if name not in held]
    for follower, leader in tie.items():
        if leader == follower or leader in tie:
            raise UserError(
                f"tie lets {follower} follow {leader}, which follows {tie.get(leader)}; name one that is free"
            )
        if follower not in wanted or leader not in wanted:
            raise UserError(f"tie names {follower} and {leader}; it takes two of what is fitted: {', '.join(wanted)}")
        units = [cls.UNITS.get(name.partition("[")[0]) for name in (follower, leader)]
        if units[0] != units[1]:
            raise UserError(f"tie lets {follower}, in {units[0]}, follow {leader}, in {units[1]}")
    sought = tuple(name for name in wanted if name not in tie)
    if not sought:
        raise UserError("nothing is left to fit: every constant is held, or the bits are the same in all runs")
    if held.get("E", 0.0) >= (lowest := float(table["loss"].min())):
        raise UserError(
            f"E is held at {held['E']:g}, but a run has a loss of {lowest:g}: no law of this form reaches it"
        )
    _check_enough(table, sought)
    _check_spread(table, sought)
    problem = _problem(cls, table, sought, tie, held, delta)
    _check_parts(problem.law, table)
    unused = problem.law.unused()
    for name in wanted:
        if name in unused:
            raise UserError(f"free names {name}, a constant of {unused[name]}, whose bits are few in none of the runs")
    theta, total = solve(problem)
    return Fit.of(problem, theta, total, table, base=base, lent=tuple(lent))


def _fitted_base(
    base: str, table: Runs, fixed: Mapping[str, float], tie: Mapping[str, str], free: Sequence[str], delta: float
) -> Fit:
    """Chinchilla's law of the runs in which nothing has few bits, with what was said of its constants."""
    if base != "fit":
        raise UserError(f"base is a law, or 'fit' for one that is fitted to the same runs; given '{base}'")
    whole = table.whole()
    try:
        found = fit(
            {name: whole[name] for name in ("N", "D", "loss")},
            fixed={name: value for name, value in fixed.items() if name in BASE},
            tie={name: leader for name, leader in tie.items() if name in BASE},
            free=[name for name in free if name in BASE],
            delta=delta,
        )
    except UserError as error:
        raise UserError(f"the base, of {whole.count} runs without few bits: {error}") from None
    for name, reason in found.unidentified.items():
        logger.warning("the base does not identify %s: %s", name, reason)
    return found


def _lent(cls: type[Law], base: Law | Fit | None) -> dict[str, float]:
    """The constants that a law takes from its base."""
    if base is None:
        return {}
    law = base.law if isinstance(base, Fit) else base
    same = isinstance(law, cls)
    return {name: value for name, value in law.constants().items() if same or name in BASE}


def _checked(cls: type[Law], table: Runs, fixed: Mapping[str, float]) -> dict[str, float]:
    _check_names(cls, table, "fixed", fixed)
    for name, value in fixed.items():
        if not isinstance(value, int | float | np.number) or not np.isfinite(value):
            raise UserError(f"fixed {name} is {value!r}, no finite number")
        if name not in cls.OFFSETS and (value < 0 or (value == 0 and name != "E")):
            raise UserError(f"fixed {name} is {value!r}; {'E is 0 or more' if name == 'E' else f'{name} is above 0'}")
    return dict(fixed)


def _check_mapping(what: str, given: Any, *, of_names: bool) -> None:
    """Raise a UserError for what is no mapping of names, to names where they stand for others."""
    if given is None:
        return
    texts = [*given, *(given.values() if of_names else ())] if isinstance(given, Mapping) else [None]
    if not all(isinstance(each, str) for each in texts):
        raise UserError(f"{what} is a mapping of names; given {given!r}")


def _check_names(cls: type[Law], table: Runs, what: str, given: Iterable[str]) -> None:
    """Raise a UserError for a constant that the law of these runs has not."""
    names = cls.named(table)
    for name in given:
        if name not in names:
            text = f"{what} names '{name}'; the {cls.name} law of these runs has {', '.join(names)}"
            raise UserError(hinted(text, name, names))


def _problem(
    cls: type[Law],
    table: Runs,
    sought: tuple[str, ...],
    tie: Mapping[str, str],
    held: Mapping[str, float],
    delta: float,
) -> Problem:
    pinned = {
        name: held[name] for name, powers in cls.AMPLITUDES.items() if name in held and not held.keys() >= {*powers}
    }
    size, tokens = (float(np.exp(np.log(table[x]).mean())) for x in ("N", "D"))
    law = cls.blank().with_constants({**dict.fromkeys([*sought, *tie], 1.0), **held}).in_units(size, tokens)
    centred = replace(table, columns={**table.columns, "N": table["N"] / size, "D": table["D"] / tokens})
    return Problem(law, centred, sought, tie, delta, size, tokens, pinned)


def _check_enough(table: Runs, sought: Sequence[str]) -> None:
    if table.count <= len(sought):
        raise UserError(
            f"{table.count} runs are too few for {len(sought)} constants ({', '.join(sought)}): more runs, a base=, or "
            f"fixed constants"
        )


def _check_parts(law: Law, table: Runs) -> None:
    """Refuse bits below 16 of which the law is not told what they cost, and say where there are none at all."""
    few = {part: float(table[part][table[part] < WHOLE][0]) for part in law.PARTS if (table[part] < WHOLE).any()}
    for part, bits in few.items():
        if part not in law.parts():
            raise UserError(
                f"all runs have {part} of {bits:g} bits: the {law.name} law cannot tell what that costs. Add runs at "
                "others, give base= or fixed constants of it, or take law chinchilla"
            )
    if law.PARTS and not few and not np.isfinite(table.columns.get("post", np.array([np.inf]))).any():
        logger.warning("no run has anything in few bits: of the %s law only its base is fitted", law.name)


def _check_spread(table: Runs, sought: Sequence[str]) -> None:
    """Refuse runs in which size and tokens cannot be told apart."""
    logs = {name: np.log(table[name]) - np.log(table[name]).mean() for name in ("N", "D")}
    for name, exponent in (("N", "alpha"), ("D", "beta")):
        if exponent in sought and logs[name].std() < _SPREAD:
            raise UserError(
                f"all runs have {name} of about {table[name][0]:.4g}: {exponent} cannot be told. Add runs of another "
                f"{name}, or give base= or fixed={{'{exponent}': …}}"
            )
    if {"alpha", "beta"} <= set(sought):
        slope = (logs["N"] @ logs["D"]) / (logs["N"] @ logs["N"])
        if (logs["D"] - slope * logs["N"]).std() < _SPREAD * logs["D"].std():
            ratio = float(np.median(table["D"] / table["N"]))
            raise UserError(
                f"N and D are collinear: tokens follow parameters in all runs (D / N about {ratio:.3g}), so that the "
                f"loss of few parameters cannot be told from that of few tokens. Add runs off this line, or give base="
            )
