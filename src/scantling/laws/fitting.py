"""Huber's loss of the logarithm of the loss, made least.

    sum_i huber_delta(log L(N_i, D_i, ·) - log L_i)                      (Hoffmann et al., arXiv 2203.15556, Eq. 3)

Constants that cannot be negative are sought by their logarithms. Counts are in units of the runs' geometric means, so
that an amplitude is the size of its term in the middle of the runs and not at one parameter, far outside of them.

Starts come from a grid of exponents, for each of which the amplitudes are a linear problem (variable projection). From
the best of them BFGS goes on in coordinates in which the Gauss-Newton Hessian is the identity: the raw problem has a
condition number of about 1e11, in which quasi-Newton steps stop early; here they need about 20.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from scantling.laws.law import Array, Law
from scantling.laws.runs import Runs

_STEP = 1e-30
_FARTHEST = 80.0
WORST_CONDITION = 1e14
"""Of the Hessian; along directions that are flatter, no search goes."""
EXACT, ENOUGH = 1e-6, 1e-2
"""Slopes at which a search ends, for what is reported and for one of many refits; 1 is about one standard error off."""
PERFECT = 1e-16
"""Half the square of relative errors that are rounding."""
_ROUNDS = 3
_TRIED, _PLAUSIBLE = 6, 24
_EXPONENTS = (0.1, 0.25, 0.4, 0.6, 0.9)
_FLOORS = (0.02, 0.3, 0.5, 0.7, 0.85, 0.95)
_ENOUGH_FULL = 5


@dataclass(frozen=True)
class Problem:
    """What is fitted to what.

    Attributes:
        law: with the constants that are held, in units of `size` parameters and `tokens`.
        runs: in these units.
        names: of the constants that are sought.
        tie: constants that follow one of them.
        delta: where Huber's loss turns straight.
        size: the unit of parameters.
        tokens: the unit of tokens.
        pinned: amplitudes that are held while an exponent of theirs is sought, in counts of one.
    """

    law: Law
    runs: Runs
    names: tuple[str, ...]
    tie: Mapping[str, str]
    delta: float
    size: float
    tokens: float
    pinned: Mapping[str, float] = field(default_factory=dict)

    def signed(self, place: int) -> bool:
        """Whether a coordinate is the constant itself, not its logarithm."""
        return self.names[place] in self.law.OFFSETS

    def constants(self, theta: Any) -> dict[str, Any]:
        """Constants at coordinates, the last axis of which is that of `names`."""
        near = np.where(np.abs(np.real(theta)) < _FARTHEST, theta, np.sign(np.real(theta)) * _FARTHEST)
        found = {
            name: near[..., place] if self.signed(place) else np.exp(near[..., place])
            for place, name in enumerate(self.names)
        }
        found |= {follower: found[leader] for follower, leader in self.tie.items()}
        if self.pinned:
            law = self.law.with_constants({**found, **self.pinned}).in_units(self.size, self.tokens)
            found |= {name: getattr(law, name) for name in self.pinned}
        return found

    def coordinates(self, constants: Mapping[str, float]) -> Array:
        """Where constants lie."""
        return np.array(
            [constants[n] if self.signed(k) else np.log(max(constants[n], 1e-12)) for k, n in enumerate(self.names)]
        )

    def law_at(self, theta: Array) -> Law:
        """The law at coordinates, in counts of one parameter and one token."""
        law = self.law.with_constants({name: float(value) for name, value in self.constants(theta).items()})
        return law.in_units(1 / self.size, 1 / self.tokens).with_constants(self.pinned)

    def residuals(self, theta: Array) -> tuple[Array, Array]:
        """log L - log L_i of each run, (runs,), and its derivatives by the coordinates, (runs, names)."""
        moved = theta + 1j * _STEP * np.eye(len(theta))
        columns = {name: value[:, None] for name, value in self.constants(moved).items()}
        law = self.law.with_constants(columns)
        logs = np.log(law.evaluate(self.runs["N"], self.runs["D"], self.runs.variables()))
        return logs[0].real - np.log(self.runs["loss"]), logs.imag.T / _STEP

    def huber(self, residuals: Array) -> Array:
        """Huber's loss of each residual."""
        far = np.abs(residuals)
        return np.where(far <= self.delta, 0.5 * residuals**2, self.delta * (far - 0.5 * self.delta))

    def objective(self, theta: Array) -> float:
        """The sum that is made least."""
        found = np.log(self._real(theta)) - np.log(self.runs["loss"])
        total = float(self.huber(found).sum())
        return total if np.isfinite(total) else np.inf

    def curvature(self, theta: Array, counts: Array) -> Array:
        """The Gauss-Newton Hessian of the sum, (names, names)."""
        residuals, jacobian = self.residuals(theta)
        weights = counts * self.delta / np.maximum(np.abs(residuals), self.delta)
        found: Array = (jacobian * weights[:, None]).T @ jacobian
        return found

    def on(self, runs: Runs) -> Problem:
        """The same problem on some of its runs."""
        return replace(self, runs=runs)

    def _real(self, theta: Array) -> Any:
        law = self.law.with_constants(self.constants(theta))
        return law.evaluate(self.runs["N"], self.runs["D"], self.runs.variables())


