"""A fitted law with its evidence: intervals, hold-out errors, and which constants the runs do not tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from scantling.errors import UserError
from scantling.laws.fitting import ENOUGH, PERFECT, WORST_CONDITION, Problem, minimise, solve
from scantling.laws.law import Array, Law
from scantling.laws.runs import Runs

SAMPLES, LEVEL = 1000, 0.95
FACTOR, SHIFT = 1.5, 0.5
"""Runs tell a constant if they exclude FACTOR times as much and as little; one with a sign, SHIFT more and less."""
_CHI_SQUARE = 3.841458820694124
_TOGETHER = 0.95
_ALONG = 1e-6
"""Squared share of a flat direction from which on a constant counts as moving along it."""
_FOLDS = 8
_STAGES = 4
"""Of the way along which a profile is followed."""
_VANISHED = 0.01


@dataclass(frozen=True)
class HoldOut:
    """What runs of a size cost when they are predicted from those of all others.

    Attributes:
        errors: of each size that was left out, the relative errors of its runs' losses.
        skipped: sizes that were not left out, with the reason.
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
            raise UserError("no size could be left out: " + "; ".join(f"{k:.3g}: {v}" for k, v in self.skipped.items()))
        return np.concatenate(list(self.errors.values()))


@dataclass(frozen=True, repr=False)
class Fit:
    """A law fitted to runs. Constants, `loss`, `optimum` and whatever else the law has are attributes of the fit, too.

    Attributes:
        law: with the fitted constants.
        names: of the constants that were fitted, without those that follow another.
        residuals: log of the predicted over the measured loss, one a run.
        objective: the sum of Huber's losses.
        delta: where Huber's loss turns straight.
        runs: what was fitted to.
        base: the fit of the first stage, which has lent constants; None where there was none, or a law with its own.
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
    _lent: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        problem: Problem,
        theta: Array,
        total: float,
        runs: Runs,
        *,
        base: Law | Fit | None = None,
        lent: tuple[str, ...] = (),
    ) -> Fit:
        """The fit at the coordinates that were found, with the constants that a base has lent."""
        based = f" on a base ({base.source})" if base is not None else ""
        source = f"fitted to {runs.count} runs{based}"
        law = dataclasses.replace(problem.law_at(theta), source=source, fitted=runs.ranges())
        fitted = base if isinstance(base, Fit) else None
        return cls(
            law,
            problem.names,
            problem.residuals(theta)[0],
            total,
            problem.delta,
            runs,
            problem,
            theta,
            fitted,
            lent,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "law":
            raise AttributeError(name)
        return getattr(self.law, name)

    @property
    def mean_error(self) -> float:
        """Mean absolute relative error of the losses that were fitted to."""
        return float(np.abs(np.expm1(self.residuals)).mean())

    @property
    def fitted_constants(self) -> tuple[str, ...]:
        """All constants that the runs decided, those that follow another too."""
        return (*self.names, *self._problem.tie)

    @cached_property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % intervals by 1,000 bootstraps, computed when first asked for."""
        return self.bootstrap()

    def bootstrap(
        self, samples: int = SAMPLES, *, level: float = LEVEL, seed: int = 0
    ) -> dict[str, tuple[float, float]]:
        """Intervals of the fitted constants by refits to runs drawn with replacement.

        Constants of a base are held; their own uncertainty is not in it.

        Args:
            samples: refits.
            level: of the intervals, which are between percentiles.
            seed: of the draws.

        Returns:
            The low and the high end, by constant; infinite where refits leave the range of floats.

        Raises:
            UserError: samples below 1, or a level outside of 0 to 1.
        """
        ends = _ends(level)
        laws = [law.constants() for law in self.resampled(samples, seed=seed)]
        return {name: _between([law[name] for law in laws], ends) for name in self.fitted_constants}

    def resampled(self, samples: int = SAMPLES, *, seed: int = 0) -> list[Law]:
        """Laws refitted to runs drawn with replacement; percentiles of what they say are an interval of it.

        Args:
            samples: refits, each from the constants of this one.
            seed: of the draws.

        Returns:
            As many laws.

        Raises:
            UserError: samples below 1.
        """
        if isinstance(samples, bool) or not isinstance(samples, int | np.integer) or samples < 1:
            raise UserError(f"an interval takes 1 refit or more; given samples={samples}")
        draw = np.random.default_rng(seed)
        count = self.runs.count
        found = []
        for _ in range(samples):
            counts = np.bincount(draw.integers(count, size=count), minlength=count).astype(float)
            drawn = counts > 0
            problem = self._problem.on(self._problem.runs.take(drawn))
            theta, _ = minimise(problem, self._theta, counts=counts[drawn], slope=ENOUGH)
            found.append(self._problem.law_at(theta))
        return found

    def interval(
        self, what: Callable[[Law], float], samples: int = SAMPLES, *, level: float = LEVEL, seed: int = 0
    ) -> tuple[float, float]:
        """The interval of anything that a law says, such as `lambda law: law.optimum(compute=1e21).bits`.

        Args:
            what: of a law.
            samples: refits.
            level: of the interval.
            seed: of the draws.

        Returns:
            The low and the high end, in the unit of `what`.

        Raises:
            UserError: samples below 1, or a level outside of 0 to 1.
        """
        ends = _ends(level)
        return _between([what(law) for law in self.resampled(samples, seed=seed)], ends)

    @cached_property
    def condition_number(self) -> float:
        """Of the Gauss-Newton Hessian at the fit, by logarithms of the constants, in the middle of the runs."""
        jacobian = self._problem.residuals(self._theta)[1]
        return float(np.linalg.cond(jacobian) ** 2)

    def profile(self, name: str, steps: Array | None = None) -> tuple[Array, Array]:
        """The profile likelihood of a constant: how much worse the fit is with it moved, all others fitted anew.

        Args:
            name: of a fitted constant. A, B and such are those of the middle of the runs, where N and D are 1.
            steps: by how much the logarithm of the constant is moved, or the constant itself if it may be negative.

        Returns:
            The constant and its deviance at each step; below 3.84 is inside the 95 % interval.

        Raises:
            UserError: a constant that was not fitted.
        """
        if name not in self.names:
            raise UserError(f"'{name}' was not fitted; these were: {', '.join(self.names)}")
        place = self.names.index(name)
        steps = np.linspace(-FACTOR, FACTOR, 13) if steps is None else np.asarray(steps, float)
        moved = self._theta[place] + steps
        deviances = np.array([self._deviance(place, float(step)) for step in steps])
        return (moved if self._problem.signed(place) else np.exp(moved)), deviances

    @cached_property
    def unidentified(self) -> dict[str, str]:
        """The constants that the runs do not tell, with the reason: of a flat direction, or by profile likelihood."""
        found = self._flat()
        for place, name in enumerate(self.names):
            if name in found:
                continue
            signed = self._problem.signed(place)
            step = SHIFT if signed else np.log(FACTOR)
            more, less = (self._deviance(place, sign * step) < _CHI_SQUARE for sign in (1, -1))
            if more or less:
                words = (f"{SHIFT:g} more", f"{SHIFT:g} less") if signed else (f"× {FACTOR:g}", f"÷ {FACTOR:g}")
                also = " and ".join(word for word, open_ in zip(words, (more, less), strict=True) if open_)
                found[name] = f"the runs fit as well with it {also}{self._partner(place)}"
        for offset, scale in self.law.OFFSETS.items():
            if scale in found and offset in self.names:
                found[offset] = f"it stands beside {scale}, which the runs do not tell"
        if "E" in self.names and _VANISHED * self.runs["loss"].min() > self.law.E:
            for name in {"E", "alpha", "beta"} & set(self.names):
                found[name] = "E has gone to 0, and the exponents stand in for it"
        return found | {follower: found[leader] for follower, leader in self._problem.tie.items() if leader in found}

    def hold_out(self) -> HoldOut:
        """Leave out each size of model in turn, fit to the others, and predict it.

        More than 8 sizes are put into 8 groups of neighbours. A base that was fitted is fitted anew without the size. A
        size stays where the others do not tell a constant, such as the only one that has runs in few bits.

        Returns:
            Relative errors of the losses by size, and the sizes that cannot be left out.
        """
        sizes = np.unique(self.runs["N"])
        errors, skipped = {}, {}
        for part in np.array_split(sizes, min(len(sizes), _FOLDS)):
            held = np.isin(self.runs["N"], part)
            size = float(np.exp(np.log(self.runs["N"][held]).mean()))
            reason = self._cannot_do_without(part)
            if reason:
                skipped[size] = reason
                continue
            problem, theta = self._without(part)
            wrong = problem.on(self._problem.runs.take(held)).residuals(theta)[0]
            errors[size] = np.expm1(wrong)
        return HoldOut(errors, skipped)

    def _without(self, sizes: Array) -> tuple[Problem, Array]:
        """What is fitted to the runs of other sizes, and where its least sum lies."""
        problem = self._problem.on(self._problem.runs.take(~np.isin(self.runs["N"], sizes)))
        if self.base is not None:
            base, at = self.base._without(sizes)
            constants = base.law_at(at).constants()
            law = problem.law.in_units(1 / problem.size, 1 / problem.tokens)
            law = law.with_constants({name: constants[name] for name in self._lent})
            pinned = {name: constants[name] for name in problem.pinned if name in self._lent}
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
        return str(self)  # which does not print what is not identified

    def _flat(self) -> dict[str, str]:
        """The constants that can move together, to first order, without any change of the losses."""
        values, vectors = np.linalg.eigh(self._problem.curvature(self._theta, np.ones(self.runs.count)))
        flat = vectors[:, values < values[-1] / WORST_CONDITION]
        shares = np.abs(flat @ flat.T)  # of a projection, whatever the basis
        found = {}
        for place in np.flatnonzero(shares.diagonal() > _ALONG):
            others = [name for name, share in zip(self.names, shares[place], strict=True) if share > _ALONG]
            others.remove(self.names[place])
            apart = f" apart from {' and '.join(others)}" if others else ""
            found[self.names[place]] = f"the runs do not tell it{apart}"
        return found

    def _deviance(self, place: int, step: float) -> float:
        """Twice the rise of the sum over the scale that makes it chi-square with one degree of freedom."""
        along = self._ridge(place)
        _, straight = minimise(self._problem, self._theta + step * along, frozen=(place,), slope=ENOUGH)
        theta = self._theta
        for _ in range(_STAGES):  # the valley bends: where the straight way has left it, one that follows has not
            theta, followed = minimise(self._problem, theta + step / _STAGES * along, frozen=(place,), slope=ENOUGH)
        return max(2 * (min(straight, followed) - self.objective) / self._scale, 0.0)

    def _ridge(self, place: int) -> Array:
        """How the other coordinates go along, to first order, when one moves by 1."""
        hessian = self._problem.curvature(self._theta, np.ones(self.runs.count))
        others = [k for k in range(len(self._theta)) if k != place]
        found = np.zeros(len(self._theta))
        found[place] = 1.0
        if others:
            found[others] = -np.linalg.lstsq(hessian[np.ix_(others, others)], hessian[others, place], rcond=1e-12)[0]
        return np.clip(found, -3.0, 3.0)

    @cached_property
    def _scale(self) -> float:
        """E psi² / E psi' of Huber's loss, the latter over a width that holds half of the residuals."""
        far = np.abs(self.residuals)
        width = max(self.delta, float(np.median(far)))
        slope = float((far <= width).mean()) * self.delta / width
        power = float((np.minimum(far, self.delta) ** 2).mean())
        count = len(far)
        return max(power / slope * count / max(count - len(self.names), 1), 2 * PERFECT)

    def _partner(self, place: int) -> str:
        """In words, the constant with which this one moves, if there is one."""
        hessian = self._problem.curvature(self._theta, np.ones(self.runs.count))
        covariance = np.linalg.pinv(hessian, rcond=1e-12)
        spread = np.sqrt(np.maximum(np.diag(covariance), 1e-300))
        related = np.abs(covariance[place] / (spread * spread[place]))
        related[place] = 0.0
        other = int(related.argmax())
        return f"; it moves with {self.names[other]}" if related[other] > _TOGETHER else ""

    def _cannot_do_without(self, sizes: Array) -> str | None:
        """Why the runs of other sizes do not suffice."""
        held = np.isin(self.runs["N"], sizes)
        rest = ~held
        reason = None if self.base is None else self.base._cannot_do_without(sizes)
        if reason:
            return f"of the base, {reason}"
        if rest.sum() <= len(self.names):
            return f"{int(rest.sum())} runs are left for {len(self.names)} constants"
        if {"alpha"} <= set(self.names) and len(np.unique(self.runs["N"][rest])) < 3:
            return "fewer than three sizes are left to tell alpha, A and E from"
        told = [self._tells(chosen) for chosen in (held, rest)]
        if lost := [name for name, here, elsewhere in zip(self.names, *told, strict=True) if here and not elsewhere]:
            return f"no other size tells {' and '.join(lost)}"
        return None

    def _tells(self, chosen: Array) -> Array:
        """Whether the losses of some runs depend on each constant; 16 bits count as unquantised."""
        problem = self._problem.on(self._problem.runs.take(chosen).with_few_bits_alone())
        return np.asarray(problem.residuals(self._theta)[1].any(axis=0))


def _ends(level: float) -> tuple[float, float]:
    """The percentiles between which an interval of a level lies."""
    if not 0.0 < level < 1.0:
        raise UserError(f"the level of an interval is between 0 and 1; given {level}")
    return 50 * (1 - level), 50 * (1 + level)


def _between(values: Sequence[float], ends: tuple[float, float]) -> tuple[float, float]:
    """The percentiles of values; where one lies next to an infinite value, the one of both that is outside of it."""
    with np.errstate(invalid="ignore"):
        low, high = np.percentile(values, ends)
    if np.isnan(low):
        low = np.percentile(values, ends[0], method="lower")
    if np.isnan(high):
        high = np.percentile(values, ends[1], method="higher")
    return float(low), float(high)
