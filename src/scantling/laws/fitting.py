"""Minimize the Huber loss of the log-loss residuals.

    sum_i huber_delta(log L(N_i, D_i, ·) - log L_i)                      (Hoffmann et al., arXiv 2203.15556, Eq. 3)

Constants that cannot be negative are optimized as logarithms. Counts are in units of the runs' geometric means, so an
amplitude is the size of its term in the middle of the runs and not at one parameter, far outside of them.

Starting points come from a grid of exponents; for fixed exponents the amplitudes are a linear problem (variable
projection). BFGS continues from the best ones in coordinates in which the Gauss-Newton Hessian is the identity: the raw
problem has a condition number of about 1e11, at which quasi-Newton steps stop early; here they need about 20.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from scantling.laws.inputs import Array, scipy_optimize
from scantling.laws.runs import Runs

if TYPE_CHECKING:
    from scantling.laws.law import Law

_STEP = 1e-30
_MAX_COORDINATE = 80.0
WORST_CONDITION = 1e14
"""Condition number of the Hessian; the search does not follow flatter directions."""
PRECISE, COARSE = 1e-6, 1e-2
"""Gradient norms that end a search, for reported fits and for refits; 1 is about one standard error off."""
ROUNDING = 1e-16
"""Half the square of a relative error from rounding."""
_ROUNDS = 3
_STARTS, _BASE_STARTS = 6, 24
_EXPONENTS = (0.1, 0.25, 0.4, 0.6, 0.9)
_FLOORS = (0.02, 0.3, 0.5, 0.7, 0.85, 0.95)
"""First values of E as shares of the smallest loss."""
_MIN_FULL_PRECISION = 5


@dataclass(frozen=True)
class Problem:
    """A law, runs, and the constants to fit. Coordinates theta are the constants or their logarithms.

    Attributes:
        law: the law with its fixed constants, in units of `size` parameters and `tokens`.
        runs: the runs in these units.
        names: fitted constants.
        tie: constants that equal one of them.
        delta: residual at which the Huber loss turns linear.
        size: unit of parameters.
        tokens: unit of tokens.
        pinned: fixed amplitudes with a fitted exponent, in counts of one.
    """

    law: Law
    runs: Runs
    names: tuple[str, ...]
    tie: Mapping[str, str]
    delta: float
    size: float
    tokens: float
    pinned: Mapping[str, float] = field(default_factory=dict)

    def is_signed(self, name: str) -> bool:
        """Return True if the coordinate is the constant itself, not its logarithm."""
        return name in self.law.OFFSETS

    def constants(self, theta: Any) -> dict[str, Any]:
        """Return constants at coordinates of shape (..., names)."""
        limit = np.sign(np.real(theta)) * _MAX_COORDINATE
        # Hold a coordinate at e^80 before the constant overflows; its derivative is then 0.
        near = np.where(np.abs(np.real(theta)) < _MAX_COORDINATE, theta, limit)
        constants = {
            name: near[..., i] if self.is_signed(name) else np.exp(near[..., i]) for i, name in enumerate(self.names)
        }
        constants |= {follower: constants[leader] for follower, leader in self.tie.items()}
        # Pinned amplitudes are given in counts of one: convert them with the exponents at this point.
        if self.pinned:
            law = self.law.with_constants({**constants, **self.pinned}).in_units(self.size, self.tokens)
            constants |= {name: getattr(law, name) for name in self.pinned}
        return constants

    def coordinates(self, constants: Mapping[str, float]) -> Array:
        """Return the coordinates of constants."""
        return np.array([constants[n] if self.is_signed(n) else np.log(max(constants[n], 1e-12)) for n in self.names])

    def law_at(self, theta: Array) -> Law:
        """Return the law at coordinates, in counts of one parameter and one token."""
        law = self.law.with_constants({name: float(value) for name, value in self.constants(theta).items()})
        return law.in_units(1 / self.size, 1 / self.tokens).with_constants(self.pinned)

    def residuals(self, theta: Array) -> tuple[Array, Array]:
        """Return log L - log L_i, (runs,), and its derivatives by the coordinates, (runs, names)."""
        # row k of the identity moves coordinate k, so `logs` has shape (names, runs)
        moved = theta + 1j * _STEP * np.eye(len(theta))
        columns = {name: value[:, None] for name, value in self.constants(moved).items()}
        logs = np.log(self._losses(columns))
        return logs[0].real - np.log(self.runs["loss"]), logs.imag.T / _STEP

    def huber(self, residuals: Array) -> Array:
        """Return the Huber loss of each residual."""
        size = np.abs(residuals)
        return np.where(size <= self.delta, 0.5 * residuals**2, self.delta * (size - 0.5 * self.delta))

    def objective(self, theta: Array) -> float:
        """Return the sum of Huber losses; infinite if it is not a number."""
        residuals = np.log(self._losses(self.constants(theta))) - np.log(self.runs["loss"])
        total = float(self.huber(residuals).sum())
        return total if np.isfinite(total) else np.inf

    def hessian(self, theta: Array, counts: Array | None = None) -> Array:
        """Return the Gauss-Newton Hessian of the sum, (names, names). Each run counts `counts` times, or once."""
        residuals, jacobian = self.residuals(theta)
        # Huber weights: 1 up to delta, delta / |residual| beyond
        weights = (1.0 if counts is None else counts) * self.delta / np.maximum(np.abs(residuals), self.delta)
        hessian: Array = (jacobian * weights[:, None]).T @ jacobian
        return hessian

    def with_runs(self, runs: Runs) -> Problem:
        """Return the same problem with some of its runs."""
        return replace(self, runs=runs)

    def _losses(self, constants: Mapping[str, Any]) -> Any:
        law = self.law.with_constants(constants)
        return law.evaluate(self.runs["N"], self.runs["D"], self.runs.variables())


def solve(problem: Problem) -> tuple[Array, float]:
    """Search the global minimum from several starts; return its coordinates and the sum."""
    with np.errstate(all="ignore"):
        # k breaks ties: arrays have no order.
        scored = sorted(((problem.objective(theta), k, theta) for k, theta in enumerate(_starts(problem))))
    # Coarse searches select the basin; one precise search finishes it.
    minima = [minimize(problem, theta, tolerance=COARSE) for _, _, theta in scored[:_STARTS]]
    return minimize(problem, min(minima, key=lambda minimum: minimum[1])[0])


def minimize(
    problem: Problem,
    theta: Array,
    *,
    counts: Array | None = None,
    frozen: Sequence[int] = (),
    tolerance: float = PRECISE,
) -> tuple[Array, float]:
    """Return the nearest local minimum.

    Args:
        problem: the law, runs and constants.
        theta: first coordinates.
        counts: multiplicity of each run; None counts each once.
        frozen: indices of coordinates that do not change.
        tolerance: gradient norm that ends the search, `PRECISE` or `COARSE`.

    Returns:
        Coordinates, and the sum there.
    """
    scipy = scipy_optimize()
    counts = np.ones(problem.runs.count) if counts is None else counts
    free = [i for i in range(len(theta)) if i not in frozen]
    if not free:
        return theta, problem.objective(theta)
    last = np.inf
    with np.errstate(all="ignore"):
        for _ in range(_ROUNDS):
            hessian = problem.hessian(theta, counts)[np.ix_(free, free)]
            scale = max(float(counts @ problem.huber(problem.residuals(theta)[0])) / counts.sum(), ROUNDING)
            if not np.isfinite(hessian).all():
                break
            # coordinates z, theta = start + basis z, in which the Hessian is the identity
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
                # The derivative of Huber's loss is the residual, clipped to delta.
                gradient = (counts * np.clip(residuals, -problem.delta, problem.delta)) @ jacobian[:, free]
                if not (np.isfinite(total) and np.isfinite(gradient).all()):
                    # A high plateau outside of the domain makes the line search turn back.
                    return 1e12, np.zeros(len(free))
                return total, basis.T @ gradient / scale

            options = {"gtol": tolerance, "maxiter": 300}
            minimum = scipy.minimize(sum_and_gradient, np.zeros(len(free)), jac=True, method="BFGS", options=options)
            theta = theta.copy()
            theta[free] += basis @ minimum.x
            total = float(minimum.fun) * scale
            # Repeat in the basis of the new point while the sum falls.
            if tolerance > PRECISE or not total < last * (1 - 1e-10):
                break
            last = total
        return theta, float(counts @ problem.huber(problem.residuals(theta)[0]))


def _starts(problem: Problem) -> Iterator[Array]:
    """Yield the product of the base's best starts and the law's guesses of its other constants."""
    names = {*problem.names, *problem.tie}
    held = {name: value for name, value in problem.law.constants().items() if name not in names}
    bases = list(_base_starts(problem, held)) if names & {"A", "B", "E", "alpha", "beta"} else [{}]
    defaults = {name: 0.0 if problem.is_signed(name) else 1.0 for name in problem.names}  # for constants set free
    for base, extra in product(bases, problem.law.initial_guesses(problem.runs)):
        constants = {"power": 1.0, **defaults, **base, **extra}
        for follower, leader in problem.tie.items():
            constants[leader] = constants.get(leader, constants.get(follower, 1.0))
        yield problem.coordinates(constants)


def _base_starts(problem: Problem, held: Mapping[str, float]) -> Iterator[dict[str, float]]:
    """Yield A, B and E for a grid of exponents, best first, from the full-precision runs if there are enough."""
    full = problem.runs.full_precision()
    runs = full if full.count >= _MIN_FULL_PRECISION else problem.runs
    N, D, loss = runs["N"], runs["D"], runs["loss"]
    power = held.get("power", 1.0)
    tied = problem.tie.get("beta") == "alpha" or problem.tie.get("alpha") == "beta"
    scored: list[tuple[float, int, dict[str, float]]] = []
    for floor, alpha, beta in product(_FLOORS, _EXPONENTS, _EXPONENTS):
        if tied and alpha != beta:
            continue
        E = held.get("E", floor * float(loss.min()))
        alpha, beta = held.get("alpha", alpha), held.get("beta", beta)
        # (loss - E)^(1 / power) = A N^-alpha + B D^-beta is linear in A and B; the weights make errors relative
        target = np.maximum(loss - E, 1e-9) ** (1 / power)
        terms = np.stack([N**-alpha, D**-beta], 1)  # (runs, 2)
        A, B = _amplitudes(terms, target, target ** (power - 1) / loss)
        pinned = problem.pinned
        A = pinned["A"] * problem.size**-alpha if "A" in pinned else held.get("A", A)
        B = pinned["B"] * problem.tokens**-beta if "B" in pinned else held.get("B", B)
        residuals = np.log(E + (terms @ np.array([A, B])) ** power) - np.log(loss)
        constants = {"A": A, "B": B, "E": E, "alpha": alpha, "beta": beta}
        scored.append((float(problem.huber(residuals).sum()), len(scored), constants))
    for _, _, constants in sorted(scored)[:_BASE_STARTS]:
        yield constants


def _amplitudes(terms: Array, target: Array, weights: Array) -> tuple[float, float]:
    """Return the positive amplitudes of the weighted least-squares fit."""
    (A, B), _ = scipy_optimize().nnls(terms * weights[:, None], target * weights)
    # The search takes logarithms of the amplitudes, so none may be 0.
    least = 1e-3 * max(A, B, 1e-9)
    return max(float(A), least), max(float(B), least)
