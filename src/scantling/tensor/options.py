"""Formats of `tensorize` and options of a `RankAdapter`. No torch here: recipes are checked without importing it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import inf, isfinite
from typing import Any, Literal, TypeAlias, get_args

from scantling.errors import UserError, did_you_mean, with_hint

Format: TypeAlias = Literal["tt", "tt-silu", "low-rank", "cola"]

FORMATS: dict[str, dict[str, Any]] = {
    "tt": {"num_modes": 3},
    "tt-silu": {"num_modes": 3, "activation": "silu"},
    "low-rank": {"num_modes": 1},
    "cola": {"num_modes": 1, "activation": "silu"},
}
"""Arguments of the linear layers of each format."""


def linear_options(format: str, num_modes: int | None) -> dict[str, Any]:
    """Return the default arguments of linear layers of a format.

    Raises:
        UserError: if the format does not exist, or takes one mode and several are given.
    """
    if format not in FORMATS:
        names = get_args(Format)
        raise UserError(with_hint(f"given format={format!r}; it must be one of {', '.join(names)}", str(format), names))
    options = FORMATS[format]
    if num_modes is None:
        return options
    if options["num_modes"] == 1 and num_modes != 1:
        raise UserError(f"given num_modes={num_modes} with format={format!r}, which has matrices: num_modes must be 1")
    return {**options, "num_modes": num_modes}


Unit: TypeAlias = Literal["parameters", "flops", "bytes"]
Schedule: TypeAlias = Literal["importance", "paper"]


_BOUNDS: dict[str, tuple[float, bool]] = {
    **dict.fromkeys(("size_target", "bytes_per_parameter", "threshold"), (0.0, False)),
    **dict.fromkeys(("steps", "interval", "tokens"), (1, True)),
    **dict.fromkeys(("begin", "early_steps"), (0, True)),
    **dict.fromkeys(("beta", "gamma", "memory", "tolerance"), (0.0, True)),
    **dict.fromkeys(("loss_weight", "size_weight", "rho"), (0.0, True)),
    "loss_target": (-inf, True),
}
"""Lower bound of each value, and True if the value may equal it."""
_INTEGERS = ("steps", "interval", "tokens", "begin", "early_steps")
_OPTIONAL = ("early_steps", "loss_target")


@dataclass(frozen=True)
class RankOptions:
    """Options of a `RankAdapter`; most users only need the first six.

    Attributes:
        size_target: up to 1 a fraction of the initial size, above 1 a size in the unit.
        unit: `parameters` (in the cores), `flops` (per token, forward and backward) or `bytes` (of training state:
            the state of the recipe's optimizer in `scantling train`, otherwise `bytes_per_parameter` per parameter).
        steps: number of optimizer steps in which the size decreases to the target; half a run is a good choice.
        begin: steps before the decrease starts.
        schedule: `importance`: prune the ranks that the loss needs least for their cost. `paper`: price and late stage
            of the paper.
        tolerance: allowed relative deviation of the final size from the target.
        threshold: rank gates at or below it are pruned.
        beta: weight of the squared norm of the cores.
        interval: steps between two updates of the ranks.
        tokens: tokens per step, for `flops`.
        bytes_per_parameter: bytes of weight, gradient and optimizer state, for `bytes`; 16 is AdamW in fp32.
        gamma: price of the early stage (`paper`).
        early_steps: steps of the early stage (`paper`); default all of `steps`, which means no late stage.
        loss_target: L_0; default the mean loss when the late stage begins.
        loss_weight, size_weight, rho: w1, w2 and rho of the late stage.
        memory: decay per step of the mean importance of a rank (`importance`) and of the mean loss (`paper`).
        hold: True to hold the size at the target from `steps` on (`paper`; the others always do).
    """

    size_target: float = 0.2
    unit: Unit = "parameters"
    steps: int = 100
    begin: int = 0
    schedule: Schedule = "importance"
    tolerance: float = 0.01
    threshold: float = 1e-2
    beta: float = 0.0
    interval: int = 5
    tokens: int = 4096
    bytes_per_parameter: float = 16.0
    gamma: float = 0.01
    early_steps: int | None = None
    loss_target: float | None = None
    loss_weight: float = 1.0
    size_weight: float = 1.0
    rho: float = 0.1
    memory: float = 0.98
    hold: bool = True

    @classmethod
    def from_values(cls, **values: Any) -> RankOptions:
        """Return options from values by name.

        Raises:
            UserError: if a name is unknown or a value is out of range.
        """
        for name, problem, given in cls.problems(values):
            raise UserError(f"RankAdapter: {name} {problem}; given {given}")
        return cls(**values)

    @classmethod
    def problems(cls, values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
        """Yield (name, problem, given value) for each invalid value."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                hint = did_you_mean(name, known)
                yield (
                    name,
                    f"is unknown{f' ({hint})' if hint else ''}; known options are {', '.join(known)}",
                    repr(values[name]),
                )
        # Check types and ranges first: the comparisons below need numbers.
        given = cls(**{name: value for name, value in values.items() if name in known})
        for name, (bound, is_inclusive) in _BOUNDS.items():
            value = getattr(given, name)
            if value is None and name in _OPTIONAL:
                continue
            is_integer = name in _INTEGERS
            is_number = isinstance(value, int if is_integer else int | float) and not isinstance(value, bool)
            if not is_number or not isfinite(value) or not (value >= bound if is_inclusive else value > bound):
                kind = "an integer" if is_integer else "a finite number"
                limit = "" if bound == -inf else f" {'of at least' if is_inclusive else 'above'} {bound}"
                yield name, f"must be {kind}{limit}", repr(value)
                return
        for name, is_wrong, allowed in (
            ("hold", not isinstance(given.hold, bool), "true or false"),
            ("unit", given.unit not in get_args(Unit), "parameters, flops or bytes"),
            ("schedule", given.schedule not in get_args(Schedule), "importance or paper"),
            ("begin", given.begin >= given.steps, f"below steps={given.steps}"),
            ("threshold", given.threshold >= 1.0, "below 1, the initial value of rank gates"),
            ("tolerance", given.tolerance >= 1.0, "below 1"),
            ("memory", given.memory >= 1.0, "below 1"),
        ):
            if is_wrong:
                yield name, f"must be {allowed}", repr(getattr(given, name))
