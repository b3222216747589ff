"""The laws by name, and `fit` for any of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from scantling.errors import UserError, with_hint
from scantling.laws.efficiency import EfficiencyLaw
from scantling.laws.fit_law import fit_law
from scantling.laws.law import ChinchillaLaw, Law
from scantling.laws.post_training import PostTrainingLaw
from scantling.laws.precision import PrecisionLaw
from scantling.laws.result import Fit

_LAWS: dict[str, type[Law]] = {law.name: law for law in (ChinchillaLaw, EfficiencyLaw, PrecisionLaw, PostTrainingLaw)}


def names() -> list[str]:
    """Return the names of the laws that `fit` knows."""
    return sorted(_LAWS)


def find_law(name: str | type[Law]) -> type[Law]:
    """Return the class of a law by its name; a custom class is returned unchanged.

    Raises:
        UserError: if no law has this name.
    """
    if isinstance(name, type) and issubclass(name, Law):
        if name is Law or not isinstance(getattr(name, "name", None), str):
            raise UserError(f"a custom law is a subclass of Law with a name; given {name.__name__}")
        return name
    if not isinstance(name, str) or name not in _LAWS:
        raise UserError(with_hint(f"no law '{name}'; there are {', '.join(names())}", name, _LAWS))
    return _LAWS[name]


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
        runs: a CSV, JSON or JSON-lines file, .gz or not; a mapping of columns; a data frame; or one mapping per run.
        law: a name from `names()`, or a custom class.
        base: a law whose constants are fixed, so that only the remaining ones are fitted (second stage); `fit` first
            fits Chinchilla's law to the full-precision runs (first stage). `Fit.hold_out` refits a fitted base.
        columns: column names of N, D, loss, weights, activations, kv_cache, post and scheme. C, training FLOPs, may
            replace D, which is then C / 6N. post may be `post.*`, the columns of a sweep with losses after
            quantization: each run is then one row as trained, and one row for each of them.
        where: select runs by column values; an empty value selects nulls.
        fixed: fixed constants, such as {"n_w": 0.0}.
        tie: constants that equal another, such as {"beta": "alpha"}.
        free: constants to fit that are fixed by default, such as power, C_w or "eff_D[w4a4]".
        delta: log-loss residual at which the Huber loss turns from quadratic to linear.

    Returns:
        The law with its evidence.

    Raises:
        UserError: for runs from which these constants are not identifiable, with the reason.
    """
    options: dict[str, Any] = {"base": base, "columns": columns, "where": where, "fixed": fixed, "tie": tie}
    return fit_law(find_law(law), runs, free=free, delta=delta, **options)
