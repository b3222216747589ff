"""Chinchilla: L = E + A N^-alpha + B D^-beta (Hoffmann et al., arXiv 2203.15556, section 3.3).

The constants printed there do not follow from the points of its figure 4; Besiroglu et al. (arXiv 2404.10102) fitted
them again. With a power over the sum it is the base of Quartet's law (arXiv 2505.14669) and Kaplan's form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from numpy.typing import ArrayLike

from scantling.laws.law import Law, Published


@dataclass(frozen=True, kw_only=True)
class ChinchillaLaw(Law):
    """L = E + (A N^-alpha + B D^-beta)^power. Published sets: besiroglu, hoffmann, quartet.

    The constants are attributes; `Law` names their units.
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
        """The loss in nats a token.

        Args:
            N: parameters.
            D: tokens.

        Returns:
            A float, or an array for arrays.

        Raises:
            UserError: counts that are no positive numbers.
        """
        return self._loss(N, D)
