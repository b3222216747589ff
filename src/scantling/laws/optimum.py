"""What to train with a budget: parameters, tokens and bits.

At bits P, let f multiply parameters, h multiply tokens and s be the speed relative to 16 bits, so that training costs
6 N D / s(P). With N' = N f and D' = D h the loss is a function of N' and D' alone, which a budget C binds by
N' D' = C f h s / 6: the best bits are those of the largest f(P) h(P) s(P), whatever A, B, E, the exponents and C. For
three equal factors 1 - exp(-P / gamma) and s = 16 / P they are x gamma with 3 x = e^x - 1, x = 1.9038136944.

Where N is given, weights are quantised afterwards or inference is paid for, this no longer holds, and the loss itself
is minimised, over bits and within them over N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scantling.errors import UserError
from scantling.laws.law import Array, Law

Speed = Callable[[float], float] | Mapping[Any, float]
"""By how much faster than at 16 bits a model trains: a function of bits, which may jump at whole ones, or a mapping of
bits or schemes."""

BITS = (1.0, 32.0)
"""Between which bits are sought."""
_SIZES = (1e2, 1e18)
_POINTS, _ROUNDS = 41, 6
_UNPAID = 1e100
"""Times what inference takes of the budget: the loss, above all others, of a choice that leaves nothing to train."""


@dataclass(frozen=True)
class Optimum:
    """The best that a budget buys.

    Attributes:
        N: parameters.
        D: tokens.
        bits: of all parts in training; None for a law of schemes.
        loss: there, nats a token.
        compute: spent, FLOPs at 16 bits; below the budget where more tokens would hurt.
        speed: at these bits, relative to 16.
        scheme: of a law of schemes.
        warnings: what lies outside the runs that the law was fitted on.
    """

    N: float
    D: float
    bits: float | None
    loss: float
    compute: float
    speed: float
    scheme: str | None = None
    warnings: tuple[str, ...] = ()


def optimum(
    law: Law,
    *,
    compute: float,
    N: float | None,
    bits: float | None,
    speed: Speed | None,
    inference_tokens: float,
    post: float | None,
) -> Optimum:
    """The optimum of `Law.optimum`, which describes the arguments."""
    given: dict[str, Any] = {"compute": compute, "N": N, "bits": bits, "post": post}
    for name, value in given.items():
        if (value is not None or name == "compute") and not (_is_number(value) and value > 0):
            raise UserError(f"{name} is a positive and finite number; given {value}")
    if not (_is_number(inference_tokens) and inference_tokens >= 0):
        raise UserError(f"inference_tokens is 0 or more; given {inference_tokens}")
    if post is not None and "post" not in law.VARIABLES:
        raise UserError(f"the {law.name} law says nothing of quantisation after training; leave post out")
    if not (speed is None or callable(speed) or (isinstance(speed, Mapping) and speed)):
        raise UserError(f"speed is a function of bits, or a mapping of bits to speeds relative to 16; given {speed!r}")
    if endless := [name for name, value in law.constants().items() if not math.isfinite(value)]:
        raise UserError(f"{endless[0]} of this law is more than a float holds, so that no optimum of it can be told")
    of_schemes = "scheme" in law.VARIABLES
    if isinstance(speed, Mapping):
        if not of_schemes and not all(map(_is_number, speed)):
            raise UserError(f"the {law.name} law is of bits: speed={{bits: speed relative to 16}}; given {speed!r}")
        if of_schemes and not all(isinstance(key, str) for key in speed):
            raise UserError(f"the {law.name} law is of schemes: speed={{scheme: speed}} by name; given {speed!r}")
    if not of_schemes and not law.parts():
        serves_post = inference_tokens > 0 and post is not None  # at the speed of these bits
        of_training = {"bits": bits is not None and bits < 16, "speed": speed is not None and not serves_post}
        if few := [name for name, is_given in of_training.items() if is_given]:
            raise UserError(
                f"this {law.name} law does not say what few bits in training cost; leave {' and '.join(few)} out"
            )
    budget = _Budget(law, compute, N, speed, inference_tokens, post)
    if of_schemes and (bits is not None or not isinstance(speed, Mapping)):
        raise UserError("a law of schemes takes no bits, but speed={scheme: speed relative to 16 bits} of each choice")
    if bits is not None:
        return budget.best_at(bits)
    best = budget.best_at(budget.best_choice(), sought=True)
    if best.bits in BITS and law.parts() and not isinstance(speed, Mapping):
        edge = f"the best bits lie at the edge of what is sought, {best.bits:g}"
        return replace(best, warnings=(*best.warnings, edge))
    return best


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class _Budget:
    law: Law
    compute: float
    N: float | None
    speed: Speed | None
    inference_tokens: float
    post: float | None

    def best_choice(self) -> Any:
        """Bits, or the scheme, of the smallest loss."""
        if "scheme" not in self.law.VARIABLES and not self.law.parts():
            return 16.0
        free = self.N is None and self._closed() and "scheme" not in self.law.VARIABLES
        cost = self._waste if free else lambda at: self.best_at(at, quiet=True).loss
        if isinstance(self.speed, Mapping):
            return min(self.speed, key=cost)
        whole = np.arange(BITS[0], BITS[1] + 1)  # where speeds jump, if they do
        found = zoom(lambda values: np.array([cost(float(each)) for each in values]), *BITS, also=whole)
        return self._polished(found) if free and self.speed is None else found

    def best_at(self, at: Any, *, quiet: bool = False, sought: bool = False) -> Optimum:
        """The optimum at these bits, or under this scheme; if quiet, a huge loss stands for none."""
        variables = self._variables(at)
        rate = self._rate(at)
        served = self._rate(self.post if self.post is not None else at) if self.inference_tokens else math.inf
        per_parameter = 2 * self.inference_tokens / served

        def tokens(N: Any) -> Any:
            return (self.compute - per_parameter * N) * rate / (6 * N)

        def loss(log_N: Array) -> Array:
            N, D = np.exp(log_N), tokens(np.exp(log_N))
            found = self.law.evaluate(N, np.maximum(D, 1e-30), variables)
            return np.where(D > 0, found, math.inf)

        if self.N is not None:
            N = self.N
        else:
            N = math.exp(self._best_size(variables, rate) if self._closed() else zoom(loss, *np.log(_SIZES)))
        D = float(tokens(N))
        usable = bool(self.law.trains(variables))
        if quiet and not (D > 0 and usable):
            worst = _UNPAID * per_parameter * N / self.compute if usable else math.inf
            return Optimum(N, 0.0, None, worst, self.compute, rate)
        if D <= 0:
            needed = f"{per_parameter * N:.3g} FLOPs of the {self.compute:.3g} given"
            fewer = "inference_tokens" if sought else "inference_tokens or bits"
            raise UserError(f"inference alone costs {needed}: raise compute, or take fewer {fewer}")
        if not usable:
            law = f"the {self.law.name} law ({self.law.source})"
            raise UserError(f"there is no optimum at {at} bits: by {law} training diverges there. Take more")
        if self.N is not None and self.post is not None:
            from scantling.laws.critical import turning_tokens

            D = min(D, turning_tokens(self.law, N, variables, most=D))
        found = float(self.law.evaluate(N, D, variables))
        ranges = {name: value for name, value in variables.items() if not isinstance(value, str)}
        warnings = () if quiet else (*self.law.warn_outside(N=N, D=D, **ranges), *self._unpriced())
        spent = 6 * N * D / rate + per_parameter * N
        scheme = at if isinstance(at, str) else None
        return Optimum(N, D, None if scheme else float(at), found, spent, rate, scheme, warnings)

    def _unpriced(self) -> tuple[str, ...]:
        """That the law does not know what few bits of some part cost, in words."""
        priced = self.law.parts()
        missing = [part for part in self.law.PARTS if part not in priced]
        if not (priced and missing):
            return ()
        return (
            f"the law prices {' and '.join(priced)}; few bits of {' and '.join(missing)} are taken to cost nothing",
        )

    def _closed(self) -> bool:
        return self.post is None and not self.inference_tokens

    def _best_size(self, variables: Mapping[str, Any], rate: float) -> float:
        """log N where both terms fall as fast along N D = compute × rate / 6."""
        law = self.law
        eff_N, eff_D = (max(float(each), 1e-300) for each in law.efficiencies(variables))
        product = math.log(self.compute * rate / 6 * eff_N * eff_D)
        ratio = math.log(law.alpha * law.A) - math.log(law.beta * law.B)
        return (ratio + law.beta * product) / (law.alpha + law.beta) - math.log(eff_N)

    def _waste(self, bits: float) -> float:
        """What the best bits make least: minus the logarithm of f h s."""
        return float(np.real(self._log_value(bits)) * -1)

    def _log_value(self, bits: Any) -> Any:
        eff_N, eff_D = self.law.efficiencies(self._variables(bits))
        if np.real(eff_N) <= 0 or np.real(eff_D) <= 0:
            return -math.inf
        return np.log(eff_N) + np.log(eff_D) + np.log(self._rate(bits))

    def _polished(self, bits: float) -> float:
        """The zero of the slope next to a minimum that was found by its value, which tells half of the digits."""
        from scipy.optimize import brentq

        def slope(at: float) -> float:
            return float(np.imag(self._log_value(at + 1e-30j))) / 1e-30

        low, high = max(BITS[0], bits - 1e-3), min(BITS[1], bits + 1e-3)
        return float(brentq(slope, low, high, xtol=1e-13)) if slope(low) > 0 > slope(high) else bits

    def _variables(self, at: Any) -> dict[str, Any]:
        if isinstance(at, str):
            return self.law._variables({"scheme": at})
        found = self.law._variables({} if self.post is None else {"post": self.post})
        return {**found, **{part: np.asarray(at) for part in self.law.parts()}}

    def _rate(self, at: Any) -> Any:
        if self.speed is None:
            return 16.0 / at
        if isinstance(self.speed, Mapping):
            if at not in self.speed:
                raise UserError(f"speed has no entry for {at}; it has {', '.join(map(str, self.speed))}")
            rate = self.speed[at]
        else:
            rate = self.speed(at)
        if not (_is_number(rate) or np.iscomplexobj(rate)) or not np.real(rate) > 0:
            raise UserError(f"speed is relative to 16 bits and above 0; it gave {rate} for {at}")
        return rate


def zoom(function: Callable[[Array], Array], low: float, high: float, also: Sequence[float] | Array = ()) -> float:
    """The place of the smallest value of a function of one number, by ever finer rows of points.

    Args:
        function: of a row of points.
        low, high: between which it is sought.
        also: points of the first row besides those at equal distances.
    """
    found, least = low, math.inf
    points = np.union1d(np.linspace(low, high, _POINTS), also)
    for _ in range(_ROUNDS):
        values = function(points)
        best = int(np.nanargmin(values))
        if values[best] < least:
            found, least = float(points[best]), float(values[best])
        points = np.linspace(points[max(best - 1, 0)], points[min(best + 1, len(points) - 1)], _POINTS)
    return found
