"""Options of a momentum exchange: one list with defaults, limits and descriptions.

`MomentumExchange` and `DeMo` take these options as keyword arguments, and the recipe section `comm` has them as keys;
checks, docstrings and the recipe schema are made from this list. This module does not import torch.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, get_args, get_origin, get_type_hints

from scantling.errors import UserError

Values: TypeAlias = Literal["fp32", "bf16", "int8", "int4", "sign"]
ResidualFormat: TypeAlias = Literal["fp32", "int8"]
Strategy: TypeAlias = Literal["all_gather", "owner", "dense"]
Exchange: TypeAlias = Literal["auto", "all_gather", "owner", "dense"]
Class = TypeVar("Class", bound=type)
RESIDUAL_ROW = 64
"""Elements of an int8 residual that share a scale: a row of a block, if the blocks have the default size."""
LOCAL_STEPS, OUTER_LR = 15, 1.3
"""Defaults: local steps between exchanges, and the learning rate of the outer step after them."""
DILOCO_STEPS = 250
"""Default of local steps whose exchange sends everything: 125 times fewer bytes than 16-bit gradients."""


def _about(doc: str, *, least: float | None = None, most: float | None = None, **flags: bool) -> dict[str, Any]:
    """Return the metadata of an option: its description, limits, and the flags `per_group` and `above_zero`."""
    return {"doc": doc, "least": least, "most": most, **flags}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeConfig:
    """Options of a momentum exchange. Those marked `per_group` may be set for each parameter group."""

    decay: float = field(
        default=0.95,
        metadata=_about("Decay of the residual of matrices in each step.", least=0, most=1, per_group=True),
    )
    topk: int = field(
        default=32,
        metadata=_about(
            "Coefficients to send of a block of chunk x chunk; smaller blocks send the same share.",
            least=1,
            per_group=True,
        ),
    )
    chunk: int = field(default=64, metadata=_about("Longest side of a block.", least=1, most=4096, per_group=True))
    values: Values = field(default="sign", metadata=_about("Format of the coefficients.", per_group=True))
    dense: Values = field(
        default="bf16",
        metadata=_about("Format of vectors and small matrices, sent in full.", per_group=True),
    )
    residual: ResidualFormat = field(
        default="fp32",
        metadata=_about(
            "Format of the residuals of matrices and embeddings; int8 uses stochastic rounding and 1.06 bytes per "
            "element.",
            per_group=True,
        ),
    )
    exchange: Exchange = field(
        default="auto",
        metadata=_about(
            "Strategy: all_gather or owner; `auto` takes the one that sends fewer bytes; `dense` sends everything by "
            "all-reduce, in bf16, or in fp32 if `dense` is fp32."
        ),
    )
    sync_every: int = field(
        default=1,
        metadata=_about(
            "Steps from one exchange to the next; in between, gradients accumulate in the residuals.", least=1
        ),
    )
    state_sync_every: int | None = field(
        default=None,
        metadata=_about(
            "Exchanges between averages of all replicas' residuals, which send 8 bytes per element; None for never.",
            least=1,
        ),
    )
    check_every: int | None = field(
        default=100,
        metadata=_about(
            "Exchanges between comparisons of all replicas' parameters by hash, which send 8 bytes per parameter and "
            "also measure `replica_divergence`; None for never.",
            least=1,
        ),
    )
    delay: int = field(
        default=0,
        metadata=_about(
            "Steps from an exchange to its result: with 1, messages have a whole step to arrive.", least=0, most=1
        ),
    )
    overlap: bool = field(
        default=False, metadata=_about("True to send complete buckets during the backward pass, see `overlapped`.")
    )
    bucket_mb: float = field(
        default=25.0,
        metadata=_about(
            "With overlap, least MiB of parameters in one message; there are at most about eight.", above_zero=True
        ),
    )

    def __post_init__(self) -> None:
        for name in OPTIONS:
            check_option(name, getattr(self, name))
        if self.sync_every > 1 and self.exchange == "dense":
            raise UserError(
                f"exchange='dense' sends everything in every step: set sync_every=1; given {self.sync_every}"
            )

    @property
    def group_options(self) -> dict[str, Any]:
        """Options that each parameter group has as keys."""
        return {name: getattr(self, name) for name in GROUP_OPTIONS}

    def is_due(self, step: int) -> bool:
        """Return True if there is an exchange in this step, counted from 1."""
        return step % self.sync_every == 0

    def is_periodic(self, step: int, every: int | None) -> bool:
        """Return True if an action with a period of `every` exchanges comes before this step's exchange.

        It never comes before the first exchange.
        """
        # Index of the latest exchange, from 1
        number = step // self.sync_every
        return every is not None and self.is_due(step) and number > 1 and (number - 1) % every == 0


class ExchangeOptions(TypedDict, total=False):
    """Types of the options, for type checkers; a test keeps it equal to the fields of `ExchangeConfig`."""

    decay: float
    topk: int
    chunk: int
    values: Values
    dense: Values
    residual: ResidualFormat
    exchange: Exchange
    sync_every: int
    state_sync_every: int | None
    check_every: int | None
    delay: int
    overlap: bool
    bucket_mb: float


OPTIONS = {each.name: each for each in fields(ExchangeConfig)}
SELECTION_OPTIONS = frozenset({"decay", "topk", "chunk", "values", "residual"})
"""Options that have an effect only if a part of the components is selected."""
GROUP_OPTIONS = tuple(name for name, each in OPTIONS.items() if each.metadata.get("per_group"))
TYPES: dict[str, Any] = get_type_hints(ExchangeConfig)


def make_config(options: Mapping[str, Any]) -> ExchangeConfig:
    """Return the configuration with these options and defaults for the rest.

    Raises:
        TypeError: an unknown option.
        UserError: a value out of range.
    """
    for name in options:
        if name not in OPTIONS:
            close = difflib.get_close_matches(name, OPTIONS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the options are {', '.join(OPTIONS)}"
            raise TypeError(f"{name!r} is not an option of the exchange; {hint}")
    return ExchangeConfig(**options)


def local_step_defaults(chunk: int) -> ExchangeOptions:
    """Return the defaults of the exchange after local steps: signs of all elements, which need no indices."""
    return {"topk": max(1, chunk**2), "values": "sign", "dense": "sign", "decay": 1.0}


def check_option(name: str, value: Any) -> None:
    """Raise a UserError if the value of an option has another type or is out of range."""
    kind, limits = TYPES[name], OPTIONS[name].metadata
    least, most = limits["least"], limits["most"]
    if get_origin(kind) is Literal:
        if not isinstance(value, str) or value not in get_args(kind):
            raise UserError(f"{name} must be one of {', '.join(get_args(kind))}; given {value!r}")
    elif kind is bool:
        if not isinstance(value, bool):
            raise UserError(f"{name} must be True or False; given {value!r}")
    elif kind is float:
        if limits.get("above_zero"):
            if not is_number(value) or not value > 0.0:
                raise UserError(f"{name} must be above 0; given {value!r}")
        elif not is_number(value) or not least <= value <= most:
            raise UserError(f"{name} must be from {least:g} to {most:g}; given {value!r}")
    # All other options are integers; some may be None.
    elif not (value is None and type(None) in get_args(kind)) and not (
        is_integer(value, least=least) and value <= (math.inf if most is None else most)
    ):
        raise UserError(f"{name} must be an integer {_range(least, most)}; given {value!r}")


def _range(least: int, most: int | None) -> str:
    return f"of at least {least}" if most is None else f"from {least} to {most}"


def is_integer(value: Any, *, least: int) -> bool:
    """Return True for an integer of at least `least`; True and False are not integers here."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> bool:
    """Return True for a real number, such as a float, an int or a scalar of NumPy."""
    return isinstance(value, Real)


def document_options(cls: Class) -> Class:
    """Put the options into the docstring of a class, replacing `{options}`, and into its signature."""
    # At run time, options are `**options`: show their names in help() and editors.
    signature = inspect.signature(cls)
    named = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    kind = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(name, kind, default=each.default, annotation=TYPES[name])
        for name, each in OPTIONS.items()
        if name not in signature.parameters
    ]
    cls.__signature__ = signature.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    # python -OO strips docstrings.
    if cls.__doc__:
        lines = [f"{each.name}: {each.metadata['doc']}" for each in OPTIONS.values()]
        cls.__doc__ = cls.__doc__.replace("{options}", "\n        ".join(lines))
    return cls
