"""Efficiency: each scheme of training is worth a share of the parameters and a share of the tokens.

    L = E + (A (N eff_N)^-alpha + B (D eff_D)^-beta)^power

Frantar et al. (arXiv 2502.16440) have eff_N alone; Quartet (arXiv 2505.14669) has eff_N for the format of the forward
pass and eff_D for that of the backward pass. A share is one number a scheme, whatever the size and the tokens: that
holds at 2 bits and more, and fails at 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from scantling.errors import UserError, hinted
from scantling.laws.chinchilla import ChinchillaLaw
from scantling.laws.law import Law, Published, Values, counts

UNQUANTISED = ("bf16", "fp16", "fp32")
"""Schemes that are worth everything."""

_QUARTET = ChinchillaLaw.PUBLISHED["quartet"]


@dataclass(frozen=True, kw_only=True)
class EfficiencyLaw(Law):
    """The loss under a named scheme of training. Published sets: quartet, frantar (which needs a base).

    Attributes:
        eff_N: share of the parameters, by scheme.
        eff_D: share of the tokens, by scheme; 1 where a scheme is absent.
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
            _QUARTET.fitted,
        ),
        "frantar": Published(
            "Frantar et al., arXiv 2502.16440, efficiencies alone",
            {"eff_N": {"w4": 0.923, "w4a4": 0.747, "w1a1": 0.067, "sparse50": 0.871}},
            {},
        ),
    }

    @classmethod
    def published(cls, name: str | None = None, *, base: Law | None = None) -> Self:
        """The law with constants from a paper.

        Args:
            name: quartet (the default) or frantar.
            base: a law that lends A, B, E, alpha, beta and power in place of the paper's.

        Raises:
            UserError: if there is no such set, or it has no base of its own and none is given.
        """
        found = cls._published(name)
        if base is not None and not isinstance(base, Law):
            raise UserError(f"base is a law, such as ChinchillaLaw.published(); given {base!r}")
        lent = {} if base is None else {each: getattr(base, each) for each in ("A", "B", "E", "alpha", "beta", "power")}
        if base is None and "A" not in found.constants:
            raise UserError(f"{found.source}: give base=, a law such as ChinchillaLaw.published(), to lend A, B and E")
        source = found.source if base is None else f"{found.source}; base: {base.source}"
        return cls(**{**found.constants, **lent}, source=source, fitted=found.fitted if base is None else base.fitted)

    def loss(self, N: ArrayLike, D: ArrayLike, *, scheme: str = "bf16") -> Any:
        """The loss in nats a token.

        Args:
            N: parameters.
            D: tokens.
            scheme: of training, a key of `eff_N`, or bf16, fp16 or fp32.

        Returns:
            A float, or an array for arrays.

        Raises:
            UserError: counts that are no positive numbers, or another scheme.
        """
        return self._loss(N, D, scheme=scheme)

    def effective_parameters(self, N: ArrayLike, *, scheme: str = "bf16") -> Any:
        """Parameters of the unquantised model that would be as good.

        Args:
            N: parameters.
            scheme: of training.

        Returns:
            A float, or an array for arrays.

        Raises:
            UserError: counts that are no positive numbers, or another scheme.
        """
        return counts("N", N)[()] * self.efficiencies(self._variables({"scheme": scheme}))[0]

    def constants(self) -> dict[str, float]:
        """The constants by name, those of schemes as eff_N[scheme]."""
        found: dict[str, Any] = super().constants()
        tables = {kind: found.pop(kind) for kind in ("eff_N", "eff_D")}
        return {**found, **{f"{kind}[{k}]": value for kind, table in tables.items() for k, value in table.items()}}

    def with_constants(self, values: Values) -> Self:
        """The same law with some constants replaced."""
        tables: dict[str, Any] = {kind: dict(getattr(self, kind)) for kind in ("eff_N", "eff_D")}
        plain = {}
        for name, value in values.items():
            kind, _, scheme = name.partition("[")
            if scheme:
                tables[kind][scheme.removesuffix("]")] = value
            else:
                plain[name] = value
        return replace(self, **plain, **tables)

    def efficiencies(self, variables: Values) -> tuple[Any, Any]:
        """The shares of each run's scheme."""
        schemes = np.asarray(variables["scheme"])
        if schemes.ndim == 0:
            return self.eff_N.get(str(schemes), 1.0), self.eff_D.get(str(schemes), 1.0)
        # of a fit, where a share may be a column of complex numbers
        shares: list[Any] = [1.0, 1.0]
        for place, table in enumerate((self.eff_N, self.eff_D)):
            for scheme, share in table.items():
                shares[place] = np.where(schemes == scheme, share, shares[place])
        return shares[0], shares[1]

    @classmethod
    def named(cls, runs: Values) -> list[str]:
        """All constants that a fit to `runs` can have: of shares, those of the runs' schemes."""
        shares = [f"{kind}[{scheme}]" for kind in ("eff_N", "eff_D") for scheme in _schemes(runs)]
        return [*Law.UNITS, *shares]

    @classmethod
    def fittable(cls, runs: Values) -> list[str]:
        """The base, and a share of parameters for each scheme; shares of tokens are held at 1 unless freed."""
        return [*super().fittable(runs), *(f"eff_N[{scheme}]" for scheme in _schemes(runs))]

    @classmethod
    def starts(cls, runs: Values) -> list[dict[str, float]]:
        """All schemes at the same share."""
        names = [f"eff_N[{scheme}]" for scheme in _schemes(runs)]
        return [dict.fromkeys(names, share) for share in (0.2, 0.5, 0.9)]

    def _variables(self, given: Values) -> dict[str, Any]:
        found = super()._variables(given)
        known = {*self.eff_N, *UNQUANTISED}
        if (scheme := found["scheme"]) not in known:
            raise UserError(hinted(f"no scheme '{scheme}'; there are {', '.join(sorted(known))}", scheme, known))
        return found


def _schemes(runs: Values) -> list[str]:
    return [str(each) for each in np.unique(runs["scheme"]) if each not in UNQUANTISED]
