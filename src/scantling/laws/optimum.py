"""Compute-optimal parameters, tokens and bits, and the critical number of tokens.

At bits P, let f multiply parameters, h multiply tokens and s be the speedup over 16 bits, so that training costs
6 N D / s(P). With N' = N f and D' = D h the loss is a function of N' and D' alone, and a budget C binds them by
N' D' = C f h s / 6: the best bits maximize f(P) h(P) s(P), for any A, B, E, exponents and C. For three equal factors
1 - exp(-P / gamma) and s = 16 / P, the optimum is P = x gamma with 3 x = e^x - 1, x = 1.9038136944.

With N given, with quantization after training or with inference in the budget, this no longer holds, and the loss
itself is minimized, over bits and, for each choice of bits, over N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from scantling.errors import UserError
from scantling.laws.inputs import FULL_PRECISION, Array, Values, scipy_optimize

if TYPE_CHECKING:
    from scantling.laws.law import Law

Speed = Callable[[float], float] | Mapping[Any, float]
"""Speedup of training over 16 bits: a function of bits, which may jump at whole numbers, or a mapping of bits or
schemes to speedups."""

BITS = (1.0, 32.0)
"""Range in which the best bits are searched."""
_SIZES = (1e2, 1e18)
_GRID_POINTS, _GRID_ROUNDS = 41, 6
_OVER_BUDGET = 1e100
"""Loss, per share of the budget that inference takes, of a choice that leaves nothing to train: above all others."""
_MAX_TOKENS = 1e40


@dataclass(frozen=True)
class Optimum:
    """The best model for a compute budget.

    Attributes:
        N: parameters.
        D: tokens.
        bits: training bits of all parts; None for a law of schemes.
        loss: predicted loss, nats per token.
        compute: compute spent, FLOPs at 16 bits; below the budget if more tokens would raise the loss.
        speed: speedup at these bits over 16.
        scheme: training scheme, for a law of schemes.
        warnings: values outside the fitted ranges, and parts that the law does not model.
    """

    N: float
    D: float
    bits: float | None
    loss: float
    compute: float
    speed: float
    scheme: str | None = None
    warnings: tuple[str, ...] = ()


def find_optimum(
    law: Law,
    *,
    compute: float,
    N: float | None,
    bits: float | None,
    speed: Speed | None,
    inference_tokens: float,
    post: float | None,
) -> Optimum:
    """Return the best model for a budget; `Law.optimum` describes the arguments."""
    search = _Search(law, compute, N, speed, inference_tokens, post)
    search.check(bits)
    if bits is not None:
        return search.best_at(bits)
    best = search.best_at(search.best_choice(), bits_are_free=True)
    if best.bits in BITS and law.modeled_parts() and not isinstance(speed, Mapping):
        edge = f"the best bits lie at the edge of the searched range, {best.bits:g}"
        return replace(best, warnings=(*best.warnings, edge))
    return best


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class _Search:
    """Search for the best model of one law and budget. A choice is a number of bits, or a scheme."""

    law: Law
    compute: float
    N: float | None
    speed: Speed | None
    inference_tokens: float
    post: float | None

    def check(self, bits: float | None) -> None:
        """Raise a UserError for options that are not numbers, or that the law does not model."""
        law, speed = self.law, self.speed
        given: dict[str, Any] = {"compute": self.compute, "N": self.N, "bits": bits, "post": self.post}
        for name, value in given.items():
            if (value is not None or name == "compute") and not (_is_number(value) and value > 0):
                raise UserError(f"{name} is a positive and finite number; given {value}")
        if not (_is_number(self.inference_tokens) and self.inference_tokens >= 0):
            raise UserError(f"inference_tokens is 0 or more; given {self.inference_tokens}")
        if self.post is not None and "post" not in law.VARIABLES:
            raise UserError(f"the {law.name} law does not model quantization after training; leave post out")
        if not (speed is None or callable(speed) or (isinstance(speed, Mapping) and speed)):
            raise UserError(f"speed is a function of bits, or a mapping of bits to speedups over 16; given {speed!r}")
        if infinite := [name for name, value in law.constants().items() if not math.isfinite(value)]:
            raise UserError(f"{infinite[0]} of this law exceeds the range of floats, so it has no computable optimum")
        has_schemes = "scheme" in law.VARIABLES
        if isinstance(speed, Mapping):
            if not has_schemes and not all(map(_is_number, speed)):
                raise UserError(f"the {law.name} law takes bits: speed={{bits: speedup over 16}}; given {speed!r}")
            if has_schemes and not all(isinstance(key, str) for key in speed):
                raise UserError(f"the {law.name} law takes schemes: speed={{scheme: speedup}} by name; given {speed!r}")
        if not has_schemes and not law.modeled_parts():
            # with bits after training, a speed is that of inference
            is_for_inference = self.inference_tokens > 0 and self.post is not None
            training = {
                "bits": bits is not None and bits < FULL_PRECISION,
                "speed": speed is not None and not is_for_inference,
            }
            if names := [name for name, is_given in training.items() if is_given]:
                raise UserError(
                    f"this {law.name} law does not model low-precision training; leave {' and '.join(names)} out"
                )
        if has_schemes and (bits is not None or not isinstance(speed, Mapping)):
            raise UserError("a law of schemes takes no bits; give speed={scheme: speedup over 16 bits} for each choice")

    def best_choice(self) -> Any:
        """Return the bits, or the scheme, with the smallest loss."""
        has_schemes = "scheme" in self.law.VARIABLES
        if not has_schemes and not self.law.modeled_parts():
            return float(FULL_PRECISION)
        is_joint = self.N is None and self._has_closed_form() and not has_schemes
        # With N and D free, f h s alone ranks the bits, without a search for N.
        cost = self._joint_cost if is_joint else lambda choice: self.best_at(choice, quiet=True).loss
        if isinstance(self.speed, Mapping):
            return min(self.speed, key=cost)
        integers = np.arange(BITS[0], BITS[1] + 1)  # speeds may jump there
        bits = minimize_on_grid(lambda row: np.array([cost(float(each)) for each in row]), *BITS, extra=integers)
        return self._polish(bits) if is_joint and self.speed is None else bits

    def best_at(self, choice: Any, *, quiet: bool = False, bits_are_free: bool = False) -> Optimum:
        """Return the optimum for one choice.

        Args:
            choice: bits or a scheme.
            quiet: return a huge or infinite loss if there is no optimum, instead of raising; log nothing.
            bits_are_free: True if the user left the bits open, for the wording of errors.
        """
        variables = self._variables(choice)
        speed = self._speed(choice)
        inference_speed = self._speed(choice if self.post is None else self.post) if self.inference_tokens else math.inf
        per_parameter = 2 * self.inference_tokens / inference_speed

        def tokens(N: Any) -> Any:
            return (self.compute - per_parameter * N) * speed / (6 * N)

        def loss(log_N: Array) -> Array:
            N, D = np.exp(log_N), tokens(np.exp(log_N))
            # Sizes whose inference uses up the budget have no tokens; their loss is set to infinity below.
            values = self.law.evaluate(N, np.maximum(D, 1e-30), variables)
            return np.where(D > 0, values, math.inf)

        if self.N is not None:
            N = self.N
        elif self._has_closed_form():
            N = math.exp(self._best_log_N(variables, speed))
        else:
            N = math.exp(minimize_on_grid(loss, *np.log(_SIZES)))
        D = float(tokens(N))
        converges = bool(self.law.converges(variables))
        # Rank bad choices: worse the more they exceed the budget, and worst if they diverge.
        if quiet and not (D > 0 and converges):
            worst = _OVER_BUDGET * per_parameter * N / self.compute if converges else math.inf
            return Optimum(N, 0.0, None, worst, self.compute, speed)
        if D <= 0:
            needed = f"{per_parameter * N:.3g} FLOPs of the {self.compute:.3g} given"
            fewer = "inference_tokens" if bits_are_free else "inference_tokens or bits"
            raise UserError(f"inference alone costs {needed}: raise compute, or take fewer {fewer}")
        if not converges:
            law = f"the {self.law.name} law ({self.law.source})"
            raise UserError(f"no optimum at {choice} bits: training diverges there by {law}; take more bits")
        if self.N is not None and self.post is not None:
            # a fixed size may have more budget than tokens that help
            D = min(D, turning_point(self.law, N, variables, max_tokens=D))
        best_loss = float(self.law.evaluate(N, D, variables))
        bits = {name: value for name, value in variables.items() if not isinstance(value, str)}
        warnings = () if quiet else (*self.law.warn_outside(N=N, D=D, **bits), *self._unmodeled_parts())
        spent = 6 * N * D / speed + per_parameter * N
        scheme = choice if isinstance(choice, str) else None
        return Optimum(N, D, None if scheme else float(choice), best_loss, spent, speed, scheme, warnings)

    def _unmodeled_parts(self) -> tuple[str, ...]:
        """Return warnings for parts whose precision the law does not model."""
        modeled = self.law.modeled_parts()
        missing = [part for part in self.law.PARTS if part not in modeled]
        if not (modeled and missing):
            return ()
        return (f"the law models {' and '.join(modeled)}; low precision of {' and '.join(missing)} counts as free",)

    def _has_closed_form(self) -> bool:
        return self.post is None and not self.inference_tokens

    def _best_log_N(self, variables: Values, speed: float) -> float:
        """Return log N at which both terms fall equally fast along N D = compute × speed / 6."""
        # d/dlog N of A N'^-alpha + B D'^-beta = 0 with log N' + log D' fixed:
        # alpha A N'^-alpha = beta B D'^-beta
        law = self.law
        eff_N, eff_D = (max(float(each), 1e-300) for each in law.efficiencies(variables))
        product = math.log(self.compute * speed / 6 * eff_N * eff_D)  # log N' D'
        ratio = math.log(law.alpha * law.A) - math.log(law.beta * law.B)
        return (ratio + law.beta * product) / (law.alpha + law.beta) - math.log(eff_N)

    def _joint_cost(self, bits: float) -> float:
        """Return -log(f h s), which the best bits minimize if N and D are free."""
        return -float(np.real(self._log_product(bits)))

    def _log_product(self, bits: Any) -> Any:
        eff_N, eff_D = self.law.efficiencies(self._variables(bits))
        if np.real(eff_N) <= 0 or np.real(eff_D) <= 0:
            return -math.inf
        return np.log(eff_N) + np.log(eff_D) + np.log(self._speed(bits))

    def _polish(self, bits: float) -> float:
        """Polish a minimum by root-finding on the derivative; values alone give half the digits."""

        def slope(at: float) -> float:
            return float(np.imag(self._log_product(at + 1e-30j))) / 1e-30

        low, high = max(BITS[0], bits - 1e-3), min(BITS[1], bits + 1e-3)
        # Without a change of sign the best bits are at an edge of the range.
        if not slope(low) > 0 > slope(high):
            return bits
        return float(scipy_optimize().brentq(slope, low, high, xtol=1e-13))

    def _variables(self, choice: Any) -> dict[str, Any]:
        if isinstance(choice, str):
            return self.law.parse_variables({"scheme": choice})
        variables = self.law.parse_variables({} if self.post is None else {"post": self.post})
        return {**variables, **{part: np.asarray(choice) for part in self.law.modeled_parts()}}

    def _speed(self, choice: Any) -> Any:
        if self.speed is None:
            return FULL_PRECISION / choice
        if isinstance(self.speed, Mapping):
            if choice not in self.speed:
                raise UserError(f"speed has no entry for {choice}; it has {', '.join(map(str, self.speed))}")
            value = self.speed[choice]
        else:
            value = self.speed(choice)
        if not (_is_number(value) or np.iscomplexobj(value)) or not np.real(value) > 0:
            raise UserError(f"speed is a speedup over 16 bits, above 0; it returned {value} for {choice}")
        return value


def minimize_on_grid(
    function: Callable[[Array], Array], low: float, high: float, extra: Sequence[float] | Array = ()
) -> float:
    """Return the argument with the smallest value of a function of one variable, from ever finer grids.

    Args:
        function: maps a row of points to their values; may jump or be infinite.
        low, high: ends of the searched range.
        extra: points of the first grid, in addition to equidistant ones.
    """
    argument, smallest = low, math.inf
    points = np.union1d(np.linspace(low, high, _GRID_POINTS), extra)
    for _ in range(_GRID_ROUNDS):
        values = function(points)
        best = int(np.nanargmin(values))
        if values[best] < smallest:
            argument, smallest = float(points[best]), float(values[best])
        # The next grid spans the neighbors of the best point.
        points = np.linspace(points[max(best - 1, 0)], points[min(best + 1, len(points) - 1)], _GRID_POINTS)
    return argument


def critical_tokens(law: Law, N: float, **variables: Any) -> float:
    """Return the tokens beyond which more training raises the loss after quantization; infinite if it never does.

    Warns if they lie outside the fitted ranges.

    Args:
        law: a law with a degradation after training.
        N: parameters.
        variables: variables of the law, including `post`.

    Raises:
        UserError: if N or bits are not one positive number each, or if training diverges.
    """
    if not (isinstance(N, int | float | np.number) and np.isfinite(N) and N > 0):
        raise UserError(f"N is one number, positive and finite; given {N!r}")
    given = law.parse_variables(variables)
    if arrays := [name for name, value in given.items() if np.ndim(value)]:
        raise UserError(f"critical_tokens takes one number of bits for each part; given several as {arrays[0]}")
    if not law.converges(given):
        raise UserError(
            f"no critical tokens at these bits: training diverges there by the {law.name} law ({law.source})"
        )
    tokens = turning_point(law, N, given)
    if 1.0 < tokens < math.inf:
        law.warn_outside(N=N, D=tokens, **given)
    return tokens


def turning_point(law: Law, N: float, variables: Values, max_tokens: float = _MAX_TOKENS) -> float:
    """Return the tokens at which the loss starts to rise, infinite if it falls up to `max_tokens`.

    In every law here the fall slows down and the rise does not, so there is one such point.
    """

    def slope(log_tokens: float) -> float:
        tokens = math.exp(log_tokens)
        return float(np.imag(law.evaluate(N, tokens + 1e-30j, variables)) / 1e-30) * tokens

    low, high = 0.0, math.log(max_tokens)
    # The loss still falls at the largest number of tokens.
    if slope(high) <= 0:
        return math.inf
    if slope(low) >= 0:
        return 1.0
    return math.exp(scipy_optimize().brentq(slope, low, high, xtol=1e-12))
