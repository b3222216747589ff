"""Addresses in tables as pointers, for kernels in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pointer(table, entry, kind: tl.constexpr, aligned: tl.constexpr):
    """Where the tensor begins whose address is in an entry of a table, of numbers of this kind.

    As an offset from the table, whose own address the compiler knows to be aligned: it forgets what it was told of one
    that is made of an integer, and then reads one number at a time.
    """
    bytes: tl.constexpr = kind.primitive_bitwidth // 8
    offset = tl.load(entry) - table.to(tl.int64)
    if bytes > 1:
        offset = offset // bytes
    if aligned:
        offset = tl.multiple_of(offset, 16 // bytes)
    return table.to(tl.pointer_type(kind)) + offset
