"""Whitened SVD: the low-rank approximation of a weight with the smallest error of the layer's output.

Let G = X^T X / tokens be the Gram matrix of the inputs, and L L^T = G its Cholesky factorization. Then

    ‖X (W − W')‖² / tokens = ‖L^T (W − W')‖²

so the best W' of rank r keeps the r largest singular values of L^T W = U S V^T (SVD-LLM, arXiv 2403.07378, section
3.1). There W' = L^-T U_r S_r V_r^T. Since L^-T U S = W V, the same W' is

    W' = A B,    A = W V_r,    B = V_r^T

without an inverse: a Gram matrix of few tokens, which is singular, only decides the order of V. A small multiple of
the identity orders the directions that no input has by the plain SVD.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from scantling.tensor.cores import dense, tt_svd

DAMPING = 1e-4
"""Multiple of the mean diagonal of a Gram matrix that is added to its diagonal."""


class WhitenedWeight:
    """Weight of a linear layer with the Gram matrix of its inputs.

    Args:
        weight: (out, in), finite.
        gram: (in, in), finite; None for inputs with independent features, so that the errors are those of the weight.

    Attributes:
        matrix: W, (in, out), in float64.
        has_inputs: True if there is a Gram matrix.
    """

    def __init__(self, weight: Tensor, gram: Tensor | None) -> None:
        self.matrix, self.has_inputs = weight.detach().t().double(), gram is not None
        self._gram = None if gram is None or not bool(gram.any()) else gram

    @cached_property
    def factor(self) -> Tensor | None:
        """L^T with L L^T = G + damping, (in, in); None for the identity."""
        if self._gram is None:
            return None
        gram = self._gram.double()
        damping = DAMPING * gram.diagonal().mean()
        while True:
            lower: Tensor
            lower, info = torch.linalg.cholesky_ex(gram + damping * torch.eye(len(gram)).to(gram))
            if not int(info):
                return lower.t()
            damping = 10.0 * damping

    @cached_property
    def svd(self) -> tuple[Tensor, Tensor]:
        """Singular values of L^T W, (k), and its right singular vectors, (k, out), with k = min(in, out)."""
        _, values, right = torch.linalg.svd(self._whiten(self.matrix), full_matrices=False)
        return values, right

    def squared_errors(self) -> Tensor:
        """Return the squared output error per token of each rank, from 0 to k: (k + 1)."""
        # ‖X W v_i‖² for each right singular vector v_i; not s_i², which contains the damping.
        squares = self._squares(self.matrix @ self.svd[1].t())
        return torch.cat([squares.flip(0).cumsum(0).flip(0), squares.new_zeros(1)])

    def squared_norm(self) -> float:
        """Return the squared norm of the output per token."""
        return float(self._squares(self.matrix).sum())

    def squared_error(self, weight: Tensor) -> float:
        """Return the squared output error per token of an approximation, (out, in)."""
        return float(self._squares(self.matrix - weight.detach().t().double()).sum())

    def _squares(self, matrix: Tensor) -> Tensor:
        """Return the diagonal of M^T G M for M, (in, n): the squared norms of the columns of X M, per token."""
        image = matrix if self._gram is None else self._gram.double() @ matrix
        return (matrix * image).sum(0).clamp(min=0.0)

    def cores(self, in_modes: Sequence[int], out_modes: Sequence[int], ranks: Sequence[int]) -> list[Tensor]:
        """Return the cores of a tensor train that approximates the weight, in float64.

        With one input mode and one output mode they are A and B, the best of their rank. With several modes TT-SVD
        splits A, which minimizes the error of A and not that of the output. The best B for the A that results follows,
        and its TT-SVD minimizes the output error again.

        Args:
            in_modes, out_modes: modes of the chain; their products may exceed the dimensions.
            ranks: maximum ranks of all bonds, including the outer ones.
        """
        (in_features, out_features), middle = self.matrix.shape, len(in_modes)
        values, right = self.svd
        # Numerical rank: singular values at the level of rounding errors are noise.
        rank = min(ranks[middle], max(1, int((values > values[0] * torch.finfo(values.dtype).eps).sum())))
        # A = W V_r as (input modes..., r)
        a = nn.functional.pad(self.matrix @ right[:rank].t(), (0, 0, 0, prod(in_modes) - in_features))
        shapes = [*((mode,) for mode in in_modes[:-1]), (in_modes[-1], rank)]
        inputs = tt_svd(a.reshape(*in_modes, rank), shapes, (*ranks[:middle], 1))
        # With L^T A = Q R and C = Q^T L^T W, B = R^-1 C is the best for this A, and an error of C is one of the output.
        q, r = torch.linalg.qr(self._whiten(dense(inputs).reshape(-1, rank)[:in_features]))
        c = nn.functional.pad(q.t() @ self._whiten(self.matrix), (0, prod(out_modes) - out_features))
        shapes = [(rank, out_modes[0]), *((mode,) for mode in out_modes[1:])]
        outputs = tt_svd(c.reshape(rank, *out_modes), shapes, (1, *ranks[middle + 1 :]))
        last, first = inputs[-1].squeeze(-1), outputs[0].squeeze(0)
        first = torch.linalg.solve_triangular(r, first.flatten(1), upper=True).reshape(first.shape)
        # Equal norms on both sides of each rank, as in a plain SVD.
        tiny = torch.finfo(first.dtype).tiny
        scale = last.flatten(0, -2).norm(dim=0).clamp(min=tiny) / first.flatten(1).norm(dim=1).clamp(min=tiny)
        return [*inputs[:-1], last / scale.sqrt(), first * scale.sqrt().view(-1, 1, 1), *outputs[1:]]

    def _whiten(self, matrix: Tensor) -> Tensor:
        return matrix if self.factor is None else self.factor @ matrix
