"""Triton kernels and device functions that the methods share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_one(value):
    """Add 1 to a value: the smallest kernel, to test whether kernels can be compiled and run."""
    tl.store(value, tl.load(value) + 1.0)


@triton.jit
def pointer(table, entry, kind: tl.constexpr, aligned: tl.constexpr):
    """Return a pointer to the tensor, of dtype `kind`, whose address is in an entry of a table.

    The pointer is an offset from the table, whose address the compiler knows to be aligned. It drops alignment hints
    for pointers made from integers, and would then load one element at a time.
    """
    bytes: tl.constexpr = kind.primitive_bitwidth // 8
    offset = tl.load(entry) - table.to(tl.int64)
    if bytes > 1:
        offset = offset // bytes
    if aligned:
        offset = tl.multiple_of(offset, 16 // bytes)
    return table.to(tl.pointer_type(kind)) + offset
