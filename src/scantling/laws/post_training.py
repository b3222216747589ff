"""Quantization after training with a power law in the bits: Ouyang et al. (arXiv 2411.17691).

    L = [(N_c / N)^(a / b) + D_c / D]^b + k D^gamma_D / (N^gamma_N P^gamma_post)

fitted to GPTQ of Pythia; Kumar et al. have an exponential in the bits. The base is Kaplan's form: A = N_c^(a / b),
alpha = a / b, B = D_c, beta = 1, power = b, E = 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from scantling.errors import UserError
from scantling.laws.inputs import Values
from scantling.laws.law import Law, Published, scale_amplitude
from scantling.laws.optimum import critical_tokens

_ALPHA, _POWER = 0.045 / 0.399, 0.399


@dataclass(frozen=True, kw_only=True)
class PostTrainingLaw(Law):
    """The loss after quantization of the weights, a power law in their bits. Published set: ouyang.

    Attributes:
        k: amplitude of the degradation, nats × parameters^gamma_N × bits^gamma_post / tokens^gamma_D.
        gamma_D: exponent of tokens in the degradation.
        gamma_N: exponent of parameters in the degradation.
        gamma_post: exponent of bits in the degradation.
    """

    k: float
    gamma_D: float
    gamma_N: float
    gamma_post: float

    name: ClassVar[str] = "ouyang"
    VARIABLES: ClassVar[Mapping[str, float | str]] = {"post": math.inf}
    AMPLITUDES: ClassVar[Mapping[str, tuple[str, ...]]] = {**Law.AMPLITUDES, "k": ("gamma_D", "gamma_N")}
    UNITS: ClassVar[Mapping[str, str]] = {
        **Law.UNITS,
        "k": "nats × parameters^gamma_N × bits^gamma_post / tokens^gamma_D",
        **dict.fromkeys(("gamma_D", "gamma_N", "gamma_post"), "1"),
    }
    PUBLISHED: ClassVar[Mapping[str, Published]] = {
        "ouyang": Published(
            "Ouyang et al., arXiv 2411.17691, GPTQ of Pythia",
            {
                "A": 4.74e19**_ALPHA,
                "B": 7.63e10,
                "E": 0.0,
                "alpha": _ALPHA,
                "beta": 1.0,
                "power": _POWER,
                "k": 0.017,
                "gamma_D": 0.5251,
                "gamma_N": 0.2261,
                "gamma_post": 5.4967,
            },
            {"N": (1.6e8, 1.2e10), "D": (1e9, 2.06e11), "post": (2.0, 4.0)},
        ),
    }

    def loss(self, N: ArrayLike, D: ArrayLike, *, post: ArrayLike | None = None) -> Any:
        """Return the loss in nats per token.

        Args:
            N: parameters without embeddings.
            D: tokens.
            post: bits of the weights after training; None is unquantized.

        Returns:
            A float, or an array for arrays.

        Raises:
            UserError: counts or bits that are not positive numbers.
        """
        return self.checked_loss(N, D, post=post)

    def critical_tokens(self, N: float, *, post: float) -> float:
        """Return the tokens beyond which more training raises the loss after quantization; infinite if it never does.

        Args:
            N: parameters without embeddings.
            post: bits of the weights after training.
        """
        return critical_tokens(self, N, post=post)

    def in_units(self, N: float, D: float) -> Self:
        """Return the same law for counts in units of N parameters and D tokens."""
        k = scale_amplitude(self.k, self.gamma_D * np.log(D) - self.gamma_N * np.log(N))
        return super().in_units(N, D).with_constants({"k": k})

    def degradation(self, N: Any, D: Any, variables: Values) -> Any:
        """Return the power law in the bits; 0 for infinite bits."""
        post = variables["post"]
        is_quantized = np.isfinite(np.real(post))
        # Any finite number: the last line discards the result of unquantized runs.
        post = np.where(is_quantized, post, 16.0)
        exponent = self.gamma_D * np.log(D) - self.gamma_N * np.log(N) - self.gamma_post * np.log(post)
        return np.where(is_quantized, self.k * np.exp(exponent), 0.0)

    @classmethod
    def free_constants(cls, runs: Values) -> list[str]:
        """Return the constants of the base and of the degradation.

        Raises:
            UserError: no run was quantized after training.
        """
        if not np.isfinite(np.asarray(runs["post"], float)).any():
            raise UserError(
                "no run was quantized after training, which the ouyang law predicts: give a column post or, for the "
                "table of a sweep, columns={'post': 'post.*'}, on the command line --column 'post=post.*'"
            )
        return [*super().free_constants(runs), "k", "gamma_D", "gamma_N", "gamma_post"]

    @classmethod
    def initial_guesses(cls, runs: Values) -> list[dict[str, float]]:
        """Return guesses with k such that the median bits cost 0.1 nats."""
        post = np.asarray(runs["post"], float)
        median = float(np.median(post[np.isfinite(post)])) if np.isfinite(post).any() else 4.0
        exponents = {"gamma_D": 0.5, "gamma_N": 0.3}
        return [{**exponents, "gamma_post": each, "k": 0.1 * median**each} for each in (3.0, 6.0)]
