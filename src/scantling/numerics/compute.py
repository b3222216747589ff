"""Compute format of a run: the dtype of matrix products, while the weights stay in fp32."""

from __future__ import annotations

import logging
import platform
from contextlib import AbstractContextManager, nullcontext

import torch

from scantling.numerics.torch_private import cpu_has_matmul

logger = logging.getLogger(__name__)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(compute: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of a forward pass: none for "fp32", autocast for "bf16" and "fp16"."""
    return nullcontext() if compute == "fp32" else torch.autocast(device.type, dtype=_DTYPES[compute])


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that turns autocast off; none on the meta device, which has no autocast."""
    off = device.type == "meta" or not torch.is_autocast_enabled(device.type)
    return nullcontext() if off else torch.autocast(device.type, enabled=False)


def has_products(compute: str, device: torch.device) -> bool:
    """True if a device has instructions for products of a format; without them a CPU is far slower than in fp32.

    Args:
        compute: "fp32", "bf16", "fp16", "int8" or "fp8".
    """
    if compute == "fp8":
        return device.type != "cpu"
    if compute == "fp32" or device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return True
    if compute == "int8":
        is_known = platform.machine() in ("x86_64", "AMD64")
        return not is_known or cpu_has_matmul("int8")
    return cpu_has_matmul(compute)


def warn_of_slow_products(compute: str, device: torch.device, advice: str) -> None:
    """Log a warning with advice if a device has no instructions for products of a format."""
    if not has_products(compute, device):
        text = "this CPU has no instructions for products in %s, which take longer than in fp32, often many times: %s"
        logger.warning(text, compute, advice)
