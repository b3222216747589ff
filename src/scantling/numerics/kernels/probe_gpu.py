"""Smallest possible kernel, to test whether kernels can be compiled and run."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_one(value):
    tl.store(value, tl.load(value) + 1.0)
