"""Base class of the scaling laws, and Chinchilla's law.

    L = E + (A (N e_N)^-alpha + B (D e_D)^-beta)^power + delta

N counts parameters and D tokens; L is in nats per token. A subclass defines the efficiencies e_N and e_D, the
degradation delta and its published constants. Chinchilla's law has power 1, efficiencies 1 and no degradation (Hoffmann
et al., arXiv 2203.15556, section 3.3); the power is that of Kaplan's and Quartet's forms.

Gradients are taken by complex steps: the imaginary part of the law at x + ih is h times its derivative, exact to
rounding (Squire and Trapp, SIAM Review 1998). A law must therefore use functions that accept complex numbers.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike

from scantling.errors import UserError, with_hint
from scantling.laws.fit_law import fit_law
from scantling.laws.inputs import Values, check_bits, check_counts, float_or_array
from scantling.laws.optimum import Optimum, Speed, find_optimum
from scantling.laws.result import Fit

logger = logging.getLogger(__name__)

# A complex step has no cancellation, so it can be this small.
_STEP = 1e-30
_TINY = 1e-300
_LOGGED: set[tuple[str, ...]] = set()
"""Warnings already logged: source, variable, value to one digit."""
_log_ranges: ContextVar[bool] = ContextVar("_log_ranges", default=True)


@dataclass(frozen=True)
class Published:
    """Constants from a paper.

    Attributes:
        source: the paper and table.
        constants: values by name.
        fitted_ranges: range of each variable in the runs that the constants were fitted to.
    """

    source: str
    constants: Values
    fitted_ranges: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Law(ABC):
    """A scaling law with its constants.

    Attributes:
        A: amplitude of the parameter term, in nats × parameters^alpha if power is 1.
        B: amplitude of the token term, in nats × tokens^beta if power is 1.
        E: irreducible loss, nats.
        alpha: exponent of parameters.
        beta: exponent of tokens.
        power: exponent over the sum of both terms.
        source: origin of the constants.
        fitted_ranges: range of each variable in the fitted runs; outside it the law warns.
    """

    A: float
    B: float
    E: float
    alpha: float
    beta: float
    power: float = 1.0
    source: str = "constants given by hand"
    fitted_ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict, repr=False)

    name: ClassVar[str]
    VARIABLES: ClassVar[Mapping[str, float | str]] = {}
    """Variables other than N and D, with their defaults."""
    PARTS: ClassVar[tuple[str, ...]] = ()
    """Variables that are training bits of a part of the model."""
    OFFSETS: ClassVar[Mapping[str, str]] = {}
    """Constants that may be negative, each with the scale constant it belongs to."""
    AMPLITUDES: ClassVar[Mapping[str, tuple[str, ...]]] = {"A": ("alpha",), "B": ("beta",)}
    """Constants whose unit is a power of counts, each with the names of these exponents."""
    UNITS: ClassVar[Mapping[str, str]] = {
        "A": "nats × parameters^alpha",
        "B": "nats × tokens^beta",
        "E": "nats per token",
        "alpha": "1",
        "beta": "1",
        "power": "1",
    }
    PUBLISHED: ClassVar[Mapping[str, Published]] = {}

    @abstractmethod
    def loss(self, N: ArrayLike, D: ArrayLike) -> Any:
        """Return the loss in nats per token. Each law adds its variables as keywords."""

    # The form of a law: a subclass overrides these.

    def efficiencies(self, variables: Values) -> tuple[Any, Any]:
        """Return the effective-parameter and effective-token multipliers e_N and e_D."""
        return 1.0, 1.0

    def degradation(self, N: Any, D: Any, variables: Values) -> Any:
        """Return the loss added by quantization after training, nats. N is already multiplied by e_N."""
        return 0.0

    def modeled_parts(self) -> tuple[str, ...]:
        """Return the parts of a model whose training bits this law models."""
        return self.PARTS

    def inactive_constants(self) -> dict[str, str]:
        """Return the constants that this law does not use, each with the variable that is not modeled."""
        return {}

    @classmethod
    def constant_names(cls, runs: Values) -> list[str]:
        """Return all constants that a fit to `runs` can have."""
        return list(cls.UNITS)

    @classmethod
    def free_constants(cls, runs: Values) -> list[str]:
        """Return the constants that a fit to `runs` determines by default."""
        return ["A", "B", "E", "alpha", "beta"]

    @classmethod
    def initial_guesses(cls, runs: Values) -> list[dict[str, float]]:
        """Return starting points of a fit to `runs`, without the constants of the base."""
        return [{}]

    @classmethod
    def base_class(cls) -> type[Law]:
        """Return the law that the first of two stages fits."""
        return ChinchillaLaw

    # Constants.

    @classmethod
    def published(cls, name: str | None = None) -> Self:
        """Return the law with constants from a paper.

        Args:
            name: published set; None takes the first.

        Raises:
            UserError: if there is no such set.
        """
        known = cls._published_set(name)
        return cls(**known.constants, source=known.source, fitted_ranges=known.fitted_ranges)

    @classmethod
    def _published_set(cls, name: str | None) -> Published:
        if name is None:
            name = next(iter(cls.PUBLISHED))
        if name not in cls.PUBLISHED:
            allowed = ", ".join(cls.PUBLISHED)
            text = f"{cls.__name__} has no published constants '{name}'; there are {allowed}"
            raise UserError(with_hint(text, name, cls.PUBLISHED))
        return cls.PUBLISHED[name]

    @classmethod
    def with_ones(cls) -> Self:
        """Return the law with 1 for every required constant."""
        absent = dataclasses.MISSING
        needed = [f.name for f in dataclasses.fields(cls) if f.default is absent and f.default_factory is absent]
        values: dict[str, Any] = dict.fromkeys(needed, 1.0)
        return cls(**values)

    def constants(self) -> dict[str, float]:
        """Return all constants by name, without those that are None."""
        names = [each.name for each in dataclasses.fields(self) if each.name not in ("source", "fitted_ranges")]
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def with_constants(self, values: Values) -> Self:
        """Return the law with some constants replaced."""
        return dataclasses.replace(self, **values)

    def in_units(self, N: float, D: float) -> Self:
        """Return the same law for counts in units of N parameters and D tokens."""
        return self.with_constants(
            {
                "A": scale_amplitude(self.A, -self.alpha * np.log(N)),
                "B": scale_amplitude(self.B, -self.beta * np.log(D)),
            }
        )

    # Predictions.

    def evaluate(self, N: Any, D: Any, variables: Values) -> Any:
        """Return the unchecked loss of arrays, real or complex. An efficiency of 0 or less gives a huge loss."""
        # the equation at the head of this file, with powers as exp(log)
        eff_N, eff_D = (np.where(np.real(each) > 0, each, _TINY) for each in self.efficiencies(variables))
        N, D = N * eff_N, D * eff_D
        terms = np.exp(np.log(self.A) - self.alpha * np.log(N)) + np.exp(np.log(self.B) - self.beta * np.log(D))
        # a power with a complex step is not equal to 1, so its slope is kept
        return self.E + (terms if np.all(self.power == 1) else terms**self.power) + self.degradation(N, D, variables)

    def converges(self, variables: Values) -> Any:
        """Return True if both efficiencies are positive; otherwise training diverges."""
        return np.logical_and(*(np.real(each) > 0 for each in self.efficiencies(variables)))

    def gradient(self, N: ArrayLike, D: ArrayLike, **variables: Any) -> dict[str, Any]:
        """Return derivatives of the loss by N, D, every constant and every finite numeric variable.

        Args:
            N: parameters.
            D: tokens.
            variables: as for `loss`.

        Returns:
            The derivatives by name, in the shape of the loss; NaN if training diverges.
        """
        given = self.parse_variables(variables)
        N, D = np.asarray(N, float), np.asarray(D, float)
        # complex steps: the imaginary part over the step is the derivative
        moved = {"N": self.evaluate(N + 1j * _STEP, D, given), "D": self.evaluate(N, D + 1j * _STEP, given)}
        for name, constant in self.constants().items():
            moved[name] = self.with_constants({name: constant + 1j * _STEP}).evaluate(N, D, given)
        for name, value in given.items():
            if not isinstance(value, str) and np.isfinite(value).all():
                moved[name] = self.evaluate(N, D, {**given, name: value + 1j * _STEP})
        finite = np.isfinite(self.loss(N, D, **variables))
        return {name: float_or_array(np.where(finite, np.imag(value) / _STEP, np.nan)) for name, value in moved.items()}

    def checked_loss(self, N: ArrayLike, D: ArrayLike, **variables: Any) -> Any:
        """Check user input and return the loss; infinite if training diverges. Warns outside the fitted ranges."""
        given = self.parse_variables(variables)
        N, D = check_counts("N", N), check_counts("D", D)
        bits = {name: value for name, value in given.items() if not isinstance(value, str)}
        try:
            np.broadcast_shapes(N.shape, D.shape, *map(np.shape, bits.values()))
        except ValueError:
            shapes = ", ".join(f"{name} {np.shape(each)}" for name, each in {"N": N, "D": D, **bits}.items())
            raise UserError(f"the shapes of the arrays must broadcast; given {shapes}") from None
        self.warn_outside(N=N, D=D, **bits)
        return float_or_array(np.where(self.converges(given), self.evaluate(N, D, given), math.inf))

    @classmethod
    def check_variable_names(cls, names: Iterable[str]) -> None:
        """Raise a UserError for a variable that this law does not have."""
        unknown = [name for name in names if name not in cls.VARIABLES]
        if unknown:
            allowed = ", ".join(cls.VARIABLES) or "only N and D"
            raise UserError(f"the {cls.name} law has no variable '{unknown[0]}'; it takes {allowed}")

    def parse_variables(self, given: Values) -> dict[str, Any]:
        """Return all variables: bits as arrays, None as unquantized, defaults for absent ones."""
        self.check_variable_names(given)
        return {
            name: str(given.get(name, default))
            if isinstance(default, str)
            else check_bits(name, given.get(name, default))
            for name, default in self.VARIABLES.items()
        }

    # Fits and optima.

    @classmethod
    def fit(
        cls,
        N: ArrayLike,
        D: ArrayLike,
        loss: ArrayLike,
        *,
        base: Law | Fit | Literal["fit"] | None = None,
        fixed: Mapping[str, float] | None = None,
        tie: Mapping[str, str] | None = None,
        free: Sequence[str] = (),
        delta: float = 1e-3,
        **variables: ArrayLike,
    ) -> Fit:
        """Fit the constants to runs; see `scantling.laws.fit`, which takes tables.

        Args:
            N: parameters of each run.
            D: tokens of each run.
            loss: loss of each run, nats per token.
            base, fixed, tie, free, delta: as for `scantling.laws.fit`.
            variables: variables of the law for each run, such as `weights` in bits.

        Raises:
            UserError: for an unknown variable, and for unusable runs, with the reason.
        """
        cls.check_variable_names(variables)
        runs = {"N": N, "D": D, "loss": loss, **variables}
        return fit_law(cls, runs, base=base, fixed=fixed, tie=tie, free=free, delta=delta)

    def optimum(
        self,
        *,
        compute: float,
        N: float | None = None,
        bits: float | None = None,
        speed: Speed | None = None,
        inference_tokens: float = 0.0,
        post: float | None = None,
    ) -> Optimum:
        """Return the parameters, tokens and bits with the smallest loss for a compute budget.

        A step at P bits costs 6 N D / speed(P), a token at inference 2 N / speed(P), both in FLOPs at 16 bits.

        Args:
            compute: budget for training and inference, in FLOPs at 16 bits.
            N: parameters; None optimizes them.
            bits: training bits of all parts; None optimizes them.
            speed: speedup over 16 bits, a function of bits or a mapping; None takes 16 / bits, as in the paper.
            inference_tokens: tokens that the model will process after training.
            post: bits of the weights after training; inference then runs at these bits.

        Raises:
            UserError: for a budget or bits that are not positive, options that the law does not model, bits at which
                training diverges, or inference that uses up the budget.

        Source:
            arXiv 2411.04330, section 4.3 and appendix E, from the derivation (Eq. 7 prints another).
        """
        return find_optimum(
            self, compute=compute, N=N, bits=bits, speed=speed, inference_tokens=inference_tokens, post=post
        )

    # Ranges of the fitted runs.

    def outside(self, **values: Any) -> list[str]:
        """Return a text for each value outside the range that the constants were fitted on.

        Args:
            values: N, D and variables by name, numbers or arrays.
        """
        return [text for *_, text in self._out_of_range(values)]

    def _out_of_range(self, values: Values) -> Iterator[tuple[str, str, str]]:
        """Yield the variable, its value to one digit, and the text of the warning."""
        for name, value in values.items():
            if isinstance(self.VARIABLES.get(name), str):
                continue
            low, high = self.fitted_ranges.get(name, (-math.inf, math.inf))
            array = check_bits(name, value) if name in self.VARIABLES else np.asarray(value, float)
            # Infinite bits are unquantized, which is inside every range.
            array = array[~(np.isinf(array) if name in self.VARIABLES else np.isnan(array))]
            for edge, side in ((float(array.min(initial=high)), "below"), (float(array.max(initial=low)), "above")):
                if edge < low * (1 - 1e-9) if side == "below" else edge > high * (1 + 1e-9):
                    text = f"{name} = {edge:.4g} is {side} the fitted range, {low:.4g} to {high:.4g}"
                    yield name, f"{edge:.0e}", text

    def warn_outside(self, **values: Any) -> tuple[str, ...]:
        """Log values outside the fitted ranges in one line, once per first digit, and return all texts."""
        texts, fresh = [], []
        for name, digit, text in self._out_of_range(values):
            texts.append(text)
            if _log_ranges.get() and (key := (self.source, name, digit)) not in _LOGGED:
                _LOGGED.add(key)
                fresh.append(text)
        if fresh:
            logger.warning("%s law (%s) extrapolates: %s", self.name, self.source, "; ".join(fresh))
        return tuple(texts)


@dataclass(frozen=True, kw_only=True)
class ChinchillaLaw(Law):
    """L = E + (A N^-alpha + B D^-beta)^power. Published sets: besiroglu, hoffmann, quartet.

    The constants that Hoffmann et al. print do not follow from the points of their figure 4; Besiroglu et al. (arXiv
    2404.10102) fitted these points again. With a power, this is the base of Quartet's law and Kaplan's form.
    """

    name: ClassVar[str] = "chinchilla"
    PUBLISHED: ClassVar[Mapping[str, Published]] = {
        "besiroglu": Published(
            "Besiroglu et al., arXiv 2404.10102, on the points of Chinchilla's figure 4",
            {"A": 482.01, "B": 2085.43, "E": 1.8172, "alpha": 0.3478, "beta": 0.3658},
            {"N": (5.7e7, 1.62e10), "D": (8.1e8, 3.18e11)},
        ),
        "hoffmann": Published(
            "Hoffmann et al., arXiv 2203.15556, as printed",
            {"A": 406.4, "B": 410.7, "E": 1.69, "alpha": 0.34, "beta": 0.28},
            {"N": (7.0e7, 1.6e10), "D": (5e9, 5e11)},
        ),
        "quartet": Published(
            "Castro et al. (Quartet), arXiv 2505.14669v4, BF16 on C4",
            {"A": 1.52e5, "B": 5.25e5, "E": 1.35, "alpha": 0.589, "beta": 0.544, "power": 0.274},
            {"N": (3.0e7, 2.0e8), "D": (7.5e8, 1.6e11)},
        ),
    }

    def loss(self, N: ArrayLike, D: ArrayLike) -> Any:
        """Return the loss in nats per token.

        Args:
            N: parameters.
            D: tokens.

        Returns:
            A float, or an array for arrays.

        Raises:
            UserError: counts that are not positive numbers.
        """
        return self.checked_loss(N, D)


@contextmanager
def without_range_warnings() -> Iterator[None]:
    """Do not log values outside of fitted ranges, for callers that show `Law.outside` themselves."""
    token = _log_ranges.set(False)
    try:
        yield
    finally:
        _log_ranges.reset(token)


def scale_amplitude(amplitude: Any, log_factor: Any) -> Any:
    """Return amplitude × e^log_factor; infinite beyond the range of floats."""
    with np.errstate(over="ignore", divide="ignore"):
        return float_or_array(np.exp(np.log(amplitude) + log_factor))
