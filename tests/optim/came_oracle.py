"""Oracle: CAME in numpy and float64, from the paper's equations, one matrix at a time, sharing no code with src."""

from __future__ import annotations

from math import prod, sqrt
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


class Oracle:
    """One parameter and its optimizer state.

    Args:
        param: initial value.
        view: (row dims, column dims), or None for a full second moment.
    """

    def __init__(
        self,
        param: Array,
        view: tuple[tuple[int, ...], tuple[int, ...]] | None,
        *,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
        debias: bool = False,
        maximize: bool = False,
        confidence: bool = True,
    ) -> None:
        self.shape, self.view = param.shape, view
        self.betas, self.eps, self.clip = betas, eps, clip_threshold
        self.weight_decay, self.debias, self.maximize = weight_decay, debias, maximize
        self.confidence = confidence and betas[0] > 0.0
        self.step_count = 0
        if view is not None:
            rows, cols = view
            self.order = [d for d in range(param.ndim) if d not in rows + cols] + list(rows + cols)
            self.sizes = (-1, prod(param.shape[d] for d in rows), prod(param.shape[d] for d in cols))
            self.param = self.matrices(param)
            self.r, self.c = np.zeros(self.param.shape[:2]), np.zeros(self.param.shape[::2])
            self.s, self.k = np.zeros_like(self.r), np.zeros_like(self.c)
        else:
            self.param = param.copy()
            self.v = np.zeros_like(param)
        self.m = np.zeros_like(self.param)

    def matrices(self, x: Array) -> Array:
        """Return the parameter as a stack of matrices: (batch, rows, columns)."""
        return x.transpose(self.order).reshape(self.sizes).copy()

    def value(self) -> Array:
        if self.view is None:
            return self.param
        moved = self.param.reshape([self.shape[d] for d in self.order])
        return moved.transpose(np.argsort(self.order))

    def correction(self, beta: float) -> float:
        return 1.0 - beta**self.step_count if self.debias else 1.0

    def step(self, grad: Array, lr: float) -> None:
        (b1, b2, b3), (e1, e2) = self.betas, self.eps
        self.step_count += 1
        g = -grad if self.maximize else grad
        g = g if self.view is None else self.matrices(g)

        if self.view is None:
            self.v = b2 * self.v + (1 - b2) * (g**2 + e1)
            u = g / np.sqrt(self.v / self.correction(b2))
        else:
            u = np.empty_like(g)
            for i, matrix in enumerate(g):
                self.r[i] = b2 * self.r[i] + (1 - b2) * (matrix**2 + e1).mean(axis=1)
                self.c[i] = b2 * self.c[i] + (1 - b2) * (matrix**2 + e1).mean(axis=0)
                r, c = self.r[i] / self.correction(b2), self.c[i] / self.correction(b2)
                u[i] = matrix / np.sqrt(np.outer(r, c) / r.mean())

        u = u / max(1.0, sqrt((u**2).sum() / u.size) / self.clip)
        self.m = b1 * self.m + (1 - b1) * u
        update = self.m / self.correction(b1)
        if self.view is not None and self.confidence:
            for i in range(len(u)):
                instability = (u[i] - self.m[i]) ** 2 + e2
                self.s[i] = b3 * self.s[i] + (1 - b3) * instability.mean(axis=1)
                self.k[i] = b3 * self.k[i] + (1 - b3) * instability.mean(axis=0)
                s, k = self.s[i] / self.correction(b3), self.k[i] / self.correction(b3)
                update[i] = update[i] / np.sqrt(np.outer(s, k) / s.mean())
        self.param = self.param * (1 - lr * self.weight_decay) - lr * update
