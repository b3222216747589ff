"""Precision: Kumar et al., "Scaling Laws for Precision" (arXiv 2411.04330).

    L = A N_eff^-alpha + B D^-beta + E + delta                                                    (Eq. 11)
    N_eff = N f_w f_a f_kv, f_x = 1 - exp(-P_x / gamma_x + n_x)                                   (Eq. 4, appendix K)
    delta = C_T D^gamma_D N_eff^-gamma_N exp(-P_post / gamma_post + n_post) r_w r_a r_kv,
    r_x = 1 - exp(-C_x (P_x - P_post))                                                            (Eq. 9)

P are bits in training of weights, activations and the KV cache, P_post those of the weights after it. The offsets n_x
are in one sentence of the paper's appendix, printed without the sign; with the sign here, and only then, the paper's 7
to 8 bits follow from its table 2, and f_a(3) is below 0, where its runs diverged. 16 bits go through the formula like
any other; `math.inf` is unquantised.

The paper does not print C_w, C_a, C_kv; they are 1 here, as in its Eq. 10. No factor f or r is below 0. In a fit, C_T
and exp(n_post) are one constant: n_post is held.
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
from scantling.laws.critical import critical_tokens
from scantling.laws.law import Law, Published, Values, counts, scaled

_RUNS = {"N": (3.0e7, 2.2e8), "D": (1.5e9, 2.6e10), "weights": (3.0, 16.0), "activations": (4.0, 16.0)}
_RUNS["kv_cache"] = (4.0, 16.0)
_BASE = {"A": 4.299e3, "B": 1.806e4, "E": 2.7648, "alpha": 0.4965, "beta": 0.4965}
_SHORT = {"weights": "w", "activations": "a", "kv_cache": "kv"}


@dataclass(frozen=True, kw_only=True)
class PrecisionLaw(Law):
    """The loss at the bits of weights, activations and KV cache, and after quantisation. Sets: integer, float.

    A part whose gamma is None is none of the law's: its bits cannot be asked for. The same holds for C_T and `post`.

    Attributes:
        gamma_w: bits over which the weights' loss of parameters falls e-fold, with its offset n_w.
        gamma_a: the same for activations, with n_a.
        gamma_kv: the same for the KV cache, with n_kv.
        C_T: of the degradation after training, nats × parameters^gamma_N / tokens^gamma_D.
        gamma_D: its exponent of tokens.
        gamma_N: its exponent of effective parameters.
        gamma_post: bits over which it falls e-fold, with its offset n_post.
        C_w: how a model trained at few bits loses less, 1 / bits; the same for C_a and C_kv.
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
    HELD: ClassVar[tuple[str, ...]] = ("power", "n_post", "C_w", "C_a", "C_kv")
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
            _RUNS,
        ),
        "float": Published(
            "Kumar et al., arXiv 2411.04330, appendix N: weights of floating point, counted in all their bits",
            {**_BASE, "gamma_w": 2.8111, "n_w": 0.1240},
            _RUNS,
        ),
    }

    @classmethod
    def published(cls, name: str | None = None, *, offsets: bool = True) -> Self:
        """The law with the paper's constants.

        Args:
            name: integer (the default) or float.
            offsets: whether the parts' exponentials keep their offsets n_w, n_a and n_kv.

        Raises:
            UserError: if there is no such set.
        """
        law = super().published(name)
        return law if offsets else replace(law, n_w=0.0, n_a=0.0, n_kv=0.0)

    def averaged(self) -> Self:
        """The law with the mean of its gammas, and of its offsets, in each of its parts.

        Raises:
            UserError: the law prices the bits of no part.
        """
        parts = [_SHORT[part] for part in self.parts()]
        if not parts:
            raise UserError("this law prices the bits of no part, so that there is no mean of them")
        found = self.constants()
        means = {kind: sum(found[f"{kind}_{x}"] for x in parts) / len(parts) for kind in ("gamma", "n")}
        return self.with_constants({f"{kind}_{x}": means[kind] for kind in means for x in parts})

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
        """The loss in nats a token; infinite at bits at which no parameters are left (training diverges).

        Args:
            N: parameters without embeddings.
            D: tokens.
            weights: bits of the weights in training; None or `math.inf` is unquantised.
            activations: bits of the activations in training.
            kv_cache: bits of the KV cache in training.
            post: bits of the weights after training; None leaves them as they are.

        Returns:
            A float, or an array for arrays.
        """
        return self._loss(N, D, weights=weights, activations=activations, kv_cache=kv_cache, post=post)

    def effective_parameters(
        self,
        N: ArrayLike,
        *,
        weights: ArrayLike | None = 16,
        activations: ArrayLike | None = 16,
        kv_cache: ArrayLike | None = 16,
    ) -> Any:
        """Parameters of the unquantised model that would be as good; 0 where training diverges.

        Args:
            N: parameters without embeddings.
            weights: bits of the weights in training; None or `math.inf` is unquantised.
            activations: bits of the activations in training.
            kv_cache: bits of the KV cache in training.

        Returns:
            A float, or an array for arrays.

        Raises:
            UserError: counts or bits that are no positive numbers.

        Source:
            arXiv 2411.04330, Eq. 4 and appendix K.
        """
        given = self._variables({"weights": weights, "activations": activations, "kv_cache": kv_cache})
        found = counts("N", N) * self.efficiencies(given)[0]
        return float(found) if found.ndim == 0 else found

    def critical_tokens(
        self, N: float, *, post: float, weights: float = 16, activations: float = 16, kv_cache: float = 16
    ) -> float:
        """Tokens beyond which more training makes the model worse once it is quantised; infinite where none do.

        Args:
            N: parameters without embeddings.
            post: bits of the weights after training.
            weights: bits of the weights in training.
            activations: bits of the activations in training.
            kv_cache: bits of the KV cache in training.

        Source:
            arXiv 2411.04330, Eq. 13; here the zero of the loss's own derivative.
        """
        bits = {"weights": weights, "activations": activations, "kv_cache": kv_cache, "post": post}
        return critical_tokens(self, N, **bits)

    def parts(self) -> tuple[str, ...]:
        """The parts of a model whose bits in training this law prices."""
        return tuple(part for part in self.PARTS if getattr(self, f"gamma_{_SHORT[part]}") is not None)

    def constants(self) -> dict[str, float]:
        """The constants in use, by name."""
        unused = self.unused()
        return {name: value for name, value in super().constants().items() if name not in unused}

    def unused(self) -> dict[str, str]:
        """The constants that this law does without, each with the variable of which it says nothing."""
        found = {f"n_{_SHORT[part]}": part for part in self.PARTS if part not in self.parts()}
        if self.C_T is None:
            found |= dict.fromkeys(("gamma_D", "gamma_N", "gamma_post", "n_post", "C_w", "C_a", "C_kv"), "post")
        return found

    @classmethod
    def fittable(cls, runs: Values) -> list[str]:
        """Of parts whose bits differ and are few in some, and of quantisation after training where there is some."""
        found = super().fittable(runs)
        for part, x in _SHORT.items():
            if len(np.unique(runs[part])) > 1 and np.min(runs[part]) < 16:
                found += [f"gamma_{x}", f"n_{x}"]
        if np.isfinite(np.asarray(runs["post"], float)).any():
            found += ["C_T", "gamma_D", "gamma_N", "gamma_post"]
        return found

    def in_units(self, N: float, D: float) -> Self:
        """The same law for counts in units of N parameters and D tokens."""
        law = super().in_units(N, D)
        if self.C_T is None:
            return law
        return law.with_constants({"C_T": scaled(self.C_T, self.gamma_D * np.log(D) - self.gamma_N * np.log(N))})

    def efficiencies(self, variables: Values) -> tuple[Any, Any]:
        """The product of the parts' factors, none below 0, and 1."""
        kept: Any = 1.0
        for part, x in _SHORT.items():
            gamma = getattr(self, f"gamma_{x}")
            if gamma is not None:
                kept = kept * _above_zero(_kept(variables[part], gamma, getattr(self, f"n_{x}")))
        return kept, 1.0

    def degradation(self, N: Any, D: Any, variables: Values) -> Any:
        """Eq. 9, with effective parameters."""
        post = variables["post"]
        quantised = np.isfinite(np.real(post))
        if not np.any(quantised) or self.C_T is None:
            return 0.0
        post = np.where(quantised, post, 16.0)
        shape = self.gamma_D * np.log(D) - self.gamma_N * np.log(N) - post / self.gamma_post + self.n_post
        robust: Any = 1.0
        for part, x in _SHORT.items():
            robust = robust * _above_zero(_kept(variables[part] - post, 1 / getattr(self, f"C_{x}"), 0.0))
        return np.where(quantised, self.C_T * np.exp(shape) * robust, 0.0)

    @classmethod
    def starts(cls, runs: Values) -> list[dict[str, float]]:
        """Few values of gamma and offset, the same for all parts; C_T so that the middle post bits cost 0.1 nats."""
        found = [
            {f"gamma_{x}": gamma for x in _SHORT.values()} | {f"n_{x}": offset for x in _SHORT.values()}
            for gamma, offset in product((0.7, 1.3, 2.0, 3.0), (0.0, 0.7))
        ]
        post = np.asarray(runs["post"], float)
        if np.isfinite(post).any():
            middle = float(np.median(post[np.isfinite(post)]))
            falls = [{"gamma_post": each, "C_T": 0.1 * math.exp(middle / each)} for each in (0.4, 0.7, 1.2)]
            found = [{**parts, **fall} for parts, fall in product(found, falls)]
        return found

    def _variables(self, given: Values) -> dict[str, Any]:
        found = super()._variables(given)
        for part in self.PARTS:
            if part not in self.parts() and not np.all(found[part] >= 16):
                raise UserError(
                    f"this law ({self.source}) says nothing of {part} below 16 bits; "
                    f"give constants gamma_{_SHORT[part]} and n_{_SHORT[part]}, or leave {part} at 16"
                )
        if self.C_T is None and np.isfinite(found["post"]).any():
            raise UserError(f"this law ({self.source}) says nothing of quantisation after training; leave post out")
        return found


def _above_zero(factor: Any) -> Any:
    return np.where(np.real(factor) > 0, factor, 0.0)


def _kept(bits: Any, gamma: Any, offset: Any) -> Any:
    """1 - exp(-bits / gamma + offset), 1 where bits are infinite."""
    finite = np.isfinite(np.real(bits))
    if np.all(finite):
        return 1 - np.exp(offset - bits / gamma)
    return np.where(finite, 1 - np.exp(offset - np.where(finite, bits, 16.0) / gamma), 1.0)
