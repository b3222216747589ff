"""What all laws share: Chinchilla's sum of two powers, of sizes that precision has made smaller.

    L = E + (A (N e_N)^-alpha + B (D e_D)^-beta)^power + delta

N are parameters and D tokens, both raw counts; L is in nats a token. A law is a file that says what its efficiencies
e_N and e_D and its degradation delta are, with the constants that its authors published. Chinchilla has power 1 and
neither (Hoffmann et al., arXiv 2203.15556); the power is that of Kaplan's and Quartet's forms.

Gradients are taken by complex steps: the imaginary part of the law at x + ih is h times its derivative, exact to
rounding, whatever the form (Squire and Trapp, SIAM Review 1998). A law must therefore be written in functions that take
complex numbers.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scantling.errors import UserError, hinted

if TYPE_CHECKING:
    from scantling.laws.optimum import Optimum, Speed
    from scantling.laws.result import Fit

logger = logging.getLogger(__name__)

Array = NDArray[Any]
Values = Mapping[str, Any]
"""Variables or constants by name."""

BASE = ("A", "B", "E", "alpha", "beta", "power")
_STEP = 1e-30
_TINY = 1e-300
UNNAMED = ("", "none", "inf", "nan", "<na>")
"""Cells of what is not quantised."""
_FORMAT = re.compile(r"(?:mx|nv)?(?:int|fp|bf)(\d+)(?:_e\d+m\d+)?")
"""A number format as recipes spell it, `int4` or `fp8_e4m3`, and its bits."""
_SAID: set[tuple[str, ...]] = set()
_warns: ContextVar[bool] = ContextVar("_warns", default=True)


@dataclass(frozen=True)
class Published:
    """Constants from a paper.

    Attributes:
        source: where they stand.
        constants: by name.
        fitted: the range of each variable in the runs they were fitted to.
    """

    source: str
    constants: Values
    fitted: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Law(ABC):
    """A law of the loss.

    Attributes:
        A: of the term in parameters, in nats × parameters^alpha where power is 1.
        B: of the term in tokens, in nats × tokens^beta where power is 1.
        E: the loss that no size and no data removes, nats.
        alpha: exponent of parameters.
        beta: exponent of tokens.
        power: exponent over the sum of both terms.
        source: where the constants come from.
        fitted: the range of each variable in the runs they were fitted to; outside it the law warns.
    """

    A: float
    B: float
    E: float
    alpha: float
    beta: float
    power: float = 1.0
    source: str = "constants given by hand"
    fitted: Mapping[str, tuple[float, float]] = field(default_factory=dict, repr=False)

    name: ClassVar[str]
    VARIABLES: ClassVar[Mapping[str, float | str]] = {}
    """What else the loss depends on, each with its default."""
    PARTS: ClassVar[tuple[str, ...]] = ()
    """Those of the variables that are the bits of a part of the model in training."""
    OFFSETS: ClassVar[Mapping[str, str]] = {}
    """Constants that may be negative, each with the one it says nothing without."""
    HELD: ClassVar[tuple[str, ...]] = ("power",)
    """Constants that a fit leaves alone unless told to free them."""
    AMPLITUDES: ClassVar[Mapping[str, tuple[str, ...]]] = {"A": ("alpha",), "B": ("beta",)}
    """Constants whose unit is that of counts to some powers, each with the names of these exponents."""
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
        """The loss in nats a token. Each law adds its variables as keywords."""

    def efficiencies(self, variables: Values) -> tuple[Any, Any]:
        """By what precision multiplies parameters, and tokens."""
        return 1.0, 1.0

    def trains(self, variables: Values) -> Any:
        """Whether precision leaves some of the parameters and tokens; where it does not, training diverges."""
        return np.logical_and(*(np.real(each) > 0 for each in self.efficiencies(variables)))

    def degradation(self, N: Any, D: Any, variables: Values) -> Any:
        """What is added to the loss, nats; N already multiplied by its efficiency."""
        return 0.0

    @classmethod
    def fittable(cls, runs: Values) -> list[str]:
        """The constants that a fit to `runs` is after, unless they are held."""
        return ["A", "B", "E", "alpha", "beta"]

    @classmethod
    def starts(cls, runs: Values) -> list[dict[str, float]]:
        """Constants from which a fit to `runs` may begin, besides those of the base."""
        return [{}]

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
            loss: of each run, nats a token.
            base, fixed, tie, free, delta: as of `scantling.laws.fit`.
            variables: what else the law depends on, such as the `weights` of each run in bits.

        Raises:
            UserError: for a variable that the law has not, and runs that cannot be used, with what is wrong with them.
        """
        from scantling.laws.registry import fit

        cls._check_variables(variables)
        options: dict[str, Any] = {"base": base, "fixed": fixed, "tie": tie, "free": free, "delta": delta}
        return fit({"N": N, "D": D, "loss": loss, **variables}, cls, **options)

    @classmethod
    def published(cls, name: str | None = None) -> Self:
        """The law with constants from a paper.

        Args:
            name: of the set; None takes the first.

        Raises:
            UserError: if there is no such set.
        """
        found = cls._published(name)
        return cls(**found.constants, source=found.source, fitted=found.fitted)

    @classmethod
    def _published(cls, name: str | None) -> Published:
        if name is None:
            name = next(iter(cls.PUBLISHED))
        if name not in cls.PUBLISHED:
            allowed = ", ".join(cls.PUBLISHED)
            text = f"{cls.__name__} has no published constants '{name}'; there are {allowed}"
            raise UserError(hinted(text, name, cls.PUBLISHED))
        return cls.PUBLISHED[name]

    @classmethod
    def blank(cls) -> Self:
        """The law with 1 for every constant that it cannot do without."""
        absent = dataclasses.MISSING
        needed = [f.name for f in dataclasses.fields(cls) if f.default is absent and f.default_factory is absent]
        values: dict[str, Any] = dict.fromkeys(needed, 1.0)
        return cls(**values)

    def parts(self) -> tuple[str, ...]:
        """The parts of a model whose bits in training this law prices."""
        return self.PARTS

    def unused(self) -> dict[str, str]:
        """The constants that this law does without, each with the variable of which it says nothing."""
        return {}

    @classmethod
    def named(cls, runs: Values) -> list[str]:
        """All constants that a fit to `runs` can have."""
        return list(cls.UNITS)

    def constants(self) -> dict[str, float]:
        """All constants by name; one that the law does without is absent."""
        skipped = {"source", "fitted"}
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name not in skipped}
        return {name: value for name, value in values.items() if value is not None}

    def with_constants(self, values: Values) -> Self:
        """The same law with some constants replaced."""
        return dataclasses.replace(self, **values)

    def in_units(self, N: float, D: float) -> Self:
        """The same law for counts in units of N parameters and D tokens."""
        return self.with_constants(
            {"A": scaled(self.A, -self.alpha * np.log(N)), "B": scaled(self.B, -self.beta * np.log(D))}
        )

    def evaluate(self, N: Any, D: Any, variables: Values) -> Any:
        """The loss without checks, of arrays or of complex numbers. An efficiency of 0 or less gives a huge loss."""
        eff_N, eff_D = (np.where(np.real(each) > 0, each, _TINY) for each in self.efficiencies(variables))
        N, D = N * eff_N, D * eff_D
        size = np.exp(np.log(self.A) - self.alpha * np.log(N)) + np.exp(np.log(self.B) - self.beta * np.log(D))
        # `==` of a complex step is False, so that the slope by the power is not lost
        return self.E + (size if np.all(self.power == 1) else size**self.power) + self.degradation(N, D, variables)

    def gradient(self, N: ArrayLike, D: ArrayLike, **variables: Any) -> dict[str, Any]:
        """Derivatives of the loss by N, D, every constant and every variable that is a finite number.

        Args:
            N: parameters.
            D: tokens.
            variables: as `loss` takes them.

        Returns:
            The derivatives by name, shaped as the loss; NaN where that is infinite.
        """
        given = self._variables(variables)
        N, D = np.asarray(N, float), np.asarray(D, float)
        found = {
            "N": _slope(self.evaluate(N + 1j * _STEP, D, given)),
            "D": _slope(self.evaluate(N, D + 1j * _STEP, given)),
        }
        for name, constant in self.constants().items():
            moved = self.with_constants({name: constant + 1j * _STEP})
            found[name] = _slope(moved.evaluate(N, D, given))
        for name, value in given.items():
            if not isinstance(value, str) and np.isfinite(value).all():
                found[name] = _slope(self.evaluate(N, D, {**given, name: value + 1j * _STEP}))
        finite = np.isfinite(self.loss(N, D, **variables))
        return {name: _plain(np.where(finite, value, np.nan)) for name, value in found.items()}

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
        """The parameters, tokens and bits of the smallest loss that a budget buys.

        A step at P bits costs 6 N D / speed(P), a token at inference 2 N / speed(P), both in FLOPs at 16 bits.

        Args:
            compute: the budget for training and inference, in FLOPs at 16 bits.
            N: parameters, where they are given.
            bits: of all parts in training, where they are given.
            speed: by how much faster than 16 bits, a function of bits or a mapping; None takes 16 / bits, as the paper.
            inference_tokens: tokens that the model will process after training.
            post: bits to which the weights are quantised after training; inference then has these.

        Raises:
            UserError: for a budget or bits that are no positive number, what the law says nothing of, bits at which
                training diverges, or inference that leaves nothing to train.

        Source:
            arXiv 2411.04330, section 4.3 and appendix E, from the derivation (Eq. 7 prints another).
        """
        from scantling.laws.optimum import optimum

        return optimum(self, compute=compute, N=N, bits=bits, speed=speed, inference_tokens=inference_tokens, post=post)

    def outside(self, **values: Any) -> list[str]:
        """In words, which values lie outside the range that the constants were fitted on.

        Args:
            values: N, D and variables by name; also those of lists or arrays.
        """
        return [text for *_, text in self._outside(values)]

    def _outside(self, values: Values) -> Iterator[tuple[str, str, str]]:
        """The variable, the value to one digit, and what is to be said."""
        for name, value in values.items():
            if isinstance(self.VARIABLES.get(name), str):
                continue
            low, high = self.fitted.get(name, (-math.inf, math.inf))
            array = _bits(name, value) if name in self.VARIABLES else np.asarray(value, float)
            array = array[~(np.isinf(array) if name in self.VARIABLES else np.isnan(array))]
            for edge, beyond in ((float(array.min(initial=high)), "below"), (float(array.max(initial=low)), "above")):
                if edge < low * (1 - 1e-9) if beyond == "below" else edge > high * (1 + 1e-9):
                    text = f"{name} = {edge:.4g} is {beyond} the fitted range, {low:.4g} to {high:.4g}"
                    yield name, f"{edge:.0e}", text

    def warn_outside(self, **values: Any) -> tuple[str, ...]:
        """Log the values outside the fitted range in one line, the same first digit once, and return all in words."""
        texts, fresh = [], []
        for name, digit, text in self._outside(values):
            texts.append(text)
            if _warns.get() and (said := (self.source, name, digit)) not in _SAID:
                _SAID.add(said)
                fresh.append(text)
        if fresh:
            logger.warning("%s law (%s) extrapolates: %s", self.name, self.source, "; ".join(fresh))
        return tuple(texts)

    def _loss(self, N: ArrayLike, D: ArrayLike, **variables: Any) -> Any:
        """`evaluate` of what a user gave: checked, and infinite where precision leaves no parameters."""
        given = self._variables(variables)
        N, D = counts("N", N), counts("D", D)
        bits = {name: value for name, value in given.items() if not isinstance(value, str)}
        try:
            np.broadcast_shapes(N.shape, D.shape, *map(np.shape, bits.values()))
        except ValueError:
            shapes = ", ".join(f"{name} {np.shape(each)}" for name, each in {"N": N, "D": D, **bits}.items())
            raise UserError(f"arrays must go together, as NumPy's do; given {shapes}") from None
        self.warn_outside(N=N, D=D, **bits)
        return _plain(np.where(self.trains(given), self.evaluate(N, D, given), math.inf))

    @classmethod
    def _check_variables(cls, given: Iterable[str]) -> None:
        """Raise a UserError for a variable that the law has not."""
        unknown = [name for name in given if name not in cls.VARIABLES]
        if unknown:
            allowed = ", ".join(cls.VARIABLES) or "nothing but N and D"
            raise UserError(f"the {cls.name} law does not know '{unknown[0]}'; it takes {allowed}")

    def _variables(self, given: Values) -> dict[str, Any]:
        """The variables in full: numbers as arrays, None as unquantised, defaults for what is absent."""
        self._check_variables(given)
        return {
            name: str(given.get(name, default)) if isinstance(default, str) else _bits(name, given.get(name, default))
            for name, default in self.VARIABLES.items()
        }