def solve(problem: Problem) -> tuple[Array, float]:
    """The coordinates of the least sum, sought from several starts, and the sum."""
    with np.errstate(all="ignore"):
        scored = sorted(((problem.objective(theta), k, theta) for k, theta in enumerate(_starts(problem))))
    tried = [minimise(problem, theta, slope=ENOUGH) for _, _, theta in scored[:_TRIED]]
    return minimise(problem, min(tried, key=lambda found: found[1])[0])


def minimise(
    problem: Problem, theta: Array, *, counts: Array | None = None, frozen: Sequence[int] = (), slope: float = EXACT
) -> tuple[Array, float]:
    """The nearest minimum.

    Args:
        problem: what is fitted to what.
        theta: coordinates to begin at.
        counts: how often each run counts; None once.
        frozen: places of coordinates that stay.
        slope: at which the search ends, `EXACT` or `ENOUGH`.

    Returns:
        Coordinates, and the sum there.
    """
    from scipy.optimize import minimize

    counts = np.ones(problem.runs.count) if counts is None else counts
    free = [place for place in range(len(theta)) if place not in frozen]
    if not free:
        return theta, problem.objective(theta)
    last = np.inf
    with np.errstate(all="ignore"):
        for _ in range(_ROUNDS):
            hessian = problem.curvature(theta, counts)[np.ix_(free, free)]
            scale = max(float(counts @ problem.huber(problem.residuals(theta)[0])) / counts.sum(), PERFECT)
            if not np.isfinite(hessian).all():
                break
            values, vectors = np.linalg.eigh(hessian)
            basis = vectors * np.sqrt(scale / np.maximum(values, values[-1] / WORST_CONDITION + 1e-300))
            start = theta

            def sum_and_gradient(
                z: Array, start: Array = start, basis: Array = basis, scale: float = scale
            ) -> tuple[float, Array]:
                at = start.copy()
                at[free] += basis @ z
                residuals, jacobian = problem.residuals(at)
                total = float(counts @ problem.huber(residuals)) / scale
                gradient = (counts * np.clip(residuals, -problem.delta, problem.delta)) @ jacobian[:, free]
                if not (np.isfinite(total) and np.isfinite(gradient).all()):
                    return 1e12, np.zeros(len(free))
                return total, basis.T @ gradient / scale

            options = {"gtol": slope, "maxiter": 300}
            found = minimize(sum_and_gradient, np.zeros(len(free)), jac=True, method="BFGS", options=options)
            theta = theta.copy()
            theta[free] += basis @ found.x
            total = float(found.fun) * scale
            if slope > EXACT or not total < last * (1 - 1e-10):
                break
            last = total
        return theta, float(counts @ problem.huber(problem.residuals(theta)[0]))


def _starts(problem: Problem) -> Iterator[Array]:
    """Every start of the base with every start of what the law adds, of the bases that fit best."""
    names = {*problem.names, *problem.tie}
    held = {name: value for name, value in problem.law.constants().items() if name not in names}
    bases = list(_base_starts(problem, held)) if names & {"A", "B", "E", "alpha", "beta"} else [{}]
    for base, extra in product(bases, problem.law.starts(problem.runs)):
        found = {"power": 1.0, **_guesses(problem), **base, **extra}
        for follower, leader in problem.tie.items():
            found[leader] = found.get(leader, found.get(follower, 1.0))
        yield problem.coordinates(found)


def _guesses(problem: Problem) -> dict[str, float]:
    """Something for constants of which no start says anything: those that were freed."""
    return {name: 0.0 if problem.signed(place) else 1.0 for place, name in enumerate(problem.names)}


def _base_starts(problem: Problem, held: Mapping[str, float]) -> Iterator[dict[str, float]]:
    """A, B and E for a grid of exponents, from the runs at full precision where there are enough, best first."""
    whole = problem.runs.whole()
    runs = whole if whole.count >= _ENOUGH_FULL else problem.runs
    N, D, loss = runs["N"], runs["D"], runs["loss"]
    power = held.get("power", 1.0)
    tied = problem.tie.get("beta") == "alpha" or problem.tie.get("alpha") == "beta"
    found: list[tuple[float, int, dict[str, float]]] = []
    for floor, alpha, beta in product(_FLOORS, _EXPONENTS, _EXPONENTS):
        if tied and alpha != beta:
            continue
        E = held.get("E", floor * float(loss.min()))
        alpha, beta = held.get("alpha", alpha), held.get("beta", beta)
        above = np.maximum(loss - E, 1e-9) ** (1 / power)
        terms = np.stack([N**-alpha, D**-beta], 1)
        A, B = _amplitudes(terms, above, above ** (power - 1) / loss)
        pinned = problem.pinned
        A = pinned["A"] * problem.size**-alpha if "A" in pinned else held.get("A", A)
        B = pinned["B"] * problem.tokens**-beta if "B" in pinned else held.get("B", B)
        wrong = np.log(E + (terms @ np.array([A, B])) ** power) - np.log(loss)
        constants = {"A": A, "B": B, "E": E, "alpha": alpha, "beta": beta}
        found.append((float(problem.huber(wrong).sum()), len(found), constants))
    for _, _, constants in sorted(found)[:_PLAUSIBLE]:
        yield constants


def _amplitudes(terms: Array, above: Array, weights: Array) -> tuple[float, float]:
    """The two that bring their terms nearest, neither of them negative."""
    from scipy.optimize import nnls

    scaled = terms * weights[:, None]
    (A, B), _ = nnls(scaled, above * weights)
    least = 1e-3 * max(A, B, 1e-9)
    return max(float(A), least), max(float(B), least)
