"""Efficiency law: each training scheme multiplies parameters and tokens by a constant.

    L = E + (A (N eff_N)^-alpha + B (D eff_D)^-beta)^power

Frantar et al. (arXiv 2502.16440) have eff_N alone; Quartet (arXiv 2505.14669) has eff_N for the format of the forward
pass and eff_D for that of the backward pass. An efficiency does not depend on the size or the tokens: this holds at 2
bits and more, and fails at 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from scantling.errors import UserError, with_hint
from scantling.laws.inputs import UNQUANTIZED_SCHEMES, Values, check_counts
from scantling.laws.law import ChinchillaLaw, Law, Published

_QUARTET = ChinchillaLaw.PUBLISHED["quartet"]


@dataclass(frozen=True, kw_only=True)
class EfficiencyLaw(Law):
    """The loss with a named training scheme. Published sets: quartet, frantar (which needs a base).

    Attributes:
        eff_N: effective-parameter multiplier by scheme.
        eff_D: effective-token multiplier by scheme; 1 for absent schemes.
    """

    eff_N: Mapping[str, float] = field(default_factory=dict)
    eff_D: Mapping[str, float] = field(default_factory=dict)

    name: ClassVar[str] = "efficiency"
    VARIABLES: ClassVar[Mapping[str, float | str]] = {"scheme": "bf16"}
    UNITS: ClassVar[Mapping[str, str]] = {**Law.UNITS, "eff_N": "1", "eff_D": "1"}
    PUBLISHED: ClassVar[Mapping[str, Published]] = {
        "quartet": Published(
            "Castro et al. (Quartet), arXiv 2505.14669v4, tables 2 and 3; base of 30 to 200M parameters on C4",
            {
                **_QUARTET.constants,
                "eff_N": {"quartet": 0.65, "luq-int4": 0.49, "sr": 0.42, "rtn": 0.59, "quest": 0.64},
                "eff_D": {"quartet": 0.95, "luq-int4": 0.15, "sr": 0.88, "rtn": 0.93, "quest": 0.83},
            },
            _QUARTET.fitted_ranges,
        ),
        "frantar": Published(
            "Frantar et al., arXiv 2502.16440, efficiencies alone",
            {"eff_N": {"w4": 0.923, "w4a4": 0.747, "w1a1": 0.067, "sparse50": 0.871}},
            {},
        ),
    }

    @classmethod
    def published(cls, name: str | None = None, *, base: Law | None = None) -> Self:
        """Return the law with constants from a paper.

        Args:
            name: quartet (the default) or frantar.
            base: a law that provides A, B, E, alpha, beta and power instead of the paper.

        Raises:
            UserError: if there is no such set, or it has no base and none is given.
        """
        known = cls._published_set(name)
        if base is not None and not isinstance(base, Law):
            raise UserError(f"base is a law, such as ChinchillaLaw.published(); given {base!r}")
        if base is None:
            if "A" not in known.constants:
                raise UserError(f"{known.source}: give base=, a law such as ChinchillaLaw.published(), for A, B and E")
            return super().published(name)
        # The base replaces the paper's base constants; the efficiencies stay.
        constants = {**known.constants, **{each: getattr(base, each) for each in Law.UNITS}}
        return cls(**constants, source=f"{known.source}; base: {base.source}", fitted_ranges=base.fitted_ranges)

    def loss(self, N: ArrayLike, D: ArrayLike, *, scheme: str = "bf16") -> Any:
        """Return the loss in nats per token.

        Args:
            N: parameters.
            D: tokens.
            scheme: training scheme, a key of `eff_N`, or bf16, fp16 or fp32.

        Returns:
            A float, or an array for arrays.

        Raises:
            UserError: counts that are not positive numbers, or an unknown scheme.
        """
        return self.checked_loss(N, D, scheme=scheme)

    def effective_parameters(self, N: ArrayLike, *, scheme: str = "bf16") -> Any:
        """Return the parameters of an unquantized model with the same loss.

        Args:
            N: parameters.
            scheme: training scheme.

        Returns:
            A float, or an array for arrays.

        Raises:
            UserError: counts that are not positive numbers, or an unknown scheme.
        """
        return check_counts("N", N)[()] * self.efficiencies(self.parse_variables({"scheme": scheme}))[0]

    def constants(self) -> dict[str, float]:
        """Return the constants by name, efficiencies as eff_N[scheme]."""
        constants: dict[str, Any] = super().constants()
        tables = {kind: constants.pop(kind) for kind in ("eff_N", "eff_D")}
        return {**constants, **{f"{kind}[{k}]": value for kind, table in tables.items() for k, value in table.items()}}

    def with_constants(self, values: Values) -> Self:
        """Return the law with some constants replaced."""
        tables: dict[str, Any] = {kind: dict(getattr(self, kind)) for kind in ("eff_N", "eff_D")}
        plain = {}
        for name, value in values.items():
            # eff_N[scheme] names an entry of a mapping.
            kind, _, scheme = name.partition("[")
            if scheme:
                tables[kind][scheme.removesuffix("]")] = value
            else:
                plain[name] = value
        return replace(self, **plain, **tables)

    def efficiencies(self, variables: Values) -> tuple[Any, Any]:
        """Return the efficiencies of each run's scheme."""
        schemes = np.asarray(variables["scheme"])
        if schemes.ndim == 0:
            return self.eff_N.get(str(schemes), 1.0), self.eff_D.get(str(schemes), 1.0)
        # in a fit, an efficiency is a column (constants, 1) of complex numbers and schemes a row (runs,)
        multipliers: list[Any] = [1.0, 1.0]
        for i, table in enumerate((self.eff_N, self.eff_D)):
            for scheme, efficiency in table.items():
                multipliers[i] = np.where(schemes == scheme, efficiency, multipliers[i])
        return multipliers[0], multipliers[1]

    @classmethod
    def constant_names(cls, runs: Values) -> list[str]:
        """Return the base's constants and the efficiencies of the schemes in `runs`."""
        return [*Law.UNITS, *(f"{kind}[{scheme}]" for kind in ("eff_N", "eff_D") for scheme in _schemes(runs))]

    @classmethod
    def free_constants(cls, runs: Values) -> list[str]:
        """Return the base's constants and eff_N of each scheme; eff_D is fixed at 1 unless freed."""
        return [*super().free_constants(runs), *(f"eff_N[{scheme}]" for scheme in _schemes(runs))]

    @classmethod
    def initial_guesses(cls, runs: Values) -> list[dict[str, float]]:
        """Return guesses with the same efficiency for all schemes."""
        names = [f"eff_N[{scheme}]" for scheme in _schemes(runs)]
        return [dict.fromkeys(names, efficiency) for efficiency in (0.2, 0.5, 0.9)]

    def parse_variables(self, given: Values) -> dict[str, Any]:
        """Return the scheme, checked."""
        variables = super().parse_variables(given)
        known = {*self.eff_N, *UNQUANTIZED_SCHEMES}
        if (scheme := variables["scheme"]) not in known:
            raise UserError(with_hint(f"no scheme '{scheme}'; there are {', '.join(sorted(known))}", scheme, known))
        return variables


def _schemes(runs: Values) -> list[str]:
    return [str(each) for each in np.unique(runs["scheme"]) if each not in UNQUANTIZED_SCHEMES]
