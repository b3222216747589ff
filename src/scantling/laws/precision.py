"""Precision law: Kumar et al., "Scaling Laws for Precision" (arXiv 2411.04330).

    L = A N_eff^-alpha + B D^-beta + E + delta                                                    (Eq. 11)
    N_eff = N f_w f_a f_kv, f_x = 1 - exp(-P_x / gamma_x + n_x)                                   (Eq. 4, appendix K)
    delta = C_T D^gamma_D N_eff^-gamma_N exp(-P_post / gamma_post + n_post) r_w r_a r_kv,
    r_x = 1 - exp(-C_x (P_x - P_post))                                                            (Eq. 9)

P_x are the training bits of weights, activations and KV cache, P_post the bits of the weights after training. The
paper's appendix mentions the offsets n_x in one sentence, without the sign. Only with this sign do its 7 to 8 bits
follow from its table 2, and only then is f_a(3) below 0, where its runs diverged. 16 bits go through the formula like
any other number; `math.inf` is unquantized.

The paper does not print C_w, C_a, C_kv; they are 1 here, as in its Eq. 10. Factors f and r below 0 become 0. In a fit,
C_T and exp(n_post) are one constant: n_post is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from scantling.errors import UserError
from scantling.laws.inputs import FULL_PRECISION, Values, check_counts, float_or_array
from scantling.laws.law import Law, Published, scale_amplitude
from scantling.laws.optimum import critical_tokens

_RANGES = {
    "N": (3.0e7, 2.2e8),
    "D": (1.5e9, 2.6e10),
    "weights": (3.0, 16.0),
    "activations": (4.0, 16.0),
    "kv_cache": (4.0, 16.0),
}
_BASE = {"A": 4.299e3, "B": 1.806e4, "E": 2.7648, "alpha": 0.4965, "beta": 0.4965}
_SUFFIXES = {"weights": "w", "activations": "a", "kv_cache": "kv"}
"""Suffix of the constants of each part."""


@dataclass(frozen=True, kw_only=True)
class PrecisionLaw(Law):
    """The loss by bits of weights, activations and KV cache, and after quantization. Published sets: integer, float.

    A part whose gamma is None is not modeled, and its bits are refused. The same holds for C_T and `post`.

    Attributes:
        gamma_w: bits over which the lost share of parameters falls e-fold, for weights, with the offset n_w.
        gamma_a: the same for activations, with n_a.
        gamma_kv: the same for the KV cache, with n_kv.
        C_T: amplitude of the degradation after training, nats × parameters^gamma_N / tokens^gamma_D.
        gamma_D: exponent of tokens in the degradation.
        gamma_N: exponent of effective parameters in the degradation.
        gamma_post: bits over which the degradation falls e-fold, with the offset n_post.
        C_w: robustness of a model trained at low precision, 1 / bits; the same for C_a and C_kv.
    """

    gamma_w: float | None = None
    n_w: float = 0.0
    gamma_a: float | None = None
    n_a: float = 0.0
    gamma_kv: float | None = None
    n_kv: float = 0.0
    C_T: float | None = None
    gamma_D: float = 0.5
    gamma_N: float = 0.35
    gamma_post: float = 0.6
    n_post: float = 0.0
    C_w: float = 1.0
    C_a: float = 1.0
    C_kv: float = 1.0

    name: ClassVar[str] = "kumar"
    VARIABLES: ClassVar[Mapping[str, float | str]] = {
        "weights": 16.0,
        "activations": 16.0,
        "kv_cache": 16.0,
        "post": math.inf,
    }
    PARTS: ClassVar[tuple[str, ...]] = ("weights", "activations", "kv_cache")
    OFFSETS: ClassVar[Mapping[str, str]] = {f"n_{x}": f"gamma_{x}" for x in ("w", "a", "kv", "post")}
    AMPLITUDES: ClassVar[Mapping[str, tuple[str, ...]]] = {**Law.AMPLITUDES, "C_T": ("gamma_D", "gamma_N")}
    UNITS: ClassVar[Mapping[str, str]] = {
        **Law.UNITS,
        **{f"gamma_{x}": "bits" for x in ("w", "a", "kv", "post")},
        **{f"n_{x}": "1" for x in ("w", "a", "kv", "post")},
        "C_T": "nats × parameters^gamma_N / tokens^gamma_D",
        "gamma_D": "1",
        "gamma_N": "1",
        **{f"C_{x}": "1 / bits" for x in ("w", "a", "kv")},
    }
    PUBLISHED: ClassVar[Mapping[str, Published]] = {
        "integer": Published(
            "Kumar et al., arXiv 2411.04330, table 2",
            {
                **_BASE,
                "gamma_w": 2.6745,
                "n_w": 0.3037,
                "gamma_a": 2.2102,
                "n_a": 1.4072,
                "gamma_kv": 0.9578,
                "n_kv": 2.4185,
                "C_T": 0.0598,
                "gamma_D": 0.5068,
                "gamma_N": 0.3439,
                "gamma_post": 0.5907,
                "n_post": 1.1277,
            },
            _RANGES,
        ),
        "float": Published(
            "Kumar et al., arXiv 2411.04330, appendix N: weights of floating point, counted in all their bits",
            {**_BASE, "gamma_w": 2.8111, "n_w": 0.1240},
            _RANGES,
        ),
    }

    @classmethod
    def published(cls, name: str | None = None, *, offsets: bool = True) -> Self:
        """Return the law with the paper's constants.

        Args:
            name: integer (the default) or float.
            offsets: False sets the offsets n_w, n_a and n_kv to 0.

        Raises:
            UserError: if there is no such set.
        """
        law = super().published(name)
        return law if offsets else replace(law, n_w=0.0, n_a=0.0, n_kv=0.0)

    def averaged(self) -> Self:
        """Return the law with the mean gamma and the mean offset in each of its parts.

        Raises:
            UserError: the law models no part.
        """
        suffixes = [_SUFFIXES[part] for part in self.modeled_parts()]
        if not suffixes:
            raise UserError("this law models the bits of no part, so there is nothing to average; give a gamma")
        constants = self.constants()
        means = {kind: sum(constants[f"{kind}_{x}"] for x in suffixes) / len(suffixes) for kind in ("gamma", "n")}
        return self.with_constants({f"{kind}_{x}": means[kind] for kind in means for x in suffixes})

    def loss(
        self,
        N: ArrayLike,
        D: ArrayLike,
        *,
        weights: ArrayLike | None = 16,
        activations: ArrayLike | None = 16,
        kv_cache: ArrayLike | None = 16,
        post: ArrayLike | None = None,
    ) -> Any:
        """Return the loss in nats per token; infinite at bits that leave no effective parameters (training diverges).

        Args:
            N: parameters without embeddings.
            D: tokens.
            weights: training bits of the weights; None or `math.inf` is unquantized.
            activations: training bits of the activations.
            kv_cache: training bits of the KV cache.
            post: bits of the weights after training; None is unquantized.

        Returns:
            A float, or an array for arrays.
        """
        return self.checked_loss(N, D, weights=weights, activations=activations, kv_cache=kv_cache, post=post)

    def effective_parameters(
        self,
        N: ArrayLike,
        *,
        weights: ArrayLike | None = 16,
        activations: ArrayLike | None = 16,
        kv_cache: ArrayLike | None = 16,
    ) -> Any:
        """Return the parameters of an unquantized model with the same loss; 0 if training diverges.

        Args:
            N: parameters without embeddings.
            weights: training bits of the weights; None or `math.inf` is unquantized.
            activations: training bits of the activations.
            kv_cache: training bits of the KV cache.

        Returns:
            A float, or an array for arrays.

        Raises:
            UserError: counts or bits that are not positive numbers.

        Source:
            arXiv 2411.04330, Eq. 4 and appendix K.
        """
        given = self.parse_variables({"weights": weights, "activations": activations, "kv_cache": kv_cache})
        return float_or_array(check_counts("N", N) * self.efficiencies(given)[0])

    def critical_tokens(
        self, N: float, *, post: float, weights: float = 16, activations: float = 16, kv_cache: float = 16
    ) -> float:
        """Return the tokens beyond which more training raises the loss after quantization; infinite if it never does.

        Args:
            N: parameters without embeddings.
            post: bits of the weights after training.
            weights: training bits of the weights.
            activations: training bits of the activations.
            kv_cache: training bits of the KV cache.

        Source:
            arXiv 2411.04330, Eq. 13; here the root of the derivative of the loss.
        """
        bits = {"weights": weights, "activations": activations, "kv_cache": kv_cache, "post": post}
        return critical_tokens(self, N, **bits)

    def modeled_parts(self) -> tuple[str, ...]:
        """Return the parts with a gamma."""
        return tuple(part for part in self.PARTS if getattr(self, f"gamma_{_SUFFIXES[part]}") is not None)

    def constants(self) -> dict[str, float]:
        """Return the constants that this law uses, by name."""
        inactive = self.inactive_constants()
        return {name: value for name, value in super().constants().items() if name not in inactive}

    def inactive_constants(self) -> dict[str, str]:
        """Return the offsets of parts that are not modeled, and without C_T the constants of the degradation."""
        inactive = {f"n_{_SUFFIXES[part]}": part for part in self.PARTS if part not in self.modeled_parts()}
        if self.C_T is None:
            inactive |= dict.fromkeys(("gamma_D", "gamma_N", "gamma_post", "n_post", "C_w", "C_a", "C_kv"), "post")
        return inactive

    @classmethod
    def free_constants(cls, runs: Values) -> list[str]:
        """Return the constants of the base, of parts at different bits, and of quantization after training."""
        names = super().free_constants(runs)
        for part, x in _SUFFIXES.items():
            # Runs with equal bits of a part do not identify its gamma.
            if len(np.unique(runs[part])) > 1 and np.min(runs[part]) < FULL_PRECISION:
                names += [f"gamma_{x}", f"n_{x}"]
        if np.isfinite(np.asarray(runs["post"], float)).any():
            names += ["C_T", "gamma_D", "gamma_N", "gamma_post"]
        return names

    def in_units(self, N: float, D: float) -> Self:
        """Return the same law for counts in units of N parameters and D tokens."""
        law = super().in_units(N, D)
        if self.C_T is None:
            return law
        C_T = scale_amplitude(self.C_T, self.gamma_D * np.log(D) - self.gamma_N * np.log(N))
        return law.with_constants({"C_T": C_T})

    def efficiencies(self, variables: Values) -> tuple[Any, Any]:
        """Return f_w f_a f_kv of Eq. 4, and 1."""
        eff_N: Any = 1.0
        for part, x in _SUFFIXES.items():
            gamma = getattr(self, f"gamma_{x}")
            if gamma is not None:
                eff_N = eff_N * _saturating_factor(variables[part], gamma, getattr(self, f"n_{x}"))
        return eff_N, 1.0

    def degradation(self, N: Any, D: Any, variables: Values) -> Any:
        """Return delta of Eq. 9."""
        post = variables["post"]
        is_quantized = np.isfinite(np.real(post))
        if not np.any(is_quantized) or self.C_T is None:
            return 0.0
        # Any finite number: the last line discards the result of unquantized runs.
        post = np.where(is_quantized, post, 16.0)
        exponent = self.gamma_D * np.log(D) - self.gamma_N * np.log(N) - post / self.gamma_post + self.n_post
        robustness: Any = 1.0  # r_w r_a r_kv
        for part, x in _SUFFIXES.items():
            robustness = robustness * _saturating_factor(variables[part] - post, 1 / getattr(self, f"C_{x}"), 0.0)
        return np.where(is_quantized, self.C_T * np.exp(exponent) * robustness, 0.0)

    @classmethod
    def initial_guesses(cls, runs: Values) -> list[dict[str, float]]:
        """Return a grid of gamma and offset, the same for all parts; with C_T the median post bits cost 0.1 nats."""
        guesses = [
            {f"gamma_{x}": gamma for x in _SUFFIXES.values()} | {f"n_{x}": offset for x in _SUFFIXES.values()}
            for gamma, offset in product((0.7, 1.3, 2.0, 3.0), (0.0, 0.7))
        ]
        post = np.asarray(runs["post"], float)
        if np.isfinite(post).any():
            median = float(np.median(post[np.isfinite(post)]))
            degradations = [{"gamma_post": each, "C_T": 0.1 * math.exp(median / each)} for each in (0.4, 0.7, 1.2)]
            guesses = [{**parts, **degradation} for parts, degradation in product(guesses, degradations)]
        return guesses

    def parse_variables(self, given: Values) -> dict[str, Any]:
        """Return all variables; refuse bits of parts that are not modeled."""
        variables = super().parse_variables(given)
        for part in self.PARTS:
            if part not in self.modeled_parts() and not np.all(variables[part] >= FULL_PRECISION):
                raise UserError(
                    f"this law ({self.source}) does not model {part} below 16 bits; "
                    f"give constants gamma_{_SUFFIXES[part]} and n_{_SUFFIXES[part]}, or leave {part} at 16"
                )
        if self.C_T is None and np.isfinite(variables["post"]).any():
            raise UserError(f"this law ({self.source}) does not model quantization after training; leave post out")
        return variables


def _saturating_factor(bits: Any, gamma: Any, offset: Any) -> Any:
    """Return 1 - exp(-bits / gamma + offset), at least 0, and 1 for infinite bits."""
    is_finite = np.isfinite(np.real(bits))
    factor = np.where(is_finite, 1 - np.exp(offset - np.where(is_finite, bits, 16.0) / gamma), 1.0)
    # Compare real parts: a complex step has its derivative in the imaginary part.
    return np.where(np.real(factor) > 0, factor, 0.0)
