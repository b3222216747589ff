"""Stateless randomness: a function of its inputs, the same on every machine and with every version of NumPy.

It determines the order of the data, the held-out split and the masks of masked LM, so that a resumed run sees the
same data as an uninterrupted one.

Source: splitmix64, Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]


def fingerprint(value: Any) -> str:
    """Return a hex digest of a JSON value; equal for equal values, independent of key order."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def fingerprint_array(values: npt.NDArray[Any]) -> str:
    """Return a hex digest of an array's content."""
    return hashlib.sha256(np.ascontiguousarray(values).data).hexdigest()[:40]


def key64(*parts: int | str) -> int:
    """Return a 64-bit key from integers and names, such as `key64("epoch", seed, epoch)`."""
    # The unit separator keeps ("ab", "c") and ("a", "bc") apart.
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix64(values: npt.ArrayLike, key: int = 0) -> UInt64s:
    """Scramble 64-bit integers with a key. This is a bijection, so different inputs have different outputs."""
    x = np.array(values, dtype=np.uint64)
    # uint64 wraps modulo 2^64 on purpose.
    with np.errstate(over="ignore"):
        # One step of splitmix64, with its constants; the key is mixed in first.
        x = (x ^ np.uint64(key)) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: UInt64s = x ^ (x >> np.uint64(31))
    return result


def uniform(values: npt.ArrayLike, key: int = 0) -> npt.NDArray[np.float64]:
    """Return floats in [0, 1), one per input."""
    # A double has 53 bits: keep the upper 53 of 64, so that the result is exact and below 1.
    return (mix64(values, key) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(size: int, key: int) -> npt.NDArray[np.int64]:
    """Return the integers 0 .. size-1, sorted by their hashes."""
    # `mix64` is a bijection, so no two integers have equal hashes.
    return np.argsort(mix64(np.arange(size, dtype=np.uint64), key), kind="stable")
