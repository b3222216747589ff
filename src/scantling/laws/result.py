"""A fitted law with its evidence: intervals, hold-out errors, and constants that are not identifiable from the runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from scantling.errors import UserError
from scantling.laws.fitting import COARSE, ROUNDING, WORST_CONDITION, Problem, minimize, solve
from scantling.laws.inputs import Array
from scantling.laws.runs import Runs

if TYPE_CHECKING:
    from scantling.laws.law import Law

SAMPLES, LEVEL = 1000, 0.95
FACTOR, SHIFT = 1.5, 0.5
"""A constant is identifiable if the runs exclude FACTOR times its value and its value / FACTOR; an offset, ± SHIFT."""
_CHI_SQUARE = 3.841458820694124
"""95 % quantile of chi-square with one degree of freedom."""
_MIN_CORRELATION = 0.95
_MIN_SHARE = 1e-6
"""Squared share of a flat direction from which a constant counts as part of it."""
_FOLDS = 8
_PROFILE_STAGES = 4
_VANISHING_E = 0.01
"""Share of the smallest loss below which E counts as 0."""


@dataclass(frozen=True)
class HoldOut:
    """Errors of predicting the runs of each model size from all other sizes.

    Attributes:
        errors: relative errors of the losses by held-out size.
        skipped: sizes that were not held out, with the reason.
    """

    errors: Mapping[float, Array]
    skipped: Mapping[float, str]

    @property
    def mean(self) -> float:
        """Mean absolute relative error."""
        return float(np.abs(self._all()).mean())

    @property
    def worst(self) -> float:
        """Largest absolute relative error."""
        return float(np.abs(self._all()).max())

    def _all(self) -> Array:
        if not self.errors:
            reasons = "; ".join(f"{size:.3g}: {reason}" for size, reason in self.skipped.items())
            raise UserError(f"no size could be held out: {reasons}")
        return np.concatenate(list(self.errors.values()))


@dataclass(frozen=True, repr=False)
class Fit:
    """A law fitted to runs. It has all attributes of its law, such as constants, `loss` and `optimum`.

    Attributes:
        law: the law with the fitted constants.
        names: fitted constants, without tied ones.
        residuals: log of the predicted over the measured loss of each run.
        objective: sum of Huber losses.
        delta: residual at which the Huber loss turns linear.
        runs: the fitted runs.
        base: fit of the first stage; None without a base, or with a given law as base.
    """

    law: Law
    names: tuple[str, ...]
    residuals: Array
    objective: float
    delta: float
    runs: Runs
    _problem: Problem = dataclasses.field(repr=False)
    _theta: Array = dataclasses.field(repr=False)
    base: Fit | None = dataclasses.field(default=None, repr=False)
    _from_base: tuple[str, ...] = ()

    @classmethod
    def from_solution(
        cls,
        problem: Problem,
        theta: Array,
        total: float,
        runs: Runs,
        *,
        base: Law | Fit | None = None,
        from_base: tuple[str, ...] = (),
    ) -> Fit:
        """Return the fit at the minimum of a problem.

        Args:
            problem: the law, runs and constants.
            theta: coordinates of the minimum.
            total: sum of Huber losses there.
            runs: the runs in counts of one.
            base: law or fit of the first stage.
            from_base: constants taken from it.
        """
        on_base = f" on a base ({base.source})" if base is not None else ""
        source = f"fitted to {runs.count} runs{on_base}"
        law = dataclasses.replace(problem.law_at(theta), source=source, fitted_ranges=runs.ranges())
        residuals, fitted_base = problem.residuals(theta)[0], base if isinstance(base, Fit) else None
        return cls(law, problem.names, residuals, total, problem.delta, runs, problem, theta, fitted_base, from_base)

    def __getattr__(self, name: str) -> Any:
        # Copying and unpickling ask for attributes before `law` is set, which would recurse.
        if name.startswith("_") or name == "law":
            raise AttributeError(name)
        return getattr(self.law, name)

    @property
    def mean_error(self) -> float:
        """Mean absolute relative error of the fitted losses."""
        return float(np.abs(np.expm1(self.residuals)).mean())

    @property
    def fitted_constants(self) -> tuple[str, ...]:
        """All fitted constants, with tied ones."""
        return (*self.names, *self._problem.tie)

    @cached_property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % intervals from 1,000 bootstraps, computed at the first access."""
        return self.bootstrap()

    def bootstrap(
        self, samples: int = SAMPLES, *, level: float = LEVEL, seed: int = 0
    ) -> dict[str, tuple[float, float]]:
        """Return percentile intervals of the fitted constants from refits to runs drawn with replacement.

        Constants of a base are fixed; the intervals do not contain their uncertainty.

        Args:
            samples: number of refits.
            level: coverage of the intervals.
            seed: seed of the draws.

        Returns:
            The low and the high end by constant; infinite if refits leave the range of floats.

        Raises:
            UserError: samples below 1, or a level outside of 0 to 1.
        """
        ends = _percentiles(level)
        constants = [law.constants() for law in self.resample(samples, seed=seed)]
        return {name: _percentile_interval([each[name] for each in constants], ends) for name in self.fitted_constants}

    def resample(self, samples: int = SAMPLES, *, seed: int = 0) -> list[Law]:
        """Return laws refitted to runs drawn with replacement; percentiles of their predictions are intervals.

        Args:
            samples: number of refits, each started from the constants of this fit.
            seed: seed of the draws.

        Returns:
            One law per sample.

        Raises:
            UserError: samples below 1.
        """
        if isinstance(samples, bool) or not isinstance(samples, int | np.integer) or samples < 1:
            raise UserError(f"an interval takes 1 refit or more; given samples={samples}")
        draw = np.random.default_rng(seed)
        count = self.runs.count
        laws = []
        for _ in range(samples):
            # refit with multiplicities, without the runs that were not drawn
            counts = np.bincount(draw.integers(count, size=count), minlength=count).astype(float)
            drawn = counts > 0
            problem = self._problem.with_runs(self._problem.runs.select(drawn))
            theta, _ = minimize(problem, self._theta, counts=counts[drawn], tolerance=COARSE)
            laws.append(self._problem.law_at(theta))
        return laws

    def interval(
        self, prediction: Callable[[Law], float], samples: int = SAMPLES, *, level: float = LEVEL, seed: int = 0
    ) -> tuple[float, float]:
        """Return the interval of a prediction of the law, such as `lambda law: law.optimum(compute=1e21).bits`.

        Args:
            prediction: function of a law.
            samples: number of refits.
            level: coverage of the interval.
            seed: seed of the draws.

        Returns:
            The low and the high end, in the unit of `prediction`.

        Raises:
            UserError: samples below 1, or a level outside of 0 to 1.
        """
        ends = _percentiles(level)
        return _percentile_interval([prediction(law) for law in self.resample(samples, seed=seed)], ends)

    @cached_property
    def condition_number(self) -> float:
        """Condition number of the Gauss-Newton Hessian by the log constants, in the middle of the runs."""
        jacobian = self._problem.residuals(self._theta)[1]
        # cond(J^T J) = cond(J)^2
        return float(np.linalg.cond(jacobian) ** 2)

    def profile(self, name: str, steps: Array | None = None) -> tuple[Array, Array]:
        """Return the profile likelihood: deviances of refits with one constant moved.

        Args:
            name: fitted constant. Amplitudes such as A and B are those in the middle of the runs, where N and D are 1.
            steps: changes of the logarithm of the constant, or of the constant itself if it may be negative.

        Returns:
            The constant and its deviance at each step; values below 3.84 are inside the 95 % interval.

        Raises:
            UserError: the constant was not fitted.
        """
        if name not in self.names:
            raise UserError(f"'{name}' was not fitted; these were: {', '.join(self.names)}")
        i = self.names.index(name)
        steps = np.linspace(-FACTOR, FACTOR, 13) if steps is None else np.asarray(steps, float)
        moved = self._theta[i] + steps
        deviances = np.array([self._deviance(i, float(step)) for step in steps])
        return (moved if self._problem.is_signed(name) else np.exp(moved)), deviances

    @cached_property
    def unidentified(self) -> dict[str, str]:
        """Constants that are not identifiable from these runs, with the reason (flat or wide)."""
        reasons = self._flat_directions()
        for i, name in enumerate(self.names):
            if name in reasons:
                continue
            is_signed = self._problem.is_signed(name)
            step = SHIFT if is_signed else np.log(FACTOR)
            is_open = [self._deviance(i, sign * step) < _CHI_SQUARE for sign in (1, -1)]
            if any(is_open):
                changes = (f"+ {SHIFT:g}", f"- {SHIFT:g}") if is_signed else (f"× {FACTOR:g}", f"÷ {FACTOR:g}")
                also = " and ".join(change for change, fits in zip(changes, is_open, strict=True) if fits)
                reasons[name] = f"the runs fit equally well with it {also}{self._correlated(i)}"
        # an offset means nothing without its scale
        for offset, scale in self.law.OFFSETS.items():
            if scale in reasons and offset in self.names:
                reasons[offset] = f"it is the offset of {scale}, which is not identified"
        if "E" in self.names and _VANISHING_E * self.runs["loss"].min() > self.law.E:
            for name in {"E", "alpha", "beta"} & set(self.names):
                reasons[name] = "E went to 0, and the exponents replace it"
        followers = self._problem.tie.items()
        return reasons | {follower: reasons[leader] for follower, leader in followers if leader in reasons}

    def hold_out(self) -> HoldOut:
        """Predict the runs of each model size from a fit to all other sizes.

        More than 8 sizes form 8 groups of neighbors. A fitted base is refitted too. A size is not held out if the other
        sizes do not identify a constant, for example the only size with low-precision runs.

        Returns:
            Relative errors of the losses by size, and the skipped sizes.
        """
        # one fold per size, or groups of neighboring sizes
        sizes = np.unique(self.runs["N"])
        errors, skipped = {}, {}
        for part in np.array_split(sizes, min(len(sizes), _FOLDS)):
            held = np.isin(self.runs["N"], part)
            size = float(np.exp(np.log(self.runs["N"][held]).mean()))
            reason = self._reason_to_keep(part)
            if reason:
                skipped[size] = reason
                continue
            problem, theta = self._refit_without(part)
            residuals = problem.with_runs(self._problem.runs.select(held)).residuals(theta)[0]
            errors[size] = np.expm1(residuals)
        return HoldOut(errors, skipped)

    def _refit_without(self, sizes: Array) -> tuple[Problem, Array]:
        """Refit all stages to the other sizes; return the problem and the coordinates of its minimum."""
        problem = self._problem.with_runs(self._problem.runs.select(~np.isin(self.runs["N"], sizes)))
        if self.base is not None:
            base, base_theta = self.base._refit_without(sizes)
            constants = base.law_at(base_theta).constants()
            # constants of the base are in counts of one: leave the units of the problem, replace them, and return
            law = problem.law.in_units(1 / problem.size, 1 / problem.tokens)
            law = law.with_constants({name: constants[name] for name in self._from_base})
            pinned = {name: constants[name] for name in problem.pinned if name in self._from_base}
            law, pinned = law.in_units(problem.size, problem.tokens), {**problem.pinned, **pinned}
            problem = dataclasses.replace(problem, law=law, pinned=pinned)
        return problem, solve(problem)[0]

    def __str__(self) -> str:
        lines = [f"{self.law.name} law {self.law.source}"]
        computed, constants = self.__dict__.get("intervals", {}), self.law.constants()
        for name in self.fitted_constants:
            if name in self.unidentified:
                lines.append(f"  {name:<10} not identified: {self.unidentified[name]}")
                continue
            interval = f"  95 % {computed[name][0]:.5g} to {computed[name][1]:.5g}" if name in computed else ""
            lines.append(f"  {name:<10} {constants[name]:.5g}{interval}")
        condition = f"condition number {self.condition_number:.1e}"
        lines.append(f"  mean error {self.mean_error:.3%} on its own runs, {condition}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)  # the dataclass repr would print unidentified constants

    def _flat_directions(self) -> dict[str, str]:
        """Return the constants that can move together, to first order, without any change of the losses."""
        values, vectors = np.linalg.eigh(self._hessian)
        flat = vectors[:, values < values[-1] / WORST_CONDITION]
        shares = np.abs(flat @ flat.T)  # the projection on all flat directions does not depend on their basis
        reasons = {}
        for i in np.flatnonzero(shares.diagonal() > _MIN_SHARE):
            name = self.names[i]
            others = [other for other, share in zip(self.names, shares[i], strict=True) if share > _MIN_SHARE]
            others.remove(name)
            pair = f"; only its combination with {' and '.join(others)} is" if others else ""
            reasons[name] = f"it is not identifiable from these runs{pair}"
        return reasons

    def _deviance(self, i: int, step: float) -> float:
        """Return twice the rise of the sum as constant i moves, scaled to chi-square with one degree of freedom."""
        ridge = self._ridge(i)
        _, straight = minimize(self._problem, self._theta + step * ridge, frozen=(i,), tolerance=COARSE)
        # the valley may bend away from a straight line, so follow it in stages as well
        theta = self._theta
        for _ in range(_PROFILE_STAGES):
            start = theta + step / _PROFILE_STAGES * ridge
            theta, in_stages = minimize(self._problem, start, frozen=(i,), tolerance=COARSE)
        return max(2 * (min(straight, in_stages) - self.objective) / self._scale, 0.0)

    def _ridge(self, i: int) -> Array:
        """Return the first-order change of all coordinates at their minimum as coordinate i moves by 1."""
        hessian = self._hessian
        others = [k for k in range(len(self._theta)) if k != i]
        change = np.zeros(len(self._theta))
        change[i] = 1.0
        if others:
            change[others] = -np.linalg.lstsq(hessian[np.ix_(others, others)], hessian[others, i], rcond=1e-12)[0]
        # Along nearly flat directions the linear estimate is far too long.
        return np.clip(change, -3.0, 3.0)

    @cached_property
    def _hessian(self) -> Array:
        return self._problem.hessian(self._theta)

    @cached_property
    def _scale(self) -> float:
        """E psi² / E psi' of the Huber loss, with psi' estimated over a width that contains half of the residuals."""
        size = np.abs(self.residuals)
        width = max(self.delta, float(np.median(size)))
        slope = float((size <= width).mean()) * self.delta / width
        power = float((np.minimum(size, self.delta) ** 2).mean())
        count = len(size)
        return max(power / slope * count / max(count - len(self.names), 1), 2 * ROUNDING)

    def _correlated(self, i: int) -> str:
        """Return a text with the constant most correlated with constant i, or an empty one."""
        covariance = np.linalg.pinv(self._hessian, rcond=1e-12)
        deviation = np.sqrt(np.maximum(np.diag(covariance), 1e-300))
        correlation = np.abs(covariance[i] / (deviation * deviation[i]))
        correlation[i] = 0.0
        other = int(correlation.argmax())
        return f"; it moves with {self.names[other]}" if correlation[other] > _MIN_CORRELATION else ""

    def _reason_to_keep(self, sizes: Array) -> str | None:
        """Return the reason that the other sizes do not suffice, or None."""
        held = np.isin(self.runs["N"], sizes)
        rest = ~held
        reason = None if self.base is None else self.base._reason_to_keep(sizes)
        if reason:
            return f"of the base, {reason}"
        if rest.sum() <= len(self.names):
            return f"{int(rest.sum())} runs are left for {len(self.names)} constants"
        if "alpha" in self.names and len(np.unique(self.runs["N"][rest])) < 3:
            return "fewer than three sizes are left to identify alpha, A and E"
        matters = [self._matters(selected) for selected in (held, rest)]
        if lost := [name for name, here, elsewhere in zip(self.names, *matters, strict=True) if here and not elsewhere]:
            return f"no other size identifies {' and '.join(lost)}"
        return None

    def _matters(self, selected: Array) -> Array:
        """Return for each constant whether it changes the losses of some runs; 16 bits count as unquantized."""
        problem = self._problem.with_runs(self._problem.runs.select(selected).without_full_precision_bits())
        return np.asarray(problem.residuals(self._theta)[1].any(axis=0))


def _percentiles(level: float) -> tuple[float, float]:
    """Return the percentiles at the ends of an interval."""
    if not 0.0 < level < 1.0:
        raise UserError(f"the level of an interval is between 0 and 1; given {level}")
    return 50 * (1 - level), 50 * (1 + level)


def _percentile_interval(values: Sequence[float], ends: tuple[float, float]) -> tuple[float, float]:
    """Return percentiles of values; between a finite and an infinite value, the outer one instead of NaN."""
    with np.errstate(invalid="ignore"):
        low, high = np.percentile(values, ends)
    if np.isnan(low):
        low = np.percentile(values, ends[0], method="lower")
    if np.isnan(high):
        high = np.percentile(values, ends[1], method="higher")
    return float(low), float(high)