@contextmanager
def without_range_warnings() -> Iterator[None]:
    """Log nothing about values outside of fitted ranges, for callers that show `Law.outside` themselves."""
    token = _warns.set(False)
    try:
        yield
    finally:
        _warns.reset(token)


def _slope(moved: Any) -> Any:
    """The derivative by what was moved by a complex step."""
    return np.imag(moved) / _STEP


def _plain(value: Any) -> Any:
    """A float for an array of no dimensions."""
    return float(value) if np.ndim(value) == 0 else value


def scaled(amplitude: Any, power: Any) -> Any:
    """An amplitude times e to a power; infinite where that is more than a float holds."""
    with np.errstate(over="ignore", divide="ignore"):
        return _plain(np.exp(np.log(amplitude) + power))


def text_of(cell: Any) -> str:
    """A cell of a table as text, empty where it is None."""
    return "" if cell is None else str(cell).strip()


def bits_of(cell: Any) -> float:
    """Bits as tables and recipes have them: a number, a format by name or as a mapping, or nothing for unquantised.

    Raises:
        ValueError: anything else.
    """
    text = text_of(cell)
    if isinstance(cell, Mapping) or text.startswith("{"):
        mapping = cell if isinstance(cell, Mapping) else json.loads(text)
        if "format" not in mapping:
            raise ValueError("a mapping without a format")
        text = text_of(mapping["format"])
    if text.lower() in UNNAMED:
        return math.inf
    named = _FORMAT.fullmatch(text)
    return float(named[1] if named else text)


def counts(name: str, value: ArrayLike) -> Array:
    """Numbers of parameters or tokens, checked.

    Raises:
        UserError: one is not positive and finite.
    """
    try:
        array = np.asarray(value, float)
    except (TypeError, ValueError):
        raise UserError(f"{name} counts are positive and finite numbers; given {value!r}") from None
    if not (np.isfinite(array) & (array > 0)).all():
        raise UserError(f"{name} counts are positive and finite numbers; given {array}")
    return array


def _bits(name: str, value: Any) -> Array:
    array = np.asarray(math.inf if value is None else value)
    try:
        if array.dtype.kind not in "iuf":
            array = np.array([bits_of(each) for each in array.ravel()]).reshape(array.shape)
        if (array > 0).all():
            return array.astype(float)
    except ValueError:
        pass
    raise UserError(f"{name} is in bits, above 0, or a format such as int4 (math.inf is unquantised); given {value}")
